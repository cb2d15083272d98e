"""A Parquet segment of history: stored, read as pages, and looked into as sealed segments are. Knows no disk.

Its index is of the same kind, with an entry per row group. Every byte is checked before a record of it is shown; a
row group that does not check is answered as a damaged range. Those decoded last are held, for a reader that goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from forebay.blobs import BlobStore
from forebay.errors import Corrupt
from forebay.format.checksum import crc32
from forebay.format.control.frames import WindowEntry
from forebay.format.control.offsets import OffsetSet
from forebay.format.files.segment import index_name
from forebay.format.frame.batch import Batch
from forebay.format.index.hashing import Places
from forebay.format.index.sections import FrameEntries, SectionKind, check_section, find_offset, find_time
from forebay.format.metadata.descriptor import (
    DescriptorKind,
    SegmentDescriptor,
    Status,
    StoredObject,
    object_descriptor,
    sparse_index,
)
from forebay.format.parquet.file import SCHEMA, ParquetFacts, encode_parquet, facts_of, row_groups
from forebay.format.parquet.rowgroups import ParquetLayout, RowGroup, Walked, decode_layout, rows_digest, walk
from forebay.locks import Rank, RankedLock
from forebay.pages import Page
from forebay.records import Gap, Reason
from forebay.sealed import ByteSource, StoredSegment

HELD_BYTES: Final = 256 * 1024 * 1024
"""Of decoded row groups in one process: about four."""


class ParquetSegment(StoredSegment):
    """An immutable Parquet segment `[start, end)`, with the interface of a sealed one.

    Offsets that have no row and lie in no named gap read as deleted.
    """

    _layout: ParquetLayout | None = None

    def read(self, offset: int, bytes_max: int, *, opened: Callable[[], ByteSource] | None = None) -> Page:
        """See `SealedSegment`."""
        _, entries, _ = self.index()
        gathered = _Gathered(offset, bytes_max, self._gaps_in)
        for number in range(find_offset(entries, offset), len(entries)):
            first, stop = _span(entries, number)
            gathered.add_gap(min(first, self.end))
            if gathered.is_full or gathered.next >= self.end:
                return gathered.page()
            try:
                rows = self._group(number, opened or self._opened)
            except Corrupt:
                gathered.damage(min(stop, self.end))
            else:
                gathered.take(rows, min(stop, self.end))
            if gathered.is_full:
                return gathered.page()
        gathered.add_gap(self.end)
        return gathered.page()

    def offset_at_time(self, timestamp: int) -> int | None:
        """The offset of the first record at or after the time; `None` if there is none.

        Where that record lies in a damaged row group, the first offset of that: a reader there gets the gap.
        """
        entries = self.index().entries
        place = find_time(entries, timestamp)
        if place is None:
            return None
        try:
            rows = self._group(place, self._opened)
        except Corrupt:
            return int(entries["offset"][place])
        matches = rows.whole.timestamps() >= timestamp
        return int(rows.offsets[int(np.argmax(matches))])

    def held(self, start: int, stop: int) -> OffsetSet:
        """The offsets of `[start, stop)` that have a record here; those of a damaged row group count as if they had."""
        found = OffsetSet()
        for number, offsets in self._offsets(start, stop):
            if offsets is None:
                found |= OffsetSet.of_range(*_span(self.index().entries, number))
            else:
                found |= OffsetSet.of(offsets)
        return found.clipped(start, stop)

    def tables(
        self, start: int, stop: int, names: Sequence[str] = SCHEMA.names, *, spot: bool = False
    ) -> Iterator[pa.Table]:
        """The rows of `[start, stop)` with these columns of `SCHEMA`, a row group at a time; no other column is read.

        Raises `Corrupt` at a row group that is damaged. With `spot` nothing is read ahead.
        """
        entries, layout = self.index().entries, self._known_layout()
        opened = self._open_spot if spot else self._opened
        wanted = [*names, *(["offset"] if "offset" not in names else [])]
        for number in range(find_offset(entries, start), len(entries)):
            first, after = _span(entries, number)
            if first >= stop:
                return
            table = layout.read(number, opened().read_at, wanted)
            if first < start or after > stop:
                offsets = table.column("offset").to_numpy()
                low, high = np.searchsorted(offsets, [start, stop]).tolist()
                table = table.slice(low, high - low)
            if table.num_rows:
                yield table.select(list(names))

    def damaged(self) -> Iterator[tuple[int, int]]:
        """The offsets of row groups that cannot be read; all of them are tried."""
        for number in range(len(self.index().entries)):
            try:
                RowGroup(self._known_layout().read(number, self._opened().read_at))
            except Corrupt:
                yield _span(self.index().entries, number)

    def window(self) -> tuple[WindowEntry, ...]:
        """The appends that were recognised as repeats at the end of the segment."""
        return facts_of(self._known_layout().metadata, self.name).window

    def rest(self) -> None:
        """Give back the bytes of the segment that are held; what is known of its index stays."""
        _HELD.forget(self)
        super().rest()

    def close(self) -> None:
        """Give memory and descriptors back; the next read takes them again."""
        self._layout = None
        super().close()

    def _group(self, number: int, opened: Callable[[], ByteSource]) -> RowGroup:
        rows = _HELD.get(self, number)
        if rows is None:
            rows = RowGroup(self._known_layout().read(number, opened().read_at))
            _HELD.put(self, number, rows)
        return rows

    def _offsets(self, start: int, stop: int) -> Iterator[tuple[int, Places | None]]:
        """The offsets of the rows of each row group that reaches into `[start, stop)`; `None` if it is damaged."""
        entries, layout = self.index().entries, self._known_layout()
        for number in range(find_offset(entries, start), len(entries)):
            if int(entries["offset"][number]) >= stop:
                return
            try:
                table = layout.read(number, self._open_spot().read_at, ["offset"])
            except Corrupt:
                yield number, None
            else:
                yield number, table.column("offset").to_numpy()

    def _known_layout(self) -> ParquetLayout:
        known = self._layout
        if known is None:
            sections = self._known()[1]
            parts = []
            with closing(self._open_index()) as source:
                for kind in (SectionKind.CHUNKS, SectionKind.PARQUET_FOOTER):
                    section = sections.get(kind)
                    if section is None:
                        raise Corrupt(
                            f'the index of {self.name} is not that of a Parquet segment: run "forebay verify"'
                        )
                    parts.append(source.read_at(section.length, section.position))
                    check_section(parts[-1], section)
            known = self._layout = decode_layout(*parts)
        return known

    def _gaps_in(self, start: int, stop: int) -> Iterator[Gap]:
        """Why `[start, stop)` holds no record, in order."""
        for gap in sorted(self.index().gaps):
            if gap.stop <= start or gap.start >= stop:
                continue
            if gap.start > start:
                yield Gap(start, gap.start, Reason.DELETED)
            yield Gap(max(start, gap.start), min(stop, gap.stop), gap.reason)
            start = gap.stop
        if start < stop:
            yield Gap(start, stop, Reason.DELETED)


def _span(entries: FrameEntries, number: int) -> tuple[int, int]:
    first = int(entries["offset"][number])
    return first, first + int(entries["count"][number])


class HeldGroups:
    """Decoded row groups, one of a segment, the latest of all segments: so many bytes, whatever the number of readers.

    Thread-safe.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = RankedLock(Rank.LEAF, "history.row_groups")
        self._held: OrderedDict[ParquetSegment, tuple[int, RowGroup]] = OrderedDict()
        self._bytes = 0

    def get(self, segment: ParquetSegment, number: int) -> RowGroup | None:
        """The row group of this number, if it is held."""
        with self._lock:
            held = self._held.get(segment)
            if held is None or held[0] != number:
                return None
            self._held.move_to_end(segment)
            return held[1]

    def put(self, segment: ParquetSegment, number: int, rows: RowGroup) -> None:
        """Hold it, and drop others if need be."""
        with self._lock:
            self._drop(segment)
            self._held[segment] = number, rows
            self._bytes += rows.bytes
            while self._bytes > self._bytes_max and len(self._held) > 1:
                self._drop(next(iter(self._held)))

    def forget(self, segment: ParquetSegment) -> None:
        """Hold nothing of this segment."""
        with self._lock:
            self._drop(segment)

    def _drop(self, segment: ParquetSegment) -> None:
        held = self._held.pop(segment, None)
        if held is not None:
            self._bytes -= held[1].bytes


_HELD: Final = HeldGroups(HELD_BYTES)


class StoredParquet(NamedTuple):
    """A Parquet segment that lies in a store."""

    object_key: str
    etag: str | None
    walked: Walked

    def descriptor(self, *, store: str, leader: str, created_at: int, source_bytes: int = 0) -> SegmentDescriptor:
        """What the catalog says of it; `store` is what it calls the store, `leader` who made the segment."""
        footer, facts = self.walked.footer, self.walked.facts
        return object_descriptor(
            DescriptorKind.PARQUET,
            StoredObject.of_segment(footer, store=store, object_key=self.object_key, etag=self.etag),
            topic_id=facts.topic_id,
            start=facts.start,
            end=facts.end,
            epoch=facts.epoch,
            leader=leader,
            status=Status.COMPACTED,
            created_at=created_at,
            header_start=None if facts.born else facts.start,
            index_bytes=len(self.walked.content),
            producers=len({entry.producer for entry in facts.window}),
            source_bytes=source_bytes,
            sparse=sparse_index(self.walked.entries, facts.start),
        )


def store_parquet(
    store: BlobStore, key: str, tables: Iterable[pa.Table], facts: Callable[[], ParquetFacts]
) -> StoredParquet:
    """Store these rows of `SCHEMA` as a Parquet segment, with its index; on return both are durable.

    All of it is read back: raises `Corrupt` unless the store has the very bytes, and they decode to the very rows.
    """
    written = _Written()
    stat = store.upload(key, written.counted(encode_parquet(written.noted(row_groups(tables)), facts)))

    def read(length: int, position: int) -> bytes:
        return store.get_range(key, position, min(position + length, stat.size), etag=stat.etag)

    walked = walk(read, stat.size, key)
    footer = walked.footer
    if (footer.segment_bytes, footer.segment_crc, walked.digests) != (written.bytes, written.crc, written.digests):
        raise Corrupt(f"{key} does not hold the rows that were written: it is not used; try again")
    store.upload(index_name(key), [walked.content])
    return StoredParquet(key, stat.etag, walked)


class _Written:
    """What is known of a segment while it is written."""

    def __init__(self) -> None:
        self.bytes = 0
        self.crc = 0
        self.digests: list[int] = []

    def noted(self, groups: Iterable[pa.Table]) -> Iterator[pa.Table]:
        for group in groups:
            self.digests.append(rows_digest(group))
            yield group

    def counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.bytes += len(chunk)
            self.crc = crc32(chunk, self.crc)
            yield chunk


class _Gathered:
    """A page in the making, out of row groups: everything from `offset` on, until about `bytes_max` are there."""

    def __init__(self, offset: int, bytes_max: int, gaps_in: Callable[[int, int], Iterator[Gap]]) -> None:
        self.next = offset
        self._left = bytes_max
        self._gaps_in = gaps_in
        self._batches: list[Batch] = []
        self._gaps: list[Gap] = []

    @property
    def is_full(self) -> bool:
        """Whether no more is asked for."""
        return self._left <= 0

    def add_gap(self, stop: int) -> None:
        """There is no row below `stop`."""
        if stop > self.next:
            self._gaps += self._gaps_in(self.next, stop)
            self.next = stop
            # A reader that asked for one offset has its answer: the gap.
            self._left -= 1

    def damage(self, stop: int) -> None:
        """What lies below `stop` cannot be read."""
        self._gaps.append(Gap(self.next, stop, Reason.DAMAGED))
        self.next = stop
        self._left -= 1

    def take(self, rows: RowGroup, stop: int) -> None:
        """Add the rows from here on and below `stop`, as far as there is room; one in any case."""
        first, last = np.searchsorted(rows.offsets, [self.next, stop]).tolist()
        if first < last:
            sizes = np.cumsum(rows.whole.sizes()[first:last])
            fitting = int(np.searchsorted(sizes, self._left, side="right"))
            if fitting < last - first:
                last = first + max(1, fitting)
                stop = int(rows.offsets[last - 1]) + 1
                self._left = 0
            else:
                self._left -= int(sizes[-1])
        for batch in rows.batches(first, last) if first < last else ():
            self._gap_before(batch.base)
            self._batches.append(batch)
            self.next = batch.end
        self._gap_before(stop)

    def _gap_before(self, offset: int) -> None:
        if offset > self.next:
            self._gaps += self._gaps_in(self.next, offset)
            self.next = offset

    def page(self) -> Page:
        """What has been gathered."""
        return Page(self._batches, self._gaps, self.next)
