"""What ends while a page is read for a consumer: page, records and deliveries count only for what they were begun for.

With a real log. Each test puts a gate into the read of a page, and does inside it what may end that for which it is
read. `test_gated_schedules.py` draws many such schedules over simulated topics.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import forebay
from forebay import EARLIEST, Closed, Storage, Topic, aio
from forebay.clock import Clock
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.topics import SubscriptionSpec
from tests.support.gates import HeldStep, StepGate
from tests.support.waiting import PATIENCE, async_until


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepGate]:
    found = StepGate()
    HeldStep(Topic, "batch_page", "after").guard(monkeypatch, found)
    yield found
    found.released.set()


def filled(log: Storage, count: int = 50) -> Topic:
    topic = log.create_topic("shop/orders")
    topic.append_many([b"%d" % number for number in range(count)], partition=0)
    return topic


def offsets(delivered: list[forebay.DeliveredRecord]) -> list[int]:
    return [one.record.offset for one in delivered]


def reading(gate: StepGate, consumer: forebay.Consumer, count: int = 10) -> Callable[[], list[int]]:
    """Have a thread read for a consumer, and stand in the gate; what it takes in the end, if anything."""
    found: list[int] = []

    def take() -> None:
        with suppress(Closed):
            found.extend(offsets(consumer.take(count)))

    gate.armed.set()
    thread = threading.Thread(target=take)
    thread.start()
    assert gate.reached.wait(PATIENCE)

    def end() -> list[int]:
        gate.released.set()
        thread.join(PATIENCE)
        return found

    return end


def test_a_page_that_was_read_for_a_consumer_that_left_is_not_given_to_the_next(gate: StepGate) -> None:
    with forebay.open(":memory:") as log:
        topic = filled(log)
        subscription = topic.subscribe("s", start=EARLIEST)
        first = subscription.consumer("a").__enter__()
        assert len(first.take()) == 50
        topic.append(b"next", partition=0)
        end = reading(gate, first)
        first.close()
        with subscription.consumer("b") as second:
            assert end() == []

            assert offsets(second.take(3)) == [0, 1, 2]


def test_a_take_that_was_cancelled_in_a_slow_read_loses_nothing(gate: StepGate) -> None:
    async def run() -> list[int]:
        async with aio.open(":memory:") as log:
            topic = await log.create_topic("shop/orders")
            await topic.append_many([b"v"] * 50, partition=0)
            subscription = await topic.subscribe("s", start=EARLIEST)
            first = await subscription.consumer("a").__aenter__()
            assert len(await first.take()) == 50
            await topic.append(b"next", partition=0)
            gate.armed.set()
            taking = asyncio.create_task(first.take(10, wait_s=60))
            await async_until(gate.reached.is_set)
            taking.cancel()
            await asyncio.wait((taking,))
            await first.close()
            async with subscription.consumer("b") as second:
                gate.released.set()
                await first.until_idle()
                return offsets(await second.take(3))

    assert asyncio.run(run()) == [0, 1, 2]


def test_a_page_that_was_read_before_a_seek_is_not_given_to_who_comes_after_it(gate: StepGate) -> None:
    with forebay.open(":memory:") as log:
        topic = filled(log)
        subscription = topic.subscribe("s", start=EARLIEST)
        first = subscription.consumer("a").__enter__()
        first.ack(*first.take())
        topic.append(b"next", partition=0)
        end = reading(gate, first)
        first.close()
        assert subscription.seek(EARLIEST) == {0: 0}
        with subscription.consumer("b") as second:
            end()

            assert offsets(second.take(3)) == [0, 1, 2]
        assert subscription.lag()[0].cursor == 0


def test_a_page_counts_only_where_the_window_still_ends(gate: StepGate) -> None:
    """Two consumers read the same page: the one that comes second changes nothing."""
    with forebay.open(":memory:") as log:
        topic = filled(log, 5)
        subscription = topic.subscribe("s", start=EARLIEST, mode="shared")
        with subscription.consumer("a") as first, subscription.consumer("b") as second:
            end = reading(gate, first, 2)
            topic.append_many([b"more"] * 5, partition=0)
            assert offsets(second.take(4)) == [0, 1, 2, 3]

            assert end() == [4, 5]
            assert offsets(second.take()) == [6, 7, 8, 9]


@pytest.mark.parametrize("on_spent", ["drop", "block", "dead_letter"])
def test_what_was_on_its_way_to_a_consumer_that_left_was_not_delivered(gate: StepGate, on_spent: str) -> None:
    """Else a record that is delivered once at most is spent, and no consumer ever had it."""
    with forebay.open(":memory:") as log:
        subscription = filled(log, 3).subscribe("s", start=EARLIEST, deliveries_max=1, on_spent=on_spent)
        first = subscription.consumer("a").__enter__()
        subscription.driver.dispatch.look_again()
        assert offsets(first.take(1)) == [0]
        for served in subscription.driver.dispatch.partitions.values():
            served.pages.clear()
        end = reading(gate, first)
        first.ack(forebay.DeliveredRecord(subscription.peek(1)[0], 1))
        first.close()
        with subscription.consumer("b") as second:
            assert end() == []

            assert [(one.record.offset, one.attempt) for one in second.take()] == [(1, 1), (2, 1)]


def test_the_ack_time_out_begins_when_the_take_returns(gate: StepGate) -> None:
    with forebay.open(":memory:") as log:
        topic = filled(log, 1)
        subscription = topic.subscribe(
            "s", start=EARLIEST, mode="shared", ack_timeout_ms=50, deliveries_max=1, on_spent="drop"
        )
        with subscription.consumer("a") as slow, subscription.consumer("b") as other:
            topic.append(b"x", partition=0)
            subscription.driver.dispatch.partitions[0].has_news = True
            assert offsets(other.take(1)) == [0]
            for served in subscription.driver.dispatch.partitions.values():
                served.pages.clear()
            end = reading(gate, slow)
            assert other.take(wait_s=0.2) == []

            assert end() == [1]


# Consumers that are dropped, and consumers that come and go at once


def test_a_seek_holds_although_a_consumer_was_dropped_without_being_closed() -> None:
    with forebay.open(":memory:") as log:
        subscription = filled(log, 10).subscribe("s", start=EARLIEST)
        dropped = subscription.consumer("dropped").__enter__()
        dropped.ack(*dropped.take(5))
        del dropped
        gc.collect()

        assert subscription.seek(EARLIEST) == {0: 0}

        with subscription.consumer() as consumer:
            assert offsets(consumer.take()) == list(range(10))


class LateClock:
    """A clock whose second question is answered late, and says that it is time to look for partitions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked = 0
        self.is_reached, self.may_go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)

    def monotonic(self) -> float:
        self._asked += 1
        if self._asked == 2:
            self.is_reached.set()
            assert self.may_go.wait(PATIENCE)
            return self._clock.monotonic() + 3600
        return self._clock.monotonic()


def test_a_take_that_goes_on_after_its_consumer_left_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for partitions that were added while the consumer leaves: without a consumer a seek must hold."""
    with forebay.open(":memory:") as log:
        subscription = filled(log, 10).subscribe("s", start=EARLIEST)
        consumer = subscription.consumer("a").__enter__()
        consumer.ack(*consumer.take(5))
        clock = LateClock(subscription.driver.clock)
        monkeypatch.setattr(subscription.driver, "clock", clock)

        def take() -> None:
            with suppress(Closed):
                consumer.take()

        thread = threading.Thread(target=take)
        thread.start()
        assert clock.is_reached.wait(PATIENCE)
        consumer.close()
        clock.may_go.set()
        thread.join(PATIENCE)
        monkeypatch.undo()

        assert subscription.driver.dispatch.partitions == {}
        subscription.seek(EARLIEST)
        with subscription.consumer() as another:
            assert offsets(another.take()) == list(range(10))


def test_a_consumer_that_is_closed_while_it_is_attached_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    current, is_reached, may_go = SubscriptionStore.current, threading.Event(), threading.Event()

    def slow(store: SubscriptionStore, spec: SubscriptionSpec) -> SubscriptionSpec:
        is_reached.set()
        assert may_go.wait(PATIENCE)
        return current(store, spec)

    async def run() -> list[str]:
        async with aio.open(":memory:") as log:
            topic = await log.create_topic("shop/orders")
            subscription = await topic.subscribe("s")
            monkeypatch.setattr(SubscriptionStore, "current", slow)
            consumer = subscription.consumer("a")
            attaching = asyncio.create_task(consumer.take())
            await async_until(is_reached.is_set)
            await consumer.close()
            may_go.set()
            with pytest.raises(Closed):
                await attaching
            return await subscription.consumers()

    assert asyncio.run(run()) == []


# Cursors


def test_a_cursor_that_is_asked_where_it_stands_is_not_forgotten_meanwhile() -> None:
    """The flusher has asked a window, and has not noted the answer yet: who looks now waits for it."""
    with forebay.open(":memory:") as log:
        topic = filled(log, 5)
        subscription = topic.subscribe("s", start=EARLIEST)
        with subscription.consumer() as consumer:
            consumer.ack(*consumer.take(3))
            served, is_asked, may_answer = (
                subscription.driver.dispatch.partitions[0],
                threading.Event(),
                threading.Event(),
            )
            progress = served.progress

            def slow() -> Any:
                found = progress()
                is_asked.set()
                assert may_answer.wait(PATIENCE)
                return found

            served.progress = slow  # type: ignore[method-assign]
            flushing = threading.Thread(target=subscription.flush)
            flushing.start()
            assert is_asked.wait(PATIENCE)
            found: list[int | None] = []
            looking = threading.Thread(target=lambda: found.append(topic.reader("s").offset()))
            looking.start()
            # A moment in which it would answer without having waited.
            looking.join(0.3)
            may_answer.set()
            flushing.join(PATIENCE)
            looking.join(PATIENCE)

            assert found == [3]
