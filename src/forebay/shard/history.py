"""The downstream side of one shard: its sealed files become history, and local copies go when they are not needed.

Stepped from outside, one file at a time, so that many shards share one thread fairly. Knows the log, the
exporter and the catalog; takes no decision about ownership.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from forebay import manifests
from forebay.appends.callbacks import deferred
from forebay.blobs import BlobStore
from forebay.catalog.removals import RecordedRemovals
from forebay.clock import Clock
from forebay.disk import Disk
from forebay.errors import Corrupt, Fenced, ForebayError, Unavailable, UnsupportedFormat
from forebay.export import Exporter, Lag
from forebay.format.checksum import ContentHash
from forebay.format.control.frames import Floor
from forebay.format.control.offsets import OffsetSet
from forebay.format.files.segment import index_name
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.history import History
from forebay.locks import Rank, RankedLock
from forebay.meter import Metric
from forebay.places import is_local, is_private
from forebay.records import Gap, Reason
from forebay.settings import Settings
from forebay.shard.context import ShardContext
from forebay.shard.deletes import Deletes
from forebay.shard.tiers import PAGE_BYTES
from forebay.topics import ShardRef
from forebay.wal.files import LogFile, SealedFile
from forebay.wal.log import Wal
from forebay.wal.retention import drop_file, expired

logger = logging.getLogger(__name__)

LOADS_NOTED_MAX = 10_000
"""Bulk loads of a shard that a look over all partitions asks for: a look lasts moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportStatus:
    """How far a shard's history is behind its log."""

    exported: int
    """The end of catalogued history."""
    behind: Lag
    """What is sealed and not history yet."""
    lag_bytes: int
    """The same in bytes, with files that are full and could not be sealed."""
    lag_since: int | None
    """When the oldest of them was appended to last, in milliseconds since 1970; `None` if there is none."""
    objects: int
    bytes: int
    """What this process has exported."""
    errors: int
    error: str | None
    """Why the last attempt failed, if it did."""


class OwnedHistory:
    """The history of a shard as its owner reads and extends it: the catalog, where it ends, and pages of it."""

    def __init__(self, around: ShardContext, ref: ShardRef, epoch: int, *, disk: Disk, clock: Clock, end: int) -> None:
        """`end` is where history ended when the shard was recovered."""
        self.catalog = around.catalog(ref)
        self.epoch = epoch
        self.places = around.places
        self.history = History(self.catalog, around.places.segment)
        store = around.places.store if around.settings.is_shared else None
        origin = around.origin(ref, epoch)
        self.exporter = Exporter(origin, self.catalog, store, disk=disk, clock=clock, exported=end)

    @property
    def exported(self) -> int:
        """The end of catalogued history, as far as it is known here."""
        return self.exporter.exported

    def record(self, deleted: OffsetSet, floor: Floor) -> None:
        """Record durably what ended in history; `Fenced` once another epoch owns the shard."""
        RecordedRemovals(self.catalog).record(self.epoch, deleted, floor)

    def deleted(self) -> OffsetSet:
        """Every offset that is recorded as deleted."""
        return RecordedRemovals(self.catalog).deleted()


class ShardHistory:
    """Exports the sealed files of one shard and removes local copies. The background worker steps it.

    A caller that asks for it now may do so beside the worker: one of them works at a time.
    """

    def __init__(
        self, wal: Wal, past: OwnedHistory, deletes: Deletes, settings: Settings, *, disk: Disk, clock: Clock
    ) -> None:
        """What ended is recorded by `deletes` before it becomes history; what lies below its floors may go."""
        self.catalog = past.catalog
        self.segments = past.history
        self._wal = wal
        self._deletes = deletes
        self._places = past.places
        self._meter = past.places.meter
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._store = past.places.store if settings.is_shared else None
        self._exporter = past.exporter
        self._epoch = past.epoch
        self._dropped = 0
        """What lies wholly below was removed."""
        self._working = RankedLock(Rank.HISTORY, "shard.history_work")
        """One at a time: the background thread, or a caller that asks for it now. Callbacks wait for its release."""
        self.exported_at = clock.monotonic() - settings.export.interval_s
        """When the last pass was over; the first is due at once."""
        self._local_left = self._store is not None and past.exported > 0
        """History may still lie in this directory alone."""
        self._looked_through = 0
        """The generation of the catalog in which no file is left that was compacted."""
        self.error: str | None = None
        self.errors = 0
        self._unreadable: dict[str, str] = {}
        """By path, why the index of a file could not be read."""
        self._loads_before: dict[str, int] | None = None if past.exported else {}
        """The bulk loads that history had at the first look since the shard was opened; `None` before that look."""
        self._loads_since: dict[str, int] = {}
        """Those that were attached since the shard was opened."""

    def loads(self) -> dict[str, int]:
        """Where each bulk load begins that may not be over. A load is among them before the log goes on behind it.

        The first call reads the catalog; later ones read nothing. For any thread.
        """
        if self._loads_before is None:
            self.segments.refresh()
            self._loads_before = dict(self.segments.loads)
        return {**self._loads_before, **self._loads_since}

    def know_end(self) -> None:
        """Know what history ends in, where the log goes no further. Reads the catalog if it has grown. Any thread."""
        if self.segments.end < self.exported == self._wal.head:
            self.segments.refresh()

    def note_load(self, load_id: str, start: int) -> None:
        """A bulk load is about to be attached at `start`. One that never was is taken back by `forget_load`."""
        while len(self._loads_since) >= LOADS_NOTED_MAX:
            # Of so many the oldest were committed long ago: an owner attaches few at a time.
            self._loads_since.pop(next(iter(self._loads_since)))
        self._loads_since[load_id] = start

    def forget_load(self, load_id: str) -> None:
        """A bulk load was not attached after all."""
        self._loads_since.pop(load_id, None)

    @property
    def exported(self) -> int:
        """The end of catalogued history, as far as it is known here."""
        return self._exporter.exported

    @property
    def is_behind(self) -> bool:
        """Whether some sealed file is not history yet, or history only here."""
        if self._local_left:
            return True
        newest = next((file for file in reversed(self._wal.files.all) if isinstance(file, SealedFile)), None)
        return newest is not None and newest.end > self.exported

    @property
    def has_unused(self) -> bool:
        """Whether all is history, and offsets are reserved beyond it that nothing uses: other directories must wait.

        A look at fields, for any thread.
        """
        writer = self._wal.writer
        if self._store is None or writer.next != self.exported or self._wal.queue.next != self.exported:
            return False
        return writer.reserved_end > self.exported or not self._exporter.has_given_back

    def is_due(self, now: float) -> bool:
        """Whether it is time to export: by the clock, by size, or because nothing has to be copied."""
        if self._store is None or now - self.exported_at >= self._settings.export.interval_s:
            return True
        return self._exporter.lag(self._wal.files).bytes >= self._settings.export.bytes_min

    def step(self, *, accept_damage: bool = False) -> bool:
        """Make one sealed file history; true if there is another. Raises what went wrong, having noted it.

        With `accept_damage` a file that names damaged ranges goes too.
        """
        with deferred(), self._working:
            if self._local_left:
                # Written in mode local: others can rely on it only once it is in the store.
                self._noting(self._publish_before)
                return True
            before = self._exporter.objects
            with self._meter.timed(Metric.EXPORT_CYCLE_SECONDS):
                self._noting(lambda: self._export_one(accept_damage=accept_damage))
            if not self.is_behind:
                self._noting(self._end_reservation)
            # Where nothing could be, as behind a damaged file that cannot be sealed, another try now is of no use.
            if self._exporter.objects > before and self.is_behind:
                return True
            self.exported_at = self._clock.monotonic()
            return False

    def catch_up(self, on_file: Callable[[Lag], None] | None = None, *, accept_damage: bool = False) -> None:
        """Make everything sealed history; `on_file` is called before each file with what is left.

        Where that is all there is, nothing is reserved beyond it on return.

        Raises `Unavailable` if a file that is not sealed stands before others that are.
        """
        while self.is_behind:
            if on_file is not None:
                on_file(self._exporter.lag(self._wal.files))
            local, before = self._local_left, self._exporter.objects
            self.step(accept_damage=accept_damage)
            if not local and self._exporter.objects == before and self.is_behind:
                raise Unavailable(
                    f"{self.catalog.keys}: history ends at {self.exported}, and the local file behind it could not be "
                    'sealed; see the log for why, and run "forebay verify"'
                )
        if self.has_unused:
            with deferred(), self._working:
                self._noting(self._end_reservation)

    def publish_local(self, on_file: Callable[[Lag], None] | None = None) -> None:
        """Put a copy of everything that is catalogued where it lies into the store, and name that copy instead."""
        with deferred(), self._working:
            while self._publish_one(on_file):
                pass

    def close_gap(self, gap: Gap) -> None:
        """Record a gap at the end of history, where no file will name it."""
        with deferred(), self._working:
            self._noting(lambda: self._exporter.export_gap(gap, self._deletes.publishing))

    def note_end(self, end: int) -> None:
        """History reaches up to `end`, by what was attached to it."""
        self._exporter.note_end(end)

    def retain(self) -> int:
        """Remove local files below the floors and local copies of what history has; returns how many.

        Copies go when they are old or too many, and verified.
        """
        # What was replaced long ago is gone from the store.
        self.segments.renew()
        ended = self._drop_ended()
        return ended + (self._drop_compacted() if self._store is None else self._drop_copies(self._store))

    def _drop_ended(self) -> int:
        """What lies wholly below the floors leaves the catalog, then the directory; its objects are orphans then."""
        floor = min(self._deletes.floor.earliest, self.exported)
        if floor <= self._dropped:
            return 0
        with deferred(), self._working:
            self._noting(lambda: RecordedRemovals(self.catalog).drop_below(self._epoch, floor))
            pieces = self.catalog.front(1).pieces
            kept = min(pieces[0].descriptor.start if pieces else floor, floor)
            count = 0
            for file in self._wal.files.all[:-1]:
                if not isinstance(file, SealedFile) or file.end > kept:
                    break
                drop_file(self._disk, self._wal.files, file)
                count += 1
            self._dropped = floor
            return count

    def _drop_copies(self, store: BlobStore) -> int:
        retention = self._settings.retention
        with deferred(), self._working:
            chosen = expired(
                self._wal.files,
                self.exported,
                now_ms=self._clock.now_ms(),
                now=self._clock.monotonic(),
                time_s=retention.time_s,
                bytes_max=retention.bytes_max,
                grace_s=retention.grace_s,
            )
            if not chosen:
                return 0
            pieces = self.catalog.descriptors()
            return self._drop_while(chosen, lambda file: self._has_copy(store, file, pieces))

    def _drop_compacted(self) -> int:
        """Where nothing is copied elsewhere, files whose records lie in Parquet segments beside them now."""
        files = self._wal.files.all[:-1]
        generation = self.catalog.frontier().cur.generation if files else 0
        if generation == self._looked_through:
            return 0
        with deferred(), self._working:
            pieces = self.catalog.descriptors()
            # Else it could be an older one that names the files.
            self.segments.renew()
            sealed = [file for file in files if isinstance(file, SealedFile) and file.end > file.start]
            dropped = self._drop_while(
                [file for file in sealed if not self._is_read(file)], lambda file: self._is_compacted(file, pieces)
            )
            if dropped == len(sealed) or not self._is_compacted(sealed[dropped], pieces):
                # Until history is rewritten again there is nothing more to be found.
                self._looked_through = generation
            return dropped

    def drop_through(self, end: int) -> int:
        """Remove the local files below `end` whose records history has elsewhere, however young, read or not.

        From the front, up to the first that history has nowhere else; how many went. A reader that stands in one goes
        on in history. What is held open of replaced segments is given back, so that the disk can free their bytes.
        """
        with deferred(), self._working:
            pieces = self.catalog.descriptors()
            # Else it could be an older one that names the files.
            self.segments.renew()
            files = [file for file in self._wal.files.all[:-1] if isinstance(file, SealedFile) and file.end <= end]
            dropped = self._drop_while(files, lambda file: self._is_elsewhere(file, pieces))
            self.segments.close()
            return dropped

    def _is_elsewhere(self, file: SealedFile, pieces: Sequence[SegmentDescriptor]) -> bool:
        store = self._store
        return self._is_compacted(file, pieces) if store is None else self._has_copy(store, file, pieces)

    def _drop_while(self, files: Sequence[SealedFile], may_go: Callable[[SealedFile], bool]) -> int:
        """Remove files from the front, as long as they may go; how many did."""
        dropped = 0
        for file in files:
            if self._wal.files.all[0] is not file or not may_go(file):
                break
            drop_file(self._disk, self._wal.files, file)
            dropped += 1
            logger.info("%s: the local copy %s is removed", self.catalog.keys, file.path)
        return dropped

    @contextlib.contextmanager
    def exports_paused(self) -> Iterator[None]:
        """Nothing of this shard becomes history meanwhile, by any thread. Append callbacks wait for its end."""
        with deferred(), self._working:
            yield

    def unexported(self) -> list[str]:
        """The keys that local files which history lacks have, or will have, in the store."""
        return self._exporter.unexported(self._wal.files)

    def status(self, *, reads: bool = True) -> ExportStatus:
        """How far it has come. Unless it `reads`, it asks no disk: files that `learn` has not read are left out."""
        if reads:
            self.learn()
        exporter = self._exporter
        lag_bytes, lag_since, damage = self._lag()
        return ExportStatus(
            exported=exporter.exported,
            behind=exporter.lag(self._wal.files, reads=reads),
            lag_bytes=lag_bytes,
            lag_since=lag_since,
            objects=exporter.objects,
            bytes=exporter.bytes,
            errors=self.errors,
            error=damage or self.error,
        )

    def learn(self) -> None:
        """Read what `status` says of full files that are not history yet, once for each. It may wait for the disk."""
        for file in self._unfinished():
            if isinstance(file, SealedFile) and file.known_footer is None:
                try:
                    _ = file.footer
                except (Corrupt, UnsupportedFormat, OSError) as error:
                    self._unreadable[file.path] = f"{file.path}: {error}"

    def _unfinished(self) -> list[LogFile | SealedFile]:
        """Full files that are not history yet."""
        active, exported = self._wal.writer.active, self.exported
        files = self._wal.files.reaching(exported)
        return [file for file in files if file is not active and file.end > max(file.start, exported)]

    def _lag(self) -> tuple[int, int | None, str | None]:
        """Bytes of full files that are not history yet, when the oldest of them was appended to last, and what is
        wrong with the first of them whose index cannot be read: it is left out of both. Asks no disk.
        """
        size, times, damage = 0, list[int](), None
        for file in self._unfinished():
            if isinstance(file, SealedFile):
                footer = file.known_footer
                if footer is None:
                    damage = damage or self._unreadable.get(file.path)
                    continue
                size += footer.segment_bytes
                times.append(footer.appended_max)
            else:
                size += file.limit
                times.append(file.header.created)
        # A file without a record has no time.
        return size, min(filter(None, times), default=None), damage

    def close(self) -> None:
        """Give back what readers held."""
        self.segments.close()

    def _publish_one(self, on_file: Callable[[Lag], None] | None = None) -> bool:
        """Publish the first piece that lies here alone; false if there is none."""
        store = self._places.store
        local = [piece for piece in self.catalog.pieces() if is_private(piece.descriptor)]
        if store is None or not local:
            return False
        self._places.probe()
        if on_file is not None:
            records = sum(piece.descriptor.records for piece in local)
            on_file(Lag(len(local), records, sum(piece.descriptor.bytes for piece in local)))
        # False if it was replaced meanwhile: the next call finds by what.
        self.catalog.replace([local[0]], self._published(local[0].descriptor, store))
        return True

    def _published(self, descriptor: SegmentDescriptor, store: BlobStore) -> SegmentDescriptor:
        """What may stand for this descriptor once all that it stands for is in the store."""
        name = self._places.store_name
        if descriptor.kind is DescriptorKind.PARQUET:
            origin, now_ms = self._places.store_of(descriptor.store), self._clock.now_ms()
            return _copied(descriptor, origin, store, name, created_at=now_ms)
        if descriptor.kind is not DescriptorKind.MANIFEST:
            with contextlib.closing(self._places.file(descriptor)) as file:
                return self._exporter.copied(descriptor, file, store, name)
        copies = [self._published(inner, store) for inner in self._places.manifest(descriptor)]
        listed = manifests.write(
            store, self._exporter.origin.prefix, copies, store_name=name, created_at=descriptor.created_at
        )
        return msgspec.structs.replace(listed, load_id=descriptor.load_id)

    def holds(self, start: int, stop: int) -> bool:
        """Whether history, the local log files apart, has every record of `[start, stop)`. Asks the store."""
        if stop > self.exported:
            return False
        try:
            pieces = self.catalog.descriptors()
            if any(is_local(piece) for piece in pieces if piece.start < stop and piece.end > start):
                return False
            while start < stop:
                page = self.segments.read(start, PAGE_BYTES)
                if page.next == start or any(gap.reason is Reason.DAMAGED for gap in page.events):
                    return False
                start = page.next
        except (ForebayError, OSError) as error:
            logger.warning("%s: whether history has a copy is not known now: %s", self.catalog.keys, error)
            return False
        return True

    def _export_one(self, *, accept_damage: bool) -> None:
        if self._store is not None:
            self._places.probe()
        producers, floor = self._wal.writer.window.producers, self._deletes.floor.earliest
        objects, size = self._exporter.objects, self._exporter.bytes
        self._exporter.export(
            self._wal.files,
            producers=producers,
            files_max=1,
            may_lack=lambda gap: accept_damage or gap.stop <= floor,
            publishing=self._deletes.publishing,
            give_back=self._wal.give_back_reserved if self._store is not None else lambda end: None,
        )
        self._meter.add(Metric.EXPORT_OBJECTS, self._exporter.objects - objects)
        self._meter.add(Metric.EXPORT_BYTES, self._exporter.bytes - size)

    def _end_reservation(self) -> None:
        """Where all is history, give back what is reserved beyond: then nothing is at risk with this owner."""
        if self.has_unused:
            end = self.exported
            is_unused = self._wal.give_back_reserved(end)
            if is_unused is not None:
                self._exporter.end_reservation(end, is_unused)

    def _publish_before(self) -> None:
        self._local_left = self._publish_one()

    def _noting(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (ForebayError, OSError) as error:
            self.error, self.errors = str(error), self.errors + 1
            self._meter.add(Metric.EXPORT_ERRORS)
            if isinstance(error, Fenced):
                self._wal.fence(error)
            raise
        self.error = None

    def _is_read(self, file: SealedFile) -> bool:
        """Whether a reader has just used it."""
        return bool(file.read_last) and self._clock.monotonic() - file.read_last < self._settings.retention.grace_s

    def _is_compacted(self, file: SealedFile, pieces: Sequence[SegmentDescriptor]) -> bool:
        piece = compacted_into(pieces, file.start, file.end)
        return piece is not None and is_there(self._places.store_of(piece.store), piece)

    def _has_copy(self, store: BlobStore, file: SealedFile, pieces: Sequence[SegmentDescriptor]) -> bool:
        """Whether the store has the very bytes of this file, as the catalog says, or a Parquet segment of them."""
        footer = file.footer
        piece = compacted_into(pieces, file.start, file.end)
        if piece is not None:
            return not is_private(piece) and is_there(store, piece)
        place = bisect_left(pieces, file.start, key=lambda piece: piece.start)
        copy = pieces[place] if place < len(pieces) else None
        if copy is None or copy.start != file.start or copy.kind is not DescriptorKind.FRAMES or is_private(copy):
            return False
        if (copy.end, copy.content_hash) != (file.end, footer.content_hash.hex()):
            return False
        return is_there(store, copy)


def compacted_into(pieces: Sequence[SegmentDescriptor], start: int, end: int) -> SegmentDescriptor | None:
    """The Parquet segment that holds what is left of `[start, end)`, if there is one; pieces are in order."""
    place = bisect_right(pieces, start, key=lambda piece: piece.start) - 1
    found = pieces[place] if place >= 0 else None
    if found is None or found.kind is not DescriptorKind.PARQUET or found.end < end:
        return None
    return found


def is_there(store: BlobStore, piece: SegmentDescriptor) -> bool:
    """Whether the store has the object of a segment, as it was catalogued, and its index."""
    found, index = store.stat(piece.object_key), store.stat(piece.index_object)
    is_same = found is not None and (found.size, found.etag) == (piece.bytes, piece.etag)
    return is_same and index is not None and index.size == piece.index_bytes


def _copied(
    descriptor: SegmentDescriptor, origin: BlobStore, store: BlobStore, store_name: str, *, created_at: int
) -> SegmentDescriptor:
    """Put a copy of a Parquet segment into another store; the descriptor of that copy. Harmless when repeated.

    From `created_at` on history names the copy: so long what was copied stays for those who read it.
    """
    key = descriptor.object_key
    stat = store.upload(key, _verified(origin, descriptor))
    store.upload(index_name(key), [origin.get_range(descriptor.index_object, 0, descriptor.index_bytes)])
    return msgspec.structs.replace(descriptor, store=store_name, etag=stat.etag, index_key=None, created_at=created_at)


def _verified(store: BlobStore, descriptor: SegmentDescriptor) -> Iterator[bytes]:
    """Its bytes; raises before the end if they have changed: damage must not become the only copy."""
    digest = ContentHash()
    for chunk in store.read(descriptor.object_key, 0, descriptor.bytes, etag=descriptor.etag):
        digest.update(chunk)
        yield chunk
    if digest.digest().hex() != descriptor.content_hash:
        raise Corrupt(f'{descriptor.object_key} is not what was written: not copied; run "forebay verify"')
