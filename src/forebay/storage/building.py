"""What a log is made of, put together for each way of opening one: in memory, as owner, or beside the owner."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field

from forebay.blobs import BlobStore, Denied, DirectoryStore, open_store
from forebay.catalog.shard import names_store
from forebay.cleanup.objects import ObjectCleanup
from forebay.clock import Clock
from forebay.disk import Disk, SystemDisk
from forebay.engines import FollowingEngine, MemoryEngine, RocksEngine, SegmentEngine, UnownedShards
from forebay.engines.rocksdb.database import check_installed
from forebay.errors import Unavailable, Unsupported
from forebay.metadata import MemoryMetadata, MetadataStore
from forebay.metadata.open_store import open_metadata
from forebay.settings import Settings
from forebay.shard import SegmentShard, ShardContext
from forebay.shard.context import Places
from forebay.shard.ownership import OwnerSession
from forebay.storage.background.history import HistoryWorker
from forebay.storage.background.seal import SealWorker
from forebay.storage.background.sync import SyncWorker
from forebay.storage.consumer_metadata import ConsumerMetadata
from forebay.storage.definitions import Definitions
from forebay.storage.directory import LogDirectory, NoDirectory, is_owned, refuse_lost_metadata
from forebay.topics import Engine, TopicSpec
from forebay.workers import Background, ItemWorker

logger = logging.getLogger(__name__)

IN_MEMORY = ":memory:"
ROCKSDB = "rocksdb"
"""The directory of the database, in the data directory; made when a topic first needs it."""
PROBE_SECONDS_MAX = 5.0
"""How long opening waits for each answer of the store of history. Before the first export it is tried with patience."""


@dataclass(kw_only=True)
class Parts:
    """Everything a log holds. What a way of opening does not need is `None`."""

    metadata: MetadataStore
    memory: MemoryEngine
    segment: SegmentEngine | FollowingEngine | None = None
    rocksdb: RocksEngine | None = None
    unowned: UnownedShards | None = None
    """Shards that are looked at and not owned here; `None` where nothing else than this process can own one."""
    owner_session: OwnerSession | None = None
    maintenance: SyncWorker | None = None
    sealing: SealWorker | None = None
    archiving: HistoryWorker | None = None
    reserving: ItemWorker[SegmentShard] | None = None
    background: Background = field(default_factory=Background)
    """All workers of the log, whatever they serve."""
    places: Places | None = None
    cleanup: ObjectCleanup | None = None
    directory: LogDirectory | None = None
    disk: SystemDisk | None = None
    """The disk, if it is this log's own: then it ends with the log."""

    @property
    def owned(self) -> SegmentEngine | None:
        """The segment engine, where this process may write."""
        return self.segment if isinstance(self.segment, SegmentEngine) else None

    def engine_of(self, spec: TopicSpec) -> MemoryEngine | RocksEngine | SegmentEngine | FollowingEngine:
        """Where the records of the topic are; `Unsupported` if this process cannot come by them."""
        beside = isinstance(self.segment, FollowingEngine)
        if spec.engine is Engine.MEMORY:
            if beside:
                raise Unsupported(f"{spec.name} lives in the memory of its owner: no other process can read it")
            return self.memory
        if spec.engine is Engine.ROCKSDB:
            if self.rocksdb is None:
                raise Unsupported(
                    f"{spec.name} lives in a RocksDB database, which only the process that owns the directory can "
                    'open: read it there, or keep the topic on engine "segment"'
                )
            return self.rocksdb
        assert self.segment is not None
        return self.segment

    def check_creation(self, spec: TopicSpec) -> None:
        """`Unsupported` if such a topic cannot live here."""
        if self.segment is None and spec.engine is not Engine.MEMORY:
            raise Unsupported(f'this log keeps everything in memory: create {spec.name} with durability "ephemeral"')
        if spec.engine is Engine.ROCKSDB:
            check_installed()


def memory_parts(settings: Settings, clock: Clock) -> Parts:
    """A log of this process alone, without files."""
    metadata = MemoryMetadata()
    owner_session = OwnerSession(metadata, settings.metadata.lease_ttl_s, IN_MEMORY)
    engine = MemoryEngine(settings, clock=clock, metadata=metadata, owner_session=owner_session)
    return Parts(metadata=metadata, memory=engine)


def beside_parts(
    directory: LogDirectory | NoDirectory, settings: Settings, disk: Disk, clock: Clock, own: SystemDisk | None
) -> Parts:
    """The directory seen beside its owner; or what is shared, seen by a process without a directory."""
    with ExitStack() as undo:
        metadata = _consumer_metadata(directory, settings, disk, clock)
        undo.callback(metadata.close)
        places = _places(directory, settings, disk, clock)
        definitions = Definitions(metadata, settings.metadata.prefix, clock)
        parts = Parts(
            metadata=metadata,
            memory=MemoryEngine(settings, clock=clock, metadata=metadata, owner_session=None),
            segment=FollowingEngine(
                directory.shards,
                settings,
                disk=disk,
                clock=clock,
                around=ShardContext(metadata, settings, places, directory.id, lambda: False),
                is_owned=lambda: isinstance(directory, LogDirectory) and is_owned(directory.path, disk),
                is_known=lambda ref: definitions.is_current(ref.spec),
            ),
            places=places,
            directory=directory if isinstance(directory, LogDirectory) else None,
            disk=own,
        )
        undo.pop_all()
    return parts


def _consumer_metadata(
    directory: LogDirectory | NoDirectory, settings: Settings, disk: Disk, clock: Clock
) -> ConsumerMetadata:
    path = directory.metadata_at(settings.metadata.path)
    reading = open_metadata(settings.metadata, path, disk=disk, clock=clock, read_only=True)

    def writable() -> MetadataStore:
        if settings.metadata.backend == "etcd":
            return reading
        return open_metadata(settings.metadata, path, disk=disk, clock=clock)

    return ConsumerMetadata(reading, settings.metadata.prefix, writable)


def owner_parts(directory: LogDirectory, settings: Settings, disk: Disk, clock: Clock, own: SystemDisk | None) -> Parts:
    """The directory held open for this process alone. Nothing runs in the background yet."""
    with ExitStack() as undo:
        metadata = _metadata(directory, settings, disk, clock)
        undo.callback(metadata.close)
        session = OwnerSession(metadata, settings.metadata.lease_ttl_s, directory.id)
        places = _places(directory, settings, disk, clock, probed_for=metadata)
        undo.callback(places.close)
        database = f"{directory.path}/{ROCKSDB}"
        cleanup = ObjectCleanup(metadata, settings, places, clock)
        archiving = HistoryWorker(clock, settings, cleanup.collect_owned)
        reserving = ItemWorker("forebay-reserving", SegmentShard.reserve_ahead, clock=clock)
        sealing = SealWorker(clock, archiving.notice)
        background = Background()
        maintenance = SyncWorker(disk, clock, directory.shards, settings.runtime, background.relieve)
        background.add(*maintenance.workers, sealing.worker, archiving.worker, reserving.worker)

        def watch(shard: SegmentShard) -> None:
            maintenance.watch(shard)
            archiving.watch(shard)

        parts = Parts(
            metadata=metadata,
            memory=MemoryEngine(settings, clock=clock, metadata=metadata, owner_session=session),
            segment=SegmentEngine(
                directory.shards,
                settings,
                disk=disk,
                clock=clock,
                metadata=metadata,
                owner_session=session,
                places=places,
                on_open=watch,
                on_dirty=maintenance.wake,
            ),
            rocksdb=RocksEngine(database, settings, disk=disk, clock=clock, metadata=metadata, owner_session=session),
            unowned=_unowned(ShardContext(metadata, settings, places, directory.id, lambda: False), disk, clock),
            owner_session=session,
            maintenance=maintenance,
            sealing=sealing,
            archiving=archiving,
            reserving=reserving,
            background=background,
            places=places,
            cleanup=cleanup,
            directory=directory,
            disk=own,
        )
        undo.pop_all()
    return parts


def _metadata(directory: LogDirectory, settings: Settings, disk: Disk, clock: Clock) -> MetadataStore:
    """The metadata store, opened by the owner; refused where a database that was here is gone."""
    path = directory.metadata_at(settings.metadata.path)
    if settings.metadata.backend == "sqlite":
        refuse_lost_metadata(directory.shards, path, disk)
    return open_metadata(settings.metadata, path, disk=disk, clock=clock)


def _unowned(around: ShardContext, disk: Disk, clock: Clock) -> UnownedShards:
    definitions = Definitions(around.metadata, around.settings.metadata.prefix, clock)
    return UnownedShards(around, disk=disk, clock=clock, is_known=lambda ref: definitions.is_current(ref.spec))


def _places(
    directory: LogDirectory | NoDirectory,
    settings: Settings,
    disk: Disk,
    clock: Clock,
    *,
    probed_for: MetadataStore | None = None,
) -> Places:
    """Where history lies; with `probed_for`, whose catalog that is, it was tried whether the store can be used."""
    store, name = history_store(settings, disk, clock)
    places = Places(
        disk=disk,
        clock=clock,
        directory=directory,
        holder=directory.id,
        store=store,
        store_name=name,
        read_ahead_bytes=settings.store.read_ahead_bytes,
        is_named=lambda: probed_for is not None and names_store(probed_for, name, prefix=settings.metadata.prefix),
    )
    if probed_for is not None:
        try:
            places.probe(seconds_max=PROBE_SECONDS_MAX)
        except Unavailable as error:
            if isinstance(error, Denied):
                places.close()
                raise
            logger.warning("history is not exported for now, appends go on: %s", error)
        except BaseException:
            places.close()
            raise
    return places


def history_store(settings: Settings, disk: Disk, clock: Clock) -> tuple[BlobStore | None, str]:
    """The store of history and what the catalog calls it. It is asked nothing, and no directory is made yet."""
    if settings.is_shared and settings.store.backend != "directory":
        return open_store(settings.store, disk=disk, clock=clock), settings.store.name
    root = settings.store.root if settings.is_shared else settings.storage.handoff_root
    return (None, "") if root is None else (DirectoryStore(root, disk=disk, clock=clock), "directory")
