"""What a task does: read its offsets from wherever they lie and hand them on as Arrow, exactly those.

Runs on executors, in a process of its own. Every frame is checked before a record of it is shown. Offsets
without a record must be explained, by the log, by history or by what was deleted before the read was planned, else
the task fails: a row that is missing is never silent. Knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from forebay.blobs import BlobChanged, BlobMissing
from forebay.errors import Corrupt, DataLoss, Unavailable
from forebay.format.batch import Batch, batch_of, merge
from forebay.format.vectors import live_mask
from forebay.pages import Page
from forebay.reading import in_order
from forebay.records import Gap, Reason
from forebay.sealed import SealedSegment
from forebay.spark.columns import record_batch
from forebay.spark.filters import Filters
from forebay.spark.opening import Opened, opened
from forebay.spark.pieces import PAGE_BYTES, Piece, PieceReader
from forebay.spark.snapshot import Part, Split, look_again

logger = logging.getLogger(__name__)

ROWS_ENOUGH: Final = 2048
"""Frames of fewer records are put together: each record batch costs Spark a fixed price."""
WAIT_SECONDS: Final = 10.0
"""How long an owner that has just come may take to publish what was there before."""


def read_split(split: Split) -> Iterator[pa.RecordBatch]:
    """The records of the split, part after part. `DataLoss` names what cannot be read."""
    with opened(split.location) as found:
        for part in split.parts:
            yield from _PartRead(found, split, part).batches()


class _PartRead:
    """One part on its way: what was seen of it, and what is missing for a reason."""

    def __init__(self, found: Opened, split: Split, part: Part) -> None:
        self._split = split
        self._part = part
        self._shown_rows = 0
        self._left_out = 0
        """Records that ended before this was planned, or that the filters do not let through."""
        self._explained = 0
        """Offsets without a record, and those that were not looked at for the filters' sake."""
        self._seen: Counter[int] = Counter()
        """Records by the start of the piece that they came from."""
        self._flawed: set[int] = set()
        again = partial(look_again, found, part.topic_id, part.topic, part.partition)
        self._reader = PieceReader(found, part.shard, part.pieces, str(part), again)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Every record that passes."""
        with contextlib.closing(self._reader):
            for batch in joined(self._shown(batch) for batch in coalesced(self._records())):
                self._shown_rows += batch.num_rows
                yield batch
        self._check()

    def _records(self) -> Iterator[Batch]:
        """Everything stored in the part, as far as the filters may let it through; what ended is in it."""
        part, at = self._part, self._part.start
        for start, stop in wanted_runs(self._reader, part, self._split.filters):
            self._explained += start - at
            assert start >= at, "runs come in order"
            yield from self._run(start, stop)
            at = stop
        self._explained += part.stop - at

    def _run(self, start: int, stop: int) -> Iterator[Batch]:
        at = start
        while at < stop:
            page = self._page(at, stop)
            piece = self._reader.piece_at(at)
            assert piece is not None
            for found in in_order(page):
                first, last = (found.start, found.stop) if isinstance(found, Gap) else (found.base, found.end)
                if first != at:
                    raise Corrupt(f'{self._part}: the stream goes on at {first}, expected {at}: run "forebay verify"')
                if isinstance(found, Gap):
                    self._missing(found, piece)
                else:
                    self._seen[piece.start] += found.count
                    yield found
                at = last

    def _page(self, at: int, stop: int) -> Page:
        page = self._reader.read(at, PAGE_BYTES)
        if page.next == at:
            # As when its owner has just come and has not published yet.
            if not self._reader.wait(at, WAIT_SECONDS):
                raise Unavailable(
                    f"{self._part} can be read up to {at} now, and up to {stop} when this read was planned: its owner "
                    "is starting, or its files went; try again, or load it again"
                )
            page = self._reader.read(at, PAGE_BYTES)
        return page.clipped(stop)

    def _missing(self, gap: Gap, piece: Piece) -> None:
        """Take note of offsets without a record; fail for those that had one, unless told to go on."""
        part = self._part
        self._explained += gap.stop - gap.start
        unexplained = gap.stop - gap.start - part.deleted.count_in(gap.start, gap.stop)
        if gap.reason is Reason.DELETED:
            if piece.start in self._reader.later and unexplained:
                raise Unavailable(
                    f"{part}: records of [{gap.start}, {gap.stop}) went since this was loaded: load it again"
                )
            return
        self._flawed.add(piece.start)
        if not unexplained or gap.reason is Reason.SKIPPED:
            return
        what = f"{part}: offsets {gap} cannot be read"
        is_loss = part.is_durable or gap.reason is not Reason.LOST
        if is_loss and self._split.fail_on_data_loss:
            raise DataLoss(f'{what}: set failOnDataLoss to false to go on without them; "forebay verify" says more')
        why = "failOnDataLoss is false" if is_loss else "records of its durability class may go with their process"
        logger.warning("%s: %d offsets skipped, since %s", what, unexplained, why)

    def _shown(self, batch: Batch) -> pa.RecordBatch | None:
        """What passes of some records, as Spark wants it."""
        split, part = self._split, self._part
        mask = split.filters.mask(batch)
        if part.deleted.count_in(batch.base, batch.end):
            live = live_mask(part.deleted, batch.base, batch.count)
            mask = live if mask is None else live & mask
        if mask is not None:
            self._left_out += batch.count - int(np.count_nonzero(mask))
            if not mask.any():
                return None
        shown = record_batch(batch, split.columns, topic=part.topic, partition=part.partition)
        return shown if mask is None else shown.filter(pa.array(mask))

    def _check(self) -> None:
        """`Corrupt` unless every offset is accounted for, and every segment that was read whole had all its records."""
        part = self._part
        if self._shown_rows + self._left_out + self._explained != part.stop - part.start:
            raise Corrupt(
                f"{part}: {self._shown_rows} records, {self._left_out} that are left out and {self._explained} named "
                f'holes do not make up the offsets [{part.start}, {part.stop}): run "forebay verify"'
            )
        for piece in () if self._split.filters.conditions else part.pieces:
            found, count = piece.descriptor, self._seen[piece.start]
            is_whole = found is not None and (piece.start, piece.stop) == (found.start, found.end)
            if found is None or not is_whole or piece.start in self._flawed or self._reader.later:
                continue
            if part.start <= piece.start and piece.stop <= part.stop and count != found.records:
                raise Corrupt(
                    f"{part}: {found.object_key} gave {count} records, the catalog says {found.records}: "
                    'run "forebay verify"'
                )


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


def coalesced(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same records in fewer batches: consecutive small ones become one."""
    small: list[Batch] = []
    rows = 0
    for batch in batches:
        if small and (batch.count >= ROWS_ENOUGH or batch.base != small[-1].end or rows >= ROWS_ENOUGH):
            yield _together(small)
            small, rows = [], 0
        if batch.count >= ROWS_ENOUGH:
            yield batch
        else:
            small.append(batch)
            rows += batch.count
    if small:
        yield _together(small)


def _together(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return batch_of(merge(batches), base=first.base, epoch=first.epoch, appended_at=first.appended_at)


def joined(batches: Iterable[pa.RecordBatch | None]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer record batches: small ones that follow each other become one."""
    small: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if batch is None:
            continue
        if small and (batch.num_rows >= ROWS_ENOUGH or rows >= ROWS_ENOUGH):
            yield pa.concat_batches(small)
            small, rows = [], 0
        if batch.num_rows >= ROWS_ENOUGH:
            yield batch
        else:
            small.append(batch)
            rows += batch.num_rows
    if small:
        yield pa.concat_batches(small)
