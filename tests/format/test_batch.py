"""Batches give back what was stored, sliced or merged in any way, and survive hostile bytes."""

from __future__ import annotations

import contextlib
import struct
import threading

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import Corrupt
from forebay.format.columns.rows import Columns, Row, encode_columns, encode_rows
from forebay.format.columns.times import Appended
from forebay.format.frame.batch import Batch, batch_of, decode, encode_data_frame, merge
from forebay.format.frame.encoding import close_frame, encode_frame, runs_of
from forebay.format.frame.head import Codec, FrameHead, Kind
from forebay.records import Bytes, Run
from tests.format.samples import FULL_ROWS, ONE_ROW, PLAIN_ROW, ROW, ROWS, SALT_CRC, frame_of, head_of, row_of, whole

_MIXED = st.lists(st.tuples(ROW | PLAIN_ROW, st.sampled_from([1, 1, 2, 20, 40])), min_size=1, max_size=5)


def _batch(rows: list[Row], base: int = 7, zstd_level: int | None = None) -> Batch:
    frame = frame_of(rows, base=base, zstd_level=zstd_level)
    return decode(frame, 0, head_of(frame))


def _rows(batch: Batch) -> list[Row]:
    return [row_of(record) for record in batch.records(3)]


@given(ROWS, st.sampled_from([None, 1, 3]), st.sampled_from([bytes, bytearray, memoryview]))
def test_records_come_back_as_they_were(rows: list[Row], zstd_level: int | None, kind: type[Bytes]) -> None:
    frame = frame_of(rows, zstd_level=zstd_level, runs=(Run(len(rows), 1, 2),))
    buffer = kind(b"\0" * 8 + frame)

    batch = decode(buffer, 8, head_of(frame))
    records = batch.records(3)

    assert [row_of(record) for record in records] == rows
    assert [(record.partition, record.offset) for record in records] == [(3, 7 + i) for i in range(len(rows))]
    assert (batch.base, batch.end, batch.count) == (7, 7 + len(rows), len(rows))
    assert (batch.epoch, batch.appended_at) == (3, 1_700_000_000_123)
    assert batch.values() == [row[0] for row in rows]
    assert batch.timestamps().tolist() == [row[4] for row in rows]


@pytest.mark.parametrize("size", [0, 1, 100, 5000])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_values_of_one_length_come_back_as_they_were(size: int, count: int) -> None:
    rows: list[Row] = [(bytes([i]) * size, b"%03d" % i, "tag", (), i) for i in range(count)]

    assert _rows(_batch(rows)) == rows
    assert _rows(_batch(rows).slice(8, 7 + count)) == rows[1:] if count > 1 else True


@given(ROWS, st.integers(0, 40), st.integers(1, 40))
def test_slice_holds_the_records_of_its_offsets(rows: list[Row], first: int, length: int) -> None:
    first %= len(rows)
    batch = _batch(rows)

    part = batch.slice(7 + first, 7 + first + length)

    assert _rows(part) == rows[first : first + length]
    assert part.base == 7 + first
    assert part.end == min(7 + len(rows), 7 + first + length)
    assert whole(part.columns_bytes()) == whole(encode_rows(rows[first : first + length]))


@given(ROWS)
def test_slice_of_a_slice_is_a_slice(rows: list[Row]) -> None:
    batch = _batch(rows * 3)

    part = batch.slice(0, batch.end - 1).slice(batch.base + 1, 2**63)

    assert _rows(part) == (rows * 3)[1:-1]


@given(_MIXED, st.booleans())
def test_merge_gives_the_bytes_of_encoding_all_at_once(shapes: list[tuple[Row, int]], compressed: bool) -> None:  # noqa: FBT001
    level = 1 if compressed else None
    batches = [_batch([row] * count, zstd_level=level) for row, count in shapes]
    rows = [row for row, count in shapes for _ in range(count)]

    merged = merge(batches)

    at_once = encode_rows(rows)
    assert whole(merged) == whole(at_once)
    assert (merged.flags, merged.count, merged.size) == (at_once.flags, at_once.count, at_once.size)
    assert (merged.time_min, merged.time_max) == (at_once.time_min, at_once.time_max)


@given(ROWS, st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_merging_the_slices_of_a_batch_gives_the_batch(rows: list[Row], lengths: list[int]) -> None:
    rows = rows * 6
    batch = _batch(rows)
    parts, start = [], batch.base
    for length in [*lengths, len(rows)]:
        if start < batch.end:
            parts.append(batch.slice(start, start + length))
            start = parts[-1].end

    assert whole(merge(parts)) == whole(encode_rows(rows))


def test_whole_batch_gives_its_columns_without_a_copy() -> None:
    batch = _batch(FULL_ROWS * 20)

    assert len(batch.columns_bytes().parts) == 1
    assert isinstance(batch.columns_bytes().parts[0], memoryview)


@given(ROWS)
def test_batch_of_columns_needs_no_frame(rows: list[Row]) -> None:
    batch = batch_of(encode_rows(rows), base=9, epoch=2, appended_at=5)

    assert _rows(batch) == rows
    assert (batch.base, batch.epoch, batch.appended_at) == (9, 2, 5)


@given(ROWS)
def test_columns_of_a_batch_encode_to_the_same_bytes(rows: list[Row]) -> None:
    assert whole(encode_columns(_batch(rows).columns())) == whole(encode_rows(rows))


def test_compression_is_kept_only_where_it_is_smaller() -> None:
    assert head_of(frame_of(ONE_ROW, zstd_level=1)).codec == Codec.NONE
    assert head_of(frame_of([(b"x" * 1000, None, None, (), 0)], zstd_level=1)).codec == Codec.ZSTD
    assert frame_of(ONE_ROW, zstd_level=1) == frame_of(ONE_ROW)


def test_threads_compress_beside_each_other() -> None:
    rows: list[Row] = [(b"value %d" % (i % 7), None, None, (), i) for i in range(500)]
    expected = frame_of(rows, zstd_level=1)
    wrong: list[int] = []

    def work() -> None:
        for _ in range(50):
            frame = frame_of(rows, zstd_level=1)
            if frame != expected or _rows(decode(frame, 0, head_of(frame))) != rows:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _compressed(prefix: tuple[int, int], stored: bytes, count: int = 1) -> bytes:
    return encode_frame(
        salt_crc=SALT_CRC,
        base=7,
        kind=Kind.DATA,
        codec=Codec.ZSTD,
        columns=0,
        count=count,
        epoch=1,
        durable=0,
        appended_at=0,
        runs=(),
        payload=[struct.pack("<II", *prefix), stored, bytes(-len(stored) % 8)],
    )


_RAW = whole(encode_rows(ONE_ROW))
_STORED = zstandard.ZstdCompressor().compress(_RAW)


def _without_size() -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(_RAW)


@pytest.mark.parametrize(
    ("prefix", "stored"),
    [
        ((len(_RAW) + 8, len(_STORED)), _STORED),
        ((len(_RAW) - 8, len(_STORED)), _STORED),
        ((2**32 - 1, len(_STORED)), _STORED),
        ((64 * 1024 * 1024 + 1, len(_STORED)), _STORED),
        ((len(_RAW), len(_STORED) - 1), _STORED),
        ((len(_RAW), len(_STORED) + 100), _STORED),
        ((len(_RAW), 2**32 - 1), _STORED),
        ((len(_RAW), len(_STORED)), bytes(len(_STORED))),
        ((len(_RAW), len(_STORED) + 1), _STORED + b"x"),
        ((len(_RAW), len(_without_size())), _without_size()),
        ((0, 0), b""),
    ],
)
def test_compressed_columns_that_are_not_what_they_claim_are_corrupt(prefix: tuple[int, int], stored: bytes) -> None:
    frame = _compressed(prefix, stored)

    with pytest.raises(Corrupt):
        decode(frame, 0, head_of(frame)).records(0)


def test_honest_compressed_columns_are_read() -> None:
    frame = _compressed((len(_RAW), len(_STORED)), _STORED)

    assert _rows(decode(frame, 0, head_of(frame))) == ONE_ROW


def test_small_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(128 * 1024 * 1024))
    frame = _compressed((len(_RAW), len(bomb)), bomb)

    with pytest.raises(Corrupt, match="does not hold"):
        decode(frame, 0, head_of(frame))


def test_data_frame_without_records_or_with_impossible_offsets_is_corrupt() -> None:
    empty = close_frame(SALT_CRC, 7, struct.pack("<BBBBIIIQq", 1, 0, 0, 0, 0, 1, 0, 0, 0))
    beyond = frame_of(ONE_ROW, base=2**63 - 1)

    for frame in (empty, beyond):
        with pytest.raises(Corrupt):
            decode(frame, 0, head_of(frame))


def _look_at_everything(batch: Batch) -> None:
    batch.records(0)
    assert sum(run.records for run in batch.appended()) == batch.count
    batch.to_arrow(0).validate(full=True)
    merge([batch, batch])
    merge([batch] * 30)
    if batch.count > 1:
        rest = batch.slice(batch.base + 1, batch.end)
        rest.to_arrow(0).validate(full=True)
        assert sum(run.records for run in rest.appended()) == rest.count


@settings(max_examples=400)
@given(
    rows=st.sampled_from([ONE_ROW, FULL_ROWS, FULL_ROWS[:1], FULL_ROWS * 20, ONE_ROW * 50]),
    apart=st.booleans(),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_hostile_body_under_a_valid_crc_is_read_within_bounds(
    *, rows: list[Row], apart: bool, changes: list[tuple[float, int]]
) -> None:
    body = bytearray(frame_of(rows, times=[Appended(1, place) for place in range(len(rows))] if apart else ())[16:])
    for place, number in changes:
        body[4 + int(place * (len(body) - 5))] = number
    frame = close_frame(SALT_CRC, 7, bytes(body))
    head = head_of(frame)

    with contextlib.suppress(Corrupt):
        _look_at_everything(decode(frame, 0, head))


@given(columns=st.integers(0, 255), count=st.integers(0, 2**32 - 1), noise=st.binary(max_size=400))
def test_any_claim_about_any_bytes_is_read_or_corrupt(columns: int, count: int, noise: bytes) -> None:
    for rows in (count, count % 5, count % 70):
        head = FrameHead(7, 48 + len(noise), 0, 0, columns, rows, 1, 0, 0, 0)
        with contextlib.suppress(Corrupt):
            _look_at_everything(decode(bytes(48) + noise, 0, head))


@pytest.mark.parametrize("size", [300, 1_000])
@pytest.mark.parametrize("zstd_level", [None, 1])
@pytest.mark.parametrize("runs", [(), (Run(100, 9, 4), Run(200, 0, 0))])
def test_frame_bytes_do_not_depend_on_how_columns_are_cut_into_parts(
    size: int, zstd_level: int | None, runs: tuple[Run, ...]
) -> None:
    columns = encode_columns(Columns([b"x" * size] * 300, list(range(300))))
    joined = columns._replace(parts=[whole(columns)])
    assert len(columns.parts) > 1

    frames = [
        encode_data_frame(
            salt_crc=SALT_CRC,
            base=1,
            epoch=1,
            durable=0,
            appended_at=0,
            runs=runs,
            columns=given,
            zstd_level=zstd_level,
        )
        for given in (columns, joined)
    ]

    assert frames[0] == frames[1]
    head = head_of(bytes(frames[0]))
    assert runs_of(frames[0], 0, head) == list(runs)
    assert decode(frames[0], 0, head).values() == [b"x" * size] * 300
