"""A data directory that this process has to itself: its engines, its history, and the workers that look after them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath

from forebay.catalog import ShardCatalog, ShardKeys
from forebay.catalog.metered import MeteredMetadata
from forebay.cleanup.deleted_topics import Deletions
from forebay.cleanup.objects import ObjectCleanup
from forebay.clock import Clock
from forebay.definitions import FOLLOW_SECONDS, DefinitionChanges, Definitions
from forebay.directory import LogDirectory, refuse_lost_metadata
from forebay.disk import Disk, SystemDisk
from forebay.disk.machine import host
from forebay.engines import MemoryEngine, OwnedShard, RocksEngine, SegmentEngine, UnownedShards
from forebay.engines.directory import Engines
from forebay.engines.rocksdb.database import check_installed
from forebay.engines.rocksdb.shard import RocksShard
from forebay.errors import Corrupt, Indeterminate, Unavailable, UnknownTopic, UnsupportedFormat
from forebay.loads.service import Loads
from forebay.metadata import MetadataStore
from forebay.metadata.open_store import open_metadata
from forebay.meter import LogMeter
from forebay.places import Places, open_places
from forebay.progress import ProgressStore
from forebay.settings import Settings
from forebay.shard import SegmentShard, ShardContext
from forebay.shard.directories import DirectoryPlace, record_directory
from forebay.shard.ownership import MayOwn, OwnerSession, anywhere
from forebay.storage.alter import Alterations
from forebay.storage.background.cleanup import CleanupWorker
from forebay.storage.background.commit import Committers
from forebay.storage.background.definitions import DefinitionsWorker
from forebay.storage.background.jobs import StorageJobs
from forebay.storage.background.limits import LimitsWorker
from forebay.storage.background.reopen import ReopenWorker
from forebay.storage.background.segments import SegmentWorkers
from forebay.storage.background.sync import FileSystem
from forebay.storage.create import Creations
from forebay.storage.cursors import Cursors
from forebay.storage.erasure.answer import NothingLeft, ShardErasure
from forebay.storage.erasure.database import DatabaseErasure
from forebay.storage.erasure.segments import ErasureContext, SegmentErasure
from forebay.storage.lifetime import Lifetime
from forebay.storage.moves import Moves, refusal_of_moves
from forebay.storage.recovery import FailedShard, Progress, Recovered
from forebay.storage.shards import OwnerShards
from forebay.storage.status import watch_shard
from forebay.storage.usage import TierUsage, UsageSum, files_of, objects_of
from forebay.storage.views import TopicViews
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.topics import Engine, ShardRef, TopicSpec, refs_of
from forebay.wal.bounds import MemoryBounds
from forebay.workers import Background, ItemWorker

logger = logging.getLogger(__name__)

ROCKSDB = "rocksdb"
"""The directory of the database, in the data directory; made when a topic first needs it."""
GIVE_UP_SECONDS = 0.05
"""How soon a lost shard is given up, and how often that is tried while another worker is at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDirectory:
    """What is opened, with input and output, before an owner is put together from it."""

    directory: LogDirectory
    settings: Settings
    metadata: MetadataStore
    owner_session: OwnerSession
    places: Places
    disk: Disk
    own_disk: SystemDisk | None
    """The disk, if it is this log's own: then it ends with the log."""
    clock: Clock
    may_own: MayOwn
    """The gate that is asked before a shard is acquired."""
    meter: LogMeter

    def engines(self, on_open: Callable[[SegmentShard], None], on_dirty: Callable[[str], None]) -> Engines:
        """The engines; `on_open` is called with each segment shard that was opened, with its lock held.

        `on_dirty` gets the id of each segment shard that has work for the background.
        """
        settings, disk, clock, metadata = self.settings, self.disk, self.clock, self.metadata
        bounds = MemoryBounds.of(settings.runtime, clock)
        return Engines(
            memory=MemoryEngine(
                settings, clock=clock, metadata=metadata, owner_session=self.owner_session, may_own=self.may_own
            ),
            segment=SegmentEngine(
                self.directory.shards,
                settings,
                disk=disk,
                clock=clock,
                metadata=metadata,
                owner_session=self.owner_session,
                places=self.places,
                on_open=on_open,
                on_dirty=on_dirty,
                bounds=bounds,
            ),
            rocksdb=RocksEngine(
                f"{self.directory.path}/{ROCKSDB}",
                settings,
                disk=disk,
                clock=clock,
                metadata=metadata,
                owner_session=self.owner_session,
                queues=bounds.queues,
            ),
        )

    def record(self) -> None:
        """Have other processes find the directory by its id."""
        metadata = self.settings.metadata
        place = DirectoryPlace(path=self.directory.path, host=host() if metadata.is_served else "")
        record_directory(self.metadata, metadata.prefix, self.directory.id, place)


class OwnerBackend:
    """The backend of a log that owns its data directory; see `WritableBackend`."""

    is_read_only = False
    default_durability: str | None = None

    def __init__(self, opened: OpenDirectory, lifetime: Lifetime) -> None:
        self.opened = opened
        self.metadata = metadata = opened.metadata
        self.meter = opened.meter
        clock, settings, prefix = opened.clock, opened.settings, opened.settings.metadata.prefix
        self.definitions = definitions = Definitions(metadata, prefix, clock)
        self.cursors = Cursors(ProgressStore(metadata, prefix, clock), settings.progress, clock)
        self.subscriptions = SubscriptionStore(metadata, settings.metadata.prefix, clock)
        self.objects = ObjectCleanup(metadata, settings, opened.places, clock)
        self.background, self.jobs = Background(), StorageJobs(clock)
        self.committers = Committers(clock, settings.runtime, FileSystem(opened.disk, opened.directory.shards))
        self._ending = ItemWorker("forebay-ending", self.end_deleted, clock=clock)
        self._reopening = ReopenWorker(self._recover_lost, clock)
        self._giving_up = ItemWorker("forebay-giving-up", self._give_up, clock=clock, delay_s=GIVE_UP_SECONDS)
        self.segments = SegmentWorkers(
            opened.disk,
            clock,
            opened.directory.shards,
            settings,
            collect=self.objects.collect_owned,
            jobs=self.jobs,
            commit_soon=self.committers.ask,
            on_lost=self._giving_up.ask,
            relieve=self.background.relieve,
        )
        self.engines = opened.engines(self.segments.watch, self.segments.wake)
        context = ShardContext(metadata, settings, opened.places, opened.directory.id, lambda: False)
        self._unowned = self._unowned_shards(context)
        self.shards = OwnerShards(
            self.engines,
            self._unowned,
            definitions,
            lifetime,
            metadata,
            prefix=prefix,
            may_own=opened.may_own,
            on_opened=self._adopt_definition,
        )
        self.alterations = Alterations(definitions, self.shards, self.subscriptions, clock, self._apply_limits)
        self.following = DefinitionsWorker(
            definitions, self.alterations, clock=clock, on_changes=self._keep_limits, on_deleted=self._leave_deleted
        )
        self.limits = self._limits()
        self.loads = self._loads(context)
        self.views = self._views()
        self.deletions = self._deletions()
        self.creations = Creations(metadata, definitions, self.deletions, settings, clock, prepare=self._prepare)
        self.cleanup = self._cleanup()
        self._moves = self._segment_moves()
        self._add_workers()

    @classmethod
    def open(
        cls,
        path: str | PurePath,
        settings: Settings,
        *,
        disk: Disk,
        own_disk: SystemDisk | None,
        clock: Clock,
        lifetime: Lifetime,
        may_own: MayOwn = anywhere,
        undo: ExitStack,
    ) -> OwnerBackend:
        """Take the data directory `path` for this process alone; made if it does not exist.

        On return what an earlier process has left over is finished, as far as it can be now. `undo` ends everything
        again, if the caller is interrupted or fails.
        """
        directory = LogDirectory.take(path, disk, clock, settings.wal.dir)
        undo.callback(directory.release)
        meter = LogMeter(clock, settings.metrics.topics)
        metadata = MeteredMetadata(_open_metadata(directory, settings, disk, clock), meter)
        undo.callback(metadata.close)
        session = _owner_session(directory, settings, metadata, disk)
        places = open_places(directory, settings, disk, clock, meter, probed_for=metadata)
        undo.callback(places.close)
        opened = OpenDirectory(
            directory=directory,
            settings=settings,
            metadata=metadata,
            owner_session=session,
            places=places,
            disk=disk,
            own_disk=own_disk,
            clock=clock,
            may_own=may_own,
            meter=meter,
        )
        owner = cls(opened, lifetime)
        # Before anything runs: a thread that is left would go on without its metadata, in a directory of another owner.
        undo.callback(owner.close)
        opened.record()
        owner.deletions.finish()
        # Also if no shard is open: a bulk load that others offer may ask for one, and so may a limit.
        owner.cleanup.worker.start()
        owner.following.worker.start()
        return owner

    def _limits(self) -> LimitsWorker:
        evict_s = self.opened.settings.retention.evict_interval_s
        return LimitsWorker(
            self.shards, clock=self.opened.clock, interval_s=evict_s, follow_changes=self.following.step
        )

    def _unowned_shards(self, context: ShardContext) -> UnownedShards:
        opened, definitions = self.opened, self.definitions
        return UnownedShards(
            context, disk=opened.disk, clock=opened.clock, is_known=lambda ref: definitions.is_current(ref.spec)
        )

    def _loads(self, context: ShardContext) -> Loads:
        return Loads(
            context,
            self.opened.clock,
            topic=self.definitions.get,
            shards=self.engines.segment.shards,
            own=self.shards.own,
            alone_with=self.segments.history.alone_with,
        )

    def _views(self) -> TopicViews:
        opened = self.opened
        return TopicViews(
            self.shards,
            opened.places,
            self.metadata,
            opened.settings,
            holder=opened.directory.id,
            disk=opened.disk,
            clock=opened.clock,
        )

    def _deletions(self) -> Deletions:
        return Deletions(
            self.metadata,
            self.opened.settings,
            self.opened.clock,
            holder=self.opened.directory.id,
            objects=self.objects,
            drop=self._drop,
            delete_shard=lambda ref: self.engines.of(ref.spec).delete_shard(ref),
            forget_topic=self._forget_topic,
        )

    def _cleanup(self) -> CleanupWorker:
        return CleanupWorker(
            self.engines,
            self.objects,
            self.definitions,
            self.deletions,
            self.loads,
            self.opened.settings,
            holder=self.opened.directory.id,
            disk=self.opened.disk,
            clock=self.opened.clock,
            was_here=self.shards.was_here,
            open_shard=self.shards.ours,
            alone_with=self.segments.history.alone_with,
            relieve=self.background.relieve,
        )

    def _segment_moves(self) -> Moves:
        return Moves(
            self.engines.segment,
            self.metadata,
            self.shards,
            self.opened.settings,
            clock=self.opened.clock,
            holder=self.opened.directory.id,
            forget=self.forget,
            on_moved=self.cleanup.look_for_moved,
        )

    def _add_workers(self) -> None:
        self.background.add(
            *self.segments.workers,
            self.jobs,
            self.engines.segment.bounds.caches.worker,
            *self.committers.workers,
            self._giving_up.worker,
            self._ending.worker,
            self._reopening.worker,
            self.limits.worker,
            self.following.worker,
            self.cursors.worker,
            self.cleanup.worker,
            self.engines.rocksdb.worker,
        )

    # What it offers

    @property
    def path(self) -> str:
        """See `Backend`."""
        return self.opened.directory.path

    def free_bytes(self) -> dict[str, int]:
        """See `Backend`."""
        disk, directory = self.opened.disk, self.opened.directory
        return {"data": disk.free_bytes(directory.path), "log": disk.free_bytes(directory.shards)}

    @property
    def directory_id(self) -> str:
        """See `Backend`."""
        return self.opened.directory.id

    def writable(self) -> OwnerBackend:
        """See `Backend`."""
        return self

    def check_creation(self, spec: TopicSpec) -> None:
        """See `WritableBackend`."""
        if spec.engine is Engine.ROCKSDB:
            check_installed()

    def moves_of(self, spec: TopicSpec) -> Moves:
        """See `WritableBackend`."""
        if spec.engine is not Engine.SEGMENT:
            raise refusal_of_moves(spec)
        return self._moves

    def usage(self, specs: Sequence[TopicSpec]) -> list[TierUsage]:
        """See `WritableBackend`."""
        opened, sums = self.opened, UsageSum()
        for ref in [ref for spec in specs if spec.engine is Engine.SEGMENT for ref in refs_of(spec)]:
            name = str(ref.spec.name)
            sums.add(name, files_of(opened.disk, f"{opened.directory.shards}/{ref.id}"))
            keys = ShardKeys(ref.spec.namespace, ref.spec.topic, ref.partition, opened.settings.metadata.prefix)
            catalog = ShardCatalog(self.metadata, keys, ref.spec.topic_id, clock=opened.clock)
            try:
                sums.add(name, objects_of(catalog.stored()))
            except (Corrupt, UnsupportedFormat) as error:
                if len(specs) == 1:
                    raise
                logger.warning("%s: not all objects are counted: %s", ref, error)
        if any(spec.engine is Engine.ROCKSDB for spec in specs):
            sums.add_database(opened.disk, f"{opened.directory.path}/{ROCKSDB}")
        return sums.sums()

    def retain(self, shard: OwnedShard) -> int:
        """See `WritableBackend`."""
        if not isinstance(shard, SegmentShard):
            return 0
        return self.segments.history.alone_with(shard, lambda shard: shard.history.retain())

    def clear_moved(self) -> None:
        """See `WritableBackend`."""
        self.cleanup.clear_moved()

    def erasure_of(self, shard: OwnedShard) -> ShardErasure:
        """See `WritableBackend`."""
        opened = self.opened
        if isinstance(shard, RocksShard):
            path = f"{opened.directory.path}/{ROCKSDB}"
            return DatabaseErasure(shard.ref, self.engines.rocksdb, path, opened.disk)
        if not isinstance(shard, SegmentShard):
            return NothingLeft()
        return SegmentErasure(
            shard,
            ErasureContext(
                self.metadata,
                opened.settings,
                opened.places,
                self.objects,
                opened.directory.shards,
                opened.disk,
                opened.clock,
                self.segments.history.alone_with,
            ),
        )

    def recover(self, on_progress: Progress) -> Recovered:
        """See `Backend`."""
        # Definitions that are read while changes are followed are remembered: none is read again for its shards.
        self.following.step(FOLLOW_SECONDS)
        found = self.definitions.all_to_use()
        specs = [spec for spec in found.specs if spec.engine is not Engine.MEMORY]
        for spec in specs:
            self.alterations.follow(spec)
        refs = [ref for spec in specs for ref in refs_of(spec)]
        recovered = self.shards.recover(refs, self.opened.settings.runtime.openers, on_progress)
        undefined = [FailedShard.undefined(name, error) for name, error in found.unreadable.items()]
        for failed in undefined:
            logger.error("%s", failed)
        return replace(recovered, failed=(*recovered.failed, *undefined))

    def close(self) -> None:
        """See `Backend`."""
        opened = self.opened
        with ExitStack() as last_first:
            last_first.callback(opened.directory.release)
            last_first.callback(self.metadata.close)
            last_first.callback(opened.places.close)
            last_first.callback(self._unowned.close)
            last_first.callback(self.engines.memory.close)
            last_first.callback(self.engines.rocksdb.close)
            last_first.callback(self.engines.segment.close)
            last_first.callback(self.cursors.end)
            last_first.callback(self.following.end)
            last_first.callback(self.background.stop)
        if opened.own_disk is not None:
            # Only here: what a closing that failed has left to do needs it still.
            opened.own_disk.close()

    # Shards that are given up

    def forget(self, ref: ShardRef) -> None:
        """See `WritableBackend`."""
        self._unowned.leave(ref, None)
        self.limits.forget(ref)
        self.segments.forget(ref.id)

    def _drop(self, ref: ShardRef) -> bool:
        """As `forget`, without waiting: false if work on the shard is under way."""
        self._unowned.leave(ref, None)
        return self._is_dropped(ref)

    def _is_dropped(self, ref: ShardRef) -> bool:
        """Have no more work on a shard begin in the background; whether none is under way."""
        is_idle = self.segments.drop(ref.id)
        return self.limits.drop(ref) and is_idle

    def _give_up(self, shard: SegmentShard) -> None:
        """Close a shard that another owner has, by a worker of its own; one that is worked on is tried again later.

        So a store that does not answer an export of this shard delays no sync, and no other shard's giving up.
        """
        if shard.wal.has_left:
            self.deletions.owner_stopped(shard.ref)
        if self.engines.segment.retire_lost(shard, lambda: self._is_left(shard.ref)):
            self.cleanup.look_for_moved()
            if shard.is_session_over:
                self._reopening.ask(shard.ref)
        else:
            self._giving_up.ask(shard)

    def _recover_lost(self, refs: Sequence[ShardRef]) -> Recovered:
        """Open those of these shards that are still this directory's."""
        return self.shards.recover(refs, self.opened.settings.runtime.openers, lambda progress: None)

    def _is_left(self, ref: ShardRef) -> bool:
        """Have readers and workers leave a shard that another owner has; whether no work on it is under way.

        Called with the lock of the shard held, so that what is left is not one that was opened since.
        """
        if not self._is_dropped(ref):
            return False
        self._unowned.lose(ref)
        self._unowned.leave(ref, None)
        return True

    # What topics and shards here go by

    def _prepare(self, spec: TopicSpec) -> None:
        self.engines.of(spec).prepare(spec)

    def _adopt_definition(self, shard: OwnedShard) -> None:
        """Bring a shard that was just opened to the topic's present definition. Its lock is held."""
        self.alterations.bring_up_to_date(shard)
        if self.definitions.known(shard.ref.spec.name) is None:
            # The deletion may have been seen while nothing here used the topic: then the watch does not show it again.
            self.following.suspect(shard.ref.spec)
        watch_shard(self.meter, shard)

    def _apply_limits(self, spec: TopicSpec) -> None:
        """A handle or shard here goes by this definition now."""
        if spec.ends_records:
            self.limits.worker.start()

    def _keep_limits(self, changes: DefinitionChanges) -> None:
        """Topics have changed, whether or not they are used here."""
        for name in changes.deleted:
            self.limits.leave(name)
        for defined in changes.defined.values():
            self.limits.look_after(defined.spec)

    def _leave_deleted(self, spec: TopicSpec) -> bool:
        """Drop what is kept of a topic that was deleted elsewhere; false while one of its shards is open or opened.

        What is open of it is closed by a worker of its own. Files the cleanup removes by the notes of the deletion.
        """
        registry = self.engines.of(spec).registry
        is_open = [ref for ref in refs_of(spec) if registry.find(spec.topic_id, ref.partition) is not None]
        for ref in is_open:
            self._ending.ask(ref)
        if is_open or not all(registry.if_idle(ref, partial(self._unowned.forget, ref)) for ref in refs_of(spec)):
            return False
        self._forget_topic(spec)
        return True

    def end_deleted(self, ref: ShardRef) -> None:
        """Stop a shard whose topic another process has deleted, say so to that one, and close it.

        Runs in a thread of its own, for it waits for the thread that commits. Until the shard is closed, the worker
        that follows definitions asks for it again.
        """
        engine = self.engines.of(ref.spec)
        shard = engine.find(ref)
        if shard is None:
            return
        shard.leave(UnknownTopic(f"topic {ref.spec.name} was deleted: this handle has ended", topic=ref.spec.name))
        self.deletions.owner_stopped(ref)
        if engine.retire_deleted(ref, lambda: self._is_left(ref)):
            self.cleanup.look_for_moved()

    def _forget_topic(self, spec: TopicSpec) -> None:
        """A topic was deleted: nothing that is kept by its id or name stays."""
        self.alterations.forget(spec)
        self.cursors.forget_topic(spec)
        self.limits.leave(spec.name, spec.topic_id)
        for ref in refs_of(spec):
            self._unowned.forget(ref)
            self.engines.segment.take_back(ref)


def _owner_session(directory: LogDirectory, settings: Settings, metadata: MetadataStore, disk: Disk) -> OwnerSession:
    """The session of this process. Where a store sees no process die, the one before it here is ended first."""
    ttl_s = settings.metadata.lease_ttl_s
    if not settings.metadata.is_served:
        return OwnerSession(metadata, ttl_s, directory.id)
    _end_left_session(directory, metadata, disk)
    return OwnerSession(metadata, ttl_s, directory.id, on_session=partial(_note_session, directory, disk))


def _end_left_session(directory: LogDirectory, metadata: MetadataStore, disk: Disk) -> None:
    """End the session of the process that had this directory before: this one has its lock, so that one is gone.

    Else its shards would be refused here until the session ends by itself, within `metadata.lease_ttl_s`.
    """
    session = directory.left_session(disk)
    if session is None:
        return
    try:
        metadata.end_session(session)
    except (Unavailable, Indeterminate) as error:
        logger.warning("session %s of an earlier process here ends by itself, later: %s", session, error)


def _note_session(directory: LogDirectory, disk: Disk, session: str) -> None:
    try:
        directory.note_session(session, disk)
    except OSError as error:
        logger.warning(
            "%s: a process that follows this one waits for the end of its session: %s", directory.path, error
        )


def _open_metadata(directory: LogDirectory, settings: Settings, disk: Disk, clock: Clock) -> MetadataStore:
    """The metadata store, opened by the owner; refused where a database that was here is gone."""
    path = directory.metadata_at(settings.metadata.path)
    if settings.metadata.is_file:
        refuse_lost_metadata(directory.shards, path, disk)
    return open_metadata(settings.metadata, path, disk=disk, clock=clock)
