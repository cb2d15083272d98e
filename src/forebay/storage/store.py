"""A data directory held open: its topics, the engines they live on, and the threads that look after them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from forebay.clock import Clock, SystemClock
from forebay.disk import Disk, SystemDisk
from forebay.engines import FollowingEngine, MemoryEngine, OpenShard, SegmentEngine
from forebay.errors import Closed, Unsupported
from forebay.lifecycle import close_with_process, closed
from forebay.metadata import MemoryMetadata, MetadataStore, SqliteMetadata
from forebay.settings import Settings
from forebay.shard import Owner, ShardRef
from forebay.storage.definitions import Definitions
from forebay.storage.directory import DataDirectory, is_owned
from forebay.storage.threads import Committer, Maintenance
from forebay.storage.topic import Topic
from forebay.topics import Engine, TopicName, TopicSpec

logger = logging.getLogger(__name__)

IN_MEMORY = ":memory:"
SESSION_SECONDS = 30.0

Progress = Callable[[float], None]


class Storage:
    """Topics in one place. Opened by `forebay.open`; close it, or use it in a `with` statement."""

    def __init__(
        self,
        settings: Settings,
        metadata: MetadataStore,
        *,
        clock: Clock,
        owner: Owner,
        memory: MemoryEngine,
        segment: SegmentEngine | FollowingEngine | None,
        maintenance: Maintenance | None,
        directory: DataDirectory | None,
        read_only: bool = False,
    ) -> None:
        self.settings = settings
        self.read_only = read_only
        self._metadata = metadata
        self._clock = clock
        self._owner = owner
        self._memory = memory
        self._segment = segment
        self._maintenance = maintenance
        self._directory = directory
        self._committer = Committer()
        self._definitions = Definitions(metadata, settings.metadata.prefix, clock)
        self._closing = threading.Lock()
        self._ended: str | None = None

    @classmethod
    def open(
        cls,
        path: str,
        settings: Settings,
        *,
        read_only: bool = False,
        disk: Disk | None = None,
        clock: Clock | None = None,
    ) -> Storage:
        """Open the data directory `path` for this process alone, or `:memory:`. Made if it does not exist.

        With `read_only`, beside whoever owns it: reading and following only.
        """
        clock = clock or SystemClock()
        if path == IN_MEMORY:
            return cls._open_memory(settings, clock)
        disk = disk or SystemDisk(settings.runtime.descriptors_max)
        if read_only:
            return cls._open_beside(DataDirectory.look(path, disk), settings, disk, clock)
        directory = DataDirectory.take(path, disk, clock)
        try:
            return cls._open_directory(directory, settings, disk, clock)
        except BaseException:
            directory.release()
            raise

    @classmethod
    def _open_memory(cls, settings: Settings, clock: Clock) -> Storage:
        metadata = MemoryMetadata()
        owner = Owner(metadata.session(SESSION_SECONDS).id, IN_MEMORY)
        memory = MemoryEngine(settings, clock=clock, metadata=metadata, owner=owner)
        storage = cls(
            settings,
            metadata,
            clock=clock,
            owner=owner,
            memory=memory,
            segment=None,
            maintenance=None,
            directory=None,
        )
        close_with_process(storage)
        return storage

    @classmethod
    def _open_beside(cls, directory: DataDirectory, settings: Settings, disk: Disk, clock: Clock) -> Storage:
        metadata = SqliteMetadata(
            settings.metadata.path or directory.metadata_path,
            disk=disk,
            clock=clock,
            busy_timeout_ms=settings.metadata.busy_timeout_ms,
            read_only=True,
        )
        owner = Owner("", directory.id)
        storage = cls(
            settings,
            metadata,
            clock=clock,
            owner=owner,
            memory=MemoryEngine(settings, clock=clock, metadata=metadata, owner=owner),
            segment=FollowingEngine(
                directory.path,
                settings,
                disk=disk,
                clock=clock,
                is_owned=lambda: is_owned(directory.path, disk),
            ),
            maintenance=None,
            directory=directory,
            read_only=True,
        )
        close_with_process(storage)
        return storage

    @classmethod
    def _open_directory(cls, directory: DataDirectory, settings: Settings, disk: Disk, clock: Clock) -> Storage:
        metadata = SqliteMetadata(
            settings.metadata.path or directory.metadata_path,
            disk=disk,
            clock=clock,
            busy_timeout_ms=settings.metadata.busy_timeout_ms,
        )
        try:
            owner = Owner(metadata.session(SESSION_SECONDS).id, directory.id)
            maintenance = Maintenance(disk, clock, directory.path, settings.runtime)
            storage = cls(
                settings,
                metadata,
                clock=clock,
                owner=owner,
                memory=MemoryEngine(settings, clock=clock, metadata=metadata, owner=owner),
                segment=SegmentEngine(
                    directory.path,
                    settings,
                    disk=disk,
                    clock=clock,
                    metadata=metadata,
                    owner=owner,
                    on_open=maintenance.watch,
                ),
                maintenance=maintenance,
                directory=directory,
            )
            storage._finish_deletions()
        except BaseException:
            metadata.close()
            raise
        close_with_process(storage)
        return storage

    # Topics

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        durability: str | None = None,
        engine: str | None = None,
        compression: str = "none",
        exist_ok: bool = False,
    ) -> Topic:
        """Create a topic and return it; `Conflict` if it exists, unless `exist_ok`, which then returns it as it is.

        `durability` is `fsync`, `disk` (the default), `memory` or `ephemeral`; `compression` `none` or `zstd[:level]`.
        """
        self._check_writable()
        if self._segment is None and durability is None and engine is None:
            durability = "ephemeral"
        spec = self._definitions.new_spec(
            TopicName.parse(name),
            partitions=partitions,
            durability=durability,
            engine=engine,
            compression=compression,
        )
        self._finish_deletions()
        return self._handle(self._definitions.create(spec, exist_ok=exist_ok))

    def topic(self, name: str) -> Topic:
        """A topic that exists; `UnknownTopic` if the metadata store says that it does not."""
        self._check_open()
        return self._handle(self._definitions.get(TopicName.parse(name)))

    def topics(self) -> list[TopicSpec]:
        """The definitions of all topics, by name."""
        self._check_open()
        return self._definitions.all()

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its records. Repeatable: an interrupted deletion is finished at the next opening."""
        self._check_writable()
        self._definitions.begin_deletion(TopicName.parse(name))
        self._finish_deletions()

    def recover(self, on_progress: Progress | None = None) -> None:
        """Open every shard now rather than at its first use; `on_progress` hears 0.0 to 1.0, by bytes walked."""
        self._check_open()
        if not isinstance(self._segment, SegmentEngine):
            return
        refs = [ref for spec in self.topics() if spec.engine is Engine.SEGMENT for ref in refs_of(spec)]
        total = sum(self._segment.tail_bytes(ref) for ref in refs) or 1
        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            if on_progress is not None:
                on_progress(min(0.999, done / total))

        self._segment.open_many(refs, on_bytes)
        if on_progress is not None:
            on_progress(1.0)

    # Ending

    def close(self) -> None:
        """Make everything durable and end in order: nothing is left to replay. Harmless when repeated."""
        with self._closing:
            if self._ended is not None:
                return
            self._ended = "is closed"
            self._committer.end()
            if self._maintenance is not None:
                self._maintenance.end()
            if self._segment is not None:
                self._segment.close()
            self._memory.close()
            self._metadata.close()
            if self._directory is not None:
                self._directory.release()
            closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def before_fork(self) -> None:
        """Nothing to wait for: the child ends its copy without touching anything."""

    def after_fork_in_parent(self) -> None:
        """Everything goes on."""

    def after_fork_in_child(self) -> None:
        """In the child every handle says that it was opened before the fork."""
        self._ended = "was opened before a fork: open it anew in the child"
        self._committer.abandon()
        if self._maintenance is not None:
            self._maintenance.abandon()
        if self._segment is not None:
            self._segment.abandon()
        self._memory.abandon()
        if self._directory is not None:
            self._directory.abandon()
        closed(self)

    # How

    def _handle(self, spec: TopicSpec) -> Topic:
        engine = self._memory if spec.engine is Engine.MEMORY else self._segment
        if engine is None:
            raise Unsupported("this log keeps everything in memory: use durability ephemeral")
        if self.read_only and spec.engine is Engine.MEMORY:
            raise Unsupported(f"{spec.name} lives in the memory of its owner: no other process can read it")
        refs: Sequence[ShardRef] = refs_of(spec)
        opened: dict[int, OpenShard] = {}

        def shard(partition: int) -> OpenShard:
            found = opened.get(partition)
            if found is None:
                self._check_open()
                found = opened[partition] = engine.open_shard(refs[partition])
            return found

        return Topic(spec, self.settings.wal, clock=self._clock, shard=shard, commit_soon=self._committer.ask)

    def _finish_deletions(self) -> None:
        for spec in self._definitions.deleting():
            for ref in refs_of(spec):
                if self._maintenance is not None:
                    self._maintenance.forget(ref.id)
                if spec.engine is Engine.MEMORY or self._segment is None:
                    self._memory.delete_shard(ref)
                else:
                    self._segment.delete_shard(ref)
            self._definitions.end_deletion(spec)

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise Unsupported("this log is opened read-only: change topics in the process that owns the directory")

    def _check_open(self) -> None:
        if self._ended is not None:
            raise Closed(f"this log {self._ended}")


def refs_of(spec: TopicSpec) -> list[ShardRef]:
    """The shards of a topic."""
    return [ShardRef(spec, partition) for partition in range(spec.partitions)]
