"""The one door for tests into an open log: its shards, its stores and its background workers.

Only this module knows how a log is put together. A test that needs to look behind the public names, or to run a step
of the background work in its own thread, comes through `inside`: when the core is re-laid, this file changes and no
test does. Everything here is the log's own object, never a copy, and nothing is replaced behind its back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar, overload

from forebay.aio import AsyncLog, AsyncTopic
from forebay.appends.group_commit import GroupCommit
from forebay.appends.producer_window import ProducerWindow
from forebay.appends.queue import QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.appends.waiting import is_held, is_inside
from forebay.blobs.blocks import ReadAhead
from forebay.cleanup.deleted_topics import Deletions
from forebay.cleanup.objects import ObjectCleanup
from forebay.clock import Clock
from forebay.definitions import Defined, Definitions
from forebay.disk import SystemDisk
from forebay.engines import FollowingEngine, MemoryEngine, OwnedShard, ReadShard, RocksEngine, SegmentEngine
from forebay.engines.memory import MemoryShard
from forebay.engines.readonly import FollowedShard
from forebay.engines.rocksdb.database import RocksDatabase
from forebay.engines.rocksdb.removal import Making
from forebay.engines.rocksdb.shard import RocksShard
from forebay.lifecycle import closed
from forebay.loads.attach import Attaching
from forebay.loads.prepare import Load
from forebay.loads.service import Loads
from forebay.metadata import MetadataStore, Session, Watch
from forebay.metadata.etcd.gateway import Gateway
from forebay.metadata.etcd.leases import Leases
from forebay.metadata.etcd.store import EtcdMetadata
from forebay.metadata.etcd.watch import EtcdWatch
from forebay.metadata.sqlite.database import Database as SqliteDatabase
from forebay.metadata.sqlite.store import SqliteMetadata
from forebay.places import Places
from forebay.progress import ProgressStore
from forebay.service.service import Service
from forebay.shard import SegmentShard, ShardContext
from forebay.shard.eviction import ByteCount
from forebay.shard.history import ShardHistory
from forebay.shard.tiers import RecordedHistory, Tiers
from forebay.storage import Storage, Topic, owner
from forebay.storage.append import Single
from forebay.storage.background.cleanup import CleanupWorker
from forebay.storage.background.history import HistoryWorker
from forebay.storage.background.limits import LimitsWorker
from forebay.storage.background.seal import SealWorker
from forebay.storage.background.sync import SyncWorker
from forebay.storage.in_memory import InMemoryBackend
from forebay.storage.owner import OwnerBackend
from forebay.storage.read_only import ReadOnlyBackend
from forebay.testing.simulated.metadata import FaultyWatch
from forebay.wal.bounds import MemoryBounds
from forebay.wal.files import SealedFile
from forebay.wal.log import Wal
from forebay.wal.readonly import FollowedLog
from forebay.wal.upkeep import AT_ONCE

T = TypeVar("T")

LOOK_SECONDS = 0.005
"""So often a thread looks whether what it waits for is so."""
W = TypeVar("W", bound=SyncWorker | SealWorker | HistoryWorker | LimitsWorker | CleanupWorker)


@overload
def inside(opened: Storage | AsyncLog | Service) -> InsideLog: ...
@overload
def inside(opened: Topic | AsyncTopic) -> InsideTopic: ...
@overload
def inside(opened: Loads) -> InsideLoads: ...
@overload
def inside(opened: FollowedShard) -> InsideFollowed: ...
@overload
def inside(opened: RocksEngine) -> InsideRocks: ...
@overload
def inside(opened: RocksShard) -> InsideRocksShard: ...
@overload
def inside(opened: SegmentEngine) -> InsideEngine: ...
@overload
def inside(opened: SegmentShard) -> InsideSegment: ...
@overload
def inside(opened: EtcdMetadata) -> InsideEtcd: ...
@overload
def inside(opened: SqliteMetadata) -> InsideSqlite: ...
@overload
def inside(opened: ReadAhead) -> InsideReadAhead: ...
def inside(opened: object) -> object:
    """Look behind the public names of an open log, or of one of its parts."""
    if isinstance(opened, Service):
        opened = opened._log
    if isinstance(opened, AsyncTopic):
        opened = opened._topic
    elif isinstance(opened, AsyncLog):
        opened = opened._log
    return next(door(opened) for kind, door in _DOORS if isinstance(opened, kind))


@contextmanager
def metadata_instead(store: MetadataStore) -> Iterator[None]:
    """Have owners that are opened meanwhile go by this metadata store, whatever their settings name."""
    whole = owner._open_metadata
    owner._open_metadata = lambda *_: store
    try:
        yield
    finally:
        owner._open_metadata = whole


class InsideTopic:
    """The shards of one topic. Asking for one opens it, as an append would."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic

    def shard(self, partition: int = 0) -> OwnedShard:
        """The shard of a partition, on whichever engine it is."""
        return self.topic._shards.own(partition)

    def read_shard(self, partition: int = 0) -> ReadShard:
        """The shard of a partition as a reader gets it: nothing is acquired that another directory holds."""
        return self.topic._shards.read(partition)

    def segment(self, partition: int = 0) -> SegmentShard:
        """The shard of a partition of a topic on engine `segment`."""
        shard = self.shard(partition)
        assert isinstance(shard, SegmentShard), f"{shard.ref} is on engine {shard.ref.spec.engine}"
        return shard

    def wal(self, partition: int = 0) -> Wal:
        """The write-ahead log of a partition."""
        return self.segment(partition).wal

    def history(self, partition: int = 0) -> ShardHistory:
        """What exports the log of a partition and removes local copies."""
        return self.segment(partition).history

    def locks(self, partition: int = 0) -> dict[str, Callable[[], bool]]:
        """Every lock of a shard on engine `segment`, by name: whether any thread holds it."""
        shard = self.segment(partition)
        return {
            "committing": lambda: is_held(shard.wal.committing),
            "queue": lambda: is_held(shard.wal.queue.lock),
            "limits": shard._eviction._passing.locked,
            "caps": lambda: is_held(shard._eviction._count.lock),
            "changing": lambda: is_held(shard.deletes._changing),
            "working": shard.history._working.locked,
        }

    @contextmanager
    def held_memory(self, partition: int = 0) -> Iterator[None]:
        """Hold the lock of a shard in memory, as an append does that waits for metadata."""
        shard = self.shard(partition)
        assert isinstance(shard, MemoryShard), f"{shard.ref} is not in memory"
        with shard._lock:
            yield

    def leave_queued(self) -> None:
        """Commit nothing in the background that this handle queues, as if that thread had not come to it yet."""
        self.topic.appender._commit_soon = lambda _: None

    def queue(self, value: bytes, ticket: Ticket, partition: int = 0) -> None:
        """Queue a record as an append that waits does, without waiting; its outcome is the ticket's."""
        entry = QueuedRecord(*self.topic.appender.row(value, None, None, None, None), None, ticket)
        self.topic.appender._queued(Single(partition, entry, len(value)))

    def group(self, partition: int = 0) -> GroupCommit:
        """What commits the appends that wait for a partition on disk together."""
        shard = self.shard(partition)
        return shard._group if isinstance(shard, RocksShard) else self.wal(partition).group

    def commit_alone(self, partition: int = 0) -> None:
        """Commit what is queued and call back nothing, as a thread that is interrupted in between."""
        self.group(partition)._commit()

    def drop_copies(self, partition: int = 0) -> int:
        """Remove local files that history has, as local retention does, however young they are; how many."""
        history = self.history(partition)
        sealed = [file for file in history._wal.files.all[:-1] if isinstance(file, SealedFile)]
        pieces, store = history.catalog.descriptors(), history._store
        if store is None:
            return history._drop_while(sealed, lambda file: history._is_compacted(file, pieces))
        return history._drop_while(sealed, lambda file: history._has_copy(store, file, pieces))

    def drop_sealed(self, partition: int = 0) -> int:
        """Remove every local sealed file, whether or not history has it; how many."""
        history = self.history(partition)
        sealed = [file for file in history._wal.files.all[:-1] if isinstance(file, SealedFile)]
        return history._drop_while(sealed, lambda file: True)

    def look_at_free_space(self, partition: int = 0) -> None:
        """Have the next commit ask the disk how much room is left, however short ago that was asked."""
        self.wal(partition)._space.due = float("-inf")


class InsideLog:
    """The parts of an open log that a test may look at, and its background workers."""

    def __init__(self, log: Storage) -> None:
        self.log = log

    @property
    def metadata(self) -> MetadataStore:
        """The metadata store that the log has open."""
        return self.log._backend.metadata

    @property
    def definitions(self) -> Definitions:
        """What the metadata store says of topics."""
        return self.log._backend.definitions

    @property
    def progress(self) -> ProgressStore:
        """The stored cursors of readers and groups."""
        return self.log._backend.cursors._store

    @property
    def places(self) -> Places:
        """Where history lies: the store, the files of loads, this directory."""
        backend = self.log._backend
        if isinstance(backend, ReadOnlyBackend):
            return backend.places
        return _owner(self.log).opened.places

    @property
    def disk(self) -> SystemDisk:
        """The disk that the log has made for itself."""
        disk = _owner(self.log).opened.own_disk
        assert disk is not None, "this log was given its disk"
        return disk

    @property
    def bounds(self) -> MemoryBounds:
        """What the caches and the append queues of all shards may hold together, and what they hold."""
        return self.engine.bounds

    @property
    def cleanup(self) -> ObjectCleanup:
        """What removes objects that nothing needs any more."""
        return _owner(self.log).objects

    def collect(self, topic: Topic, partition: int = 0) -> list[str]:
        """Collect the objects of an open shard, as the worker does now and then; the keys of what was removed."""
        return self.cleanup.collect_owned(inside(topic).segment(partition))

    def collect_directory(self) -> None:
        """Collect what loads and shards that are not open here have left, as the worker does now and then."""
        _owner(self.log).cleanup.collect_directory()

    @property
    def engine(self) -> SegmentEngine:
        """The segment engine of a log that this process owns."""
        return _owner(self.log).engines.segment

    @property
    def rocksdb(self) -> RocksEngine:
        """The RocksDB engine of a log that this process owns."""
        return _owner(self.log).engines.rocksdb

    @property
    def memory(self) -> MemoryEngine:
        """The engine of topics in memory."""
        backend = self.log._backend
        return backend._engine if isinstance(backend, InMemoryBackend) else _owner(self.log).engines.memory

    @property
    def workers(self) -> InsideWorkers:
        """What works in the background, by name."""
        return InsideWorkers(self.log)

    @property
    def is_ended(self) -> bool:
        """Whether the log is closed, or a thread has begun to close it."""
        return self.log._lifetime.is_over

    @property
    def descriptors_max(self) -> int:
        """How many files the log's own disk keeps open."""
        return self.disk._descriptors.limit

    @property
    def changes(self) -> Watch | None:
        """The watch on the definitions of topics, once the log follows them."""
        return self.log._backend.following._watch

    def follow_changes(self) -> None:
        """Go by what other processes have altered, after a thread that does that now."""
        self.log._backend.following.step(60)

    def follow_all_changes(self) -> None:
        """As `follow_changes`, also by what the watch of a real store has not brought yet: looks at all definitions."""
        self.log._backend.following.end()
        self.follow_changes()

    def is_following_here(self) -> bool:
        """Whether the calling thread keeps others from following changes meanwhile."""
        return is_inside(self.log._backend.following._following)()

    def adopt(self, defined: Defined) -> None:
        """Go by this definition of a topic, as by one that was just looked up."""
        self.log._backend.alterations.adopt(defined)

    def shards(self) -> list[OwnedShard]:
        """Every shard that is open now."""
        return self.log._backend.shards.all()

    @property
    def session_id(self) -> str:
        """The session that this process owns its shards by."""
        return _owner(self.log).opened.owner_session.session.id

    def lose_session(self) -> None:
        """End the session that this process owns its shards by, as if its lease had run out."""
        _owner(self.log).opened.owner_session.session.close()

    def entries(self) -> dict[str, int]:
        """How many topics or shards each part of the log remembers."""
        used = [topic for of_name in self.log._backend.alterations._used.values() for topic in of_name.values()]
        return {
            "open shards": len(self.log._backend.shards.all()),
            "handles": len(used),
            "newest definitions": sum(topic.newest is not None for topic in used),
            "given up": len(self.engine._given_up) if isinstance(self.log._backend, OwnerBackend) else 0,
        }

    def followed(self) -> int:
        """How many shards a log that is opened read-only has open."""
        return len(self._following.shards())

    def shard_lock(self, topic: Topic, partition: int = 0) -> threading.RLock:
        """What a thread holds that opens a shard of a log that is opened read-only."""
        return self._following.registry.lock(topic.spec.topic_id, partition)

    @property
    def _following(self) -> FollowingEngine:
        backend = self.log._backend
        assert isinstance(backend, ReadOnlyBackend), "only these follow what another process owns"
        return backend._engine

    @contextmanager
    def changes_held_back(self) -> Iterator[None]:
        """Meanwhile the log sees nothing of what other processes do to definitions, and does not know that."""
        following, is_stale = self.log._backend.following, True
        following.step(60)
        with following._following:
            assert following._watch is not None
            following._watch = FaultyWatch(following._watch, is_stale=lambda: is_stale)
        try:
            yield
        finally:
            is_stale = False

    def has_left(self, topic: Topic) -> bool:
        """Whether the open shards of a topic acknowledge nothing any more, as another process has deleted it."""
        found = [shard for shard in self.shards() if shard.ref.spec.topic_id == topic.spec.topic_id]
        return all(shard.wal.has_left if isinstance(shard, SegmentShard) else shard._left for shard in found)  # type: ignore[attr-defined]

    def kill(self) -> None:
        """End the log as the end of its process does: nothing more is written, and its locks and sessions are free.

        No other thread uses the log. Not for one that has opened its RocksDB, which belongs to the process.
        """
        self.log._lifetime.end()
        self.workers.stop()
        self.metadata.abandon()
        self.disk.abandon()
        closed(self.log)

    def lose_changes(self) -> None:
        """End the watch on definitions, as a metadata store that went away does."""
        self.log._backend.following._end_watch()

    def clear_moved(self) -> None:
        """Do now what is due now and then for shards that moved, and all else that is due."""
        _owner(self.log).cleanup.look_for_moved()
        self.workers.history.step()
        self.workers.cleanup.step()
        # Waits where the worker itself has just begun with a shard.
        _owner(self.log).clear_moved()

    def end_deleted(self) -> None:
        """Stop and close what is open of topics that other processes have deleted, as a worker does."""
        self.follow_changes()
        _owner(self.log)._ending.step()
        self.follow_changes()

    def flush_cursors(self) -> None:
        """Write the commits that are kept for later, as the flusher does."""
        self.log._backend.cursors.flush()

    @property
    def loads(self) -> Loads:
        """The bulk loads that concern the directory; its `step` is what the worker does."""
        return _owner(self.log).loads

    @property
    def deletions(self) -> Deletions:
        """What finishes the deletions of topics."""
        return self.log._backend.writable().deletions

    def remove_late_objects(self) -> None:
        """Remove what was left of deleted topics and is past its grace."""
        self.deletions.sweep_late()

    def sweep_handoff(self) -> None:
        """Remove what unfinished seals have left where topics are handed over."""
        _owner(self.log).cleanup._sweep_handoff()


class InsideLoads:
    """The bulk loads of a log, partition by partition."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads

    def of(self, shard: SegmentShard) -> Attaching:
        """What attaches loads to this shard."""
        return self._loads._attaching(shard)

    def attach_to(self, load_id: str, load: Load, shards: list[SegmentShard]) -> None:
        """Attach a load to these shards, and neither commit it nor give it up."""
        self._loads._attach(load_id, load, shards)


class InsideFollowed:
    """A shard that is read beside its owner."""

    def __init__(self, shard: FollowedShard) -> None:
        self._shard = shard

    @property
    def past(self) -> RecordedHistory:
        """What the metadata store has recorded of the shard, as its latest reader saw it."""
        return self._shard._latest.past

    @property
    def log(self) -> FollowedLog:
        """The files of the log, as its latest reader saw them."""
        return self._shard._latest.log

    @property
    def views(self) -> int:
        """How many readers have a view of their own, or had one of late."""
        return len(self._shard._views)

    def forget_looks(self) -> None:
        """Have the next use look at what the owner has done, however short ago the last look was."""
        self._shard._looked_at = float("-inf")
        for view in self._shard._views:
            view.past._looked_at = float("-inf")

    def skip_next_look(self, clock: Clock) -> None:
        """Have the next use look at nothing, as right after a look."""
        self._shard._looked_at = clock.monotonic()


class InsideRocks:
    """The RocksDB engine."""

    def __init__(self, engine: RocksEngine) -> None:
        self._engine = engine

    @property
    def database(self) -> RocksDatabase:
        """The database, which must be open: its reads and writes may be watched."""
        return self._engine._database


class InsideRocksShard:
    """A shard on RocksDB."""

    def __init__(self, shard: RocksShard) -> None:
        self._shard = shard

    @property
    def window(self) -> ProducerWindow:
        """The idempotence memory."""
        return self._shard._window

    def after_next_piece(self, act: Callable[[], None]) -> None:
        """Do this once, after the next piece of a delete was written and before the one behind it."""
        removal, acts = self._shard._removal, [act]
        commit = removal._commit

        def commit_and_act(make: Making) -> None:
            commit(make)
            if acts:
                acts.pop()()

        removal._commit = commit_and_act


class InsideSegment:
    """A shard on segments."""

    def __init__(self, shard: SegmentShard) -> None:
        self._shard = shard

    @property
    def tiers(self) -> Tiers:
        """What answers reads from memory, local files and history."""
        return self._shard._tiers

    @property
    def byte_count(self) -> ByteCount:
        """The running count of the bytes that its caps look at."""
        return self._shard._eviction._count


class InsideEngine:
    """The segment engine."""

    def __init__(self, engine: SegmentEngine) -> None:
        self._engine = engine

    def context(self, session: Session) -> ShardContext:
        """What its shards are given to work with in this session."""
        return self._engine._around(session)


class InsideEtcd:
    """A metadata store in etcd."""

    def __init__(self, store: EtcdMetadata) -> None:
        self._store = store

    @property
    def gateway(self) -> Gateway:
        """What makes the requests."""
        return self._store._gateway

    @property
    def leases(self) -> Leases:
        """The sessions of this store, and what renews them."""
        return self._store._leases

    @property
    def renewing(self) -> threading.Thread | None:
        """The thread that renews sessions, once there is one."""
        return self._store._leases._thread

    def wake_renewing(self) -> None:
        """Have that thread look now for what is due."""
        self._store._leases._wake.set()

    def buffered(self, watch: Watch) -> int:
        """How many changes a watch holds that no poll has taken yet."""
        assert isinstance(watch, EtcdWatch)
        return len(watch._changes)


class InsideSqlite:
    """A metadata store in SQLite."""

    def __init__(self, store: SqliteMetadata) -> None:
        self._store = store

    @property
    def database(self) -> SqliteDatabase:
        """The connection, and what happens to it at a fork."""
        return self._store._database


class InsideReadAhead:
    """A reader that fetches blocks before they are asked for."""

    def __init__(self, reader: ReadAhead) -> None:
        self._reader = reader

    @property
    def runs(self) -> int:
        """How many sequences of blocks it holds."""
        return len(self._reader._runs)

    @property
    def blocks(self) -> int:
        """How many blocks it holds."""
        return sum(len(run.blocks) for run in self._reader._runs)

    @property
    def held_bytes(self) -> int:
        """The bytes that it holds."""
        return sum(run.bytes for run in self._reader._runs)

    @property
    def budget_used(self) -> int:
        """The bytes that all readers of its budget hold, as the budget counts them."""
        return self._reader._budget._total


class InsideWorkers:
    """The background workers of an open log, each by the name of its work."""

    def __init__(self, log: Storage) -> None:
        self._log = log

    def stop(self) -> None:
        """End the threads of all: from now on nothing happens in the background."""
        self._log._backend.background.stop()

    @property
    def sync(self) -> InsideSync:
        """Makes appends durable in the background."""
        return InsideSync(_owner(self._log).segments.sync)

    @property
    def sealing(self) -> InsideSeal:
        """Seals rotated files and heals failed logs."""
        return InsideSeal(_owner(self._log).segments.seal)

    @property
    def history(self) -> InsideHistory:
        """Exports, removes local copies, and sweeps objects that no reader needs."""
        return InsideHistory(_owner(self._log).segments.history)

    @property
    def limits(self) -> InsideLimits:
        """Ends records by caps, times to live and key compaction, after a look at what others have changed."""
        return InsideLimits(self._log)

    @property
    def cleanup(self) -> InsideWorker[CleanupWorker]:
        """Checks owners, attaches loads, and removes what shards that moved and deleted topics have left."""
        return InsideWorker(_owner(self._log).cleanup)


class InsideWorker(Generic[W]):
    """One background worker, to be stepped by hand."""

    def __init__(self, worker: W) -> None:
        self._worker = worker

    def step(self) -> None:
        """Do once, in the calling thread, what the worker's own thread does each time."""
        self._worker.step()

    def take_over(self) -> Self:
        """End the worker's own thread: from now on it does only what a test steps."""
        assert self._worker.worker.stop()
        return self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the worker's own thread from beginning a step meanwhile; the calling thread may step."""
        worker = self._worker.worker
        step = worker._step
        with worker.changed:
            worker._step = lambda: None
            worker.changed.wait_for(lambda: worker.status().running_s is None)
        try:
            yield
        finally:
            worker._step = step
            worker.wake()


class InsideLimits(InsideWorker[LimitsWorker]):
    """The worker that applies limits."""

    def __init__(self, log: Storage) -> None:
        super().__init__(log._backend.writable().limits)
        self._log = log

    def step(self) -> None:
        """As the worker's own thread does; what others have changed before this call counts."""
        inside(self._log).follow_changes()
        super().step()


class InsideSync(InsideWorker[SyncWorker]):
    """The worker of background syncs, and the shards that it looks after."""

    def watch(self, shard: SegmentShard) -> None:
        """Look after the shard, as after one that was opened."""
        self._worker.watch(shard)

    def watches(self, shard: OwnedShard) -> bool:
        """Whether it looks after this shard."""
        return self._worker._watched.get(shard.ref.id) is shard

    def forget(self, shard: OwnedShard) -> None:
        """Leave the shard alone, as one that was given up."""
        self._worker.forget(shard.ref.id)

    def ask(self, shard: SegmentShard) -> None:
        """Look at the shard in the next step, whether or not it has said that there is work."""
        self._worker._busy[shard.ref.id] = AT_ONCE

    def wake(self, shard: OwnedShard) -> None:
        """Say that the shard may have work, as its log does."""
        self._worker.wake(shard.ref.id)

    def is_asked(self, shard: OwnedShard) -> bool:
        """Whether the next step looks at the shard."""
        return shard.ref.id in self._worker._busy

    def replace_follow_up(self, follow_up: Callable[[SegmentShard], None]) -> None:
        """Do this with each shard that was looked after, instead of what the log does with it."""
        self._worker._hand_on = follow_up

    def look_at_ages(self) -> None:
        """Ask for the shards whose active file has reached its age, if it is time to look."""
        self._worker.find_old()

    def jobs(self) -> int:
        """For how many shards another thread syncs or writes, or is to."""
        return len(self._worker._handed_out)

    def sync_together(self, shards: list[SegmentShard]) -> None:
        """Sync the file system once, for all these shards."""
        self._worker.sync_together(shards)


class InsideSeal(InsideWorker[SealWorker]):
    """The worker that seals rotated files and heals failed logs."""

    def is_asked(self, shard: SegmentShard) -> bool:
        """Whether the shard waits for its turn."""
        return self._worker.is_asked(shard)


class InsideHistory(InsideWorker[HistoryWorker]):
    """The worker that exports, and the shards whose history it makes."""

    def notice(self, shard: SegmentShard) -> None:
        """Say that the shard may have something to export."""
        self._worker.notice(shard)

    def is_asked(self, shard: OwnedShard) -> bool:
        """Whether the next step exports from the shard."""
        return shard.ref.id in self._worker._behind

    def watches(self, shard: OwnedShard) -> bool:
        """Whether it makes the history of this shard."""
        return self._worker._watched.get(shard.ref.id) is shard

    def forget(self, shard: OwnedShard) -> None:
        """Leave the shard alone, as one that is given up. Waits for work on it that is under way."""
        self._worker.forget(shard.ref.id)

    def alone_with(self, shard: SegmentShard, work: Callable[[SegmentShard], T]) -> T:
        """Work on the shard as the worker does: a thread that gives it up waits."""
        return self._worker.alone_with(shard, work)

    def is_at(self, shard: OwnedShard) -> bool:
        """Whether the calling thread works on the shard, so that a thread that gives it up waits."""
        return self._worker._at_work._at.get(shard.ref.id) == threading.get_ident()


def await_workers(log: AsyncLog) -> None:
    """Return once the threads of a log for asyncio have done what they were given, also where it is not open."""
    executor = log._workers._executor
    looking = threading.Event()
    while executor._schedule.has_waiting() or any(work.keys for work in executor._schedule._works.values()):
        looking.wait(LOOK_SECONDS)


def _owner(log: Storage) -> OwnerBackend:
    assert isinstance(log._backend, OwnerBackend), "this log is in memory or read-only: it has no such part"
    return log._backend


_DOORS: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (Storage, InsideLog),
    (Topic, InsideTopic),
    (Loads, InsideLoads),
    (FollowedShard, InsideFollowed),
    (RocksEngine, InsideRocks),
    (RocksShard, InsideRocksShard),
    (SegmentEngine, InsideEngine),
    (SegmentShard, InsideSegment),
    (EtcdMetadata, InsideEtcd),
    (SqliteMetadata, InsideSqlite),
    (ReadAhead, InsideReadAhead),
)
