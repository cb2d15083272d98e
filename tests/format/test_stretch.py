"""Small frames taken together give the records that each of them gives by itself."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Corrupt
from forebay.format.columns.rows import Row, encode_rows
from forebay.format.control.frames import encode_mark
from forebay.format.frame.batch import Batch, decode, encode_data_frame
from forebay.format.frame.head import Kind
from forebay.format.frame.scan import scan_frames
from forebay.format.frame.small_frames import batches_of
from forebay.records import Record, Run

SALT = 99
LIMIT = 1 << 20

_values = st.one_of(st.none(), st.binary(max_size=20), st.just(b"same"))
_rows: st.SearchStrategy[Row] = st.tuples(
    st.one_of(st.just(b"value"), _values),
    st.one_of(st.none(), st.just(b"key"), st.binary(max_size=9)),
    st.one_of(st.none(), st.just("tag"), st.text(min_size=1, max_size=5)),
    st.one_of(st.just(()), st.just((("name", b"content"),))),
    st.integers(-(2**40), 2**40),
)
_frames = st.tuples(
    st.lists(_rows, min_size=1, max_size=3), st.sampled_from([1, 2, 17, 18]), st.sampled_from(["plain", "run", "gap"])
)


@given(st.lists(_frames, min_size=1, max_size=6))
def test_any_frames_give_the_same_records_taken_together(shapes: list[tuple[list[Row], int, str]]) -> None:
    log, base = b"", 5
    for rows, times, kind in shapes:
        base += 3 if kind == "gap" else 0
        runs = [Run(len(rows), 7, base)] if kind == "run" else []
        for _ in range(times):
            log += _frame(base, rows, runs, appended_at=base // 7)
            base += len(rows)
        log += encode_mark(clean=False, salt_crc=SALT, next_offset=base, epoch=1, durable=0, appended_at=base)

    table = scan_frames(log, 0, SALT, LIMIT).table
    found = list(batches_of(log, table))

    alone = _one_by_one(log)
    assert _records(batch for batch, _ in found) == _records(alone)
    assert _times(batch for batch, _ in found) == [batch.appended_at for batch in alone for _ in range(batch.count)]
    assert sum(length for _, length in found) == int(table.length[table.kind == int(Kind.DATA)].sum())


def test_a_stretch_becomes_one_batch_that_is_knows_when_each_of_its_frames_was_appended() -> None:
    row: Row = (b"v" * 100, b"key", "tag", (), 17)
    log = b"".join(_frame(base, [row], [], appended_at=base // 50) for base in range(110, 210))

    ((batch, length),) = batches_of(log, scan_frames(log, 0, SALT, LIMIT).table)

    assert (batch.base, batch.end, batch.epoch, batch.appended_at, length) == (110, 210, 1, 4, len(log))
    assert batch.records(3) == [Record(3, offset, 17, b"key", b"v" * 100, "tag") for offset in range(110, 210)]
    assert batch.appended() == [(40, 2), (50, 3), (10, 4)]
    assert batch.slice(149, 151).appended() == [(1, 2), (1, 3)]


def test_a_gap_and_a_change_of_epoch_part_batches() -> None:
    row: Row = (b"v", None, None, (), 0)
    log = b"".join(_frame(base, [row], [], epoch=1 if base < 40 else 2) for base in [*range(20), *range(21, 80)])

    found = [batch for batch, _ in batches_of(log, scan_frames(log, 0, SALT, LIMIT).table)]

    assert [(batch.base, batch.end, batch.epoch) for batch in found] == [(0, 20, 1), (21, 40, 1), (40, 80, 2)]


@pytest.mark.parametrize("place", [56, 60, 63])
def test_columns_that_do_not_fit_their_frame_are_refused(place: int) -> None:
    frames = [bytearray(_frame(base, [(b"value", None, None, (), 0)], [])) for base in range(50)]
    table = scan_frames(b"".join(frames), 0, SALT, LIMIT).table

    frames[30][place] ^= 0x40

    with pytest.raises(Corrupt):
        list(batches_of(b"".join(frames), table))


def _frame(base: int, rows: list[Row], runs: list[Run], *, epoch: int = 1, appended_at: int = 0) -> bytes:
    frame = encode_data_frame(
        salt_crc=SALT,
        base=base,
        epoch=epoch,
        durable=0,
        appended_at=appended_at,
        runs=runs,
        columns=encode_rows(rows),
        zstd_level=None,
    )
    return bytes(frame)


def _one_by_one(log: bytes) -> list[Batch]:
    scan = scan_frames(log, 0, SALT, LIMIT)
    return [
        decode(log, position, head)
        for position, head in zip(scan.positions, scan.heads, strict=True)
        if head.kind == Kind.DATA
    ]


def _records(batches: Iterable[Batch]) -> list[Record]:
    return [record for batch in batches for record in batch.records(0)]


def _times(batches: Iterable[Batch]) -> list[int]:
    """When each record was appended."""
    return [run.at for batch in batches for run in batch.appended() for _ in range(run.records)]
