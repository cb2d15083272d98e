"""Who writes next, when many threads append at once: one of them for all, and the others only wait.

Knows tickets and locks, nothing of what is written. An append is staged before its thread comes here.
"""

from __future__ import annotations

import threading

from forebay.wal.staging import Ticket

FOLLOW_SECONDS = 1.0
"""How long a follower trusts its leader: one that died (Ctrl-C) between its steps leaves it waiting."""


class Turns:
    """At most one thread waits to write; whoever comes while it waits is written by it."""

    def __init__(self) -> None:
        self._next = threading.Lock()

    def lead(self, committing: threading.Lock) -> bool:
        """Hold `committing` on return, as the one whose turn it is; false, without waiting, if that is another.

        False means that the other has not begun: what is staged by now it will take.
        """
        if not self._next.acquire(blocking=False):
            return False
        try:
            committing.acquire()
        finally:
            # Before anything is taken from the queue: whoever comes from here on leads the next commit.
            self._next.release()
        return True


def followed(ticket: Ticket) -> bool:
    """Wait until the leader has settled this append; false if that takes suspiciously long."""
    gate = threading.Lock()
    gate.acquire()
    # Settling turns `done` true and then looks for a callback; here it is the other way round.
    ticket.callback = lambda _: gate.release()
    return ticket.done or gate.acquire(timeout=FOLLOW_SECONDS)
