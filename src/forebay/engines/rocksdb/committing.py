"""Commits the appends of a shard that wait, in one batch. Knows the queue, nothing of the database.

A write that fails half way ends appends for good: only the next opening of the shard finds out what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from forebay.appends.group_commit import GroupCommit
from forebay.appends.queue import AppendQueue
from forebay.errors import ForebayError, Indeterminate, Unavailable

logger = logging.getLogger(__name__)


class Commits:
    """The queue of a shard and the one writer it has at a time.

    `write` takes what is in `queue.taken`, and publishes it; it sets `in_doubt` before anything may be written.
    """

    def __init__(self, name: str, queue: AppendQueue, *, write: Callable[[], None], head: Callable[[], int]) -> None:
        self.queue = queue
        self.group = GroupCommit(name, queue, self._commit)
        self._name = name
        self.failure: str | None = None
        self.in_doubt = False
        self._write = write
        self._head = head

    def failed(self, error: BaseException) -> None:
        """A write ended in an exception: answer every waiter, and trust nothing if something may be written."""
        queue = self.queue
        if queue.taken and queue.taken[-1].end <= self._head():
            # Published already: whatever failed then did not fail these appends.
            queue.acknowledge()
            return
        reason = str(error) or type(error).__name__
        if not self.in_doubt:
            ours = isinstance(error, ForebayError)
            refusal = error if ours else Unavailable(f"{self._name}: not written ({reason})")
            queue.fail(refusal, refusal, self._head())  # type: ignore[arg-type]
            return
        self.failure = reason
        logger.error("%s: a write failed at offset %d: %s", self._name, self._head(), reason)
        later = Unavailable(f"{self._name} is read-only since a write failed ({reason}): open the log again")
        written = Indeterminate(
            f"{self._name}: the append was being written when that failed ({reason}): it is not visible now and may "
            "appear, once, when the log is opened again; read before you repeat it"
        )
        queue.refuse(later)
        queue.fail(written, later, self._head())

    def _commit(self) -> None:
        try:
            if self.queue.taken:
                # A thread was interrupted (Ctrl-C) while it failed these, or acknowledged them.
                raise Unavailable(f"{self._name}: interrupted before the appends were answered")
            self.in_doubt = False
            self.queue.take()
            if self.queue.taken:
                self._write()
                self.queue.acknowledge()
        except BaseException as error:
            self.failed(error)
            if not isinstance(error, OSError | ForebayError):
                raise
