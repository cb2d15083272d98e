"""A data directory held open: its topics, the engines they live on, and the threads that look after them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import PurePath
from types import TracebackType
from typing import NamedTuple, Self, Unpack

from forebay.appends.callbacks import in_callback
from forebay.appends.waiting import INSIDE, is_inside
from forebay.cleanup.deleted_topics import Deletions
from forebay.clock import Clock, SystemClock
from forebay.disk import Disk, SystemDisk
from forebay.disk.forks import ForkGuard
from forebay.disk.machine import host
from forebay.engines import OwnedShard
from forebay.errors import Closed, ForebayError, Invalid, Unavailable, UnknownTopic, Unsupported
from forebay.format.metadata.descriptor import ShardState
from forebay.lifecycle import close_with_process, closed
from forebay.loads.service import Loads
from forebay.locks import Rank, RankedRLock
from forebay.progress import ProgressStore
from forebay.settings import Settings
from forebay.shard import SegmentShard, ShardContext, ShardRef, refs_of
from forebay.shard.directories import DirectoryPlace, record_directory
from forebay.shard.seal import OnFile
from forebay.storage.alter import Alterations
from forebay.storage.background.cleanup import CleanupWorker
from forebay.storage.background.limits import LimitsWorker
from forebay.storage.building import IN_MEMORY, Parts, beside_parts, memory_parts, owner_parts
from forebay.storage.copying import Copied, OnRecords, copy_records
from forebay.storage.create import Creations
from forebay.storage.cursors import Cursors, Group
from forebay.storage.definitions import Definitions
from forebay.storage.directory import LogDirectory, NoDirectory
from forebay.storage.moves import Moves
from forebay.storage.shards import Progress, Shards, TopicShards
from forebay.storage.topic import Topic
from forebay.topics import Engine, TopicChanges, TopicLimits, TopicName, TopicSpec
from forebay.workers import ItemWorker, WorkerStatus

logger = logging.getLogger(__name__)

GIVE_UP_SECONDS = 0.05
"""How soon a lost shard is given up, and how often that is tried while another worker is at it."""


class Retained(NamedTuple):
    """What one run of retention removed from a topic's partitions in this directory."""

    evicted: int
    """Records that caps and times to live ended."""
    compacted: int
    """Records that a newer one of their key superseded, where the topic has `cleanup="compact"`."""
    files: int
    """Local files whose records history has, or that hold none any more."""


class Storage:
    """Topics in one place. Opened by `forebay.open`; close it, or use it in a `with` statement."""

    def __init__(
        self, settings: Settings, parts: Parts, disk: Disk | None, *, clock: Clock, read_only: bool = False
    ) -> None:
        self.settings = settings
        self.read_only = read_only
        self._parts = parts
        self._clock = clock
        self._committer: ItemWorker[OwnedShard] = ItemWorker(
            "forebay-committer", lambda shard: shard.commit(), clock=clock
        )
        self._definitions = Definitions(parts.metadata, settings.metadata.prefix, clock)
        self._shards = Shards(parts, self._definitions, self._check_open, self._adopt_definition)
        self._closing = _Closing()
        self._giving_up = ItemWorker("forebay-giving-up", self._give_up, clock=clock, delay_s=GIVE_UP_SECONDS)
        self._ended: str | None = None
        self._guard = ForkGuard()
        self._deletions = _deletions_of(parts, settings, clock, self._drop, self._forget_topic)
        self._creations = Creations(parts, self._definitions, self._deletions, settings, clock)
        store = ProgressStore(parts.metadata, settings.metadata.prefix, clock)
        self._cursors = Cursors(store, settings.progress, clock)
        self._moves = Moves(parts, self._definitions, self._shards, settings, self._forget, self._look_for_moved)
        self._loads = _loads_of(parts, self._definitions, self._shards, settings, clock)
        self._alterations = Alterations(parts, self._definitions, self._shards, clock, self._keep)
        self._limits = LimitsWorker(
            parts,
            self._shards,
            self._definitions,
            self._alterations,
            clock=clock,
            interval_s=settings.retention.evict_interval_s,
        )
        self._background = parts.background
        self._background.add(self._committer.worker, self._giving_up.worker, self._limits.worker, self._cursors.worker)
        self._cleanup: CleanupWorker | None = None
        if parts.maintenance is not None and self._loads is not None and disk is not None:
            self._cleanup = CleanupWorker(
                parts,
                self._definitions,
                self._deletions,
                self._loads,
                settings,
                disk=disk,
                clock=clock,
                hear=self._limits.hear,
                open_shard=self._shards.ours,
                relieve=self._background.relieve,
            )
            self._background.add(self._cleanup.worker)
            parts.maintenance.hand_on = self._hand_on

    @classmethod
    def open(
        cls,
        path: str | PurePath | None,
        settings: Settings,
        *,
        read_only: bool = False,
        disk: Disk | None = None,
        clock: Clock | None = None,
    ) -> Storage:
        """Open the data directory `path` for this process alone, or `:memory:`. Made if it does not exist.

        With `read_only`, beside its owner: to read, to follow, and to keep the places of readers and groups.
        Then `path` may be `None` where metadata and history are shared: a consumer needs no directory of its own.
        """
        clock = clock or SystemClock()
        if path is None:
            _check_shared(settings, read_only=read_only)
        if path == IN_MEMORY:
            if read_only:
                raise Unsupported(f'"{IN_MEMORY}" is a log of this process alone: there is nothing to read beside it')
            storage = cls(settings, memory_parts(settings, clock), None, clock=clock)
            close_with_process(storage)
            return storage
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
                seen = NoDirectory() if path is None else LogDirectory.look(path, used)
                parts = beside_parts(seen, settings, used, clock, own)
            else:
                assert path is not None
                directory = LogDirectory.take(path, used, clock, settings.wal.dir)
                undo.callback(directory.release)
                parts = owner_parts(directory, settings, used, clock, own)
            undo.callback(parts.metadata.close)
            storage = cls(settings, parts, used, clock=clock, read_only=read_only)
            if not read_only:
                storage._begin()
            undo.pop_all()
        close_with_process(storage)
        return storage

    def _begin(self) -> None:
        """Finish what was left over, and start what runs in the background."""
        directory, metadata = self._parts.directory, self.settings.metadata
        assert directory is not None, "only a directory is opened so"
        place = DirectoryPlace(path=directory.path, host=host() if metadata.backend == "etcd" else "")
        record_directory(self._parts.metadata, metadata.prefix, directory.id, place)
        self._deletions.finish()
        if self._cleanup is not None:
            # Also if no shard is open: a bulk load that others offer may ask for one.
            self._cleanup.worker.start()

    # Topics

    def create_topic(
        self,
        name: str | TopicName,
        *,
        partitions: int = 1,
        durability: str | None = None,
        engine: str | None = None,
        compression: str = "none",
        exist_ok: bool = False,
        **limits: Unpack[TopicLimits],
    ) -> Topic:
        """Create a topic and return it; `Conflict` if it exists, unless `exist_ok`, which then returns it as it is.

        `durability` is `fsync`, `disk` (the default), `memory` or `ephemeral`; `engine` `segment` (the default),
        `rocksdb` or `memory`; `compression` `none` or `zstd[:level]`. Each partition keeps `cap_records`, `cap_bytes`
        and `ttl_ms`; at a cap it discards old records, or with `on_full="reject_new"` refuses new ones. With
        `cleanup="compact"` records older than `compact_lag_ms` end once a later one has their key. If it fails, the
        topic is not there.
        """
        self._check_writable()
        if self._parts.segment is None and durability is None and engine is None:
            durability = "ephemeral"
        spec = self._definitions.new_spec(
            TopicName.parse(name),
            partitions=partitions,
            durability=durability,
            engine=engine,
            compression=compression,
            **limits,
        )
        self._parts.check_creation(spec)
        return self._handle(self._creations.create(spec, exist_ok=exist_ok))

    def topic(self, name: str | TopicName) -> Topic:
        """A topic that exists; `UnknownTopic` if the metadata store says that it does not."""
        self._check_open()
        defined = self._definitions.look(TopicName.parse(name))
        self._alterations.adopt_changed(defined)
        return self._handle(defined.spec)

    def alter_topic(
        self, name: str | TopicName, *, allow_loss: bool = False, **changes: Unpack[TopicChanges]
    ) -> TopicSpec:
        """Change a topic while it is used; its definition on return, which every handle in this process goes by.

        What can change are the limits of `create_topic` (`None` takes one away) and `partitions`, which can only be
        added: keys then hash to other partitions, and older records stay where they are. `Conflict` if a limit would
        end records at once, unless `allow_loss`. Other processes follow within `retention.evict_interval_s`.
        """
        self._check_writable()
        return self._alterations.alter(name, changes, allow_loss=allow_loss)

    def topics(self) -> list[TopicSpec]:
        """The definitions of all topics, by name."""
        self._check_open()
        return self._definitions.all()

    def delete_topic(self, name: str | TopicName) -> None:
        """Delete a topic with all its records: from its return on the topic is unknown.

        Files that cannot be removed now are removed later, at the latest when the directory is opened next.
        """
        self._check_writable()
        spec = self._definitions.begin_deletion(TopicName.parse(name))
        # Waits for work on these shards, so for a store.
        for ref in refs_of(spec):
            self._forget(ref)
        self._deletions.finish()

    def seal_topic(
        self,
        name: str | TopicName,
        *,
        target: str | None = None,
        on_file: OnFile | None = None,
        accept_damage: bool = False,
    ) -> list[ShardState]:
        """End the topic here in order: all of it is history on return, and the next owner goes on exactly there.

        With `target`, the id of a data directory, only that one may go on. `on_file` is called before each file with
        what is left to export. If it fails, appends are taken again; what is sealed already stays so, and a repetition
        does the rest. The states of the partitions are returned.

        A damaged frame that no other copy can fill is `DataLoss`, with file, byte and offsets. With `accept_damage`
        the topic goes on without these records, and history names the ranges as damaged.
        """
        self._check_writable()
        return self._moves.seal(name, target=target, on_file=on_file, accept_damage=accept_damage)

    def unseal_topic(self, name: str | TopicName) -> None:
        """Take back a topic that was sealed here, unless another directory has it by now."""
        self._check_writable()
        self._moves.take_back(name)

    def export_topic(
        self, name: str | TopicName, on_file: OnFile | None = None, *, accept_damage: bool = False
    ) -> None:
        """On return everything appended before is history. For damage see `seal_topic`."""
        self._check_writable()
        self._moves.export(self.topic(name), on_file, accept_damage=accept_damage)

    def run_retention(self, name: str | TopicName | None = None) -> Retained:
        """Apply caps, times to live, key compaction and local retention now, to one topic or to all of this directory.

        The same runs in the background every `retention.evict_interval_s` and `retention.check_interval_s`, and the
        settings and limits decide as they do there. Partitions that another directory has are left alone. One that
        fails keeps no other from its turn; the first error is raised when all were tried.
        """
        self._check_writable()
        specs = self.topics() if name is None else [self.topic(name).spec]
        removed = Retained(0, 0, 0)
        failed: list[ForebayError] = []
        for ref in [ref for spec in specs for ref in refs_of(spec)]:
            try:
                if self._shards.find(ref) is not None or self._limits.was_here(ref):
                    one = self._retain(self._shards.ours(ref))
                    removed = Retained(*(sum(pair) for pair in zip(removed, one, strict=True)))
            except (Closed, UnknownTopic):
                # Another directory has the partition, or its topic was deleted; unless the log itself is closed.
                self._check_open()
            except ForebayError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return removed

    def _retain(self, shard: OwnedShard) -> Retained:
        ended = self._limits.apply(shard)
        files = 0
        if isinstance(shard, SegmentShard) and self._parts.archiving is not None:
            files = self._parts.archiving.alone_with(shard, lambda shard: shard.history.retain())
        return Retained(ended.evicted, ended.compacted, files)

    def copy_topic(
        self, source: str | TopicName, target: str | TopicName, *, on_records: OnRecords | None = None
    ) -> Copied:
        """Bring every record that `source` has now, with key, tag, headers and time, into `target`, which exists.

        Records get new offsets; with as many partitions each record stays in its own, else keys hash. Once each,
        whatever interrupts it: a repetition goes on, and later brings what has come since. Of a source that another
        directory holds it brings what is exported.
        """
        self._check_writable()
        bytes_max = self.settings.wal.frame_bytes_max // 2
        return copy_records(self.topic(source), self.topic(target), bytes_max=bytes_max, on_records=on_records)

    @property
    def path(self) -> str | None:
        """The absolute path of the data directory; `None` in memory."""
        return self._parts.directory.path if self._parts.directory is not None else None

    @property
    def directory_id(self) -> str | None:
        """The name by which states and moves know this data directory; `None` in memory."""
        return self._parts.directory.id if self._parts.directory is not None else None

    @property
    def loads(self) -> Loads:
        """Bulk loads into the topics here."""
        self._check_writable()
        if self._loads is None:
            raise Unsupported("this log keeps everything in memory: only topics with files take a load")
        return self._loads

    def clear_moved(self) -> None:
        """Let go of local files of shards that another directory has by now. What history lacks is set aside.

        Done in the background too, now and then.
        """
        self._check_writable()
        if self._cleanup is not None:
            self._cleanup.clear_moved()

    def group(self, name: str) -> Group:
        """The consumer group of this name; it need not exist yet."""
        self._check_open()
        return Group(name, self.topic, self._definition, self._cursors)

    def groups(self) -> list[str]:
        """The names of all groups and readers that have committed anywhere."""
        self._check_open()
        return self._cursors.names()

    def recover(self, on_progress: Progress | None = None) -> None:
        """Open every shard of this directory now rather than at its first use, and apply its limits from now on.

        Shards that another directory holds, that were sealed or that were never used are left as they are.
        `on_progress` is called with 0.0 to 1.0, by bytes walked.
        """
        self._check_open()
        if self._parts.owned is not None:
            handles = [self._handle(spec) for spec in self.topics() if spec.engine is not Engine.MEMORY]
            refs = [ref for topic in handles for ref in refs_of(topic.spec)]
            self._shards.recover(refs, on_progress or (lambda done: None))

    def workers(self) -> tuple[WorkerStatus, ...]:
        """How each background worker of this log fares: its last step, and what failed last."""
        self._guard.check("this log")
        return self._background.status()

    # Ending

    def close(self) -> None:
        """Make everything durable and end in order: nothing is left to replay. Harmless when repeated.

        In the callback of an append it returns at once if another thread is closing already. In a signal handler that
        interrupted an append of this log, or its closing, it raises `Unavailable`: close when that is over. In a
        forked child it does nothing: the parent goes on.
        """
        if self._guard.is_forked:
            return
        self._closing.run(self._close, self._shards.all(), self._committer)

    def _close(self) -> None:
        # Set first and not looked at here: a closing that was interrupted is finished by the next call.
        self._ended = self._ended or "is closed"
        parts = self._parts
        with ExitStack() as last_first:
            last_first.callback(closed, self)
            for part in (
                parts.directory,
                parts.metadata,
                parts.places,
                parts.unowned,
                parts.memory,
                parts.rocksdb,
                parts.segment,
            ):
                if part is not None:
                    last_first.callback(part.release if isinstance(part, LogDirectory) else part.close)
            last_first.callback(self._cursors.end)
            last_first.callback(self._limits.end)
            last_first.callback(self._background.stop)
        if parts.disk is not None:
            # Only here: what a closing that failed has left to do needs it still.
            parts.disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # How

    def _definition(self, name: str | TopicName) -> TopicSpec:
        """The definition of a topic, also of one whose records this process cannot read."""
        self._check_open()
        return self._definitions.get(TopicName.parse(name))

    def _handle(self, spec: TopicSpec) -> Topic:
        topic = Topic(
            spec,
            self.settings.wal,
            clock=self._clock,
            shards=TopicShards(spec, self._shards, self._parts.engine_of(spec), self._guard),
            commit_soon=self._committer.ask,
            cursors=self._cursors,
        )
        self._alterations.note(topic)
        return topic

    def _keep(self, spec: TopicSpec) -> None:
        """See to it that limits are applied, and changes by others heard of, where nothing else does that."""
        heard = self._parts.owned is not None and spec.engine is Engine.SEGMENT
        if spec.ends_records or not (heard or self._parts.segment is None):
            self._limits.worker.start()

    def _forget(self, ref: ShardRef) -> None:
        """Stop all work on a shard in the background and wait for it, before the shard is given up or removed.

        Called by a thread that holds no lock: an export may wait for the store.
        """
        self._shards.leave_unowned(ref)
        self._limits.forget(ref)
        # In this order: each asks only the next ones for work on the shard.
        for worker in (self._parts.maintenance, self._parts.sealing, self._parts.archiving):
            if worker is not None:
                worker.forget(ref.id)

    def _drop(self, ref: ShardRef) -> bool:
        """As `_forget`, without waiting: false if work on the shard is under way."""
        self._shards.leave_unowned(ref)
        return self._is_dropped(ref)

    def _is_dropped(self, ref: ShardRef) -> bool:
        """Have no more work on a shard begin in the background; whether none is under way."""
        workers = (self._parts.maintenance, self._parts.sealing, self._parts.archiving)
        idle = [worker.drop(ref.id) for worker in workers if worker is not None]
        return self._limits.drop(ref) and all(idle)

    def _forget_topic(self, spec: TopicSpec) -> None:
        """A topic was deleted: nothing that is kept by its id or name stays."""
        self._alterations.forget(spec.topic_id)
        self._cursors.forget_topic(spec)
        if self._parts.unowned is not None:
            for ref in refs_of(spec):
                self._parts.unowned.forget(ref)

    def _adopt_definition(self, shard: OwnedShard) -> None:
        """Bring a shard that was just opened to the topic's present definition. Its lock is held."""
        self._alterations.settle(shard)

    def _hand_on(self, shard: SegmentShard) -> None:
        """Ask other workers for what a shard needs that was looked after. By the sync worker, so it never waits."""
        parts = self._parts
        assert parts.archiving is not None and parts.reserving is not None
        assert parts.sealing is not None and parts.maintenance is not None
        if shard.wal.fenced is not None:
            logger.warning("%s: this process has lost the shard: %s", shard.ref, shard.wal.fenced)
            parts.maintenance.drop(shard.ref.id)
            self._giving_up.ask(shard)
            return
        if shard.upkeep.is_commit_due:
            self._committer.ask(shard)
        if shard.upkeep.needs_mending:
            parts.sealing.ask(shard)
        parts.archiving.notice(shard)
        if shard.wal.writer.wants_reservation:
            parts.reserving.ask(shard)

    def _give_up(self, shard: SegmentShard) -> None:
        """Close a shard that another owner has, by a worker of its own; one that is worked on is tried again later.

        So a store that does not answer an export of this shard delays no sync, and no other shard's giving up.
        """
        parts = self._parts
        assert parts.owned is not None
        if parts.owned.find(shard.ref) is not shard:
            return
        if not self._is_dropped(shard.ref):
            self._giving_up.ask(shard)
            return
        if parts.unowned is not None:
            parts.unowned.lose(shard.ref)
        self._forget(shard.ref)
        parts.owned.retire(shard.ref)
        self._look_for_moved()

    def _look_for_moved(self) -> None:
        """Local files may be those of a shard that another directory has now: the clean-up looks soon."""
        if self._cleanup is not None:
            self._cleanup.look_for_moved()

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise Unsupported("this log is opened read-only: call this in the process that owns the directory")

    def _check_open(self) -> None:
        self._guard.check("this log")
        if self._ended is not None:
            raise Closed(f"this log {self._ended}")


def _loads_of(parts: Parts, definitions: Definitions, shards: Shards, settings: Settings, clock: Clock) -> Loads | None:
    """The bulk loads of a data directory that this process owns."""
    if parts.owned is None or parts.places is None or parts.owner_session is None or parts.archiving is None:
        return None
    context = ShardContext(parts.metadata, settings, parts.places, parts.owner_session.holder, lambda: False)
    return Loads(
        context,
        clock,
        topic=definitions.get,
        shards=parts.owned.shards,
        own=shards.own,
        alone_with=parts.archiving.alone_with,
    )


def _deletions_of(
    parts: Parts,
    settings: Settings,
    clock: Clock,
    drop: Callable[[ShardRef], bool],
    forget_topic: Callable[[TopicSpec], None],
) -> Deletions:
    return Deletions(
        parts.metadata,
        settings,
        clock,
        holder=parts.owner_session.holder if parts.owner_session is not None else None,
        objects=parts.cleanup,
        drop=drop,
        delete_shard=lambda ref: parts.engine_of(ref.spec).delete_shard(ref),
        forget_topic=forget_topic,
    )


class _Closing:
    """One thread closes at a time, and never one that is in the middle of an append."""

    def __init__(self) -> None:
        self._lock = RankedRLock(Rank.LOG, "storage.closing")

    def run(self, close: Callable[[], None], shards: Iterable[OwnedShard], committer: ItemWorker[OwnedShard]) -> None:
        """Close, after any other thread that closes.

        In a callback only if no other thread closes: it may be waiting for the callback to return. `Unavailable`
        inside an append or a closing of this thread, which a signal handler has interrupted.
        """
        logs = [shard.wal for shard in shards if isinstance(shard, SegmentShard)]
        in_append = any(is_inside(lock)() for log in logs for lock in (log.committing, log.queue.lock))
        if in_append or committer.worker.is_inside():
            raise Unavailable(INSIDE)
        closes_here = is_inside(self._lock)()
        if in_callback():
            if not closes_here and self._lock.acquire(blocking=False):
                try:
                    close()
                finally:
                    self._lock.release()
            return
        if closes_here:
            raise Unavailable(INSIDE)
        with self._lock:
            close()


def _check_shared(settings: Settings, *, read_only: bool) -> None:
    """`Invalid` unless a process without a data directory can read topics by these settings."""
    if not read_only:
        raise Invalid("path is None, and a log that is written needs a data directory: name one, or say read_only=True")
    if not settings.is_shared:
        raise Invalid(
            f'path is None, and storage.mode "{settings.storage.mode}" keeps history in data directories: name one'
        )
    if settings.metadata.backend == "sqlite" and settings.metadata.path is None:
        raise Invalid("path is None, and so is metadata.path: name the shared metadata file, or a data directory")
