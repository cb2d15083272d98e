"""Where each column lies in a body, found and checked once. Knows the column layout, no frames and no disk.

A body whose crc holds may still be hostile: every place is checked against the end of the columns
before it is used, offsets must rise, and anything else is `Corrupt`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.errors import Corrupt
from forebay.format.columns import rows as column_format
from forebay.format.columns.times import find_times
from forebay.records import Bytes, Headers

_UNPACK_ONE: Final = struct.Struct("<ii").unpack_from
_NEW: Final = tuple.__new__
"""Half the cost of calling a named tuple's class."""
_ROWS_FEW: Final = 32
_UNIFORM_BYTES_MAX: Final = 4096
_GROUP: Final = 64


class ColumnSpan(NamedTuple):
    """One column of bytes: absolute places of its bitmap (-1: no nulls), offsets and filling."""

    bits: int
    offsets: int
    filling: int
    size: int


class Strip(NamedTuple):
    """A column of bytes, or some rows of it, as arrays: entry i is `filling[offsets[i]:offsets[i + 1]]`."""

    filling: memoryview
    offsets: npt.NDArray[np.int32]
    present: npt.NDArray[np.bool_] | None
    """`None` if no entry is null."""


class Layout(NamedTuple):
    """The places of all columns of `rows` records inside `buffer`; `flags` and `stop` leave the times out."""

    buffer: Bytes
    start: int
    stop: int
    flags: int
    rows: int
    value: ColumnSpan
    key: ColumnSpan | None
    tag: ColumnSpan | None
    lists: int
    names: ColumnSpan | None
    header_values: ColumnSpan | None
    times: int
    """Where they begin; -1 if all were appended at once."""


def find(buffer: Bytes, start: int, stop: int, flags: int, rows: int) -> Layout:
    """Check and place the columns that fill `[start, stop)` of the buffer exactly."""
    position = start + 8 * rows
    if not rows or position > stop:
        raise Corrupt(f"columns of {rows} records do not fit in {stop - start} bytes")
    if flags == 0 and rows == 1 and position + 8 <= stop:
        zero, size = _UNPACK_ONE(buffer, position)
        if zero == 0 <= size and position + 8 + ((size + 7) & ~7) == stop:
            span = _NEW(ColumnSpan, (-1, position, position + 8, size))
            return _NEW(Layout, (buffer, start, stop, 0, 1, span, None, None, -1, None, None, -1))
    value, position = _span(buffer, position, stop, rows, flags & column_format.VALUE_NULLS)
    key = tag = names = header_values = None
    lists = -1
    if flags & column_format.KEYS:
        key, position = _span(buffer, position, stop, rows, flags & column_format.KEY_NULLS)
    if flags & column_format.TAGS:
        tag, position = _span(buffer, position, stop, rows, flags & column_format.TAG_NULLS)
    if flags & column_format.HEADERS:
        lists = position
        count, position = _offsets_end(buffer, position, stop, rows)
        names, position = _span(buffer, position, stop, count, 0)
        header_values, position = _span(buffer, position, stop, count, flags & column_format.HEADER_NULLS)
    end, times = position, -1
    if flags & column_format.TIMES:
        times, position = position, find_times(buffer, position, stop, rows)
        flags &= ~column_format.TIMES
    if position != stop:
        raise Corrupt(f"columns end at byte {position} of the buffer, not at {stop}")
    return _NEW(Layout, (buffer, start, end, flags, rows, value, key, tag, lists, names, header_values, times))


def _span(buffer: Bytes, position: int, stop: int, entries: int, nulls: int) -> tuple[ColumnSpan, int]:
    """The column at `position` and the place behind it."""
    bits = -1
    if nulls:
        bits = position
        position += (entries + 63) // 64 * 8
    if entries == 1 and position + 8 <= stop:
        zero, size = _UNPACK_ONE(buffer, position)
        filling = position + 8
        if zero or size < 0:
            raise Corrupt(f"offsets at byte {position} of the buffer do not rise from 0")
    else:
        size, filling = _offsets_end(buffer, position, stop, entries)
    end = filling + ((size + 7) & ~7)
    if end > stop:
        raise Corrupt(f"a column of {size} bytes reaches behind the end of its frame")
    return _NEW(ColumnSpan, (bits, position, filling, size)), end


def _offsets_end(buffer: Bytes, position: int, stop: int, entries: int) -> tuple[int, int]:
    """The last offset and the place behind the offsets, once they are seen to rise from 0."""
    end = position + ((4 * entries + 11) & ~7)
    if end > stop:
        raise Corrupt(f"the offsets of {entries} entries reach behind the end of their frame")
    if entries <= _ROWS_FEW:
        few = struct.unpack_from(f"<{entries + 1}i", buffer, position)
        rising = few[0] == 0 and list(few) == sorted(few)
        last = few[-1]
    else:
        many = np.frombuffer(buffer, "<i4", count=entries + 1, offset=position)
        rising = many[0] == 0 and bool((many[1:] >= many[:-1]).all())
        last = int(many[-1])
    if not rising:
        raise Corrupt(f"offsets at byte {position} of the buffer do not rise from 0")
    return last, end


def offsets_at(buffer: Bytes, position: int, first: int, stop: int) -> npt.NDArray[np.int32]:
    """The offsets of entries `[first, stop)`, one more than entries."""
    return np.frombuffer(buffer, "<i4", count=stop - first + 1, offset=position + 4 * first)


def validity(buffer: Bytes, span: ColumnSpan, first: int, stop: int) -> npt.NDArray[np.bool_]:
    """Which of the entries `[first, stop)` of a column with nulls are present."""
    low = first // 8
    packed = np.frombuffer(buffer, np.uint8, count=(stop + 7) // 8 - low, offset=span.bits + low)
    bits = np.unpackbits(packed, bitorder="little")[first - low * 8 : stop - low * 8]
    return bits.view(np.bool_)


def strip(buffer: Bytes, span: ColumnSpan, first: int, stop: int) -> Strip:
    """The entries `[first, stop)` of a column of bytes, not copied."""
    present = validity(buffer, span, first, stop) if span.bits >= 0 else None
    filling = memoryview(buffer)[span.filling : span.filling + span.size]
    return Strip(filling, offsets_at(buffer, span.offsets, first, stop), present)


def entries(buffer: Bytes, span: ColumnSpan, first: int, stop: int) -> list[bytes | None]:
    """The entries `[first, stop)` of a column of bytes."""
    found: list[bytes | None] = list(_slices(buffer, span, first, stop))
    if span.bits >= 0:
        for absent in np.flatnonzero(~validity(buffer, span, first, stop)).tolist():
            found[absent] = None
    return found


def _slices(buffer: Bytes, span: ColumnSpan, first: int, stop: int) -> Sequence[bytes]:
    count = stop - first
    if not count:
        return []
    offsets = offsets_at(buffer, span.offsets, first, stop)
    size = int(offsets[1]) - int(offsets[0])
    if count >= _GROUP and size <= _UNIFORM_BYTES_MAX and bool((offsets[1:] - offsets[:-1] == size).all()):
        return _equal_slices(buffer, span.filling + int(offsets[0]), size, count)
    if isinstance(buffer, bytes):
        whole = buffer
        places = (offsets.astype(np.int64) + span.filling).tolist()
    else:
        low = int(offsets[0])
        whole = bytes(memoryview(buffer)[span.filling + low : span.filling + int(offsets[-1])])
        places = (offsets - low).tolist()
    return [whole[start:end] for start, end in pairwise(places)]


def _equal_slices(buffer: Bytes, position: int, size: int, count: int) -> list[bytes]:
    """Entries of one length come out of one `struct` call per 64 of them, at a third of the cost of slicing."""
    if not size:
        return [b""] * count
    rest = count % _GROUP
    middle = position + size * (count - rest)
    view = memoryview(buffer)
    found = list(chain.from_iterable(_group(size, _GROUP).iter_unpack(view[position:middle])))
    if rest:
        found += _group(size, rest).unpack_from(view, middle)
    return found


@lru_cache(maxsize=1024)
def _group(size: int, count: int) -> struct.Struct:
    return struct.Struct(f"{size}s" * count)


def texts(buffer: Bytes, span: ColumnSpan, first: int, stop: int) -> list[str | None]:
    """The entries `[first, stop)` of a utf8 column."""
    offsets = offsets_at(buffer, span.offsets, first, stop)
    low = int(offsets[0])
    whole = bytes(memoryview(buffer)[span.filling + low : span.filling + int(offsets[-1])])
    found: list[str | None]
    if whole.isascii():
        text = whole.decode("ascii")
        places = (offsets - low).tolist()
        found = [text[start:end] for start, end in pairwise(places)]
    else:
        found = [text_of(entry) for entry in _slices(buffer, span, first, stop)]
    if span.bits >= 0:
        for absent in np.flatnonzero(~validity(buffer, span, first, stop)).tolist():
            found[absent] = None
    return found


def text_of(entry: bytes | None) -> str | None:
    """One entry of a utf8 column."""
    if entry is None:
        return None
    try:
        return entry.decode()
    except UnicodeDecodeError as error:
        raise Corrupt(f"a column of text is not utf8: {error}") from error


def header_rows(found: Layout, first: int, stop: int) -> list[Headers]:
    """The headers of the rows `[first, stop)` of a layout that has some."""
    assert found.names is not None and found.header_values is not None
    lists = offsets_at(found.buffer, found.lists, first, stop).tolist()
    low, high = lists[0], lists[-1]
    names = texts(found.buffer, found.names, low, high)
    values = entries(found.buffer, found.header_values, low, high)
    pairs: list[tuple[str, bytes | None]] = list(zip(names, values, strict=True))  # type: ignore[arg-type]
    return [tuple(pairs[start - low : end - low]) for start, end in pairwise(lists)]
