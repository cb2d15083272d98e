"""Parquet segments under examination: what does one hold, and which of its row groups cannot be read?

Reads only. Knows bytes by position, wherever they lie.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from forebay.columnar import ParquetSegment
from forebay.errors import Corrupt
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.format.parquet.rowgroups import ReadAt, RowGroup, Walked, walk
from forebay.records import Record


class WalkedColumns(NamedTuple):
    """What a Parquet segment turned out to be."""

    content: bytes = b""
    """What its index must hold; empty if its bytes are not those that were catalogued."""
    flaw: str = ""
    damaged: tuple[tuple[int, int], ...] = ()
    """Offsets that cannot be read, where a sound index says which."""


class _Bytes:
    """Bytes that are read by position, as those of a segment or an index."""

    def __init__(self, read: ReadAt, size: int) -> None:
        self._read = read
        self._size = size

    def size(self) -> int:
        return self._size

    def read_at(self, length: int, position: int) -> bytes:
        return bytes(self._read(min(length, self._size - position), position))

    def close(self) -> None:
        """Nothing is held."""


def walked_columns(descriptor: SegmentDescriptor, read: ReadAt, size: int, stored_index: bytes | None) -> WalkedColumns:
    """Read all of a Parquet segment that was catalogued like this; `stored_index` is what lies beside it."""
    try:
        walked = walk(read, size, descriptor.object_key)
    except Corrupt as error:
        return WalkedColumns(flaw=str(error), damaged=tuple(_damaged(descriptor, read, size, stored_index)))
    footer = walked.footer
    if footer.content_hash.hex() != descriptor.content_hash or footer.segment_bytes != descriptor.bytes:
        found = footer.content_hash.hex()
        flaw = f"its content is not what was catalogued (hash {found}, expected {descriptor.content_hash})"
        return WalkedColumns(flaw=flaw, damaged=tuple(_damaged(descriptor, read, size, stored_index)))
    return WalkedColumns(walked.content, _range_flaw(descriptor, walked))


def _range_flaw(descriptor: SegmentDescriptor, walked: Walked) -> str:
    facts, records = walked.facts, walked.footer.records
    if (facts.start, facts.end, facts.topic_id) != (descriptor.start, descriptor.end, descriptor.topic_id):
        return f"holds the offsets [{facts.start}, {facts.end}) of topic {facts.topic_id} and is catalogued with others"
    return f"holds {records} records, catalogued were {descriptor.records}" if records != descriptor.records else ""


def _damaged(
    descriptor: SegmentDescriptor, read: ReadAt, size: int, stored_index: bytes | None
) -> Iterator[tuple[int, int]]:
    """Row groups that cannot be read, if the index says where they are."""
    with contextlib.suppress(Corrupt):
        yield from _segment(
            descriptor.object_key, descriptor.start, descriptor.end, read, size, stored_index or b""
        ).damaged()


def _segment(name: str, start: int, end: int, read: ReadAt, size: int, index: bytes) -> ParquetSegment:
    return ParquetSegment(
        name,
        start,
        end,
        source=lambda: _Bytes(read, size),
        index=lambda: _Bytes(lambda length, position: index[position : position + length], len(index)),
    )


def dump_columns(read: ReadAt, size: int, path: str, *, records: bool) -> Iterator[dict[str, object] | Record]:
    """What a Parquet segment says of itself, its row groups, and with `records` every record."""
    walked = walk(read, size, path)
    facts = walked.facts
    gaps = [{"start": gap.start, "stop": gap.stop, "reason": gap.reason.name.lower()} for gap in facts.named_gaps()]
    yield {
        "kind": "parquet",
        "topic_id": facts.topic_id,
        "partition": facts.partition,
        "start": facts.start,
        "end": facts.end,
        "epoch": facts.epoch,
        "records": walked.footer.records,
        "gaps": gaps,
        "window": [entry._asdict() for entry in facts.window],
        "content_hash": walked.footer.content_hash.hex(),
    }
    segment = _segment(path, facts.start, facts.end, read, size, walked.content)
    for entry, table in zip(walked.entries, segment.tables(facts.start, facts.end), strict=True):
        yield {"kind": "row group", "rows": table.num_rows, **{name: int(entry[name]) for name in entry.dtype.names}}
        if records:
            rows = RowGroup(table)
            for batch in rows.batches(0, table.num_rows):
                yield from batch.records(facts.partition)
