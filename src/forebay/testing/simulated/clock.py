"""Time turned by hand. Knows nothing of the machine's clock."""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same run again

NANOSECONDS = 1_000_000_000
STARTED_MS = 1_700_000_000_000


class ManualClock:
    """A `Clock` that stands still until it is moved; the same seed gives the same random bytes."""

    def __init__(self, now_ms: int = STARTED_MS, *, seed: int = 0) -> None:
        self._wall_ns = now_ms * 1_000_000
        self._monotonic_ns = 0
        self._asleep_ns = 0
        self._random = random.Random(seed)

    def now_ms(self) -> int:
        return self._wall_ns // 1_000_000

    def monotonic(self) -> float:
        return self._monotonic_ns / NANOSECONDS

    def boottime(self) -> float:
        return (self._monotonic_ns + self._asleep_ns) / NANOSECONDS

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def advance(self, seconds: float) -> None:
        """Let time pass, on the wall and for the timers."""
        if seconds < 0:
            raise ValueError(f"time does not go back by {-seconds} s: jump() moves the wall clock alone")
        passed = round(seconds * NANOSECONDS)
        self._wall_ns += passed
        self._monotonic_ns += passed

    def suspend(self, seconds: float) -> None:
        """Let the machine sleep: the wall clock and the boot time go on, timers do not notice."""
        passed = round(seconds * NANOSECONDS)
        self._wall_ns += passed
        self._asleep_ns += passed

    def jump(self, milliseconds: int) -> None:
        """Set the wall clock forward or back, as an operator or a time server would; timers do not notice."""
        self._wall_ns += milliseconds * 1_000_000
