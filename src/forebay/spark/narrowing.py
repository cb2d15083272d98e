"""Which offsets of a part must be looked at, as the indexes of its segments tell: the others cannot pass the filters.

Knows indexes and filters; reads no record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from forebay.blobs import BlobChanged, BlobMissing
from forebay.sealed import SealedSegment
from forebay.spark.filters import Filters
from forebay.spark.pieces import PieceReader
from forebay.spark.snapshot import Part


def wanted_runs(reader: PieceReader, part: Part, filters: Filters) -> Iterator[tuple[int, int]]:
    """The offsets of the part in which the filters may let something through, in order; holes are among them."""
    if not filters.narrows:
        yield part.start, part.stop
        return
    for piece in part.pieces:
        low, high = max(piece.start, part.start), min(piece.stop, part.stop)
        segment = None
        with contextlib.suppress(BlobMissing, BlobChanged, FileNotFoundError):
            segment = reader.segment(piece) if piece.gap is None else None
            if segment is not None:
                segment.index()
        yield from ((low, high),) if segment is None else _runs(segment, low, high, filters)


def _runs(segment: SealedSegment, low: int, high: int, filters: Filters) -> list[tuple[int, int]]:
    """The frames of `[low, high)` that may have what is sought, and the holes between frames."""
    entries, gaps = segment.index().entries, segment.index().gaps
    starts = entries["offset"]
    stops = starts + entries["count"]
    wanted = (stops > low) & (starts < high) & filters.may_match_frames(entries)
    if filters.by_postings and wanted.any():
        found = np.zeros(len(entries), dtype=np.bool_)
        for sought in filters.sought:
            for offsets in segment.find(sought.kind, sought.hash, low):
                if offsets[0] >= high:
                    break
                found[np.searchsorted(starts, offsets, side="right") - 1] = True
        wanted &= found
    places = np.flatnonzero(wanted).tolist()
    runs = [(int(starts[place]), int(stops[place])) for place in places]
    runs += [(gap.start, gap.stop) for gap in gaps]
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(
        (max(low, start), min(high, stop)) for start, stop in runs if stop > low and start < high
    ):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
