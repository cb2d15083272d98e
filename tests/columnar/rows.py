"""Rows of Parquet segments for tests: batches with gaps between them, and the segment that they become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from forebay.blobs import BlobStore
from forebay.columnar import ParquetSegment, StoredParquet, store_parquet
from forebay.format.columns.rows import Row, encode_rows
from forebay.format.control.frames import WindowEntry
from forebay.format.files.segment import PARQUET_SUFFIX
from forebay.format.frame.batch import Batch, batch_of
from forebay.format.parquet.file import ParquetFacts, rows_of
from forebay.history import Objects
from forebay.records import Gap, Reason, Record, Run

TOPIC: Final = "ab" * 16
KEY: Final = f"{TOPIC}_0/compacted/one{PARQUET_SUFFIX}"


class Appended(NamedTuple):
    """Rows that were appended at once."""

    base: int
    rows: Sequence[Row]
    at: int = 1_700_000_000_123
    epoch: int = 3
    producer: int = 0
    sequence: int = 0

    @property
    def end(self) -> int:
        return self.base + len(self.rows)

    def batch(self) -> Batch:
        return batch_of(encode_rows(list(self.rows)), base=self.base, epoch=self.epoch, appended_at=self.at)

    def table(self) -> pa.Table:
        runs = [Run(len(self.rows), self.producer, self.sequence)] if self.producer else []
        return pa.Table.from_batches([rows_of(self.batch(), 0, runs)])

    def records(self) -> list[Record]:
        return self.batch().records(0)


SPARSE: Final = [
    Appended(12, [(b"one", b"k", "eu", (("trace", b"\x01"), ("note", None)), 1_700_000_000_000)], producer=2**64 - 2),
    Appended(14, [(None, None, None, (), -1), (b"", b"", "us", (), 5)], at=1_700_000_000_500, epoch=4),
    Appended(20, [(b"four", b"k", None, (), 1_600_000_000_000)], producer=9, sequence=41),
]
LOST: Final = Gap(16, 18, Reason.LOST)
FACTS: Final = ParquetFacts(
    topic_id=TOPIC,
    partition=0,
    start=10,
    end=25,
    epoch=3,
    born=True,
    gaps=((*LOST[:2], int(LOST.reason)),),
    window=(WindowEntry(9, 40, 2, 1, 19),),
)


def stored(
    store: BlobStore, appends: Sequence[Appended], start: int, end: int, gaps: Sequence[Gap] = (), key: str = KEY
) -> StoredParquet:
    """A segment of these appends in a store."""
    facts = ParquetFacts(
        topic_id=TOPIC, partition=0, start=start, end=end, epoch=3, gaps=tuple((*gap[:2], int(gap[2])) for gap in gaps)
    )
    return store_parquet(store, key, [append.table() for append in appends], lambda: facts)


class NotedBytes:
    """Bytes in memory, of which each read is noted."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.read = 0

    def read_at(self, length: int, position: int) -> bytes:
        found = self.content[position : position + length]
        self.read += len(found)
        return found

    def size(self) -> int:
        return len(self.content)

    def close(self) -> None:
        """Nothing is held open."""


def in_memory(content: bytes, index: bytes, start: int, end: int) -> tuple[ParquetSegment, NotedBytes]:
    """A segment of these bytes, and what notes the reads of them."""
    source = NotedBytes(content)
    return ParquetSegment("segment", start, end, source=lambda: source, index=lambda: NotedBytes(index)), source


def opened(objects: Objects, segment: StoredParquet) -> ParquetSegment:
    """The same segment, as history opens it."""
    found = objects.segment(segment.descriptor(store="store", leader="me", created_at=0))
    assert isinstance(found, ParquetSegment)
    return found


def expected(appends: Sequence[Appended], start: int, end: int, gaps: Sequence[Gap] = ()) -> list[Record | Gap]:
    """What a reader sees of `[start, end)`: records, and each offset without one as a gap of its own."""
    records = {record.offset: record for append in appends for record in append.records()}
    found: list[Record | Gap] = []
    for offset in range(start, end):
        reason = next((gap.reason for gap in gaps if gap.start <= offset < gap.stop), Reason.DELETED)
        found.append(records.get(offset) or Gap(offset, offset + 1, reason))
    return found


def seen(segment: ParquetSegment, offset: int, bytes_max: int) -> list[Record | Gap]:
    """What a reader sees from `offset` on, page by page."""
    found: dict[int, Record | Gap] = {}
    while offset < segment.end:
        page = segment.read(offset, bytes_max)
        assert page.next > offset
        here: list[tuple[int, Record | Gap]] = []
        for batch in page.batches:
            here += [(record.offset, record) for record in batch.records(0)]
        for gap in page.events:
            here += [(at, Gap(at, at + 1, gap.reason)) for at in range(gap.start, gap.stop)]
        assert sorted(at for at, _ in here) == list(range(offset, page.next)), "a page has no hole and no overlap"
        found.update(here)
        offset = page.next
    return [found[at] for at in sorted(found)]
