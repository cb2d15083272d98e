"""Which segments of a shard's history become which. Pure: reads no clock and no store.

A plan is made of rewrites. Each takes whole pieces of the catalog that follow each other, and says which segment is
made of which. What is large enough and holds nothing that ended is left alone, so that a second run over the same
history finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from forebay.catalog.shard import Piece
from forebay.format.metadata.descriptor import DescriptorKind, LoadStatus, SegmentDescriptor
from forebay.format.parquet.file import TIME_MAX

MIB = 1024 * 1024
DOMINANT = 4
"""A segment so many times as large as all that would be added to it is not written again for that."""
RECORDS_ENDED = "records in it ended"
SEGMENTS = (DescriptorKind.FRAMES, DescriptorKind.PARQUET)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """When segments are worth rewriting.

    `target_bytes` is how much one new segment is made of, counted in frames; `segments_min` how many small ones must
    be there to be put together; `settle_ms` how old they must be, at least. A segment in which more than `dead_share`
    of the records ended is rewritten by itself.
    """

    target_bytes: int = 256 * MIB
    segments_min: int = 4
    settle_ms: int = 60_000
    dead_share: float = 0.0


class CatalogEntry(NamedTuple):
    """A piece of the catalog and what it stands for: itself, or what its manifest lists."""

    piece: Piece
    opened: Sequence[SegmentDescriptor]


class Known(NamedTuple):
    """What else a plan depends on."""

    now_ms: int
    loads: Mapping[str, LoadStatus]
    dead: Callable[[SegmentDescriptor], int]
    """How many records of a segment ended, as far as that counts."""
    earliest: int = 0
    readable: Callable[[SegmentDescriptor], bool] = lambda descriptor: True


class PlannedRun(NamedTuple):
    """Consecutive segments and gaps: made into one if `why` says so, else left as they are."""

    sources: tuple[SegmentDescriptor, ...]
    why: str = ""

    @property
    def bytes(self) -> int:
        """What has to be read for it."""
        return sum(source.bytes for source in self.sources) if self.why else 0


class Rewrite(NamedTuple):
    """Pieces of the catalog in whose place something new is put, all at once."""

    pieces: tuple[Piece, ...]
    parts: tuple[PlannedRun, ...]

    @property
    def start(self) -> int:
        return self.pieces[0].descriptor.start

    @property
    def end(self) -> int:
        return self.pieces[-1].descriptor.end


def weight(descriptor: SegmentDescriptor) -> int:
    """How much a segment counts for, as bytes of frames."""
    return descriptor.source_bytes or descriptor.bytes


def plan(entries: Iterable[CatalogEntry], rules: Rules, known: Known) -> list[Rewrite]:
    """What is worth rewriting, in the order of offsets."""
    found: list[Rewrite] = []
    for run in _runs(entries, rules, known):
        if len(run) == 1 and run[0].piece.descriptor.kind is DescriptorKind.MANIFEST:
            parts = tuple(_parts(run[0].opened, rules, known))
            if any(part.why for part in parts):
                found.append(Rewrite((run[0].piece,), parts))
            continue
        place = 0
        for part in _parts([entry.piece.descriptor for entry in run], rules, known):
            taken = run[place : place + len(part.sources)]
            place += len(part.sources)
            if part.why:
                found.append(Rewrite(tuple(entry.piece for entry in taken), (part,)))
    return found


def plan_chosen(
    entries: Iterable[CatalogEntry], target_bytes: int, known: Known, is_chosen: Callable[[SegmentDescriptor], bool]
) -> list[Rewrite]:
    """The rewrites of exactly the chosen segments, whatever their size and age; neighbours become one segment.

    For records that must leave their bytes now. Segments of a load that is not committed, and those with times that
    Parquet cannot hold, stay as they are.
    """
    found: list[Rewrite] = []
    run: list[CatalogEntry] = []
    size = 0
    for entry in entries:
        chosen = [
            descriptor for descriptor in entry.opened if _may_rewrite(descriptor, known) and is_chosen(descriptor)
        ]
        descriptor = entry.piece.descriptor
        is_manifest = descriptor.kind is DescriptorKind.MANIFEST
        if run and (is_manifest or not chosen or size >= target_bytes):
            found.append(_together(run))
            run, size = [], 0
        if is_manifest and chosen:
            parts = (PlannedRun((inner,), RECORDS_ENDED if inner in chosen else "") for inner in entry.opened)
            found.append(Rewrite((entry.piece,), tuple(parts)))
        elif chosen:
            run.append(entry)
            size += weight(descriptor)
    return [*found, _together(run)] if run else found


def _together(run: Sequence[CatalogEntry]) -> Rewrite:
    pieces = tuple(entry.piece for entry in run)
    return Rewrite(pieces, (PlannedRun(tuple(piece.descriptor for piece in pieces), RECORDS_ENDED),))


def _runs(entries: Iterable[CatalogEntry], rules: Rules, known: Known) -> Iterator[list[CatalogEntry]]:
    """Entries that follow each other and may be touched; a manifest is a run of its own."""
    run: list[CatalogEntry] = []
    for entry in entries:
        is_manifest = entry.piece.descriptor.kind is DescriptorKind.MANIFEST
        may = all(_may_touch(descriptor, rules, known) for descriptor in (entry.piece.descriptor, *entry.opened))
        if not may or is_manifest:
            if run:
                yield run
            run = []
        if may and is_manifest:
            yield [entry]
        elif may:
            run.append(entry)
    if run:
        yield run


def _may_touch(descriptor: SegmentDescriptor, rules: Rules, known: Known) -> bool:
    if descriptor.end <= known.earliest or descriptor.created_at > known.now_ms - rules.settle_ms:
        return False
    return _may_rewrite(descriptor, known)


def _may_rewrite(descriptor: SegmentDescriptor, known: Known) -> bool:
    load = descriptor.load_id
    if load is not None and known.loads.get(load) is not LoadStatus.COMMITTED:
        return False
    return fits_parquet(descriptor) and (descriptor.kind not in SEGMENTS or known.readable(descriptor))


def fits_parquet(descriptor: SegmentDescriptor) -> bool:
    """Whether all times of a segment are such that Parquet can hold them; others stay in frames."""
    return descriptor.time_min >= -TIME_MAX and descriptor.time_max <= TIME_MAX


def _parts(descriptors: Sequence[SegmentDescriptor], rules: Rules, known: Known) -> Iterator[PlannedRun]:
    """The same descriptors, cut into parts."""
    waiting: list[SegmentDescriptor] = []
    size = 0
    for descriptor in descriptors:
        if _is_done(descriptor, rules, known):
            yield from _judged(waiting, rules, known)
            waiting, size = [], 0
            yield PlannedRun((descriptor,))
            continue
        waiting.append(descriptor)
        size += weight(descriptor)
        if size >= rules.target_bytes:
            yield from _judged(waiting, rules, known)
            waiting, size = [], 0
    yield from _judged(waiting, rules, known)


def _is_done(descriptor: SegmentDescriptor, rules: Rules, known: Known) -> bool:
    """Whether a segment is large enough, and as it should be."""
    is_large = weight(descriptor) >= rules.target_bytes
    return descriptor.kind is DescriptorKind.PARQUET and is_large and not _is_dirty(descriptor, rules, known)


def _is_dirty(descriptor: SegmentDescriptor, rules: Rules, known: Known) -> bool:
    if descriptor.kind not in SEGMENTS:
        return False
    dead = known.dead(descriptor)
    return dead > rules.dead_share * descriptor.records


def _judged(waiting: Sequence[SegmentDescriptor], rules: Rules, known: Known) -> Iterator[PlannedRun]:
    """One part if it is worth it; large segments in front, to which little would be added, are left out of it."""
    rest = list(waiting)
    while len(rest) > 1 and not _is_dirty(rest[0], rules, known):
        if rest[0].kind is DescriptorKind.GAP or weight(rest[0]) <= DOMINANT * sum(map(weight, rest[1:])):
            break
        yield PlannedRun((rest.pop(0),))
    while rest and rest[0].kind is DescriptorKind.GAP:
        yield PlannedRun((rest.pop(0),))
    if rest:
        yield PlannedRun(tuple(rest), _why(rest, rules, known))


def _why(sources: Sequence[SegmentDescriptor], rules: Rules, known: Known) -> str:
    segments = [source for source in sources if source.kind in SEGMENTS]
    if any(_is_dirty(segment, rules, known) for segment in segments):
        return RECORDS_ENDED
    if sum(map(weight, segments)) >= rules.target_bytes:
        # One large segment in Parquet alone never comes so far.
        return "large enough for a segment"
    is_alone = len(segments) == 1 and segments[0].kind is DescriptorKind.PARQUET
    if len(segments) >= rules.segments_min and not is_alone:
        return f"{len(segments)} small segments"
    return ""
