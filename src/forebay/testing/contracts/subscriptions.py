"""What every log that serves subscriptions must do, however it is reached. Knows the Protocols of `forebay.surface`.

Inherit `SubscriptionContract`, or `LastingSubscriptionContract` where records outlive their log, and give it a fixture
`home`, as for the contracts of `surface`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, cast

import pytest

from forebay.errors import Closed, Conflict, Invalid, UnknownSubscription, UnknownTopic
from forebay.records import EARLIEST, DeliveredRecord, Position
from forebay.surface import Consumer, Log, SubscribableTopic
from forebay.testing.contracts.surface import PATIENT_S, SurfaceHome

HELD_MANY = 15_000
"""More than one request of 64 KiB can name."""


def seen(delivered: Iterable[DeliveredRecord]) -> list[bytes | None]:
    """The values alone."""
    return [one.record.value for one in delivered]


def numbers(count: int, first: int = 0) -> list[bytes | None]:
    """So many values, each another."""
    return [b"%d" % number for number in range(first, first + count)]


def taken(consumer: Consumer, count: int) -> list[DeliveredRecord]:
    """So many records, taken one after the other."""
    found: list[DeliveredRecord] = []
    while len(found) < count:
        some = consumer.take(count, wait_s=PATIENT_S)
        assert some, f"{len(found)} of {count} records have come"
        found += some
    return found


def topic_of(log: Log, name: str = "shop/orders") -> SubscribableTopic:
    """A topic that exists, with what a log needs that serves subscriptions."""
    return cast("SubscribableTopic", log.topic(name))


def one_by_one(consumer: Consumer, done: Collection[int] = ()) -> list[tuple[int, int]]:
    """Offset and attempt of what comes after a restart, alone each; `done` are acknowledged, the others put off."""
    found = []
    while taken := consumer.take():
        for one in taken:
            found.append((one.record.offset, one.attempt))
            if one.record.offset in done:
                consumer.ack(one)
            else:
                consumer.nack(one, delay_ms=3_600_000)
    return found


class SubscriptionContract:
    """The suite. A test's name is its claim."""

    @pytest.fixture
    def log(self, home: SurfaceHome) -> Iterator[Log]:
        with home.open() as log:
            yield log

    @pytest.fixture
    def topic(self, log: Log) -> SubscribableTopic:
        log.create_topic("shop/orders")
        return topic_of(log)

    # Definitions

    def test_a_new_subscription_begins_at_the_end_unless_it_says_otherwise(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(4), timestamps=[10, 20, 30, 40])

        subscriptions = [
            topic.subscribe("latest"),
            topic.subscribe("earliest", start=EARLIEST),
            topic.subscribe("offset", start=1),
            topic.subscribe("time", start=Position.at_time(25)),
        ]
        topic.append(b"new")

        firsts = []
        for subscription in subscriptions:
            with subscription.consumer() as consumer:
                firsts.append(seen(consumer.take())[0])
        assert firsts == [b"new", b"0", b"1", b"2"]

    def test_a_subscription_is_the_same_for_all_who_ask_for_it(self, topic: SubscribableTopic) -> None:
        made = topic.subscribe("billing", mode="shared", ack_timeout_ms=500)

        found = topic.subscribe("billing", start=EARLIEST, mode="shared")

        assert found.spec == made.spec
        assert (found.name, found.spec.mode, found.spec.ack_timeout_ms) == ("billing", "shared", 500)
        assert [spec.name for spec in topic.subscriptions()] == ["billing"]
        with pytest.raises(Conflict, match="ack_timeout_ms"):
            topic.subscribe("billing", ack_timeout_ms=501)

    def test_a_subscription_is_found_by_its_name_and_never_made_by_a_look(self, topic: SubscribableTopic) -> None:
        with pytest.raises(UnknownSubscription, match="billing"):
            topic.subscription("billing")
        assert topic.subscriptions() == []
        made = topic.subscribe("billing", mode="shared")

        assert topic.subscription("billing").spec == made.spec

        made.delete()
        with pytest.raises(UnknownSubscription):
            topic.subscription("billing")

    @pytest.mark.parametrize(
        "options",
        [
            {"mode": "both"},
            {"window_records_max": 0},
            {"ack_timeout_ms": 0},
            {"backoff_min_ms": 10, "backoff_max_ms": 5},
            {"deliveries_max": 0},
            {"on_spent": "drop"},
            {"colour": "red"},
        ],
    )
    def test_options_that_cannot_be_are_refused(self, topic: SubscribableTopic, options: dict[str, object]) -> None:
        with pytest.raises(Invalid):
            topic.subscribe("billing", **options)  # type: ignore[arg-type]
        with pytest.raises(Invalid):
            topic.subscribe("no/name")
        assert topic.subscriptions() == []

    def test_a_deleted_subscription_leaves_no_place_behind(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(3))
        subscription = topic.subscribe("billing", start=EARLIEST)
        with subscription.consumer() as consumer:
            consumer.ack(*consumer.take(1))
            with pytest.raises(Conflict):
                subscription.delete()

        subscription.delete()

        assert topic.subscriptions() == []
        calls: list[Callable[[], object]] = [
            lambda: subscription.consumer().take(),
            lambda: subscription.seek(EARLIEST),
            subscription.pause,
            subscription.delete,
        ]
        for call in calls:
            with pytest.raises(Conflict, match="subscribe again"):
                call()
        with topic.subscribe("billing", start=EARLIEST, mode="shared").consumer() as consumer:
            assert [one.attempt for one in consumer.take()] == [1, 1, 1]

    def test_a_topic_that_is_created_again_has_no_subscriptions(self, log: Log, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(3))
        with topic.subscribe("billing", start=EARLIEST).consumer() as consumer:
            consumer.ack(*consumer.take())

        log.delete_topic("shop/orders")
        log.create_topic("shop/orders")

        again = topic_of(log)
        assert again.subscriptions() == []
        again.append(b"other")
        with pytest.raises((UnknownTopic, Closed)):
            topic.subscribe("late")
        with again.subscribe("billing", start=EARLIEST).consumer() as consumer:
            assert seen(consumer.take()) == [b"other"]

    # Deliveries

    def test_what_is_acknowledged_is_done_and_the_rest_comes_again(self, topic: SubscribableTopic) -> None:
        subscription = topic.subscribe("billing", start=EARLIEST)
        topic.append_many(numbers(5))
        with subscription.consumer() as consumer:
            taken = consumer.take()
            assert [(one.record.offset, one.attempt) for one in taken] == [(n, 1) for n in range(5)]
            assert consumer.take() == []
            assert consumer.ack(taken[0], taken[3]) == 2
            assert consumer.ack(taken[0]) == 0
            (lag,) = subscription.lag()
            assert (lag.cursor, lag.end, lag.done_above, lag.held, lag.lag) == (1, 5, 1, 3, 3)

        with subscription.consumer() as consumer:
            assert [(one.record.offset, one.attempt) for one in consumer.take()] == [(1, 2), (2, 2), (4, 2)]

    def test_a_take_is_limited_and_goes_on(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(7))
        with topic.subscribe("billing", start=EARLIEST).consumer(unacked_max=5) as consumer:
            assert seen(consumer.take(3)) == numbers(3)
            last = consumer.take(3)
            assert seen(last) == numbers(2, 3)
            assert consumer.take(3) == []
            consumer.ack(*last)
            assert seen(consumer.take(3)) == numbers(2, 5)

    def test_a_take_brings_what_is_due_however_much_is_held(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(200))
        with topic.subscribe("billing", start=EARLIEST).consumer() as consumer:
            taken = [consumer.take(200, wait_s=0.01) for _ in range(4)]

        assert [one.record.value for some in taken for one in some] == numbers(200)

    def test_a_refused_record_comes_again_after_its_delay(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(3))
        subscription = topic.subscribe("billing", start=EARLIEST, backoff_min_ms=60_000)
        with subscription.consumer() as consumer:
            taken = consumer.take()
            assert consumer.nack(taken[0], delay_ms=0) == 1
            assert consumer.nack(taken[1], delay_ms=30) == 1
            assert consumer.nack(taken[2]) == 1
            again = consumer.take(1)
            assert [(one.record.offset, one.attempt) for one in again] == [(0, 2)]
            later = consumer.take(wait_s=PATIENT_S)
            assert [(one.record.offset, one.attempt) for one in later] == [(1, 2)]
            assert subscription.lag()[0].delayed == 1

    def test_a_refusal_that_comes_twice_is_not_about_the_next_delivery(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(2))
        subscription = topic.subscribe("billing", start=EARLIEST, deliveries_max=2)
        with subscription.consumer() as consumer:
            first, other = consumer.take()
            assert consumer.nack(first, delay_ms=0) == 1
            (again,) = consumer.take(wait_s=PATIENT_S)
            assert (again.record.offset, again.attempt) == (first.record.offset, 2)

            assert consumer.nack(first, other, delay_ms=0) == 1

            assert consumer.ack(again) == 1
            assert [(one.record.value, one.attempt) for one in consumer.take(wait_s=PATIENT_S)] == [(b"1", 2)]

    @pytest.mark.slow
    def test_as_many_records_as_a_consumer_may_hold_are_refused_or_acknowledged_by_one_call(self, log: Log) -> None:
        log.create_topic("many", partitions=3)
        topic = topic_of(log, "many")
        for partition in range(3):
            topic.append_many([b""] * (HELD_MANY // 3), partition=partition)
        subscription = topic.subscribe("billing", start=EARLIEST, window_records_max=HELD_MANY, backoff_min_ms=0)
        with subscription.consumer(unacked_max=HELD_MANY) as consumer:
            held = taken(consumer, HELD_MANY)
            assert consumer.nack(*held, delay_ms=0, error="x" * 70_000) == HELD_MANY
            again = taken(consumer, HELD_MANY)
            assert {one.attempt for one in again} == {2}

            assert consumer.ack(*again) == HELD_MANY

            assert consumer.ack(*again) == 0
            assert consumer.take() == []
        assert [(lag.cursor, lag.lag) for lag in subscription.lag()] == [(HELD_MANY // 3, 0)] * 3

    def test_what_is_not_acknowledged_in_time_comes_again(self, topic: SubscribableTopic) -> None:
        topic.append(b"slow")
        subscription = topic.subscribe("billing", start=EARLIEST, mode="shared", ack_timeout_ms=50)
        with subscription.consumer("stalls") as stalls, subscription.consumer("works") as works:
            (held,) = stalls.take()
            (again,) = works.take(wait_s=PATIENT_S)
            assert again.attempt == 2
            assert stalls.ack(held) == 0
            assert works.ack(again) == 1
        assert subscription.lag()[0].lag == 0

    def test_a_record_is_dropped_after_its_last_delivery(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(2))
        subscription = topic.subscribe("billing", start=EARLIEST, deliveries_max=2, on_spent="drop")
        with subscription.consumer() as consumer:
            for attempt in (1, 2):
                (poison,) = consumer.take(1)
                assert (poison.record.offset, poison.attempt) == (0, attempt)
                consumer.nack(poison, delay_ms=0)
            assert seen(consumer.take()) == [b"1"]
            assert subscription.lag()[0].cursor == 1

    def test_a_record_that_blocks_stops_its_partition_until_the_operator_moves_it(self, log: Log) -> None:
        log.create_topic("two", partitions=2)
        topic = topic_of(log, "two")
        for partition in (0, 1):
            topic.append_many(numbers(2), partition=partition)
        subscription = topic.subscribe("billing", start=EARLIEST, deliveries_max=1)
        with subscription.consumer() as consumer:
            both = [*consumer.take(), *consumer.take()]
            taken = {(one.record.partition, one.record.offset): one for one in both}
            consumer.nack(taken[0, 0])
            topic.append(b"more", partition=0)
            topic.append(b"more", partition=1)
            # A consumer may see an append a moment after it has returned.
            more = [*consumer.take(wait_s=PATIENT_S), *consumer.take()]
            assert [one.record.partition for one in more] == [1]
            assert [lag.spent for lag in subscription.lag()] == [1, 0]

        assert subscription.seek(1, partition=0) == {0: 1}
        with subscription.consumer() as consumer:
            both = [*consumer.take(), *consumer.take()]
            assert {one.record.offset for one in both if one.record.partition == 0} == {1, 2}

    def test_the_window_bounds_what_is_delivered_ahead(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(9))
        with topic.subscribe("billing", start=EARLIEST, window_records_max=4).consumer() as consumer:
            taken = consumer.take()
            assert seen(taken) == numbers(4)
            consumer.ack(*taken[1:])
            assert consumer.take() == []
            consumer.ack(taken[0])
            assert seen(consumer.take()) == numbers(4, 4)

    def test_deleted_records_are_not_delivered(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(6))
        subscription = topic.subscribe("billing", start=EARLIEST)
        topic.delete_by_offset(1, 3)
        with subscription.consumer() as consumer:
            assert seen(consumer.take()) == [b"0", b"3", b"4", b"5"]
        topic.delete_by_offset(3, 5)

        with subscription.consumer() as consumer:
            taken = consumer.take()
            assert seen(taken) == [b"0", b"5"]
            consumer.ack(*taken)
        assert subscription.lag()[0].cursor == 6

    def test_a_consumer_waits_for_what_comes(self, topic: SubscribableTopic) -> None:
        with topic.subscribe("billing").consumer() as consumer:
            assert consumer.take() == []
            writer = threading.Timer(0.05, lambda: topic.append(b"late"))
            writer.start()
            assert seen(consumer.take(wait_s=PATIENT_S)) == [b"late"]
            writer.join()

    def test_records_come_one_by_one(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(3))
        subscription = topic.subscribe("billing", start=EARLIEST)
        found = []
        with subscription.consumer() as consumer:
            for one in consumer.each(wait_s=0.01):
                found.append(one.record.value)
                consumer.ack(one)
        assert found == numbers(3)
        assert subscription.lag()[0].lag == 0

    def test_a_loop_that_ends_leaves_what_it_has_not_reached_as_if_it_had_not_been_delivered(
        self, topic: SubscribableTopic
    ) -> None:
        topic.append_many(numbers(40))
        subscription = topic.subscribe("billing", start=EARLIEST, mode="shared")
        with subscription.consumer() as consumer, subscription.consumer() as other:
            rows = cast("Any", consumer.each(wait_s=PATIENT_S))
            with pytest.raises(ZeroDivisionError), contextlib.closing(rows):
                for count, one in enumerate(rows, 1):
                    if count == 10:
                        raise ZeroDivisionError
                    assert consumer.ack(one) == 1
            assert [stand.held for stand in subscription.lag()] == [1]
            rest = [(one.record.value, one.attempt) for one in other.take(40)]
            assert rest == [(b"%d" % number, 1) for number in range(10, 40)]

            # And one that is left in the middle, and not cleaned up when its consumer is closed.
            topic.append_many(numbers(30))
            rows = cast("Any", consumer.each(wait_s=PATIENT_S))
            kept = {next(rows).record.offset for _ in range(10)}
            consumer.close()
            again = {one.record.offset: one.attempt for one in other.take(40)}
            assert sorted(again) == [9, *range(40, 70)]
            assert {offset for offset, attempt in again.items() if attempt > 1} == kept | {9}
            rows.close()

    def test_a_closed_consumer_takes_nothing(self, topic: SubscribableTopic) -> None:
        topic.append(b"a")
        consumer = topic.subscribe("billing", start=EARLIEST).consumer("c")
        with consumer:
            taken = consumer.take()
        consumer.close()

        calls: list[Callable[[], object]] = [consumer.take, lambda: consumer.ack(*taken), lambda: consumer.nack(*taken)]
        for call in calls:
            with pytest.raises(Closed):
                call()

    # Modes

    def test_an_exclusive_subscription_has_one_consumer(self, topic: SubscribableTopic) -> None:
        subscription = topic.subscribe("billing", start=EARLIEST)
        with subscription.consumer("first"):
            with pytest.raises(Conflict, match='"first"'), subscription.consumer("second"):
                pass
            assert subscription.consumers() == ["first"]
        with subscription.consumer("second"):
            assert subscription.consumers() == ["second"]

    def test_the_next_consumer_takes_over_where_the_first_one_leaves(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(4))
        subscription = topic.subscribe("billing", start=EARLIEST, mode="failover")
        second = subscription.consumer("second")
        with subscription.consumer("first") as first, second:
            taken = first.take(3)
            assert second.take() == []
            first.ack(taken[0])
            first.close()
            assert [(one.record.offset, one.attempt) for one in second.take()] == [(1, 2), (2, 2), (3, 1)]

    def test_shared_records_go_to_one_consumer_each(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(6))
        subscription = topic.subscribe("billing", start=EARLIEST, mode="shared")
        with subscription.consumer() as first, subscription.consumer() as second:
            assert seen(first.take(2)) == numbers(2)
            theirs = second.take(9)
            assert seen(theirs) == numbers(4, 2)
            second.ack(*theirs)
            with pytest.raises(Invalid):
                second.ack_cumulative(theirs[-1])
            first.close()
            assert seen(second.take()) == numbers(2)

    def test_a_key_is_in_order_and_with_one_consumer_at_a_time(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(6), keys=[b"a", b"b", b"a", b"b", b"a", None])
        subscription = topic.subscribe("billing", start=EARLIEST, mode="key_shared")
        with subscription.consumer() as first, subscription.consumer() as second:
            (a,) = first.take(1)
            assert seen(second.take()) == [b"1", b"3", b"5"]
            assert seen(first.take()) == [b"2", b"4"]
            topic.append(b"6", key=b"a")
            assert second.take() == []
            first.nack(a, delay_ms=0)
            first.close()
            last = seen(second.take())
            if last[-1:] != [b"6"]:
                # A consumer may see an append a moment after it has returned.
                last += seen(second.take(wait_s=PATIENT_S))
            assert last == [b"0", b"2", b"4", b"6"]

    def test_one_acknowledgement_covers_all_before_it(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(5))
        subscription = topic.subscribe("billing", start=EARLIEST, mode="failover")
        with subscription.consumer() as consumer:
            taken = consumer.take(4)
            assert consumer.ack_cumulative(taken[2]) == 3
            assert subscription.lag()[0].cursor == 3

    # Operators

    def test_a_paused_subscription_delivers_nothing_and_takes_acknowledgements(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(4))
        subscription = topic.subscribe("billing", start=EARLIEST)
        with subscription.consumer() as consumer:
            taken = consumer.take(2)
            subscription.pause()
            assert subscription.spec.is_paused
            assert consumer.take() == []
            assert consumer.ack(*taken) == 2
            subscription.resume()
            assert seen(consumer.take()) == numbers(2, 2)

    # Changes

    def test_limits_are_altered_while_a_consumer_is_attached(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(5))
        subscription = topic.subscribe("billing", start=EARLIEST, window_records_max=2)
        with subscription.consumer() as consumer:
            assert seen(consumer.take()) == numbers(2)

            altered = subscription.alter(window_records_max=4, ack_timeout_ms=50)

            assert (altered.window_records_max, altered.ack_timeout_ms, altered.backoff_min_ms) == (4, 50, 1000)
            assert subscription.spec == altered
            assert topic.subscriptions() == [altered]
            assert seen(consumer.take(wait_s=PATIENT_S)) == numbers(2, 2)
            # By the new time-out, long before that of the first two.
            assert [(one.record.value, one.attempt) for one in consumer.take(wait_s=PATIENT_S)][:1] == [(b"2", 2)]
            assert subscription.alter() == altered

    def test_a_record_that_may_be_delivered_more_often_is_due_again(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(2))
        subscription = topic.subscribe("billing", start=EARLIEST, deliveries_max=1)
        with subscription.consumer() as consumer:
            first, second = consumer.take()
            consumer.nack(first)
            assert consumer.take() == []
            consumer.ack(second)

            subscription.alter(deliveries_max=3)

            (again,) = consumer.take(wait_s=PATIENT_S)
            assert (again.record.value, again.attempt) == (b"0", 2)
            consumer.nack(again, delay_ms=0)
            # Delivered twice: as often as it may be now.
            subscription.alter(deliveries_max=2)
            assert consumer.take() == []
            assert subscription.lag()[0].spent == 1
            subscription.alter(deliveries_max=None)
            (last,) = consumer.take(wait_s=PATIENT_S)
            assert (consumer.ack(last), subscription.lag()[0].lag) == (1, 0)

    def test_what_becomes_of_spent_records_is_altered_while_no_consumer_is_attached(
        self, log: Log, topic: SubscribableTopic
    ) -> None:
        log.create_topic("shop/grave")
        topic.append_many(numbers(3))
        subscription = topic.subscribe("billing", start=EARLIEST, deliveries_max=1)
        with subscription.consumer() as consumer:
            first, *rest = consumer.take()
            consumer.nack(first)
            consumer.ack(*rest)
            with pytest.raises(Conflict, match="close them"):
                subscription.alter(on_spent="drop")
            assert subscription.spec.on_spent == "block"

        altered = subscription.alter(on_spent="dead_letter")
        assert altered.dead_letter_topic == "shop/orders.billing.dead_letters"
        assert subscription.alter(dead_letter_topic="shop/grave").dead_letter_topic == "shop/grave"
        with subscription.consumer() as consumer:
            assert consumer.take() == []
        assert [letter.record.value for letter in subscription.dead_letters().letters()] == [b"0"]

        assert subscription.alter(on_spent="drop").dead_letter_topic is None
        topic.append(b"bad")
        with subscription.consumer() as consumer:
            consumer.nack(*consumer.take(wait_s=PATIENT_S))
            assert consumer.take() == []
        assert subscription.lag()[0].lag == 0
        with pytest.raises(Invalid, match="on_spent"):
            subscription.dead_letters()

    @pytest.mark.parametrize(
        "changes",
        [
            {"mode": "shared"},
            {"ack_timeout_ms": 0},
            {"backoff_min_ms": 70_000},
            {"dead_letter_topic": "shop/dead"},
            {"on_spent": "drop"},
            {"deliveries_max": 2, "on_spent": "dead_letter", "dead_letter_topic": "shop/orders"},
            {"unknown": 1},
        ],
    )
    def test_changes_that_cannot_be_are_refused(self, topic: SubscribableTopic, changes: dict[str, object]) -> None:
        subscription = topic.subscribe("billing")
        with pytest.raises(Invalid):
            subscription.alter(**changes)  # type: ignore[arg-type]
        assert topic.subscriptions() == [subscription.spec]

    def test_a_deleted_subscription_is_not_altered(self, topic: SubscribableTopic) -> None:
        subscription = topic.subscribe("billing")
        topic.subscription("billing").delete()
        topic.subscribe("billing")
        with pytest.raises(Conflict, match="deleted"):
            subscription.alter(ack_timeout_ms=7)
        assert topic.subscription("billing").spec.ack_timeout_ms == 30_000

    def test_a_subscription_is_moved_while_no_consumer_is_attached(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(4), timestamps=[10, 20, 30, 40])
        subscription = topic.subscribe("billing", start=EARLIEST)
        with subscription.consumer() as consumer:
            taken = consumer.take()
            consumer.ack(taken[0], taken[2])
            with pytest.raises(Conflict):
                subscription.seek(EARLIEST)

        assert subscription.seek(Position.at_time(25)) == {0: 2}
        with subscription.consumer() as consumer:
            assert [(one.record.offset, one.attempt) for one in consumer.take()] == [(2, 1), (3, 1)]
        assert subscription.seek(EARLIEST) == {0: 0}
        assert [record.offset for record in subscription.peek(2)] == [0, 1]
        assert subscription.seek() == {0: 4}
        assert subscription.peek() == []
        with pytest.raises(Invalid):
            subscription.seek(5)

    def test_a_look_takes_nothing(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(4))
        subscription = topic.subscribe("billing", start=EARLIEST)
        with subscription.consumer() as consumer:
            consumer.ack(consumer.take(2)[1])
            assert [record.value for record in subscription.peek()] == [b"0", b"2", b"3"]
            assert seen(consumer.take()) == [b"2", b"3"]

    def test_a_look_brings_a_few_mebibytes_and_one_record_at_least(self, topic: SubscribableTopic) -> None:
        large = [b"%d" % number * 1024 * 1024 for number in range(6)]
        for value in large:
            topic.append(value)
        subscription = topic.subscribe("billing", start=EARLIEST)

        found = [record.value for record in subscription.peek(100)]

        assert found == large[: len(found)] and 1 <= len(found) <= 4
        assert 1 <= len(subscription.peek(2)) <= 2
        with pytest.raises(Invalid):
            subscription.peek(0)

    def test_partitions_that_are_added_are_delivered_from_their_first_record_on(self, log: Log) -> None:
        log.create_topic("grows")
        topic = topic_of(log, "grows")
        subscription = topic.subscribe("billing")
        with subscription.consumer() as consumer:
            assert consumer.take() == []
            log.alter_topic("grows", partitions=3)
            topic_of(log, "grows").append(b"added", partition=2)
            (one,) = consumer.take(wait_s=PATIENT_S)
            assert (one.record.partition, one.record.value) == (2, b"added")
            consumer.ack(one)
        assert [(lag.partition, lag.cursor) for lag in subscription.lag()] == [(0, 0), (1, 0), (2, 1)]


class LastingSubscriptionContract(SubscriptionContract):
    """The suite for logs whose records outlive them."""

    def test_acknowledgements_and_deliveries_survive_a_restart(self, home: SurfaceHome) -> None:
        with home.open() as log:
            log.create_topic("shop/orders")
            topic = topic_of(log)
            topic.append_many(numbers(6))
            subscription = topic.subscribe("billing", start=EARLIEST, deliveries_max=5)
            subscription.pause()
            subscription.resume()
            with subscription.consumer() as consumer:
                taken = consumer.take()
                consumer.ack(taken[0], taken[2], taken[4])
                consumer.nack(taken[3], delay_ms=0)
                consumer.take()

        with home.open() as log:
            subscription = topic_of(log).subscribe("billing", deliveries_max=5)
            assert (subscription.lag()[0].cursor, subscription.lag()[0].lag) == (1, 3)
            with subscription.consumer() as consumer:
                assert one_by_one(consumer, done={3}) == [(1, 2), (3, 3), (5, 2)]

        # The cursor has not moved: what is done above it is stored all the same.
        with home.open() as log, topic_of(log).subscribe("billing").consumer() as consumer:
            assert one_by_one(consumer) == [(1, 3), (5, 3)]
