"""The bridge from log to history: a sealed file is verified, uploaded, and then made history by one transaction.

Only sealed files, only from the frontier on, oldest first. Every step can be repeated: an object is named by
its content, and the catalog refuses what it has already. A crash before the transaction leaves an orphan object, which
is collected later (`cleanup`). Knows files, stores and the catalog; knows nothing of topics or owners beyond the epoch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import msgspec

from forebay.blobs import BlobStore, Stat
from forebay.catalog import ShardCatalog
from forebay.clock import Clock
from forebay.disk import Disk
from forebay.errors import Corrupt, DataLoss, UnsupportedFormat
from forebay.format.checksum import content_hash, crc32
from forebay.format.files.segment import SEGMENT_SUFFIX, index_name
from forebay.format.index.sections import Footer, find_offset
from forebay.format.metadata.descriptor import (
    DAMAGED_RANGES_MAX,
    DescriptorKind,
    SegmentDescriptor,
    Status,
    StoredObject,
    gap_descriptor,
    object_descriptor,
    sparse_index,
)
from forebay.records import OFFSET_MAX, Gap, Reason
from forebay.topics import shard_id
from forebay.wal.files import FileList, SealedFile

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1024 * 1024

GiveBack: TypeAlias = Callable[[int], Callable[[], bool] | None]
"""Asked with the new end of history; see `Wal.give_back_reserved`."""
Publishing: TypeAlias = Callable[[int], AbstractContextManager[None]]
"""Entered before history is extended up to an offset, left when that is done or has failed."""


class Origin(NamedTuple):
    """Whose history it is: the shard, the epoch it is exported in, who exports, and to which store."""

    topic_id: str
    partition: int
    epoch: int
    leader: str
    store: str

    @property
    def prefix(self) -> str:
        """Where the shard's objects lie in the store."""
        return f"{shard_id(self.topic_id, self.partition)}/"


class Lag(NamedTuple):
    """What is sealed and not history yet."""

    files: int
    records: int
    bytes: int


class Exporter:
    """Exports one shard's sealed files. One at a time; the owner calls it.

    Without a store it catalogues them where they lie.
    """

    def __init__(
        self,
        origin: Origin,
        catalog: ShardCatalog,
        store: BlobStore | None,
        *,
        disk: Disk,
        clock: Clock,
        exported: int = 0,
    ) -> None:
        self.origin = origin
        self._catalog = catalog
        self._store = store
        self._disk = disk
        self._clock = clock
        self.exported = exported
        """The end of catalogued history, as last seen."""
        self.objects = 0
        self.bytes = 0
        self.has_given_back = True
        """The recorded state, as far as is known, has no more offsets reserved than this owner."""

    def export(
        self,
        files: FileList,
        *,
        producers: int = 0,
        files_max: int | None = None,
        may_lack: Callable[[Gap], bool] = lambda gap: False,
        publishing: Publishing = lambda end: nullcontext(),
        give_back: GiveBack = lambda end: None,
    ) -> int:
        """Make sealed files behind the frontier history, oldest first, all or up to `files_max`; how many were.

        `producers` says to the next owner whether there is a window of repeats to be rebuilt. Raises `DataLoss` at a
        damaged range for which `may_lack` is false: history would be without these records for ever. `give_back` says
        whether offsets behind a file are unused: then the transaction gives back what is reserved there.
        """
        pending = self._pending(files)[:files_max]
        for file in pending:
            # One of its own: what is loaded for it here must not stay in memory with the file of the readers.
            with contextlib.closing(SealedFile(self._disk, file.path, file.start, file.end)) as own:
                missing = self._missing(own)
                self._check_whole(own, [*missing, *_damaged(own)], may_lack)
                self._export(own, producers, missing, publishing, give_back)
        return len(pending)

    def copied(
        self, descriptor: SegmentDescriptor, file: SealedFile, store: BlobStore, store_name: str
    ) -> SegmentDescriptor:
        """Put a copy of a file that is catalogued where it lies into a store; the descriptor of that copy."""
        footer = file.index().footer
        key = self._key(footer)
        etag = self.place(store, key, file, footer).etag
        self._place_index(store, index_name(key), self._content(index_name(file.path)))
        return msgspec.structs.replace(descriptor, store=store_name, object_key=key, etag=etag, status=Status.EXPORTED)

    def note_end(self, end: int) -> None:
        """History reaches up to here, by something else than an export."""
        self.exported = max(self.exported, end)

    def export_gap(self, gap: Gap, publishing: Publishing) -> None:
        """Catalogue a gap at the end of the log, where no later file will name it."""
        with publishing(gap.stop):
            self._catalog.extend(self.origin.epoch, [self._gap(gap)])
            self.exported = gap.stop

    def lag(self, files: FileList, *, reads: bool = True) -> Lag:
        """How much is sealed and not exported yet, as far as the frontier is known here.

        Unless it `reads`, it asks no disk: files whose index was not read before have no size.
        """
        pending = self._behind(files)
        size = 0
        for file in pending:
            # One whose index is damaged has no size here; the status of the shard names it.
            with suppress(Corrupt, UnsupportedFormat, OSError):
                footer = file.footer if reads else file.known_footer
                size += 0 if footer is None else footer.segment_bytes
        return Lag(len(pending), sum(file.end - file.start for file in pending), size)

    def unexported(self, files: FileList) -> list[str]:
        """The keys that sealed files behind the frontier have, or will have, in the store."""
        return [self._key(file.footer) for file in self._pending(files)]

    def _pending(self, files: FileList) -> list[SealedFile]:
        self.exported = self._catalog.frontier().next
        return self._behind(files)

    def _behind(self, files: FileList) -> list[SealedFile]:
        # One without records is never sealed, and a crash inside a recovery may leave one between others.
        unsealed = next((log.start for log in files.logs if log.end > log.start), OFFSET_MAX)
        behind = takewhile(lambda file: file.start < unsealed, files.reaching(self.exported))
        return [file for file in behind if isinstance(file, SealedFile) and file.end > self.exported]

    def _missing(self, file: SealedFile) -> list[Gap]:
        """The offsets between the end of history and this file that no local file has."""
        begins = file.previous_end
        return [Gap(self.exported, begins, Reason.DAMAGED)] if begins > self.exported else []

    def _check_whole(self, file: SealedFile, damaged: Sequence[Gap], may_lack: Callable[[Gap], bool]) -> None:
        lost = ", ".join(f"[{gap.start}, {gap.stop})" for gap in damaged if not may_lack(gap))
        if lost:
            keys = self._catalog.keys
            raise DataLoss(
                f"{keys}: offsets {lost} are damaged in {file.path} or missing before it: not exported. Restore the "
                "file, without its index, and open the log again; or go on without these records: "
                f'"forebay topic export {keys.namespace}/{keys.topic} --accept-damage", or accept_damage=True'
            )

    def end_reservation(self, end: int, is_unused: Callable[[], bool]) -> None:
        """Give back what is reserved beyond `end`, where there is nothing to export."""
        self.has_given_back = False
        self.has_given_back = self._catalog.give_back(self.origin.epoch, end, is_unused)

    def _export(
        self,
        file: SealedFile,
        producers: int,
        missing: Sequence[Gap],
        publishing: Publishing,
        give_back: GiveBack,
    ) -> None:
        footer = file.index().footer
        index = self._content(index_name(file.path))
        key, etag = f"{self.origin.prefix}{file.path.rpartition('/')[2]}", None
        if self._store is not None:
            key = self._key(footer)
            etag = self.place(self._store, key, file, footer).etag
            self._place_index(self._store, index_name(key), index)
        gap = file.leading_gap
        additions = [self._gap(found) for found in missing]
        additions += [self._gap(gap)] if gap is not None and gap.stop > self.exported else []
        additions.append(self._descriptor(file, footer, key, etag, index_bytes=len(index), producers=producers))
        is_unused = give_back(file.end)
        with publishing(file.end):
            if is_unused is None:
                self._catalog.extend(self.origin.epoch, additions)
            else:
                self.has_given_back = False
                self.has_given_back = self._catalog.extend(self.origin.epoch, additions, is_unused)
            self.exported = file.end
        self.objects += 1
        self.bytes += footer.segment_bytes
        logger.info("%s: offsets [%d, %d) are history as %s", self._catalog.keys, file.start, file.end, key)
        for lost in (*missing, *_damaged(file)):
            logger.warning("%s: offsets %s are in history as %s", self._catalog.keys, lost, key)

    def _key(self, footer: Footer) -> str:
        return f"{self.origin.prefix}{footer.epoch}-{footer.content_hash.hex()}{SEGMENT_SUFFIX}"

    def place(self, store: BlobStore, key: str, file: SealedFile, footer: Footer) -> Stat:
        """The object with the sealed bytes. One that is there already, by an attempt cut short, is compared by hash."""
        found = store.stat(key)
        if found is not None and content_hash(store.read(key, 0, found.size)) == footer.content_hash:
            return found
        return store.upload(key, self._verified(file, footer))

    def _place_index(self, store: BlobStore, key: str, index: bytes) -> None:
        put = store.put_if_absent(key, index)
        if not put.created and store.get_range(key, 0, put.stat.size) != index:
            store.upload(key, [index])

    def _verified(self, file: SealedFile, footer: Footer) -> Iterator[bytes]:
        """The sealed bytes; raises before the end if they have changed: damage must not become the only copy.

        Compared by checksum: the content hash was taken of the same bytes when they were sealed.
        """
        crc, size = 0, 0
        for chunk in self._chunks(file.path, footer.segment_bytes):
            crc = crc32(chunk, crc)
            size += len(chunk)
            yield chunk
        if (size, crc) != (footer.segment_bytes, footer.segment_crc):
            keys = self._catalog.keys
            raise DataLoss(
                f"{keys}: {file.path} is not what was sealed (crc {crc:08x}), {_changed(file)}: not exported. Restore "
                'the file from a backup, or go on without what is damaged: "forebay topic export '
                f'{keys.namespace}/{keys.topic} --accept-damage", or accept_damage=True'
            )

    def _chunks(self, path: str, size: int) -> Iterator[bytes]:
        file = self._disk.open(path)
        try:
            for position in range(0, size, CHUNK_BYTES):
                yield file.read_at(min(CHUNK_BYTES, size - position), position)
        finally:
            file.close()

    def _content(self, path: str) -> bytes:
        file = self._disk.open(path)
        try:
            return file.read_at(file.size(), 0)
        finally:
            file.close()

    def _gap(self, gap: Gap) -> SegmentDescriptor:
        return gap_descriptor(
            gap, topic_id=self.origin.topic_id, epoch=self.origin.epoch, created_at=self._clock.now_ms()
        )

    def _descriptor(
        self, file: SealedFile, footer: Footer, key: str, etag: str | None, *, index_bytes: int, producers: int
    ) -> SegmentDescriptor:
        stored = StoredObject.of_segment(footer, store=self.origin.store, object_key=key, etag=etag)
        return object_descriptor(
            DescriptorKind.FRAMES,
            stored,
            topic_id=self.origin.topic_id,
            start=file.start,
            end=file.end,
            epoch=footer.epoch_max,
            leader=self.origin.leader,
            status=Status.EXPORTED if self._store is not None else Status.SEALED,
            created_at=self._clock.now_ms(),
            index_bytes=index_bytes,
            producers=producers,
            sparse=sparse_index(file.index().entries, file.start),
            damaged=tuple((gap.start, gap.stop) for gap in _damaged(file)[:DAMAGED_RANGES_MAX]),
        )


def _changed(file: SealedFile) -> str:
    """Where a file is damaged since it was sealed, by byte and offsets; the first such place of many."""
    entries, at = file.index().entries, file.start
    while at < file.end:
        page = file.read(at, CHUNK_BYTES)
        found = next((gap for gap in page.events if gap.reason is Reason.DAMAGED), None)
        if found is not None:
            place = find_offset(entries, found.start)
            byte = int(entries["position"][place]) if place < len(entries) else 0
            return f"damaged at byte {byte} (offsets [{found.start}, {found.stop}))"
        at = page.next
    return "damaged in a frame without records"


def _damaged(file: SealedFile) -> list[Gap]:
    """The ranges of which the index says that their frames were damaged when the file was sealed."""
    return [gap for gap in file.index().gaps if gap.reason is Reason.DAMAGED]
