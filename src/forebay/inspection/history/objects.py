"""Catalogued objects under examination: is each there, whole, and exactly the piece of history it stands for?

Reads only. Knows stores and formats; knows nothing of the files of the local log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from forebay.blobs import BlobStore, Stat
from forebay.catalog.shard import Piece
from forebay.disk import File
from forebay.errors import Corrupt, ForebayError, Unavailable
from forebay.format.checksum import content_hash
from forebay.format.files.segment import HEADER_BYTES, SegmentHeader, decode_header, segment_name
from forebay.format.frame.head import Verdict
from forebay.format.index import sections as index_format
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.history import READABLE
from forebay.inspection.findings import UPGRADE, Report, Severity
from forebay.inspection.history.catalog import METADATA
from forebay.inspection.segments import REPAIR, SEALED_SO, damaged_places, log_file, without_lookups
from forebay.places import Stores
from forebay.records import Reason
from forebay.wal.sealing import index_of

BLOCK_BYTES = 4 * 1024 * 1024
BLOCKS_HELD = 32
"""An object up to so many blocks is fetched once, a larger one twice: its frames are walked, then its bytes hashed."""
RESTORE_OBJECT = "restore the object from a backup of the store; reading this range fails"
EXPORTED_SO = "it was exported so, and no copy is left to repair it from; readers get this range reported as damaged"

Progress = Callable[[int], None]


@dataclass(slots=True)
class ObjectCopy:
    """What one catalogued object turned out to be. Without a look at its bytes it counts as intact if its size fits."""

    piece: Piece
    where: str
    exists: bool = False
    reachable: bool = True
    intact: bool = False
    """Its bytes are those that were catalogued."""
    etag: str | None = None
    name: str = ""
    """The name that the segment has in the log, if it is known."""
    index: bytes = b""
    """What its index must hold, worked out from its bytes; empty if they are not intact or were not read."""
    whole_index: bytes = b""
    """The same with all that an index of today has."""
    stored_index: bytes | None = None
    """What it does hold; `None` if there is no such object or it was not read."""
    index_exists: bool = False
    index_intact: bool = False
    flaw: str = ""
    """Why it is not intact."""

    @property
    def descriptor(self) -> SegmentDescriptor:
        return self.piece.descriptor

    @property
    def offsets(self) -> tuple[int, int]:
        return self.descriptor.start, self.descriptor.end

    @property
    def has_other_etag(self) -> bool:
        """The object is not the one that was catalogued, whatever it holds: readers refuse it."""
        known = self.descriptor.etag
        return self.exists and known is not None and self.etag != known


class _ObjectBytes:
    """The bytes of one object as those of a file that is only read, from front to back."""

    def __init__(self, store: BlobStore, key: str, size: int, where: str) -> None:
        self.path = where
        self._store = store
        self._key = key
        self._size = size
        self._held: OrderedDict[int, bytes] = OrderedDict()
        self._chunks: Iterator[bytes] = iter(())
        self._following = -1

    def size(self) -> int:
        return self._size

    def read_at(self, length: int, position: int) -> bytes:
        stop = min(position + length, self._size)
        if position >= stop:
            return b""
        first, last = position // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        whole = b"".join([self._block(number) for number in range(first, last + 1)])
        return whole[position - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def _block(self, number: int) -> bytes:
        if number not in self._held:
            if number != self._following:
                start = number * BLOCK_BYTES
                self._chunks = self._store.read(self._key, start, self._size, chunk_bytes=BLOCK_BYTES)
            block = next(self._chunks, b"")
            if len(block) < min(BLOCK_BYTES, self._size - number * BLOCK_BYTES):
                raise Corrupt(f"it was {self._size} bytes long and has become shorter")
            self._held[number] = block
            self._following = number + 1
            while len(self._held) > BLOCKS_HELD:
                self._held.popitem(last=False)
        return self._held[number]


class ObjectExam:
    """The examination of the objects of one shard. Findings go to the report. With `quick` only sizes are looked at."""

    def __init__(
        self, stores: Stores, shard_id: str, shard: str, report: Report, *, quick: bool, on_bytes: Progress | None
    ) -> None:
        self._stores = stores
        self._shard_id = shard_id
        self._shard = shard
        self._report = report
        self._quick = quick
        self._on_bytes = on_bytes

    def examine(self, piece: Piece) -> ObjectCopy:
        """Look at the object of one piece, which is not a gap."""
        descriptor = piece.descriptor
        copy = ObjectCopy(piece, f"{descriptor.store} {descriptor.object_key}")
        try:
            store = self._stores.of(descriptor.store)
            copy.where = f"{store.name}/{descriptor.object_key}"
            self._object(copy, store)
        except Unavailable as error:
            self._stores.give_up(descriptor.store, error)
            # Said once for all that lie there, by the caller that looks at all of them.
            copy.reachable, copy.flaw = False, f"cannot be checked: {error}"
        except ForebayError as error:
            copy.flaw = f"cannot be read: {error}"
            self._add(copy, copy.flaw)
        if self._on_bytes is not None and not self._quick:
            self._on_bytes(descriptor.bytes)
        return copy

    def _object(self, copy: ObjectCopy, store: BlobStore) -> None:
        descriptor = copy.descriptor
        self._report.objects += 1
        has_index = descriptor.kind in READABLE
        index = store.stat(descriptor.index_object) if has_index else None
        if index is not None and not self._quick:
            # Before the bytes: it is the witness of what they held.
            copy.stored_index = store.get_range(index.key, 0, index.size)
        stat = store.stat(descriptor.object_key)
        if stat is None:
            copy.flaw = "the object is missing"
            self._add(copy, copy.flaw)
        else:
            copy.exists, copy.etag = True, stat.etag
            self._report.object_bytes += stat.size
            copy.intact = self._size_fits(copy, stat.size)
            if not self._quick:
                self._bytes(copy, store, stat.size)
            if copy.intact and copy.has_other_etag:
                what = f"its etag is {copy.etag}, catalogued with {descriptor.etag}, so readers refuse it"
                self._add(copy, what, REPAIR)
        if has_index:
            self._index(copy, index, f"{store.name}/{descriptor.index_object}")

    def _size_fits(self, copy: ObjectCopy, size: int) -> bool:
        if size == copy.descriptor.bytes:
            return True
        copy.flaw = f"has {size} bytes, catalogued with {copy.descriptor.bytes}"
        self._add(copy, copy.flaw)
        return False

    def _bytes(self, copy: ObjectCopy, store: BlobStore, size: int) -> None:
        """Read all of it: the hash must be the one that was catalogued, and the frames must fill the range."""
        descriptor, fits = copy.descriptor, copy.intact
        copy.intact = False
        if descriptor.kind is DescriptorKind.PARQUET:
            self._columns(copy, store, size, fits=fits)
            return
        if descriptor.kind is not DescriptorKind.FRAMES:
            found = content_hash(store.read(descriptor.object_key, 0, size)).hex()
            copy.intact = fits and found == descriptor.content_hash
            if fits and not copy.intact:
                self._exchanged(copy, found)
            return
        source = cast(File, _ObjectBytes(store, descriptor.object_key, size, copy.where))  # it is only read
        header = self._header(copy, decode_header(source.read_at(HEADER_BYTES, 0)))
        if header is None:
            return
        end = header.start + descriptor.end - descriptor.start
        log = log_file(source, header, end=end, limit=min(size, descriptor.bytes))
        content, footer = index_of(log)
        if footer.content_hash.hex() == descriptor.content_hash and fits:
            copy.index, copy.whole_index = catalogued_index(content, descriptor), content
            copy.name = segment_name(header.start, header.epoch)
            copy.intact = self._range_fits(copy, header, content)
            return
        places = list(damaged_places(log))
        shift = descriptor.start - header.start
        for place in places:
            byte, gap, verdict = place.byte, place.gap, place.verdict
            copy.flaw = copy.flaw or f"the frame at byte {byte} is {verdict.value}"
            offsets = (gap.start + shift, gap.stop + shift)
            self._add(copy, f"the frame is {verdict.value}", byte=byte, offsets=offsets)
        if not places and fits:
            self._exchanged(copy, footer.content_hash.hex())

    def _columns(self, copy: ObjectCopy, store: BlobStore, size: int, *, fits: bool) -> None:
        from forebay.inspection.history.parquet import walked_columns  # noqa: PLC0415 - it brings Arrow

        source = _ObjectBytes(store, copy.descriptor.object_key, size, copy.where)
        found = walked_columns(copy.descriptor, source.read_at, size, copy.stored_index)
        copy.index, copy.flaw = found.content, copy.flaw or found.flaw
        copy.whole_index = found.content
        copy.intact = fits and not found.flaw
        for offsets in found.damaged:
            self._add(copy, "the row group is damaged", offsets=offsets)
        if fits and found.flaw and not found.damaged:
            self._add(copy, found.flaw, METADATA if found.content else RESTORE_OBJECT)

    def _header(self, copy: ObjectCopy, header: SegmentHeader | Verdict) -> SegmentHeader | None:
        if isinstance(header, Verdict):
            copy.flaw = f"its header is {header.value}"
            self._add(copy, copy.flaw, UPGRADE if header is Verdict.NEWER else RESTORE_OBJECT, byte=0)
            return None
        if copy.descriptor.header_start is None and header.shard_id != self._shard_id:
            copy.flaw = f"belongs to shard {header.shard_id}"
            self._add(copy, copy.flaw)
            return None
        return header

    def _exchanged(self, copy: ObjectCopy, found: str) -> None:
        expected = copy.descriptor.content_hash
        copy.flaw = f"its content is not what was catalogued (hash {found}, expected {expected})"
        self._add(copy, copy.flaw)

    def _range_fits(self, copy: ObjectCopy, header: SegmentHeader, content: bytes) -> bool:
        """Whether its frames and named gaps fill exactly the catalogued range."""
        descriptor = copy.descriptor
        decoded = index_format.decode_index(content)
        assert not isinstance(decoded, Verdict)
        _, entries, gaps = decoded
        shift = descriptor.start - header.start
        spans = [(int(entry["offset"]), int(entry["offset"]) + int(entry["count"])) for entry in entries]
        spans += [(gap.start, gap.stop) for gap in gaps if gap.stop > header.start]
        expected = header.start
        for start, stop in sorted(spans):
            if start != expected:
                break
            expected = stop
        begins = descriptor.start if descriptor.header_start is None else descriptor.header_start
        witness = _witness(copy)
        if witness is not None:
            expected = min(expected, witness.end)
        elif gaps and gaps[-1].reason is Reason.DAMAGED and gaps[-1].stop == expected:
            # No frame reaches so far, and whether one ever did cannot be known.
            expected = gaps[-1].start
        if (header.start, expected + shift) != (begins, descriptor.end):
            copy.flaw = f"holds the offsets [{header.start}, {expected}) and is catalogued with others"
            self._add(copy, copy.flaw, METADATA)
            return False
        for gap in gaps:
            if gap.reason is Reason.DAMAGED:
                offsets = (gap.start + shift, gap.stop + shift)
                self._add(copy, SEALED_SO, EXPORTED_SO, offsets=offsets, severity=Severity.NOTE)
        return True

    def _index(self, copy: ObjectCopy, stat: Stat | None, where: str) -> None:
        expected = copy.descriptor.index_bytes
        copy.index_exists = stat is not None
        if stat is None:
            flaw, step = "the index object is missing", REPAIR
        elif copy.stored_index is None:
            flaw, step = f"has {stat.size} bytes, catalogued with {expected}" if stat.size != expected else "", REPAIR
        else:
            flaw, step = _index_flaw(copy, copy.stored_index)
        copy.index_intact = not flaw or step == UPGRADE
        if flaw:
            self._add(copy, flaw, step, where=where)

    def _add(
        self,
        copy: ObjectCopy,
        what: str,
        step: str = RESTORE_OBJECT,
        *,
        where: str = "",
        byte: int | None = None,
        offsets: tuple[int, int] | None = None,
        severity: Severity = Severity.ERROR,
    ) -> None:
        self._report.add(
            severity,
            what,
            step,
            shard=self._shard,
            file=where or copy.where,
            byte=byte,
            offsets=offsets or copy.offsets,
        )


def catalogued_index(content: bytes, descriptor: SegmentDescriptor) -> bytes:
    """The index of a segment in the form that it was catalogued in: with look-ups, or as it was before there were any.

    The catalog knows its length, so that the one cannot stand for the other.
    """
    if len(content) == descriptor.index_bytes:
        return content
    plain = without_lookups(content)
    return plain if len(plain) == descriptor.index_bytes else content


def _index_flaw(copy: ObjectCopy, stored: bytes) -> tuple[str, str]:
    """What is wrong with the index object, if anything is, and what to do about it."""
    try:
        decoded = index_format.decode_index(stored)
    except Corrupt as error:
        return str(error), REPAIR
    if decoded is Verdict.NEWER:
        return "was written by a newer version", UPGRADE
    if isinstance(decoded, Verdict):
        return f"its footer is {decoded.value}", REPAIR
    if copy.index and stored != copy.index:
        return "the index object does not fit its segment", REPAIR
    fits = decoded[0].content_hash.hex() == copy.descriptor.content_hash
    return "" if fits else "the index object is of another segment", REPAIR


def _witness(copy: ObjectCopy) -> index_format.Footer | None:
    """What a sound index object says of its segment."""
    footer = index_format.decode_footer(copy.stored_index or b"")
    if isinstance(footer, Verdict) or footer.content_hash.hex() != copy.descriptor.content_hash:
        return None
    return footer
