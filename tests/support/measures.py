"""What a process uses of the machine, and what many measured values come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import psutil


class MachineUse(NamedTuple):
    """What one process uses at one moment."""

    resident_bytes: int
    descriptors: int
    threads: int
    cpu_seconds: float
    """Of all its threads since it began."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """What the process with this id uses now."""
        process = psutil.Process(pid)
        cpu = process.cpu_times()
        return cls(process.memory_info().rss, process.num_fds(), process.num_threads(), cpu.user + cpu.system)


def rise_per_minute(seen: Sequence[tuple[float, float]]) -> float:
    """How much a value rises in a minute, by the straight line through all pairs of seconds and value."""
    seconds, values = zip(*seen, strict=True)
    return float(np.polyfit(seconds, values, 1)[0]) * 60


def p99_ms(seconds: Sequence[float]) -> float:
    """What 99 of 100 of these durations do not exceed, in milliseconds."""
    return float(np.percentile(seconds, 99)) * 1000
