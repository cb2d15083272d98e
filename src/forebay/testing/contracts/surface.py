"""What every `forebay.surface.Log` must do, however it is reached. Knows the Protocols and no implementation.

Inherit `SurfaceContract`, or `LastingContract` where records outlive their log, and give it a fixture `home`: a
`SurfaceHome`, where logs are opened. `BesideContract` is for logs that are opened read-only beside another. A log for
asyncio is tried through `called`, which makes its calls from a thread of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import msgspec
import pyarrow as pa
import pytest

from forebay.bulk import BackfillPlan, LoadBatch
from forebay.errors import (
    Closed,
    Conflict,
    Full,
    Invalid,
    OffsetOutOfRange,
    TooLarge,
    UnknownLoad,
    UnknownTopic,
    Unsupported,
)
from forebay.partitioning import partition_of_key
from forebay.records import EARLIEST, LATEST, Position, Record
from forebay.surface import Ack, Log, TopicHandle
from forebay.surface import awaiting as asyncio_surface

T = TypeVar("T")

FRAME_BYTES_MAX = 8 * 1024 * 1024
"""What one append may bring to a partition, as long as no setting says otherwise."""
PATIENT_S = 60.0
"""Longer than any record takes to come; a test that waits so long has failed."""


class SurfaceHome(Protocol):
    """Where logs are opened, through as many lives as the test wants."""

    def open(self) -> Log:
        """The log, with whatever the one before it left, if that lasts. The one before is closed."""


def values(records: Iterator[Record] | list[Record]) -> list[bytes | None]:
    """The values alone."""
    return [record.value for record in records]


def _ended(outcome: Ack | Full) -> int:
    """What came of an append: at once, or later."""
    if isinstance(outcome, Full):
        raise outcome
    return outcome.result(PATIENT_S)


class SurfaceContract:
    """The suite. A test's name is its claim."""

    @pytest.fixture
    def log(self, home: SurfaceHome) -> Iterator[Log]:
        with home.open() as log:
            yield log

    @pytest.fixture
    def topic(self, log: Log) -> TopicHandle:
        return log.create_topic("shop/orders")

    # Topics

    def test_a_topic_is_there_once_it_is_created(self, log: Log) -> None:
        made = log.create_topic("orders", partitions=3, cap_records=100)

        found = log.topic("/default/orders")
        log.create_topic("a/first")

        assert (made.name, made.partitions) == (found.name, found.partitions) == ("default/orders", 3)
        assert found.spec.cap_records == 100
        assert [str(spec.name) for spec in log.topics()] == ["a/first", "default/orders"]
        assert [str(spec.name) for spec in log.topics(limit=1)] == ["a/first"]
        assert [str(spec.name) for spec in log.topics(after="a/first")] == ["default/orders"]
        assert [str(spec.name) for spec in log.topics("default/", limit=5)] == ["default/orders"]
        assert log.topics("default/", after="orders") == []

    def test_a_topic_that_exists_is_a_conflict_unless_that_is_fine(self, log: Log) -> None:
        log.create_topic("shop/orders", partitions=2)

        with pytest.raises(Conflict) as refused:
            log.create_topic("shop/orders")

        assert refused.value.topic == "shop/orders"
        assert log.create_topic("shop/orders", exist_ok=True).partitions == 2
        assert log.create_topic("shop/orders", partitions=3, cap_records=5, exist_ok=True).spec.cap_records is None

    def test_an_unknown_topic_is_named_by_the_error(self, log: Log) -> None:
        asked: list[Callable[[], object]] = [
            lambda: log.topic("shop/none"),
            lambda: log.delete_topic("shop/none"),
            lambda: log.alter_topic("shop/none", partitions=2),
            lambda: log.group("g").fetch("shop/none"),
        ]
        for ask in asked:
            with pytest.raises(UnknownTopic) as refused:
                ask()
            assert refused.value.topic == "shop/none"

    @pytest.mark.parametrize("name", ["", "a/b/c", "white space", "shop/", "ü"])
    def test_a_name_that_is_none_is_refused(self, log: Log, name: str) -> None:
        with pytest.raises(Invalid):
            log.create_topic(name)
        assert log.topics() == []

    def test_a_topic_that_is_altered_is_so_for_its_handles(self, log: Log, topic: TopicHandle) -> None:
        topic.append(b"before")

        spec = log.alter_topic("shop/orders", partitions=3, ttl_ms=3_600_000)

        assert (spec.partitions, spec.ttl_ms) == (3, 3_600_000)
        assert log.topic("shop/orders").partitions == 3
        assert topic.append(b"after", partition=2) == 0
        assert sorted(filter(None, values(topic.read()))) == [b"after", b"before"]

    def test_a_deleted_topic_is_unknown_and_its_name_is_free(self, log: Log, topic: TopicHandle) -> None:
        topic.append(b"gone")

        log.delete_topic("shop/orders")

        with pytest.raises(UnknownTopic):
            log.topic("shop/orders")
        with pytest.raises((UnknownTopic, Closed)):
            topic.append(b"late")
        assert values(log.create_topic("shop/orders").read()) == []

    # Appends

    def test_a_record_comes_back_as_it_was_appended(self, topic: TopicHandle) -> None:
        headers = {"trace": b"1", "empty": b"", "none": None}

        offset = topic.append(b"paid", key=b"42", tag="eu", headers=headers, timestamp=1_700_000_000_000)

        expected = Record(0, offset, 1_700_000_000_000, b"42", b"paid", "eu", tuple(headers.items()))
        assert list(topic.read()) == [expected]

    def test_no_value_is_not_an_empty_value(self, topic: TopicHandle) -> None:
        assert [topic.append(None), topic.append(b"")] == [0, 1]

        assert values(topic.read()) == [None, b""]

    def test_a_batch_has_consecutive_offsets_and_an_empty_one_none(self, topic: TopicHandle) -> None:
        topic.append(b"first")

        assert list(topic.append_many([b"a", None, b"c"], tags="t", timestamps=[3, 1, 2])) == [1, 2, 3]
        assert list(topic.append_many([])) == []

        records = list(topic.read(1))
        assert [(r.value, r.tag, r.timestamp) for r in records] == [(b"a", "t", 3), (None, "t", 1), (b"c", "t", 2)]

    def test_a_key_stays_in_its_partition(self, log: Log) -> None:
        topic = log.create_topic("keyed", partitions=4)
        keys = [b"%d" % (number % 7) for number in range(70)]

        topic.append_many([b"%d" % number for number in range(70)], keys=keys)
        for number in range(7):
            topic.append(b"single", key=b"%d" % number)

        places = {(record.key, record.partition) for record in topic.read()}
        assert len(places) == 7
        assert len({partition for _, partition in places}) > 1

    def test_the_partition_can_be_chosen_and_must_be_one(self, log: Log) -> None:
        topic = log.create_topic("three", partitions=3)

        assert topic.append(b"a", key=b"k", partition=2) == 0
        assert list(topic.append_many([b"b", b"c"], partition=2)) == [1, 2]
        with pytest.raises(Invalid):
            topic.append(b"x", partition=3)

        assert values(topic.read(partition=2)) == [b"a", b"b", b"c"]
        assert [topic.offsets(number).next for number in range(3)] == [0, 0, 3]

    def test_arrow_batches_are_appended_and_read_by_column(self, topic: TopicHandle) -> None:
        batch = pa.record_batch({"value": pa.array([b"a", None, b"c"]), "key": pa.array([b"1", b"2", None])})

        assert list(topic.append_arrow(batch)) == [0, 1, 2]

        assert [(record.value, record.key) for record in topic.read()] == [(b"a", b"1"), (None, b"2"), (b"c", None)]
        read = pa.Table.from_batches(list(topic.read_arrow()))
        assert read.column("value").to_pylist() == [b"a", None, b"c"]
        assert read.column("offset").to_pylist() == [0, 1, 2]

    def test_rows_of_arrow_go_to_the_partition_that_they_name(self, log: Log) -> None:
        topic = log.create_topic("four", partitions=4)
        named = pa.array([3, None, 0, 3], pa.int32())
        batch = pa.record_batch({"value": pa.array([b"a", b"b", b"c", b"d"]), "key": [b"k"] * 4, "partition": named})
        topic.append(b"where", key=b"k")
        (of_key,) = {record.partition for record in topic.read()}

        topic.append_arrow(batch)

        found = {number: values(topic.read(partition=number)) for number in range(4)}
        expected: dict[int, list[bytes | None]] = {number: [] for number in range(4)} | {of_key: [b"where"]}
        for number, value in zip((3, of_key, 0, 3), (b"a", b"b", b"c", b"d"), strict=True):
            expected[number].append(value)
        assert found == expected
        for wrong, options in (([4], {}), ([-1], {}), ([2, 1], {"partition": 2}), (["0"], {})):
            rows = pa.record_batch({"value": [b"x"] * len(wrong), "partition": wrong})
            with pytest.raises(Invalid, match="partition"):
                topic.append_arrow(rows, **options)
        assert found == {number: values(topic.read(partition=number)) for number in range(4)}

    def test_a_key_is_found_where_it_was_before_partitions_were_added_and_where_it_is_now(self, log: Log) -> None:
        topic = log.create_topic("grown", partitions=4)
        keys = [b"%d" % number for number in range(12)]
        topic.append_many([b"old"] * 12, keys=keys)
        log.alter_topic("grown", partitions=8)
        topic.append_many([b"new"] * 11, keys=keys[:11])

        grown = log.topic("grown")

        assert [values(grown.read_by_key(key)) for key in keys] == [[b"new"]] * 11 + [[b"old"]]
        assert [values(grown.read_by_key(key, history=True)) for key in keys] == [[b"old", b"new"]] * 11 + [[b"old"]]

    def test_records_are_queued_without_a_wait_and_acknowledged_in_order(self, topic: TopicHandle) -> None:
        acks = [topic.append_nowait(b"%d" % number, key=b"k", tag="t") for number in range(5)]

        assert [ack.result(PATIENT_S) for ack in acks] == [0, 1, 2, 3, 4]
        assert all(ack.done for ack in acks)
        assert [(r.value, r.key, r.tag) for r in topic.read()] == [(b"%d" % number, b"k", "t") for number in range(5)]

    def test_records_that_are_queued_have_each_an_offset_or_an_error_of_its_own(self, log: Log) -> None:
        """Those of a client shared a request, and an error with it."""
        topic = log.create_topic("capped", partitions=4, cap_records=40, on_full="reject_new")
        keys = [next(b"%d" % n for n in range(99) if partition_of_key(b"%d" % n, 4) == place) for place in range(4)]
        for full in (0, 2):
            topic.append_many([b"full"] * 40, partition=full)
        for partition in (1, 3):
            topic.append(b"before", partition=partition)

        outcomes: list[Ack | Full] = []
        for number in range(80):
            try:
                outcomes.append(topic.append_nowait(b"%d" % number, key=keys[number % 4]))
            except Full as refusal:
                outcomes.append(refusal)

        for number, outcome in enumerate(outcomes):
            if number % 4 in (1, 3):
                assert not isinstance(outcome, Full)
                assert outcome.result(PATIENT_S) == 1 + number // 4
            else:
                with pytest.raises(Full) as refused:
                    _ended(outcome)
                assert refused.value.partition == number % 4
        found = {number: values(topic.read(1, partition=number)) for number in (1, 3)}
        assert found == {place: [b"%d" % number for number in range(place, 80, 4)] for place in (1, 3)}

    def test_batches_are_queued_without_a_wait_and_acknowledged_by_ranges(self, log: Log) -> None:
        topic = log.create_topic("keyed", partitions=4)
        keys = [b"%d" % (number % 7) for number in range(70)]
        arrow = pa.record_batch({"value": pa.array([b"x", b"y"])})

        many = topic.append_many_nowait([b"v"] * 70, keys=keys)
        held = many.result(PATIENT_S)
        rows = topic.append_arrow_nowait(arrow, partition=3).result(PATIENT_S)

        assert many.done and not many.failures
        assert list(many.ranges) == list(held)
        assert sum(count for _, _, count in held) == 70
        assert len({partition for partition, _, _ in held}) == len(held) > 1
        for partition, first, count in held:
            found = list(topic.read(first, stop=first + count, partition=partition))
            assert {record.key for record in found} <= set(keys) and len(found) == count
        assert [(partition, count) for partition, _, count in rows] == [(3, 2)]
        assert list(topic.append_many_nowait([]).result(PATIENT_S)) == []

    def test_an_append_that_is_not_waited_for_is_stored_once_if_it_is_repeated(self, topic: TopicHandle) -> None:
        first = topic.append_nowait(b"a", producer=7, sequence=0)
        again = topic.append_nowait(b"a", producer=7, sequence=0)

        assert first.result(PATIENT_S) == again.result(PATIENT_S) == 0
        many = [topic.append_many_nowait([b"b", b"c"], producer=7, sequence=1) for _ in range(2)]
        assert list(many[0].result(PATIENT_S)) == list(many[1].result(PATIENT_S)) == [(0, 1, 2)]
        assert values(topic.read()) == [b"a", b"b", b"c"]

    def test_a_bad_record_is_refused_and_takes_no_offset(self, topic: TopicHandle) -> None:
        bad: list[Callable[[], object]] = [
            lambda: topic.append("text"),  # type: ignore[arg-type]
            lambda: topic.append(b"x", tag=""),
            lambda: topic.append(b"x", timestamp=-(2**63)),
            lambda: topic.append(b"x", producer=1),
            lambda: topic.append_many([b"x", b"y"], keys=[b"k"]),
            lambda: topic.append_arrow(pa.record_batch({"other": pa.array([b"x"])})),
            lambda: topic.append_nowait("text"),  # type: ignore[arg-type]
            lambda: topic.append_many_nowait([b"x", b"y"], keys=[b"k"]),
            lambda: topic.append_arrow_nowait(pa.record_batch({"other": pa.array([b"x"])})),
        ]
        for append in bad:
            with pytest.raises(Invalid):
                append()

        assert topic.append(b"good") == 0

    def test_more_than_one_append_may_bring_is_too_large(self, topic: TopicHandle) -> None:
        much = b"x" * (FRAME_BYTES_MAX + 1)
        for append in (
            lambda: topic.append(much),
            lambda: topic.append_many([much[: FRAME_BYTES_MAX // 2]] * 2),
            lambda: topic.append_arrow(pa.record_batch({"value": [much]})),
        ):
            with pytest.raises(TooLarge) as refused:
                append()
            assert refused.value.limit == FRAME_BYTES_MAX
            assert refused.value.size is not None and refused.value.size > FRAME_BYTES_MAX
            assert refused.value.topic == "shop/orders"

        assert topic.append(b"good") == 0

    def test_a_repeated_append_of_a_producer_is_stored_once(self, topic: TopicHandle) -> None:
        assert topic.last_sequence(7) is None
        first = topic.append(b"a", producer=7, sequence=0)
        many = list(topic.append_many([b"b", b"c"], producer=7, sequence=1))

        assert topic.append(b"a", producer=7, sequence=0) == first
        assert list(topic.append_many([b"b", b"c"], producer=7, sequence=1)) == many
        with pytest.raises(Conflict) as refused:
            topic.append(b"e", producer=7, sequence=9)

        assert (refused.value.producer, refused.value.sequence, refused.value.expected) == (7, 9, 2)
        assert topic.last_sequence(7) == 1
        assert values(topic.read()) == [b"a", b"b", b"c"]

    def test_a_producer_may_leave_numbers_out_if_it_names_the_one_before(self, topic: TopicHandle) -> None:
        first = topic.append(b"a", producer=7, sequence=10, previous=-1)
        second = topic.append(b"b", producer=7, sequence=20, previous=10)

        assert topic.append(b"b", producer=7, sequence=20, previous=10) == second == first + 1
        with pytest.raises(Conflict):
            topic.append(b"d", producer=7, sequence=40, previous=30)
        assert values(topic.read()) == [b"a", b"b"]

    # Reading

    def test_a_stream_begins_where_it_is_asked_to_and_ends(self, topic: TopicHandle) -> None:
        topic.append_many([b"%d" % number for number in range(6)], timestamps=[10, 20, 30, 40, 50, 60])

        assert values(topic.read(4)) == [b"4", b"5"]
        assert values(topic.read(Position.at_offset(1), stop=3)) == [b"1", b"2"]
        assert values(topic.read(Position.at_time(45))) == [b"4", b"5"]
        assert values(topic.read(LATEST)) == []
        assert values(topic.read({0: 5})) == [b"5"]
        with pytest.raises(OffsetOutOfRange) as refused:
            list(topic.read(7))
        assert (refused.value.topic, refused.value.partition) == ("shop/orders", 0)
        assert (refused.value.offset, refused.value.earliest, refused.value.next) == (7, 0, 6)

    def test_partitions_are_read_one_after_the_other(self, log: Log) -> None:
        topic = log.create_topic("two", partitions=2)
        topic.append_many([b"b", b"c"], partition=1)
        topic.append(b"a", partition=0)

        assert [(r.partition, r.offset, r.value) for r in topic.read()] == [(0, 0, b"a"), (1, 0, b"b"), (1, 1, b"c")]
        assert values(topic.read({1: 1})) == [b"c"]

    def test_a_stream_that_is_left_goes_on_where_it_was(self, topic: TopicHandle) -> None:
        topic.append_many([b"%d" % number for number in range(5)])
        stream = topic.read()

        first = [next(stream) for _ in range(2)]
        rest = list(stream)

        assert values(first + rest) == [b"0", b"1", b"2", b"3", b"4"]

    def test_a_stream_that_is_closed_gives_nothing_more(self, topic: TopicHandle) -> None:
        topic.append_many([b"a", b"b"])
        with topic.read() as stream:
            next(stream)

        stream.close()
        with pytest.raises(StopIteration):
            next(stream)

    def test_pages_lead_from_the_first_record_to_the_end(self, topic: TopicHandle) -> None:
        topic.append_many([b"%d" % number for number in range(10)])

        found: list[bytes | None] = []
        offset, pages = 0, 0
        while not (page := topic.page(0, offset, records_max=4)).caught_up or page.records:
            found += values(list(page.records))
            offset, pages = page.next, pages + 1

        assert found == [b"%d" % number for number in range(10)]
        assert (offset, pages, page.head) == (10, 3, 10)

    # Following

    def test_a_follower_gets_what_is_there_and_what_comes(self, topic: TopicHandle) -> None:
        topic.append(b"old")
        with topic.follow(EARLIEST, timeout=PATIENT_S) as following:
            assert next(following).value == b"old"
            topic.append(b"new")
            assert next(following).value == b"new"

    def test_a_follower_of_the_end_gets_only_what_comes_after_it_began(self, topic: TopicHandle) -> None:
        topic.append(b"old")
        with topic.follow(timeout=PATIENT_S) as following:
            topic.append(b"new")
            assert next(following).value == b"new"

    def test_a_follower_waits_while_nothing_comes_and_ends_when_its_time_is_over(self, topic: TopicHandle) -> None:
        topic.append(b"one")
        following = topic.follow(EARLIEST, timeout=0.001)

        assert values(list(following)) == [b"one"]
        topic.append(b"two")
        assert values(list(following)) == [b"two"]

    # Looking up

    def test_records_are_found_by_key_and_by_tag(self, log: Log) -> None:
        topic = log.create_topic("found", partitions=2)
        for number in range(6):
            topic.append(b"%d" % number, key=b"k%d" % (number % 2), tag="odd" if number % 2 else "even")

        assert values(topic.read_by_key(b"k1")) == [b"5"]
        assert values(topic.read_by_key(b"k1", history=True)) == [b"1", b"3", b"5"]
        assert values(topic.read_by_key(b"none")) == []
        assert sorted(filter(None, values(topic.read_by_tag("even")))) == [b"0", b"2", b"4"]
        assert len(list(topic.read_by_tag("even", limit=2))) == 2

    def test_times_and_positions_become_offsets(self, topic: TopicHandle) -> None:
        topic.append_many([b"a", b"b", b"c"], timestamps=[100, 200, 300])

        assert [topic.offset_at_time(at) for at in (0, 150, 300, 301)] == [0, 1, 2, None]
        assert [topic.resolve(at) for at in (EARLIEST, LATEST, 1, Position.at_time(150))] == [0, 3, 1, 1]

    def test_offsets_say_what_is_there(self, topic: TopicHandle) -> None:
        before = topic.offsets()
        topic.append_many([b"a", b"b", b"c"])
        after = topic.offsets()

        assert (before.earliest, before.next) == (0, 0)
        assert (after.earliest, after.next) == (0, 3)
        with pytest.raises(Invalid):
            topic.offsets(1)

    # Deletes

    def test_deleted_records_are_counted_and_gone(self, topic: TopicHandle) -> None:
        keys = [b"a", b"b", b"a", b"c", b"c", b"d"]
        topic.append_many([b"%d" % number for number in range(6)], keys=keys, tags=["x", "y", "y", "y", "x", "x"])

        assert topic.delete_by_key(b"a") == 2
        assert topic.delete_by_tag("y") == 2
        assert topic.delete_by_offset(4, 5) == 1
        assert topic.delete_by_key(b"a") == 0

        assert values(topic.read()) == [b"5"]
        assert values(topic.read_by_key(b"a", history=True)) == values(topic.read_by_tag("y")) == []
        assert topic.offsets().next == 6

    def test_deleting_before_an_offset_moves_the_beginning(self, topic: TopicHandle) -> None:
        topic.append_many([b"%d" % number for number in range(5)])

        assert topic.delete_before(3) == 3

        assert topic.offsets().earliest == 3
        assert values(topic.read(EARLIEST)) == [b"3", b"4"]

    # Readers and groups

    def test_a_reader_goes_on_behind_what_it_acknowledged(self, topic: TopicHandle) -> None:
        topic.append_many([b"a", b"b", b"c"])
        reader = topic.reader("billing")
        assert (reader.name, reader.offset(), reader.note()) == ("billing", None, "")

        records = list(reader.read())
        assert reader.ack(records[1], "two done") == 2

        again = topic.reader("billing")
        assert (again.offset(), again.note()) == (2, "two done")
        assert values(again.read()) == [b"c"]
        assert values(topic.reader("other").read()) == [b"a", b"b", b"c"]

    def test_an_acknowledgement_never_goes_back_or_beyond_the_end(self, topic: TopicHandle) -> None:
        topic.append_many([b"a", b"b", b"c"])
        reader = topic.reader("billing")

        assert reader.ack_up_to(3) == 3
        assert reader.ack_up_to(1) == 3
        with pytest.raises(Invalid):
            reader.ack_up_to(4)
        with pytest.raises(Conflict) as refused:
            reader.ack_up_to(3, expected=1)

        assert refused.value.expected == 3
        assert reader.offset() == 3

    def test_a_reader_is_set_back_and_forgotten(self, topic: TopicHandle) -> None:
        topic.append_many([b"a", b"b", b"c"])
        reader = topic.reader("billing")
        reader.ack_up_to(3)

        assert reader.reset(EARLIEST) == 0
        assert values(reader.read()) == [b"a", b"b", b"c"]
        assert reader.reset(LATEST) == 3
        reader.forget()
        assert reader.offset() is None

    def test_a_reader_that_follows_gets_the_rest_and_then_what_comes(self, topic: TopicHandle) -> None:
        topic.append_many([b"a", b"b"])
        reader = topic.reader("billing")
        reader.ack_up_to(1)

        with reader.follow(timeout=PATIENT_S) as following:
            assert next(following).value == b"b"
            topic.append(b"c")
            assert next(following).value == b"c"

    def test_a_group_stands_where_it_committed_in_every_topic(self, log: Log, topic: TopicHandle) -> None:
        other = log.create_topic("shop/other", partitions=2)
        topic.append_many([b"a", b"b", b"c"])
        other.append_many([b"x", b"y"], partition=1)
        group = log.group("billing")
        assert group.fetch("shop/orders") is None

        assert group.commit("shop/orders", 2, note="n") == 2
        assert group.commit("shop/other", 1, 1, ack="cached") == 1

        assert (group.fetch("shop/orders"), group.note("shop/orders"), group.fetch("shop/other", 1)) == (2, "n", 1)
        stands = {(each.topic, each.partition): (each.offset, each.end, each.lag) for each in group.offsets()}
        assert stands == {("shop/orders", 0): (2, 3, 1), ("shop/other", 1): (1, 2, 1)}
        assert log.groups() == ["billing"]

    def test_of_two_commits_from_one_place_one_is_a_conflict(self, log: Log, topic: TopicHandle) -> None:
        topic.append_many([b"a", b"b", b"c"])
        group = log.group("billing")

        assert group.commit("shop/orders", 1, expected=0) == 1
        with pytest.raises(Conflict) as refused:
            group.commit("shop/orders", 2, expected=0)

        assert (refused.value.topic, refused.value.partition, refused.value.expected) == ("shop/orders", 0, 1)

    def test_a_group_is_set_back_and_deleted(self, log: Log, topic: TopicHandle) -> None:
        topic.append_many([b"a", b"b", b"c"])
        group = log.group("billing")
        group.commit("shop/orders", 3)

        assert group.reset("shop/orders", 1) == {0: 1}
        assert group.delete() == 1
        assert (group.fetch("shop/orders"), group.offsets(), log.groups()) == (None, [], [])

    # Ending

    def test_a_closed_log_says_so(self, home: SurfaceHome) -> None:
        log = home.open()
        topic = log.create_topic("shop/orders")
        topic.append(b"a")

        log.close()
        log.close()

        calls: list[Callable[[], object]] = [
            log.topics,
            lambda: topic.append(b"b"),
            lambda: topic.append_nowait(b"b"),
            lambda: topic.append_many_nowait([b"b"]),
            lambda: list(topic.read()),
        ]
        for call in calls:
            with pytest.raises(Closed):
                call()


class LastingContract(SurfaceContract):
    """The suite for logs whose records outlive them."""

    def test_what_a_log_had_is_there_when_it_is_opened_again(self, home: SurfaceHome) -> None:
        with home.open() as log:
            topic = log.create_topic("shop/orders", durability="fsync")
            topic.append_many([b"a", b"b"], producer=7, sequence=0)
            topic.reader("billing").ack_up_to(1)
            assert topic.offsets().durable == 2

        with home.open() as log:
            topic = log.topic("shop/orders")
            assert list(topic.append_many([b"a", b"b"], producer=7, sequence=0)) == [0, 1]
            assert topic.append(b"c") == 2
            assert values(topic.reader("billing").read()) == [b"b", b"c"]

    def test_a_flush_makes_everything_durable(self, topic: TopicHandle) -> None:
        topic.append_many([b"a", b"b", b"c"])

        topic.flush()

        assert topic.offsets().durable == 3

    def test_closing_the_log_ends_those_who_wait_in_it(self, log: Log, topic: TopicHandle) -> None:
        """A stream of a client raised what the library below it did, or gave what it had left of a page."""
        topic.append_many([b"%d" % number for number in range(5)])
        left, following = topic.read(), topic.follow(EARLIEST)
        assert [next(left).value, next(left).value] == [b"0", b"1"]
        taken = [next(following) for _ in range(5)]
        topic.append(b"live")
        taken.append(next(following))
        raised: list[BaseException] = []
        waits = threading.Event()

        def wait() -> None:
            waits.set()
            try:
                next(following)
            except BaseException as error:  # noqa: BLE001 - looked at below
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        waits.wait(PATIENT_S)
        # A moment, in which it comes to wait. It is the same if it does not.
        waiting.join(0.05)
        log.close()
        waiting.join(PATIENT_S)

        assert [type(error) for error in raised] == [Closed]
        for stream in (left, following):
            for _ in range(2):
                with pytest.raises(Closed):
                    next(stream)
            stream.close()
            assert list(stream) == []
        for call in (lambda: next(topic.follow()), lambda: next(topic.read()), lambda: topic.append(b"late")):
            with pytest.raises(Closed):
                call()

    # Bulk loads

    def test_a_bulk_load_comes_in_everywhere_at_once(self, log: Log) -> None:
        topic = log.create_topic("shop/orders", partitions=2)
        topic.append(b"first", partition=0)
        loads = log.loads_of("shop/orders")
        generation = loads.target("one").generation
        segments = [*loads.stage("one", _rows(b"a", b"b")), *loads.stage("one", _rows(b"c"), 1)]

        offered = loads.offer("one", segments, timeout=PATIENT_S, generation=generation)
        again = loads.offer("one", segments)
        loads.attach("one")
        ended = loads.wait("one", PATIENT_S)

        assert offered is not None and again is not None
        assert (offered.load_id, again.load_id, again.expires_at) == ("one", "one", offered.expires_at)
        assert (ended.status, ended.waiting) == ("committed", {})
        assert [(part.partition, part.start, part.records) for part in ended.parts] == [(0, 1, 2), (1, 0, 1)]
        assert values(topic.read(partition=0)) == [b"first", b"a", b"b"]
        assert values(topic.read(partition=1)) == [b"c"]
        assert loads.page() == ([loads.get("one")], None)
        with pytest.raises(Conflict):
            loads.abandon("one")

    def test_a_bulk_load_that_is_given_up_brings_nothing(self, log: Log) -> None:
        topic = log.create_topic("shop/orders")
        loads = log.loads_of("shop/orders")
        loads.offer("one", [])
        segments = loads.stage("two", _rows(b"a"))

        assert loads.abandon("two").status == loads.abandon("two").status == "abandoned"
        with pytest.raises(Conflict):
            loads.offer("two", segments)

        assert values(topic.read()) == []
        assert [load.load_id for load in loads.page(after="one", limit=5)[0]] == ["two"]

    def test_a_bulk_load_of_a_batch_comes_in_once(self, log: Log) -> None:
        topic = log.create_topic("shop/orders")
        loads = log.loads_of("shop/orders")
        batch = LoadBatch(query_id="8c2e", batch_id=0)
        first = loads.stage("first", _rows(b"a"))

        offered = loads.offer("first", first, batch=batch)
        standing = loads.offer("second", loads.stage("second", _rows(b"a")), batch=batch)
        loads.attach("first")
        loads.wait("first", PATIENT_S)

        assert offered is not None and standing is not None
        assert (offered.batch, standing.load_id) == (batch, "first")
        assert loads.offer("second", loads.stage("second", _rows(b"a")), batch=batch) is None
        assert values(topic.read()) == [b"a"]

    def test_the_id_of_a_backfill_stands_for_its_rows_for_ever(self, log: Log) -> None:
        topic = log.create_topic("shop/orders")
        loads = log.loads_of("shop/orders")
        plan = BackfillPlan(fingerprint="0a", loads=2)

        before = loads.backfill("old.orders_1")
        begun = loads.begin_backfill("old.orders_1", plan)
        batch = LoadBatch(query_id=begun.query_id, batch_id=0)
        loads.offer("first", loads.stage("first", _rows(b"a")), batch=batch)
        loads.attach("first")
        loads.wait("first", PATIENT_S)

        assert (before.plan, before.done, before.query_id) == (None, 0, begun.query_id)
        assert (begun.plan, begun.done) == (plan, 0)
        assert loads.begin_backfill("old.orders_1", plan) == loads.backfill("old.orders_1")
        assert (loads.backfill("old.orders_1").plan, loads.backfill("old.orders_1").done) == (plan, 1)
        for other in (BackfillPlan(fingerprint="0b", loads=2), BackfillPlan(fingerprint="0a", loads=1)):
            with pytest.raises(Conflict):
                loads.begin_backfill("old.orders_1", other)
        assert loads.begin_backfill("another", BackfillPlan(fingerprint="0b", loads=2)).done == 0
        assert values(topic.read()) == [b"a"]
        for wrong in ("a/b", "", "a" * 65, "ä"):
            with pytest.raises(Invalid):
                loads.backfill(wrong)
        with pytest.raises(UnknownTopic):
            log.loads_of("shop/none").begin_backfill("one", plan)

    def test_a_bulk_load_that_is_unknown_or_wrong_is_refused(self, log: Log) -> None:
        log.create_topic("shop/orders")
        loads = log.loads_of("shop/orders")

        for call in (loads.get, loads.attach, lambda load_id: loads.wait(load_id, 0)):
            with pytest.raises(UnknownLoad):
                call("none")
        with pytest.raises(Invalid):
            loads.offer("one", [*loads.stage("two", _rows(b"a"))])
        with pytest.raises(Invalid):
            loads.target("a/b")
        with pytest.raises(UnknownTopic):
            log.loads_of("shop/none").target("one")


def _rows(*column: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": list(column)}, schema=pa.schema([("value", pa.binary())]))


class BesideContract:
    """A log that is opened read-only beside its owner. Give it a fixture `logs`: the owner, and the other."""

    def test_what_the_owner_has_is_read_beside_it(self, logs: tuple[Log, Log]) -> None:
        owner, beside = logs
        topic = owner.create_topic("shop/orders", durability="fsync")
        topic.append_many([b"a", b"b", b"c"], keys=[b"1", b"2", b"1"])

        seen = beside.topic("shop/orders")

        assert values(seen.read()) == [b"a", b"b", b"c"]
        assert values(seen.read_by_key(b"1", history=True)) == [b"a", b"c"]
        assert (seen.offsets().earliest, seen.offsets().next) == (0, 3)
        assert values(list(seen.page(0, 1).records)) == [b"b", b"c"]

    def test_it_follows_the_owner(self, logs: tuple[Log, Log]) -> None:
        owner, beside = logs
        topic = owner.create_topic("shop/orders", durability="fsync")
        with beside.topic("shop/orders").follow(timeout=PATIENT_S) as following:
            topic.append(b"new")
            assert next(following).value == b"new"

    def test_its_readers_and_groups_are_kept(self, logs: tuple[Log, Log]) -> None:
        owner, beside = logs
        topic = owner.create_topic("shop/orders", durability="fsync")
        topic.append_many([b"a", b"b", b"c"])

        assert beside.topic("shop/orders").reader("billing").ack_up_to(1) == 1
        assert beside.group("shipping").commit("shop/orders", 2) == 2

        assert topic.reader("billing").offset() == 1
        assert owner.group("shipping").fetch("shop/orders") == 2

    def test_it_changes_nothing(self, logs: tuple[Log, Log]) -> None:
        owner, beside = logs
        owner.create_topic("shop/orders").append(b"a")
        seen = beside.topic("shop/orders")

        changes: list[Callable[[], object]] = [
            lambda: seen.append(b"b"),
            lambda: seen.append_many([b"b"]),
            lambda: seen.append_nowait(b"b"),
            lambda: seen.append_many_nowait([b"b"]),
            lambda: seen.delete_before(1),
            lambda: beside.create_topic("other"),
            lambda: beside.delete_topic("shop/orders"),
        ]
        for change in changes:
            with pytest.raises(Unsupported):
                change()

        assert [str(spec.name) for spec in owner.topics()] == ["shop/orders"]


@contextmanager
def called() -> Iterator[Callable[[asyncio_surface.Log], Log]]:
    """Gives logs for asyncio the surface of calls that return: an event loop in a thread of its own does them."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="surface-loop")
    thread.start()
    try:
        yield lambda log: cast("Log", _Called(log, loop))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Called:
    """A log, topic, reader, group or bulk loads of asyncio; a call is made in the loop, and returns what it came to."""

    def __init__(self, target: object, loop: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._loop = loop

    def __getattr__(self, name: str) -> object:
        found = getattr(self._target, name)
        return (lambda *args, **options: self._call(found, *args, **options)) if callable(found) else found

    def __enter__(self) -> _Called:
        self._call(getattr(self._target, "__aenter__"))  # noqa: B009  # a log of any class
        return self

    def __exit__(self, *failure: object) -> None:
        self._call(getattr(self._target, "__aexit__"), *failure)  # noqa: B009

    def _call(self, call: Callable[..., object], *args: object, **options: object) -> object:
        async def done() -> object:
            result = call(*args, **options)
            return await result if inspect.isawaitable(result) else result

        result = _run(self._loop, done())
        if hasattr(result, "__anext__"):
            return _CalledStream(result, self._loop)
        if inspect.isawaitable(result):
            return _CalledAck(result, self._loop)
        verbs = ("reader", "ack_up_to", "commit", "abandon", "consumer", "take", "replay")
        is_handle = not isinstance(result, msgspec.Struct) and any(hasattr(result, verb) for verb in verbs)
        return _Called(result, self._loop) if is_handle else result


class _CalledAck:
    """An acknowledgement of asyncio, for a thread that waits for it."""

    def __init__(self, ack: Awaitable[object], loop: asyncio.AbstractEventLoop) -> None:
        self._ack = ack
        self._loop = loop

    def __getattr__(self, name: str) -> object:
        return getattr(self._ack, name)

    def result(self, timeout: float | None = None) -> object:
        async def awaited() -> object:
            async with asyncio.timeout(timeout):
                return await self._ack

        return _run(self._loop, awaited())


class _CalledStream:
    """A stream of asyncio as an iterator."""

    def __init__(self, stream: Any, loop: asyncio.AbstractEventLoop) -> None:  # of any class
        self._stream = stream
        self._loop = loop

    def __iter__(self) -> _CalledStream:
        return self

    def __next__(self) -> object:
        try:
            return _run(self._loop, self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        _run(self._loop, self._stream.aclose())

    def __enter__(self) -> _CalledStream:
        _run(self._loop, self._stream.__aenter__())
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[object, object, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, loop).result()
