"""Appends that wait, written together by whoever comes first. Knows the queue, nothing of the database.

As the log of the segment engine does it: an append is queued, one thread writes for all that wait, and each is
settled once its durability class holds. A write that fails half way ends appends for good: only opening the shard
anew tells what is there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from forebay.clock import Clock
from forebay.errors import Closed, ForebayError, Indeterminate, Unavailable
from forebay.wal.hearing import call_back, is_inside
from forebay.wal.staging import INSIDE, Staging, Ticket
from forebay.wal.turns import Turns, followed, is_held

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.001


class Commits:
    """The queue of a shard and the one writer it has at a time.

    `write` takes what is in `staging.taken`, and publishes it; it sets `unsettled` before anything may be written.
    """

    def __init__(
        self, name: str, staging: Staging, clock: Clock, *, write: Callable[[], None], head: Callable[[], int]
    ) -> None:
        self.staging = staging
        self.failure: str | None = None
        self.unsettled = False
        self.lock = threading.RLock()
        """Its owner is known, so that a signal handler that comes in between is refused."""
        self.is_inside = is_inside(self.lock)
        self._name = name
        self._clock = clock
        self._write = write
        self._head = head
        self._turns = Turns()

    def settle(self, ticket: Ticket) -> int:
        """Wait until the append is written as its class asks; its first offset, or the error it failed with."""
        while not ticket.done:
            if self.is_inside():
                raise Indeterminate(f"{self._name}: queued behind the append that it interrupted, not waited for")
            if self._turns.claim(ticket):
                try:
                    with self.lock:
                        self._turns.begin()
                        self._commit()
                        if not ticket.done:
                            ticket.finish(Closed(f"{self._name}: queued before a fork; repeat it"))
                finally:
                    self.call_back()
            elif not followed(ticket):
                self._turns.begin()
                self.commit()
        return ticket.result()

    def commit(self) -> None:
        """Write and publish everything that waits."""
        self.refuse_inside()
        try:
            with self.lock:
                self._commit()
        finally:
            self.call_back()

    def commit_within(self, seconds: float) -> None:
        """As `commit`, unless somebody else is still at it when the time is up."""
        deadline = self._clock.monotonic() + seconds
        while is_held(self.lock) and not self.is_inside():
            if self._clock.monotonic() >= deadline:
                return
            self._clock.sleep(PATIENCE_SECONDS)
        self.commit()

    def refuse_inside(self) -> None:
        """`Unavailable` for a signal handler that interrupted a write of this shard."""
        if self.is_inside():
            raise Unavailable(f"{self._name}: {INSIDE}")

    def call_back(self) -> None:
        """Call whoever wanted to hear of what is settled. The caller holds no lock."""
        if self.staging.due:
            call_back(self.staging.due)

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
