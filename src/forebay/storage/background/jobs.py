"""The threads for work of storage that may wait for a shard, a store or the metadata: see `forebay.executor`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Final

from forebay.clock import Clock
from forebay.errors import Closed
from forebay.executor import Executor, WorkClass
from forebay.workers import STOP_SECONDS, STUCK_NAMED, WorkerStatus

JOBS: Final = "forebay-storage"
"""What the status of workers calls these threads."""


class StorageJobs:
    """Does jobs of storage in threads, by class of work and key. It is one of the workers of a log."""

    def __init__(self, clock: Clock) -> None:
        self._executor = Executor(JOBS, clock)

    def start(self, kind: WorkClass, key: Hashable, work: Callable[[], None]) -> bool:
        """Do the work in a thread when it is its turn; false if it is refused at once. Waits for nothing.

        It is refused once the log closes, and at a key at which so many threads hang that none is left to it. `work`
        raises nothing: no caller waits for it.
        """
        try:
            started: Future[None] = self._executor.start(kind, key, work)
        except Closed:
            return False
        return not (started.done() and started.exception() is not None)

    def status(self) -> WorkerStatus:
        """How the threads fare: those that do not come back count as stuck."""
        suspects = ", ".join(map(str, self._executor.suspects()[:STUCK_NAMED]))
        return WorkerStatus(
            name=JOBS,
            steps=self._executor.done,
            stepped_at=None,
            seconds=0.0,
            running_s=None,
            stuck=self._executor.given_up,
            failures=0,
            error=f"no answer at {suspects}" if suspects else None,
        )

    def relieve(self) -> None:
        """Have other threads take the place of those that do not come back. Waits for nothing."""
        self._executor.look()

    def halt(self) -> None:
        """Begin no more jobs, for ever. Does not wait for those under way."""
        self._executor.halt()

    def stop(self, seconds_max: float = STOP_SECONDS) -> bool:
        """Halt, and wait so long for the jobs under way; whether they have ended."""
        return self._executor.stop(seconds_max)
