"""Subscriptions for asyncio: consumers wait in the event loop, and none has a thread of its own.

What memory has is delivered in the loop; the log's few threads read the rest, and attach and detach consumers.
Acknowledgements never wait.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import ParamSpec, Self, TypeVar, Unpack

from forebay.aio.deadletters import AsyncDeadLetters
from forebay.aio.workers import SHARD, UNNAMED, Workers, wake_loop
from forebay.arguments import SESSION_TIMEOUT_MS, checked_seconds, checked_session_timeout_ms
from forebay.errors import Closed, Throttled
from forebay.live import CallKey
from forebay.records import LATEST, DeliveredRecord, PeekedPage, Record, Start, SubscriptionLag
from forebay.storage.subscriptions import (
    LOOK_S,
    UNACKED_MAX,
    Fetched,
    Subscription,
    SubscriptionDriver,
    attempts_by_partition,
    by_partition,
    check_consumer,
    checked_delay,
    checked_take,
    deliveries_of,
    pause_s,
)
from forebay.subscriptions.ahead import TakenAhead
from forebay.topics import SubscriptionChanges, SubscriptionSpec

T = TypeVar("T")
P = ParamSpec("P")


class AsyncSubscription:
    """One subscription of a topic. Made by `AsyncTopic.subscribe`."""

    def __init__(self, subscription: Subscription, workers: Workers) -> None:
        self._subscription = subscription
        self._workers = workers

    @property
    def _key(self) -> CallKey:
        """What a call may wait for: consumers acquire the shards of the topic, and others wait for that."""
        return CallKey.of(self._subscription.driver.topic)

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._workers.run_at(self._key, call, *args, **kwargs)

    @property
    def name(self) -> str:
        """What it is called."""
        return self._subscription.name

    @property
    def spec(self) -> SubscriptionSpec:
        """The definition that it goes by."""
        return self._subscription.spec

    def consumer(
        self,
        name: str = "",
        *,
        unacked_max: int = UNACKED_MAX,
        session_timeout_ms: int = SESSION_TIMEOUT_MS,
        who: str = UNNAMED,
    ) -> AsyncConsumer:
        """See `Subscription.consumer`. A server says for whom it reads: its callers take turns."""
        checked_session_timeout_ms(session_timeout_ms)
        return AsyncConsumer(self._subscription.driver, name, unacked_max, self._workers, who)

    async def consumers(self) -> list[str]:
        """See `Subscription.consumers`."""
        return self._subscription.consumers()

    async def lag(self) -> list[SubscriptionLag]:
        """See `Subscription.lag`."""
        return await self._run(self._subscription.lag)

    async def peek(
        self, records_max: int = 10, *, partition: int | None = None, bytes_max: int | None = None
    ) -> list[Record]:
        """See `Subscription.peek`."""
        return (await self.peek_page(records_max, partition=partition, bytes_max=bytes_max)).records

    async def peek_page(
        self, records_max: int = 10, *, partition: int | None = None, bytes_max: int | None = None
    ) -> PeekedPage:
        """See `Subscription.peek_page`."""
        peek = partial(self._subscription.peek_page, records_max, partition=partition, bytes_max=bytes_max)
        return await self._workers.start_reading(self._key, peek)

    async def pause(self) -> None:
        """See `Subscription.pause`."""
        await self._run(self._subscription.pause)

    async def resume(self) -> None:
        """See `Subscription.resume`."""
        await self._run(self._subscription.resume)

    async def alter(self, **changes: Unpack[SubscriptionChanges]) -> SubscriptionSpec:
        """See `Subscription.alter`."""
        return await self._run(partial(self._subscription.alter, **changes))

    async def seek(self, position: Start = LATEST, *, partition: int | None = None) -> dict[int, int]:
        """See `Subscription.seek`."""
        return await self._run(self._subscription.seek, position, partition=partition)

    async def dead_letters(self) -> AsyncDeadLetters:
        """See `Subscription.dead_letters`."""
        return AsyncDeadLetters(await self._run(self._subscription.dead_letters), self._workers)

    async def flush(self) -> None:
        """See `Subscription.flush`."""
        await self._run(self._subscription.flush)

    async def delete(self) -> None:
        """See `Subscription.delete`."""
        await self._run(self._subscription.delete)


class AsyncConsumer:
    """One consumer of a subscription. For one task at a time, but for `ack` and `nack`."""

    def __init__(self, driver: SubscriptionDriver, name: str, unacked_max: int, workers: Workers, who: str) -> None:
        check_consumer(name, unacked_max)
        self._driver = driver
        self._name = name
        self._unacked_max = unacked_max
        self._workers = workers
        self._who = who
        self._key = CallKey.of(driver.topic)
        self._attached: int | None = None
        self._is_closed = False
        self._fetching: asyncio.Future[list[Fetched]] | None = None
        """What a thread reads, or has read last."""
        self._ahead = TakenAhead(unacked_max)

    async def take(
        self, records_max: int = 100, *, wait_s: float = 0.0, bytes_max: int | None = None
    ) -> list[DeliveredRecord]:
        """See `Consumer.take`. A take that is cancelled has taken nothing.

        With `bytes_max` it takes, and reads, records of about so many bytes, one at least.

        Where too many reads of its caller wait, the take tries again as long as it may wait, and then is `Throttled`.
        """
        count = checked_take(records_max)
        checked_seconds("wait_s", wait_s)
        # Of a loop that has ended and is not cleaned up yet.
        self._give_back_ahead()
        return await self._take(count, wait_s, bytes_max)

    async def _take(self, count: int, wait_s: float, bytes_max: int | None = None) -> list[DeliveredRecord]:
        await self._attach()
        loop, dispatch = asyncio.get_running_loop(), self._driver.dispatch
        deadline = loop.time() + wait_s
        while True:
            woken = loop.create_future()
            waker = partial(wake_loop, loop, partial(_wake, woken))
            is_leaving, number = True, self._number
            # Before the look: what comes after it wakes.
            dispatch.wait(number, waker)
            try:
                found = await self._pull_in_turn(count, bytes_max, deadline)
                pause = pause_s(dispatch, deadline - loop.time())
                if found or pause is None:
                    return found
                await asyncio.wait([woken], timeout=pause)
                is_leaving = False
            finally:
                dispatch.unwait(number, is_leaving=is_leaving)

    def __aiter__(self) -> AsyncIterator[DeliveredRecord]:
        return self.each()

    async def each(self, *, wait_s: float | None = None) -> AsyncIterator[DeliveredRecord]:
        """See `Consumer.each`."""
        wait_max = LOOK_S if wait_s is None else checked_seconds("wait_s", wait_s)
        clock, ahead = self._driver.clock, self._ahead
        self._give_back_ahead()
        try:
            while not self._is_closed:
                delivered = ahead.pop(clock.monotonic())
                if delivered is not None:
                    yield delivered
                    continue
                self._give_back_ahead()
                found = await self._take(self._driver.taken_ahead(ahead), wait_max)
                if not found and wait_s is not None:
                    return
                ahead.put(found, clock.monotonic(), self._driver.spec.ack_timeout_ms)
        finally:
            self._give_back_ahead()

    def _give_back_ahead(self) -> None:
        left = self._ahead.clear()
        if left and self._attached is not None:
            self._driver.take_back(self._attached, deliveries_of(left))

    async def ack(self, *done: DeliveredRecord) -> int:
        """See `Consumer.ack`."""
        return self._driver.ack_delivered(self._number, done)

    async def ack_cumulative(self, last: DeliveredRecord) -> int:
        """See `Consumer.ack_cumulative`."""
        return self._driver.ack_up_to(self._number, last.record.partition, last.record.offset)

    async def nack(self, *failed: DeliveredRecord, delay_ms: int | None = None, error: str | None = None) -> int:
        """See `Consumer.nack`."""
        offsets, attempts = by_partition(failed), attempts_by_partition(failed)
        return self._driver.nack(self._number, offsets, checked_delay(delay_ms), error, attempts)

    @property
    def lost(self) -> int:
        """See `Consumer.lost`."""
        return 0 if self._attached is None else self._driver.dispatch.lost(self._attached)

    # For servers, whose callers name records by their offsets

    def ack_offsets(self, done: Mapping[int, Sequence[int]]) -> int:
        """As `ack`, by partition."""
        return self._driver.ack(self._number, done)

    def ack_offset_up_to(self, partition: int, offset: int) -> int:
        """As `ack_cumulative`."""
        return self._driver.ack_up_to(self._number, partition, offset)

    def nack_offsets(
        self,
        failed: Mapping[int, Sequence[int]],
        delay_ms: int | None,
        error: str | None,
        attempts: Mapping[int, Sequence[int]] | None = None,
    ) -> int:
        """As `nack`, by partition; without `attempts` whichever delivery the consumer holds is refused."""
        return self._driver.nack(self._number, failed, checked_delay(delay_ms), error, attempts)

    def take_back(self, delivered: Mapping[int, Mapping[int, int]]) -> None:
        """Deliveries, by partition and offset, that were not used: the records are due as if they had not been made."""
        self._driver.take_back(self._number, delivered)

    async def until_idle(self) -> None:
        """Return when no thread reads for this consumer: what a cancelled take had claimed is given back."""
        if self._fetching is not None:
            await asyncio.wait((self._fetching,))

    async def close(self) -> None:
        """See `Consumer.close`. Goes on in its thread if it is cancelled."""
        self._is_closed = True
        self._give_back_ahead()
        number, self._attached = self._attached, None
        if number is not None:
            # However long it takes: no other call does it.
            await self._workers.start(SHARD, self._key, partial(self._driver.detach, number), is_patient=True)

    async def __aenter__(self) -> Self:
        await self._attach()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _number(self) -> int:
        if self._attached is None:
            raise Closed(f'consumer "{self._name}" of {self._driver.spec.name} is not attached: use `async with`')
        return self._attached

    async def _attach(self) -> None:
        if self._attached is not None or self._is_closed:
            return
        attaching = self._workers.start_opening(self._key, self._driver.attach, self._name, self._unacked_max)
        try:
            number = await asyncio.shield(attaching)
        except asyncio.CancelledError:
            attaching.add_done_callback(self._leave_late)
            raise
        # A consumer that is dropped without being closed leaves as well; here, no lock may be taken.
        weakref.finalize(self, self._driver.dispatch.abandon, number)
        self._attached = number
        if self._is_closed:
            # By another task meanwhile, which found nothing to leave.
            await self.close()

    def _leave_late(self, attaching: asyncio.Future[int]) -> None:
        """The task that attached this consumer was cancelled meanwhile."""
        if not attaching.cancelled() and attaching.exception() is None:
            self._driver.dispatch.abandon(attaching.result())

    async def _pull_in_turn(self, count: int, bytes_max: int | None, deadline: float) -> list[DeliveredRecord]:
        """As `_pull`; nothing while too many reads of the caller wait and there is time to ask again."""
        try:
            return await self._pull(count, bytes_max)
        except Throttled:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            return []

    async def _pull(self, count: int, bytes_max: int | None) -> list[DeliveredRecord]:
        """What is due now: from memory in the loop, else by a thread. What a cancelled task had read is due again.

        Records are delivered in the loop: until then, nothing has reached the consumer.
        """
        number = self._number
        while True:
            fetched = self._driver.fetch_cached(number, count, bytes_max)
            if fetched is None:
                fetched = await self._fetch(number, count, bytes_max)
            found = self._driver.deliver(number, fetched)
            if found or not fetched:
                return found

    async def _fetch(self, number: int, count: int, bytes_max: int | None) -> list[Fetched]:
        fetch = partial(self._driver.fetch, number, count, bytes_max)
        fetching = self._workers.start_reading(self._key, fetch, self._who)
        self._fetching = fetching
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            fetching.add_done_callback(partial(self._give_back, number))
            raise

    def _give_back(self, number: int, fetching: asyncio.Future[list[Fetched]]) -> None:
        if not fetching.cancelled() and fetching.exception() is None:
            self._driver.give_back(number, fetching.result())


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
