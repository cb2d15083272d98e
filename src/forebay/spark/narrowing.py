"""Which offsets of a part must be looked at, as the indexes of its segments say: the others cannot pass the filters.

Knows indexes and filters; reads no record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from forebay.blobs import BlobChanged, BlobMissing
from forebay.sealed import SealedSegment
from forebay.spark.filters import Filters
from forebay.spark.pieces import PAGE_BYTES, PieceReader
from forebay.spark.snapshot import Part


class OffsetRun(NamedTuple):
    """Offsets `[start, stop)` to be looked at, in about so many bytes; `is_columnar` if a Parquet segment has them."""

    start: int
    stop: int
    bytes: int
    is_columnar: bool = False


def wanted_runs(reader: PieceReader, part: Part, filters: Filters) -> Iterator[OffsetRun]:
    """What of the part the filters may let through, in order; gaps are among it. None mixes frames and columns."""
    if not filters.narrows:
        yield from _everything(part)
        return
    for piece in part.pieces:
        low, high = max(piece.start, part.start), min(piece.stop, part.stop)
        runs = [OffsetRun(low, high, PAGE_BYTES)]
        # One that is gone is found where it lies now when it is read: all of it is looked at.
        with contextlib.suppress(BlobMissing, BlobChanged, FileNotFoundError):
            segment = reader.segment(piece) if piece.gap is None else None
            if segment is not None:
                found = _runs(segment, low, high, filters)
                runs = [run._replace(is_columnar=piece.is_columnar) for run in found]
        yield from runs


def _everything(part: Part) -> list[OffsetRun]:
    found: list[OffsetRun] = []
    for piece in part.pieces:
        low, high = max(piece.start, part.start), min(piece.stop, part.stop)
        if found and not found[-1].is_columnar and not piece.is_columnar:
            found[-1] = found[-1]._replace(stop=high)
        else:
            found.append(OffsetRun(low, high, PAGE_BYTES, piece.is_columnar))
    return found


def _runs(segment: SealedSegment, low: int, high: int, filters: Filters) -> list[OffsetRun]:
    """The frames of `[low, high)` that may have what is sought, and the gaps between frames."""
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
    runs = [OffsetRun(int(starts[place]), int(stops[place]), int(entries["length"][place])) for place in places]
    runs += [OffsetRun(gap.start, gap.stop, 0) for gap in gaps if gap.stop > low and gap.start < high]
    merged: list[OffsetRun] = []
    for run in sorted(runs):
        start, stop = max(low, run.start), min(high, run.stop)
        if merged and start <= merged[-1].stop:
            before = merged[-1]
            merged[-1] = OffsetRun(before.start, max(stop, before.stop), before.bytes + run.bytes)
        else:
            merged.append(OffsetRun(start, stop, run.bytes))
    return [run._replace(bytes=max(1, min(run.bytes, PAGE_BYTES))) for run in merged]
