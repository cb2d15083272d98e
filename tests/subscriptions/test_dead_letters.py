"""Dead letters of the embedded log where things clash: other owners, answers that come late, calls at the same time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

import forebay
from forebay import EARLIEST, Conflict, DeliveryState, Invalid, Settings, Storage, aio
from forebay.format.metadata.keys import progress_key
from forebay.format.metadata.value import decode_value
from forebay.progress import Progress
from forebay.records import HEADERS_MAX, Record, SpentReason
from forebay.routers import book, rules
from forebay.storage.topic import Topic
from forebay.subscriptions.deadletters import (
    HOPS_MAX,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    ORIGIN_TOPIC,
    SpentRecord,
    letter_headers,
    parse_letter,
)
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import SubscriptionSpec, TopicSpec
from tests.support.waiting import PATIENCE, until


def subscribed(log: forebay.Storage, **options: Any) -> forebay.Subscription:
    """A topic with three records, whose dead letters go to the topic `dead`."""
    topic = log.create_topic("shop/orders")
    topic.append_many([b"0", b"1", b"2"])
    chosen: dict[str, Any] = {"deliveries_max": 1, "on_spent": "dead_letter", "dead_letter_topic": "dead", **options}
    return topic.subscribe("s", start=EARLIEST, **chosen)


def values(subscription: forebay.Subscription) -> list[bytes | None]:
    return [letter.record.value for letter in subscription.dead_letters().letters()]


@pytest.mark.slow
def test_a_dead_letter_topic_that_another_process_owns_has_a_named_state_and_nothing_is_lost(tmp_path: Path) -> None:
    refused = {"dead"}
    with forebay.open(tmp_path, may_own=lambda ref: ref.spec.topic not in refused) as log:
        subscription = subscribed(log)
        with subscription.consumer() as consumer:
            consumer.nack(*consumer.take())
            assert consumer.take() == []
            (lag,) = subscription.lag()
            assert (lag.state, lag.spent, lag.cursor) == (DeliveryState.DEAD_LETTERS_ELSEWHERE, 3, 0)

            refused.clear()
            until(lambda: consumer.take(wait_s=0.1) == [] and subscription.lag()[0].dead_letters == 3)

        assert values(subscription) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("is_cumulative", [False, True])
def test_an_ack_that_comes_while_the_record_is_on_its_way_does_not_count(
    monkeypatch: pytest.MonkeyPatch, *, is_cumulative: bool
) -> None:
    counted = []
    with forebay.open(":memory:") as log:
        subscription = subscribed(log)
        with subscription.consumer() as consumer:
            taken = consumer.take()
            consumer.nack(taken[0])
            append = Topic.append

            def acked_meanwhile(topic: Topic, *args: Any, **options: Any) -> int:
                if topic.name == "default/dead":
                    counted.append(consumer.ack_cumulative(taken[2]) if is_cumulative else consumer.ack(*taken))
                return append(topic, *args, **options)

            monkeypatch.setattr(Topic, "append", acked_meanwhile)
            assert consumer.take() == []

            assert counted == [2]
            assert values(subscription) == [b"0"]
            assert subscription.lag()[0].lag == 0


def test_other_consumers_do_not_wait_for_a_dead_letter_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.open(":memory:") as log:
        subscription = subscribed(log, mode="shared")
        append, is_sending, may_go_on = Topic.append, threading.Event(), threading.Event()

        def slow(topic: Topic, *args: Any, **options: Any) -> int:
            if topic.name == "default/dead":
                is_sending.set()
                assert may_go_on.wait(PATIENCE)
            return append(topic, *args, **options)

        monkeypatch.setattr(Topic, "append", slow)
        with subscription.consumer() as sender, subscription.consumer() as other:
            first, *rest = sender.take()
            sender.ack(*rest)
            sender.nack(first)
            found: list[list[forebay.DeliveredRecord]] = []
            threads = [threading.Thread(target=lambda one=one: found.append(one.take())) for one in (sender, other)]
            threads[0].start()
            assert is_sending.wait(PATIENCE)
            threads[1].start()
            threads[1].join(2)
            has_waited = threads[1].is_alive()
            may_go_on.set()
            for thread in threads:
                thread.join(PATIENCE)

        assert not has_waited
        assert found == [[], []]
        assert values(subscription) == [b"0"]


@pytest.mark.slow
def test_an_append_whose_outcome_is_unknown_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer gets lost after the append; the next one is for a longer batch, and still each comes once."""
    with forebay.open(":memory:") as log:
        subscription = subscribed(log)
        append, lost = Topic.append, [True]

        def unanswered(topic: Topic, *args: Any, **options: Any) -> int:
            offset = append(topic, *args, **options)
            if topic.name == "default/dead" and lost:
                lost.clear()
                raise forebay.Indeterminate("the answer is lost")
            return offset

        monkeypatch.setattr(Topic, "append", unanswered)
        with subscription.consumer() as consumer:
            taken = consumer.take()
            consumer.nack(taken[0])
            assert consumer.take() == []
            assert subscription.lag()[0].state is DeliveryState.DEAD_LETTERS_FAILING
            assert "the answer is lost" in (subscription.lag()[0].failure or "")
            consumer.nack(*taken[1:])
            until(lambda: consumer.take(wait_s=0.1) == [] and subscription.lag()[0].spent == 0)

        assert values(subscription) == [b"0", b"1", b"2"]


def test_a_record_with_as_many_headers_as_may_be_becomes_a_dead_letter() -> None:
    with forebay.open(":memory:") as log:
        subscription = subscribed(log)
        with subscription.consumer() as consumer:
            consumer.ack(*consumer.take())
        log.topic("shop/orders").append(b"many", headers=[(f"h{number}", b"") for number in range(HEADERS_MAX)])
        with subscription.consumer() as consumer:
            consumer.nack(*consumer.take())
            assert consumer.take() == []

            (lag,) = subscription.lag()
            assert (lag.state, lag.spent) == (DeliveryState.DELIVERING, 0)
        (letter,) = subscription.dead_letters().letters()
        assert len(letter.record.headers) == HEADERS_MAX


def test_a_group_that_is_reset_begins_another_run_and_nothing_is_skipped(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        subscription = subscribed(log)
        with subscription.consumer() as consumer:
            consumer.nack(*consumer.take())
        log.group("s").reset("shop/orders", EARLIEST)

        with subscription.consumer() as consumer:
            assert [one.record.value for one in consumer.take()] == [b"0", b"1", b"2"]


def test_the_run_is_stored_before_the_first_dead_letter_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind the first moments of a process, in which deliveries are stored before they are made."""
    stored = []
    clock = ManualClock()
    with Storage.open(":memory:", Settings(), clock=clock) as log:
        subscription = subscribed(log)
        append = Topic.append

        def looked_at(topic: Topic, *args: Any, **options: Any) -> int:
            entry = log.metadata.get(progress_key("shop", "orders", "s", 0))
            assert entry is not None
            stored.append(decode_value(entry.value, Progress)[0].run)
            return append(topic, *args, **options)

        monkeypatch.setattr(Topic, "append", looked_at)
        with subscription.consumer() as consumer:
            clock.advance(60)
            consumer.nack(*consumer.take())
            assert consumer.take() == []

    assert len(stored) == 3
    assert len(set(stored)) == 1 and isinstance(stored[0], str)


def test_two_subscriptions_that_are_created_at_once_do_not_close_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.open(":memory:") as log:
        a, b = log.create_topic("a"), log.create_topic("b")
        check, calls = SubscriptionStore.check_no_circle, []

        def raced(store: SubscriptionStore, wanted: SubscriptionSpec) -> None:
            check(store, wanted)
            calls.append(wanted.topic)
            if len(calls) == 2:
                # After its last look, the other way is created.
                b.subscribe("s", deliveries_max=1, on_spent="dead_letter", dead_letter_topic="a")

        monkeypatch.setattr(SubscriptionStore, "check_no_circle", raced)
        with pytest.raises(Invalid, match="circle"):
            a.subscribe("s", deliveries_max=1, on_spent="dead_letter", dead_letter_topic="b")

        assert [len(topic.subscriptions()) for topic in (a, b)] == [0, 1]


def test_a_subscription_that_is_created_at_once_keeps_the_dispatch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.open(":memory:") as log:
        topic = log.create_topic("ticker", dispatch="non_reliable")
        find, is_raced = SubscriptionStore.of_topic, list[bool]()

        def raced(store: SubscriptionStore, spec: TopicSpec) -> list[SubscriptionSpec]:
            found = find(store, spec)
            if not is_raced:
                is_raced.append(True)
                topic.subscribe("screen")
            return found

        monkeypatch.setattr(SubscriptionStore, "of_topic", raced)
        with pytest.raises(Conflict, match="screen"):
            log.alter_topic("ticker", dispatch="reliable")

        assert log.topic("ticker").spec.dispatch == "non_reliable"


def test_one_replay_of_a_topic_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.open(":memory:") as log:
        subscription = subscribed(log)
        with subscription.consumer() as consumer:
            consumer.nack(*consumer.take())
        letters, begun, go_on = subscription.dead_letters(), threading.Event(), threading.Event()
        append = Topic.append_many

        def slow(topic: Topic, *args: Any, **options: Any) -> Any:
            begun.set()
            assert go_on.wait(60)
            return append(topic, *args, **options)

        monkeypatch.setattr(Topic, "append_many", slow)
        replaying = threading.Thread(target=letters.replay)
        replaying.start()
        assert begun.wait(60)
        for call in (letters.replay, letters.purge, log.topic("dead").dead_letters().purge):
            with pytest.raises(Conflict, match="try again"):
                call()
        go_on.set()
        replaying.join()

        assert letters.letters() == []
        assert [record.value for record in log.topic("shop/orders").read(3)] == [b"0", b"1", b"2"]


def test_an_event_loop_never_sends_dead_letters_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    append = Topic.append

    def seen(topic: Topic, *args: Any, **options: Any) -> int:
        threads.append(threading.current_thread().name)
        return append(topic, *args, **options)

    async def consume() -> list[bytes | None]:
        async with aio.open(":memory:") as log:
            topic = await log.create_topic("shop/orders")
            await topic.append_many([b"0", b"1"])
            subscription = await topic.subscribe("s", start=EARLIEST, deliveries_max=1, on_spent="dead_letter")
            monkeypatch.setattr(Topic, "append", seen)
            async with subscription.consumer() as consumer:
                await consumer.nack(*await consumer.take())
                assert await consumer.take(wait_s=0.1) == []
                letters = await subscription.dead_letters()
                return [letter.record.value for letter in await letters.letters()]

    assert asyncio.run(consume()) == [b"0", b"1"]
    assert len(threads) == 2
    assert threading.main_thread().name not in threads


def test_a_definition_of_an_earlier_version_is_reliable() -> None:
    fields = {"namespace": "shop", "topic": "orders", "topic_id": "0" * 32, "partitions": 1}

    assert TopicSpec(**fields).dispatch == "reliable"  # type: ignore[arg-type]


@pytest.mark.parametrize("forged", [ORIGIN_PARTITION, ORIGIN_OFFSET])
def test_a_record_that_claims_to_come_from_no_place_is_no_dead_letter(forged: str) -> None:
    """Such a one would be noted for a replay that no partition takes, and stop every replay behind it."""
    spent = SpentRecord(Record(1, 7, 5, b"k", b"v", None, ()), 3, SpentReason.NACK, None)
    headers = letter_headers(spent, "shop/orders", "s", 9)
    written = Record(0, 0, 5, b"k", b"v", None, headers)
    assert parse_letter(written) is not None

    named = tuple((name, b"-1" if name == forged else value) for name, value in headers)

    assert parse_letter(msgspec.structs.replace(written, headers=named)) is None


def test_a_record_that_was_a_dead_letter_too_often_is_sent_no_more_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with forebay.open(":memory:") as log:
        subscription = subscribed(log)
        topic = log.topic("shop/orders")
        topic.append(b"seen", headers=[(ORIGIN_TOPIC, b"shop/orders")] * (HOPS_MAX - 1))
        topic.append(b"circling", headers=[(ORIGIN_TOPIC, b"shop/orders")] * HOPS_MAX)
        topic.append(b"last")
        with subscription.consumer() as consumer:
            consumer.nack(*consumer.take())
            assert consumer.take() == []

        assert values(subscription) == [b"0", b"1", b"2", b"seen", b"last"]
        assert subscription.lag()[0].lag == 0
    assert [line for line in caplog.messages if "is not sent to default/dead again" in line]


def test_a_router_that_is_created_while_a_subscription_is_closes_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.open(":memory:") as log:
        topic, _ = log.create_topic("shop/orders"), log.create_topic("dead")
        check, calls = SubscriptionStore.check_no_circle, []

        def raced(store: SubscriptionStore, wanted: SubscriptionSpec) -> None:
            check(store, wanted)
            calls.append(wanted.name)
            if len(calls) == 2:
                # Behind the last look of the one that is under way.
                forebay.Routers(log).create("back", sources=["dead"], destination="shop/orders")

        monkeypatch.setattr(SubscriptionStore, "check_no_circle", raced)
        with pytest.raises(Invalid, match="circle"):
            topic.subscribe("s", deliveries_max=1, on_spent="dead_letter", dead_letter_topic="dead")

        assert len(calls) == 2
        assert log.topic("shop/orders").subscriptions() == []


def test_a_subscription_that_is_created_while_a_router_is_closes_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.open(":memory:") as log:
        topic, _ = log.create_topic("shop/orders"), log.create_topic("dead")
        check, calls = rules.check_no_cycle, []

        def raced(routers: Any, sources: Any, destination: Any, *more: Any) -> None:
            check(routers, sources, destination, *more)
            calls.append(str(destination))
            if len(calls) == 2:
                topic.subscribe("s", deliveries_max=1, on_spent="dead_letter", dead_letter_topic="dead")

        monkeypatch.setattr(book, "check_no_cycle", raced)
        routers = forebay.Routers(log)
        with pytest.raises(Invalid, match="circle"):
            routers.create("back", sources=["dead"], destination="shop/orders")

        assert len(calls) == 2
        assert routers.all() == []
