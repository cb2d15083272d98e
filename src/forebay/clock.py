"""Time and identity: the only room that asks the machine what time it is or for random bytes.

Two implementations: `SystemClock` here and the hand-turned one in `forebay.testing`.
"""

from __future__ import annotations

import secrets
import time
from typing import Protocol

# On macOS, CLOCK_MONOTONIC goes on while the machine sleeps, as CLOCK_BOOTTIME does on Linux.
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Where every other room gets the time and new names from."""

    def now_ms(self) -> int:
        """Wall time in milliseconds since 1970 UTC. It may jump; nothing but timestamps may depend on it."""

    def monotonic(self) -> float:
        """Seconds that never go back; for timers within one process."""

    def boottime(self) -> float:
        """As `monotonic`, but counting also while the machine sleeps; for leases that others count meanwhile."""

    def sleep(self, seconds: float) -> None:
        """Return after about this many seconds."""

    def random_bytes(self, count: int) -> bytes:
        """Bytes that cannot be guessed, for salts and ids."""


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    monotonic = staticmethod(time.monotonic)
    """Python's own function: every append asks it, and a call of ours around it costs more than the clock."""

    def boottime(self) -> float:
        return time.clock_gettime(_BOOTTIME)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def random_bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)
