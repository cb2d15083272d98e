"""Appends that wait, written together by whoever comes first. Knows the queue, nothing of the database.

As the log of the segment engine does it: an append is queued, one thread writes for all that wait, and each is
settled once its durability class holds. A write that fails half way ends appends for good: only opening the shard
anew tells what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from forebay.clock import Clock
from forebay.errors import ForebayError, Indeterminate, Unavailable
from forebay.wal.staging import Staging
from forebay.wal.turns import CommitQueue, is_held

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.001


class Commits(CommitQueue):
    """The queue of a shard and the one writer it has at a time.

    `write` takes what is in `staging.taken`, and publishes it; it sets `unsettled` before anything may be written.
    """

    def __init__(
        self, name: str, staging: Staging, clock: Clock, *, write: Callable[[], None], head: Callable[[], int]
    ) -> None:
        self.begin_queue(name, staging)
        self.failure: str | None = None
        self.unsettled = False
        self._clock = clock
        self._write = write
        self._head = head

    def commit_within(self, seconds: float) -> None:
        """As `commit`, unless somebody else is still at it when the time is up."""
        deadline = self._clock.monotonic() + seconds
        while is_held(self.committing) and not self.is_inside():
            if self._clock.monotonic() >= deadline:
                return
            self._clock.sleep(PATIENCE_SECONDS)
        self.commit()

    def failed(self, error: BaseException) -> None:
        """A write ended in an exception: settle every waiter, and trust nothing if something may be written."""
        staging = self.staging
        if staging.taken and staging.taken[-1].end <= self._head():
            # Published already: whatever failed then did not fail these appends.
            staging.settle()
            return
        reason = str(error) or type(error).__name__
        if not self.unsettled:
            ours = isinstance(error, ForebayError)
            refusal = error if ours else Unavailable(f"{self._name}: not written ({reason})")
            staging.fail(refusal, refusal, self._head())  # type: ignore[arg-type]
            return
        self.failure = reason
        logger.error("%s: a write failed at offset %d: %s", self._name, self._head(), reason)
        later = Unavailable(f"{self._name} is read-only since a write failed ({reason}): open the log again")
        written = Indeterminate(
            f"{self._name}: the append was being written when that failed ({reason}): it is not visible now and may "
            "appear, once, when the log is opened again; read before you repeat it"
        )
        staging.refuse(later)
        staging.fail(written, later, self._head())

    def _commit(self) -> None:
        self.unsettled = False
        try:
            self.staging.take()
            if self.staging.taken:
                self._write()
                self.staging.settle()
        except BaseException as error:
            self.failed(error)
            if not isinstance(error, OSError | ForebayError):
                raise
