"""Ranges and tasks: every offset asked for is read exactly once, by few tasks of equal size."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Invalid
from forebay.format.control.offsets import OffsetSet
from forebay.spark.reading.options import FROM_EARLIEST, FROM_LATEST, Limit
from forebay.spark.reading.plan import MIB, TASK_BYTES_MAX, Size, resolve, split
from forebay.spark.reading.snapshot import PartitionBounds, Range, ScanPiece, ShardView
from forebay.views.look import covering

_SPANS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(sorted), max_size=5)
_FILES = st.lists(
    st.tuples(st.integers(0, 900), st.integers(1, 400), st.integers(0, 2**40)).map(
        lambda file: Size(file[0], file[0] + file[1], file[2])
    ),
    max_size=6,
)


def _ranges(spans: list[list[int]]) -> list[Range]:
    return [Range(partition, start, stop) for partition, (start, stop) in enumerate(spans) if start < stop]


def _offsets(ranges: list[Range]) -> list[tuple[int, int]]:
    return [(partition, offset) for partition, start, stop in ranges for offset in range(start, stop)]


@given(_SPANS, st.lists(_FILES, min_size=5, max_size=5), st.integers(1, 50))
def test_every_offset_goes_to_exactly_one_task_whatever_the_files_say(
    spans: list[list[int]], files: list[list[Size]], partitions_min: int
) -> None:
    ranges = _ranges(spans)

    tasks = split(ranges, dict(enumerate(files)), partitions_min)

    assert _offsets([wanted for task in tasks for wanted in task]) == _offsets(ranges)
    assert all(task and all(wanted.start < wanted.stop for wanted in task) for task in tasks)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_tasks_are_between_64_and_256_mib_and_of_equal_size(sizes_mib: list[int]) -> None:
    """One record per KiB, so that bytes can be counted by offsets."""
    ranges = [Range(partition, 0, size * 1024) for partition, size in enumerate(sizes_mib)]
    files = {partition: [Size(0, size * 1024, size * MIB)] for partition, size in enumerate(sizes_mib)}

    tasks = split(ranges, files)

    weights = [sum(stop - start for _, start, stop in task) * 1024 for task in tasks]
    assert max(weights) - min(weights) <= len(sizes_mib) * 2048
    assert all(weight <= TASK_BYTES_MAX + 2048 for weight in weights)
    assert len(tasks) == 1 or all(weight >= 64 * MIB - 4096 * len(sizes_mib) for weight in weights)


def test_many_small_partitions_share_one_task() -> None:
    ranges = [Range(partition, 0, 10) for partition in range(64)]

    tasks = split(ranges, {partition: [Size(0, 10, MIB)] for partition in range(64)})

    assert tasks == [tuple(ranges)]


@given(st.integers(1, 200), st.integers(1, 1000))
def test_as_many_tasks_as_asked_for_where_there_are_records_for_them(partitions_min: int, records: int) -> None:
    tasks = split([Range(0, 0, records)], {0: [Size(0, records, records * 100)]}, partitions_min)

    assert len(tasks) == min(partitions_min, records)


def test_neighbouring_files_of_a_task_are_one_range() -> None:
    files = [Size(0, 10, MIB), Size(10, 20, MIB), Size(25, 30, MIB)]

    assert split([Range(3, 5, 40)], {3: files}) == [(Range(3, 5, 40),)]


def test_nothing_to_read_makes_no_task() -> None:
    assert split([], {}) == []


_NAME = "shop/orders"
_BOUNDS = [PartitionBounds(_NAME, 0, 10, 100), PartitionBounds(_NAME, 1, 0, 0)]


def _resolve(
    starting: int | dict[int, int], ending: int | dict[int, int], *, fail_on_data_loss: bool = True
) -> list[Range]:
    starts, ends = _limit("startingOffsets", starting), _limit("endingOffsets", ending)
    return resolve(_BOUNDS, starts, ends, fail_on_data_loss=fail_on_data_loss)


def _limit(option: str, wanted: int | dict[int, int]) -> Limit:
    if isinstance(wanted, int):
        return Limit(option=option, everywhere=wanted)
    return Limit(option=option, by_topic={_NAME: wanted})


def test_earliest_to_latest_is_all_there_is() -> None:
    assert _resolve(FROM_EARLIEST, FROM_LATEST) == [Range(0, 10, 100)]


def test_offsets_and_ends_may_be_mixed() -> None:
    starting = {0: 20, 1: FROM_EARLIEST}
    ending = {0: FROM_LATEST, 1: 0}

    assert _resolve(starting, ending) == [Range(0, 20, 100)]


def test_start_at_the_very_end_reads_nothing() -> None:
    starting = {0: 100, 1: 0}

    assert _resolve(starting, FROM_LATEST) == []


@pytest.mark.parametrize(
    ("starting", "ending", "message"),
    [
        ({0: 20}, FROM_LATEST, '"startingOffsets" leaves out partition 1: shop/orders has partitions 0 to 1'),
        ({0: 20, 1: 0, 2: 0}, FROM_LATEST, '"startingOffsets" names partition 2'),
        (FROM_EARLIEST, {1: 0}, '"endingOffsets" leaves out partition 0'),
        ({0: 9, 1: 0}, FROM_LATEST, r"shop/orders\[0\]: startingOffsets is 9, the earliest offset there is 10"),
        (FROM_EARLIEST, {0: 101, 1: 0}, r"shop/orders\[0\]: endingOffsets is 101, its end is at 100"),
        ({0: 101, 1: 0}, FROM_LATEST, r"shop/orders\[0\]: startingOffsets is 101, behind the end at 100"),
        ({0: 50, 1: 0}, {0: 40, 1: 0}, r"shop/orders\[0\]: startingOffsets is 50, behind the end at 40"),
    ],
)
def test_offsets_the_topic_does_not_have_are_refused(
    starting: int | dict[int, int], ending: int | dict[int, int], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        _resolve(starting, ending)


def test_offsets_that_are_gone_are_skipped_and_logged_if_that_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    ranges = _resolve({0: 3, 1: 0}, FROM_LATEST, fail_on_data_loss=False)

    assert ranges == [Range(0, 10, 100)]
    assert "shop/orders[0]: startingOffsets is 3, the earliest offset there is 10" in caplog.text


def test_a_range_that_is_gone_altogether_is_empty() -> None:
    assert _resolve({0: 3, 1: 0}, {0: 5, 1: 0}, fail_on_data_loss=False) == []


@given(
    st.integers(0, 50),
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(0, 1000)), max_size=8),
)
def test_pieces_cover_every_offset_once_whatever_is_found(
    start: int, count: int, found: list[tuple[int, int, int]]
) -> None:
    given_pieces = [ScanPiece(at, at + length, size, file="x") for at, length, size in found]

    pieces = list(covering(start, start + count, given_pieces))

    assert [offset for piece in pieces for offset in range(piece.start, piece.stop)] == list(
        range(start, start + count)
    )
    assert all(piece.start < piece.stop for piece in pieces)
    for piece in pieces:
        known = [given for given in given_pieces if given.start <= piece.start and piece.stop <= given.stop]
        assert piece.file is None or known


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(0, 300), st.integers(0, 300))
def test_pieces_of_a_range_are_those_that_touch_it(lengths: list[int], one: int, other: int) -> None:
    ends = list(accumulate(lengths))
    pieces = tuple(ScanPiece(end - length, end, 0) for length, end in zip(lengths, ends, strict=True))
    view = ShardView(
        topic=_NAME,
        topic_id="ab" * 16,
        partition=0,
        is_durable=True,
        epoch=1,
        earliest=0,
        next=ends[-1],
        pieces=pieces,
        deleted=OffsetSet(),
        generation=0,
    )
    start, stop = sorted((one, other))

    found = view.pieces_of(start, stop)

    assert found == tuple(piece for piece in pieces if piece.start < stop and piece.stop > start)
