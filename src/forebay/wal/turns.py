"""Who writes next, when many threads append at once: one of them for all, and the others only wait.

Knows tickets, the queue and locks, nothing of what is written. An append is staged before its thread comes here.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from forebay.errors import Closed, Indeterminate, Unavailable
from forebay.wal.hearing import call_back, is_inside
from forebay.wal.staging import INSIDE, Staging, Ticket

FOLLOW_SECONDS = 1.0
"""After this many seconds a follower assumes that the leader was interrupted (Ctrl-C), and commits itself."""


class Turns:
    """At most one thread waits to write; whoever comes while it waits is written by it.

    The claim is an entry and not a lock: an exception (Ctrl-C) between the taking of a lock and the block that
    gives it back would leave it taken for ever, while a claim left behind is dropped by whoever loses patience.
    """

    def __init__(self) -> None:
        self._claims: dict[None, Ticket] = {}

    def claim(self, ticket: Ticket) -> bool:
        """Whether this append's thread writes next; false if that is another, which has not begun.

        What is staged by now, that other will take.
        """
        return self._claims.setdefault(None, ticket) is ticket

    def begin(self) -> None:
        """The claimant writes now. Before anything is taken from the queue: whoever comes from here on leads the next.

        Also for a claimant that is gone.
        """
        self._claims.pop(None, None)

    def give_up(self, ticket: Ticket) -> None:
        """This append's thread does not write after all."""
        if self._claims.get(None) is ticket:
            self.begin()


class CommitQueue(ABC):
    """Appends that wait, and the one thread at a time that writes for all of them. How, `_commit` says."""

    def begin_queue(self, name: object, staging: Staging) -> None:
        """Queue in `staging`; again in a forked child, where whoever held a lock does not exist."""
        self.staging = staging
        self.committing = threading.RLock()
        """Its owner is known, so that a signal handler that comes in between is refused. Never entered twice."""
        self.is_inside = is_inside(self.committing)
        self._name = name
        self._turns = Turns()

    def settle(self, ticket: Ticket) -> int:
        """Wait until the durability class of an append holds; its first offset, or the error it failed with.

        Leader and followers: whoever has the turn writes for all that wait.
        """
        try:
            while not ticket.done:
                if self.is_inside():
                    raise Indeterminate(f"{self._name}: queued behind the append that it interrupted, not waited for")
                if self._turns.claim(ticket):
                    self._lead(ticket)
                elif not followed(ticket):
                    self._turns.begin()
                    self.commit()
        except BaseException:
            self._turns.give_up(ticket)
            raise
        return ticket.result()

    def _lead(self, ticket: Ticket) -> None:
        try:
            with self.committing:
                self._turns.begin()
                self._commit()
                if not ticket.done:
                    ticket.finish(Closed(f"{self._name}: queued before a fork; repeat it"))
        finally:
            self.call_back()

    def commit(self) -> None:
        """Write and publish everything that waits. On return each ticket taken is settled, well or ill."""
        self.refuse_inside()
        try:
            with self.committing:
                self._commit()
        finally:
            self.call_back()

    def refuse_inside(self) -> None:
        """`Unavailable` for a signal handler that interrupted a write of this shard."""
        if self.is_inside():
            raise Unavailable(f"{self._name}: {INSIDE}")

    def call_back(self) -> None:
        """Call whoever wanted to hear of what is settled. The caller holds no lock."""
        if self.staging.due:
            call_back(self.staging.due)

    @abstractmethod
    def _commit(self) -> None:
        """Write what waits and settle it, well or ill. The caller holds `committing`."""


def followed(ticket: Ticket) -> bool:
    """Wait until the leader has settled this append; false if that takes suspiciously long."""
    gate = threading.Lock()
    gate.acquire()
    # Settling turns `done` true and then looks for a callback; here it is the other way round.
    ticket.callback = lambda _: gate.release()
    return ticket.done or gate.acquire(timeout=FOLLOW_SECONDS)


def is_held(lock: threading.RLock) -> bool:
    """Whether any thread holds the lock, without touching it: before 3.14 only its description says so."""
    return repr(lock).startswith("<locked")
