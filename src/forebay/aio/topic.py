"""A topic for asyncio: appends by the queue, everything else in the log's few threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from forebay.aio.readers import AsyncReader
from forebay.aio.streams import LOOK_SECONDS, AsyncStream, Followed, Paged
from forebay.aio.workers import Published, Workers
from forebay.appends.queue import QueueFull
from forebay.engines.seam import PAGE_BYTES, PAGE_RECORDS
from forebay.errors import Unavailable
from forebay.records import EARLIEST, LATEST, HeadersLike, Offsets, OnGap, Position, Record, RecordPage, Start
from forebay.settings import Settings
from forebay.shard import RecoveryDecision
from forebay.storage import Ack, Topic
from forebay.storage.arguments import checked_seconds
from forebay.topics import TopicSpec

if TYPE_CHECKING:
    import pyarrow as pa


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
        self._run = workers.run
        self._workers = workers
        self._timeout = settings.wal.append_timeout_ms / 1000
        self._room = Published(topic)
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
    ) -> int:
        """See `Topic.append`. Appends of many tasks are written together; start them together.

        Cancelled, it may still become visible, once. While the queue is full it waits without blocking.
        """
        queue = partial(
            self._topic.append_if_open,
            value,
            key=key,
            tag=tag,
            headers=headers,
            timestamp=timestamp,
            partition=partition,
            producer=producer,
            sequence=sequence,
            waiting=self._opening,
        )
        try:
            ack = await self._queued(queue)
        except QueueFull as full:
            ack = await self._patiently(queue, full)
        return await ack

    async def _queued(self, queue: partial[Ack | int]) -> Ack:
        """Queue the append in the loop; where its shard is not open, a worker acquires and recovers it first.

        Appends that wait for a shard are queued in the order they came, and later ones behind them.
        """
        queued = queue()
        if not isinstance(queued, int):
            return queued
        partition = queued
        opening = self._opening.setdefault(partition, _Opening())
        # What began after the append came: an older failure is not an answer to it.
        acquired = opening.acquired if opening.acquired is not None and not opening.acquired.done() else None
        opening.appends += 1
        try:
            async with opening.turn:
                queued = queue(partition=partition, waiting=())
                if isinstance(queued, int):
                    if acquired is None:
                        acquired = opening.acquired = self._workers.start(self._topic.acquire, partition)
                    await asyncio.shield(acquired)
                    queued = queue(partition=partition, waiting=())
                if isinstance(queued, int):
                    # Lost again at once: the worker waits for it, not the loop.
                    options = {**queue.keywords, "partition": partition}
                    del options["waiting"]
                    return await self._workers.run_append(partial(self._topic.append_nowait, *queue.args, **options))
                return queued
        finally:
            opening.appends -= 1
            if opening.appends == 0:
                del self._opening[partition]

    async def _patiently(self, queue: partial[Ack | int], full: QueueFull) -> Ack:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        with self._room as room:
            while (left := deadline - loop.time()) > 0:
                published = room.next()
                try:
                    return await self._queued(queue)
                except QueueFull as still:
                    full = still
                await asyncio.wait([published], timeout=min(left, LOOK_SECONDS))
        waited = round(self._timeout * 1000)
        raise Unavailable(f"{self.name}: waited {waited} ms (wal.append_timeout_ms): {full}") from full

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
        atomic: bool = True,
    ) -> Sequence[int]:
        """See `Topic.append_many`."""
        return await self._workers.run_append(
            self._topic.append_many,
            values,
            keys=keys,
            tags=tags,
            headers=headers,
            timestamps=timestamps,
            partition=partition,
            producer=producer,
            sequence=sequence,
            atomic=atomic,
        )

    async def append_arrow(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
    ) -> Sequence[int]:
        """See `Topic.append_arrow`."""
        return await self._workers.run_append(
            self._topic.append_arrow, batch, partition=partition, producer=producer, sequence=sequence
        )

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
        return AsyncStream(Paged(self._workers, begin))

    async def page(
        self, partition: int, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> RecordPage:
        """See `Topic.page`. What is in memory is read in the event loop, the rest by a worker."""
        page = self.read_cached(partition, offset, records_max=records_max, bytes_max=bytes_max)
        if page is None:
            page = await self._run(self._topic.page, partition, offset, records_max=records_max, bytes_max=bytes_max)
        return page

    def read_cached(
        self, partition: int, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> RecordPage | None:
        """See `Topic.read_cached`."""
        return self._topic.read_cached(partition, offset, records_max=records_max, bytes_max=bytes_max)

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
        return AsyncStream(Paged(self._workers, begin))

    def follow(
        self,
        start: Start = LATEST,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncStream[Record]:
        """See `Topic.follow`. Leave it by cancelling, by `aclose` or by `async with`.

        Where it starts is settled by the first record that is asked for, or by `async with`.
        """
        if timeout is not None:
            checked_seconds("timeout", timeout)
        begin = partial(self._topic.following, start, partition=partition, on_gap=on_gap)
        return AsyncStream(Followed(self._workers, begin, timeout))

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
        return AsyncStream(Paged(self._workers, begin))

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
        return AsyncStream(Paged(self._workers, begin))

    async def delete_by_key(self, key: bytes, *, partition: int | None = None) -> int:
        """See `Topic.delete_by_key`."""
        return await self._run(self._topic.delete_by_key, key, partition=partition)

    async def delete_by_tag(self, tag: str, *, partition: int | None = None) -> int:
        """See `Topic.delete_by_tag`."""
        return await self._run(self._topic.delete_by_tag, tag, partition=partition)

    async def delete_by_offset(self, start: int, stop: int, partition: int | None = None) -> int:
        """See `Topic.delete_by_offset`."""
        return await self._run(self._topic.delete_by_offset, start, stop, partition)

    async def delete_before(self, offset: int, partition: int | None = None) -> int:
        """See `Topic.delete_before`."""
        return await self._run(self._topic.delete_before, offset, partition)

    def reader(self, name: str) -> AsyncReader:
        """See `Topic.reader`."""
        return AsyncReader(self._topic.reader(name), self._workers)

    async def acquire(self, partition: int | None = None) -> None:
        """See `Topic.acquire`."""
        await self._run(self._topic.acquire, partition)

    async def offsets(self, partition: int = 0) -> Offsets:
        """See `Topic.offsets`."""
        return await self._run(self._topic.offsets, partition)

    async def offset_at_time(self, timestamp: int, partition: int = 0) -> int | None:
        """See `Topic.offset_at_time`."""
        return await self._run(self._topic.offset_at_time, timestamp, partition)

    async def last_sequence(self, producer: int, partition: int = 0) -> int | None:
        """See `Topic.last_sequence`."""
        return await self._run(self._topic.last_sequence, producer, partition)

    async def recovery(self, partition: int = 0) -> RecoveryDecision:
        """See `Topic.recovery`."""
        return await self._run(self._topic.recovery, partition)

    async def epoch(self, partition: int = 0) -> int:
        """See `Topic.epoch`."""
        return await self._run(self._topic.epoch, partition)

    async def resolve(self, position: Position | int, partition: int = 0) -> int:
        """See `Topic.resolve`."""
        return await self._run(self._topic.resolve, position, partition)

    async def failure(self, partition: int = 0) -> str | None:
        """See `Topic.failure`."""
        return await self._run(self._topic.failure, partition)

    async def export_failure(self, partition: int = 0) -> str | None:
        """See `Topic.export_failure`."""
        return await self._run(self._topic.export_failure, partition)

    async def flush(self) -> None:
        """See `Topic.flush`."""
        await self._run(self._topic.flush)

    async def rotate(self) -> None:
        """See `Topic.rotate`."""
        await self._run(self._topic.rotate)
