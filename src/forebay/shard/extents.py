"""Where does a shard hold records, and where only holes? Asked by whoever must count what a delete ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from forebay.catalog import ShardCatalog
from forebay.format.descriptor import DescriptorKind, LoadStatus, SegmentDescriptor
from forebay.format.offsets import OffsetSet
from forebay.records import Gap, Reason
from forebay.shard.places import Places
from forebay.shard.tiers import ELSEWHERE
from forebay.wal.files import FileList, LogFile, SealedFile

EMPTY = OffsetSet()


class Extents:
    """The offsets of one shard that stand for records. Reads indexes at the most, and only where there are holes."""

    def __init__(self, files: FileList, catalog: ShardCatalog | None = None, places: Places | None = None) -> None:
        self._files = files
        self._catalog = catalog
        self._places = places

    def within(self, start: int, stop: int) -> OffsetSet:
        """Which offsets of `[start, stop)` stand for records, deleted ones included.

        Damaged ones count as if they did: what is deleted there stays so if the bytes are restored.
        """
        found = EMPTY
        begins = self._files.begins
        elsewhere = [] if begins is None or begins <= start else [(start, min(begins, stop))]
        if begins is None:
            elsewhere = [(start, stop)]
        for file in self._files.all:
            if file.previous_end >= stop or file.end <= start:
                continue
            gaps = _gaps_of(file)
            empty = [gap for gap in gaps if gap.reason is not Reason.DAMAGED]
            found |= _without(OffsetSet.of_range(max(file.start, start), min(file.end, stop)), empty)
            elsewhere += [(gap.start, gap.stop) for gap in gaps if gap.reason in ELSEWHERE]
        if self._catalog is not None and any(low < high for low, high in elsewhere):
            found |= self._in_history(self._catalog, elsewhere).clipped(start, stop)
        return found

    def _in_history(self, catalog: ShardCatalog, wanted: list[tuple[int, int]]) -> OffsetSet:
        found = EMPTY
        for piece in catalog.descriptors():
            if piece.kind is DescriptorKind.GAP or not any(
                low < piece.end and piece.start < high for low, high in wanted
            ):
                continue
            if piece.load_id is not None and catalog.load_status(piece.load_id) is not LoadStatus.COMMITTED:
                continue
            held = self._held(piece)
            for low, high in wanted:
                found |= held.clipped(low, high)
        return found

    def _held(self, piece: SegmentDescriptor) -> OffsetSet:
        if piece.records == piece.end - piece.start or self._places is None:
            return OffsetSet.of_range(piece.start, piece.end)
        with contextlib.closing(self._places.segment(piece)) as segment:
            held = segment.held(piece.start, piece.end)
            for gap in segment.index().gaps:
                if gap.reason is Reason.DAMAGED:
                    held |= OffsetSet.of_range(max(gap.start, piece.start), min(gap.stop, piece.end))
            return held


def _gaps_of(file: LogFile | SealedFile) -> list[Gap]:
    return file.index().gaps if isinstance(file, SealedFile) else list(file.gaps)


def _without(offsets: OffsetSet, gaps: Iterable[Gap]) -> OffsetSet:
    for gap in gaps:
        offsets -= OffsetSet.of_range(gap.start, gap.stop)
    return offsets
