"""A topic for asyncio: appends by the queue, without a thread each; everything else in the log's few threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, Unpack

from forebay.aio.deadletters import AsyncDeadLetters
from forebay.aio.readers import AsyncReader
from forebay.aio.streams import AsyncStream, Paged
from forebay.aio.subscriptions import AsyncSubscription
from forebay.aio.turns import TurnCommits
from forebay.aio.workers import DELETE, LOOK_SECONDS, UNNAMED, Published, Workers
from forebay.appends.queue import QueueFull
from forebay.arguments import checked_arrow, checked_seconds, checked_values
from forebay.engines import ReadShard
from forebay.engines.seam import PAGE_BYTES, PAGE_RECORDS
from forebay.errors import ForebayError, Unavailable
from forebay.format.columns.rows import ColumnBytes
from forebay.format.frame.batch import Batch
from forebay.live import CallKey, Render, WatchedTopic, Watcher
from forebay.pages import LOOP_BYTES_MAX, LOOP_RECORDS_MAX, Page, Reach
from forebay.records import (
    EARLIEST,
    LATEST,
    HeadersLike,
    OffsetRange,
    Offsets,
    OnGap,
    Position,
    Record,
    RecordPage,
    Start,
)
from forebay.settings import Settings
from forebay.shard import RecoveryDecision
from forebay.storage import Ack, BatchAck, Topic
from forebay.storage.acks import mixed, placed
from forebay.storage.append import Batched, PreparedBatch, Queueable, Records, ShardNotOpen, check_turns
from forebay.storage.status import TopicStatus
from forebay.topics import SubscriptionOptions, SubscriptionSpec, TopicSpec

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
READS_MAX: Final = 3
"""So often a page is read at most while records of its partition end."""


class _Opening:
    """A partition that is not open, and the appends that wait for it. For one event loop."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """Held by one append at a time, in the order they came."""
        self.appends = 0
        self.acquired: asyncio.Future[None] | None = None
        """Done when a worker has acquired the partition, or could not."""


class AsyncTopic:
    """One topic. Made by `create_topic` or `topic` of an `AsyncLog`."""

    def __init__(self, topic: Topic, settings: Settings, workers: Workers) -> None:
        self._topic = topic
        self._appender = topic.appender
        self._workers = workers
        self._timeout = settings.wal.append_timeout_ms / 1000
        self._room_s = workers.room_s
        self._room = Published(topic)
        self._turns = TurnCommits(self._appender.commit_soon) if workers.commits_each_turn else None
        self._opening: dict[int, _Opening] = {}
        """Partitions that appends wait for. Touched in the loop alone."""

    @property
    def name(self) -> str:
        """`namespace/topic`."""
        return self._topic.name

    @property
    def spec(self) -> TopicSpec:
        """The definition of the topic."""
        return self._topic.spec

    @property
    def partitions(self) -> int:
        """How many partitions the topic has."""
        return self._topic.partitions

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
        """See `Topic.append`. Appends of many tasks are written together; start them together.

        Cancelled, it may still become visible, once. While the queue is full it waits without blocking.
        """
        given = (value, key, tag, headers, timestamp, partition, producer, sequence, previous)
        try:
            ack, single = self._appender.prepare(*given, open_only=True)
        except ShardNotOpen:
            ack, single = await self._workers.start_opening(self._key(partition), self._appender.prepare, *given)
        try:
            if not self._is_queued(single, self._opening):
                await self._queue_when_open(single)
        except QueueFull as full:
            await self._queue_patiently(single, full)
        return await ack

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
    ) -> Ack:
        """See `Topic.append_nowait`: returns once the record is queued; await the ack for its offset.

        It waits for nothing but the opening of a shard, and in a server a moment for room in a full queue.
        """
        given = (value, key, tag, headers, timestamp, partition, producer, sequence, previous)
        try:
            ack, single = self._appender.prepare(*given, open_only=True)
        except ShardNotOpen:
            ack, single = await self._workers.start_opening(self._key(partition), self._appender.prepare, *given)
        try:
            if not self._is_queued(single, self._opening):
                await self._queue_when_open(single)
        except QueueFull as full:
            await self._queue_within(self._room_s, single, full)
        return ack

    def _is_queued(self, item: Queueable, waiting: Container[int]) -> bool:
        """Queue it if its shard is open and it overtakes none; see `Appender.queue_if_open`."""
        turns = self._turns
        return self._appender.queue_if_open(item, waiting, None if turns is None else turns.ask)

    async def _queue_when_open(self, item: Queueable) -> None:
        """Queue it once a worker has acquired and recovered its shard, or by a worker where that may take long.

        Appends that wait for a shard are queued in the order they came, and later ones behind them.
        """
        partition = item.partition
        opening = self._opening.setdefault(partition, _Opening())
        # What began after the append came: an older failure is not an answer to it.
        acquired = opening.acquired if opening.acquired is not None and not opening.acquired.done() else None
        opening.appends += 1
        try:
            async with opening.turn:
                if self._is_queued(item, ()):
                    return
                if acquired is None:
                    acquired = opening.acquired = self._workers.start_opening(
                        self._key(partition), self._topic.acquire, partition
                    )
                await asyncio.shield(acquired)
                if not self._is_queued(item, ()):
                    # Lost again at once, or it asks metadata or counts files first: a worker does that, not the loop.
                    await self._workers.start_opening(self._key(partition), self._appender.queue, item)
        finally:
            opening.appends -= 1
            if opening.appends == 0:
                del self._opening[partition]

    async def _queue_patiently(self, item: Queueable, full: QueueFull) -> None:
        """Queue it when there is room, or raise `Unavailable` when the time is up."""
        try:
            await self._queue_within(self._timeout, item, full)
        except QueueFull as still:
            waited = round(self._timeout * 1000)
            raise Unavailable(f"{self.name}: waited {waited} ms (wal.append_timeout_ms): {still}") from still

    async def _queue_within(self, seconds: float, item: Queueable, full: QueueFull) -> None:
        """Queue it when there is room, or raise why there was none when the time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        with self._room as room:
            while (left := deadline - loop.time()) > 0:
                published = room.next()
                try:
                    if not self._is_queued(item, self._opening):
                        await self._queue_when_open(item)
                except QueueFull as still:
                    full = still
                else:
                    return
                await asyncio.wait([published], timeout=min(left, LOOK_SECONDS))
        raise full

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
        """See `Topic.append_many`. Batches of many tasks are written together, as single appends are."""
        records = await self._prepared_many(
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
        return await (self._append_batch(records) if atomic else self._append_in_turn(records))

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
    ) -> BatchAck:
        """See `Topic.append_many_nowait`: returns once the records are queued; await the ack for their offsets.

        It waits for nothing but the opening of a shard, and in a server a moment for room in a full queue.
        """
        return await self.append_named_nowait(
            values,
            None,
            keys=keys,
            tags=tags,
            headers=headers,
            timestamps=timestamps,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
        )

    async def append_named_nowait(
        self,
        values: Iterable[bytes | None],
        partitions: Sequence[int | None] | None = None,
        *,
        keys: Sequence[bytes | None] | None = None,
        tags: Sequence[str | None] | str | None = None,
        headers: Sequence[HeadersLike | None] | None = None,
        timestamps: Sequence[int] | int | None = None,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> BatchAck:
        """As `append_many_nowait`, with the partition that each record names, or `None`: for servers."""
        records = await self._prepared_many(
            values,
            keys=keys,
            tags=tags,
            headers=headers,
            timestamps=timestamps,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
            atomic=True,
            partitions=partitions,
        )
        return await self._queue_batch(self._appender.prepared(records), is_patient=False)

    async def append_arrow(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> Sequence[int]:
        """See `Topic.append_arrow`. Batches of many tasks are written together, as single appends are."""
        return list(
            await self._append_batch(await self._prepared_arrow(batch, partition, producer, sequence, previous))
        )

    async def append_arrow_nowait(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> BatchAck:
        """See `Topic.append_arrow_nowait`, and `append_many_nowait` here."""
        records = await self._prepared_arrow(batch, partition, producer, sequence, previous)
        return await self._queue_batch(self._appender.prepared(records), is_patient=False)

    async def append_columns_nowait(
        self,
        columns: ColumnBytes,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> BatchAck:
        """As `append_arrow_nowait`, for rows that are encoded as they are stored: for servers."""
        prepare = partial(
            self._appender.prepare_columns,
            columns,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
        )
        records = await self._prepared(prepare, is_small=True)
        return await self._queue_batch(self._appender.prepared(records), is_patient=False)

    async def _prepared_many(
        self,
        values: Iterable[bytes | None],
        *,
        keys: Sequence[bytes | None] | None,
        tags: Sequence[str | None] | str | None,
        headers: Sequence[HeadersLike | None] | None,
        timestamps: Sequence[int] | int | None,
        partition: int | None,
        producer: int | None,
        sequence: int | None,
        previous: int | None,
        atomic: bool,
        partitions: Sequence[int | None] | None = None,
    ) -> Records:
        values = checked_values(values)
        prepare = partial(
            self._appender.prepare_many,
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
            partitions=partitions,
        )
        is_small = len(values) <= LOOP_RECORDS_MAX and _bytes_of(values) + _bytes_of(keys) <= LOOP_BYTES_MAX
        return await self._prepared(prepare, is_small=is_small)

    async def _prepared_arrow(
        self,
        batch: pa.RecordBatch,
        partition: int | None,
        producer: int | None,
        sequence: int | None,
        previous: int | None,
    ) -> Records:
        prepare = partial(
            self._appender.prepare_arrow,
            batch,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
        )
        is_small = checked_arrow(batch).num_rows <= LOOP_RECORDS_MAX and batch.nbytes <= LOOP_BYTES_MAX
        return await self._prepared(prepare, is_small=is_small)

    async def _prepared(self, prepare: partial[Records], *, is_small: bool) -> Records:
        """What an appender prepares: in the loop if it is small, by a worker that may open shards if it has to."""
        in_loop = partial(prepare, open_only=True)
        try:
            return in_loop() if is_small else await self._workers.start_encoding(in_loop)
        except ShardNotOpen:
            return await self._workers.start_opening(self._key(), prepare)

    async def _append_batch(self, records: Records) -> Sequence[int]:
        """Queue the records, patiently, and wait for all; their offsets in the order given."""
        ack = await self._queue_batch(self._appender.prepared(records), is_patient=True)
        held = await ack
        return placed(records.count, zip((part.rows for part in records.parts), held, strict=True))

    async def _append_in_turn(self, records: Records) -> Sequence[int]:
        """As `Appender.in_turn`."""
        check_turns(records)
        held: list[OffsetRange] = []
        for part in records.parts:
            one = Records([part], part.columns.count, records.producing)
            try:
                held += await (await self._queue_batch(self._appender.prepared(one), is_patient=True))
            except ForebayError as error:
                if held:
                    raise mixed(self.name, held, {part.partition: error}) from error
                raise
        return placed(records.count, zip((part.rows for part in records.parts), held, strict=True))

    async def _queue_batch(self, batch: PreparedBatch, *, is_patient: bool) -> BatchAck:
        """Queue the records of each partition, none of which waits for another. Raises if none could be queued."""
        later: list[Batched] = []
        for share in batch.shares:
            try:
                if not self._is_queued(share, self._opening):
                    later.append(share)
            except QueueFull as full:
                if is_patient or self._room_s:
                    later.append(share)
                else:
                    share.ticket.finish(full)
            except ForebayError as error:
                share.ticket.finish(error)
        if len(later) == 1:
            # Without a task of its own: it does not fall behind appends that come later.
            await self._queue_later(later[0], is_patient=is_patient)
        elif later:
            await asyncio.gather(*(self._queue_later(share, is_patient=is_patient) for share in later))
        if (refusal := batch.ack.refusal) is not None:
            raise refusal
        return batch.ack

    async def _queue_later(self, share: Batched, *, is_patient: bool) -> None:
        """Queue what could not be queued at once. What keeps it from that is the outcome of its share."""
        try:
            try:
                if not self._is_queued(share, self._opening):
                    await self._queue_when_open(share)
            except QueueFull as full:
                if is_patient:
                    await self._queue_patiently(share, full)
                else:
                    await self._queue_within(self._room_s, share, full)
        except ForebayError as error:
            share.ticket.finish(error)

    def read(
        self,
        start: Start = EARLIEST,
        *,
        stop: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncStream[Record]:
        """See `Topic.read`. `on_gap` is called in another thread."""
        begin = partial(self._topic.read, start, stop=stop, partition=partition, on_gap=on_gap)
        return AsyncStream(Paged(self._workers, self._key(partition), begin), self._topic.check_open)

    async def page(
        self, partition: int, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> RecordPage:
        """See `Topic.page`. What `read_cached` gives is read in the event loop, the rest by a worker."""
        page = self.read_cached(partition, offset, records_max=records_max, bytes_max=bytes_max)
        if page is None:
            read = partial(self._topic.page, partition, offset, records_max=records_max, bytes_max=bytes_max)
            page = await self._workers.start_reading(self._key(partition), read)
        return page

    def read_cached(
        self, partition: int, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> RecordPage | None:
        """See `Topic.read_cached`."""
        return self._topic.read_cached(partition, offset, records_max=records_max, bytes_max=bytes_max)

    async def batch_page(
        self, partition: int, offset: int, *, records_max: int, bytes_max: int, who: str = UNNAMED
    ) -> tuple[Page, Reach]:
        """See `Topic.batch_page`. What is in memory is read in the event loop, the rest by a worker.

        A page whose records may have ended while a worker read it is read again, unless records end all the time.
        `who` asks: reads of callers with a name take turns, and one who has too many waiting is `Throttled`.
        """
        read = partial(self._topic.batch_page, partition, offset, records_max=records_max, bytes_max=bytes_max)
        reads = 0
        while True:
            cached = self.batch_page_cached(partition, offset, records_max=records_max, bytes_max=bytes_max)
            if cached is not None:
                return cached
            before = self._open_shard(partition)
            found = await self._workers.start_reading(self._key(partition), read, who)
            reads += 1
            if before is None or reads == READS_MAX or self._open_shard(partition) == before:
                return found

    def _open_shard(self, partition: int) -> tuple[ReadShard, object] | None:
        """The shard of a partition, if it is open here, and what has ended in it; see `ReadShard.ended`."""
        shard = self._topic.shard_if_open(partition)
        return None if shard is None else (shard, shard.ended())

    def batch_page_cached(
        self, partition: int, offset: int, *, records_max: int, bytes_max: int
    ) -> tuple[Page, Reach] | None:
        """See `Topic.batch_page_cached`."""
        return self._topic.batch_page_cached(partition, offset, records_max=records_max, bytes_max=bytes_max)

    def read_arrow(
        self,
        start: Start = EARLIEST,
        *,
        stop: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncStream[pa.RecordBatch]:
        """See `Topic.read_arrow`."""
        begin = partial(self._topic.read_arrow, start, stop=stop, partition=partition, on_gap=on_gap)
        return AsyncStream(Paged(self._workers, self._key(partition), begin), self._topic.check_open)

    def follow(
        self,
        start: Start = LATEST,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncStream[Record]:
        """See `Topic.follow`. Leave it by cancelling, by `aclose` or by `async with`. `on_gap` is called in the loop.

        Where it starts is decided when the first record is asked for, or by `async with`. Any number of streams may
        follow a topic: they share what is read, and a writer pays for one of them.
        """
        if timeout is not None:
            checked_seconds("timeout", timeout)
        begin = partial(self._topic.following, start, partition=partition, on_gap=on_gap)
        watched = WatchedTopic(self._topic, begin, Batch.records)
        return AsyncStream(Watcher(self._workers.feeds, [watched], timeout), self._topic.check_open)

    def watched(self, render: Render[T], start: Start = LATEST) -> WatchedTopic[T]:
        """The topic from `start` on for a watcher of several; see `AsyncLog.watcher`."""
        return WatchedTopic.from_start(self._topic, render, start)

    def read_by_key(
        self,
        key: bytes,
        *,
        history: bool = False,
        start: Start = EARLIEST,
        limit: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncStream[Record]:
        """See `Topic.read_by_key`. `on_gap` is called in another thread."""
        begin = partial(
            self._topic.read_by_key,
            key,
            history=history,
            start=start,
            limit=limit,
            partition=partition,
            on_gap=on_gap,
        )
        return AsyncStream(Paged(self._workers, self._key(partition), begin), self._topic.check_open)

    def read_by_tag(
        self,
        tag: str,
        *,
        start: Start = EARLIEST,
        limit: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncStream[Record]:
        """See `Topic.read_by_tag`. `on_gap` is called in another thread."""
        begin = partial(self._topic.read_by_tag, tag, start=start, limit=limit, partition=partition, on_gap=on_gap)
        return AsyncStream(Paged(self._workers, self._key(partition), begin), self._topic.check_open)

    async def lookup_page(
        self,
        partition: int,
        start: Position,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        history: bool = False,
        records_max: int,
        bytes_max: int,
        who: str = UNNAMED,
    ) -> tuple[Page, Reach]:
        """See `Topic.lookup_page`, and `batch_page` here for `who`."""
        look = partial(
            self._topic.lookup_page,
            partition,
            start,
            key=key,
            tag=tag,
            history=history,
            records_max=records_max,
            bytes_max=bytes_max,
        )
        return await self._workers.start_reading(self._key(partition), look, who)

    async def delete_by_key(self, key: bytes, *, partition: int | None = None) -> int:
        """See `Topic.delete_by_key`."""
        return await self._delete(partition, partial(self._topic.delete_by_key, key, partition=partition))

    async def delete_by_tag(self, tag: str, *, partition: int | None = None) -> int:
        """See `Topic.delete_by_tag`."""
        return await self._delete(partition, partial(self._topic.delete_by_tag, tag, partition=partition))

    async def delete_by_offset(self, start: int, stop: int, partition: int | None = None) -> int:
        """See `Topic.delete_by_offset`."""
        return await self._delete(partition, partial(self._topic.delete_by_offset, start, stop, partition))

    async def delete_before(self, offset: int, partition: int | None = None) -> int:
        """See `Topic.delete_before`."""
        return await self._delete(partition, partial(self._topic.delete_before, offset, partition))

    def reader(self, name: str) -> AsyncReader:
        """See `Topic.reader`."""
        return AsyncReader(self._topic.reader(name), self._workers)

    async def subscribe(
        self, name: str, *, start: Start = LATEST, **options: Unpack[SubscriptionOptions]
    ) -> AsyncSubscription:
        """See `Topic.subscribe`."""
        subscribe = partial(self._topic.subscribe, name, start=start, **options)
        subscription = await self._workers.run_at(self._key(), subscribe)
        return AsyncSubscription(subscription, self._workers)

    async def subscription(self, name: str) -> AsyncSubscription:
        """See `Topic.subscription`."""
        return AsyncSubscription(
            await self._workers.ask_about(self._key(), self._topic.subscription, name), self._workers
        )

    async def delete_subscription(self, name: str) -> None:
        """See `Topic.delete_subscription`."""
        await self._workers.run_at(self._key(), self._topic.delete_subscription, name)

    async def subscriptions(self) -> list[SubscriptionSpec]:
        """See `Topic.subscriptions`."""
        return await self._workers.ask_about(self._key(), self._topic.subscriptions)

    def dead_letters(self) -> AsyncDeadLetters:
        """See `Topic.dead_letters`."""
        return AsyncDeadLetters(self._topic.dead_letters(), self._workers)

    async def acquire(self, partition: int | None = None) -> None:
        """See `Topic.acquire`."""
        await self._workers.start_opening(self._key(partition), self._topic.acquire, partition)

    async def offsets(self, partition: int = 0) -> Offsets:
        """See `Topic.offsets`."""
        return await self._workers.run_at(self._key(partition), self._topic.offsets, partition)

    async def read_ends(self, partitions: Sequence[int]) -> list[int]:
        """See `Topic.read_ends`."""
        return await self._workers.run_at(self._key(), self._topic.read_ends, partitions)

    async def ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """Where the records of these partitions end for readers.

        Of partitions that this process has open it comes from memory; workers ask for the others, several at a time.
        """
        shards = {number: self._topic.shard_if_open(number) for number in partitions}
        found = {number: shard.reach().head for number, shard in shards.items() if shard is not None}
        others = [number for number, shard in shards.items() if shard is None]
        asked = await asyncio.gather(*(self.offsets(number) for number in others))
        return found | {number: offsets.next for number, offsets in zip(others, asked, strict=True)}

    async def offset_at_time(self, timestamp: int, partition: int = 0, *, who: str = UNNAMED) -> int | None:
        """See `Topic.offset_at_time`, and `batch_page` here for `who`."""
        find = partial(self._topic.offset_at_time, timestamp, partition)
        return await self._workers.start_reading(self._key(partition), find, who)

    async def last_sequence(self, producer: int, partition: int = 0) -> int | None:
        """See `Topic.last_sequence`."""
        return await self._workers.run_at(self._key(partition), self._topic.last_sequence, producer, partition)

    async def recovery(self, partition: int = 0) -> RecoveryDecision:
        """See `Topic.recovery`."""
        return await self._workers.run_at(self._key(partition), self._topic.recovery, partition)

    async def epoch(self, partition: int = 0) -> int:
        """See `Topic.epoch`."""
        return await self._workers.run_at(self._key(partition), self._topic.epoch, partition)

    async def resolve(self, position: Position | int, partition: int = 0, *, who: str = UNNAMED) -> int:
        """See `Topic.resolve`, and `batch_page` here for `who`."""
        if isinstance(position, Position) and position.kind == "time":
            resolve = partial(self._topic.resolve, position, partition)
            return await self._workers.start_reading(self._key(partition), resolve, who)
        return await self._workers.run_at(self._key(partition), self._topic.resolve, position, partition)

    async def failure(self, partition: int = 0) -> str | None:
        """See `Topic.failure`."""
        return await self._workers.run_at(self._key(partition), self._topic.failure, partition)

    async def status(self) -> TopicStatus:
        """See `Topic.status`."""
        return await self._workers.run_at(self._key(), self._topic.status)

    async def export_failure(self, partition: int = 0) -> str | None:
        """See `Topic.export_failure`."""
        return await self._workers.run_at(self._key(partition), self._topic.export_failure, partition)

    async def flush(self) -> None:
        """See `Topic.flush`."""
        await self._workers.run_at(self._key(), self._topic.flush)

    async def rotate(self) -> None:
        """See `Topic.rotate`."""
        await self._workers.run_at(self._key(), self._topic.rotate)

    def _key(self, partition: int | None = None) -> CallKey:
        """What a call at a partition, or at any of the topic, may wait for."""
        return CallKey.of(self._topic, partition)

    async def _delete(self, partition: int | None, call: Callable[[], int]) -> int:
        """What a call comes to that ends records, in a thread for that."""
        return await self._workers.start(DELETE, self._key(partition), call)


def _bytes_of(column: Sequence[bytes | None] | None) -> int:
    """About how many bytes a column has. What is no column of bytes counts for nothing: the checks refuse it."""
    if not isinstance(column, list | tuple):
        return 0
    return sum([len(cell) for cell in column if isinstance(cell, bytes | bytearray | memoryview)])
