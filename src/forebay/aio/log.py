"""A log for asyncio: opened, asked for topics and closed without blocking the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from types import TracebackType
from typing import Final, Self, TypeVar, Unpack

from forebay.aio.groups import AsyncGroup
from forebay.aio.loads import AsyncLoads
from forebay.aio.topic import AsyncTopic
from forebay.aio.workers import DEFINE, JOB, UNNAMED, Workers
from forebay.bulk import SharedStore
from forebay.catalog.entries import UnreadableValue
from forebay.errors import Closed, Conflict, Corrupt, DataLoss, Moved, Unavailable, UnsupportedFormat
from forebay.format.metadata.descriptor import ShardState
from forebay.live import CallKey, WatchedTopic, Watcher
from forebay.locks import Rank, RankedLock
from forebay.metadata import MetadataStore
from forebay.meter import Metric, Sample
from forebay.pages import Page
from forebay.partitioning import check_partition
from forebay.settings import Settings
from forebay.shard.ownership import MayOwn
from forebay.storage import Retained, Storage, Topic
from forebay.storage.copying import Copied, OnRecords
from forebay.storage.erasure.answer import Erasure
from forebay.storage.recorded import RecordedShard
from forebay.storage.recovery import Progress, Recovered
from forebay.storage.segments import SegmentPage
from forebay.storage.status import LogStatus
from forebay.storage.usage import TierUsage
from forebay.storage.views import StoredRange
from forebay.topics import ShardRef, TopicChanges, TopicLimits, TopicName, TopicSpec
from forebay.views.snapshot import ShardView
from forebay.workers import WorkerStatus

T = TypeVar("T")

OPENING: Final = "the opening of the log"
RECOVERY: Final = "the recovery of the log"
RETENTION: Final = "the retention of all topics"
MOVED: Final = "files of shards that are elsewhere"
USAGE: Final = "the files of all topics"
"""What calls may wait for that concern no single topic."""


class AsyncLog:
    """Topics in one place, for one event loop."""

    def __init__(
        self,
        path: str | PurePath | None,
        settings: Settings,
        *,
        read_only: bool = False,
        may_own: MayOwn | None = None,
        commits_each_turn: bool = False,
        room_s: float = 0.0,
        wait_s: float | None = None,
    ) -> None:
        """With `commits_each_turn` what one turn of the loop has queued is committed together: see `turns`.

        For so many seconds `room_s` an append by `append_nowait` and its like waits for room in a full queue. A call
        that has no thread after `wait_s` seconds is `Unavailable`; without it calls wait for as long as it takes.
        """
        self._open = partial(Storage.open, path, settings, read_only=read_only, may_own=may_own)
        self._storage: Storage | None = None
        self._workers = Workers(
            reads_waiting_max=settings.server.reads_waiting_per_principal_max,
            commits_each_turn=commits_each_turn,
            room_s=room_s,
            wait_s=wait_s,
        )
        self._opening = RankedLock(Rank.LOG, "aio.opening")
        self._found: Storage | None = None
        self._wanted = True

    def __await__(self) -> Generator[object, None, Self]:
        return self._opened().__await__()

    async def __aenter__(self) -> Self:
        return await self._opened()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def settings(self) -> Settings:
        """What the log was opened with."""
        return self._log.settings

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
    ) -> AsyncTopic:
        """See `Storage.create_topic`."""
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
        topic = await self._workers.start(DEFINE, self._key(name), partial(_with_shards, create))
        return AsyncTopic(topic, self._log.settings, self._workers)

    async def topic(self, name: str | TopicName) -> AsyncTopic:
        """See `Storage.topic`."""
        find = partial(self._log.topic, name)
        topic = await self._workers.start_opening(self._key(name), _with_shards, find)
        return AsyncTopic(topic, self._log.settings, self._workers)

    def known_topic(self, name: TopicName) -> TopicSpec | None:
        """See `Storage.known_topic`: for event loops."""
        return self._log.known_topic(name)

    def is_open(self, ref: ShardRef) -> bool:
        """See `Storage.is_open`: for event loops."""
        return self._log.is_open(ref)

    def watcher(self, sources: Sequence[WatchedTopic[T]], *, outbox_bytes_max: int) -> Watcher[T]:
        """Follow topics, as `AsyncTopic.watched` gives them, with one task for all."""
        return Watcher(self._workers.feeds, sources, outbox_bytes_max=outbox_bytes_max)

    async def topics(
        self, prefix: str = "", *, after: str | TopicName | None = None, limit: int | None = None
    ) -> list[TopicSpec]:
        """See `Storage.topics`."""
        return await self._workers.run(lambda: self._log.topics(prefix, after=after, limit=limit))

    async def alter_topic(
        self, name: str | TopicName, *, allow_loss: bool = False, **changes: Unpack[TopicChanges]
    ) -> TopicSpec:
        """See `Storage.alter_topic`. The shards of new partitions are open on return, for appends that do not block."""
        alter = partial(self._log.alter_topic, name, allow_loss=allow_loss, **changes)
        spec = await self._workers.start(DEFINE, self._key(name), alter)
        await self._workers.start_opening(self._key(name), _with_shards, partial(self._log.topic, name))
        return spec

    async def unreadable_values(self) -> list[UnreadableValue]:
        """See `Storage.unreadable_values`."""
        return await self._workers.run(self._log.unreadable_values)

    async def status(self) -> LogStatus:
        """See `Storage.status`; the threads for calls of this event loop are among the workers."""
        found, calls = await self._workers.run(self._log.status), self._workers.status()
        stuck = Sample(Metric.THREADS_STUCK, (("worker", calls.name),), calls.stuck)
        return replace(found, workers=(*found.workers, calls), metrics=(*found.metrics, stuck))

    async def delete_topic(self, name: str | TopicName) -> None:
        """See `Storage.delete_topic`."""
        await self._workers.start(DEFINE, self._key(name), partial(self._log.delete_topic, name))

    async def seal_topic(
        self, name: str | TopicName, *, target: str | None = None, accept_damage: bool = False
    ) -> list[ShardState]:
        """See `Storage.seal_topic`."""
        seal = partial(self._log.seal_topic, name, target=target, accept_damage=accept_damage)
        return await self._workers.run_job(self._key(name), seal)

    async def take_over(
        self, name: str | TopicName, partition: int = 0, *, accept_loss: bool = False, by: str | None = None
    ) -> ShardState:
        """See `Storage.take_over`."""
        take_over = partial(self._log.take_over, name, partition, accept_loss=accept_loss, by=by)
        return await self._workers.run_job(self._key(name, partition), take_over)

    async def unseal_topic(self, name: str | TopicName) -> None:
        """See `Storage.unseal_topic`."""
        await self._workers.start(DEFINE, self._key(name), partial(self._log.unseal_topic, name))

    async def export_topic(self, name: str | TopicName, *, accept_damage: bool = False) -> None:
        """See `Storage.export_topic`."""
        export = partial(self._log.export_topic, name, accept_damage=accept_damage)
        await self._workers.run_job(self._key(name), export)

    async def erase_key(self, name: str | TopicName, key: bytes, *, now: bool = False) -> Erasure:
        """See `Storage.erase_key`."""
        return await self._workers.run_job(self._key(name), partial(self._log.erase_key, name, key, now=now))

    async def run_retention(self, name: str | TopicName | None = None) -> Retained:
        """See `Storage.run_retention`."""
        key = RETENTION if name is None else self._key(name)
        return await self._workers.run_job(key, partial(self._log.run_retention, name))

    async def segments(
        self, name: str | TopicName, partition: int = 0, *, start: int = 0, limit: int = 1000
    ) -> SegmentPage:
        """See `Storage.segments`."""
        find = partial(self._log.segments, name, partition, start=start, limit=limit)
        return await self._workers.run_at(self._key(name, partition), find)

    async def copy_topic(
        self, source: str | TopicName, target: str | TopicName, *, on_records: OnRecords | None = None
    ) -> Copied:
        """See `Storage.copy_topic`; `on_records` is called in another thread."""
        copy = partial(self._log.copy_topic, source, target, on_records=on_records)
        return await self._workers.run_job((self._key(source), self._key(target)), copy)

    async def recorded(self, name: str | TopicName) -> list[RecordedShard]:
        """See `Storage.recorded`."""
        return await self._workers.ask_about(self._key(name), self._log.recorded, name)

    async def check_held_here(self, name: str | TopicName, *, target: str | None = None) -> None:
        """See `Storage.check_held_here`."""
        await self._workers.ask_about(self._key(name), partial(self._log.check_held_here, name, target=target))

    async def check_not_arrived(self, name: str | TopicName) -> None:
        """See `Storage.check_not_arrived`."""
        await self._workers.ask_about(self._key(name), self._log.check_not_arrived, name)

    async def usage(self, name: str | TopicName | None = None) -> list[TierUsage]:
        """See `Storage.usage`."""
        usage = partial(self._log.usage, name)
        if name is None:
            return await self._workers.run_job(USAGE, usage)
        return await self._workers.run_at(self._key(name), usage)

    async def clear_moved(self) -> None:
        """See `Storage.clear_moved`."""
        await self._workers.run_job(MOVED, self._log.clear_moved)

    @property
    def path(self) -> str | None:
        """See `Storage.path`."""
        return self._log.path

    @property
    def metadata(self) -> MetadataStore:
        """See `Storage.metadata`. Its calls wait: make them in a thread."""
        return self._log.metadata

    @property
    def directory_id(self) -> str | None:
        """See `Storage.directory_id`."""
        return self._log.directory_id

    def loads_of(self, name: str | TopicName) -> AsyncLoads:
        """See `Storage.loads_of`."""
        return AsyncLoads(self._log.loads_of(name), self._workers, self._key(name))

    async def in_thread(self, call: Callable[[], T], *, at: str | None = None) -> T:
        """What a call comes to that waits for metadata, in one of the threads for that. For what is built on a log.

        A call that may wait for shards, too, says which `at` it is: others need not wait for it.
        """
        return await (self._workers.run(call) if at is None else self._workers.run_at(at, call))

    @property
    def is_degraded(self) -> bool:
        """Whether so many calls do not come back that further ones at the same places are refused."""
        return self._workers.is_degraded

    @property
    def history_place(self) -> SharedStore | None:
        """See `TopicViews.store`."""
        return self._log.views.store

    async def look(self, spec: TopicSpec, *, who: str = UNNAMED) -> list[ShardView]:
        """See `TopicViews.look`."""
        return await self._workers.start_reading(_key_of(spec), partial(self._log.views.look, spec), who)

    async def stored_page(
        self, spec: TopicSpec, partition: int, offset: int, bytes_max: int, *, who: str = UNNAMED
    ) -> tuple[Page | None, int]:
        """See `TopicViews.page`."""
        check_partition(partition, spec.partitions)
        read = partial(self._log.views.page, ShardRef(spec, partition), offset, bytes_max)
        return await self._workers.start_reading(_key_of(spec, partition), read, who)

    async def stored_bytes(self, spec: TopicSpec, partition: int, wanted: StoredRange, *, who: str = UNNAMED) -> bytes:
        """See `TopicViews.bytes`."""
        check_partition(partition, spec.partitions)
        read = partial(self._log.views.bytes, ShardRef(spec, partition), wanted)
        return await self._workers.start_reading(_key_of(spec, partition), read, who)

    @property
    def blocking(self) -> Storage:
        """The same log for threads. Its calls wait: never make one in the event loop."""
        return self._log

    def group(self, name: str) -> AsyncGroup:
        """See `Storage.group`."""
        return AsyncGroup(self._log.group(name), self._workers, self._key)

    async def groups(self) -> list[str]:
        """See `Storage.groups`."""
        return await self._workers.run(self._log.groups)

    async def groups_below(self, prefixes: Sequence[str]) -> list[str]:
        """See `Storage.groups_below`."""
        return await self._workers.run(partial(self._log.groups_below, prefixes))

    def workers(self) -> tuple[WorkerStatus, ...]:
        """See `Storage.workers`."""
        return self._log.workers()

    async def recover(self, on_progress: Progress | None = None) -> Recovered:
        """See `Storage.recover`; `on_progress` is called in the event loop."""
        loop = asyncio.get_running_loop()

        def report(done: float) -> None:
            if on_progress is not None:
                loop.call_soon_threadsafe(on_progress, done)

        return await self._workers.run_job(RECOVERY, partial(self._log.recover, report))

    async def close(self) -> None:
        """See `Storage.close`. Goes on in its thread if it is cancelled."""
        storage, self._storage = self._storage, None
        if storage is None:
            self._workers.end()
            return
        closing = self._workers.start_closing(storage.close)
        closing.add_done_callback(lambda _: self._workers.end())
        await asyncio.shield(closing)

    async def _opened(self) -> Self:
        if self._storage is None:
            try:
                self._storage = await asyncio.shield(self._workers.start(JOB, OPENING, self._open_wanted))
            except asyncio.CancelledError:
                self._give_up()
                raise
        return self

    def _open_wanted(self) -> Storage:
        """Open in a thread; if the caller waits no more, close again."""
        storage = self._open()
        with self._opening:
            self._found = storage
            wanted = self._wanted
        if not wanted:
            storage.close()
            raise Closed("the opening of this log was cancelled")
        return storage

    def _give_up(self) -> None:
        with self._opening:
            self._wanted = False
            found = self._found
        if found is not None:
            _ = self._workers.start(JOB, OPENING, found.close)

    def _key(self, name: str | TopicName, partition: int | None = None) -> CallKey:
        """What a call at a topic may wait for. Asks memory alone; `Invalid` for what cannot be the name of one."""
        parsed = TopicName.parse(name)
        known = self._log.known_topic(parsed)
        topic_id = parsed.topic_id if known is None else known.topic_id
        return CallKey(f"{parsed.namespace}/{parsed.topic}", topic_id or "", partition)

    @property
    def _log(self) -> Storage:
        if self._storage is None:
            raise Closed("this log is not open: use `async with` or await it first")
        return self._storage


def _key_of(spec: TopicSpec, partition: int | None = None) -> CallKey:
    return CallKey(str(spec.name), spec.topic_id, partition)


def _with_shards(find: Callable[[], Topic]) -> Topic:
    """The topic with every shard of this directory open, so that the first append need not wait for a worker.

    A shard that cannot be opened keeps no caller from the others of its topic: its use tries again, and says why. One
    in the memory or the database of another directory cannot be read here, and an append may take it over.
    """
    topic = find()
    for partition in range(topic.partitions):
        with suppress(Moved, Conflict, Corrupt, DataLoss, Unavailable, UnsupportedFormat):
            topic.offsets(partition)
    return topic
