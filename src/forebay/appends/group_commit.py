"""Who writes next, when many threads append at once: one of them for all, and the others only wait.

Knows tickets, the queue and locks, nothing of what is written. An append is staged before its thread comes here.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from forebay.appends.callbacks import call_back
from forebay.appends.queue import AppendQueue
from forebay.appends.ticket import Ticket
from forebay.appends.waiting import INSIDE, Turns, followed, is_inside
from forebay.errors import Closed, Indeterminate, Unavailable


class GroupCommit(ABC):
    """Appends that wait, and the one thread at a time that writes for all of them. How, `_commit` says."""

    def begin_queue(self, name: object, queue: AppendQueue) -> None:
        """Queue in `queue`; again in a forked child, where whoever held a lock does not exist."""
        self.queue = queue
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
        if self.queue.due:
            call_back(self.queue.due)

    @abstractmethod
    def _commit(self) -> None:
        """Write what waits and settle it, well or ill. The caller holds `committing`."""
