"""A data directory seen beside its owner, or what is shared, seen by a process without a directory: to read and follow.

Nothing is acquired and nothing is written but the places of readers and groups.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import PurePath

from forebay.clock import Clock
from forebay.definitions import Definitions
from forebay.directory import LogDirectory, NoDirectory, is_owned
from forebay.disk import Disk, SystemDisk
from forebay.engines import FollowingEngine, OwnedShard, ReadShard
from forebay.engines.registry import Registry
from forebay.errors import Unsupported
from forebay.metadata import MetadataStore
from forebay.metadata.open_store import open_metadata
from forebay.meter import LogMeter
from forebay.places import Places, open_places
from forebay.progress import ProgressStore
from forebay.settings import Settings
from forebay.shard import ShardContext
from forebay.storage.alter import Alterations
from forebay.storage.backend import WritableBackend
from forebay.storage.background.commit import Committers
from forebay.storage.background.definitions import DefinitionsWorker
from forebay.storage.consumer_metadata import ConsumerMetadata
from forebay.storage.cursors import Cursors
from forebay.storage.lifetime import Lifetime
from forebay.storage.recovery import Progress, Recovered
from forebay.storage.shards import TopicShards, current, opened
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.topics import Engine, ShardRef, TopicSpec, refs_of
from forebay.workers import Background


class FollowedShards:
    """The `Shards` of a log that is opened read-only: none of them is ever owned here."""

    def __init__(self, engine: FollowingEngine, definitions: Definitions, lifetime: Lifetime) -> None:
        self._engine = engine
        self._definitions = definitions
        self._lifetime = lifetime
        self._owned: Registry[OwnedShard] = Registry()
        """Empty for ever."""

    def find(self, ref: ShardRef) -> OwnedShard | None:
        """See `Shards`."""
        return None

    def all(self) -> list[OwnedShard]:
        """See `Shards`."""
        return []

    def was_here(self, ref: ShardRef) -> bool:
        """See `Shards`: no directory is this process's own."""
        return False

    def own(self, ref: ShardRef) -> OwnedShard:
        """Refused."""
        self._lifetime.check()
        raise Unsupported(
            f"{ref} is opened read-only: write in the process that owns the directory, or open the log for writing"
        )

    def take_over(self, ref: ShardRef, accepted_by: str) -> OwnedShard:
        """Refused."""
        return self.own(ref)

    def ours(self, ref: ShardRef) -> OwnedShard:
        """Refused."""
        return self.own(ref)

    def read(self, ref: ShardRef) -> ReadShard:
        """See `Shards`."""
        self._lifetime.check()
        with self._engine.registry.lock(ref.spec.topic_id, ref.partition):
            return opened(self._engine.open_shard, current(ref, self._definitions, self._lifetime))

    def of_topic(self, spec: TopicSpec) -> TopicShards:
        """See `Shards`."""
        if spec.engine is Engine.MEMORY:
            raise Unsupported(f"{spec.name} lives in the memory of its owner: no other process can read it")
        if spec.engine is Engine.ROCKSDB:
            raise Unsupported(
                f"{spec.name} lives in a RocksDB database, which only the process that owns the directory can "
                'open: read it there, or keep the topic on engine "segment"'
            )
        return TopicShards(spec, self, owned=self._owned, readable=self._engine.registry, lifetime=self._lifetime)


class ReadOnlyBackend:
    """The backend of a log that is opened read-only; see `Backend`."""

    is_read_only = True

    def __init__(
        self,
        directory: LogDirectory | NoDirectory,
        settings: Settings,
        metadata: MetadataStore,
        places: Places,
        *,
        disk: Disk,
        own_disk: SystemDisk | None,
        clock: Clock,
        lifetime: Lifetime,
    ) -> None:
        """`own_disk` is the disk if it is this log's own: then it ends with the log."""
        self.metadata = metadata
        self.places = places
        self.meter = places.meter
        self._directory = directory
        self._own_disk = own_disk
        self.definitions = Definitions(metadata, settings.metadata.prefix, clock)
        self.cursors = Cursors(ProgressStore(metadata, settings.metadata.prefix, clock), settings.progress, clock)
        self.subscriptions = SubscriptionStore(metadata, settings.metadata.prefix, clock)
        self.committers = Committers(clock, settings.runtime)
        self._engine = FollowingEngine(
            directory.shards,
            settings,
            disk=disk,
            clock=clock,
            around=ShardContext(metadata, settings, places, directory.id, lambda: False),
            is_owned=lambda: isinstance(directory, LogDirectory) and is_owned(directory.path, disk),
            is_known=lambda ref: self.definitions.is_current(ref.spec),
        )
        self.shards = FollowedShards(self._engine, self.definitions, lifetime)
        self.alterations = Alterations(self.definitions, self.shards, self.subscriptions, clock, self._follow_changes)
        self.following = DefinitionsWorker(
            self.definitions,
            self.alterations,
            clock=clock,
            on_changes=lambda changes: None,
            on_deleted=self._leave_deleted,
        )
        self.background = Background()
        self.background.add(*self.committers.workers, self.following.worker, self.cursors.worker)

    @classmethod
    def open(
        cls,
        path: str | PurePath | None,
        settings: Settings,
        *,
        disk: Disk,
        own_disk: SystemDisk | None,
        clock: Clock,
        lifetime: Lifetime,
        undo: ExitStack,
    ) -> ReadOnlyBackend:
        """Look at the data directory `path`; with `None` at what is shared. Changes nothing.

        `undo` ends everything again, if the caller is interrupted or fails.
        """
        directory = NoDirectory() if path is None else LogDirectory.look(path, disk)
        metadata = _consumer_metadata(directory, settings, disk, clock)
        undo.callback(metadata.close)
        places = open_places(directory, settings, disk, clock, LogMeter(clock, settings.metrics.topics))
        undo.callback(places.close)
        return cls(
            directory,
            settings,
            metadata,
            places,
            disk=disk,
            own_disk=own_disk,
            clock=clock,
            lifetime=lifetime,
        )

    def free_bytes(self) -> dict[str, int]:
        """See `Backend`: it writes to none."""
        return {}

    @property
    def path(self) -> str | None:
        """See `Backend`."""
        return self._directory.path if isinstance(self._directory, LogDirectory) else None

    @property
    def directory_id(self) -> str | None:
        """See `Backend`."""
        return self._directory.id if isinstance(self._directory, LogDirectory) else None

    def writable(self) -> WritableBackend:
        """Refused."""
        raise Unsupported("this log is opened read-only: call this in the process that owns the directory")

    def recover(self, on_progress: Progress) -> Recovered:
        """Nothing: the owner recovers its shards."""
        return Recovered(opened=0, failed=())

    def close(self) -> None:
        """See `Backend`."""
        with ExitStack() as last_first:
            last_first.callback(self.metadata.close)
            last_first.callback(self.places.close)
            last_first.callback(self._engine.close)
            last_first.callback(self.cursors.end)
            last_first.callback(self.following.end)
            last_first.callback(self.background.stop)
        if self._own_disk is not None:
            # Only here: what a closing that failed has left to do needs it still.
            self._own_disk.close()

    def _follow_changes(self, spec: TopicSpec) -> None:
        """A handle goes by this definition now: follow what the owner alters."""
        self.following.worker.start()

    def _leave_deleted(self, spec: TopicSpec) -> bool:
        """Drop what is kept of a topic that was deleted; false while a thread opens one of its shards."""
        if not all(self._engine.leave(ref) for ref in refs_of(spec)):
            return False
        self.alterations.forget(spec)
        self.cursors.forget_topic(spec)
        return True


def _consumer_metadata(
    directory: LogDirectory | NoDirectory, settings: Settings, disk: Disk, clock: Clock
) -> ConsumerMetadata:
    path = directory.metadata_at(settings.metadata.path)
    reading = open_metadata(settings.metadata, path, disk=disk, clock=clock, read_only=True)

    def writable() -> MetadataStore:
        if settings.metadata.is_served:
            return reading
        return open_metadata(settings.metadata, path, disk=disk, clock=clock)

    return ConsumerMetadata(reading, settings.metadata.prefix, writable)
