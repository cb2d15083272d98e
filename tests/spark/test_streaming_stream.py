"""A stream without Spark: each offset is read once, whatever comes and goes; what cannot be right fails by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Conflict, DataLoss, Unavailable
from forebay.format.control.offsets import OffsetSet
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.records import Reason
from forebay.spark.place.location import Location
from forebay.spark.reading.options import FROM_EARLIEST, FROM_LATEST, Limit, ReadOptions, Topics
from forebay.spark.reading.plan import resolve
from forebay.spark.reading.snapshot import Range, ScanPiece, ShardView, Snapshot, Split
from forebay.spark.reading.streaming.offsets import Place, Point, StreamOffsets
from forebay.spark.reading.streaming.stream import AWAY_SECONDS, LOOK_SECONDS, LOOK_SHARE, WAIT_SECONDS, TopicStream
from forebay.spark.reading.where import parse_where
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import TopicName

_LOCATION: Final = Location(path="/var/lib/orders")
_EARLIEST: Final = Limit(option="startingOffsets", everywhere=FROM_EARLIEST)
_LATEST: Final = Limit(option="startingOffsets", everywhere=FROM_LATEST)


def _view(topic: str = "a/b", partition: int = 0, stop: int = 0, **changes: Any) -> ShardView:
    """A partition of 100 bytes a record, in pieces of 50 records."""
    given: dict[str, Any] = {"topic_id": topic[0] * 32, "epoch": 1, "earliest": 0, **changes}
    edges = [*range(given["earliest"], stop, 50), stop]
    pieces = [ScanPiece(first, last, 100 * (last - first)) for first, last in pairwise(edges)]
    return ShardView(
        topic=topic,
        partition=partition,
        is_durable=True,
        next=stop,
        deleted=OffsetSet(),
        generation=0,
        **{"pieces": tuple(pieces), **given},
    )


class ChangingTopics:
    """Topics that change between looks, and a count of the looks."""

    def __init__(self, *views: ShardView) -> None:
        self.views: Sequence[ShardView] = views
        self.looks = 0
        self.look_seconds = 0.0
        self.is_away = False
        self.clock = ManualClock()

    def look(self, topics: Topics) -> Snapshot:
        self.looks += 1
        self.clock.advance(self.look_seconds)
        if self.is_away:
            raise Unavailable("no leader")
        return Snapshot(location=_LOCATION, shards=tuple(self.views))

    def ranges(
        self, snapshot: Snapshot, starting: Limit, ending: Limit, *, fail_on_data_loss: bool
    ) -> tuple[Range, ...]:
        return tuple(resolve(snapshot.bounds, starting, ending, fail_on_data_loss=fail_on_data_loss))

    def becomes(self, *views: ShardView) -> None:
        """Change, and be seen so by the next look."""
        self.views = views
        self.clock.advance(LOOK_SECONDS)

    def stream(self, **options: Any) -> TopicStream:
        given: dict[str, Any] = {"starting": _EARLIEST, "topics": Topics(names=(TopicName("a", "b"),)), **options}
        return TopicStream(ReadOptions(location=_LOCATION, **given), self, self.clock)


def _ends(offsets: StreamOffsets) -> dict[str, int]:
    return {str(place): point.offset for place, point in offsets.places()}


def _ranges(splits: Sequence[Split]) -> list[tuple[str, int, int]]:
    return [(str(part), part.start, part.stop) for split in splits for part in split.parts]


@st.composite
def _growth(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """How much is added to partitions, step by step; partitions come too."""
    return draw(st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=3), max_size=3))


@given(_growth(), st.none() | st.integers(10, 100), st.none() | st.integers(500, 10_000))
def test_every_offset_is_read_once(
    growth: list[list[tuple[int, int]]], offsets_max: int | None, bytes_max: int | None
) -> None:
    changing = ChangingTopics(_view(stop=10))
    stream = changing.stream(offsets_max=offsets_max, bytes_max=bytes_max)
    ends = {0: 10}
    at = stream.initial()
    seen: dict[int, int] = dict.fromkeys(range(5), 0)
    for added in [*growth, *[[]] * 100]:
        for partition, count in added:
            ends[partition] = ends.get(partition, 0) + count
        changing.becomes(*(_view(partition=partition, stop=stop) for partition, stop in sorted(ends.items())))
        latest = stream.latest(at)
        batch = [part for split in stream.splits(at, latest, ("value",)) for part in split.parts]
        if not batch:
            assert latest == at
            if not added:
                break
        taken = 0
        for part in batch:
            assert part.start == seen[part.partition]
            seen[part.partition] = part.stop
            taken += part.stop - part.start
        assert taken <= (offsets_max or taken)
        assert taken * 100 <= max(bytes_max or taken * 100, 100)
        at = StreamOffsets.parse(json.loads(json.dumps(latest.to_json())))

    assert {partition: stop for partition, stop in seen.items() if stop} == {p: s for p, s in ends.items() if s}


def test_query_begins_where_its_options_say() -> None:
    changing = ChangingTopics(_view(stop=70, earliest=20), _view(partition=1))
    offsets = {"a/b": {0: 33, 1: 0}}

    assert _ends(changing.stream().initial()) == {"a/b[0]": 20, "a/b[1]": 0}
    assert _ends(changing.stream(starting=_LATEST).initial()) == {"a/b[0]": 70, "a/b[1]": 0}
    assert _ends(changing.stream(starting=replace(_LATEST, by_topic=offsets)).initial()) == {"a/b[0]": 33, "a/b[1]": 0}


def test_one_look_answers_for_a_while() -> None:
    changing = ChangingTopics(_view(stop=10))
    stream = changing.stream()
    start = stream.initial()
    changing.views = [_view(stop=20)]
    for _ in range(90):
        assert _ends(stream.latest(start)) == {"a/b[0]": 10}
        assert _ends(stream.newest()) == {"a/b[0]": 10}
    assert changing.looks == 1

    changing.clock.advance(LOOK_SECONDS)

    assert _ends(stream.latest(start)) == {"a/b[0]": 20}
    assert changing.looks == 2


def test_costly_looks_are_rarer() -> None:
    changing = ChangingTopics(_view(stop=10))
    changing.look_seconds = 0.5
    stream = changing.stream()
    start = stream.initial()

    for _ in range(1000):
        stream.latest(start)
        changing.clock.advance(0.1)

    assert changing.looks <= 1 + 100 * LOOK_SHARE / 0.5


def test_last_look_answers_while_there_is_no_other(caplog: pytest.LogCaptureFixture) -> None:
    changing = ChangingTopics(_view(stop=10))
    stream = changing.stream()
    start = stream.initial()
    changing.is_away = True
    for _ in range(round(AWAY_SECONDS)):
        assert _ends(stream.latest(start)) == {"a/b[0]": 10}
        changing.clock.advance(0.99)
    assert caplog.text.count("nothing new can be seen now: no leader") == 1
    changing.clock.advance(1)

    with pytest.raises(Unavailable, match="no leader"):
        stream.latest(start)
    changing.is_away = False
    changing.becomes(_view(stop=20))
    assert _ends(stream.latest(start)) == {"a/b[0]": 20}


def test_nothing_new_is_the_same_text() -> None:
    changing = ChangingTopics(_view(stop=10), _view(partition=1))
    stream = changing.stream(starting=_LATEST)
    start = stream.initial()

    changing.becomes(_view(stop=10, epoch=5), _view(partition=1, epoch=5), _view(partition=2, epoch=1))

    assert json.dumps(stream.latest(start).to_json()) == json.dumps(start.to_json())


def test_available_now_ends_where_the_topics_ended() -> None:
    changing = ChangingTopics(_view(stop=10))
    stream = changing.stream(offsets_max=7)
    start = stream.initial()
    stream.fix_target()

    changing.becomes(_view(stop=50), _view(partition=1, stop=50), _view("c/d", stop=50))
    first = stream.latest(start)
    second = stream.latest(first)

    assert [_ends(offsets)["a/b[0]"] for offsets in (first, second)] == [7, 10]
    assert stream.latest(second) == second
    assert stream.latest(start, limited=False) == second
    assert _ends(stream.newest()) == {"a/b[0]": 50, "a/b[1]": 50, "c/d[0]": 50}


def test_new_partitions_and_topics_begin_at_the_beginning() -> None:
    changing = ChangingTopics(_view(stop=10))
    stream = changing.stream(starting=_LATEST)
    start = stream.initial()

    changing.becomes(_view(stop=12), _view(partition=1, stop=3), _view("c/d", stop=4), _view("c/d", partition=1))
    latest = stream.latest(start)

    assert _ends(latest) == {"a/b[0]": 12, "a/b[1]": 3, "c/d[0]": 4}
    assert _ranges(stream.splits(start, latest, ("value",))) == [
        ("a/b[0]", 10, 12),
        ("a/b[1]", 0, 3),
        ("c/d[0]", 0, 4),
    ]


def test_both_limits_hold_and_something_goes_through() -> None:
    changing = ChangingTopics(*(_view(partition=partition, stop=100) for partition in range(3)))

    for offsets_max, bytes_max, records in ((30, 600, 6), (5, 600, 5), (1, 1, 1), (7, 1, 1)):
        stream = changing.stream(offsets_max=offsets_max, bytes_max=bytes_max)
        assert sum(_ends(stream.latest(stream.initial())).values()) == records


def test_gaps_do_not_count_as_records() -> None:
    gap = SegmentDescriptor(
        kind=DescriptorKind.GAP, topic_id="a" * 32, start=10, end=70_000, epoch=1, reason=int(Reason.SKIPPED)
    )
    pieces = (ScanPiece(0, 10, 1000), ScanPiece(10, 70_000, 0, gap), ScanPiece(70_000, 70_010, 1000))
    changing = ChangingTopics(_view(stop=70_010, pieces=pieces))

    for limit in ({"offsets_max": 15}, {"bytes_max": 1500}):
        stream = changing.stream(**limit)
        assert _ends(stream.latest(stream.initial())) == {"a/b[0]": 70_005}


def test_a_condition_narrows_the_tasks_and_not_how_far_the_query_is() -> None:
    changing = ChangingTopics(_view(stop=70), _view(partition=1, stop=40))
    stream = changing.stream(where=parse_where("partition = 0 AND offset >= 50 AND tag = 'eu'"))
    start = stream.initial()
    end = stream.latest(start)

    splits = stream.splits(start, end, ("value",))

    assert _ends(end) == {"a/b[0]": 70, "a/b[1]": 40}
    assert _ranges(splits) == [("a/b[0]", 50, 70)]
    assert all(split.filters == parse_where("partition = 0 AND offset >= 50 AND tag = 'eu'") for split in splits)
    assert stream.splits(start, stream.latest(start), ("value",)) == splits


def test_evicted_before_it_was_read_is_a_named_loss(caplog: pytest.LogCaptureFixture) -> None:
    changing = ChangingTopics(_view(stop=10))
    strict, lenient = changing.stream(), changing.stream(fail_on_data_loss=False)
    start = strict.initial()
    changing.becomes(_view(stop=60, earliest=30))

    with pytest.raises(DataLoss, match=r"a/b\[0\]: this query stands at offset 0, and the earliest there is 30"):
        strict.splits(start, strict.latest(start), ("value",))
    with caplog.at_level(logging.WARNING):
        assert _ranges(lenient.splits(start, lenient.latest(start), ("value",))) == [("a/b[0]", 30, 60)]
    assert "30 offsets are skipped" in caplog.text


def test_range_that_was_evicted_as_a_whole_has_no_tasks() -> None:
    changing = ChangingTopics(_view(stop=10))
    stream = changing.stream(fail_on_data_loss=False)
    start = stream.initial()
    latest = stream.latest(start)
    changing.becomes(_view(stop=60, earliest=30))

    assert stream.splits(start, latest, ("value",)) == []


def test_topic_that_is_gone_is_a_named_loss(caplog: pytest.LogCaptureFixture) -> None:
    changing = ChangingTopics(_view(stop=10), _view("c/d", stop=10))
    strict, lenient = changing.stream(), changing.stream(fail_on_data_loss=False)
    start = strict.initial()
    lenient.initial()
    changing.becomes(_view(stop=20))

    with pytest.raises(DataLoss, match="c/d was deleted, and this query had not ended it: set failOnDataLoss to false"):
        strict.latest(start)
    assert _ends(lenient.latest(start)) == {"a/b[0]": 20}
    assert _ranges(lenient.splits(start, lenient.latest(start), ("value",))) == [("a/b[0]", 0, 20)]
    assert caplog.text.count("it goes on without it") == 1


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_topic_created_again_fails_by_name(fail_on_data_loss: bool) -> None:  # noqa: FBT001 - a parameter of the test
    changing = ChangingTopics(_view(stop=10))
    stream = changing.stream(fail_on_data_loss=fail_on_data_loss)
    start = stream.initial()
    end = stream.latest(start)
    changing.becomes(_view(stop=40, topic_id="f" * 32))

    for ask in (lambda: stream.latest(start), lambda: stream.splits(start, end, ("value",))):
        with pytest.raises(Conflict, match="a/b was deleted and created again"):
            ask()


def test_older_copy_is_recognised_by_its_epoch_and_by_its_end() -> None:
    changing = ChangingTopics(_view(stop=10, epoch=4))
    stream = changing.stream()
    end = stream.latest(stream.initial())

    changing.becomes(_view(stop=50, epoch=3))
    with pytest.raises(Conflict, match=r"a/b\[0\]: this query has read it in epoch 4, and now it is at epoch 3"):
        stream.latest(end)
    changing.becomes(_view(stop=9, epoch=4))
    with pytest.raises(Conflict, match=r"a/b\[0\]: this query has read up to offset 10, and the topic ends at 9"):
        stream.latest(end)


def test_owner_that_has_just_come_is_waited_for() -> None:
    changing = ChangingTopics(_view(stop=10))
    stream = changing.stream()
    start = stream.initial()
    end = stream.latest(start)
    changing.becomes(_view(stop=3, epoch=2))
    first = changing.looks

    def sleep(seconds: float) -> None:
        changing.clock.advance(seconds)
        if changing.looks == first + 3:
            changing.views = [_view(stop=10, epoch=2)]

    changing.clock.sleep = sleep  # type: ignore[method-assign]  # time passes, and the owner gets ready meanwhile

    assert _ranges(stream.splits(start, end, ("value",))) == [("a/b[0]", 0, 10)]
    assert changing.clock.monotonic() < WAIT_SECONDS


def test_points_carry_the_epoch_they_were_found_in() -> None:
    changing = ChangingTopics(_view(stop=10, epoch=3))
    stream = changing.stream()
    start = stream.initial()
    changing.becomes(_view(stop=12, epoch=4))

    assert start.at(Place("a/b", 0)) == Point(0, 3)
    assert stream.latest(start).at(Place("a/b", 0)) == Point(12, 4)
