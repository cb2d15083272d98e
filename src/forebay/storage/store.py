"""A data directory held open: its topics, the engines they live on, and the threads that look after them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import PurePath
from types import TracebackType
from typing import Self

from forebay.clock import Clock, SystemClock
from forebay.disk import Disk, SystemDisk
from forebay.engines import FollowingEngine, MemoryEngine, OpenShard, SegmentEngine
from forebay.errors import Closed, Unavailable, UnknownTopic, Unsupported
from forebay.lifecycle import close_with_process, closed
from forebay.metadata import MemoryMetadata, MetadataStore
from forebay.metadata.opening import open_metadata
from forebay.settings import Settings, StoreSettings
from forebay.shard import Owner, ShardRef
from forebay.storage.definitions import Definitions, refs_of
from forebay.storage.directory import LogDirectory, is_owned, refuse_lost_metadata
from forebay.storage.threads import Closing, Committer, Maintenance
from forebay.storage.topic import Topic
from forebay.topics import Engine, TopicName, TopicSpec

logger = logging.getLogger(__name__)

IN_MEMORY = ":memory:"

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
        directory: LogDirectory | None,
        disk: SystemDisk | None = None,
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
        self._disk = disk
        """The disk, if it is this log's own: then it ends with it, and a forked child must let go of it."""
        self._committer = Committer()
        self._definitions = Definitions(metadata, settings.metadata.prefix, clock)
        self._opened: dict[str, dict[int, OpenShard]] = {}
        """The open shards of each topic id, shared by all its handles."""
        self._changing = threading.RLock()
        """Held while a topic is deleted and while a shard is opened: none is opened behind a deletion's back."""
        self._closing = Closing()
        self._ended: str | None = None

    @classmethod
    def open(
        cls,
        path: str | PurePath,
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
            if read_only:
                raise Unsupported(f'"{IN_MEMORY}" is a log of this process alone: there is nothing to read beside it')
            return cls._open_memory(settings, clock)
        if settings.store != StoreSettings():
            raise Unsupported(f"topics do not keep history in a store yet: leave the group store out to open {path}")
        if settings.metadata.backend == "memory":
            raise Unsupported(
                f'metadata.backend "memory" would forget the topics of {path}: use "sqlite", or open "{IN_MEMORY}"'
            )
        own = SystemDisk(settings.runtime.descriptors_max) if disk is None else None
        used = own or disk
        assert used is not None
        with ExitStack() as undo:
            if own is not None:
                undo.callback(own.close)
            if read_only:
                storage = cls._open_beside(LogDirectory.look(path, used), settings, used, clock, own)
            else:
                directory = LogDirectory.take(path, used, clock)
                undo.callback(directory.release)
                storage = cls._open_directory(directory, settings, used, clock, own)
            undo.pop_all()
        return storage

    @classmethod
    def _open_memory(cls, settings: Settings, clock: Clock) -> Storage:
        metadata = MemoryMetadata()
        owner = Owner(metadata.session(settings.metadata.lease_ttl_s).id, IN_MEMORY)
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
    def _open_beside(
        cls, directory: LogDirectory, settings: Settings, disk: Disk, clock: Clock, own: SystemDisk | None
    ) -> Storage:
        path = directory.metadata_at(settings.metadata.path)
        metadata = open_metadata(settings.metadata, path, disk=disk, clock=clock, read_only=True)
        definitions = Definitions(metadata, settings.metadata.prefix, clock)
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
                is_known=lambda ref: definitions.is_current(ref.spec),
            ),
            maintenance=None,
            directory=directory,
            disk=own,
            read_only=True,
        )
        close_with_process(storage)
        return storage

    @classmethod
    def _open_directory(
        cls, directory: LogDirectory, settings: Settings, disk: Disk, clock: Clock, own: SystemDisk | None
    ) -> Storage:
        path = directory.metadata_at(settings.metadata.path)
        if settings.metadata.backend == "sqlite":
            refuse_lost_metadata(directory.path, path, disk)
        metadata = open_metadata(settings.metadata, path, disk=disk, clock=clock)
        try:
            owner = Owner(metadata.session(settings.metadata.lease_ttl_s).id, directory.id)
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
                disk=own,
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
        if self._segment is None and spec.engine is not Engine.MEMORY:
            raise Unsupported(f'this log keeps everything in memory: create {spec.name} with durability "ephemeral"')
        with self._changing:
            self._finish_deletions()
            if any(gone.name == spec.name for gone in self._definitions.deleting()):
                raise Unavailable(
                    f"{spec.name}: the files of the deleted topic of that name are not gone yet; try again"
                )
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
        """Delete a topic with all its records: from its return on the topic is unknown.

        Files that cannot be removed now are removed later, at the latest when the directory is opened next.
        """
        self._check_writable()
        with self._changing:
            self._definitions.begin_deletion(TopicName.parse(name))
            self._finish_deletions()

    def recover(self, on_progress: Progress | None = None) -> None:
        """Open every shard now rather than at its first use; `on_progress` hears 0.0 to 1.0, by bytes walked."""
        self._check_open()
        if not isinstance(self._segment, SegmentEngine):
            return
        done, total = 0, 1

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            if on_progress is not None:
                on_progress(min(0.999, done / total))

        with self._changing:
            refs = [ref for spec in self.topics() if spec.engine is Engine.SEGMENT for ref in refs_of(spec)]
            total = sum(self._segment.tail_bytes(ref) for ref in refs) or 1
            try:
                self._segment.open_many(refs, on_bytes)
            except OSError as error:
                raise Unavailable(
                    f"not every shard could be opened: {error}; once the disk works, try again"
                ) from error
        if on_progress is not None:
            on_progress(1.0)

    # Ending

    def close(self) -> None:
        """Make everything durable and end in order: nothing is left to replay. Harmless when repeated.

        In the callback of an append it returns at once if somebody is closing already. In a signal handler that
        interrupted an append of this log, or its closing, it raises `Unavailable`: close when that is over.
        """
        shards = [shard for opened in self._opened.copy().values() for shard in opened.copy().values()]
        self._closing.run(self._close, shards, self._committer)

    def _close(self) -> None:
        # Set first and looked at by nobody here: a closing that was interrupted is finished by the next call.
        self._ended = self._ended or "is closed"
        with ExitStack() as last_first:
            last_first.callback(closed, self)
            if self._directory is not None:
                last_first.callback(self._directory.release)
            last_first.callback(self._metadata.close)
            last_first.callback(self._memory.close)
            if self._segment is not None:
                last_first.callback(self._segment.close)
            if self._maintenance is not None:
                last_first.callback(self._maintenance.end)
            last_first.callback(self._committer.end)
        if self._disk is not None:
            # Only here: what a closing that failed has left to do needs it still.
            self._disk.close()

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
        """In the child every handle says that it was opened before the fork, and nothing of the parent's is held."""
        self._ended = "was opened before a fork: open it anew in the child"
        # Whoever held one of these at the fork does not exist here.
        self._closing, self._changing = Closing(), threading.RLock()
        for opened in self._opened.values():
            opened.clear()
        self._committer.abandon()
        if self._maintenance is not None:
            self._maintenance.abandon()
        if self._segment is not None:
            self._segment.abandon()
        self._memory.abandon()
        if self._directory is not None:
            self._directory.abandon()
        if self._disk is not None:
            # Else the child would keep the parent's locks alive after its death.
            self._disk.abandon()
        closed(self)

    # How

    def _handle(self, spec: TopicSpec) -> Topic:
        if self.read_only and spec.engine is Engine.MEMORY:
            raise Unsupported(f"{spec.name} lives in the memory of its owner: no other process can read it")
        opened = self._opened.setdefault(spec.topic_id, {})

        def shard(partition: int) -> OpenShard:
            found = opened.get(partition)
            return found if found is not None else self._open_shard(opened, ShardRef(spec, partition))

        return Topic(spec, self.settings.wal, clock=self._clock, shard=shard, commit_soon=self._committer.ask)

    def _open_shard(self, opened: dict[int, OpenShard], ref: ShardRef) -> OpenShard:
        with self._changing:
            self._check_open()
            # A handle may outlive its topic: what it names must not come to life again by being used.
            if not self._definitions.is_current(ref.spec):
                raise UnknownTopic(f"topic {ref.spec.name} was deleted: this handle has ended")
            engine = self._memory if ref.spec.engine is Engine.MEMORY else self._segment
            assert engine is not None
            try:
                opened[ref.partition] = engine.open_shard(ref)
            except OSError as error:
                raise Unavailable(f"{ref} cannot be opened: {error}; once the disk works, try again") from error
            return opened[ref.partition]

    def _finish_deletions(self) -> None:
        """Remove what deleted topics left. What cannot be removed now is logged and tried again later."""
        for spec in self._definitions.deleting():
            self._opened.pop(spec.topic_id, {}).clear()
            try:
                for ref in refs_of(spec):
                    self._delete_shard(ref)
                self._definitions.end_deletion(spec)
            except (OSError, Unavailable) as error:
                logger.warning("%s is deleted, but not all of its files could be removed yet: %s", spec.name, error)

    def _delete_shard(self, ref: ShardRef) -> None:
        if self._maintenance is not None:
            self._maintenance.forget(ref.id)
        if ref.spec.engine is Engine.MEMORY or self._segment is None:
            self._memory.delete_shard(ref)
        else:
            self._segment.delete_shard(ref)

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise Unsupported("this log is opened read-only: change topics in the process that owns the directory")

    def _check_open(self) -> None:
        if self._ended is not None:
            raise Closed(f"this log {self._ended}")
