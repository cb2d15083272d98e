"""A log on a broker for callers that wait: `forebay.connect` gives one. The surface of `forebay.surface.blocking`.

Each call is made by the log for asyncio (`awaiting`) in an event loop that runs in one thread of the log. Any number of
threads may use it at the same time. Callbacks such as `on_gap` run in that thread, and may not use the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar, Unpack

from forebay.arguments import checked_seconds
from forebay.bulk import BackfillPlan, BackfillState, BulkLoad, LoadBatch, LoadSegment, LoadTarget
from forebay.client.appends import AsyncRemoteAck, AsyncRemoteBatchAck
from forebay.client.awaiting import AsyncRemoteGroup, AsyncRemoteLog, AsyncRemoteReader, AsyncRemoteTopic
from forebay.client.deadletters import RemoteDeadLetters
from forebay.client.loads import AsyncRemoteLoads
from forebay.client.loops import LoopThread
from forebay.client.producers import (
    BATCH_BYTES,
    BATCH_RECORDS,
    IN_FLIGHT,
    IN_FLIGHT_BYTES,
    LINGER_MS,
    AsyncRemoteProducer,
)
from forebay.client.routers import RemoteRouters
from forebay.client.streams import AsyncRemoteStream
from forebay.client.subscriptions import RemoteSubscription
from forebay.errors import ForebayError, Indeterminate
from forebay.records import (
    EARLIEST,
    LATEST,
    CommitAck,
    GroupOffset,
    HeadersLike,
    OffsetRange,
    Offsets,
    OnGap,
    Position,
    Record,
    RecordPage,
    Start,
)
from forebay.surface.blocking import PAGE_BYTES, PAGE_LOADS, PAGE_RECORDS
from forebay.topics import SubscriptionOptions, SubscriptionSpec, TopicChanges, TopicLimits, TopicName, TopicSpec

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class RemoteStream(Generic[T]):
    """An iterator that may be left and entered again, also after an error. For one thread at a time."""

    def __init__(self, stream: AsyncRemoteStream[T], loop: LoopThread) -> None:
        self._stream = stream
        self._loop = loop
        self._rows: Iterator[T] = iter(())
        self._is_closed = False
        loop.call(stream.begin)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._is_closed:
            self._stream.check_open()
        for row in self._rows:
            return row
        if not self._is_closed:
            self._rows = self._loop.call(self._stream.next_page)
            for row in self._rows:
                return row
        raise StopIteration

    def close(self) -> None:
        """End the stream; harmless when repeated, and when the log is closed."""
        if not self._is_closed:
            self._is_closed = True
            self._rows = iter(())
            if not self._loop.is_ended:
                self._loop.call(self._stream.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RemoteAck:
    """One record on its way to a broker."""

    def __init__(self, ack: AsyncRemoteAck, loop: LoopThread) -> None:
        self._ack = ack
        self._loop = loop

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._ack.done

    def result(self, timeout: float | None = None) -> int:
        """Wait for the offset, or the error that the append failed with; `Indeterminate` if the time is up."""
        return _awaited(self._loop, self._ack.answered, timeout).offsets[0]


class RemoteBatchAck:
    """Many records on their way to a broker."""

    def __init__(self, ack: AsyncRemoteBatchAck, loop: LoopThread) -> None:
        self._ack = ack
        self._loop = loop

    @property
    def done(self) -> bool:
        """Whether the outcome is known in every partition."""
        return self._ack.done

    @property
    def ranges(self) -> Sequence[OffsetRange]:
        """What is acknowledged by now, a range for each partition."""
        return self._ack.ranges

    @property
    def failures(self) -> Mapping[int, ForebayError]:
        """The partitions that are known by now to have failed, and why; none where the broker did not say."""
        return self._ack.failures

    def result(self, timeout: float | None = None) -> Sequence[OffsetRange]:
        """Wait for every partition; the ranges, or the error if any has failed. `Indeterminate` if the time is up."""
        return _awaited(self._loop, self._ack.answered, timeout).ranges


class RemoteGroup:
    """A consumer group on a broker. Made by `RemoteLog.group`."""

    def __init__(self, group: AsyncRemoteGroup, loop: LoopThread) -> None:
        self._group = group
        self._loop = loop

    @property
    def name(self) -> str:
        """What it is called."""
        return self._group.name

    def commit(
        self,
        topic: str | TopicName,
        offset: int,
        partition: int = 0,
        *,
        note: str = "",
        ack: CommitAck = "durable",
        expected: int | None = None,
    ) -> int:
        """See `surface.Group.commit`."""
        commit = partial(self._group.commit, topic, offset, partition, note=note, ack=ack, expected=expected)
        return self._loop.call(commit)

    def fetch(self, topic: str | TopicName, partition: int = 0) -> int | None:
        """See `surface.Group.fetch`."""
        return self._loop.call(partial(self._group.fetch, topic, partition))

    def note(self, topic: str | TopicName, partition: int = 0) -> str:
        """See `surface.Group.note`."""
        return self._loop.call(partial(self._group.note, topic, partition))

    def offsets(self) -> list[GroupOffset]:
        """See `surface.Group.offsets`."""
        return self._loop.call(self._group.offsets)

    def reset(self, topic: str | TopicName, position: Position | int, partition: int | None = None) -> dict[int, int]:
        """See `surface.Group.reset`."""
        return self._loop.call(partial(self._group.reset, topic, position, partition))

    def delete(self) -> int:
        """See `surface.Group.delete`."""
        return self._loop.call(self._group.delete)


class RemoteReader:
    """A reader of one topic on a broker. Made by `RemoteTopic.reader`."""

    def __init__(self, reader: AsyncRemoteReader, loop: LoopThread) -> None:
        self._reader = reader
        self._loop = loop

    @property
    def name(self) -> str:
        """What it is called."""
        return self._reader.name

    def offset(self, partition: int = 0) -> int | None:
        """See `surface.Reader.offset`."""
        return self._loop.call(partial(self._reader.offset, partition))

    def note(self, partition: int = 0) -> str:
        """See `surface.Reader.note`."""
        return self._loop.call(partial(self._reader.note, partition))

    def ack(self, record: Record, note: str = "") -> int:
        """See `surface.Reader.ack`."""
        return self._loop.call(partial(self._reader.ack, record, note))

    def ack_up_to(
        self,
        offset: int,
        partition: int = 0,
        note: str = "",
        *,
        ack: CommitAck = "durable",
        expected: int | None = None,
    ) -> int:
        """See `surface.Reader.ack_up_to`."""
        return self._loop.call(partial(self._reader.ack_up_to, offset, partition, note, ack=ack, expected=expected))

    def reset(self, position: Position | int = EARLIEST, partition: int = 0, note: str = "") -> int:
        """See `surface.Reader.reset`."""
        return self._loop.call(partial(self._reader.reset, position, partition, note))

    def forget(self) -> None:
        """See `surface.Reader.forget`."""
        self._loop.call(self._reader.forget)

    def read(
        self, *, start: Position = EARLIEST, partition: int | None = None, on_gap: OnGap | None = None
    ) -> RemoteStream[Record]:
        """See `surface.Reader.read`."""
        return RemoteStream(self._reader.read(start=start, partition=partition, on_gap=on_gap), self._loop)

    def follow(
        self,
        *,
        start: Position = EARLIEST,
        partition: int | None = None,
        timeout: float | None = None,
        on_gap: OnGap | None = None,
    ) -> RemoteStream[Record]:
        """See `surface.Reader.follow`."""
        stream = self._reader.follow(start=start, partition=partition, timeout=timeout, on_gap=on_gap)
        return RemoteStream(stream, self._loop)


class RemoteLoads:
    """Bulk loads into one topic on a broker. Made by `RemoteLog.loads_of`; for any number of threads."""

    def __init__(self, loads: AsyncRemoteLoads, loop: LoopThread) -> None:
        self._loads = loads
        self._loop = loop

    def target(self, load_id: str) -> LoadTarget:
        """See `surface.BulkLoads.target`."""
        return self._loop.call(partial(self._loads.target, load_id))

    def stage(self, load_id: str, batch: pa.RecordBatch, partition: int = 0) -> Sequence[LoadSegment]:
        """See `surface.BulkLoads.stage`. A large batch becomes several segments."""
        return self._loop.call(partial(self._loads.stage, load_id, batch, partition))

    def offer(
        self,
        load_id: str,
        segments: Iterable[LoadSegment],
        *,
        timeout: float | None = None,
        generation: int | None = None,
        batch: LoadBatch | None = None,
    ) -> BulkLoad | None:
        """See `surface.BulkLoads.offer`."""
        offer = partial(self._loads.offer, load_id, segments, timeout=timeout, generation=generation, batch=batch)
        return self._loop.call(offer)

    def get(self, load_id: str) -> BulkLoad:
        """See `surface.BulkLoads.get`."""
        return self._loop.call(partial(self._loads.get, load_id))

    def page(self, *, after: str | None = None, limit: int = PAGE_LOADS) -> tuple[list[BulkLoad], str | None]:
        """See `surface.BulkLoads.page`."""
        return self._loop.call(partial(self._loads.page, after=after, limit=limit))

    def attach(self, load_id: str) -> BulkLoad:
        """See `surface.BulkLoads.attach`, and `AsyncRemoteLoads.attach`."""
        return self._loop.call(partial(self._loads.attach, load_id))

    def wait(self, load_id: str, timeout: float) -> BulkLoad:
        """See `surface.BulkLoads.wait`."""
        return self._loop.call(partial(self._loads.wait, load_id, timeout))

    def abandon(self, load_id: str) -> BulkLoad:
        """See `surface.BulkLoads.abandon`."""
        return self._loop.call(partial(self._loads.abandon, load_id))

    def backfill(self, backfill_id: str) -> BackfillState:
        """See `surface.BulkLoads.backfill`."""
        return self._loop.call(partial(self._loads.backfill, backfill_id))

    def begin_backfill(self, backfill_id: str, plan: BackfillPlan) -> BackfillState:
        """See `surface.BulkLoads.begin_backfill`."""
        return self._loop.call(partial(self._loads.begin_backfill, backfill_id, plan))


class RemoteProducer:
    """Gathers records and sends them in batches; see `AsyncRemoteProducer`. For any number of threads."""

    def __init__(self, producer: AsyncRemoteProducer, loop: LoopThread) -> None:
        self._producer = producer
        self._loop = loop

    def append_nowait(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        headers: HeadersLike | None = None,
        timestamp: int | None = None,
        partition: int | None = None,
    ) -> RemoteAck:
        """Queue one record; its acknowledgement comes later. Waits only while too much is queued already."""
        append = partial(
            self._producer.append_nowait,
            value,
            key=key,
            tag=tag,
            headers=headers,
            timestamp=timestamp,
            partition=partition,
        )
        return RemoteAck(self._loop.call(append), self._loop)

    def flush(self) -> None:
        """Return when every record that was queued has its outcome; each ack says which."""
        self._loop.call(self._producer.flush)

    def close(self) -> None:
        """Send what is queued, and take no more. Harmless when repeated."""
        if not self._loop.is_ended:
            self._loop.call(self._producer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RemoteTopic:
    """One topic on a broker. Made by `RemoteLog`; for any number of threads.

    Every append carries a producer and a sequence, so that it is stored once however often it has to be sent. Appends
    of several threads go on at the same time and are not ordered among each other; single records share requests.
    Those that are not waited for (`append_nowait`, …) are sent in order, one request at a time, and what is appended
    after them comes behind them.
    """

    def __init__(self, topic: AsyncRemoteTopic, loop: LoopThread) -> None:
        self._topic = topic
        self._loop = loop

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
        return self._topic.partitions

    def append(
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
        """See `surface.TopicHandle.append`."""
        append = partial(
            self._topic.append,
            value,
            key=key,
            tag=tag,
            headers=headers,
            timestamp=timestamp,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
        )
        return self._loop.call(append)

    def append_nowait(
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
    ) -> RemoteAck:
        """See `surface.TopicHandle.append_nowait`."""
        append = partial(
            self._topic.append_nowait,
            value,
            key=key,
            tag=tag,
            headers=headers,
            timestamp=timestamp,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
        )
        return RemoteAck(self._loop.call(append), self._loop)

    def append_many(
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
        """See `surface.TopicHandle.append_many`."""
        append = partial(
            self._topic.append_many,
            values,
            keys=keys,
            tags=tags,
            headers=headers,
            timestamps=timestamps,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
            atomic=atomic,
        )
        return self._loop.call(append)

    def append_many_nowait(
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
    ) -> RemoteBatchAck:
        """See `surface.TopicHandle.append_many_nowait`."""
        append = partial(
            self._topic.append_many_nowait,
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
        return RemoteBatchAck(self._loop.call(append), self._loop)

    def append_arrow(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> Sequence[int]:
        """See `surface.TopicHandle.append_arrow`."""
        append = partial(
            self._topic.append_arrow,
            batch,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
        )
        return self._loop.call(append)

    def append_arrow_nowait(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> RemoteBatchAck:
        """See `surface.TopicHandle.append_arrow_nowait`."""
        append = partial(
            self._topic.append_arrow_nowait,
            batch,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
        )
        return RemoteBatchAck(self._loop.call(append), self._loop)

    def read(
        self,
        start: Start = EARLIEST,
        *,
        stop: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> RemoteStream[Record]:
        """See `surface.TopicHandle.read`."""
        return RemoteStream(self._topic.read(start, stop=stop, partition=partition, on_gap=on_gap), self._loop)

    def read_arrow(
        self,
        start: Start = EARLIEST,
        *,
        stop: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> RemoteStream[pa.RecordBatch]:
        """See `surface.TopicHandle.read_arrow`."""
        return RemoteStream(self._topic.read_arrow(start, stop=stop, partition=partition, on_gap=on_gap), self._loop)

    def page(
        self, partition: int, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> RecordPage:
        """See `surface.TopicHandle.page`."""
        return self._loop.call(
            partial(self._topic.page, partition, offset, records_max=records_max, bytes_max=bytes_max)
        )

    def follow(
        self,
        start: Start = LATEST,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        on_gap: OnGap | None = None,
    ) -> RemoteStream[Record]:
        """See `surface.TopicHandle.follow`, and `AsyncRemoteTopic.follow`."""
        stream = self._topic.follow(start, partition=partition, timeout=timeout, on_gap=on_gap)
        return RemoteStream(stream, self._loop)

    def read_by_key(
        self,
        key: bytes,
        *,
        history: bool = False,
        start: Start = EARLIEST,
        limit: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> RemoteStream[Record]:
        """See `surface.TopicHandle.read_by_key`."""
        stream = self._topic.read_by_key(
            key, history=history, start=start, limit=limit, partition=partition, on_gap=on_gap
        )
        return RemoteStream(stream, self._loop)

    def read_by_tag(
        self,
        tag: str,
        *,
        start: Start = EARLIEST,
        limit: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> RemoteStream[Record]:
        """See `surface.TopicHandle.read_by_tag`."""
        stream = self._topic.read_by_tag(tag, start=start, limit=limit, partition=partition, on_gap=on_gap)
        return RemoteStream(stream, self._loop)

    def offsets(self, partition: int = 0) -> Offsets:
        """See `surface.TopicHandle.offsets`."""
        return self._loop.call(partial(self._topic.offsets, partition))

    def offset_at_time(self, timestamp: int, partition: int = 0) -> int | None:
        """See `surface.TopicHandle.offset_at_time`."""
        return self._loop.call(partial(self._topic.offset_at_time, timestamp, partition))

    def last_sequence(self, producer: int, partition: int = 0) -> int | None:
        """See `surface.TopicHandle.last_sequence`."""
        return self._loop.call(partial(self._topic.last_sequence, producer, partition))

    def resolve(self, position: Position | int, partition: int = 0) -> int:
        """See `surface.TopicHandle.resolve`."""
        return self._loop.call(partial(self._topic.resolve, position, partition))

    def delete_by_key(self, key: bytes, *, partition: int | None = None) -> int:
        """See `surface.TopicHandle.delete_by_key`."""
        return self._loop.call(partial(self._topic.delete_by_key, key, partition=partition))

    def delete_by_tag(self, tag: str, *, partition: int | None = None) -> int:
        """See `surface.TopicHandle.delete_by_tag`."""
        return self._loop.call(partial(self._topic.delete_by_tag, tag, partition=partition))

    def delete_by_offset(self, start: int, stop: int, partition: int | None = None) -> int:
        """See `surface.TopicHandle.delete_by_offset`."""
        return self._loop.call(partial(self._topic.delete_by_offset, start, stop, partition))

    def delete_before(self, offset: int, partition: int | None = None) -> int:
        """See `surface.TopicHandle.delete_before`."""
        return self._loop.call(partial(self._topic.delete_before, offset, partition))

    def flush(self) -> None:
        """See `surface.TopicHandle.flush`. What was queued before is sent first."""
        self._loop.call(self._topic.flush)

    def producer(
        self,
        *,
        linger_ms: float = LINGER_MS,
        batch_records: int = BATCH_RECORDS,
        batch_bytes: int = BATCH_BYTES,
        in_flight: int = IN_FLIGHT,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
    ) -> RemoteProducer:
        """Sends many single records in batches. Close it, or use it in a `with` statement."""
        return RemoteProducer(
            self._topic.producer(
                linger_ms=linger_ms,
                batch_records=batch_records,
                batch_bytes=batch_bytes,
                in_flight=in_flight,
                in_flight_bytes=in_flight_bytes,
            ),
            self._loop,
        )

    def reader(self, name: str) -> RemoteReader:
        """See `surface.TopicHandle.reader`."""
        return RemoteReader(self._topic.reader(name), self._loop)

    def subscribe(
        self, name: str, *, start: Start = LATEST, **options: Unpack[SubscriptionOptions]
    ) -> RemoteSubscription:
        """See `surface.SubscribableTopic.subscribe`."""
        subscribe = partial(self._topic.subscribe, name, start=start, **options)
        return RemoteSubscription(self._loop.call(subscribe), self._loop)

    def subscription(self, name: str) -> RemoteSubscription:
        """See `surface.SubscribableTopic.subscription`."""
        return RemoteSubscription(self._loop.call(partial(self._topic.subscription, name)), self._loop)

    def delete_subscription(self, name: str) -> None:
        """See `surface.SubscribableTopic.delete_subscription`."""
        self._loop.call(partial(self._topic.delete_subscription, name))

    def subscriptions(self) -> list[SubscriptionSpec]:
        """See `surface.SubscribableTopic.subscriptions`."""
        return self._loop.call(self._topic.subscriptions)

    def dead_letters(self) -> RemoteDeadLetters:
        """See `surface.SubscribableTopic.dead_letters`."""
        return RemoteDeadLetters(self._topic.dead_letters(), self._loop)


class RemoteLog:
    """The topics of one broker, for any number of threads. Made by `forebay.connect`."""

    def __init__(self, log: AsyncRemoteLog, loop: LoopThread) -> None:
        self._log = log
        self._loop = loop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_topic(
        self,
        name: str | TopicName,
        *,
        partitions: int = 1,
        durability: str | None = None,
        engine: str | None = None,
        compression: str = "none",
        exist_ok: bool = False,
        **limits: Unpack[TopicLimits],
    ) -> RemoteTopic:
        """See `surface.Log.create_topic`, and `AsyncRemoteLog.create_topic`."""
        create = partial(
            self._log.create_topic,
            name,
            partitions=partitions,
            durability=durability,
            engine=engine,
            compression=compression,
            exist_ok=exist_ok,
            **limits,
        )
        return RemoteTopic(self._loop.call(create), self._loop)

    def topic(self, name: str | TopicName) -> RemoteTopic:
        """See `surface.Log.topic`."""
        return RemoteTopic(self._loop.call(partial(self._log.topic, name)), self._loop)

    def topics(
        self, prefix: str = "", *, after: str | TopicName | None = None, limit: int | None = None
    ) -> list[TopicSpec]:
        """See `surface.Log.topics`."""
        return self._loop.call(partial(self._log.topics, prefix, after=after, limit=limit))

    def alter_topic(
        self, name: str | TopicName, *, allow_loss: bool = False, **changes: Unpack[TopicChanges]
    ) -> TopicSpec:
        """See `surface.Log.alter_topic`."""
        return self._loop.call(partial(self._log.alter_topic, name, allow_loss=allow_loss, **changes))

    def delete_topic(self, name: str | TopicName) -> None:
        """See `surface.Log.delete_topic`."""
        self._loop.call(partial(self._log.delete_topic, name))

    def loads_of(self, name: str | TopicName) -> RemoteLoads:
        """See `surface.Log.loads_of`."""
        return RemoteLoads(self._log.loads_of(name), self._loop)

    def group(self, name: str) -> RemoteGroup:
        """See `surface.Log.group`."""
        return RemoteGroup(self._log.group(name), self._loop)

    def groups(self) -> list[str]:
        """See `surface.Log.groups`."""
        return self._loop.call(self._log.groups)

    @property
    def routers(self) -> RemoteRouters:
        """The routers of the broker, as `forebay.Routers` has those of a log in this process."""
        return RemoteRouters(self._log.routers, self._loop)

    def close(self) -> None:
        """Send what is queued, close the connections and end the thread. Harmless when repeated."""
        if not self._loop.is_ended:
            try:
                self._loop.call(self._log.close)
            finally:
                self._loop.end()


def _awaited(loop: LoopThread, answered: asyncio.Future[T], timeout: float | None) -> T:
    """Wait for what the loop's future comes to; `Indeterminate` if the time is up."""
    if timeout is not None:
        checked_seconds("timeout", timeout)

    async def wait() -> T:
        done, _ = await asyncio.wait((answered,), timeout=timeout)
        if not done:
            raise Indeterminate(f"not acknowledged within {timeout} s: it may still be; ask again")
        return answered.result()

    # The outcome of an append is known also when the log is closed by now.
    return answered.result() if answered.done() else loop.call(wait)
