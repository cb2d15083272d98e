"""What remains of erased records in the files and objects of one shard, and the rewriting that removes it.

A rewriting is a compaction of the segments that hold them, made by the owner in this process: new objects, one
transaction for each, and then the old ones go at once. It may be cut short anywhere: what is left is found by the next
search, for that goes by what lies there, not by what was remembered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from forebay.appends.producer_window import ProducerWindow
from forebay.blobs import BlobMissing, BlobStore, DirectoryStore, Stat
from forebay.blobs.ranges import ObjectBytes
from forebay.cleanup.collector import LOADS, Kept
from forebay.cleanup.objects import ObjectCleanup
from forebay.clock import Clock
from forebay.compacting.merging import SegmentTarget, merge
from forebay.compacting.passes import Failure, Passes, ShardLease, Unit
from forebay.compacting.planning import Rules, fits_parquet
from forebay.compacting.shard import ShardCompaction
from forebay.disk import Disk
from forebay.errors import ForebayError
from forebay.format.files.segment import COMPACTED, INDEX_SUFFIX, is_segment
from forebay.format.index.lookups import Sought
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.format.metadata.vectors import deleted_by
from forebay.history import READABLE
from forebay.loads.service import AloneWith
from forebay.metadata import MetadataStore
from forebay.metadata.leases import Lease, leased
from forebay.places import Places, is_local
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.storage.erasure.answer import ErasureCommands, Remnant
from forebay.storage.erasure.search import holds_ended, may_be_uploading, may_hold
from forebay.storage.moves import export_rotated
from forebay.storage.usage import Tier
from forebay.wal.files import REPLACED, LogFile, SealedFile
from forebay.wal.recovery.resume import ASIDE
from forebay.wal.recovery.survey import CHECKPOINT_NAME
from forebay.wal.tail import LIVE_NAME

T = TypeVar("T")

LEADER: Final = "erasure"
TOKEN_BYTES: Final = 8
LEASE_WAIT_SECONDS: Final = 30.0
"""How long a rewriting waits for a compaction of the shard that is under way."""
LOOKS: Final = 4
"""How often a search is begun again because files or objects went under it."""
COMPACTION: Final = "compaction"
SET_ASIDE: Final = "you remove what was set aside"


class ErasureContext(NamedTuple):
    """What the erasing in a data directory works with."""

    metadata: MetadataStore
    settings: Settings
    places: Places
    cleanup: ObjectCleanup
    shards: str
    """The directory of the shard directories."""
    disk: Disk
    clock: Clock
    alone_with: AloneWith
    """Has the background leave a shard alone while a function works on its history."""


class FoundObject(NamedTuple):
    """An object that holds erased records."""

    store_name: str
    stat: Stat
    descriptor: SegmentDescriptor | None
    """What history says of it; `None` if it does not name it any more, or never did."""


class SegmentErasure:
    """One shard of engine `segment`, which this process owns. For one thread at a time; see `ShardErasure`."""

    def __init__(self, shard: SegmentShard, context: ErasureContext) -> None:
        self._shard = shard
        self._context = context
        self._directory = f"{context.shards}/{shard.ref.id}"
        self._failures: list[Failure] = []
        self._compaction = ShardCompaction(
            shard.history.catalog,
            shard.ref.spec.topic_id,
            context.places,
            readable=lambda descriptor: context.places.knows(descriptor.store),
            manifest=context.places.manifest,
        )

    # What remains

    def remains(self, key: bytes) -> list[Remnant]:
        """See `ShardErasure`. Lists the stores, and reads indexes, and whole what no index answers for."""
        return self._steady(lambda: list(self._remains(key)))

    def _remains(self, key: bytes) -> Iterator[Remnant]:
        sought, commands = Sought.of_key(key), ErasureCommands(self._shard.ref.spec.name, key)
        for file in self.local_files(sought):
            tier = Tier.SEALED if isinstance(file, SealedFile) else Tier.LOG
            # Log files leave from the oldest on: one that cannot be rewritten keeps all behind it.
            until = self._why(0, file.end)
            yield self._left(tier, file.path, self._size(file.path), until, commands.rewrite)
        for path, size in self._beside(key):
            yield self._left(Tier.ASIDE, path, size, SET_ASIDE, commands.remove(path))
        for descriptor in self._out_of_reach():
            place, size = f"{descriptor.store}:{descriptor.object_key}", descriptor.bytes
            until = "it is erased with the settings, and in the directory, that it was written with"
            yield self._left(Tier.HISTORY, place, size, until, commands.rewrite)
        for name, store in self._context.places.by_name.items():
            try:
                yield from self._left_in(name, store, sought, commands)
                yield from self._unfinished(store, key, commands)
            except BlobMissing:
                raise
            except ForebayError as error:
                until = f"the store answers again ({error}): ask then"
                yield self._left(Tier.HISTORY, store.name, 0, until, commands.rewrite)

    def _unfinished(self, store: BlobStore, key: bytes, commands: ErasureCommands) -> Iterator[Remnant]:
        """Uploads into a directory that are under way or were cut short, and may hold such records."""
        grace_s = self._context.settings.export.orphan_grace_s
        for path, written_ms in store.unfinished() if isinstance(store, DirectoryStore) else ():
            opened = contextlib.suppress(FileNotFoundError)
            with opened, contextlib.closing(self._context.disk.open(path)) as file:
                if may_be_uploading(file, path, key, self._shard.ref.spec.topic_id):
                    left_s = max(0, grace_s - (self._context.clock.now_ms() - written_ms) // 1000)
                    until = f"the upload ends; one that was cut short is swept in about {left_s} s, or by you"
                    yield self._left(Tier.HISTORY, path, file.size(), until, commands.remove(path))

    def _left_in(self, name: str, store: BlobStore, sought: Sought, commands: ErasureCommands) -> Iterator[Remnant]:
        found = list(self.objects(name, store, sought))
        loose = [one.stat.key for one in found if one.descriptor is None]
        judged = self._context.cleanup.judged(self._shard, store, loose, None) if loose else {}
        formats = self._context.cleanup.table_formats(self._shard) if judged else ()
        for _, stat, descriptor in found:
            place, size = f"{name}:{stat.key}", stat.size
            if descriptor is not None:
                until = self._why(descriptor.start, descriptor.end, descriptor)
                yield self._left(Tier.HISTORY, place, size, until, commands.rewrite)
                continue
            why = judged.get(stat.key, ())
            command = commands.register(formats) if Kept.TABLED in why else commands.rewrite
            yield self._left(Tier.HISTORY, place, size, self._until_free(why, formats), command)

    def _until_free(self, why: Sequence[Kept], formats: Sequence[str]) -> str:
        """What ends an object that history names no more; `formats` are those of the topic's tables, if known."""
        if Kept.TABLED in why:
            hint = "" if formats else " (of a Delta table: add --table-format delta)"
            return f"no kept version of a table names it{hint}"
        if why:
            return f"this ends: {', '.join(why)}"
        return f"its owner removes it, about {self._context.settings.export.orphan_grace_s} s after it was replaced"

    def _why(self, start: int, end: int, descriptor: SegmentDescriptor | None = None) -> str:
        """What ends a file or segment of these offsets: compaction, or what keeps it from being compacted."""
        failed = next((each.why for each in self._failures if each.start < end and each.end > start), None)
        if failed is not None:
            return f"it can be rewritten: {failed}"
        if descriptor is not None and not fits_parquet(descriptor):
            return "its topic is deleted: it has times that no rewritten segment can hold"
        return COMPACTION

    def ended_offsets(self) -> Callable[[int], bool]:
        """Whether the record at an offset was deleted, or ended by a floor, as of now."""
        deletes = self._shard.deletes
        deleted, earliest = deletes.deleted, deletes.floor.earliest
        return lambda offset: offset < earliest or offset in deleted

    def local_files(self, sought: Sought) -> list[LogFile | SealedFile]:
        """The log files of the shard that hold such records."""
        is_ended = self.ended_offsets()
        return [
            file
            for file in self._shard.wal.files.all
            if file.end > file.start and holds_ended(file, sought, file.start, file.end, is_ended)
        ]

    def _beside(self, key: bytes) -> Iterator[tuple[str, int]]:
        """Files in the shard's directory that are no part of its log and may hold such records: path and size."""
        disk, directory = self._context.disk, self._directory
        names = [f"{directory}/{name}" for name in disk.list_directory(directory)]
        # After the list: a file that is begun meanwhile is not in it.
        known = {file.path for file in self._shard.wal.files.all}
        passed = {f"{directory}/{name}" for name in (ASIDE, LIVE_NAME, CHECKPOINT_NAME)}
        aside = f"{directory}/{ASIDE}"
        paths = [path for path in names if path not in known | passed and not path.endswith(INDEX_SUFFIX)]
        if aside in names:
            paths += [f"{aside}/{name}" for name in disk.list_directory(aside)]
        for path in paths:
            # One that has gone meanwhile was a part of the log.
            with contextlib.suppress(FileNotFoundError, IsADirectoryError), contextlib.closing(disk.open(path)) as file:
                if file.size() and _is_of_interest(path) and may_hold(file, path, key):
                    yield path, file.size()

    def _out_of_reach(self) -> list[SegmentDescriptor]:
        """Segments of history that lie where this process cannot look."""
        pieces = self._shard.history.catalog.descriptors()
        return [piece for piece in pieces if piece.kind in READABLE and not self._context.places.knows(piece.store)]

    def objects(self, name: str, store: BlobStore, sought: Sought) -> Iterator[FoundObject]:
        """The objects of the shard in a store that hold such records."""
        ref = self._shard.ref
        prefixes = [ref.id, ref.spec.topic_id] if ref.partition == 0 else [ref.id]
        listed = [stat for prefix in prefixes for stat in store.list(f"{prefix}/")]
        # After the list: what is made history meanwhile is named then.
        pieces = self._shard.history.catalog.descriptors()
        named = {piece.object_key: piece for piece in pieces if piece.store == name}
        holding: dict[str, bool] = {}
        for stat in listed:
            if is_segment(stat.key):
                descriptor = named.get(stat.key)
                with contextlib.suppress(BlobMissing):
                    holding[stat.key.rpartition(".")[0]] = self._holds(store, stat, descriptor, sought)
                    if holding[stat.key.rpartition(".")[0]]:
                        yield FoundObject(name, stat, descriptor)
        indexes = {piece.index_object: piece for piece in named.values()}
        for stat in listed:
            if stat.key.endswith(INDEX_SUFFIX) and _is_of_holding(stat.key, holding):
                yield FoundObject(name, stat, indexes.get(stat.key))

    def _holds(self, store: BlobStore, stat: Stat, descriptor: SegmentDescriptor | None, sought: Sought) -> bool:
        if descriptor is not None:
            return self._has(descriptor, sought)
        return may_hold(ObjectBytes(partial(store.get_range, stat.key), stat.size), stat.key, sought.entry)

    def _has(self, descriptor: SegmentDescriptor, sought: Sought) -> bool:
        if descriptor.kind not in READABLE:
            return False
        with contextlib.closing(self._context.places.segment(descriptor)) as segment:
            return holds_ended(segment, sought, descriptor.start, descriptor.end, self.ended_offsets())

    def _left(self, tier: Tier, place: str, size: int, until: str, command: str) -> Remnant:
        partition = self._shard.ref.partition
        return Remnant(partition=partition, tier=tier, place=place, bytes=size, until=until, command=command)

    def _size(self, path: str) -> int:
        with contextlib.closing(self._context.disk.open(path)) as file:
            return file.size()

    # Rewriting

    def rewrite(self, key: bytes) -> None:
        """See `ShardErasure`. First everything becomes history, then the segments of it are compacted, then old
        files and objects go. Waits for a compaction by another process; `Unavailable` if that takes too long.
        """
        sought, shard = Sought.of_key(key), self._shard
        if self.remains(key):
            shard.rotate()
            export_rotated(shard)
            with self._leased() as lease:
                self._steady(lambda: self._compact(sought, lease))
                self._context.alone_with(shard, lambda shard: self._remove(sought, lease))
        # Who planned before reads the log as it is stored: of files that are gone memory keeps nothing either.
        files = shard.wal.files.all
        shard.wal.tail.cache.forget(files[0].start if files else shard.wal.head)

    def _leased(self) -> contextlib.AbstractContextManager[Lease]:
        context = self._context
        ttl_s = context.settings.metadata.lease_ttl_s
        what = f"erasing in {self._shard.ref}"
        key = self._compaction.lease_key
        return leased(context.metadata, key, what, ttl_s=ttl_s, wait_s=LEASE_WAIT_SECONDS, clock=context.clock)

    def _compact(self, sought: Sought, lease: Lease) -> None:
        wal, clock = self._context.settings.wal, self._context.clock
        passes = Passes(
            self._compaction,
            self._target,
            self._write,
            lambda: self._compaction.outlook_of(self._chosen(sought), Rules().target_bytes, clock.now_ms()),
            (wal.producers_max, wal.producer_appends_max),
        )
        passes.run(ShardLease(lease.held, lease.check))
        self._failures = passes.failures

    def _chosen(self, sought: Sought) -> Callable[[SegmentDescriptor], bool]:
        """Which segments are to be rewritten: those that hold such records, and local files in front of one that does.

        Log files leave a directory from the oldest on, so that no crash leaves a gap between them.
        """
        pieces = [piece for piece in self._compaction.segments() if self._context.places.knows(piece.store)]
        holding = {piece.start for piece in pieces if self._has(piece, sought)}
        last = max((piece.start for piece in pieces if is_local(piece) and piece.start in holding), default=-1)
        return lambda piece: (
            piece.kind in READABLE and (piece.start in holding or (is_local(piece) and piece.start <= last))
        )

    def _target(self) -> SegmentTarget:
        context = self._context
        where = context.places.for_new_objects(is_shared=context.settings.is_shared)
        return SegmentTarget(*where, LEADER, context.clock.now_ms())

    def _write(self, units: Sequence[Unit]) -> Iterator[SegmentDescriptor | str]:
        """Write each segment when the one before it was put in its place; what cannot be written stays as it is."""
        for unit in units:
            try:
                yield merge(
                    unit.task,
                    deleted_by(unit.ended),
                    self._context.places,
                    self._target()._replace(name=unit.store, created_at=unit.created_at),
                    token=self._context.clock.random_bytes(TOKEN_BYTES).hex(),
                    window=ProducerWindow(*unit.window),
                )
            except ForebayError as error:
                yield str(error)

    def _remove(self, sought: Sought, lease: Lease) -> None:
        """Remove what was rewritten. Nothing else works on the history of the shard meanwhile."""

        def is_compacting() -> bool:
            # Asked once the objects are listed: what was listed while another had the lease is not ours to judge.
            lease.check()
            return False

        local = self.local_files(sought)
        if local:
            self._shard.history.drop_through(max(file.end for file in local))
        for name, store in self._context.places.by_name.items():
            found = self._steady(lambda: [*self.objects(name, store, sought)])  # noqa: B023 - called at once
            loose = [one.stat.key for one in found if one.descriptor is None]
            if loose:
                self._context.cleanup.remove_at_once(self._shard, store, loose, is_compacting)
        self._shard.history.segments.close()

    def _steady(self, look: Callable[[], T]) -> T:
        """Look, and look again where files or objects were replaced meanwhile."""
        for _ in range(LOOKS - 1):
            try:
                return look()
            except BlobMissing:
                continue
            except OSError as error:
                if error.errno not in REPLACED:
                    raise
        return look()


def _is_of_holding(index: str, holding: Mapping[str, bool]) -> bool:
    """Whether an index may hold bytes of records: one of a Parquet segment has the bounds of its columns in it.

    `holding` says it of segments, by their keys without the suffix. One whose segment is gone may.
    """
    stem = index.removesuffix(INDEX_SUFFIX)
    found = [is_holding for segment, is_holding in holding.items() if stem == segment or stem.startswith(f"{segment}-")]
    is_parquet = f"/{COMPACTED}" in index or LOADS in index
    return is_parquet and (any(found) or not found)


def _is_of_interest(path: str) -> bool:
    """Whether a file that was set aside may have records: an index, and what says where a log stood, has none."""
    name = path.rpartition("/")[2]
    return not name.startswith((LIVE_NAME, CHECKPOINT_NAME)) and INDEX_SUFFIX not in name
