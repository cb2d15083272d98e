"""Does a file or an object hold records with a key? Asked of its index where it has one, else of all its bytes.

Knows segments and their formats; knows no catalog. Where the answer cannot be had it is yes: erasing must not deny
what it cannot see.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.checksum import salted
from forebay.format.files.segment import (
    HEADER_BYTES,
    PARQUET_SUFFIX,
    SegmentHeader,
    decode_header,
)
from forebay.format.frame.batch import Batch
from forebay.format.index.hashing import Places
from forebay.format.index.lookups import Sought
from forebay.format.index.sections import SectionKind
from forebay.pages import Page
from forebay.records import Gap, Reason
from forebay.sealed import IndexSource
from forebay.shard.lookups import matching
from forebay.wal.walk import ControlFrame, DataFrames, Unreadable, walk

SEARCH_BYTES: Final = 1024 * 1024
PARQUET: Final = b"PAR1"


class SearchedSegment(Protocol):
    """A log file, a sealed file or a segment of history."""

    def find(self, kind: SectionKind, wanted: int, start: int = 0) -> Iterator[Places]:
        """The offsets from `start` on of records that may have the key with this hash, in rising pieces."""

    def unsearched(self, kind: SectionKind) -> list[Gap]:
        """The ranges of which `find` does not know what is in them."""

    def read(self, offset: int, bytes_max: int) -> Page:
        """Frames from the one that covers `offset` on."""


def holds_ended(
    segment: SearchedSegment, sought: Sought, start: int, stop: int, is_ended: Callable[[int], bool]
) -> bool:
    """Whether a segment holds, or may hold, a record of `[start, stop)` that has what is sought and has ended.

    Reads postings, and as many records as it takes to find one. What is damaged may hold one.
    """
    try:
        for piece in segment.find(sought.kind, sought.hash, start):
            for offset in piece.tolist():
                if start <= offset < stop and is_ended(offset) and _is_match(segment, sought, offset):
                    return True
        damaged = [gap for gap in segment.unsearched(sought.kind) if gap.reason is Reason.DAMAGED]
    except (Corrupt, UnsupportedFormat):
        return True
    return any(is_ended(max(start, gap.start)) for gap in damaged if gap.start < stop and gap.stop > start)


def _is_match(segment: SearchedSegment, sought: Sought, offset: int) -> bool:
    page = segment.read(offset, 1).clipped(offset + 1)
    found = any(_has(sought, batch) for batch in page.batches)
    return found or any(gap.reason is Reason.DAMAGED for gap in page.events)


def _has(sought: Sought, batch: Batch) -> bool:
    keys = batch.keys() or []
    places = np.array([row for row, key in enumerate(keys) if key is not None], dtype=np.int64) + batch.base
    return next(matching(sought, batch, places), None) is not None


def may_hold(source: IndexSource, name: str, key: bytes) -> bool:
    """Whether a file or object of this name, of which nothing else is known, may hold a record with this key."""
    size = source.size()
    head = source.read_at(min(size, HEADER_BYTES), 0)
    if name.endswith(PARQUET_SUFFIX) or head.startswith(PARQUET):
        return _in_parquet(source, size, key)
    header = decode_header(head)
    return not isinstance(header, SegmentHeader) or _in_frames(source, size, header, Sought.of_key(key))


def may_be_uploading(source: IndexSource, name: str, key: bytes, topic_id: str) -> bool:
    """Whether what an upload has written so far may hold a record with this key, of this topic.

    Segments say what they are in their first bytes. Whatever else is uploaded is not compressed.
    """
    size = source.size()
    head = source.read_at(min(size, HEADER_BYTES), 0)
    header = decode_header(head)
    if isinstance(header, SegmentHeader):
        return header.topic_id == topic_id and may_hold(source, name, key)
    return may_hold(source, name, key) if head.startswith(PARQUET) else has_bytes(source, size, key)


def _in_frames(source: IndexSource, size: int, header: SegmentHeader, sought: Sought) -> bool:
    steps = walk(source, salted(header.salt), HEADER_BYTES, size, expected=header.start, end=header.start)
    for step in steps:
        match step:
            case DataFrames():
                if any(_has(sought, batch) for batch, _ in step.batches()):
                    return True
            case ControlFrame():
                pass
            case Unreadable():
                return True
    return False


def _in_parquet(source: IndexSource, size: int, key: bytes) -> bool:
    try:
        parquet = pq.ParquetFile(pa.PythonFile(_Reader(source, size), mode="r"))
        wanted = pa.scalar(key, pa.binary())
        groups = (parquet.read_row_group(number, columns=["key"]) for number in range(parquet.num_row_groups))
        return any(pc.any(pc.equal(group.column("key"), wanted)).as_py() for group in groups)
    except (pa.ArrowException, OSError, KeyError):
        return True


def has_bytes(source: IndexSource, size: int, wanted: bytes) -> bool:
    """Whether these bytes stand anywhere in a file or object."""
    step = max(SEARCH_BYTES, len(wanted))
    return any(
        wanted in source.read_at(min(step + len(wanted) - 1, size - position), position)
        for position in range(0, size, step)
    )


class _Reader(io.RawIOBase):
    """The bytes of an object as a file that Arrow reads."""

    def __init__(self, source: IndexSource, size: int) -> None:
        super().__init__()
        self._source = source
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = origin + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        content = self._source.read_at(wanted, self._position) if wanted else b""
        self._position += len(content)
        return content
