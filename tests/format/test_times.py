"""When the records of frames that were put together were appended: kept exactly, and checked before it is believed."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Corrupt
from forebay.format.columns.rows import TIMES, Row, encode_rows
from forebay.format.columns.times import Appended, find_times, timed
from forebay.format.frame.batch import batch_of, merge
from tests.format.samples import FULL_ROWS, INT64, ROWS, whole

RUNS = st.lists(st.builds(Appended, st.integers(1, 5), st.integers(0, 3) | INT64), min_size=1, max_size=12)


def each(runs: list[Appended]) -> list[int]:
    return [run.at for run in runs for _ in range(run.records)]


@given(ROWS, RUNS, st.data())
def test_every_record_keeps_its_time_however_it_is_cut(
    rows: list[Row], runs: list[Appended], at: st.DataObject
) -> None:
    count = sum(run.records for run in runs)
    plain = encode_rows((rows * count)[:count])
    columns = timed(plain, runs)
    newest = max(run.at for run in runs)
    batch = batch_of(columns, base=100, epoch=1, appended_at=newest)
    first = at.draw(st.integers(0, count - 1))
    stop = at.draw(st.integers(first + 1, count))

    cut = batch.slice(100 + first, 100 + stop)

    assert each(batch.appended()) == each(runs)
    assert each(cut.appended()) == each(runs)[first:stop]
    assert each(cut.moved(7).appended()) == each(cut.appended())
    assert bool(columns.flags & TIMES) == (len(set(each(runs))) > 1)
    assert all(left.at != right.at for left, right in zip(batch.appended(), batch.appended()[1:], strict=False))
    assert whole(merge([batch])) == whole(plain)
    assert batch.records(0) == batch_of(plain, base=100, epoch=1, appended_at=0).records(0)


TWO = [Appended(1, 5), Appended(2, 6)]


@pytest.mark.parametrize(
    ("place", "packed", "why"),
    [
        (0, struct.pack("<I", 3), "3 runs reach behind the end"),
        (0, struct.pack("<I", 2**32 - 1), "reach behind the end"),
        (0, struct.pack("<I", 0), "not those of 3 records"),
        (24, struct.pack("<II", 0, 3), "not those of 3 records"),
        (24, struct.pack("<II", 1, 1), "not those of 3 records"),
        (24, struct.pack("<II", 4, 2**32 - 1), "not those of 3 records"),
    ],
)
def test_times_that_cannot_be_are_refused(place: int, packed: bytes, why: str) -> None:
    columns = timed(encode_rows(FULL_ROWS), TWO)
    times = bytearray(whole(columns)[encode_rows(FULL_ROWS).size :])
    assert find_times(bytes(times), 0, len(times), 3) == len(times) == 32
    times[place : place + len(packed)] = packed

    with pytest.raises(Corrupt, match=why):
        find_times(bytes(times), 0, len(times), 3)


def test_times_that_a_frame_has_no_room_for_are_refused() -> None:
    columns = encode_rows(FULL_ROWS)
    with pytest.raises(Corrupt, match="behind the end of their frame"):
        batch_of(columns._replace(flags=columns.flags | TIMES), base=0, epoch=0, appended_at=0)
