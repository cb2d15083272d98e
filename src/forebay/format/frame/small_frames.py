"""Many small frames as few batches: stretches of one-record frames are put together by column.

The same records as decoding each frame, at a fraction of the cost: heads and offsets are looked at as
arrays, and only the bytes of values, keys and tags are touched. Knows frames and columns, no disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.errors import Corrupt
from forebay.format.columns.rows import KEYS, TAGS, ColumnBytes, PaddedBuffers
from forebay.format.columns.times import Appended, timed
from forebay.format.frame.batch import Batch, batch_of, decode
from forebay.format.frame.head import HEAD_SIZE, Codec, FrameHead, Kind
from forebay.format.frame.scan import FrameTable
from forebay.records import OFFSET_MAX

STRETCH_MIN: Final = 16
"""Fewer frames are decoded one by one: an array step costs about as much."""

Places: TypeAlias = npt.NDArray[np.int64]
_DATA: Final = int(Kind.DATA)
_NONE: Final = int(Codec.NONE)
_SIMPLE: Final = KEYS | TAGS
"""Columns without nulls that hold one entry each: value, and these."""


def batches_of(buffer: bytes, table: FrameTable) -> Iterator[tuple[Batch, int]]:
    """The records of all data frames of a table, in order, each batch with the bytes that its frames take.

    A batch never spans a gap in the offsets, a control frame or a change of epoch. It keeps the times of its frames.
    """
    simple = _simple(table)
    for first, stop in pairwise(_edges(table, simple)):
        if stop - first >= STRETCH_MIN and simple[first]:
            length = int(table.position[stop - 1] + table.length[stop - 1] - table.position[first])
            yield _together(buffer, FrameTable(*[field[first:stop] for field in table])), length
            continue
        for row in range(first, stop):
            position, *head = [int(field[row]) for field in table]
            if head[2] == _DATA:
                yield decode(buffer, position, FrameHead(*head)), head[1]


def _simple(table: FrameTable) -> npt.NDArray[np.bool_]:
    """Which frames hold one record, as it is, without a producer or anything absent that needs a bitmap."""
    alike = (table.kind == _DATA) & (table.codec == _NONE) & (table.count == 1) & (table.run_count == 0)
    return np.asarray(alike & ((table.columns & ~_SIMPLE) == 0))


def _edges(table: FrameTable, simple: npt.NDArray[np.bool_]) -> list[int]:
    """Where stretches of alike, consecutive simple frames begin and end; what lies between them is a piece too."""
    joined = simple[1:] & simple[:-1]
    joined &= table.columns[1:] == table.columns[:-1]
    joined &= table.epoch[1:] == table.epoch[:-1]
    joined &= table.base[1:] == table.base[:-1] + np.uint64(1)
    joined &= table.position[1:] == table.position[:-1] + table.length[:-1]
    joined |= ~simple[1:] & ~simple[:-1]
    inner: list[int] = (np.flatnonzero(~joined) + 1).tolist()
    return [0, *inner, len(simple)]


def _together(buffer: bytes, table: FrameTable) -> Batch:
    """One batch from one-record frames that follow each other."""
    count = len(table.position)
    base, flags = int(table.base[0]), int(table.columns[0])
    if base + count > OFFSET_MAX:
        raise Corrupt(f"frame at byte {int(table.position[0])}: offset {base} + {count} is too large")
    origin = int(table.position[0])
    words = np.frombuffer(buffer, "<i4", count=(len(buffer) - origin) // 4, offset=origin)
    places = table.position - origin + HEAD_SIZE
    out = PaddedBuffers()
    stamps = words[(places >> 2)[:, None] + np.arange(2)].view("<i8").ravel()
    out.add_array(np.ascontiguousarray(stamps))
    places = places + 8
    ends = table.position - origin + table.length
    for _ in range(1 + bool(flags & KEYS) + bool(flags & TAGS)):
        places = _add_column(out, buffer, origin, words, places, ends)
    if (places != ends).any():
        row = int(np.argmax(places != ends))
        raise Corrupt(f"frame at byte {int(table.position[row])}: its columns do not end with it")
    columns = timed(ColumnBytes(flags, count, out.parts, out.size, 0, 0), _appended(table.appended_at))
    return batch_of(columns, base=base, epoch=int(table.epoch[0]), appended_at=int(table.appended_at.max()))


def _appended(times: npt.NDArray[np.int64]) -> list[Appended]:
    edges = [0, *(np.flatnonzero(times[1:] != times[:-1]) + 1).tolist(), len(times)]
    return [Appended(stop - first, int(times[first])) for first, stop in pairwise(edges)]


def _add_column(
    out: PaddedBuffers, buffer: bytes, origin: int, words: npt.NDArray[np.int32], places: Places, ends: Places
) -> Places:
    """Add the column whose only entry begins at each place; give the places behind it."""
    if (places + 8 > ends).any():
        raise Corrupt("a column begins behind the end of its frame")
    sizes = words[(places >> 2) + 1].astype(np.int64)
    behind = places + 8 + ((sizes + 7) & ~7)
    if words[places >> 2].any() or (sizes < 0).any() or (behind > ends).any():
        raise Corrupt("offsets of a column do not rise from 0, or reach behind the end of its frame")
    offsets = np.zeros(len(sizes) + 1, dtype="<i4")
    np.cumsum(sizes, out=offsets[1:])
    out.add_array(offsets)
    out.add(_filling(buffer, origin, places + 8, sizes))
    return np.asarray(behind)


def _filling(buffer: bytes, origin: int, places: Places, sizes: Places) -> bytes:
    size = int(sizes[0])
    steps = places[1:] - places[:-1]
    if (sizes == size).all() and (steps == steps[0]).all():
        # Alike in every way: one strided copy.
        start = origin + int(places[0])
        whole: npt.NDArray[Any] = np.ndarray(
            (len(places), size), np.uint8, buffer, offset=start, strides=(int(steps[0]), 1)
        )
        return whole.tobytes()
    starts: Sequence[int] = (places + origin).tolist()
    stops: Sequence[int] = (places + origin + sizes).tolist()
    return b"".join([buffer[start:stop] for start, stop in zip(starts, stops, strict=True)])
