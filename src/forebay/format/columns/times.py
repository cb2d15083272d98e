"""When records that stand in one frame were appended, where that was not at once. Knows bytes, no frames.

    times := runs u32, 0 u32, appended_at i64 per run, records u32 per run, zero padded to 8

Frames that are put together keep their times this way, behind the columns of the records. Neighbouring runs have
different times, so there are two runs at least. The head of such a frame has the newest of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from forebay.errors import Corrupt
from forebay.format.columns.rows import TIMES, ColumnBytes, PaddedBuffers
from forebay.records import Bytes

_HEAD: Final = struct.Struct("<II")


class Appended(NamedTuple):
    """Consecutive records that were appended at one time (ms)."""

    records: int
    at: int


def timed(columns: ColumnBytes, appended: Iterable[Appended]) -> ColumnBytes:
    """The columns with these times behind them; as they are if all times are the same."""
    runs: list[Appended] = []
    for run in appended:
        if runs and runs[-1].at == run.at:
            runs[-1] = Appended(runs[-1].records + run.records, run.at)
        else:
            runs.append(run)
    if len(runs) < 2:
        return columns
    records, times = zip(*runs, strict=True)
    out = PaddedBuffers()
    out.add(_HEAD.pack(len(runs), 0))
    out.add_array(np.array(times, dtype="<i8"))
    out.add_array(np.array(records, dtype="<u4"))
    return columns._replace(
        flags=columns.flags | TIMES, parts=[*columns.parts, *out.parts], size=columns.size + out.size
    )


def find_times(buffer: Bytes, position: int, stop: int, rows: int) -> int:
    """Check the times of `rows` records at `position`; the place behind them."""
    if position + _HEAD.size > stop:
        raise Corrupt(f"times begin at byte {position} of the buffer, behind the end of their frame")
    runs = int(_HEAD.unpack_from(buffer, position)[0])
    end = position + _HEAD.size + 8 * runs + ((4 * runs + 7) & ~7)
    if end > stop:
        raise Corrupt(f"the times of {runs} runs reach behind the end of their frame")
    records = np.frombuffer(buffer, "<u4", runs, position + _HEAD.size + 8 * runs)
    if not records.all() or int(records.sum(dtype=np.int64)) != rows:
        raise Corrupt(f"times at byte {position} of the buffer are not those of {rows} records")
    return end


def times_at(buffer: Bytes, position: int, first: int, stop: int) -> list[Appended]:
    """The times of the records `[first, stop)`, at least one, from the times at `position`, which were checked."""
    runs = _HEAD.unpack_from(buffer, position)[0]
    times = np.frombuffer(buffer, "<i8", runs, position + _HEAD.size)
    ends = np.cumsum(np.frombuffer(buffer, "<u4", runs, position + _HEAD.size + 8 * runs), dtype=np.int64)
    low, high = np.searchsorted(ends, [first, stop - 1], side="right")
    edges = [first, *ends[low:high].tolist(), stop]
    return [
        Appended(after - before, at)
        for before, after, at in zip(edges, edges[1:], times[low : high + 1].tolist(), strict=False)
    ]
