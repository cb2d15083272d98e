"""Sets of offsets: which records were deleted. Roaring bitmaps over fixed windows of 2**20 offsets. Knows no frames.

    bitmap := the portable roaring serialization of 32-bit numbers, each container in a smallest form

An `OffsetSet` never changes, so that a reader may go on with the one it has. Cheap for ranges and for
scattered offsets alike: at most 128 KiB and a few bytes per window, whatever is in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from forebay.errors import Corrupt

WINDOW: Final = 1 << 20
"""Offsets per window; a window starts at a multiple of this."""


class OffsetSet:
    """A set of offsets. Equal sets are stored in equally many bytes, not always the same ones."""

    __slots__ = ("_windows",)

    def __init__(self, windows: dict[int, BitMap] | None = None) -> None:
        """`windows` maps the start of a window to what is in it, counted from there; the set takes it over."""
        self._windows = {start: bitmap for start, bitmap in sorted((windows or {}).items()) if bitmap}

    @classmethod
    def of(cls, offsets: Iterable[int] | npt.NDArray[np.integer]) -> OffsetSet:
        """The set of these offsets, in any order."""
        if not isinstance(offsets, np.ndarray):
            offsets = np.fromiter(offsets, dtype=np.int64)
        if not len(offsets):
            return cls()
        ordered = np.sort(offsets.astype(np.int64))
        starts = ordered & -WINDOW
        edges = np.flatnonzero(starts[1:] != starts[:-1]) + 1
        parts = np.split((ordered - starts).astype(np.uint32), edges)
        firsts = starts[np.concatenate([[0], edges])].tolist()
        return cls({first: BitMap(array("I", part.tobytes())) for first, part in zip(firsts, parts, strict=True)})

    @classmethod
    def of_range(cls, start: int, stop: int) -> OffsetSet:
        """The set of all offsets in `[start, stop)`."""
        first = start & -WINDOW
        windows = range(first, stop, WINDOW) if start < stop else ()
        return cls({at: BitMap(range(max(start - at, 0), min(stop - at, WINDOW))) for at in windows})

    def __len__(self) -> int:
        return sum(map(len, self._windows.values()))

    def __contains__(self, offset: int) -> bool:
        start = offset & -WINDOW
        return start in self._windows and offset - start in self._windows[start]

    def __iter__(self) -> Iterator[int]:
        for start, bitmap in self._windows.items():
            for place in bitmap:
                yield start + place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OffsetSet) and self._windows == other._windows

    __hash__ = None  # type: ignore[assignment]  # a set of millions is no key

    def __repr__(self) -> str:
        return f"OffsetSet({len(self)} offsets in {len(self._windows)} windows)"

    def __or__(self, other: OffsetSet) -> OffsetSet:
        windows = dict(self._windows)
        for start, bitmap in other._windows.items():
            windows[start] = windows[start] | bitmap if start in windows else bitmap
        return OffsetSet(windows)

    def __sub__(self, other: OffsetSet) -> OffsetSet:
        empty = BitMap()
        return OffsetSet({start: bitmap - other._windows.get(start, empty) for start, bitmap in self._windows.items()})

    def windows(self) -> Iterator[tuple[int, BitMap]]:
        """Each window that holds something, in order: its start, and its offsets counted from there. Read only."""
        yield from self._windows.items()

    def offsets(self) -> npt.NDArray[np.int64]:
        """All offsets, in order."""
        parts = [np.frombuffer(bitmap.to_array(), np.uint32).astype(np.int64) + at for at, bitmap in self.windows()]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def clipped(self, start: int, stop: int) -> OffsetSet:
        """The offsets of this set in `[start, stop)`."""
        kept = {}
        for at, bitmap in self._windows.items():
            if start <= at and at + WINDOW <= stop:
                kept[at] = bitmap
            elif at < stop and start < at + WINDOW:
                kept[at] = bitmap & BitMap(range(max(start - at, 0), min(stop - at, WINDOW)))
        return OffsetSet(kept)

    def count_in(self, start: int, stop: int) -> int:
        """How many offsets of `[start, stop)` are in the set."""
        return sum(bitmap.range_cardinality(low, high) for _, bitmap, low, high in self._within(start, stop))

    def mask(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        """For each offset of `[start, start + count)` whether it is in the set."""
        found = np.zeros(count, dtype=np.bool_)
        for at, bitmap, low, high in self._within(start, start + count):
            if bitmap.range_cardinality(low, high):
                inside = bitmap & BitMap(range(low, high))
                found[np.frombuffer(inside.to_array(), np.uint32).astype(np.int64) + (at - start)] = True
        return found

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, BitMap, int, int]]:
        """Windows that `[start, stop)` touches, each with the part of it that is wanted."""
        if start >= stop:
            return
        touched = range(start & -WINDOW, stop, WINDOW)
        for at in touched if len(touched) <= len(self._windows) else self._windows:
            bitmap = self._windows.get(at)
            if bitmap is not None and at < stop and start < at + WINDOW:
                yield at, bitmap, max(start - at, 0), min(stop - at, WINDOW)


def encode_bitmap(bitmap: BitMap) -> bytes:
    """The stored bytes of a bitmap: the same for equal ones, however they came about, and few."""
    # Made again: a bitmap keeps the shapes that its history gave it, where another would be as good.
    plain = BitMap(bitmap.to_array())
    plain.run_optimize()
    return plain.serialize()


def decode_bitmap(stored: bytes, count: int) -> BitMap:
    """The bitmap of exactly these bytes; `Corrupt` if they are none, or of another number of entries."""
    try:
        bitmap = BitMap.deserialize(stored)
    except (ValueError, IndexError) as error:
        raise Corrupt(f"{len(stored)} bytes are no roaring bitmap: {error}") from error
    if len(bitmap) != count or bitmap.serialize() != stored:
        raise Corrupt(f"a bitmap of {len(stored)} bytes has {len(bitmap)} entries, expected {count}, or bytes too many")
    return bitmap
