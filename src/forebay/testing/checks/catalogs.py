"""The promises of catalogued history as functions: what the catalog says, held against stores and local files.

Every function yields `Violation`s named by invariant, as those of `invariants` do. They read bytes by
themselves, frame by frame, and so trust neither the reader of history nor an index.

I15 the catalog is contiguous, gaps named · I16 every catalogued object is there and decodes to exactly its range ·
I17 every retained record has an intact copy · I18 no reference before its object is complete, orphans are swept and
nothing else · I22 what was interrupted converges when repeated
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from forebay.blobs import BlobChanged, BlobMissing, BlobStore, Stat
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.checksum import content_hash, salted
from forebay.format.control.frames import decode_gap
from forebay.format.files.segment import HEADER_BYTES, SEGMENT_SUFFIX, decode_header
from forebay.format.frame.batch import decode
from forebay.format.frame.head import Kind, Verdict
from forebay.format.frame.resynchronisation import resync
from forebay.format.frame.scan import scan_frames
from forebay.format.metadata.descriptor import DescriptorKind, Phase, SegmentDescriptor, ShardState
from forebay.records import OFFSET_MAX, Reason
from forebay.sealed import FRAME_BYTES_LIMIT, SealedIndex, decoded_index
from forebay.testing.checks.history import ShardEvents
from forebay.testing.checks.invariants import Violation

Fetch: TypeAlias = Callable[[SegmentDescriptor, str], bytes | None]
"""What lies under a key in the store that the descriptor names; `None` if nothing does, or another object."""
Pieces: TypeAlias = Sequence[SegmentDescriptor]

WHOLE = 1 << 40
SEGMENTS = (DescriptorKind.FRAMES, DescriptorKind.PARQUET)


def from_blobs(store: BlobStore) -> Fetch:
    """Objects of a store, by the etag that was catalogued."""

    def fetch(piece: SegmentDescriptor, key: str) -> bytes | None:
        try:
            return store.get_range(key, 0, WHOLE, etag=piece.etag if key == piece.object_key else None)
        except (BlobMissing, BlobChanged):
            return None

    return fetch


def from_files(files: Mapping[str, bytes], root: str) -> Fetch:
    """Objects of a store that lie as files below `root`, for instance on what a crash left."""
    return lambda _, key: files.get(f"{root}/{key}")


def check_history(
    history: ShardEvents, pieces: Pieces, frontier: int, fetch: Fetch, files: Mapping[str, bytes], *, floor: int = 0
) -> list[Violation]:
    """Every promise about a history at rest: I15 to I17. `files` are those of the shard's local logs."""
    return [
        *catalog_is_contiguous(pieces, frontier, floor=floor),
        *objects_are_whole(pieces, fetch),
        *every_record_has_a_copy(history, pieces, fetch, files, floor=floor),
    ]


def catalog_is_contiguous(pieces: Pieces, frontier: int, *, floor: int = 0) -> Iterator[Violation]:
    """I15: from the floor to the frontier every offset is covered once, in order, and each gap says why."""
    expected = min(floor, pieces[0].start) if pieces else floor
    for piece in pieces:
        if piece.start != expected:
            kind = "nothing covers" if piece.start > expected else "covered twice:"
            yield Violation("I15", f"{kind} [{min(expected, piece.start)}, {max(expected, piece.start)})")
        if piece.end <= piece.start:
            yield Violation("I15", f"the piece at {piece.start} ends at {piece.end}")
        if piece.kind is DescriptorKind.GAP and piece.reason not in list(Reason):
            yield Violation("I15", f"the gap [{piece.start}, {piece.end}) does not say why it is there")
        expected = piece.end
    if expected != frontier:
        yield Violation("I15", f"the pieces end at {expected}, the frontier is {frontier}")


def objects_are_whole(pieces: Pieces, fetch: Fetch) -> Iterator[Violation]:
    """I16: each object is there with its index, has the catalogued size and hash, and decodes to exactly its range."""
    for piece in pieces:
        if piece.kind in SEGMENTS:
            try:
                flaw = _flaw_of(piece, fetch)
            except (Corrupt, UnsupportedFormat) as error:
                flaw = str(error)
            if flaw is not None:
                yield Violation("I16", f"{piece.object_key} of [{piece.start}, {piece.end}): {flaw}")


def every_record_has_a_copy(
    history: ShardEvents, pieces: Pieces, fetch: Fetch, files: Mapping[str, bytes], *, floor: int = 0
) -> Iterator[Violation]:
    """I17: whatever must survive is in a local log file or in a catalogued object, as it was acknowledged."""
    contents = [content for name, content in files.items() if name.endswith(SEGMENT_SUFFIX)]
    for piece in pieces:
        if piece.kind is DescriptorKind.FRAMES:
            content = fetch(piece, piece.object_key)
            if content is not None and content_hash([content]).hex() == piece.content_hash:
                contents.append(content)
    copies = {copy for content in contents for copy in frames_of(content).records}
    copies |= {copy for piece in pieces if piece.kind is DescriptorKind.PARQUET for copy in _rows_of(piece, fetch)}
    for append in history.acked:
        for offset, value in append.records:
            if history.must_survive(append) and offset >= floor and (offset, value) not in copies:
                yield Violation("I17", f"no copy is left of {value!r}, acknowledged at {offset}")


def references_are_complete(pieces: Pieces, fetch: Fetch) -> Iterator[Violation]:
    """I18, to be asked at the moment of each commit: what the catalog names from now on is there in full."""
    for piece in pieces:
        if piece.kind in SEGMENTS:
            for key, size in ((piece.object_key, piece.bytes), (piece.index_object, piece.index_bytes)):
                content = fetch(piece, key)
                if content is None or len(content) != size:
                    found = "nothing" if content is None else f"{len(content)} bytes"
                    yield Violation("I18", f"{key} was named when {found} of {size} were there")


def sweep_is_right(
    before: Iterable[Stat], after: Iterable[Stat], needed: Collection[str], *, older_than_ms: int
) -> Iterator[Violation]:
    """I18: a sweep took every orphan that was old enough, and nothing else."""
    kept = {stat.key for stat in after}
    for stat in before:
        is_due = stat.key not in needed and stat.modified_ms < older_than_ms
        if is_due and stat.key in kept:
            yield Violation("I18", f"the orphan {stat.key} was not swept")
        if not is_due and stat.key not in kept:
            why = "needed" if stat.key in needed else "in its time of grace"
            yield Violation("I18", f"{stat.key} was swept while {why}")


def keys_of(pieces: Pieces) -> set[str]:
    """The keys of all objects that these name, indexes included."""
    return {key for piece in pieces if piece.object_key for key in (piece.object_key, piece.index_object)}


class Ending(NamedTuple):
    """What is left when all is done: without the times, owners and versions that differ from run to run."""

    pieces: tuple[SegmentDescriptor, ...]
    objects: dict[str, bytes]
    phase: Phase | None = None
    next_offset: int = 0


def ending_of(pieces: Pieces, objects: Mapping[str, bytes], state: ShardState | None = None) -> Ending:
    """The end of a run, to be compared with another's."""
    described = tuple(
        msgspec.structs.replace(piece, created_at=0, epoch=0, leader="", etag=None, object_version=None)
        for piece in pieces
    )
    hashes = {key: content_hash([content]) for key, content in objects.items()}
    if state is None:
        return Ending(described, hashes)
    return Ending(described, hashes, state.phase, state.next_offset)


def runs_converge(first: Ending, second: Ending) -> Iterator[Violation]:
    """I22: what was interrupted and repeated ends as if it had not been."""
    for name, one, other in zip(Ending._fields, first, second, strict=True):
        if one != other:
            yield Violation("I22", f"two runs end with different {name}: {one} and {other}")


class Frames(NamedTuple):
    """What the whole frames of one file say."""

    records: tuple[tuple[int, bytes | None], ...]
    ranges: tuple[tuple[int, int], ...]
    """Of each frame of records and each gap, in file order."""


@lru_cache(maxsize=1024)
def frames_of(content: bytes) -> Frames:
    """All whole frames of a segment; what is not whole is stepped over, as the log does where no record is missing."""
    header = decode_header(content[:HEADER_BYTES])
    if isinstance(header, Verdict):
        return Frames((), ())
    records: list[tuple[int, bytes | None]] = []
    ranges: list[tuple[int, int]] = []
    position: int | None = HEADER_BYTES
    while position is not None:
        scan = scan_frames(content, position, salted(header.salt), FRAME_BYTES_LIMIT)
        for head, place in zip(scan.heads, scan.positions, strict=True):
            if head.kind == Kind.DATA:
                batch = decode(content, place, head)
                ranges.append((batch.base, batch.end))
                records += enumerate(batch.values(), start=batch.base)
            elif head.kind == Kind.GAP:
                gap = decode_gap(content, place, head)
                ranges.append((gap.start, gap.stop))
        position = resync(content, scan.stop, salted(header.salt), FRAME_BYTES_LIMIT, 0, OFFSET_MAX)
    return Frames(tuple(records), tuple(ranges))


def _flaw_of(piece: SegmentDescriptor, fetch: Fetch) -> str | None:
    content, raw_index = fetch(piece, piece.object_key), fetch(piece, piece.index_object)
    if content is None or raw_index is None:
        return f"{'the object' if content is None else 'its index'} is not there, or is another"
    if (len(content), len(raw_index)) != (piece.bytes, piece.index_bytes):
        return f"{len(content)} and {len(raw_index)} bytes, catalogued were {piece.bytes} and {piece.index_bytes}"
    if content_hash([content]).hex() != piece.content_hash:
        return "its bytes have another hash"
    if piece.kind is DescriptorKind.PARQUET:
        return _flaw_in_rows(piece, content, decoded_index(raw_index, piece.object_key))
    header = decode_header(content[:HEADER_BYTES])
    if isinstance(header, Verdict) or header.topic_id != piece.topic_id:
        return "its header is that of another topic, or none"
    return _flaw_inside(piece, content, decoded_index(raw_index, piece.object_key))


def _rows_of(piece: SegmentDescriptor, fetch: Fetch) -> list[tuple[int, bytes | None]]:
    content = fetch(piece, piece.object_key)
    if content is None or content_hash([content]).hex() != piece.content_hash:
        return []
    table = pq.read_table(pa.BufferReader(content), columns=["offset", "value"])
    return list(zip(table.column("offset").to_pylist(), table.column("value").to_pylist(), strict=True))


def _flaw_in_rows(piece: SegmentDescriptor, content: bytes, index: SealedIndex) -> str | None:
    offsets = pq.read_table(pa.BufferReader(content), columns=["offset"]).column("offset").to_pylist()
    if offsets != sorted(set(offsets)) or any(not piece.start <= offset < piece.end for offset in offsets):
        return "its rows are out of order, or not of its range"
    if len(offsets) != piece.records or index.footer.records != piece.records:
        return f"{len(offsets)} rows, catalogued were {piece.records}"
    spans = (index.footer.start, index.footer.end, index.footer.content_hash.hex())
    return None if spans == (piece.start, piece.end, piece.content_hash) else "its index is of another segment"


def _flaw_inside(piece: SegmentDescriptor, content: bytes, index: SealedIndex) -> str | None:
    frames = frames_of(content)
    if len(frames.records) != piece.records:
        return f"{len(frames.records)} records are whole, catalogued were {piece.records}"
    damaged = [(gap.start, gap.stop) for gap in index.gaps if gap.reason is Reason.DAMAGED]
    shift = piece.start - (piece.start if piece.header_start is None else piece.header_start)
    expected = piece.start
    for start, stop in sorted([*frames.ranges, *damaged]):
        if stop + shift <= piece.start:
            continue
        if start + shift != expected:
            return f"its frames go from {expected} to {start + shift}"
        expected = stop + shift
    return f"its frames end at {expected}" if expected != piece.end else None
