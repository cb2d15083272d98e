"""Columns of a data frame: rows in, bytes in Arrow's layout out. Knows no frames and no disk.

    columns := timestamp value [key] [tag] [headers] [times]
    timestamp := i64 per record
    value, key := [validity] offsets data             a null has a slot of length zero
    tag := [validity] offsets data                    utf8
    headers := list offsets, name offsets, name data, [validity] offsets data
    validity := one bit per entry, lowest first, 1 = present; only if there is a null
    offsets := i32 per entry and one more, starting at 0
    times := see `times`

Each buffer starts on an 8-byte boundary and is zero padded. A column in which no record has
anything is left out. The same rows give the same bytes, whichever encoder was taken: packing with
`struct` is quicker for few rows, arrays of lengths for many.
"""

from __future__ import annotations

import enum
import operator
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, repeat
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.errors import Invalid
from forebay.format.checksum import crc32
from forebay.records import Bytes, Headers

Row: TypeAlias = tuple[bytes | None, bytes | None, str | None, Headers, int]
"""value, key, tag, headers, timestamp"""
Timestamps: TypeAlias = Sequence[int] | npt.NDArray[np.int64]
Sizes: TypeAlias = npt.NDArray[np.int64]
E = TypeVar("E", bytes, str)


class Column(enum.IntFlag):
    """Which columns a data frame has, which of them hold a null, and whether append times follow."""

    KEYS = 1
    TAGS = 2
    HEADERS = 4
    VALUE_NULLS = 8
    KEY_NULLS = 16
    TAG_NULLS = 32
    HEADER_NULLS = 64
    TIMES = 128


COLUMN_BYTES_MAX: Final = 2**31 - 1
ROWS_SMALL: Final = 96
"""Up to here `struct` is quicker than arrays."""
ENTRY_JOIN_MAX: Final = 512
"""Entries that are larger on average are not copied to be joined: the frame that they go into joins them."""
PADDING: Final = tuple(bytes(n) for n in (0, 7, 6, 5, 4, 3, 2, 1))
"""Indexed by size & 7."""

KEYS: Final = int(Column.KEYS)
TAGS: Final = int(Column.TAGS)
HEADERS: Final = int(Column.HEADERS)
VALUE_NULLS: Final = int(Column.VALUE_NULLS)
KEY_NULLS: Final = int(Column.KEY_NULLS)
TAG_NULLS: Final = int(Column.TAG_NULLS)
HEADER_NULLS: Final = int(Column.HEADER_NULLS)
TIMES: Final = int(Column.TIMES)


class Columns(msgspec.Struct, frozen=True, gc=False):
    """Records by column, as Python sequences of equal length. A column that is `None` is absent."""

    values: Sequence[bytes | None]
    timestamps: Timestamps
    keys: Sequence[bytes | None] | None = None
    tags: Sequence[str | None] | None = None
    headers: Sequence[Headers | None] | None = None


class ColumnBytes(NamedTuple):
    """Encoded columns: `parts` in order make `size` bytes, a multiple of 8."""

    flags: int
    count: int  # type: ignore[assignment]
    parts: list[Bytes]
    size: int
    time_min: int
    time_max: int


def content_checksum(columns: ColumnBytes) -> int:
    """A checksum over the records but for their timestamps, which may differ in a repeat. One form, one checksum."""
    skipped, checksum = 8 * columns.count, crc32(columns.flags.to_bytes(4, "little"))
    for part in columns.parts:
        size = len(part)
        if skipped < size:
            checksum = crc32(memoryview(part)[skipped:] if skipped else part, checksum)
        skipped = max(0, skipped - size)
    return checksum


class PaddedBuffers:
    """Buffers put one behind the other, each padded to 8 bytes."""

    __slots__ = ("parts", "size")

    def __init__(self) -> None:
        self.parts: list[Bytes] = []
        self.size = 0

    def add(self, part: Bytes) -> None:
        """Append one buffer of single bytes and its padding."""
        self.add_joined((part,), len(part))

    def add_joined(self, parts: Sequence[Bytes], size: int) -> None:
        """Append several buffers as one of `size` bytes."""
        _check_column(size)
        self.parts += parts
        if size & 7:
            self.parts.append(PADDING[size & 7])
        self.size += (size + 7) & ~7

    def add_array(self, array: npt.NDArray[Any]) -> None:
        """Append the bytes of a contiguous array."""
        self.add(array.data.cast("B"))


def _check_column(size: int) -> None:
    """`Invalid` if offsets cannot reach so many bytes."""
    if size > COLUMN_BYTES_MAX:
        raise Invalid(f"a column of {size} bytes is larger than {COLUMN_BYTES_MAX}: append fewer records at once")


_ROW_HEAD: Final = struct.Struct("<qii")
_PACK_ROW: Final = _ROW_HEAD.pack
_PACK_ONE: Final = struct.Struct("<ii").pack
_NEW: Final = tuple.__new__
"""Half the cost of calling a named tuple's class."""
_ROW_JOIN_MAX: Final = 4096
_NO_VALUE: Final = bytes(16)


def encode_row(row: Row) -> ColumnBytes:
    """One record, the commonest small batch."""
    value, key, tag, headers, timestamp = row
    if value is None or key is not None or tag is not None or headers:
        return _encode_full_row(row)
    size = len(value)
    head = _PACK_ROW(timestamp, 0, size)
    parts: list[Bytes]
    if size < _ROW_JOIN_MAX:
        parts = [head + value + PADDING[size & 7]]
    else:
        parts = [head, value, PADDING[size & 7]]
    return _NEW(ColumnBytes, (0, 1, parts, (size + 23) & ~7, timestamp, timestamp))


def _encode_full_row(row: Row) -> ColumnBytes:
    """One record with a key, a tag, headers or without a value."""
    value, key, tag, headers, timestamp = row
    flags = 0
    parts: list[Bytes]
    if value is None:
        flags = VALUE_NULLS
        parts = [timestamp.to_bytes(8, "little", signed=True), _NO_VALUE]
    else:
        parts = [_PACK_ROW(timestamp, 0, len(value)), value, PADDING[len(value) & 7]]
    if key is not None:
        flags |= KEYS
        parts += (_PACK_ONE(0, len(key)), key, PADDING[len(key) & 7])
    if tag is not None:
        flags |= TAGS
        text = tag.encode()
        parts += (_PACK_ONE(0, len(text)), text, PADDING[len(text) & 7])
    if headers:
        lists = PaddedBuffers()
        flags |= _add_headers_small(lists, (headers,))
        parts += lists.parts
    whole = b"".join(parts)
    return _NEW(ColumnBytes, (flags, 1, [whole], len(whole), timestamp, timestamp))


def encode_rows(rows: Sequence[Row]) -> ColumnBytes:
    """Records given one by one, at least one of them."""
    if len(rows) == 1:
        return encode_row(rows[0])
    values, keys, tags, headers, timestamps = zip(*rows, strict=True)
    return encode_columns(Columns(values, timestamps, keys, tags, headers))


def encode_columns(columns: Columns) -> ColumnBytes:
    """Records by column, at least one of them. Types and sizes were checked by the caller."""
    count = len(columns.values)
    assert count and count == len(columns.timestamps), "columns of one length, not empty"
    return encode_small(columns) if count <= ROWS_SMALL else encode_large(columns)


def encode_small(columns: Columns) -> ColumnBytes:
    """Pack with `struct`: no array is built, so a few rows cost a few microseconds."""
    count = len(columns.values)
    stamps = columns.timestamps.tolist() if isinstance(columns.timestamps, np.ndarray) else columns.timestamps
    out = PaddedBuffers()
    out.add(_packer(count, "q").pack(*stamps))
    flags = VALUE_NULLS if _add_binary(out, columns.values) else 0
    if present(columns.keys):
        flags |= KEYS | (KEY_NULLS if _add_binary(out, columns.keys) else 0)
    if present(columns.tags):
        flags |= TAGS | (TAG_NULLS if _add_binary(out, encoded(columns.tags)) else 0)
    if columns.headers is not None and any(columns.headers):
        flags |= _add_headers_small(out, columns.headers)
    parts: list[Bytes] = out.parts if out.size > _ROW_JOIN_MAX * 8 else [b"".join(out.parts)]
    return ColumnBytes(flags, count, parts, out.size, min(stamps), max(stamps))


def encode_large(columns: Columns) -> ColumnBytes:
    """Lengths become arrays and entries are joined by one call: little is paid per row, some microseconds per batch."""
    stamps = np.ascontiguousarray(columns.timestamps, dtype="<i8")
    out = PaddedBuffers()
    out.add_array(stamps)
    flags = VALUE_NULLS if _add_many(out, columns.values) else 0
    if present(columns.keys):
        flags |= KEYS | (KEY_NULLS if _add_many(out, columns.keys) else 0)
    if present(columns.tags):
        flags |= TAGS | (TAG_NULLS if _add_texts(out, columns.tags) else 0)
    if columns.headers is not None and any(columns.headers):
        lists, names, values = flatten(columns.headers)
        out.add_array(np.array(lists, dtype="<i4"))
        _add_texts(out, names)
        flags |= HEADERS | (HEADER_NULLS if _add_many(out, values) else 0)
    return ColumnBytes(flags, len(stamps), out.parts, out.size, int(stamps.min()), int(stamps.max()))


def _add_many(out: PaddedBuffers, column: Sequence[bytes | None]) -> bool:
    """Add one column of bytes; say whether it holds a null. Large entries are added as they are, not copied."""
    entries, sizes, nulls = _sized(out, column, b"")
    size = _add_offsets(out, sizes)
    if size > ENTRY_JOIN_MAX * len(entries):
        out.add_joined(entries, size)
    else:
        filling = b"".join(entries)
        assert len(filling) == size, "entries are bytes"
        out.add(filling)
    return nulls


def _add_texts(out: PaddedBuffers, column: Sequence[str | None]) -> bool:
    """Add one column of text; say whether it holds a null."""
    entries, sizes, nulls = _sized(out, column, "")
    filling = "".join(entries).encode()
    if int(sizes.sum()) != len(filling):
        # Characters of several bytes: the lengths are known once each text is encoded by itself.
        sizes = np.fromiter((len(entry.encode()) for entry in entries), np.int64, len(entries))
    _add_offsets(out, sizes)
    out.add(filling)
    return nulls


def _sized(out: PaddedBuffers, column: Sequence[E | None], empty: E) -> tuple[Sequence[E], Sizes, bool]:
    """The entries with `empty` for nulls, their lengths, and whether there are nulls: then their bitmap is added."""
    count = len(column)
    try:
        return column, np.fromiter(map(len, column), np.int64, count), False  # type: ignore[return-value,arg-type]
    except TypeError:  # a null has no length
        valid = np.fromiter(map(operator.is_not, column, repeat(None)), np.bool_, count)
        out.add_array(np.packbits(valid, bitorder="little"))
        entries = [entry or empty for entry in column]
        return entries, np.fromiter(map(len, entries), np.int64, count), True


def _add_offsets(out: PaddedBuffers, sizes: Sizes) -> int:
    """Add where each entry of a column begins, and where the last one ends, which is returned."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    size = int(offsets[-1])
    _check_column(size)
    out.add_array(offsets.astype("<i4"))
    return size


def present(column: Sequence[Any] | None) -> TypeGuard[Sequence[Any]]:
    """Whether any entry is there."""
    if column is None:
        return False
    return column[0] is not None or column.count(None) != len(column)


def encoded(texts: Sequence[str | None]) -> list[bytes | None]:
    """Each text in utf8."""
    return [None if text is None else text.encode() for text in texts]


def _add_binary(out: PaddedBuffers, column: Sequence[bytes | None]) -> bool:
    """Add one column of bytes; say whether it holds a null."""
    entries, nulls = filled(column)
    if nulls:
        out.add(_bitmap(column))
    out.add(_packer(len(entries) + 1, "i").pack(0, *accumulate(map(len, entries))))
    out.add(b"".join(entries))
    return nulls


def filled(column: Sequence[bytes | None]) -> tuple[Sequence[bytes], bool]:
    """The column with empty bytes for nulls, and whether there were any."""
    if None in column:
        return [b"" if entry is None else entry for entry in column], True
    return column, False  # type: ignore[return-value]


def _bitmap(column: Sequence[object]) -> bytes:
    bits = sum(1 << i for i, entry in enumerate(column) if entry is not None)
    return bits.to_bytes((len(column) + 7) // 8, "little")


def _add_headers_small(out: PaddedBuffers, headers: Sequence[Headers | None]) -> int:
    lists, names, values = flatten(headers)
    out.add(_packer(len(lists), "i").pack(*lists))
    _add_binary(out, encoded(names))
    return HEADERS | (HEADER_NULLS if _add_binary(out, values) else 0)


def flatten(headers: Sequence[Headers | None]) -> tuple[list[int], list[str], list[bytes | None]]:
    """List offsets, and the names and values of all headers in order."""
    rows = [row or () for row in headers]
    lists = list(accumulate(map(len, rows), initial=0))
    pairs = list(chain.from_iterable(rows))
    return lists, [name for name, _ in pairs], [value for _, value in pairs]


@lru_cache(maxsize=512)
def _packer(count: int, letter: str) -> struct.Struct:
    return struct.Struct(f"<{count}{letter}")
