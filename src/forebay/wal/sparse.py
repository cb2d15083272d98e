"""Where in a log file to start looking for an offset or a time: one entry per few KiB, in memory.

A log file that is still growing has no index file; this takes its place. Pure bookkeeping.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

ENTRY_BYTES = 4096


class SparseIndex:
    """Entries in file order: first offset, byte position, and the highest time of all frames up to the next entry.

    An entry takes 24 bytes, so that thousands of shards with a long log file each stay small.
    """

    __slots__ = ("_offsets", "_positions", "_times", "times_known")

    def __init__(self) -> None:
        self._offsets = array("q")
        self._positions = array("q")
        self._times = array("q")
        self.times_known = True

    def add(self, offset: int, position: int, time_max: int | None) -> None:
        """Note a data frame that begins at `position`. Without its time, times can no longer be looked up."""
        if time_max is None:
            self.times_known = False
            time_max = 0
        if not self._positions or position - self._positions[-1] >= ENTRY_BYTES:
            newest = self._times[-1] if self._times else time_max
            self._offsets.append(offset)
            self._positions.append(position)
            self._times.append(max(newest, time_max))
        elif time_max > self._times[-1]:
            self._times[-1] = time_max

    def add_many(self, offsets: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        """Note many data frames behind all others, without their times."""
        self.times_known = False
        last = self._positions[-1] if self._positions else -ENTRY_BYTES
        rows = np.flatnonzero(np.diff(positions // ENTRY_BYTES, prepend=last // ENTRY_BYTES))
        self._offsets.frombytes(offsets[rows].astype(np.int64).tobytes())
        self._positions.frombytes(positions[rows].astype(np.int64).tobytes())
        self._times.extend([self._times[-1] if self._times else 0] * len(rows))

    def thinned(self, step_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and positions of entries that lie at least so many bytes apart."""
        offsets: list[int] = []
        positions: list[int] = []
        for offset, position in zip(self._offsets, self._positions, strict=True):
            if not positions or position - positions[-1] >= step_bytes:
                offsets.append(offset)
                positions.append(position)
        return tuple(offsets), tuple(positions)

    def position_of(self, offset: int) -> int | None:
        """A position at or before the frame that covers `offset`; `None` before the first frame."""
        index = bisect_right(self._offsets, offset) - 1
        return self._positions[index] if index >= 0 else None

    def position_at_time(self, timestamp: int) -> int | None:
        """A position at or before the first record at or after the time; `None` if there is none."""
        assert self.times_known
        index = bisect_left(self._times, timestamp)
        return self._positions[index] if index < len(self._positions) else None
