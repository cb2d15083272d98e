"""A data directory held open: its topics, the engines they live on, and the threads that look after them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from types import TracebackType
from typing import NamedTuple, Self, Unpack

from forebay.arguments import checked_partition
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.catalog.entries import UnreadableValue, noted_values
from forebay.clock import Clock, SystemClock
from forebay.directory import IN_MEMORY
from forebay.disk import Disk, SystemDisk
from forebay.disk.machine import user_and_host
from forebay.engines import OwnedShard
from forebay.errors import Closed, ForebayError, Invalid, UnknownTopic, Unsupported
from forebay.format.metadata.descriptor import ShardState
from forebay.lifecycle import close_with_process, closed
from forebay.loads.service import Loads
from forebay.loads.topic import TopicLoads
from forebay.metadata import MetadataStore
from forebay.meter import Metric, Sample
from forebay.partitioning import check_partition
from forebay.progress import is_reserved
from forebay.records import check_offset
from forebay.settings import Settings
from forebay.shard.directories import directory_name
from forebay.shard.ownership import MayOwn, anywhere
from forebay.shard.seal import OnFile
from forebay.storage.backend import Backend, WritableBackend
from forebay.storage.copying import Copied, OnRecords, copy_records
from forebay.storage.cursors import Group
from forebay.storage.erasure.answer import Erasure
from forebay.storage.erasure.topic import copies_of, erase
from forebay.storage.in_memory import InMemoryBackend
from forebay.storage.lags import Lags
from forebay.storage.lifetime import Closing, Lifetime
from forebay.storage.owner import OwnerBackend
from forebay.storage.read_only import ReadOnlyBackend
from forebay.storage.recorded import RecordedShard, check_held_here, check_not_arrived, recorded_shards
from forebay.storage.recovery import Progress, Recovered
from forebay.storage.segments import SegmentPage, segment_page
from forebay.storage.status import LogStatus, gauges, lag_ends, partition_statuses
from forebay.storage.subscriptions import Subscriptions
from forebay.storage.topic import Topic
from forebay.storage.usage import TierUsage
from forebay.storage.views import TopicViews
from forebay.topics import ShardRef, SubscriptionSpec, TopicChanges, TopicLimits, TopicName, TopicSpec, refs_of
from forebay.workers import WorkerStatus


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

    def __init__(self, settings: Settings, backend: Backend, *, clock: Clock, lifetime: Lifetime) -> None:
        self.settings = settings
        self._backend = backend
        self._clock = clock
        self._lifetime = lifetime
        self._closing = Closing()
        self._subscriptions = Subscriptions(
            backend.subscriptions, backend.cursors, settings, clock, self, backend.meter
        )
        self._lags = Lags(
            backend.cursors, backend.subscriptions, self, backend.meter, clock, free_bytes=backend.free_bytes
        )
        backend.background.add(self._lags.worker)

    @classmethod
    def open(
        cls,
        path: str | PurePath | None,
        settings: Settings,
        *,
        read_only: bool = False,
        may_own: MayOwn | None = None,
        disk: Disk | None = None,
        clock: Clock | None = None,
    ) -> Storage:
        """Open the data directory `path` for this process alone, or `:memory:`. Made if it does not exist.

        `may_own` is asked with a shard (`ref.spec`, `ref.partition`) before it would be acquired, in the thread that
        would acquire it: a caller's or a background worker's. What it refuses is not written here, and read as far
        as history goes. It answers at once and uses no part of this log. A shard that is open is not asked for again
        until its session ends. In memory and read-only nothing is taken from another process, and it is not asked.

        With `read_only`, beside its owner: to read, to follow, and to keep the places of readers and groups.
        Then `path` may be `None` where metadata and history are shared: a consumer needs no directory of its own.
        """
        clock = clock or SystemClock()
        _check_opening(path, settings, read_only=read_only)
        lifetime = Lifetime()
        with ExitStack() as undo:
            backend: Backend
            if path == IN_MEMORY:
                backend = InMemoryBackend.open(settings, clock=clock, lifetime=lifetime)
            elif path is None or read_only:
                used, own = _disk_of(settings, disk, undo)
                backend = ReadOnlyBackend.open(
                    path, settings, disk=used, own_disk=own, clock=clock, lifetime=lifetime, undo=undo
                )
            else:
                used, own = _disk_of(settings, disk, undo)
                gate = may_own or anywhere
                backend = OwnerBackend.open(
                    path, settings, disk=used, own_disk=own, clock=clock, lifetime=lifetime, may_own=gate, undo=undo
                )
            storage = cls(settings, backend, clock=clock, lifetime=lifetime)
            undo.callback(closed, storage)
            close_with_process(storage)
            # Last: until here an interrupt (Ctrl-C) leaves nothing open that the caller does not know of.
            undo.pop_all()
        return storage

    @property
    def read_only(self) -> bool:
        """Whether the log is opened beside its owner, to read."""
        return self._backend.is_read_only

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
        `cleanup="compact"` records older than `compact_lag_ms` end once a later one has their key. `dispatch` says how
        its subscriptions deliver: `reliable` (at least once) or `non_reliable` (at most once). With `on_owner_loss`
        `wait` (the default, but in class `memory`) a partition whose owner is gone with records that were not exported
        waits for it; with `take_over` the next write elsewhere goes on without them. If it fails, the topic is not
        there.
        """
        backend = self._writable()
        if durability is None and engine is None:
            durability = backend.default_durability
        spec = backend.definitions.new_spec(
            TopicName.parse(name),
            partitions=partitions,
            durability=durability,
            engine=engine,
            compression=compression,
            **limits,
        )
        backend.check_creation(spec)
        return self._handle(backend.creations.create(spec, exist_ok=exist_ok))

    def topic(self, name: str | TopicName) -> Topic:
        """A topic that exists; `UnknownTopic` if the metadata store says that it does not."""
        self._lifetime.check()
        defined = self._backend.definitions.find(TopicName.parse(name))
        self._backend.alterations.adopt_changed(defined)
        return self._handle(defined.spec)

    def known_topic(self, name: TopicName) -> TopicSpec | None:
        """The definition of a topic if this process remembers it and goes by changes of others; reads nothing.

        `None` says nothing about whether there is such a topic: `topic` does.
        """
        self._lifetime.check()
        return self._backend.definitions.known(name)

    def is_open(self, ref: ShardRef) -> bool:
        """Whether this process owns a shard and has it open. Takes no lock, and opens nothing."""
        self._lifetime.check()
        return self._backend.shards.find(ref) is not None

    def alter_topic(
        self, name: str | TopicName, *, allow_loss: bool = False, **changes: Unpack[TopicChanges]
    ) -> TopicSpec:
        """Change a topic while it is used; its definition on return, which every handle in this process goes by.

        What can change are the limits of `create_topic` (`None` takes one away) and `partitions`, which can only be
        added: keys then hash to other partitions, and older records stay where they are. `Conflict` if a limit would
        end records at once, unless `allow_loss`, and if `dispatch` would change while the topic has subscriptions.
        Other processes follow within a second.
        """
        backend = self._writable()
        return backend.alterations.alter(name, changes, allow_loss=allow_loss, check=backend.check_creation)

    def topics(
        self, prefix: str = "", *, after: str | TopicName | None = None, limit: int | None = None
    ) -> list[TopicSpec]:
        """The definitions of all topics, by name; or a page of them.

        Those whose whole name `namespace/topic` starts with `prefix` and comes after `after`, at most `limit`: the next
        page comes after the last name of this one.
        """
        self._lifetime.check()
        return self._backend.definitions.all(
            prefix, after=None if after is None else TopicName.parse(after), limit=limit
        )

    def delete_topic(self, name: str | TopicName) -> None:
        """Delete a topic with all its records: from its return on the topic is unknown.

        Files that cannot be removed now are removed later, in the background.
        """
        backend = self._writable()
        parsed = TopicName.parse(name)
        specs = backend.definitions.begin_deletion(parsed)
        # Waits for work on these shards, so for a store.
        for ref in [ref for spec in specs for ref in refs_of(spec)]:
            backend.forget(ref)
        backend.deletions.finish(parsed)

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
        backend = self._writable()
        spec = backend.definitions.get(TopicName.parse(name))
        return backend.moves_of(spec).seal(spec, target=target, on_file=on_file, accept_damage=accept_damage)

    def unseal_topic(self, name: str | TopicName) -> None:
        """Take back a topic that was sealed here, unless another directory has it by now."""
        backend = self._writable()
        spec = backend.definitions.get(TopicName.parse(name))
        backend.moves_of(spec).take_back(spec)

    def take_over(
        self, name: str | TopicName, partition: int = 0, *, accept_loss: bool = False, by: str | None = None
    ) -> ShardState:
        """Own a partition here whose owner is gone; its recorded state on return.

        Where the directory that had it last may hold records that history lacks, they are given up for good, which
        needs `accept_loss`: `Unavailable` without it, with the directory and the offsets. `by`, by default the user of
        this process and the machine, is recorded with the time and the offsets. `Moved` while the owner lives.
        """
        backend = self._writable()
        spec = backend.definitions.get(TopicName.parse(name))
        check_partition(checked_partition(partition), spec.partitions)
        if not accept_loss and by is not None:
            raise Invalid("by says who accepts a loss: pass accept_loss=True with it, or leave it out")
        accepted_by = (by or user_and_host()) if accept_loss else None
        return backend.moves_of(spec).take_over(ShardRef(spec, partition), accepted_by)

    def export_topic(
        self, name: str | TopicName, on_file: OnFile | None = None, *, accept_damage: bool = False
    ) -> None:
        """On return everything appended before is history. For damage see `seal_topic`."""
        backend, topic = self._writable(), self.topic(name)
        backend.moves_of(topic.spec).export(topic, on_file, accept_damage=accept_damage)

    def erase_key(self, name: str | TopicName, key: bytes, *, now: bool = False) -> Erasure:
        """Delete every record of a key in all partitions, and say where bytes of such records still lie.

        From the deletion on no reader gets them. `remains` names every file and object that holds bytes of records
        with this key that were deleted, now or before, or that may hold some; each call looks for it again.
        With `now` this process rewrites what it may, without Spark, and removes the old files and objects at once:
        a query that was planned on them fails, and is to be begun again. May be repeated after any failure.
        """
        backend, topic = self._writable(), self.topic(name)
        erased = erase(topic, key, now=now, erasure_of=backend.erasure_of)
        prefix = self.settings.metadata.prefix
        return replace(erased, copies=copies_of(topic.spec.name, key, backend.metadata, prefix, self._subscribed))

    def _subscribed(self, name: str) -> list[SubscriptionSpec]:
        """The subscriptions of a topic; none if it is not there any more."""
        try:
            return self._backend.subscriptions.of_topic(self.topic(name).spec)
        except UnknownTopic:
            return []

    def run_retention(self, name: str | TopicName | None = None) -> Retained:
        """Apply caps, times to live, key compaction and local retention now, to one topic or to all of this directory.

        The same runs in the background every `retention.evict_interval_s` and `retention.check_interval_s`, and the
        settings and limits decide as they do there. Partitions that another directory has are left alone. One that
        fails keeps no other from its turn; the first error is raised when all were tried.
        """
        backend = self._writable()
        specs = self.topics() if name is None else [self.topic(name).spec]
        removed = Retained(0, 0, 0)
        failed: list[ForebayError] = []
        for ref in [ref for spec in specs for ref in refs_of(spec)]:
            try:
                if backend.shards.find(ref) is not None or backend.shards.was_here(ref):
                    one = _retain(backend, backend.shards.ours(ref))
                    removed = Retained(*(sum(pair) for pair in zip(removed, one, strict=True)))
            except (Closed, UnknownTopic):
                # Another directory has the partition, or its topic was deleted; unless the log itself is closed.
                self._lifetime.check()
            except ForebayError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return removed

    def copy_topic(
        self, source: str | TopicName, target: str | TopicName, *, on_records: OnRecords | None = None
    ) -> Copied:
        """Bring every record that `source` has now, with key, tag, headers and time, into `target`, which exists.

        Records get new offsets; with as many partitions each record stays in its own, else keys hash. Once each,
        whatever interrupts it: a repetition goes on, and later brings what has come since. Of a source that another
        directory holds it brings what is exported.
        """
        self._writable()
        bytes_max = self.settings.wal.frame_bytes_max // 2
        return copy_records(self.topic(source), self.topic(target), bytes_max=bytes_max, on_records=on_records)

    def segments(self, name: str | TopicName, partition: int = 0, *, start: int = 0, limit: int = 1000) -> SegmentPage:
        """What a partition is stored in, from offset `start` on: log files here, if it is open, and history.

        For a server, in a thread that may wait for metadata. Acquires nothing and asks no store; each page is of its
        own moment.
        """
        spec = self.topic(name).spec
        check_offset(start)
        check_partition(checked_partition(partition), spec.partitions)
        prefix = self.settings.metadata.prefix
        keys = ShardKeys(spec.namespace, spec.topic, partition, prefix)
        catalog = ShardCatalog(self._backend.metadata, keys, spec.topic_id, clock=self._clock)
        return segment_page(self._backend.shards.find(ShardRef(spec, partition)), catalog, start, limit)

    def recorded(self, name: str | TopicName) -> list[RecordedShard]:
        """The partitions of a topic as they are recorded, whichever process owns them. Waits for the metadata store."""
        spec = self._definition(name)
        return recorded_shards(self._backend.metadata, self.settings.metadata.prefix, spec, self._clock)

    def check_held_here(self, name: str | TopicName, *, target: str | None = None) -> None:
        """`Moved` if a directory other than `target` has some of the topic: to seal it here would be a take-over."""
        spec, metadata, prefix = self._definition(name), self._backend.metadata, self.settings.metadata.prefix
        name_of = partial(directory_name, metadata, prefix)
        check_held_here(spec, self.recorded(name), self.directory_id, name_of, target=target)

    def check_not_arrived(self, name: str | TopicName) -> None:
        """`Moved` if another directory has opened some of the topic since it was sealed here."""
        spec, metadata, prefix = self._definition(name), self._backend.metadata, self.settings.metadata.prefix
        check_not_arrived(spec, self.recorded(name), self.directory_id, partial(directory_name, metadata, prefix))

    def usage(self, name: str | TopicName | None = None) -> list[TierUsage]:
        """How many files and bytes each topic takes here and in the store, tier by tier, as the catalog knows them.

        Waits for the metadata store and for the disk; opens no shard.
        """
        backend = self._writable()
        return backend.usage(self.topics() if name is None else [self._definition(name)])

    @property
    def path(self) -> str | None:
        """The absolute path of the data directory; `None` in memory."""
        return self._backend.path

    @property
    def directory_id(self) -> str | None:
        """The name by which states and moves know this data directory; `None` in memory."""
        return self._backend.directory_id

    @property
    def metadata(self) -> MetadataStore:
        """Where the definitions of this log are kept: for a server that keeps its own facts beside them."""
        self._lifetime.check()
        return self._backend.metadata

    @property
    def loads(self) -> Loads:
        """Bulk loads into the topics here."""
        return self._writable().loads

    @property
    def views(self) -> TopicViews:
        """Topics as they lie, for readers of whole topics; `Unsupported` where nothing lies anywhere."""
        return self._writable().views

    def loads_of(self, name: str | TopicName) -> TopicLoads:
        """Bulk loads into one topic; `Unsupported` where no topic takes one."""
        return TopicLoads(self.loads, TopicName.parse(name), self._clock)

    def clear_moved(self) -> None:
        """Remove local files of shards that another directory has by now. What history lacks is set aside.

        Done in the background too, now and then.
        """
        self._writable().clear_moved()

    def group(self, name: str) -> Group:
        """The consumer group of this name; it need not exist yet."""
        self._lifetime.check()
        return Group(name, self.topic, self._definition, self._backend.cursors)

    def groups(self) -> list[str]:
        """The names of all groups and readers that have committed anywhere, but for those of `reserved_readers`."""
        self._lifetime.check()
        return self.groups_below(("",))

    def groups_below(self, prefixes: Sequence[str]) -> list[str]:
        """As `groups`, in the topics whose name, and a slash, begins with one of these. Reads nothing of others."""
        self._lifetime.check()
        return [name for name in self._backend.cursors.names(prefixes) if not is_reserved(name)]

    def reserved_readers(self) -> list[str]:
        """The names of the readers with a cursor anywhere that are Forebay's own: of routers, copies and replays."""
        self._lifetime.check()
        return [name for name in self._backend.cursors.names() if is_reserved(name)]

    def recover(self, on_progress: Progress | None = None) -> Recovered:
        """Open every shard of this directory now rather than at its first use, and apply its limits from now on.

        Shards that another directory holds, that were sealed or that were never used are left as they are. A shard
        that cannot be opened keeps no other closed: the result names it with its reason, and `raise_failed()` of the
        result raises the first reason. One that is sealed, moved or deleted meanwhile is not named, and a metadata
        store that goes away is one `Unavailable`. `runtime.openers` threads open shards at the same time. `on_progress`
        is called in the calling thread with 0.0 to 1.0: half by shards that are acquired, half by bytes of their logs.
        """
        self._lifetime.check()
        return self._backend.recover(on_progress or (lambda done: None))

    def workers(self) -> tuple[WorkerStatus, ...]:
        """How each background worker of this log fares: its last step, and what failed last."""
        self._lifetime.guard.check("this log")
        return self._backend.background.status()

    def unreadable_values(self) -> list[UnreadableValue]:
        """The stored values that this process has met, could not read, and passed over, if they are still so.

        Asks the metadata store for each. `forebay doctor` looks at all that there are.
        """
        self._lifetime.check()
        return noted_values(self.metadata, prefix=self.settings.metadata.prefix)

    def status(self) -> LogStatus:
        """How the log fares: open partitions, background workers, counters. Opens nothing, asks no other machine and
        reads no file: how far the export of a file is behind that was just sealed or found is known a second later.

        Lags of cursors are some seconds old, for a worker looks at the metadata store; the first call waits for that,
        a second at most.
        """
        self._lifetime.check()
        backend = self._backend
        shards = backend.shards.all()
        found = partition_statuses(shards, reads=False)
        workers = backend.background.status()
        return LogStatus(
            path=backend.path,
            directory_id=backend.directory_id,
            read_only=backend.is_read_only,
            open=found,
            workers=workers,
            metrics=(
                *backend.meter.samples(),
                *gauges(found, workers, self._clock.now_ms()),
                *self._subscriptions.gauges(),
                *self._lags.samples(lag_ends(shards), self._subscriptions.standing()),
                Sample(Metric.DISK_FREE_BYTES_MIN, (), self.settings.wal.free_bytes_min),
            ),
        )

    # Ending

    def close(self) -> None:
        """Make everything durable and end in order: nothing is left to replay. Harmless when repeated.

        In the callback of an append it returns at once if another thread is closing already. In a signal handler that
        interrupted an append of this log, or its closing, it raises `Unavailable`: close when that is over. In a
        forked child it does nothing: the parent goes on.
        """
        if self._lifetime.guard.is_forked:
            return
        self._closing.run(self._close, self._backend.shards.all(), self._backend.committers)

    def _close(self) -> None:
        # Set first and not looked at here: a closing that was interrupted is finished by the next call.
        self._lifetime.end()
        try:
            self._backend.close()
        finally:
            closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # How

    def _definition(self, name: str | TopicName) -> TopicSpec:
        """The definition of a topic, also of one whose records this process cannot read."""
        self._lifetime.check()
        return self._backend.definitions.find(TopicName.parse(name)).spec

    def _handle(self, spec: TopicSpec) -> Topic:
        backend = self._backend
        topic = Topic(
            self.settings.wal,
            clock=self._clock,
            shards=backend.shards.of_topic(spec),
            commit_soon=backend.committers.ask,
            cursors=backend.cursors,
            subscriptions=self._subscriptions,
            turns=backend.alterations.turns(spec),
        )
        backend.alterations.note(topic)
        return topic

    def _writable(self) -> WritableBackend:
        """The backend, for a call that changes something; `Unsupported` on a log that is opened read-only."""
        self._lifetime.check()
        return self._backend.writable()


def _retain(backend: WritableBackend, shard: OwnedShard) -> Retained:
    ended = backend.limits.apply(shard)
    return Retained(ended.evicted, ended.compacted, backend.retain(shard))


def _disk_of(settings: Settings, disk: Disk | None, undo: ExitStack) -> tuple[Disk, SystemDisk | None]:
    """The disk that is given, else one of the log's own, which is named twice: it ends with the log."""
    if disk is not None:
        return disk, None
    own = SystemDisk(settings.runtime.descriptors_max)
    undo.callback(own.close)
    return own, own


def _check_opening(path: str | PurePath | None, settings: Settings, *, read_only: bool) -> None:
    """Refuse a way of opening that cannot be: before anything is touched."""
    if path is None:
        _check_shared(settings, read_only=read_only)
    elif path == IN_MEMORY and read_only:
        raise Unsupported(f'"{IN_MEMORY}" is a log of this process alone: there is nothing to read beside it')
    if path != IN_MEMORY and settings.metadata.is_volatile:
        raise Unsupported(
            f'metadata.backend "memory" would forget the topics of {path}: use "sqlite", or open "{IN_MEMORY}"'
        )


def _check_shared(settings: Settings, *, read_only: bool) -> None:
    """`Invalid` unless a process without a data directory can read topics by these settings."""
    if not read_only:
        raise Invalid("path is None, and a log that is written needs a data directory: name one, or say read_only=True")
    if not settings.is_shared:
        raise Invalid(
            f'path is None, and storage.mode "{settings.storage.mode}" keeps history in data directories: name one'
        )
    if settings.metadata.is_file and settings.metadata.path is None:
        raise Invalid("path is None, and so is metadata.path: name the shared metadata file, or a data directory")
