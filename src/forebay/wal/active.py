"""The file that a shard's log grows in. Knows what is written and what readers may see of it; writes nothing itself."""

from __future__ import annotations

import errno
from typing import NamedTuple

from forebay.locks import Rank, RankedCondition
from forebay.wal.files import LogFile
from forebay.wal.scan import LogScan


class ActiveFile(LogFile):
    """The file that is being written. `position` may run ahead of `limit`, which readers go by."""

    def __init__(self, scan: LogScan, created: float) -> None:
        super().__init__(
            scan.file,
            scan.header,
            index=scan.index,
            gaps=scan.gaps,
            frames=scan.frames,
            end=scan.end,
            limit=scan.stop,
        )
        self.position = self.synced = scan.stop
        self.marked = scan.durable
        """The highest durable mark that stands in the file."""
        self.created = created
        self.state_epoch = scan.state_epoch
        """The epoch of the newest state in the file."""
        self.clean_mark = b""
        """The frame that ends a log which was closed in order."""
        self.opened_behind = scan.previous_end
        """Where the file before it ended, as its first state says."""
        self.has_blind = bool(scan.blind)
        """Damaged places may have told of deletes: each opening walks the file and says so."""
        self.written: list[tuple[int, int, int]] = []
        """Base, position and highest time of frames that are not published yet."""

    def publish(self, end: int) -> None:
        """Show readers everything up to `position`, which holds the records below `end`."""
        with self.indexing:
            for base, position, time_max in self.written:
                self.index.add(base, position, time_max)
            self.written = []
            self.limit = self.position
            self.end = end


class SyncTarget(NamedTuple):
    """What a sync that starts now will make durable."""

    active: ActiveFile
    position: int
    end: int


class BackgroundSync:
    """A sync of the active file that runs beside appends, and how it ended.

    The kernel reports a lost write once, to one of the syncs of a file that run at the same time. So a thread that
    answers for the same file first waits here for the outcome. The lock is a leaf: the thread that syncs takes no
    other lock before it calls `end`, and a waiter may hold `committing`.
    """

    def __init__(self, target: SyncTarget) -> None:
        self.target = target
        self._changed = RankedCondition(Rank.LEAF, "wal.background_sync")
        self._is_over = False
        self._error: OSError | None = None

    def end(self, error: OSError | None = None) -> None:
        """The sync has returned, or failed with `error`. Only the first call counts."""
        with self._changed:
            if not self._is_over:
                self._error, self._is_over = error, True
            self._changed.notify_all()

    def wait(self, seconds_max: float) -> None:
        """Return once the sync has succeeded; `OSError` if it failed or has not returned within the time."""
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._is_over, seconds_max)
        path = self.target.active.path
        if not is_over:
            raise OSError(errno.ETIMEDOUT, f"a sync begun before has not returned for {seconds_max:.0f} s", path)
        if self._error is not None:
            raise OSError(self._error.errno, f"a sync begun before has failed: {self._error}", path)
