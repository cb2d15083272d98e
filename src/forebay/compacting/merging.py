"""Consecutive segments of a shard read as rows, and written as one Parquet segment without what ended.

Holds a frame or a row group at a time. What cannot be read whole is not compacted: `Corrupt`, and it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple, Protocol

import msgspec
import pyarrow as pa

from forebay.appends.producer_window import ProducerWindow
from forebay.blobs import BlobStore
from forebay.columnar import ParquetSegment, store_parquet
from forebay.errors import Corrupt
from forebay.format.control.frames import decode_state
from forebay.format.control.offsets import OffsetSet
from forebay.format.files.segment import COMPACTED, HEADER_BYTES, PARQUET_SUFFIX
from forebay.format.frame.batch import decode
from forebay.format.frame.encoding import runs_of
from forebay.format.frame.head import Kind
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.format.parquet.file import ParquetFacts, rows_of
from forebay.records import Gap, Reason
from forebay.sealed import ByteSource, SealedSegment, salt_crc_of
from forebay.topics import shard_id
from forebay.wal.scan import note_producers, note_state
from forebay.wal.walk import ControlFrame, DataFrames, Unreadable, walk


class Sources(Protocol):
    """Where segments are read."""

    def segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        """The segment that a descriptor names."""

    def source(self, descriptor: SegmentDescriptor) -> ByteSource:
        """Its bytes."""


class Merge(msgspec.Struct, frozen=True, kw_only=True):
    """Segments and gaps of one shard that follow each other, to be one segment."""

    topic_id: str
    partition: int
    sources: tuple[SegmentDescriptor, ...]
    earliest: int = 0
    """Records below it ended, too."""
    window_of: int | None = None
    """The start of the source that says which appends must be recognised as repeats: the newest born in the log."""

    @property
    def start(self) -> int:
        return self.sources[0].start

    @property
    def end(self) -> int:
        return self.sources[-1].end

    def key(self, token: str) -> str:
        """Where it is to lie; every attempt has a token of its own."""
        shard = shard_id(self.topic_id, self.partition)
        return f"{shard}/{COMPACTED}{self.start:020d}-{token}{PARQUET_SUFFIX}"


class SegmentTarget(NamedTuple):
    """Where a new segment is put, and what its descriptor says of that."""

    store: BlobStore
    name: str
    leader: str
    created_at: int


def merge(
    task: Merge, ended: OffsetSet, sources: Sources, target: SegmentTarget, *, token: str, window: ProducerWindow
) -> SegmentDescriptor:
    """Write the segments as one, without the records of `ended`; what the catalog will say of it.

    `window` is an empty one, as large as owners keep it. On return the object and its index are durable, checked, and
    named by no descriptor.
    """
    rows = MergedRows(task, ended, sources, window)
    stored = store_parquet(target.store, task.key(token), rows.tables(), rows.facts)
    return stored.descriptor(
        store=target.name, leader=target.leader, created_at=target.created_at, source_bytes=rows.source_bytes
    )


class MergedRows:
    """The rows of a merge, and what they say beside that."""

    def __init__(self, task: Merge, ended: OffsetSet, sources: Sources, window: ProducerWindow) -> None:
        self._task = task
        self._ended = ended
        self._sources = sources
        self._window = window
        self._gaps: list[Gap] = []
        self.source_bytes = 0

    def tables(self) -> Iterator[pa.Table]:
        """What stays, in order."""
        for source in self._task.sources:
            if source.gap is not None:
                if source.gap.reason is not Reason.DELETED:
                    self._gaps.append(source.gap)
                continue
            found = kept = 0
            for table in self._parquet(source) if source.kind is DescriptorKind.PARQUET else self._frames(source):
                found += table.num_rows
                living = self._living(table)
                kept += living.num_rows
                if living.num_rows:
                    yield living
            if found != source.records:
                raise Corrupt(
                    f"{source.object_key} has {found} readable records, catalogued were {source.records}: it is left "
                    'as it is; run "forebay verify"'
                )
            self.source_bytes += (source.source_bytes or source.bytes) * kept // max(1, found)

    def facts(self) -> ParquetFacts:
        """What the new segment says of itself, once all rows were read."""
        task = self._task
        return ParquetFacts(
            topic_id=task.topic_id,
            partition=task.partition,
            start=task.start,
            end=task.end,
            epoch=max(source.epoch for source in task.sources),
            born=any(source.is_born for source in task.sources),
            gaps=tuple((gap.start, gap.stop, int(gap.reason)) for gap in self._gaps),
            window=tuple(self._window.entries()),
        )

    def _living(self, table: pa.Table) -> pa.Table:
        offsets = table.column("offset").to_numpy()
        first, last = int(offsets[0]), int(offsets[-1])
        gone = offsets < self._task.earliest
        if self._ended.count_in(first, last + 1):
            gone |= self._ended.mask(first, last + 1 - first)[offsets - first]
        return table.filter(pa.array(~gone)) if gone.any() else table

    def _parquet(self, source: SegmentDescriptor) -> Iterator[pa.Table]:
        with closing(self._sources.segment(source)) as segment:
            assert isinstance(segment, ParquetSegment)
            self._note_gaps(segment, source)
            if self._has_window(source):
                self._window.extend(segment.window())
            yield from segment.tables(source.start, source.end)

    def _frames(self, source: SegmentDescriptor) -> Iterator[pa.Table]:
        shift = 0 if source.header_start is None else source.start - source.header_start
        with closing(self._sources.segment(source)) as segment:
            self._note_gaps(segment, source)
        with closing(self._sources.source(source)) as content:
            salt_crc = salt_crc_of(content, source.object_key)
            start = source.start - shift
            for step in walk(content, salt_crc, HEADER_BYTES, source.bytes, expected=start, end=source.end - shift):
                match step:
                    case DataFrames():
                        yield from self._rows(source, step, shift)
                    case ControlFrame():
                        if step.head.kind == Kind.STATE and self._has_window(source):
                            note_state(self._window, decode_state(step.buffer, step.position, step.head))
                    case Unreadable():
                        raise Corrupt(
                            f"{source.object_key} is {step.verdict.value} at byte {step.byte}: it is left as it is; "
                            'run "forebay verify"'
                        )

    def _rows(self, source: SegmentDescriptor, data: DataFrames, shift: int) -> Iterator[pa.Table]:
        """The rows of data frames, as far as they are history: a sealed file may hold more than that."""
        for head, position in data.each():
            if self._has_window(source):
                note_producers(self._window, head, data.buffer, position)
            batch = decode(data.buffer, position, head).moved(shift)
            rows = rows_of(batch, self._task.partition, runs_of(data.buffer, position, head))
            low, high = max(batch.base, source.start), min(batch.end, source.end)
            if low < high:
                yield pa.Table.from_batches([rows.slice(low - batch.base, high - low)])

    def _has_window(self, source: SegmentDescriptor) -> bool:
        """Whether this one says what must be recognised as a repeat; it restates all that came before it."""
        return source.start == self._task.window_of and source.producers > 0

    def _note_gaps(self, segment: SealedSegment, source: SegmentDescriptor) -> None:
        for gap in segment.index().gaps:
            low, high = max(gap.start, source.start), min(gap.stop, source.end)
            if low < high and gap.reason in (Reason.DAMAGED, Reason.HISTORY):
                raise Corrupt(f"[{low}, {high}) of {source.object_key} cannot be read: it is left as it is")
            if low < high:
                self._gaps.append(Gap(low, high, gap.reason))


def dead_in(
    descriptor: SegmentDescriptor, ended: OffsetSet, earliest: int, held: Callable[[SegmentDescriptor], OffsetSet]
) -> int:
    """How many records of a segment ended. `held`, the offsets that have one, is asked only if it makes a difference.

    Those below the floor count once they are the greater part: the floor moves on, and takes the rest for nothing.
    """
    start, end = descriptor.start, descriptor.end
    below = min(max(earliest, start), end)
    gone = ended.count_in(below, end)
    if below == start and not gone:
        return 0
    if descriptor.kind is DescriptorKind.FRAMES:
        # Every offset that ended is that of a record, and none has been left out yet.
        fallen, above = below - start, end - below
    else:
        kept = held(descriptor)
        living = kept.clipped(below, end)
        fallen, above, gone = len(kept) - len(living), len(living), len(living) - len(living - ended)
    return gone + (fallen if fallen > above else 0)
