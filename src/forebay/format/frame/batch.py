"""Batches: the records of one data frame, seen through its columns. Knows frames and columns, no disk.

A `Batch` is a view of the bytes it was decoded from: slicing it, or handing it to Arrow, copies no
record.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from forebay.errors import Corrupt
from forebay.format.columns import layout
from forebay.format.columns.layout import Layout, Strip, find
from forebay.format.columns.merging import merge_layouts
from forebay.format.columns.rows import PADDING, ColumnBytes, Columns, Row, encode_row
from forebay.format.columns.sizes import record_sizes
from forebay.format.columns.times import Appended, times_at
from forebay.format.frame.encoding import close_frame, encode_frame, encode_runs, join_frame
from forebay.format.frame.head import (
    BODY_HEAD,
    FORMAT_VERSION,
    HEAD_SIZE,
    HEADER_SIZE,
    WHOLE_HEAD,
    Codec,
    FrameHead,
    Kind,
    payload_start,
)
from forebay.records import OFFSET_MAX, Bytes, Headers, Record, Run

if TYPE_CHECKING:
    import pyarrow as pa

RAW_BYTES_MAX: Final = 64 * 1024 * 1024
"""No frame's columns are larger once decompressed."""

_SIZES: Final = struct.Struct("<II")
_PACK_HEAD: Final = BODY_HEAD.pack
_PACK_ROW_HEAD: Final = struct.Struct("<BBBBIIIQqqii").pack
"""The head of a body, and what stands before the value of its only record."""
_JOIN_MAX: Final = 16_384
_PARTS_FEW: Final = 16
_NONE: Final = int(Codec.NONE)
_ZSTD: Final = int(Codec.ZSTD)
_DATA: Final = int(Kind.DATA)


class Batch:
    """Consecutive records `[base, end)`. Cheap to slice; equal slices of equal bytes give equal records."""

    __slots__ = ("_first", "_layout", "appended_at", "base", "count", "epoch")

    def __init__(self, base: int, count: int, epoch: int, appended_at: int, found: Layout, first: int = 0) -> None:
        self.base = base
        self.count = count
        self.epoch = epoch
        self.appended_at = appended_at
        self._layout = found
        self._first = first

    @property
    def end(self) -> int:
        """The offset after the last record."""
        return self.base + self.count

    @property
    def unpacked_bytes(self) -> int:
        """What the columns of its frame take in memory, decompressed. Those of a slice are still there as a whole."""
        return self._layout.stop - self._layout.start

    def __repr__(self) -> str:
        return f"Batch([{self.base}, {self.end}), epoch {self.epoch})"

    def slice(self, start_offset: int, stop_offset: int) -> Batch:
        """The records of this batch with offsets in `[start_offset, stop_offset)`, at least one."""
        start = max(start_offset, self.base)
        count = min(stop_offset, self.base + self.count) - start
        assert count > 0, "the slice lies outside the batch"
        first = self._first + start - self.base
        return Batch(start, count, self.epoch, self.appended_at, self._layout, first)

    def moved(self, shift: int) -> Batch:
        """The same records, `shift` offsets further on."""
        if not shift:
            return self
        return Batch(self.base + shift, self.count, self.epoch, self.appended_at, self._layout, self._first)

    def timestamps(self) -> npt.NDArray[np.int64]:
        """Milliseconds per record; a view, not to be written to."""
        found = self._layout
        return np.frombuffer(found.buffer, "<i8", count=self.count, offset=found.start + 8 * self._first)

    def appended(self) -> list[Appended]:
        """When the records were appended; `appended_at` is the newest time of the frame that they are in."""
        found = self._layout
        if found.times < 0:
            return [Appended(self.count, self.appended_at)]
        return times_at(found.buffer, found.times, self._first, self._first + self.count)

    def values(self) -> list[bytes | None]:
        """The value of each record."""
        return layout.entries(self._layout.buffer, self._layout.value, self._first, self._first + self.count)

    def keys(self) -> list[bytes | None] | None:
        """The key of each record, or `None` if none has one."""
        span = self._layout.key
        return span and layout.entries(self._layout.buffer, span, self._first, self._first + self.count)

    def tags(self) -> list[str | None] | None:
        """The tag of each record, or `None` if none has one."""
        span = self._layout.tag
        return span and layout.texts(self._layout.buffer, span, self._first, self._first + self.count)

    def key_strip(self) -> Strip | None:
        """The keys as arrays, or `None` if no record has one."""
        span = self._layout.key
        return span and layout.strip(self._layout.buffer, span, self._first, self._first + self.count)

    def tag_strip(self) -> Strip | None:
        """The tags as arrays of utf8, or `None` if no record has one."""
        span = self._layout.tag
        return span and layout.strip(self._layout.buffer, span, self._first, self._first + self.count)

    def sizes(self) -> npt.NDArray[np.int64]:
        """The bytes of each record, as `columns.sizes` counts them."""
        return record_sizes(self._layout, self._first, self._first + self.count)

    def headers(self) -> list[Headers] | None:
        """The headers of each record, or `None` if none has any."""
        found = self._layout
        return layout.header_rows(found, self._first, self._first + self.count) if found.names else None

    def records(self, partition: int) -> list[Record]:
        """Every record as an object of its own."""
        return list(self.each_record(partition))

    def each_record(self, partition: int) -> Iterator[Record]:
        """As `records`, each made when it is asked for: one that is not kept makes room for the next."""
        columns: list[Iterable[Any]] = [
            repeat(partition),
            range(self.base, self.base + self.count),
            self.timestamps().tolist(),
            self.keys() or repeat(None),
            self.values(),
        ]
        tags, headers = self.tags(), self.headers()
        if tags is not None or headers is not None:
            # A record has neither unless it is given them.
            columns += [tags or repeat(None), headers or repeat(())]
        return map(Record, *columns)

    def columns(self) -> Columns:
        """The records by column, as Python sequences."""
        return Columns(self.values(), self.timestamps(), self.keys(), self.tags(), self.headers())

    def columns_bytes(self) -> ColumnBytes:
        """The encoded columns of these records, without times; a large frame's whole content is not copied."""
        return merge([self])

    def to_arrow(self, partition: int, names: Sequence[str] | None = None) -> pa.RecordBatch:
        """The records with the schema `arrow.ARROW_SCHEMA`, or only the named columns of it, in that order.

        Values, keys, tags and headers are not copied; columns left out cost nothing.
        """
        from forebay.format.columns import arrow  # noqa: PLC0415 - loaded only where it is used

        return arrow.record_batch(self._layout, self.base, self.count, self._first, partition, names)


def decode(buffer: Bytes, position: int, head: FrameHead) -> Batch:
    """The records of the whole data frame at `position`; they refer to the buffer's bytes."""
    assert head.kind == _DATA, "only data frames hold records"
    base, length, _, codec, columns, count, epoch, run_count, _, appended_at = head
    start = payload_start(position, head) if run_count else position + HEAD_SIZE
    stop = position + length
    if base + count > OFFSET_MAX:
        raise Corrupt(f"frame at byte {position}: offset {base} + {count} is too large")
    if codec == _NONE:
        found = find(buffer, start, stop, columns, count)
    else:
        raw = decompress(buffer, start, stop)
        found = find(raw, 0, len(raw), columns, count)
    return Batch(base, count, epoch, appended_at, found)


def unpacked_bytes(frame: Bytes) -> int | None:
    """How many bytes the columns of a compressed data frame have, as it claims; `None` if it is not compressed.

    Nothing is decompressed for it.
    """
    base, length, _, _, *rest = WHOLE_HEAD.unpack_from(frame)
    head = FrameHead(base, length + HEADER_SIZE, *rest)
    if head.codec == _NONE:
        return None
    claimed: int = _SIZES.unpack_from(frame, payload_start(0, head))[0]
    return claimed


def batch_of(columns: ColumnBytes, *, base: int, epoch: int, appended_at: int) -> Batch:
    """The batch that a frame of these columns would decode to, without a frame around it."""
    whole = columns.parts[0] if len(columns.parts) == 1 else b"".join(columns.parts)
    found = find(whole, 0, columns.size, columns.flags, columns.count)
    return Batch(base, columns.count, epoch, appended_at, found)


def encode_arrow(batch: pa.RecordBatch, timestamp: int) -> ColumnBytes:
    """The columns of a record batch; `timestamp` (ms) is for records that bring none. See `arrow.encode_arrow`."""
    from forebay.format.columns import arrow  # noqa: PLC0415 - loaded only where it is used

    return arrow.encode_arrow(batch, timestamp)


def partition_column(batch: pa.RecordBatch) -> npt.NDArray[np.int64] | None:
    """The partitions that the rows of a record batch name. See `arrow.partition_column`."""
    from forebay.format.columns import arrow  # noqa: PLC0415 - loaded only where it is used

    return arrow.partition_column(batch)


def key_strip(batch: pa.RecordBatch) -> Strip | None:
    """The keys of a record batch as arrays; `None` if no record has one. See `arrow.key_strip`."""
    from forebay.format.columns import arrow  # noqa: PLC0415 - loaded only where it is used

    return arrow.key_strip(batch)


def encode_data_frame(
    *,
    salt_crc: int,
    base: int,
    epoch: int,
    durable: int,
    appended_at: int,
    runs: Sequence[Run],
    columns: ColumnBytes,
    zstd_level: int | None,
) -> bytes | bytearray:
    """One data frame, not to be changed; compressed only where a level is given and the result is smaller."""
    flags, count, payload, size, _, _ = columns
    if zstd_level is None and not runs and size < _JOIN_MAX and len(payload) == 1:
        # The same bytes as below: what a single small append pays is mostly calls.
        body = _PACK_HEAD(FORMAT_VERSION, _DATA, _NONE, flags, count, epoch, 0, durable, appended_at) + payload[0]
        return close_frame(salt_crc, base, body)
    codec = _NONE
    if zstd_level is not None:
        compressed = _compress(columns, zstd_level)
        if compressed is not None:
            payload, codec = compressed, _ZSTD
    if len(payload) > _PARTS_FEW:
        head = _PACK_HEAD(FORMAT_VERSION, _DATA, codec, flags, count, epoch, len(runs), durable, appended_at)
        return join_frame(salt_crc, base, [head, encode_runs(runs), *payload])
    return encode_frame(
        salt_crc=salt_crc,
        base=base,
        kind=_DATA,
        codec=codec,
        columns=flags,
        count=count,
        epoch=epoch,
        durable=durable,
        appended_at=appended_at,
        runs=runs,
        payload=payload,
    )


def encode_row_frame(
    salt_crc: int, base: int, epoch: int, durable: int, appended_at: int, row: Row, zstd_level: int | None
) -> bytes | bytearray:
    """The data frame of one record: the same bytes as `encode_data_frame` of `encode_row`, quicker for a plain one."""
    value, key, tag, headers, timestamp = row
    if value is not None and key is None and tag is None and not headers and zstd_level is None:
        size = len(value)
        if size < _JOIN_MAX:
            head = _PACK_ROW_HEAD(
                FORMAT_VERSION, _DATA, _NONE, 0, 1, epoch, 0, durable, appended_at, timestamp, 0, size
            )
            return close_frame(salt_crc, base, head + value + PADDING[size & 7])
    return encode_data_frame(
        salt_crc=salt_crc,
        base=base,
        epoch=epoch,
        durable=durable,
        appended_at=appended_at,
        runs=(),
        columns=encode_row(row),
        zstd_level=zstd_level,
    )


class _Compressors(threading.local):
    """One compressor per level and one decompressor for each thread: they are not safe to share."""

    def __init__(self) -> None:
        self.by_level: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_COMPRESSORS: Final = _Compressors()


def _compress(columns: ColumnBytes, level: int) -> list[Bytes] | None:
    """The compressed payload, or `None` if it would not be smaller."""
    compressor = _COMPRESSORS.by_level.get(level)
    if compressor is None:
        compressor = _COMPRESSORS.by_level[level] = zstandard.ZstdCompressor(level=level, write_content_size=True)
    stored = compressor.compress(b"".join(columns.parts))
    padding = PADDING[len(stored) & 7]
    if _SIZES.size + len(stored) + len(padding) >= columns.size:
        return None
    return [_SIZES.pack(columns.size, len(stored)), stored, padding]


def decompress(buffer: Bytes, start: int, stop: int) -> bytes:
    """The columns behind a size prefix; bounded before anything is allocated, and exact."""
    if stop - start < _SIZES.size:
        raise Corrupt("a compressed frame ends inside its sizes")
    raw_size, stored_size = _SIZES.unpack_from(buffer, start)
    if raw_size > RAW_BYTES_MAX or (stored_size + 7) & ~7 != stop - start - _SIZES.size:
        raise Corrupt(f"a compressed frame claims {stored_size} stored and {raw_size} raw bytes")
    stored = memoryview(buffer)[start + _SIZES.size : start + _SIZES.size + stored_size]
    try:
        # The size inside the zstd header is what gets allocated, so it is compared first.
        if zstandard.frame_content_size(stored) != raw_size:
            raise Corrupt(f"a compressed frame does not hold the {raw_size} raw bytes it claims")
        raw = _COMPRESSORS.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a compressed frame does not decompress: {error}") from error
    if len(raw) != raw_size:
        raise Corrupt(f"a compressed frame holds {len(raw)} bytes and not {raw_size}")
    return raw


def merge(batches: Sequence[Batch]) -> ColumnBytes:
    """The columns of consecutive batches as if all their records had been encoded at once, without times."""
    return merge_layouts([(batch._layout, batch._first, batch.count) for batch in batches])
