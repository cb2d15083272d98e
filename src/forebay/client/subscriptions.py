"""Subscriptions on a broker, for asyncio and for threads that wait. The surface of `forebay.surface`.

A consumer is attached at the broker by an id of its own, and is there as long as the broker gets requests of it: one is
sent now and then in the background. If the broker has started again, or did not get any for too long, the consumer
attaches itself again, and what it had not acknowledged comes again. A pull is numbered: one whose answer was lost is
repeated with its number, and brings the same records.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack
from urllib.parse import quote

import msgspec

from forebay.arguments import checked_partition, checked_position, checked_seconds, checked_session_timeout_ms
from forebay.client.deadletters import AsyncRemoteDeadLetters, RemoteDeadLetters
from forebay.client.loops import LoopThread
from forebay.client.topics import TopicCalls, decoded, position_text, spec_of, topic_path
from forebay.client.transport import ATTEMPTS_MIN, HttpCall, TopicTransport
from forebay.errors import (
    Closed,
    Conflict,
    Corrupt,
    ForebayError,
    Indeterminate,
    Invalid,
    UnknownConsumer,
    UnknownSubscription,
    UnsupportedFormat,
)
from forebay.records import LATEST, DeliveredRecord, Record, Start, SubscriptionLag
from forebay.subscriptions.ahead import TakenAhead
from forebay.surface.blocking import SESSION_TIMEOUT_MS, UNACKED_MAX
from forebay.topics import SubscriptionChanges, SubscriptionOptions, SubscriptionSpec, TopicDispatch, TopicName
from forebay.wire.bodies import MediaType
from forebay.wire.items import record_of
from forebay.wire.subscriptions import (
    PULL_RECORDS_MAX,
    AnswerCount,
    AttachedConsumer,
    ConsumerNames,
    LagPage,
    PeekedRecords,
    SoughtPlaces,
    SubscriptionItem,
    SubscriptionList,
    decode_pulled,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

SIGNS_OF_LIFE: Final = 3
"""So many requests are sent in the time of a session at least."""
WAIT_S: Final = 10.0
"""How long one request waits for records; then the next one asks."""
LEAVE_S: Final = 5.0
"""How long a consumer that leaves tries to reach the broker; then its session ends by itself."""
ANSWER_BYTES_MAX: Final = 48 * 1024
"""What one request names of the records that are done or refused; a broker takes 64 KiB without records in one."""
ERROR_CHARACTERS_MAX: Final = 500
"""What a broker keeps of the reason why records were refused."""


class AsyncRemoteSubscription:
    """One subscription of a topic on a broker. Made by `AsyncRemoteTopic.subscribe`."""

    def __init__(self, topic: TopicCalls, spec: SubscriptionSpec) -> None:
        self._topic = topic
        self._spec = spec
        self._path = subscription_path(topic, spec.name)
        self._query = {"id": spec.subscription_id}

    @property
    def name(self) -> str:
        """What it is called."""
        return self._spec.name

    @property
    def spec(self) -> SubscriptionSpec:
        """The definition, as the broker said last."""
        return self._spec

    def __repr__(self) -> str:
        return f"<AsyncRemoteSubscription {self.name} of {self._topic.name}, {self.spec.mode}>"

    def consumer(
        self, name: str = "", *, unacked_max: int = UNACKED_MAX, session_timeout_ms: int = SESSION_TIMEOUT_MS
    ) -> AsyncRemoteConsumer:
        """See `surface.awaiting.Subscription.consumer`."""
        consumer = AsyncRemoteConsumer(self._topic, self._spec, name, unacked_max, session_timeout_ms)
        self._topic.consumers.add(consumer)
        return consumer

    async def consumers(self) -> list[str]:
        """See `surface.awaiting.Subscription.consumers`."""
        return await self._get("/consumers", lambda body: decoded(ConsumerNames, body).consumers)

    async def lag(self) -> list[SubscriptionLag]:
        """See `surface.awaiting.Subscription.lag`."""
        return await self._get("/lag", lambda body: [item.lag_of() for item in decoded(LagPage, body).partitions])

    async def peek(self, records_max: int = 10, *, partition: int | None = None) -> list[Record]:
        """See `surface.awaiting.Subscription.peek`."""
        query = {"records_max": str(records_max)}
        if partition is not None:
            query["partition"] = str(checked_partition(partition))
        return await self._get(
            "/peek", lambda body: [record_of(item) for item in decoded(PeekedRecords, body).records], query
        )

    async def pause(self) -> None:
        """See `surface.awaiting.Subscription.pause`."""
        self._spec = await self._post("/pause", _spec_of)

    async def resume(self) -> None:
        """See `surface.awaiting.Subscription.resume`."""
        self._spec = await self._post("/resume", _spec_of)

    async def alter(self, **changes: Unpack[SubscriptionChanges]) -> SubscriptionSpec:
        """See `surface.awaiting.Subscription.alter`."""
        self._spec = await called(self._topic, _sent("PATCH", self._path, changes, self._query), _spec_of)
        return self._spec

    async def seek(self, position: Start = LATEST, *, partition: int | None = None) -> dict[int, int]:
        """See `surface.awaiting.Subscription.seek`."""
        fields: dict[str, Any] = {"to": places_of(position)}
        if partition is not None:
            fields["partition"] = checked_partition(partition)
        return await self._post("/seek", lambda body: decoded(SoughtPlaces, body).offsets, fields)

    async def dead_letters(self) -> AsyncRemoteDeadLetters:
        """See `surface.awaiting.Subscription.dead_letters`."""
        spec = self._spec
        if spec.dead_letter_topic is None:
            raise Invalid(
                f"the subscription {spec.name} of {self._topic.name} has on_spent {spec.on_spent}, and so no dead "
                'letters: create one with on_spent "dead_letter"'
            )
        # Raises if it is gone.
        path = topic_path(TopicName.parse(spec.dead_letter_topic))
        any_topic = self._topic.transport.any_topic
        found = await any_topic.call(HttpCall(method="GET", path=path), spec_of)
        transport = TopicTransport(any_topic, found.topic_id)
        return AsyncRemoteDeadLetters(transport, spec.dead_letter_topic, (self._topic.name, spec.name))

    async def flush(self) -> None:
        """See `surface.awaiting.Subscription.flush`."""
        await self._post("/flush", bytes)

    async def delete(self) -> None:
        """See `surface.awaiting.Subscription.delete`. One that a lost attempt has deleted is deleted."""
        call = HttpCall(method="DELETE", path=self._path, query=self._query)
        attempts = self._topic.transport.attempts(call)
        try:
            await self._topic.transport.call(call, bytes, attempts)
        except Indeterminate as doubt:
            if not isinstance(doubt.__cause__, Conflict) or await self._is_there():
                raise

    async def _is_there(self) -> bool:
        try:
            await self._get("", bytes)
        except Conflict:
            return False
        return True

    async def _get(self, path: str, decode: Callable[[bytes], T], query: Mapping[str, str] | None = None) -> T:
        call = HttpCall(method="GET", path=self._path + path, query={**self._query, **(query or {})})
        return await self._topic.transport.call(call, decode)

    async def _post(self, path: str, decode: Callable[[bytes], T], fields: Mapping[str, Any] | None = None) -> T:
        return await called(self._topic, _sent("POST", self._path + path, fields, self._query), decode)


class AsyncRemoteConsumer:
    """One consumer of a subscription on a broker. For one task at a time, but for `ack` and `nack`."""

    def __init__(
        self, topic: TopicCalls, spec: SubscriptionSpec, name: str, unacked_max: int, session_timeout_ms: int
    ) -> None:
        if not isinstance(name, str):
            raise Invalid(f"the name of a consumer is {type(name).__name__}, not str")
        if not isinstance(unacked_max, int) or isinstance(unacked_max, bool) or unacked_max < 1:
            raise Invalid(f"unacked_max is {unacked_max!r:.80}; allowed: from 1 on")
        self._topic = topic
        self._spec = spec
        self._clock = topic.clock
        self._name = name
        self._unacked_max = unacked_max
        self._session_timeout_ms = checked_session_timeout_ms(session_timeout_ms)
        self._path = f"{subscription_path(topic, spec.name)}/consumers/{topic.clock.random_bytes(12).hex()}"
        self._is_attached = False
        self._is_closed = False
        self._sequence = 0
        """Of the next pull; one that had no answer is repeated with its number."""
        self._lost = 0
        self._living: asyncio.Task[None] | None = None
        self.ahead = TakenAhead(unacked_max)
        """What `each` has taken and not handed out yet."""
        self._giving_back = asyncio.Lock()

    async def take(self, records_max: int = 100, *, wait_s: float = 0.0) -> list[DeliveredRecord]:
        """See `surface.awaiting.Consumer.take`. A take that is cancelled has taken nothing."""
        checked_seconds("wait_s", wait_s)
        # Of a loop that has ended and is not cleaned up yet.
        await self.give_back_ahead()
        return await self._take(records_max, wait_s)

    async def _take(self, records_max: int, wait_s: float) -> list[DeliveredRecord]:
        deadline = self._clock.monotonic() + wait_s
        longest_s = min(WAIT_S, self._topic.transport.timeout_s / ATTEMPTS_MIN / 2)
        await self._attach()
        while True:
            left_s = max(0.0, deadline - self._clock.monotonic())
            found = await self._pull(records_max, min(left_s, longest_s))
            if found or left_s <= longest_s:
                return found

    def __aiter__(self) -> AsyncIterator[DeliveredRecord]:
        return self.each()

    async def each(self, *, wait_s: float | None = None) -> AsyncIterator[DeliveredRecord]:
        """See `surface.awaiting.Consumer.each`."""
        await self.give_back_ahead()
        try:
            while await self.take_ahead(wait_s):
                while (delivered := self.next_ahead()) is not None:
                    yield delivered
        finally:
            await self.give_back_ahead()

    async def take_ahead(self, wait_s: float | None) -> bool:
        """Take as many records as the body of a loop does in a moment; false if the loop is to end."""
        if wait_s is not None:
            checked_seconds("wait_s", wait_s)
        await self.give_back_ahead()
        if self._is_closed:
            return False
        # Where records are delivered at most once, those that are given back would be lost.
        is_lossy = self._topic.spec.dispatch is TopicDispatch.NON_RELIABLE
        count = 1 if is_lossy else self.ahead.wanted(self._clock.monotonic())
        found = await self._take(count, WAIT_S if wait_s is None else wait_s)
        self.ahead.put(found, self._clock.monotonic(), self._spec.ack_timeout_ms)
        return bool(found) or wait_s is None

    def next_ahead(self) -> DeliveredRecord | None:
        """The next record that was taken ahead; `None` if there is none, or those left are too old."""
        return None if self._is_closed else self.ahead.pop(self._clock.monotonic())

    async def give_back_ahead(self) -> None:
        """What was taken ahead and not handed out is due again at once, as if it had not been delivered."""
        # A loop that was left, and is cleaned up now, may be at it: a consumer that is closed waits for that.
        async with self._giving_back:
            left = tuple(self.ahead.clear())
            if not left or not self._is_attached:
                return
            fields = {"offsets": _by_partition(left), "attempts": _attempts(left), "is_unused": True}
            try:
                await called(self._topic, _sent("POST", f"{self._path}/nack", fields), _counted)
            except ForebayError as error:
                # They are due after the ack time-out, or when the consumer leaves.
                logger.info("records of consumer %s of %s are not given back: %s", self._name, self._spec.name, error)

    async def ack(self, *done: DeliveredRecord) -> int:
        """See `surface.awaiting.Consumer.ack`. What an attempt without an answer has acknowledged is not counted.

        Many are sent in several requests, one after the other: those before one that fails are acknowledged.
        """
        counted = 0
        for some in _in_parts(done):
            counted += await self._answer("/ack", {"offsets": _by_partition(some)})
        return counted

    async def ack_cumulative(self, last: DeliveredRecord) -> int:
        """See `surface.awaiting.Consumer.ack_cumulative`."""
        return await self._answer("/ack", {"up_to": {str(last.record.partition): last.record.offset}})

    async def nack(self, *failed: DeliveredRecord, delay_ms: int | None = None, error: str | None = None) -> int:
        """See `surface.awaiting.Consumer.nack`. What an attempt without an answer has refused is not counted.

        Many are sent as `ack` sends them.
        """
        said = None if error is None else str(error)[:ERROR_CHARACTERS_MAX]
        counted = 0
        for some in _in_parts(failed):
            fields = {
                "offsets": _by_partition(some),
                "attempts": _attempts(some),
                "delay_ms": delay_ms,
                "error": said,
            }
            counted += await self._answer("/nack", fields)
        return counted

    @property
    def lost(self) -> int:
        """See `surface.awaiting.Consumer.lost`. As of the last take."""
        return self._lost

    async def close(self) -> None:
        """See `surface.awaiting.Consumer.close`. Where the broker cannot be reached, its session ends by itself."""
        self._is_closed = True
        living, self._living = self._living, None
        if living is not None:
            living.cancel()
        if not self._is_attached:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.give_back_ahead(), LEAVE_S)
        self._is_attached = False
        call = HttpCall(method="DELETE", path=self._path)
        try:
            await self._topic.transport.call(call, bytes, self._topic.transport.attempts(call, LEAVE_S))
        except ForebayError as error:
            logger.info("consumer %s of %s leaves without an answer: %s", self._name, self._spec.name, error)

    async def __aenter__(self) -> Self:
        await self._attach()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _pull(self, records_max: int, wait_s: float) -> list[DeliveredRecord]:
        fields = {"wait_ms": round(wait_s * 1000), "sequence": self._sequence}
        fields["max"] = min(records_max, PULL_RECORDS_MAX) if isinstance(records_max, int) else records_max
        while True:
            try:
                call = _sent("POST", f"{self._path}/pull", fields)
                found, self._lost = await called(self._topic, call, decode_pulled)
            except UnknownConsumer:
                await self.attach_again()
                continue
            self._sequence += 1
            return found

    async def _answer(self, path: str, fields: Mapping[str, Any]) -> int:
        self._check_open()
        if not self._is_attached:
            raise self._not_attached()
        try:
            return await called(self._topic, _sent("POST", self._path + path, fields), _counted)
        except UnknownConsumer:
            # What it held is due for others by now: a late answer changes nothing.
            self._check_open()
            return 0

    async def _attach(self) -> None:
        self._check_open()
        if not self._is_attached:
            await self.attach_again()

    async def attach_again(self) -> None:
        """Be attached at the broker: at first, or because it has started again or had no request for too long."""
        self._check_open()
        fields = {
            "name": self._name,
            "unacked_max": self._unacked_max,
            "session_timeout_ms": self._session_timeout_ms,
        }
        call = _sent("PUT", self._path, fields, {"id": self._spec.subscription_id})
        await called(self._topic, call, partial(decoded, AttachedConsumer))
        self._is_attached = True
        if self._living is None and not self._is_closed:
            pause_s = self._session_timeout_ms / 1000 / SIGNS_OF_LIFE
            self._living = asyncio.create_task(_live(weakref.ref(self), self._topic, self._path, pause_s))

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._not_attached()

    def _not_attached(self) -> Closed:
        return Closed(f'consumer "{self._name}" of the subscription {self._spec.name} is not attached')


async def _live(consumer: weakref.ref[AsyncRemoteConsumer], topic: TopicCalls, path: str, pause_s: float) -> None:
    """Have the broker know that a consumer is still there, until it is closed or dropped."""
    while True:
        await asyncio.sleep(pause_s)
        if consumer() is None:
            with contextlib.suppress(ForebayError):
                await topic.transport.call(HttpCall(method="DELETE", path=path), bytes)
            return
        try:
            await called(topic, _sent("POST", f"{path}/ack"), _counted)
        except UnknownConsumer:
            attached = consumer()
            if attached is not None:
                # Refused, it may be once more when records are taken, and says so there.
                with contextlib.suppress(ForebayError):
                    await attached.attach_again()
            del attached
        except Closed:
            return
        except ForebayError as error:
            logger.info("the broker does not know whether consumer %s is still there: %s", path, error)


def subscription_path(topic: TopicCalls, name: str) -> str:
    """Where the broker has the subscription; `Invalid` if it cannot be a name."""
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name in (".", ".."):
        raise Invalid(f"a subscription is called {name!a:.80}; use A-Z a-z 0-9 . _ -")
    return f"{topic.path}/subscriptions/{quote(name)}"


async def subscribed(
    topic: TopicCalls, name: str, start: Start, options: SubscriptionOptions
) -> AsyncRemoteSubscription:
    """The subscription of this name, created if it is not there."""
    # Raises if there is another topic of this name by now.
    await topic.refresh()
    call = _sent("PUT", subscription_path(topic, name), {"start": places_of(start), **options})
    return AsyncRemoteSubscription(topic, await called(topic, call, _spec_of))


async def found_subscription(topic: TopicCalls, name: str) -> AsyncRemoteSubscription:
    """The subscription of this name; `UnknownSubscription` if there is none."""
    call = HttpCall(method="GET", path=subscription_path(topic, name))
    spec = await topic.transport.call(call, _spec_of)
    if spec.topic_id != topic.spec.topic_id:
        raise UnknownSubscription(f"{topic.name} was deleted and created again: ask the log for it again")
    return AsyncRemoteSubscription(topic, spec)


async def deleted_subscription(topic: TopicCalls, name: str) -> None:
    """Delete the subscription of this name. One that a lost attempt has deleted is deleted."""
    try:
        found = await found_subscription(topic, name)
    except (Corrupt, UnsupportedFormat):
        # Only its name is known. A repeat finds none where an attempt before it was done.
        try:
            await topic.transport.call(HttpCall(method="DELETE", path=subscription_path(topic, name)), bytes)
        except Indeterminate as doubt:
            if not isinstance(doubt.__cause__, UnknownSubscription):
                raise
    else:
        await found.delete()


async def listed_subscriptions(topic: TopicCalls) -> list[SubscriptionSpec]:
    """The definitions of all subscriptions of this very topic."""
    call = HttpCall(method="GET", path=f"{topic.path}/subscriptions")
    found = await topic.transport.call(call, partial(decoded, SubscriptionList))
    return [item.spec() for item in found.subscriptions if item.topic_id == topic.spec.topic_id]


async def called(topic: TopicCalls, call: HttpCall, decode: Callable[[bytes], T]) -> T:
    """The answer to a call that comes to the same when it is done twice: a refusal counts, also of a repeat."""
    try:
        return await topic.transport.call(call, decode)
    except Indeterminate as doubt:
        if isinstance(doubt.__cause__, Conflict | Invalid):
            raise doubt.__cause__ from doubt
        raise


def places_of(start: Start) -> str | dict[str, str]:
    """Where to begin, as requests say it."""
    if isinstance(start, Mapping):
        return {str(number): position_text(checked_position(place)) for number, place in start.items()}
    return position_text(checked_position(start))


def _sent(
    method: str, path: str, fields: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
) -> HttpCall:
    content = b"" if fields is None else msgspec.json.encode(fields)
    return HttpCall(method=method, path=path, query=query or {}, content=content, media=MediaType.JSON)


def _spec_of(body: bytes) -> SubscriptionSpec:
    return decoded(SubscriptionItem, body).spec()


def _counted(body: bytes) -> int:
    return decoded(AnswerCount, body).counted


def _in_parts(delivered: Sequence[DeliveredRecord]) -> Iterator[Sequence[DeliveredRecord]]:
    """The records in order, as many at a time as one request may name. None at all are one part."""
    start, size = 0, 0
    partitions: set[int] = set()
    for at, each in enumerate(delivered):
        # As the body has it: offsets and attempts, each in a list of the partition.
        place = each.record
        more = len(f"{place.offset},{each.attempt},")
        if place.partition not in partitions:
            more += 2 * len(f'"{place.partition}":[],')
        if size + more > ANSWER_BYTES_MAX:
            yield delivered[start:at]
            start, size = at, 0
            partitions.clear()
        size += more
        partitions.add(place.partition)
    yield delivered[start:]


def _by_partition(delivered: Sequence[DeliveredRecord]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for each in delivered:
        found.setdefault(str(each.record.partition), []).append(each.record.offset)
    return found


def _attempts(delivered: Sequence[DeliveredRecord]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for each in delivered:
        found.setdefault(str(each.record.partition), []).append(each.attempt)
    return found


class RemoteSubscription:
    """One subscription of a topic on a broker. Made by `RemoteTopic.subscribe`; for any number of threads."""

    def __init__(self, subscription: AsyncRemoteSubscription, loop: LoopThread) -> None:
        self._subscription = subscription
        self._loop = loop

    @property
    def name(self) -> str:
        """What it is called."""
        return self._subscription.name

    @property
    def spec(self) -> SubscriptionSpec:
        """The definition, as the broker said last."""
        return self._subscription.spec

    def __repr__(self) -> str:
        return repr(self._subscription).replace("Async", "", 1)

    def consumer(
        self, name: str = "", *, unacked_max: int = UNACKED_MAX, session_timeout_ms: int = SESSION_TIMEOUT_MS
    ) -> RemoteConsumer:
        """See `surface.Subscription.consumer`."""
        consumer = self._subscription.consumer(name, unacked_max=unacked_max, session_timeout_ms=session_timeout_ms)
        return RemoteConsumer(consumer, self._loop)

    def consumers(self) -> list[str]:
        """See `surface.Subscription.consumers`."""
        return self._loop.call(self._subscription.consumers)

    def lag(self) -> list[SubscriptionLag]:
        """See `surface.Subscription.lag`."""
        return self._loop.call(self._subscription.lag)

    def peek(self, records_max: int = 10, *, partition: int | None = None) -> list[Record]:
        """See `surface.Subscription.peek`."""
        return self._loop.call(partial(self._subscription.peek, records_max, partition=partition))

    def pause(self) -> None:
        """See `surface.Subscription.pause`."""
        self._loop.call(self._subscription.pause)

    def resume(self) -> None:
        """See `surface.Subscription.resume`."""
        self._loop.call(self._subscription.resume)

    def alter(self, **changes: Unpack[SubscriptionChanges]) -> SubscriptionSpec:
        """See `surface.Subscription.alter`."""
        return self._loop.call(partial(self._subscription.alter, **changes))

    def seek(self, position: Start = LATEST, *, partition: int | None = None) -> dict[int, int]:
        """See `surface.Subscription.seek`."""
        return self._loop.call(partial(self._subscription.seek, position, partition=partition))

    def dead_letters(self) -> RemoteDeadLetters:
        """See `surface.Subscription.dead_letters`."""
        return RemoteDeadLetters(self._loop.call(self._subscription.dead_letters), self._loop)

    def flush(self) -> None:
        """See `surface.Subscription.flush`."""
        self._loop.call(self._subscription.flush)

    def delete(self) -> None:
        """See `surface.Subscription.delete`."""
        self._loop.call(self._subscription.delete)


class RemoteConsumer:
    """One consumer of a subscription on a broker. For one thread at a time, but for `ack` and `nack`."""

    def __init__(self, consumer: AsyncRemoteConsumer, loop: LoopThread) -> None:
        self._consumer = consumer
        self._loop = loop

    def take(self, records_max: int = 100, *, wait_s: float = 0.0) -> list[DeliveredRecord]:
        """See `surface.Consumer.take`."""
        return self._loop.call(partial(self._consumer.take, records_max, wait_s=wait_s))

    def __iter__(self) -> Iterator[DeliveredRecord]:
        return self.each()

    def each(self, *, wait_s: float | None = None) -> Iterator[DeliveredRecord]:
        """See `surface.Consumer.each`."""
        consumer = self._consumer
        self._loop.call(consumer.give_back_ahead)
        try:
            while self._loop.call(partial(consumer.take_ahead, wait_s)):
                while (delivered := consumer.next_ahead()) is not None:
                    yield delivered
        finally:
            # Not by the thread of the loop, which may clean up what was dropped: it would wait for itself.
            if not self._loop.is_ended and not self._loop.is_here:
                self._loop.call(consumer.give_back_ahead)

    def ack(self, *done: DeliveredRecord) -> int:
        """See `surface.Consumer.ack`, and `AsyncRemoteConsumer.ack`."""
        return self._loop.call(partial(self._consumer.ack, *done))

    def ack_cumulative(self, last: DeliveredRecord) -> int:
        """See `surface.Consumer.ack_cumulative`."""
        return self._loop.call(partial(self._consumer.ack_cumulative, last))

    def nack(self, *failed: DeliveredRecord, delay_ms: int | None = None, error: str | None = None) -> int:
        """See `surface.Consumer.nack`."""
        return self._loop.call(partial(self._consumer.nack, *failed, delay_ms=delay_ms, error=error))

    @property
    def lost(self) -> int:
        """See `surface.Consumer.lost`. As of the last take."""
        return self._consumer.lost

    def close(self) -> None:
        """See `surface.Consumer.close`. Harmless when repeated, and when the log is closed."""
        if not self._loop.is_ended:
            self._loop.call(self._consumer.close)

    def __enter__(self) -> Self:
        self._loop.call(self._consumer.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
