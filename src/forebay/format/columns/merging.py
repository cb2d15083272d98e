"""Merging: the columns of many batches as one, the same bytes as if encoded at once. Knows layouts, no frames.

Large pieces are concatenated buffer by buffer; small ones, such as thousands of frames of one record,
are gathered as rows first, because an array per column costs more than the rows in it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.format.columns import layout
from forebay.format.columns import rows as column_format
from forebay.format.columns.layout import ColumnSpan, Layout
from forebay.format.columns.rows import ColumnBytes, Columns, PaddedBuffers
from forebay.records import Bytes, Headers

Piece: TypeAlias = tuple[Layout, int, int]
"""A layout, the first row wanted and how many."""
_Strip: TypeAlias = tuple[Bytes, ColumnSpan | None, int, int]
"""A column's part: buffer, place (`None`: absent), first entry, end."""

_ROWS_FEW: Final = 24
_STAMP: Final = struct.Struct("<q").unpack_from


def merge_layouts(pieces: Sequence[Piece]) -> ColumnBytes:
    """The rows of all pieces, in order; at least one row."""
    assert pieces, "nothing to merge"
    large: list[Piece] = []
    few: list[Piece] = []
    for piece in pieces:
        if piece[2] > _ROWS_FEW:
            if few:
                large.append(_placed(_gather(few)))
                few = []
            large.append(piece)
        else:
            few.append(piece)
    if not large:
        return _gather(few)
    if few:
        large.append(_placed(_gather(few)))
    return _as_it_is(large[0]) if len(large) == 1 and large[0][2] == large[0][0].rows else _concatenate(large)


def _placed(columns: ColumnBytes) -> Piece:
    whole = b"".join(columns.parts)
    return layout.find(whole, 0, columns.size, columns.flags, columns.count), 0, columns.count


def _as_it_is(piece: Piece) -> ColumnBytes:
    found = piece[0]
    stamps = _stamps(piece)
    whole = memoryview(found.buffer)[found.start : found.stop]
    return ColumnBytes(found.flags, found.rows, [whole], found.stop - found.start, int(stamps.min()), int(stamps.max()))


def _stamps(piece: Piece) -> npt.NDArray[np.int64]:
    found, first, count = piece
    return np.frombuffer(found.buffer, "<i8", count=count, offset=found.start + 8 * first)


def _gather(pieces: Sequence[Piece]) -> ColumnBytes:
    """Rows of small pieces as Python objects, then encoded together."""
    stamps: list[int] = []
    values: list[bytes | None] = []
    keys: list[bytes | None] = []
    tags: list[str | None] = []
    headers: list[Headers | None] = []
    for found, first, count in pieces:
        buffer = found.buffer
        if found.rows == 1:
            stamps.append(_STAMP(buffer, found.start)[0])
            values.append(_only(buffer, found.value))
            keys.append(None if found.key is None else _only(buffer, found.key))
            tags.append(None if found.tag is None else layout.text_of(_only(buffer, found.tag)))
            headers.append(None if found.names is None else layout.header_rows(found, 0, 1)[0])
            continue
        stop = first + count
        stamps += _stamps((found, first, count)).tolist()
        values += layout.entries(buffer, found.value, first, stop)
        keys += layout.entries(buffer, found.key, first, stop) if found.key else [None] * count
        tags += layout.texts(buffer, found.tag, first, stop) if found.tag else [None] * count
        headers += layout.header_rows(found, first, stop) if found.names else [()] * count
    return column_format.encode_columns(Columns(values, stamps, keys, tags, headers))


def _only(buffer: Bytes, span: ColumnSpan) -> bytes | None:
    if span.bits >= 0 and not buffer[span.bits] & 1:
        return None
    entry = buffer[span.filling : span.filling + span.size]
    return entry if isinstance(entry, bytes) else bytes(entry)


def _concatenate(pieces: Sequence[Piece]) -> ColumnBytes:
    stamps = np.concatenate([_stamps(piece) for piece in pieces])
    out = PaddedBuffers()
    out.add_array(stamps)
    _, nulls = _add(out, [(p.buffer, p.value, first, first + n) for p, first, n in pieces], required=True)
    flags = column_format.VALUE_NULLS if nulls else 0
    if any(p.key for p, _, _ in pieces):
        kept, nulls = _add(out, [(p.buffer, p.key, first, first + n) for p, first, n in pieces])
        flags |= (column_format.KEYS if kept else 0) | (column_format.KEY_NULLS if nulls else 0)
    if any(p.tag for p, _, _ in pieces):
        kept, nulls = _add(out, [(p.buffer, p.tag, first, first + n) for p, first, n in pieces])
        flags |= (column_format.TAGS if kept else 0) | (column_format.TAG_NULLS if nulls else 0)
    if any(p.names for p, _, _ in pieces):
        flags |= _add_headers(out, pieces)
    return ColumnBytes(flags, len(stamps), out.parts, out.size, int(stamps.min()), int(stamps.max()))


def _add(out: PaddedBuffers, strips: Sequence[_Strip], *, required: bool = False) -> tuple[bool, bool]:
    """Add one column; say whether it was kept and whether it holds a null. One without any entry is dropped."""
    nulls = False
    if any(span is None or span.bits >= 0 for _, span, _, _ in strips):
        valid = np.concatenate([_valid(strip) for strip in strips])
        if not required and not valid.any():
            return False, False
        nulls = not valid.all()
        if nulls:
            out.add_array(np.packbits(valid, bitorder="little"))
    offsets = np.zeros(1 + sum(stop - first for _, _, first, stop in strips), dtype="<i4")
    fillings: list[Bytes] = []
    row, size = 1, 0
    for buffer, span, first, stop in strips:
        target = offsets[row : row + stop - first]
        row += stop - first
        if span is None:
            target[:] = size
            continue
        places = layout.offsets_at(buffer, span.offsets, first, stop)
        low, high = int(places[0]), int(places[-1])
        np.add(places[1:], size - low, out=target)
        fillings.append(memoryview(buffer)[span.filling + low : span.filling + high])
        size += high - low
    out.add_array(offsets)
    out.add_joined(fillings, size)
    return True, nulls


def _valid(strip: _Strip) -> npt.NDArray[np.bool_]:
    buffer, span, first, stop = strip
    if span is not None and span.bits >= 0:
        return layout.validity(buffer, span, first, stop)
    return np.full(stop - first, span is not None)


def _add_headers(out: PaddedBuffers, pieces: Sequence[Piece]) -> int:
    """Add the headers of all pieces, or nothing if no row wanted has one."""
    lists = np.zeros(1 + sum(count for _, _, count in pieces), dtype="<i4")
    names: list[_Strip] = []
    values: list[_Strip] = []
    row, total = 1, 0
    for found, first, count in pieces:
        target = lists[row : row + count]
        row += count
        if found.names is None:
            target[:] = total
            continue
        places = layout.offsets_at(found.buffer, found.lists, first, first + count)
        low, high = int(places[0]), int(places[-1])
        np.add(places[1:], total - low, out=target)
        total += high - low
        if high > low:
            names.append((found.buffer, found.names, low, high))
            values.append((found.buffer, found.header_values, low, high))
    if not total:
        return 0
    out.add_array(lists)
    _add(out, names, required=True)
    _, nulls = _add(out, values, required=True)
    return column_format.HEADERS | (column_format.HEADER_NULLS if nulls else 0)
