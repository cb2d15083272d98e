"""How much a micro-batch takes: never more than the limit, never nothing, in proportion, and no caller starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.spark.reading.streaming.admission import Backlog, WeighedRange, admitted, clipped
from forebay.spark.reading.streaming.offsets import Place

pytestmark = pytest.mark.slow


@st.composite
def _backlog(draw: st.DrawFn, *, in_records: bool) -> Backlog:
    start = at = draw(st.integers(0, 10**6))
    stretches = []
    for count in draw(st.lists(st.integers(1, 300), max_size=4)):
        each = 1 if in_records else draw(st.integers(1, 50))
        weight = 0 if draw(st.booleans()) else count * each
        stretches.append(WeighedRange(at, at + count, weight))
        at += count
    return Backlog(start, stretches)


def _backlogs(*, in_records: bool) -> st.SearchStrategy[dict[Place, Backlog]]:
    places = st.builds(Place, st.sampled_from(["a/b", "c/d"]), st.integers(0, 5))
    return st.dictionaries(places, _backlog(in_records=in_records), max_size=6)


def _weight(backlog: Backlog, end: int) -> float:
    """What `[start, end)` weighs, by each stretch's mean."""
    return sum(
        stretch.weight * max(0, min(end, stretch.stop) - stretch.start) / (stretch.stop - stretch.start)
        for stretch in backlog.stretches
    )


@given(_backlogs(in_records=True), st.integers(1, 2000))
def test_records_are_admitted_up_to_the_limit_exactly(backlogs: dict[Place, Backlog], limit: int) -> None:
    ends = admitted(backlogs, limit)

    total = sum(backlog.weight for backlog in backlogs.values())
    assert ends.keys() == backlogs.keys()
    assert all(backlogs[place].start <= end <= backlogs[place].stop for place, end in ends.items())
    assert sum(_weight(backlogs[place], end) for place, end in ends.items()) == min(limit, total)


@given(_backlogs(in_records=False), st.integers(1, 100_000))
def test_bytes_stay_below_the_limit_but_for_the_first_record(backlogs: dict[Place, Backlog], limit: int) -> None:
    ends = admitted(backlogs, limit)

    total = sum(backlog.weight for backlog in backlogs.values())
    taken = sum(_weight(backlogs[place], end) for place, end in ends.items())
    records = [place for place, end in ends.items() if _weight(backlogs[place], end) > 0]
    assert taken <= max(limit, 50)
    if total:
        assert records
    if total <= limit:
        assert ends == {place: backlog.stop for place, backlog in backlogs.items()}


@given(_backlogs(in_records=True), st.integers(1, 2000))
def test_shares_are_in_proportion(backlogs: dict[Place, Backlog], limit: int) -> None:
    total = sum(backlog.weight for backlog in backlogs.values())
    ends = admitted(backlogs, limit)

    for place, backlog in backlogs.items():
        fair = min(limit, total) * backlog.weight / max(total, 1)
        assert abs(_weight(backlog, ends[place]) - fair) <= 1


@given(_backlogs(in_records=False), st.integers(1, 5000))
def test_batch_after_batch_reaches_the_end(backlogs: dict[Place, Backlog], limit: int) -> None:
    left = backlogs
    while any(backlog.start < backlog.stop for backlog in left.values()):
        ends = admitted(left, limit)
        assert any(end > left[place].start for place, end in ends.items())
        left = {place: clipped(end, left[place].stop, left[place].stretches) for place, end in ends.items()}


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 8, 12, 100, 1000])
@pytest.mark.parametrize("partitions", [2, 3, 4, 7])
def test_small_partition_is_not_starved_beside_one_that_never_empties(limit: int, partitions: int) -> None:
    starts = dict.fromkeys(range(partitions), 0)
    served = dict.fromkeys(range(partitions), 0)

    for _ in range(400):
        backlogs = {
            Place("a/b", number): Backlog(at, [WeighedRange(at, at + size, size)])
            for number, at in starts.items()
            for size in [10**9 if number == 0 else 3]
        }
        for place, end in admitted(backlogs, limit).items():
            served[place.partition] += end > starts[place.partition]
            starts[place.partition] = end

    assert min(served.values()) >= 10


def test_gaps_cost_nothing() -> None:
    place = Place("a/b", 0)
    backlog = Backlog(0, [WeighedRange(0, 10, 10), WeighedRange(10, 70_000, 0), WeighedRange(70_000, 70_010, 10)])

    assert admitted({place: backlog}, 10) == {place: 70_000}
    assert admitted({place: backlog}, 12) == {place: 70_002}
    assert admitted({place: Backlog(0, [WeighedRange(0, 70_000, 0)])}, 1) == {place: 70_000}


def test_record_larger_than_the_limit_goes_through_alone() -> None:
    backlogs = {Place("a/b", number): Backlog(0, [WeighedRange(0, 3, 3000)]) for number in range(2)}

    ends = admitted(backlogs, 10)

    assert sorted(ends.values()) == [0, 1]


def test_without_a_limit_all_is_taken() -> None:
    backlogs = {Place("a/b", 0): Backlog(3, [WeighedRange(3, 9, 600)]), Place("a/b", 1): Backlog(5, [])}

    assert admitted(backlogs, None) == {Place("a/b", 0): 9, Place("a/b", 1): 5}
    assert admitted({}, 5) == {}


def test_backlog_is_clipped_to_where_the_stream_stands() -> None:
    stretches = [WeighedRange(0, 10, 100), WeighedRange(20, 30, 50), WeighedRange(30, 40, 10)]

    assert clipped(5, 35, stretches) == Backlog(
        5, [WeighedRange(5, 10, 50), WeighedRange(10, 20, 0), WeighedRange(20, 30, 50), WeighedRange(30, 35, 5)]
    )
    assert clipped(40, 45, stretches) == Backlog(40, [WeighedRange(40, 45, 0)])
    assert clipped(9, 10, [WeighedRange(0, 10, 3)]) == Backlog(
        9, [WeighedRange(9, 10, 1)]
    )  # a record always weighs something
