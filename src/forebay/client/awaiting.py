"""A log on a broker for asyncio: `forebay.aio.connect` gives one. The surface of `forebay.surface.awaiting`.

Every call is repeated until it has an answer or its time is up; see `transport`, and decision 0058.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import msgspec

from forebay.arguments import (
    StoredOffset,
    check_page,
    checked_limit,
    checked_lookup_key,
    checked_lookup_tag,
    checked_partition,
    checked_position,
    checked_seconds,
)
from forebay.client.appends import AsyncRemoteAck, AsyncRemoteBatchAck, arrow_records, many_records, one_record
from forebay.client.deadletters import AsyncRemoteDeadLetters
from forebay.client.loads import AsyncRemoteLoads
from forebay.client.producers import (
    BATCH_BYTES,
    BATCH_RECORDS,
    IN_FLIGHT,
    IN_FLIGHT_BYTES,
    LINGER_MS,
    AsyncRemoteProducer,
)
from forebay.client.routers import AsyncRemoteRouters
from forebay.client.streams import AsyncRemoteStream, BoundedSource, FollowingSource, LookupSource
from forebay.client.subscriptions import (
    AsyncRemoteSubscription,
    deleted_subscription,
    found_subscription,
    listed_subscriptions,
    subscribed,
)
from forebay.client.topics import TopicCalls, decoded, position_text, spec_of, topic_path
from forebay.client.transport import HttpCall, HttpTransport, Transport
from forebay.clock import Clock
from forebay.errors import Conflict, Indeterminate, Invalid, UnknownTopic
from forebay.format.frame.batch import Batch
from forebay.partitioning import partitions_of_key
from forebay.records import (
    EARLIEST,
    LATEST,
    CommitAck,
    GroupOffset,
    HeadersLike,
    Offsets,
    OnGap,
    Position,
    Reason,
    Record,
    RecordPage,
    Start,
    check_offset,
)
from forebay.surface.awaiting import PAGE_BYTES, PAGE_RECORDS
from forebay.topics import SubscriptionOptions, SubscriptionSpec, TopicChanges, TopicLimits, TopicName, TopicSpec
from forebay.wire.bodies import MediaType
from forebay.wire.messages import Committed, Committing, GroupPage, GroupPlaces, ResetPlaces, Resetting, TopicList

if TYPE_CHECKING:
    import pyarrow as pa

LISTED_MAX = 10_000
"""Topics of one page of a list."""


class AsyncRemoteGroup:
    """A consumer group on a broker. Made by `AsyncRemoteLog.group`."""

    def __init__(self, transport: Transport, name: str) -> None:
        self.name = name
        self._transport = transport
        if not isinstance(name, str) or not name or "/" in name or "\0" in name:
            raise Invalid(f"group is {name!r:.80}; give a text without a slash")
        self._path = f"/v1/groups/{name}"

    async def commit(
        self,
        topic: str | TopicName,
        offset: int,
        partition: int = 0,
        *,
        note: str = "",
        ack: CommitAck = "durable",
        expected: int | None = None,
    ) -> int:
        """See `surface.awaiting.Group.commit`."""
        check_offset(offset)
        if ack not in ("durable", "cached"):
            raise Invalid(f'ack is {ack!r:.40}; use "durable" or "cached"')
        message = Committing(
            topic=str(TopicName.parse(topic)),
            offset=offset,
            partition=checked_partition(partition),
            note=note,
            ack=ack,
            expected=expected,
        )
        call = _post(f"{self._path}/commit", message)
        try:
            stands = await self._transport.call(call, lambda body: decoded(Committed, body).offset)
        except Indeterminate as doubt:
            if isinstance(doubt.__cause__, Conflict) and doubt.__cause__.expected == offset:
                return offset  # a lost attempt has moved it there
            raise
        assert stands is not None, "a commit answers with a place"
        return stands

    async def fetch(self, topic: str | TopicName, partition: int = 0) -> int | None:
        """See `surface.awaiting.Group.fetch`."""
        return (await self._place(topic, partition)).offset

    async def note(self, topic: str | TopicName, partition: int = 0) -> str:
        """See `surface.awaiting.Group.note`."""
        return (await self._place(topic, partition)).note

    async def offsets(self) -> list[GroupOffset]:
        """See `surface.awaiting.Group.offsets`."""
        call = HttpCall(method="GET", path=self._path)
        found = await self._transport.call(call, partial(decoded, GroupPlaces))
        return [item.place() for item in found.places]

    async def reset(
        self, topic: str | TopicName, position: Position | int, partition: int | None = None
    ) -> dict[int, int]:
        """See `surface.awaiting.Group.reset`."""
        return await self.reset_noted(topic, position, partition, "")

    async def reset_noted(
        self, topic: str | TopicName, position: Position | int, partition: int | None, note: str
    ) -> dict[int, int]:
        """As `reset`, with a note beside each place."""
        message = Resetting(
            topic=str(TopicName.parse(topic)),
            to=position_text(checked_position(position)),
            partition=None if partition is None else checked_partition(partition),
            note=note,
        )
        call = _post(f"{self._path}/reset", message)
        return await self._transport.call(call, lambda body: decoded(ResetPlaces, body).offsets)

    async def forget(self, topic: str | TopicName) -> None:
        """Forget every place of the group in one topic."""
        query = {"topic": str(TopicName.parse(topic))}
        await self._transport.call(HttpCall(method="DELETE", path=self._path, query=query), bytes)

    async def delete(self) -> int:
        """See `surface.awaiting.Group.delete`."""
        places = await self.offsets()
        await self._transport.call(HttpCall(method="DELETE", path=self._path), bytes)
        return len(places)

    async def _place(self, topic: str | TopicName, partition: int) -> Committed:
        query = {"topic": str(TopicName.parse(topic)), "partition": str(checked_partition(partition))}
        call = HttpCall(method="GET", path=f"{self._path}/offset", query=query)
        return await self._transport.call(call, partial(decoded, Committed))


class AsyncRemoteReader:
    """A reader of one topic on a broker. Made by `AsyncRemoteTopic.reader`."""

    def __init__(self, topic: TopicCalls, name: str) -> None:
        self._topic = topic
        self._group = AsyncRemoteGroup(topic.transport, name)

    @property
    def name(self) -> str:
        """What it is called."""
        return self._group.name

    async def offset(self, partition: int = 0) -> int | None:
        """See `surface.awaiting.Reader.offset`."""
        return await self._group.fetch(self._topic.name, partition)

    async def note(self, partition: int = 0) -> str:
        """See `surface.awaiting.Reader.note`."""
        return await self._group.note(self._topic.name, partition)

    async def ack(self, record: Record, note: str = "") -> int:
        """See `surface.awaiting.Reader.ack`."""
        return await self.ack_up_to(record.offset + 1, record.partition, note)

    async def ack_up_to(
        self,
        offset: int,
        partition: int = 0,
        note: str = "",
        *,
        ack: CommitAck = "durable",
        expected: int | None = None,
    ) -> int:
        """See `surface.awaiting.Reader.ack_up_to`."""
        return await self._group.commit(self._topic.name, offset, partition, note=note, ack=ack, expected=expected)

    async def reset(self, position: Position | int = EARLIEST, partition: int = 0, note: str = "") -> int:
        """See `surface.awaiting.Reader.reset`."""
        return (await self._group.reset_noted(self._topic.name, position, partition, note))[partition]

    async def forget(self) -> None:
        """See `surface.awaiting.Reader.forget`."""
        await self._group.forget(self._topic.name)

    def read(
        self, *, start: Position = EARLIEST, partition: int | None = None, on_gap: OnGap | None = None
    ) -> AsyncRemoteStream[Record]:
        """See `surface.awaiting.Reader.read`."""
        begin = partial(self._starts, start)
        source = BoundedSource(self._topic, begin, Batch.records, stop=None, partition=partition, on_gap=on_gap)
        return AsyncRemoteStream(source)

    def follow(
        self,
        *,
        start: Position = EARLIEST,
        partition: int | None = None,
        timeout: float | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncRemoteStream[Record]:
        """See `surface.awaiting.Reader.follow`."""
        if timeout is not None:
            checked_seconds("timeout", timeout)
        begin = partial(self._starts, start)
        return AsyncRemoteStream(
            FollowingSource(self._topic, begin, partition=partition, timeout=timeout, on_gap=on_gap)
        )

    async def _starts(self, start: Position) -> Start:
        """Where to read on in each partition."""
        partitions = (await self._topic.refresh()).partitions
        done = {number: await self.offset(number) for number in range(partitions)}
        return {number: start if at is None else StoredOffset(at) for number, at in done.items()}


class AsyncRemoteTopic:
    """One topic on a broker. Made by `AsyncRemoteLog`; for the tasks of one event loop.

    Every append carries a producer and a sequence, so that it is stored once however often it has to be sent. Appends
    of several tasks go on at the same time and are not ordered among each other; single records share requests. Those
    that are not waited for (`append_nowait`, …) are sent in order, one request at a time, and what is appended after
    them comes behind them.
    """

    def __init__(self, topic: TopicCalls) -> None:
        self._topic = topic

    @property
    def name(self) -> str:
        """`namespace/topic`."""
        return self._topic.name

    @property
    def spec(self) -> TopicSpec:
        """The definition of the topic, as the broker said last."""
        return self._topic.spec

    @property
    def partitions(self) -> int:
        """How many partitions the topic has, as the broker said last."""
        return self._topic.spec.partitions

    async def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        headers: HeadersLike | None = None,
        timestamp: int | None = None,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> int:
        """See `surface.awaiting.TopicHandle.append`."""
        records = one_record(value, key, tag, headers, timestamp, partition, producer, sequence, previous)
        return (await self._topic.appends.append(records)).offsets[0]

    async def append_nowait(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        headers: HeadersLike | None = None,
        timestamp: int | None = None,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> AsyncRemoteAck:
        """See `surface.awaiting.TopicHandle.append_nowait`."""
        records = one_record(value, key, tag, headers, timestamp, partition, producer, sequence, previous)
        return AsyncRemoteAck(self._topic.appends.nowait(records))

    async def append_many(
        self,
        values: Iterable[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        tags: Sequence[str | None] | str | None = None,
        headers: Sequence[HeadersLike | None] | None = None,
        timestamps: Sequence[int] | int | None = None,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
        atomic: bool = True,
    ) -> Sequence[int]:
        """See `surface.awaiting.TopicHandle.append_many`."""
        records = many_records(
            values,
            keys=keys,
            tags=tags,
            headers=headers,
            timestamps=timestamps,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
        )
        if not atomic:
            return await self._topic.appends.in_turn(records)
        return (await self._topic.appends.append(records)).offsets

    async def append_many_nowait(
        self,
        values: Iterable[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        tags: Sequence[str | None] | str | None = None,
        headers: Sequence[HeadersLike | None] | None = None,
        timestamps: Sequence[int] | int | None = None,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> AsyncRemoteBatchAck:
        """See `surface.awaiting.TopicHandle.append_many_nowait`."""
        records = many_records(
            values,
            keys=keys,
            tags=tags,
            headers=headers,
            timestamps=timestamps,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
        )
        return AsyncRemoteBatchAck(self._topic.appends.nowait(records))

    async def append_arrow(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> Sequence[int]:
        """See `surface.awaiting.TopicHandle.append_arrow`."""
        records = arrow_records(batch, partition=partition, producer=producer, sequence=sequence, previous=previous)
        return (await self._topic.appends.append(records)).offsets

    async def append_arrow_nowait(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> AsyncRemoteBatchAck:
        """See `surface.awaiting.TopicHandle.append_arrow_nowait`."""
        records = arrow_records(batch, partition=partition, producer=producer, sequence=sequence, previous=previous)
        return AsyncRemoteBatchAck(self._topic.appends.nowait(records))

    def read(
        self,
        start: Start = EARLIEST,
        *,
        stop: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncRemoteStream[Record]:
        """See `surface.awaiting.TopicHandle.read`. Where it ends is decided when the first record is asked for."""
        if stop is not None:
            check_offset(stop)
        begin = _at(start)
        source = BoundedSource(self._topic, begin, Batch.records, stop=stop, partition=partition, on_gap=on_gap)
        return AsyncRemoteStream(source)

    def read_arrow(
        self,
        start: Start = EARLIEST,
        *,
        stop: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncRemoteStream[pa.RecordBatch]:
        """See `surface.awaiting.TopicHandle.read_arrow`."""
        if stop is not None:
            check_offset(stop)
        source = BoundedSource(self._topic, _at(start), _as_arrow, stop=stop, partition=partition, on_gap=on_gap)
        return AsyncRemoteStream(source)

    async def page(
        self, partition: int, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> RecordPage:
        """See `surface.awaiting.TopicHandle.page`."""
        check_page(offset, records_max, bytes_max)
        found = await self._topic.page(
            checked_partition(partition), offset, records_max=records_max, bytes_max=bytes_max
        )
        page = found.records()
        return page._replace(gaps=[gap for gap in page.gaps if gap.reason is not Reason.DELETED])

    def follow(
        self,
        start: Start = LATEST,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncRemoteStream[Record]:
        """See `surface.awaiting.TopicHandle.follow`. Leave it by cancelling, by `aclose` or by `async with`.

        Where it starts is decided when the first record is asked for, or by `async with`. A connection that is lost is
        made again; `Unavailable` if that takes longer than a call may, and the stream may be asked again.
        """
        if timeout is not None:
            checked_seconds("timeout", timeout)
        source = FollowingSource(self._topic, _at(start), partition=partition, timeout=timeout, on_gap=on_gap)
        return AsyncRemoteStream(source)

    def read_by_key(
        self,
        key: bytes,
        *,
        history: bool = False,
        start: Start = EARLIEST,
        limit: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncRemoteStream[Record]:
        """See `surface.awaiting.TopicHandle.read_by_key`."""
        wanted = checked_lookup_key(key)

        def places() -> Sequence[int]:
            chosen = self._topic.chosen(start, partition)
            if partition is not None:
                return chosen
            spec = self._topic.spec
            found = [place for place in partitions_of_key(wanted, spec.partitions, spec.earlier) if place in chosen]
            return found[::-1] if history else found

        query = {"key_b64": base64.b64encode(wanted).decode(), "history": "true" if history else "false"}
        source = LookupSource(
            self._topic, query, places, start, limit=checked_limit(limit), is_newest=not history, on_gap=on_gap
        )
        return AsyncRemoteStream(source)

    def read_by_tag(
        self,
        tag: str,
        *,
        start: Start = EARLIEST,
        limit: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncRemoteStream[Record]:
        """See `surface.awaiting.TopicHandle.read_by_tag`."""
        query = {"tag": checked_lookup_tag(tag)}
        places = partial(self._topic.chosen, start, partition)
        source = LookupSource(
            self._topic, query, places, start, limit=checked_limit(limit), is_newest=False, on_gap=on_gap
        )
        return AsyncRemoteStream(source)

    async def offsets(self, partition: int = 0) -> Offsets:
        """See `surface.awaiting.TopicHandle.offsets`."""
        return await self._topic.offsets(partition)

    async def offset_at_time(self, timestamp: int, partition: int = 0) -> int | None:
        """See `surface.awaiting.TopicHandle.offset_at_time`."""
        return await self._topic.offset_of(checked_position(Position.at_time(timestamp)), partition)

    async def last_sequence(self, producer: int, partition: int = 0) -> int | None:
        """See `surface.awaiting.TopicHandle.last_sequence`."""
        return await self._topic.last_sequence(producer, partition)

    async def resolve(self, position: Position | int, partition: int = 0) -> int:
        """See `surface.awaiting.TopicHandle.resolve`."""
        return await self._topic.resolve(position, partition)

    async def delete_by_key(self, key: bytes, *, partition: int | None = None) -> int:
        """See `surface.awaiting.TopicHandle.delete_by_key`."""
        query = {"key_b64": base64.b64encode(checked_lookup_key(key)).decode()}
        return await self._topic.delete(query, partition)

    async def delete_by_tag(self, tag: str, *, partition: int | None = None) -> int:
        """See `surface.awaiting.TopicHandle.delete_by_tag`."""
        return await self._topic.delete({"tag": checked_lookup_tag(tag)}, partition)

    async def delete_by_offset(self, start: int, stop: int, partition: int | None = None) -> int:
        """See `surface.awaiting.TopicHandle.delete_by_offset`."""
        check_offset(start)
        check_offset(stop)
        return await self._topic.delete({"start": str(start), "stop": str(stop)}, partition)

    async def delete_before(self, offset: int, partition: int | None = None) -> int:
        """See `surface.awaiting.TopicHandle.delete_before`."""
        check_offset(offset)
        return await self._topic.delete({"before": str(offset)}, partition)

    async def flush(self) -> None:
        """See `surface.awaiting.TopicHandle.flush`. What was queued before is sent first."""
        await self._topic.flush()

    def producer(
        self,
        *,
        linger_ms: float = LINGER_MS,
        batch_records: int = BATCH_RECORDS,
        batch_bytes: int = BATCH_BYTES,
        in_flight: int = IN_FLIGHT,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
    ) -> AsyncRemoteProducer:
        """Sends many single records in batches. Close it, or use it in an `async with` statement."""
        return self._topic.producer(
            linger_ms=linger_ms,
            batch_records=batch_records,
            batch_bytes=batch_bytes,
            in_flight=in_flight,
            in_flight_bytes=in_flight_bytes,
        )

    def reader(self, name: str) -> AsyncRemoteReader:
        """See `surface.awaiting.TopicHandle.reader`."""
        return AsyncRemoteReader(self._topic, name)

    async def subscribe(
        self, name: str, *, start: Start = LATEST, **options: Unpack[SubscriptionOptions]
    ) -> AsyncRemoteSubscription:
        """See `surface.awaiting.SubscribableTopic.subscribe`."""
        return await subscribed(self._topic, name, start, options)

    async def subscription(self, name: str) -> AsyncRemoteSubscription:
        """See `surface.awaiting.SubscribableTopic.subscription`."""
        return await found_subscription(self._topic, name)

    async def delete_subscription(self, name: str) -> None:
        """See `surface.awaiting.SubscribableTopic.delete_subscription`."""
        await deleted_subscription(self._topic, name)

    async def subscriptions(self) -> list[SubscriptionSpec]:
        """See `surface.awaiting.SubscribableTopic.subscriptions`."""
        return await listed_subscriptions(self._topic)

    def dead_letters(self) -> AsyncRemoteDeadLetters:
        """See `surface.awaiting.SubscribableTopic.dead_letters`."""
        return AsyncRemoteDeadLetters(self._topic.transport, self._topic.name)


class AsyncRemoteLog:
    """The topics of one broker, for one event loop. Made by `forebay.aio.connect`."""

    def __init__(self, transport: HttpTransport, clock: Clock) -> None:
        self._transport = transport
        self._clock = clock
        self._topics: dict[str, TopicCalls] = {}
        """By id: all handles of a topic share its lanes."""

    def __await__(self) -> Generator[object, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def create_topic(
        self,
        name: str | TopicName,
        *,
        partitions: int = 1,
        durability: str | None = None,
        engine: str | None = None,
        compression: str = "none",
        exist_ok: bool = False,
        **limits: Unpack[TopicLimits],
    ) -> AsyncRemoteTopic:
        """See `surface.awaiting.Log.create_topic`.

        `Indeterminate` if the topic exists after an attempt whose answer was lost: it may be the one that was made.
        """
        path = topic_path(TopicName.parse(name))
        fields: dict[str, Any] = {
            "partitions": partitions,
            "durability": durability,
            "engine": engine,
            "compression": compression,
            "exist_ok": exist_ok,
            **limits,
        }
        try:
            return AsyncRemoteTopic(self._calls(await self._transport.call(_sent("PUT", path, fields), spec_of)))
        except (Conflict, Indeterminate) as error:
            refusal = error.__cause__ if isinstance(error, Indeterminate) else error
            if not exist_ok or not isinstance(refusal, Conflict):
                raise
        # There is one with other options, which is fine as it is.
        return await self.topic(name)

    async def topic(self, name: str | TopicName) -> AsyncRemoteTopic:
        """See `surface.awaiting.Log.topic`."""
        call = HttpCall(method="GET", path=topic_path(TopicName.parse(name)))
        return AsyncRemoteTopic(self._calls(await self._transport.call(call, spec_of)))

    async def topics(
        self, prefix: str = "", *, after: str | TopicName | None = None, limit: int | None = None
    ) -> list[TopicSpec]:
        """See `surface.awaiting.Log.topics`."""
        left = checked_limit(limit)
        found: list[TopicSpec] = []
        last = None if after is None else str(TopicName.parse(after))
        while left is None or left > 0:
            query = {"prefix": prefix, "limit": str(LISTED_MAX if left is None else min(left, LISTED_MAX))}
            if last is not None:
                query["after"] = last
            call = HttpCall(method="GET", path="/v1/topics", query=query)
            page = await self._transport.call(call, partial(decoded, TopicList))
            found += [item.spec() for item in page.topics]
            last = page.after
            left = None if left is None else left - len(page.topics)
            if last is None:
                break
        return found

    async def alter_topic(
        self, name: str | TopicName, *, allow_loss: bool = False, **changes: Unpack[TopicChanges]
    ) -> TopicSpec:
        """See `surface.awaiting.Log.alter_topic`."""
        path = topic_path(TopicName.parse(name))
        fields: dict[str, Any] = {**changes, "allow_loss": allow_loss}
        spec = await self._transport.call(_sent("PATCH", path, fields), spec_of)
        return self._calls(spec).spec

    async def delete_topic(self, name: str | TopicName) -> None:
        """See `surface.awaiting.Log.delete_topic`. A topic that a lost attempt has deleted is deleted."""
        path = topic_path(TopicName.parse(name))
        attempts = self._transport.attempts(HttpCall(method="DELETE", path=path))
        try:
            await self._transport.call(HttpCall(method="DELETE", path=path), bytes, attempts)
        except UnknownTopic:
            if not attempts.is_in_doubt:
                raise

    def loads_of(self, name: str | TopicName) -> AsyncRemoteLoads:
        """See `surface.awaiting.Log.loads_of`."""
        return AsyncRemoteLoads(self._transport, TopicName.parse(name), self._clock)

    def group(self, name: str) -> AsyncRemoteGroup:
        """See `surface.awaiting.Log.group`."""
        return AsyncRemoteGroup(self._transport, name)

    async def groups(self) -> list[str]:
        """See `surface.awaiting.Log.groups`."""
        found: list[str] = []
        query: dict[str, str] = {}
        while True:
            call = HttpCall(method="GET", path="/v1/groups", query=query)
            page = await self._transport.call(call, partial(decoded, GroupPage))
            found += page.groups
            if page.after is None:
                return found
            query = {"after": page.after}

    @property
    def routers(self) -> AsyncRemoteRouters:
        """The routers of the broker, as `forebay.routers.AsyncRouters` has those of a log in this process."""
        return AsyncRemoteRouters(self._transport)

    async def close(self) -> None:
        """Send what is queued, and close the connections. Harmless when repeated."""
        for topic in self._topics.values():
            await topic.drain()
            await topic.leave()
        await self._transport.close()

    async def disconnect(self) -> None:
        """Close the connections; what is queued is not sent any more. Harmless when repeated."""
        await self._transport.close()

    def _calls(self, spec: TopicSpec) -> TopicCalls:
        found = self._topics.get(spec.topic_id)
        if found is None:
            found = self._topics[spec.topic_id] = TopicCalls(self._transport, spec, self._clock)
        found.spec = spec
        return found


def _at(start: Start) -> Callable[[], Awaitable[Start]]:
    if not isinstance(start, Mapping):
        checked_position(start)

    async def begin() -> Start:
        return start

    return begin


def _as_arrow(batch: Batch, partition: int) -> Sequence[pa.RecordBatch]:
    return (batch.to_arrow(partition),)


def _post(path: str, message: msgspec.Struct) -> HttpCall:
    return HttpCall(method="POST", path=path, content=msgspec.json.encode(message), media=MediaType.JSON)


def _sent(method: str, path: str, fields: Mapping[str, Any]) -> HttpCall:
    return HttpCall(method=method, path=path, content=msgspec.json.encode(fields), media=MediaType.JSON)
