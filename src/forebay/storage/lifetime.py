"""How long a log may be used: in the process that opened it, until a thread begins to close it, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forebay.appends.callbacks import in_callback
from forebay.appends.waiting import INSIDE, is_inside
from forebay.disk.forks import ForkGuard
from forebay.engines import OwnedShard
from forebay.errors import Closed, Unavailable
from forebay.locks import Rank, RankedRLock
from forebay.shard import SegmentShard
from forebay.storage.background.commit import Committers


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


class Closing:
    """One thread closes at a time, and never one that is in the middle of an append."""

    def __init__(self) -> None:
        self._lock = RankedRLock(Rank.LOG, "storage.closing")

    def run(self, close: Callable[[], None], shards: Iterable[OwnedShard], committers: Committers) -> None:
        """Close, after any other thread that closes.

        In a callback only if no other thread closes: it may be waiting for the callback to return. `Unavailable`
        inside an append or a closing of this thread, which a signal handler has interrupted.
        """
        logs = [shard.wal for shard in shards if isinstance(shard, SegmentShard)]
        in_append = any(is_inside(lock)() for log in logs for lock in (log.committing, log.queue.lock))
        if in_append or committers.is_inside():
            raise Unavailable(INSIDE)
        closes_here = is_inside(self._lock)()
        if in_callback():
            if not closes_here and self._lock.acquire(blocking=False):
                try:
                    close()
                finally:
                    self._lock.release()
            return
        if closes_here:
            raise Unavailable(INSIDE)
        with self._lock:
            close()
