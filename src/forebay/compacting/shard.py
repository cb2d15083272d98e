"""One shard under compaction: what is to be done, as of now, and how what was done takes effect.

The work between the two may be done anywhere. The compactor holds the lease of the shard; every swap compares it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec

from forebay.catalog import Frontier, ShardCatalog
from forebay.catalog.removals import RecordedRemovals
from forebay.compacting.merging import Merge, SegmentTarget, Sources, dead_in
from forebay.compacting.planning import CatalogEntry, Known, Rewrite, Rules, plan, plan_chosen
from forebay.compacting.swapping import swap
from forebay.errors import Unavailable
from forebay.format.control.offsets import OffsetSet
from forebay.format.metadata.descriptor import DescriptorKind, LoadStatus, SegmentDescriptor
from forebay.metadata import Compare


class CompactionOutlook(NamedTuple):
    """A shard's history at one moment, and what is worth rewriting in it."""

    rewrites: list[Rewrite]
    ended: OffsetSet
    """Deleted and superseded records."""
    earliest: int
    segments: int
    records: int
    bytes: int
    born: int | None
    """The start of the newest segment that was born in the log."""


class ShardCompaction:
    """Compacts one shard. For one thread at a time."""

    def __init__(
        self,
        catalog: ShardCatalog,
        topic_id: str,
        sources: Sources,
        *,
        readable: Callable[[SegmentDescriptor], bool],
        manifest: Callable[[SegmentDescriptor], Sequence[SegmentDescriptor]],
    ) -> None:
        self._catalog = catalog
        self._topic_id = topic_id
        self._sources = sources
        self._readable = readable
        self._manifest = manifest
        self._rows: dict[str, OffsetSet] = {}

    @property
    def lease_key(self) -> str:
        """What the process that compacts must hold."""
        return self._catalog.keys.compactor

    def segments(self) -> list[SegmentDescriptor]:
        """Everything that can be read of the shard's history, in order, with what ended in it."""
        seen = self._catalog.frontier()
        pieces = [piece for piece in self._catalog.descriptors() if piece.gap is None]
        loads = self._loads(pieces, seen)
        committed = LoadStatus.COMMITTED
        return [piece for piece in pieces if piece.load_id is None or loads[piece.load_id] is committed]

    def ended(self) -> tuple[OffsetSet, int]:
        """What was deleted, and the first offset that was not ended by a floor."""
        stored = self._catalog.state()
        if stored is None:
            return OffsetSet(), 0  # it has had no owner yet
        if stored.state.incarnation != self._topic_id:
            raise Unavailable(f"{self._catalog.keys} is not a shard of this topic any more")
        deleted = RecordedRemovals(self._catalog).deleted() if stored.state.deletes else OffsetSet()
        return deleted, stored.state.earliest

    def outlook(self, rules: Rules, now_ms: int, superseded: OffsetSet | None = None) -> CompactionOutlook:
        """What is to be done."""
        return self._outlook(lambda entries, known: plan(entries, rules, known), now_ms, superseded)

    def outlook_of(
        self, is_chosen: Callable[[SegmentDescriptor], bool], target_bytes: int, now_ms: int
    ) -> CompactionOutlook:
        """The rewriting of the chosen segments alone, as far as they can be rewritten."""
        return self._outlook(lambda entries, known: plan_chosen(entries, target_bytes, known, is_chosen), now_ms)

    def _outlook(
        self,
        planned: Callable[[Sequence[CatalogEntry], Known], list[Rewrite]],
        now_ms: int,
        superseded: OffsetSet | None = None,
    ) -> CompactionOutlook:
        """The catalog is read before the deletes: so no delete is missed that was there then."""
        seen = self._catalog.frontier()
        pieces = self._catalog.pieces()
        deleted, earliest = self.ended()
        ended = deleted if superseded is None else deleted | superseded
        entries = [CatalogEntry(piece, self._opened(piece.descriptor)) for piece in pieces]
        inner = [descriptor for entry in entries for descriptor in entry.opened]
        dead: dict[str, int] = {}

        def dead_of(descriptor: SegmentDescriptor) -> int:
            if descriptor.object_key not in dead:
                dead[descriptor.object_key] = dead_in(descriptor, ended, earliest, self._held)
            return dead[descriptor.object_key]

        known = Known(now_ms, self._loads(inner, seen), dead_of, earliest, self._readable)
        return CompactionOutlook(
            planned(entries, known),
            ended,
            earliest,
            segments=sum(piece.gap is None for piece in inner),
            records=sum(piece.records for piece in inner),
            bytes=sum(piece.bytes for piece in inner),
            born=next((piece.start for piece in reversed(inner) if piece.is_born), None),
        )

    def merges(self, rewrite: Rewrite, outlook: CompactionOutlook) -> list[Merge]:
        """What has to be written for a rewrite, in order."""
        partition = self._catalog.keys.partition
        return [
            Merge(
                topic_id=self._topic_id,
                partition=partition,
                sources=part.sources,
                earliest=outlook.earliest,
                window_of=outlook.born,
            )
            for part in rewrite.parts
            if part.why
        ]

    def finish(self, rewrite: Rewrite, made: Sequence[SegmentDescriptor], target: SegmentTarget, held: Compare) -> bool:
        """Put what was made in the place of what it was made from; false if that has changed meanwhile.

        `held` says that the lease is still the one under which it was made. What was replaced is kept for a grace
        from the time of `target` on.
        """
        coming = iter(made)
        new: list[SegmentDescriptor] = []
        for part in rewrite.parts:
            if part.why:
                new.append(msgspec.structs.replace(next(coming), created_at=target.created_at))
            else:
                new += [_without_load(source) for source in part.sources]
        return swap(
            self._catalog,
            rewrite.pieces,
            new,
            target,
            partition=self._catalog.keys.partition,
            made={piece.object_key for piece in made},
            held=[held],
        )

    def _held(self, descriptor: SegmentDescriptor) -> OffsetSet:
        """The offsets that have a record in a segment, which never changes."""
        key = descriptor.object_key
        if key not in self._rows:
            with closing(self._sources.segment(descriptor)) as segment:
                self._rows[key] = segment.held(descriptor.start, descriptor.end)
        return self._rows[key]

    def _opened(self, descriptor: SegmentDescriptor) -> Sequence[SegmentDescriptor]:
        if descriptor.kind is DescriptorKind.MANIFEST:
            return self._manifest(descriptor)
        return [descriptor]

    def _loads(self, pieces: Sequence[SegmentDescriptor], seen: Frontier) -> dict[str, LoadStatus]:
        """How far each load is that these pieces, read after `seen`, came by."""
        named = {piece.load_id for piece in pieces if piece.load_id is not None}
        committed = self._catalog.committed_loads(named, seen) if len(named) > 1 else set()
        others = {load_id: self._catalog.load_status(load_id) for load_id in named - committed}
        return {**dict.fromkeys(committed, LoadStatus.COMMITTED), **others}


def _without_load(source: SegmentDescriptor) -> SegmentDescriptor:
    """A segment of a load that is committed counts like any other."""
    return msgspec.structs.replace(source, load_id=None)
