"""A named reader for asyncio: its place is kept as by `forebay.Reader`, in the log's few threads."""

from __future__ import annotations

from functools import partial

from forebay.aio.streams import AsyncStream, Paged
from forebay.aio.workers import Workers
from forebay.arguments import checked_seconds
from forebay.format.frame.batch import Batch
from forebay.live import CallKey, WatchedTopic, Watcher
from forebay.records import EARLIEST, CommitAck, OnGap, Position, Record
from forebay.storage import Reader


class AsyncReader:
    """One reader of one topic. Made by `AsyncTopic.reader`."""

    def __init__(self, reader: Reader, workers: Workers) -> None:
        self.name = reader.name
        self._reader = reader
        self._workers = workers

    async def offset(self, partition: int = 0) -> int | None:
        """See `Reader.offset`."""
        return await self._workers.ask_about(self._key(partition), self._reader.offset, partition)

    async def note(self, partition: int = 0) -> str:
        """See `Reader.note`."""
        return await self._workers.ask_about(self._key(partition), self._reader.note, partition)

    async def ack(self, record: Record, note: str = "") -> int:
        """See `Reader.ack`."""
        return await self._workers.run_at(self._key(record.partition), self._reader.ack, record, note)

    async def ack_up_to(
        self,
        offset: int,
        partition: int = 0,
        note: str = "",
        *,
        ack: CommitAck = "durable",
        expected: int | None = None,
    ) -> int:
        """See `Reader.ack_up_to`."""
        ack_up_to = partial(self._reader.ack_up_to, offset, partition, note, ack=ack, expected=expected)
        return await self._workers.run_at(self._key(partition), ack_up_to)

    async def reset(self, position: Position | int = EARLIEST, partition: int = 0, note: str = "") -> int:
        """See `Reader.reset`."""
        return await self._workers.run_at(self._key(partition), self._reader.reset, position, partition, note)

    async def forget(self) -> None:
        """See `Reader.forget`."""
        await self._workers.ask_about(self._key(None), self._reader.forget)

    def read(
        self, *, start: Position = EARLIEST, partition: int | None = None, on_gap: OnGap | None = None
    ) -> AsyncStream[Record]:
        """See `Reader.read`."""
        begin = partial(self._reader.read, start=start, partition=partition, on_gap=on_gap)
        return AsyncStream(Paged(self._workers, self._key(partition), begin), self._reader.topic.check_open)

    def follow(
        self,
        *,
        start: Position = EARLIEST,
        partition: int | None = None,
        timeout: float | None = None,
        on_gap: OnGap | None = None,
    ) -> AsyncStream[Record]:
        """See `Reader.follow`. Leave it as `AsyncTopic.follow`."""
        if timeout is not None:
            checked_seconds("timeout", timeout)
        begin = partial(self._reader.following, start=start, partition=partition, on_gap=on_gap)
        watched = WatchedTopic(self._reader.topic, begin, Batch.records)
        return AsyncStream(Watcher(self._workers.feeds, [watched], timeout), self._reader.topic.check_open)

    def _key(self, partition: int | None) -> CallKey:
        """What a call at the topic may wait for."""
        return CallKey.of(self._reader.topic, partition)
