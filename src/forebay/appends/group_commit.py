"""One thread writes for all appends that wait: the first to come commits, the others wait for it.

Knows tickets, the queue and locks, nothing of what is written. An append is staged before its thread comes here.
"""

from __future__ import annotations

from collections.abc import Callable

from forebay.appends.callbacks import call_back
from forebay.appends.queue import AppendQueue
from forebay.appends.ticket import Ticket
from forebay.appends.waiting import INSIDE, followed, is_held, is_inside
from forebay.clock import Clock
from forebay.errors import Indeterminate, Unavailable
from forebay.locks import Rank, RankedRLock

PATIENCE_SECONDS = 0.001


class GroupCommit:
    """The one writer at a time of a queue. `commit` of its owner does the writing, under `lock`.

    At most one thread waits for the lock in order to write; those that come meanwhile are written by it. Its claim is
    an entry and not a lock: an exception (Ctrl-C) between the taking of a lock and the block that gives it back would
    leave it taken for ever, while a follower drops a claim that was left behind.
    """

    def __init__(self, name: object, queue: AppendQueue, commit: Callable[[], None]) -> None:
        """`commit` writes and acknowledges what waits, or fails it. It is called by one thread at a time."""
        self.queue = queue
        self.lock = RankedRLock(Rank.COMMIT, "appends.commit")
        """Its owner is known, so that a signal handler that comes in between is refused. Never entered twice."""
        self.is_inside = is_inside(self.lock)
        self._name = name
        self._commit = commit
        self.claims: dict[None, object] = {}
        """The append whose thread waits for the lock in order to write, under one key: `setdefault` takes the claim."""

    def wait(self, ticket: Ticket) -> int:
        """Wait until an append is committed, or commit it; its first offset, or the error it failed with.

        Runs in the caller's thread, which holds no lock.
        """
        claims = self.claims
        try:
            while not ticket.done:
                if self.is_inside():
                    raise Indeterminate(f"{self._name}: queued behind the append that it interrupted, not waited for")
                if claims.setdefault(None, ticket) is ticket:
                    try:
                        with self.lock:
                            # Before anything is taken from the queue: a thread that comes from here on leads the next.
                            claims.pop(None, None)
                            self._commit()
                    finally:
                        if self.queue.due:
                            call_back(self.queue.due)
                elif not followed(ticket):
                    # The leader is gone, or slow: its claim goes.
                    claims.pop(None, None)
                    self.commit()
        except BaseException:
            if claims.get(None) is ticket:
                claims.pop(None, None)
            raise
        return ticket.offset if ticket.error is None else ticket.result()

    def commit(self) -> None:
        """Write and publish everything that waits. On return each append that was taken is acknowledged or failed."""
        self.refuse_inside()
        try:
            with self.lock:
                self._commit()
        finally:
            self.call_back()

    def commit_within(self, seconds: float, clock: Clock) -> None:
        """As `commit`, unless appends are still paused, or another thread still writes, when the time is up."""
        deadline = clock.monotonic() + seconds
        # Not by taking the lock: an exception (Ctrl-C) before it is given back would leave it taken for ever.
        while self.queue.is_paused or (is_held(self.lock) and not self.is_inside()):
            if clock.monotonic() >= deadline:
                return
            clock.sleep(PATIENCE_SECONDS)
        self.commit()

    def refuse_inside(self) -> None:
        """`Unavailable` for a signal handler that interrupted a write of this shard."""
        if self.is_inside():
            raise Unavailable(f"{self._name}: {INSIDE}")

    def call_back(self) -> None:
        """Run the callbacks that are due. The caller holds no lock."""
        if self.queue.due:
            call_back(self.queue.due)
