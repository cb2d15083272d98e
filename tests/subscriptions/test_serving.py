"""Subscriptions of the embedded log: threads, restarts, other owners, what is stored, and what it costs."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, Self

import msgspec
import numpy as np
import pytest

import forebay
from forebay import (
    EARLIEST,
    Conflict,
    DeliveredRecord,
    DeliveryState,
    Moved,
    Subscription,
    Topic,
    Unavailable,
    Unsupported,
    aio,
)
from forebay.format.metadata.keys import progress_key, subscription_key
from forebay.format.metadata.value import decode_value, encode_value
from forebay.metadata import MemoryMetadata, Put
from forebay.progress import ACKED_BYTES_MAX, ATTEMPTS_STORED_MAX, Progress, ProgressStore, ReaderName, moves_on
from forebay.settings import ProgressSettings
from forebay.storage.cursors import Cursors
from forebay.storage.subscriptions import SubscriptionDriver
from forebay.subscriptions.ahead import TakenAhead
from forebay.subscriptions.cursor import acked_of, progress_of, window_of
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.subscriptions.dispatch import Dispatch, ServedPartition
from forebay.subscriptions.window import Window, WindowLimits
from forebay.testing.contracts.subscriptions import one_by_one
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import FaultyMetadata
from forebay.topics import SubscriptionSpec, TopicSpec
from tests.support.waiting import PATIENCE, until

TOPIC = TopicSpec(namespace="shop", topic="orders", topic_id="0" * 32, partitions=1)
SPEC = SubscriptionSpec.create(TOPIC, "billing", subscription_id="1" * 32, created_at=0, window_records_max=1_000_000)


def topic_in(log: forebay.Storage, count: int, partitions: int = 1) -> Topic:
    topic = log.create_topic("shop/orders", partitions=partitions)
    topic.append_many([b"%d" % number for number in range(count)], partition=0)
    return topic


def stored(log: forebay.Storage, topic: Topic, partition: int = 0) -> Progress:
    entry = log.metadata.get(progress_key("shop", "orders", "billing", partition))
    assert entry is not None
    return decode_value(entry.value, Progress)[0]


# Threads


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
def test_threads_share_all_records_once_each(mode: str) -> None:
    """Each consumer acknowledges what it takes, so no record comes twice, and none is missing."""
    with forebay.open(":memory:") as log:
        topic = log.create_topic("shop/orders", partitions=3)
        subscription = topic.subscribe("billing", mode=mode)
        count, found = 600, list[DeliveredRecord]()
        together = {key: set[int]() for key in range(7)}
        broken: list[str] = []

        def work(number: int) -> None:
            with subscription.consumer(f"c{number}") as consumer:
                while len(found) < count:
                    taken = consumer.take(10, wait_s=0.05)
                    for one in taken:
                        holders = together[int(one.record.key or b"0")]
                        holders.add(number)
                        if mode == "key_shared" and len(holders) > 1:
                            broken.append(f"{one.record.key!r} is with {holders}")
                    found.extend(taken)
                    for one in taken:
                        together[int(one.record.key or b"0")].discard(number)
                    consumer.ack(*taken)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for number in range(count):
            topic.append(b"%d" % number, key=b"%d" % (number % 7))
        for thread in threads:
            thread.join(PATIENCE)

        assert not broken
        assert sorted(int(one.record.value or b"") for one in found) == list(range(count))
        if mode == "key_shared":
            for key in range(7):
                order = [one.record.offset for one in found if one.record.key == b"%d" % key]
                assert order == sorted(order)
        assert sum(lag.lag for lag in subscription.lag()) == 0


@pytest.mark.slow
def test_a_consumer_that_is_dropped_without_being_closed_leaves() -> None:
    with forebay.open(":memory:") as log:
        topic = topic_in(log, 3)
        subscription = topic.subscribe("billing", start=EARLIEST)
        consumer = subscription.consumer("lost")
        assert len(consumer.take()) == 3

        del consumer
        gc.collect()

        with subscription.consumer("next") as consumer:
            assert [one.attempt for one in consumer.take()] == [2, 2, 2]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_consumer_that_holds_all_it_may_gets_its_records_again_after_the_time_out(mode: str) -> None:
    with forebay.open(":memory:") as log:
        subscription = topic_in(log, 2).subscribe("billing", start=EARLIEST, mode=mode, ack_timeout_ms=100)
        with subscription.consumer(unacked_max=1) as consumer:
            assert [one.attempt for one in consumer.take()] == [1]
            assert [one.attempt for one in consumer.take(wait_s=10)] == [2]


class Woken(list[int]):
    """Consumers by their number that wait, and which of them were woken."""

    def __init__(self, dispatch: Dispatch, *consumers: int) -> None:
        self.dispatch = dispatch
        for consumer in consumers:
            self.wait(consumer)

    def wait(self, consumer: int) -> None:
        self.dispatch.wait(consumer, lambda: self.append(consumer))


def keyed(log: forebay.Storage, *keys: bytes) -> tuple[Topic, SubscriptionDriver, list[int]]:
    """A topic with a record of each key, and four consumers of it."""
    topic = log.create_topic("shop/orders")
    topic.append_many([b"v"] * len(keys), keys=list(keys), partition=0)
    driver = topic.subscribe("billing", start=EARLIEST, mode="key_shared").driver
    return topic, driver, [driver.attach(str(number), 2) for number in range(4)]


def test_of_consumers_that_wait_for_keys_one_is_woken_if_there_is_one_that_it_may_take() -> None:
    with forebay.open(":memory:") as log:
        _, driver, (first, second, third, fourth) = keyed(log, b"a", b"b", b"c", b"c")
        assert [one.record.offset for one in driver.pull(first, 2)] == [0, 1]
        assert [one.record.offset for one in driver.pull(second, 1)] == [2]
        woken = Woken(driver.dispatch, third, fourth)

        # The record that is left is of a key that another has.
        driver.ack(first, {0: [0, 1]})
        driver.dispatch.unwait(first, is_leaving=True)
        assert woken == []

        driver.ack(second, {0: [2]})
        assert woken == [third]
        assert [one.record.offset for one in driver.pull(third, 2)] == [3]


def test_a_record_of_a_key_that_a_consumer_has_wakes_that_one() -> None:
    """Another consumer reads it, and may not take it."""
    with forebay.open(":memory:") as log:
        topic, driver, (first, second, third, _) = keyed(log, b"a")
        assert len(driver.pull(second, 2)) == 1
        woken = Woken(driver.dispatch, first, second, third)

        topic.append(b"v", key=b"a")
        assert woken == [first]
        woken.wait(first)
        assert driver.pull(first, 2) == []

        assert woken == [first, second]
        assert [one.record.offset for one in driver.pull(second, 2)] == [1]


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive"])
def test_a_consumer_that_holds_all_it_may_is_woken_by_its_own_answers_alone(mode: str) -> None:
    with forebay.open(":memory:") as log:
        topic = topic_in(log, 1)
        driver = topic.subscribe("billing", start=EARLIEST, mode=mode).driver
        number = driver.attach("busy", 1)
        assert len(driver.pull(number, 1)) == 1
        woken = Woken(driver.dispatch, number)
        if mode != "exclusive":
            topic.append(b"next")
            assert woken == []

        driver.ack(number, {0: [0]})

        assert woken == [number]


def test_consumers_of_a_paused_subscription_wait_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery whose time-out ends meanwhile is no reason to look all the time."""
    with forebay.open(":memory:") as log:
        subscription = topic_in(log, 1).subscribe("billing", start=EARLIEST, ack_timeout_ms=100)
        with subscription.consumer() as consumer:
            assert len(consumer.take()) == 1
            subscription.pause()
            pulls = []
            pull = SubscriptionDriver.pull

            def counted(driver: SubscriptionDriver, number: int, count: int) -> list[DeliveredRecord]:
                pulls.append(number)
                return pull(driver, number, count)

            monkeypatch.setattr(SubscriptionDriver, "pull", counted)
            assert consumer.take(wait_s=1.0) == []
            assert len(pulls) < 200


@pytest.mark.parametrize("is_cumulative", [False, True])
def test_a_late_ack_of_the_spent_record_has_its_partition_go_on(*, is_cumulative: bool) -> None:
    with forebay.open(":memory:") as log:
        subscription = topic_in(log, 2).subscribe("billing", start=EARLIEST, deliveries_max=1, on_spent="block")
        with subscription.consumer() as consumer:
            taken = consumer.take(1)
            consumer.nack(*taken)
            assert consumer.take() == []
            assert subscription.lag()[0].state is DeliveryState.BLOCKED

            assert (consumer.ack_cumulative(taken[0]) if is_cumulative else consumer.ack(taken[0])) == 1

            assert subscription.lag()[0].state is DeliveryState.DELIVERING
            assert [one.record.offset for one in consumer.take()] == [1]


def test_a_consumer_that_could_not_attach_to_all_partitions_is_attached_to_none(tmp_path: Path) -> None:
    refused = {1}
    with forebay.open(tmp_path, may_own=lambda ref: ref.partition not in refused) as log:
        topic = log.create_topic("shop/orders", partitions=2)
        subscription = topic.subscribe("billing")
        with pytest.raises(Moved), subscription.consumer():
            pass
        assert subscription.consumers() == []

        refused.clear()
        with subscription.consumer():
            assert len(subscription.consumers()) == 1


def test_a_log_that_is_opened_to_read_serves_no_subscription(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        topic_in(log, 1).subscribe("billing", start=EARLIEST)
        with forebay.open(tmp_path, read_only=True) as beside:
            topic = beside.topic("shop/orders")
            assert [spec.name for spec in topic.subscriptions()] == ["billing"]
            with pytest.raises(Unsupported), topic.subscribe("billing").consumer():
                pass
            with pytest.raises(Unsupported):
                topic.subscribe("other")


# What is stored


def test_acknowledgements_are_stored_in_the_background_and_at_once_when_it_is_asked_for(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        topic = topic_in(log, 5)
        subscription = topic.subscribe("billing", start=EARLIEST)
        assert stored(log, topic).offset == 0
        with subscription.consumer() as consumer:
            taken = consumer.take()
            consumer.ack(taken[0], taken[2])
            subscription.flush()

            progress = stored(log, topic)
            assert (progress.offset, list(acked_of(progress))) == (1, [2])
            assert progress.attempts == ((1, 1), (3, 1), (4, 1))
            assert progress.epoch == topic.epoch()


def test_what_was_acknowledged_is_stored_when_the_last_consumer_has_left() -> None:
    with forebay.open(":memory:", {"progress": {"flush_interval_ms": 60_000}}) as log:
        topic = topic_in(log, 3)
        subscription = topic.subscribe("billing", start=EARLIEST, mode="shared")
        with subscription.consumer() as last:
            with subscription.consumer() as first:
                first.ack(*first.take(1))
            last.ack(*last.take(1))

        assert stored(log, topic).offset == 2


def test_deliveries_are_stored_before_they_are_made_in_the_first_moments_of_a_process(tmp_path: Path) -> None:
    """A record that ends the process when it is delivered counts its deliveries all the same."""
    with forebay.open(tmp_path, {"progress": {"flush_interval_ms": 600_000}}) as log:
        topic = topic_in(log, 200)
        with topic.subscribe("billing", start=EARLIEST).consumer() as consumer:
            taken = consumer.take(200)

            assert len(taken) == ATTEMPTS_STORED_MAX
            assert stored(log, topic).attempts == tuple((one.record.offset, 1) for one in taken)
            # What is due comes all the same, however much is held, and is stored before as far as there is room.
            assert [len(consumer.take(200)) for _ in range(4)] == [64, 64, 8, 0]


def test_a_window_comes_back_as_it_was_stored() -> None:
    window = Window(5, WindowLimits(records_max=100))
    window.offer(5, [(5, 50)], 50)
    window.take(1, 30, 0)
    window.ack(1, [6, 7, 20])

    progress = progress_of(window.copied(), SPEC, 3)
    again = window_of(SPEC, decode_value(encode_value(progress), Progress)[0])

    assert (again.cursor, list(again.acked())) == (5, [6, 7, 20])
    assert again.attempts(ATTEMPTS_STORED_MAX) == window.attempts(ATTEMPTS_STORED_MAX)
    assert window_of(SPEC, None).cursor == 0


@pytest.mark.parametrize("step", [2, 3, 7])
def test_what_is_done_above_the_cursor_always_fits_for_a_window_of_the_usual_size(step: int) -> None:
    window = Window(0, WindowLimits(records_max=4_000))
    window.offer(0, [(0, 4_000)], 4_000)
    taken = window.take(1, 4_000, 0)
    window.ack(1, taken.offsets[1::step])

    progress = progress_of(window.copied(), SPEC, 1)

    assert acked_of(progress) == window.acked()


def test_of_more_than_fits_the_lowest_offsets_are_stored() -> None:
    window = Window(0, WindowLimits(records_max=100_000))
    window.offer(0, [(0, 100_000)], 100_000)
    window.ack(1, window.take(1, 100_000, 0).offsets[1::2])

    progress = progress_of(window.copied(), SPEC, 1)

    assert isinstance(progress.attempts, tuple) and len(progress.attempts) == ATTEMPTS_STORED_MAX
    assert not isinstance(progress.acked, msgspec.UnsetType) and len(progress.acked.bitmap) <= ACKED_BYTES_MAX
    kept = list(acked_of(progress))
    assert len(kept) > 1_000
    assert kept == list(window.acked())[: len(kept)]


def test_cursors_of_earlier_versions_are_read_and_those_of_readers_are_as_before() -> None:
    old = b'{"version":1,"min_reader":1,"crc":0,"data":{"offset":7,"incarnation":"x","epoch":0,"note":""}}'
    plain = Progress(offset=7, incarnation="x")

    assert b"acked" not in encode_value(plain) and b"attempts" not in encode_value(plain)
    assert encode_value(plain).partition(b'"data":')[2] == old.partition(b'"data":')[2]
    assert list(acked_of(plain)) == []


def test_a_cursor_of_a_subscription_moves_with_what_is_done_above_and_never_by_an_earlier_owner() -> None:
    window = Window(0, WindowLimits())
    window.offer(0, [(0, 10)], 10)
    window.take(1, 10, 0)
    before = progress_of(window.copied(), SPEC, 5)
    window.ack(1, [4])
    after = progress_of(window.copied(), SPEC, 5)

    assert moves_on(before, after)
    assert not moves_on(after, after)
    assert not moves_on(after, msgspec.structs.replace(before, epoch=4))
    assert not moves_on(msgspec.structs.replace(after, offset=3), before)
    assert moves_on(Progress(offset=0, incarnation=TOPIC.topic_id), before)


@pytest.mark.slow
def test_ten_thousand_subscriptions_are_written_in_two_hundred_transactions() -> None:
    metadata = FaultyMetadata(MemoryMetadata())
    metadata.transaction([], [Put("/forebay/topics/shop/orders", encode_value(TOPIC))])
    clock = ManualClock()
    cursors = Cursors(ProgressStore(metadata, "/forebay", clock), ProgressSettings(flush_interval_ms=600_000), clock)
    cursors.worker.stop()

    class Source:
        def __init__(self) -> None:
            self.at = 0

        def progress(self) -> Progress:
            self.at += 1
            return Progress(offset=self.at, incarnation=TOPIC.topic_id, epoch=1, attempts=())

    sources = [(ReaderName("shop", "orders", f"s{number}"), Source()) for number in range(10_000)]
    for _ in range(2):
        metadata.calls = {}
        for name, source in sources:
            assert cursors.mark(name, 0, TOPIC.topic_id, source)
        cursors.flush()

    assert metadata.calls == {"transaction": 200}
    at = cursors.at("s9999", TOPIC, 0)
    assert at is not None and at.offset == 2


def test_a_subscription_goes_on_where_a_group_of_its_name_stands() -> None:
    with forebay.open(":memory:") as log:
        topic = topic_in(log, 5)
        log.group("billing").commit("shop/orders", 3)

        with topic.subscribe("billing", start=EARLIEST).consumer() as consumer:
            assert [one.record.offset for one in consumer.take()] == [3, 4]


def test_many_partitions_are_created_in_several_transactions_and_an_interrupted_creation_is_gone_on_with() -> None:
    with forebay.open(":memory:") as log:
        topic = log.create_topic("shop/orders", partitions=200)
        topic.append(b"old", partition=150)
        reader = topic.reader("billing")
        # As a creation leaves it that ended behind its first transaction.
        reader.reset(EARLIEST, 0)
        topic.append(b"between", partition=0)

        subscription = topic.subscribe("billing")

        assert [(lag.partition, lag.lag) for lag in subscription.lag() if lag.lag] == [(0, 1)]
        subscription.delete()
        assert log.metadata.range("/forebay/progress/") == []
        assert log.metadata.get(subscription_key("shop", "orders", "billing")) is None


# Owners


def test_a_subscription_moves_with_its_topic(tmp_path: Path) -> None:
    shared = {
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(tmp_path / "store")},
        "metadata": {"path": str(tmp_path / "meta.db")},
    }
    with forebay.open(tmp_path / "one", shared) as one:
        topic = topic_in(one, 6)
        subscription = topic.subscribe("billing", start=EARLIEST)
        consumer = subscription.consumer()
        taken = consumer.take()
        consumer.ack(taken[0], taken[3])
        one.seal_topic("shop/orders")

        with forebay.open(tmp_path / "two", shared) as two:
            consumer.close()
            moved = two.topic("shop/orders").subscribe("billing")
            with moved.consumer() as there:
                assert one_by_one(there) == [(1, 2), (2, 2), (4, 2), (5, 2)]
                with pytest.raises(Moved), subscription.consumer():
                    pass


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[tuple[forebay.Storage, forebay.Storage]]:
    """Two logs with one metadata store: the second one has what the first one owns."""
    shared = {
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(tmp_path / "store")},
        "metadata": {"path": str(tmp_path / "meta.db")},
    }
    with forebay.open(tmp_path / "one", shared) as one, forebay.open(tmp_path / "two", shared) as two:
        yield one, two


@pytest.mark.slow
def test_what_another_process_changes_reaches_consumers_that_are_attached(
    elsewhere: tuple[forebay.Storage, forebay.Storage],
) -> None:
    one, two = elsewhere
    subscription = topic_in(one, 4).subscribe("billing", start=EARLIEST, window_records_max=2, deliveries_max=9)
    with subscription.consumer() as consumer:
        assert len(consumer.take()) == 2
        other = two.topic("shop/orders").subscription("billing")

        other.alter(window_records_max=4, ack_timeout_ms=77, on_spent="drop")

        assert [delivered.record.offset for delivered in consumer.take(wait_s=PATIENCE)] == [2, 3]
        spec = subscription.spec
        assert (spec.window_records_max, spec.ack_timeout_ms) == (4, 77)
        assert spec.on_spent == "block", "what becomes of spent records changes when the last consumer has left"
        other.pause()
        until(lambda: consumer.take(wait_s=0.1) == [] and subscription.spec.is_paused)
    with subscription.consumer():
        assert subscription.spec == other.spec
        assert subscription.spec.on_spent == "drop"


def test_consumers_go_on_while_the_metadata_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    with forebay.Storage.open(":memory:", forebay.Settings(), clock=clock) as log:
        topic = topic_in(log, 1)
        with topic.subscribe("billing", start=EARLIEST).consumer() as consumer:
            consumer.ack(*consumer.take())
            clock.advance(60)
            asked = []

            def away(_store: SubscriptionStore) -> int:
                asked.append(True)
                raise forebay.Unavailable("the metadata store is away")

            monkeypatch.setattr(SubscriptionStore, "revision", away)
            topic.append(b"more")
            assert [delivered.record.value for delivered in consumer.take()] == [b"more"]
            assert asked


def test_a_look_for_changes_is_one_read_for_all_subscriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    revision, asked = SubscriptionStore.revision, []

    def counted(store: SubscriptionStore) -> int:
        asked.append(clock.monotonic())
        return revision(store)

    with forebay.Storage.open(":memory:", forebay.Settings(), clock=clock) as log:
        topic = topic_in(log, 1)
        subscriptions = [topic.subscribe(f"s{number}") for number in range(20)]
        consumers = [subscription.consumer() for subscription in subscriptions]
        for consumer in consumers:
            consumer.take()
        monkeypatch.setattr(SubscriptionStore, "revision", counted)
        for _ in range(10):
            clock.advance(0.5)
            for consumer in consumers:
                consumer.take()
        for consumer in consumers:
            consumer.close()

    assert len(asked) == 10


def test_dead_letter_topics_that_are_altered_at_once_do_not_close_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.open(":memory:") as log:
        a, b = log.create_topic("a"), log.create_topic("b")
        first, second = a.subscribe("s", deliveries_max=1), b.subscribe("s", deliveries_max=1)
        check, calls = SubscriptionStore.check_no_circle, list[str]()

        def raced(store: SubscriptionStore, wanted: SubscriptionSpec) -> None:
            check(store, wanted)
            calls.append(wanted.topic)
            if len(calls) == 2:
                # After its last look, another thread opens the other way.
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(second.alter, on_spent="dead_letter", dead_letter_topic="a").result(PATIENCE)

        monkeypatch.setattr(SubscriptionStore, "check_no_circle", raced)
        with pytest.raises(forebay.Invalid, match="circle"):
            first.alter(on_spent="dead_letter", dead_letter_topic="b")

        assert [topic.subscriptions()[0].dead_letter_topic for topic in (a, b)] == [None, "default/a"]


@pytest.mark.parametrize(
    "use",
    [
        lambda subscription: subscription.consumer("late").take(),
        lambda subscription: subscription.seek(EARLIEST),
        lambda subscription: subscription.alter(ack_timeout_ms=7),
        lambda subscription: subscription.pause(),
        lambda subscription: subscription.resume(),
    ],
    ids=["attach", "seek", "alter", "pause", "resume"],
)
def test_a_subscription_that_is_being_deleted_is_of_no_use_but_for_its_deletion(
    use: Callable[[Subscription], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store went away between the mark and the removal of the cursors, or another process is at it."""
    with forebay.open(":memory:") as log:
        topic = topic_in(log, 3)
        subscription = topic.subscribe("billing", start=EARLIEST)
        with monkeypatch.context() as away:
            away.setattr(ProgressStore, "forget", _unavailable)
            with pytest.raises(Unavailable):
                subscription.delete()

        with pytest.raises(Conflict, match="billing of shop/orders is being deleted: subscribe again"):
            use(subscription)
        assert subscription.consumers() == []

        subscription.delete()
        assert topic.subscriptions() == []
        with topic.subscribe("billing", start=EARLIEST).consumer() as consumer:
            assert len(consumer.take()) == 3


def _unavailable(*_: object, **__: object) -> None:
    raise Unavailable("the store is away")


def test_a_record_is_not_delivered_after_its_delete_has_returned() -> None:
    with forebay.open(":memory:") as log:
        topic = topic_in(log, 4)
        with topic.subscribe("billing", start=EARLIEST).consumer() as consumer:
            # All four are read ahead, and kept until they are taken.
            assert len(consumer.take(1)) == 1
            topic.delete_by_offset(1, 3)
            assert [one.record.offset for one in consumer.take()] == [3]


def test_a_consumer_learns_that_its_topic_was_deleted() -> None:
    with forebay.open(":memory:") as log:
        topic = topic_in(log, 3)
        subscription = topic.subscribe("billing", start=EARLIEST)
        consumer = subscription.consumer()
        taken = consumer.take(2)
        log.delete_topic("shop/orders")

        with pytest.raises((forebay.UnknownTopic, forebay.Closed)):
            consumer.take(wait_s=PATIENCE)
        consumer.ack(*taken)
        consumer.close()


# asyncio


def test_many_consumers_of_an_event_loop_need_no_thread_each() -> None:
    async def main() -> tuple[Counter[bytes | None], int]:
        async with aio.open(":memory:") as log:
            topic = await log.create_topic("shop/orders")
            subscription = await topic.subscribe("billing", mode="shared")
            found: Counter[bytes | None] = Counter()
            threads = 0

            async def work() -> None:
                nonlocal threads
                async with subscription.consumer() as consumer:
                    while found.total() < 200:
                        for one in await consumer.take(5, wait_s=0.05):
                            found[one.record.value] += 1
                            threads = max(threads, threading.active_count())
                            await consumer.ack(one)

            workers = [asyncio.create_task(work()) for _ in range(30)]
            for number in range(200):
                await topic.append(b"%d" % number)
            await asyncio.gather(*workers)
            return found, threads

    before = threading.active_count()
    found, threads = asyncio.run(main())

    assert found == Counter(b"%d" % number for number in range(200))
    assert threads - before < 20


def test_a_take_that_is_cancelled_has_taken_nothing() -> None:
    async def main() -> list[int]:
        async with aio.open(":memory:") as log:
            topic = await log.create_topic("shop/orders")
            subscription = await topic.subscribe("billing")
            async with subscription.consumer() as consumer:
                waiting = asyncio.create_task(consumer.take(wait_s=PATIENCE))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                await topic.append(b"a")
                return [one.attempt for one in await consumer.take(wait_s=PATIENCE)]

    assert asyncio.run(main()) == [1]


def test_a_flush_waits_for_one_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the background worker asked where a cursor stands, a flush found nothing to write and returned."""
    whole: Callable[[Dispatch, ServedPartition], Progress] = Dispatch.progress
    asked, go_on = threading.Event(), threading.Event()

    def slow(dispatch: Dispatch, served: ServedPartition) -> Progress:
        asked.set()
        assert go_on.wait(PATIENCE)
        return whole(dispatch, served)

    with forebay.open(":memory:") as log:
        topic = log.create_topic("shop/orders")
        subscription = topic.subscribe("s", start=EARLIEST)
        topic.append(b"x")
        with subscription.consumer() as consumer:
            (one,) = consumer.take(wait_s=PATIENCE)
            subscription.flush()
            monkeypatch.setattr(Dispatch, "progress", slow)
            consumer.ack(one)
            first, second = (threading.Thread(target=subscription.flush) for _ in range(2))
            first.start()
            assert asked.wait(PATIENCE)
            second.start()
            second.join(0.2)
            has_waited = second.is_alive()
            go_on.set()
            assert has_waited
            for thread in (first, second):
                thread.join(PATIENCE)
                assert not thread.is_alive()
        assert subscription.lag()[0].cursor == 1


def test_what_was_out_when_a_process_ended_comes_alone_over_all_partitions_until_it_is_answered(tmp_path: Path) -> None:
    slow = {"progress": {"flush_interval_ms": 600_000}}
    with forebay.open(tmp_path, slow) as log:
        topic = topic_in(log, 3, partitions=2)
        topic.append_many([b"a", b"b", b"c"], partition=1)
        with topic.subscribe("billing", mode="shared", start=EARLIEST).consumer() as consumer:
            assert len(consumer.take()) + len(consumer.take()) == 6

    with forebay.open(tmp_path, slow) as log:
        subscription = log.topic("shop/orders").subscription("billing")
        with subscription.consumer() as consumer, subscription.consumer() as other:
            for left in range(6, 0, -1):
                (one,) = consumer.take()
                assert one.attempt == 2
                assert other.take() == consumer.take() == [], f"{left} are left, and one is out"
                consumer.ack(one)
            log.topic("shop/orders").append_many([b"d", b"e"], partition=0)
            assert len(consumer.take()) == 2


def test_what_was_out_comes_together_once_a_consumer_has_kept_one_for_the_first_moments(tmp_path: Path) -> None:
    clock = ManualClock()
    with forebay.Storage.open(tmp_path, forebay.Settings(), clock=clock) as log:
        consumer = topic_in(log, 3).subscribe("billing", start=EARLIEST).consumer()
        assert len(consumer.take()) == 3
        consumer.close()
    with forebay.Storage.open(tmp_path, forebay.Settings(), clock=clock) as log:
        consumer = log.topic("shop/orders").subscription("billing").consumer()
        assert len(consumer.take()) == 1
        assert consumer.take() == []
        clock.advance(3)
        assert len(consumer.take()) == 2
        consumer.close()


def test_a_loop_takes_ahead_of_a_quick_body_and_not_of_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counts, put = ManualClock(), list[int](), TakenAhead.put

    def counted(ahead: TakenAhead, found: Sequence[DeliveredRecord], now: float, ack_timeout_ms: int) -> None:
        counts.append(len(found))
        put(ahead, found, now, ack_timeout_ms)

    monkeypatch.setattr(TakenAhead, "put", counted)
    with forebay.Storage.open(":memory:", forebay.Settings(), clock=clock) as log:
        subscription = topic_in(log, 600).subscribe("billing", start=EARLIEST)
        with subscription.consumer(unacked_max=100) as consumer:
            consumer.ack(*consumer.take(1))
            clock.advance(3)
            for number, one in enumerate(consumer.each(wait_s=0.0), 1):
                assert one.record.offset == number
                if number > 250:
                    clock.advance(1)
                consumer.ack(one)
                if number == 300:
                    break
            assert subscription.lag()[0].held == 0

    assert counts[:8] == [1, 2, 4, 8, 16, 32, 64, 100]
    assert counts[-10:] == [1] * 10


@pytest.mark.parametrize("mode", ["exclusive", "shared", "key_shared"])
def test_a_loop_that_acknowledges_each_record_makes_few_calls_for_it(mode: Any) -> None:
    """Arrays of one record, and a lock that was taken several times, made fifty of them."""
    clock, count = ManualClock(), 400
    with forebay.Storage.open(":memory:", forebay.Settings(), clock=clock) as log:
        topic = topic_in(log, 1)
        topic.append_many([b"x"] * 2 * count, keys=[b"%d" % (number % 7) for number in range(2 * count)])
        with topic.subscribe("billing", start=EARLIEST, mode=mode).consumer() as consumer:
            consumer.ack(*consumer.take(1))
            clock.advance(3)
            records = consumer.each(wait_s=0.0)
            assert isinstance(records, Generator)
            for _ in range(count):
                consumer.ack(next(records))

            with CountedCalls() as counted:
                for _ in range(count):
                    assert consumer.ack(next(records)) == 1

            records.close()
            assert counted.of_numpy <= count, "of a take, which is of many, and of nothing else"
            assert counted.of_forebay <= 30 * count


class CountedCalls:
    """Calls that a block makes in this thread: of functions of Forebay but its checked locks, and of numpy's arrays."""

    def __init__(self) -> None:
        self.of_forebay = self.of_numpy = 0

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call":
            self.of_forebay += "/forebay/" in name and not name.endswith("/locks.py")
        elif event == "c_call":
            # `item` is one number of an array, and makes none.
            owner = getattr(called, "__self__", None)
            self.of_numpy += isinstance(owner, np.ndarray | np.ufunc) and called.__name__ != "item"

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def test_what_was_taken_ahead_is_given_back_before_others_get_it_by_the_ack_time_out() -> None:
    clock = ManualClock()
    with forebay.Storage.open(":memory:", forebay.Settings(), clock=clock) as log:
        subscription = topic_in(log, 60).subscribe("billing", start=EARLIEST, mode="shared", ack_timeout_ms=10_000)
        with subscription.consumer() as consumer, subscription.consumer() as other:
            consumer.ack(*consumer.take(1))
            clock.advance(3)
            rows = consumer.each(wait_s=0.0)
            for _ in range(8):
                consumer.ack(next(rows))
            assert subscription.lag()[0].held > 1
            clock.advance(5)
            one = next(rows)
            assert (one.record.offset, one.attempt) == (9, 1)
            assert subscription.lag()[0].held == 1
            assert all(delivered.attempt == 1 for delivered in other.take())


def test_a_loop_of_asyncio_takes_ahead_and_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatch, "is_careful", lambda _: False)

    async def main() -> None:
        async with aio.open(":memory:") as log:
            topic = await log.create_topic("shop/orders")
            await topic.append_many([b"%d" % number for number in range(60)])
            subscription = await topic.subscribe("billing", start=EARLIEST)
            async with subscription.consumer() as consumer:
                rows = consumer.each(wait_s=0.0)
                for _ in range(8):
                    await consumer.ack(await anext(rows))
                assert (await subscription.lag())[0].held == 7
                await rows.aclose()  # type: ignore[attr-defined]
                assert (await subscription.lag())[0].held == 0
                assert [one.attempt for one in await consumer.take(60)] == [1] * 52

    asyncio.run(main())
