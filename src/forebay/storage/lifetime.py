"""Whether a log may still be used: in the process that opened it, until a thread begins to close it."""

from __future__ import annotations

from forebay.disk.forks import ForkGuard
from forebay.errors import Closed


class Lifetime:
    """The one place that knows whether a log is open. Every way into the log asks it first, before any lock."""

    def __init__(self) -> None:
        self.guard = ForkGuard()
        self._is_over = False

    def check(self) -> None:
        """`Closed` once a thread has begun to close the log, and in a forked child."""
        self.guard.check("this log")
        if self._is_over:
            raise Closed("this log is closed")

    def end(self) -> None:
        """Refuse every use from now on. May be repeated."""
        self._is_over = True

    @property
    def is_over(self) -> bool:
        """Whether a thread has begun to close the log."""
        return self._is_over
