"""What a task does: read its offsets from wherever they lie and hand them on as Arrow, exactly those.

Runs on executors, in a process of its own. Every frame is checked before a record of it is shown. Offsets
without a record must be explained, by the log, by history or by what was deleted before the read was planned, else
the task fails: a row that is missing is never silent. Knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from forebay.blobs import BlobChanged, BlobMissing
from forebay.errors import Corrupt, DataLoss, Unavailable
from forebay.format.frame.batch import Batch, batch_of, merge
from forebay.format.metadata.vectors import live_mask
from forebay.pages import Page
from forebay.reading import in_order
from forebay.records import Gap, Reason
from forebay.sealed import SealedSegment
from forebay.spark.place.reading import ReadPlace, opened_to_read
from forebay.spark.reading.columns import record_batch, stored_batch, stored_columns
from forebay.spark.reading.filters import Filters
from forebay.spark.reading.pieces import PAGE_BYTES, PieceReader
from forebay.spark.reading.snapshot import Part, ScanPiece, Split

logger = logging.getLogger(__name__)

T = TypeVar("T")

OnMissing: TypeAlias = Callable[[int], None]

ROWS_ENOUGH: Final = 2048
"""Smaller batches are put together: each one costs Spark a fixed price."""
WAIT_SECONDS: Final = 10.0
"""How long an owner that has just come may take to publish what was there before."""
_ENDED: Final = (Reason.DELETED, Reason.CAP, Reason.TTL)
"""Why records that were there are not any more, without any fault."""


def read_split(split: Split, on_missing: OnMissing | None = None) -> Iterator[pa.RecordBatch]:
    """The records of the split, part after part. `DataLoss` names what cannot be read.

    A split that goes on without them has `on_missing` called with how many offsets of history they are, as far as
    history does not say already that they are lost.
    """
    with opened_to_read(split.location, {part.topic_id: part.topic for part in split.parts}) as found:
        for part in split.parts:
            yield from _PartRead(found, split, part, on_missing).batches()


class _PartRead:
    """One part on its way: what was seen of it, and what is missing for a reason."""

    def __init__(self, found: ReadPlace, split: Split, part: Part, on_missing: OnMissing | None) -> None:
        self._split = split
        self._part = part
        self._on_missing = on_missing
        self._shown_rows = 0
        self._left_out = 0
        """Records that ended before this was planned, or that the filters do not let through."""
        self._explained = 0
        """Offsets without a record, and those that were not looked at for the filters' sake."""
        self._seen: Counter[int] = Counter()
        """Records by the start of the piece that they came from."""
        self._flawed: set[int] = set()
        self._found = found
        self._reader = PieceReader(found, part.shard, part.pieces, str(part), self._again)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Every record that passes."""
        with contextlib.closing(self._reader):
            for batch in joined(self._passing()):
                self._shown_rows += batch.num_rows
                yield batch
        self._check()

    def _again(self, start: int, stop: int) -> Sequence[ScanPiece]:
        """Where offsets lie that are not where it was planned: few tasks ask, and only they load what looks."""
        from forebay.spark.reading.view import look_again

        part = self._part
        return look_again(self._found, part.topic_id, part.topic, part.partition, start, stop)

    def _passing(self) -> Iterator[pa.RecordBatch | None]:
        part, at = self._part, self._part.start
        for run in wanted_runs(self._reader, part, self._split.filters):
            self._explained += run.start - at
            assert run.start >= at, "runs come in order"
            yield from self._columnar(run) if run.is_columnar else self._framed(run)
            at = run.stop
        self._explained += part.stop - at

    def _framed(self, run: OffsetRun) -> Iterator[pa.RecordBatch | None]:
        return (self._shown(batch) for batch in coalesced(self._records(run)))

    def _columnar(self, run: OffsetRun) -> Iterator[pa.RecordBatch | None]:
        """What passes of a Parquet segment: its columns are handed on as they are, a row group at a time."""
        start, stop = run.start, run.stop
        piece = self._reader.piece_at(start)
        at = start
        if piece is None or piece.stop < stop or piece.start in self._reader.later:
            # Another than was planned with: what is missing in it is reported page by page.
            yield from self._framed(run)
            return
        from forebay.columnar import ParquetSegment  # it takes a third of the start of a task that reads frames alone

        try:
            segment = self._reader.segment(piece)
            assert isinstance(segment, ParquetSegment)
            for table in segment.tables(start, stop, stored_columns(self._split.columns, self._split.filters)):
                end = int(table.column("offset")[-1].as_py()) + 1
                self._note_gaps(piece, segment.index().gaps, at, end, table.num_rows)
                at = end
                yield self._table_shown(table)
            self._note_gaps(piece, segment.index().gaps, at, stop, 0)
        except (Corrupt, BlobMissing, BlobChanged, FileNotFoundError) as error:
            if isinstance(error, DataLoss):
                raise
            # Reading page by page reports what is damaged, and finds what lies elsewhere by now.
            yield from self._framed(run._replace(start=at))

    def _note_gaps(self, piece: ScanPiece, gaps: Sequence[Gap], start: int, stop: int, rows: int) -> None:
        """Account for `[start, stop)` of a Parquet segment, which has so many rows of it."""
        named = [gap._replace(start=max(gap.start, start), stop=min(gap.stop, stop)) for gap in sorted(gaps)]
        named = [gap for gap in named if gap.start < gap.stop]
        for gap in named:
            self._missing(gap, piece)
        self._seen[piece.start] += rows
        self._explained += stop - start - rows - sum(gap.stop - gap.start for gap in named)

    def _table_shown(self, table: pa.Table) -> pa.RecordBatch | None:
        split, part = self._split, self._part
        (rows,) = table.combine_chunks().to_batches()
        mask = split.filters.mask_of(rows)
        offsets = rows.column("offset").to_numpy()
        first, last = int(offsets[0]), int(offsets[-1]) + 1
        if part.deleted.count_in(first, last):
            live = live_mask(part.deleted, first, last - first)[offsets - first]
            mask = live if mask is None else live & mask
        if mask is not None:
            self._left_out += rows.num_rows - int(np.count_nonzero(mask))
            if not mask.any():
                return None
        shown = stored_batch(rows, split.columns, topic=part.topic, partition=part.partition)
        return shown if mask is None else shown.filter(pa.array(mask))

    def _records(self, run: OffsetRun) -> Iterator[Batch]:
        """Everything stored in the run; what ended is in it."""
        at = run.start
        while at < run.stop:
            page = self._page(at, run)
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

    def _page(self, at: int, run: OffsetRun) -> Page:
        page = self._reader.read(at, run.bytes)
        if page.next == at:
            # As when its owner has just come and has not published yet.
            if not self._reader.wait(at, WAIT_SECONDS):
                raise Unavailable(
                    f"{self._part} can be read up to {at} now, and up to {run.stop} when this read was planned: its "
                    "owner is starting, or its files went; try again, or load it again"
                )
            page = self._reader.read(at, run.bytes)
        return page.clipped(run.stop)

    def _missing(self, gap: Gap, piece: ScanPiece) -> None:
        """Take note of offsets without a record; fail for those that had one, unless asked to go on."""
        part = self._part
        self._explained += gap.stop - gap.start
        unexplained = gap.stop - gap.start - part.deleted.count_in(gap.start, gap.stop)
        if gap.reason is not Reason.DELETED:
            self._flawed.add(piece.start)
        if not unexplained or gap.reason is Reason.SKIPPED:
            return
        if gap.reason in _ENDED and piece.start in self._reader.later:
            self._ended_since(gap, unexplained)
            return
        if gap.reason is Reason.DELETED:
            return
        what = f"{part}: offsets {gap} cannot be read"
        is_loss = part.is_durable or gap.reason is not Reason.LOST
        if is_loss and self._split.fail_on_data_loss:
            raise DataLoss(
                f'{what}: set failOnDataLoss to false to go on without them; "forebay verify" says more',
                shard=part,
                start=gap.start,
                stop=gap.stop,
                reason=gap.reason.name.lower(),
            )
        why = "failOnDataLoss is false" if is_loss else "records of its durability class may go with their process"
        logger.warning("%s: %d offsets skipped, since %s", what, unexplained, why)
        if self._on_missing is not None and piece.descriptor is not None and not self._is_named(gap, piece):
            self._on_missing(unexplained)

    def _is_named(self, gap: Gap, piece: ScanPiece) -> bool:
        """Whether history says that these offsets have no record: its catalog, or the index of the segment."""
        if piece.gap is not None:
            return True
        try:
            segment = self._reader.segment(piece)
            gaps = segment.index().gaps if segment is not None else ()
        except (Corrupt, BlobMissing, BlobChanged, FileNotFoundError):
            return False
        return any(named.start <= gap.start and gap.stop <= named.stop for named in gaps)

    def _ended_since(self, gap: Gap, count: int) -> None:
        """Take note of records that were there when this was planned; fail for them, unless asked to go on."""
        part = self._part
        what = f"{part}: records of [{gap.start}, {gap.stop}) went since this was loaded"
        how = "were deleted" if gap.reason is Reason.DELETED else f"were evicted ({gap.reason.name.lower()})"
        if self._split.fail_on_data_loss:
            raise Unavailable(
                f"{what}: they {how}; load it again, or set failOnDataLoss to false to go on without them"
            )
        logger.warning("%s: they %s; %d offsets skipped, since failOnDataLoss is false", what, how, count)
        if self._on_missing is not None:
            self._on_missing(count)

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
                f'gaps do not make up the offsets [{part.start}, {part.stop}): run "forebay verify"'
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


def coalesced(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same records in fewer batches: consecutive small ones become one."""
    return map(_together, _grouped(batches, lambda batch: batch.count, lambda before, batch: batch.base == before.end))


def _together(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return batch_of(merge(batches), base=first.base, epoch=first.epoch, appended_at=first.appended_at)


def joined(batches: Iterable[pa.RecordBatch | None]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer record batches: small ones that follow each other become one."""
    there = (batch for batch in batches if batch is not None)
    groups = _grouped(there, lambda batch: batch.num_rows, lambda before, batch: True)
    # One alone is handed on as it is: to put it together would copy it.
    return (group[0] if len(group) == 1 else pa.concat_batches(group) for group in groups)


def _grouped(
    batches: Iterable[T], rows_of: Callable[[T], int], goes_on: Callable[[T, T], bool]
) -> Iterator[Sequence[T]]:
    """Large batches alone, and small ones together as long as each goes on where the one before it ends."""
    small: list[T] = []
    rows = 0
    for batch in batches:
        count = rows_of(batch)
        if small and (count >= ROWS_ENOUGH or rows >= ROWS_ENOUGH or not goes_on(small[-1], batch)):
            yield small
            small, rows = [], 0
        if count >= ROWS_ENOUGH:
            yield [batch]
        else:
            small.append(batch)
            rows += count
    if small:
        yield small
