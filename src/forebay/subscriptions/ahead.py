"""Records that a loop over a consumer has taken ahead of its body. Pure: takes nothing and gives nothing back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from forebay.records import DeliveredRecord

AHEAD_MAX: Final = 256
"""So many records are taken at once at most."""
AHEAD_S: Final = 0.05
"""About so long the body has to do with what was taken at once: a slow body keeps no records from other consumers."""
STALE_PART: Final = 4
"""After one part in so many of the ack time-out, what was taken ahead is given back: others would get it, too."""


class TakenAhead:
    """What is taken and not handed out yet, and how many to take next. For one thread at a time."""

    def __init__(self, unacked_max: int) -> None:
        self._most = min(AHEAD_MAX, unacked_max)
        self._left: deque[DeliveredRecord] = deque()
        self._count = 1
        self._size = 0
        self._taken_at = self._stale_at = 0.0

    def wanted(self, now: float) -> int:
        """How many to take now, by how long the body took for those before: twice as many at most."""
        if self._size:
            took_s = (now - self._taken_at) / self._size
            fitting = self._most if took_s * self._most <= AHEAD_S else int(AHEAD_S / took_s)
            self._count = max(1, min(2 * self._count, fitting, self._most))
        return self._count

    def put(self, found: Sequence[DeliveredRecord], now: float, ack_timeout_ms: int) -> None:
        """These were taken at this time, and are to be acknowledged within that."""
        self._left.extend(found)
        self._size, self._taken_at = len(found), now
        self._stale_at = now + ack_timeout_ms / 1000 / STALE_PART

    def pop(self, now: float) -> DeliveredRecord | None:
        """The next one; `None` if there is none, or if those that are left are too old and are to be given back."""
        if not self._left or now > self._stale_at:
            return None
        return self._left.popleft()

    def clear(self) -> list[DeliveredRecord]:
        """Those that were not handed out, which are forgotten here: the caller gives them back."""
        left = list(self._left)
        self._left.clear()
        return left
