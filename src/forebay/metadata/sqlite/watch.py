"""Watches: changes pulled from the history in the file, by revision. Wake-ups only wake.

A commit of this process wakes its watches at once; those of other processes show in SQLite's
`data_version`, which is asked for at every tick.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

from forebay.clock import Clock
from forebay.errors import Closed
from forebay.locks import Rank, RankedCondition
from forebay.metadata.seam import Change
from forebay.metadata.sqlite import ledger
from forebay.metadata.sqlite.database import Database

TICK_S = 0.02


class CommitCounter:
    """Counts the commits of this process and wakes who waits for the next."""

    def __init__(self) -> None:
        self._condition = RankedCondition(Rank.STORE, "metadata.sqlite_watch")
        self.count = 0

    def announce(self) -> None:
        with self._condition:
            self.count += 1
            self._condition.notify_all()

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Whether there was a commit after number `seen`, within that time."""
        with self._condition:
            return self._condition.wait_for(lambda: self.count != seen, timeout_s)


class SqliteWatch:
    """A watch of a `SqliteMetadata`."""

    def __init__(
        self,
        database: Database,
        commits: CommitCounter,
        clock: Clock,
        reap: Callable[[], None],
        prefix: str,
        start: int,
    ) -> None:
        self._database: Database | None = database
        self._commits = commits
        self._clock = clock
        self._reap = reap
        self._prefix = prefix
        self._next = start
        self._version: tuple[int, int] | None = None

    @property
    def revision(self) -> int:
        return self._next - 1

    def poll(self, timeout_s: float) -> list[Change]:
        deadline = self._clock.monotonic() + timeout_s
        # Ticks are counted beside the clock, so that a clock turned by hand ends the wait as well.
        ticks = math.ceil(timeout_s / TICK_S)
        while True:
            self._reap()
            seen = self._commits.count
            changes = self._take()
            left_s = deadline - self._clock.monotonic()
            if changes or ticks <= 0 or left_s <= 0:
                return changes
            if not self._commits.wait(seen, min(TICK_S, left_s)):
                ticks -= 1

    def close(self) -> None:
        database, self._database = self._database, None
        # In a forked child the condition may be locked by a thread that is not there.
        if database is not None and not database.ended:
            self._commits.announce()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> list[Change]:
        if self._database is None:
            raise Closed("this watch is closed: open another")
        with self._database.reading() as connection:
            version = self._database.data_version(connection)
            if version == self._version:
                return []
            revision, changes = ledger.changes_since(connection, self._prefix, self._next)
        self._version = version
        self._next = max(self._next, revision + 1)
        return changes
