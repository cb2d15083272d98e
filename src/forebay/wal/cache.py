"""The newest published frames of a shard, in memory, bounded in bytes.

Holds encoded frames exactly as they were written, so it costs no second encoding and can
replace a damaged tail byte for byte. Knows nothing of files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from forebay.format.batch import Batch, decode
from forebay.format.frame import HEADER_SIZE, FrameHead
from forebay.format.head import WHOLE_HEAD
from forebay.format.scan import table_at
from forebay.format.stretch import STRETCH_MIN, batches_of
from forebay.locks import Rank, RankedLock

SMALL_BYTES = 2048
"""Frames up to here are worth copying to be read together."""


class CachedFrame(NamedTuple):
    """One published data frame: the offsets it covers and its bytes."""

    base: int
    end: int
    data: bytes

    def batch(self) -> Batch:
        """The records of the frame."""
        _, length, _, _, *rest = WHOLE_HEAD.unpack_from(self.data)
        return decode(self.data, 0, FrameHead(self.base, length + HEADER_SIZE, *rest))


def batches_in(frames: Sequence[CachedFrame]) -> list[Batch]:
    """The records of consecutive frames; those of many small ones are put together."""
    if len(frames) < STRETCH_MIN or len(frames[0].data) > SMALL_BYTES:
        return [frame.batch() for frame in frames]
    sizes = [len(frame.data) for frame in frames]
    positions = np.array([0, *accumulate(sizes[:-1])], dtype=np.int64)
    buffer = b"".join([frame.data for frame in frames])
    return [batch for batch, _ in batches_of(buffer, table_at(buffer, positions))]


class TailCache:
    """Frames in offset order without a hole; the oldest go first when the limit is reached."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._frames: dict[int, CachedFrame] = {}
        self._bases: list[int] = []
        self._dropped = 0
        self._end = -1
        self._lock = RankedLock(Rank.LEAF, "wal.tail")
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def add(self, frames: Sequence[CachedFrame]) -> None:
        """Append frames that continue the newest one; a jump in offsets empties the cache first."""
        with self._lock:
            for frame in frames:
                base, end, data = frame
                if base != self._end:
                    self._clear()
                self._frames[base] = frame
                self._bases.append(base)
                self._end = end
                self.bytes += len(data)
            while self.bytes > self._bytes_max and len(self._frames) > 1:
                self._drop_oldest()

    def frames_from(self, offset: int, bytes_max: int) -> list[CachedFrame]:
        """Frames that cover `offset` and on, at least one if any, up to about `bytes_max`; empty if not held."""
        with self._lock:
            frame = self._covering(offset)
            if frame is None:
                self.misses += 1
                return []
            self.hits += 1
            found = [frame]
            size = len(frame.data)
            while (frame := self._frames.get(frame.end)) is not None:
                size += len(frame.data)
                if size > bytes_max:
                    break
                found.append(frame)
            return found

    def next_frame(self, offset: int) -> CachedFrame | None:
        """The first held frame that starts at `offset` or later."""
        with self._lock:
            index = max(bisect_left(self._bases, offset), self._dropped)
            return self._frames[self._bases[index]] if index < len(self._bases) else None

    def read_cached_since(self, offset: int) -> tuple[list[Batch], int]:
        """All cached records at or after `offset`, and the offset that follows them (the watermark)."""
        with self._lock:
            held = [frame for frame in self._frames.values() if frame.end > offset]
        batches = [frame.batch() for frame in held]
        if batches and batches[0].base < offset:
            batches[0] = batches[0].slice(offset, batches[0].end)
        return batches, held[-1].end if held else offset

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._clear()

    def _covering(self, offset: int) -> CachedFrame | None:
        index = bisect_right(self._bases, offset) - 1
        frame = self._frames.get(self._bases[index]) if index >= self._dropped else None
        return frame if frame is not None and offset < frame.end else None

    def _clear(self) -> None:
        self._frames.clear()
        self._bases.clear()
        self._dropped = 0
        self.bytes = 0

    def _drop_oldest(self) -> None:
        # The list of bases is trimmed in bulk: deleting from its front each time would cost its length.
        self.bytes -= len(self._frames.pop(self._bases[self._dropped]).data)
        self._dropped += 1
        if self._dropped * 2 > len(self._bases):
            del self._bases[: self._dropped]
            self._dropped = 0
