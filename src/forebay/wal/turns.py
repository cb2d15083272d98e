"""Who writes next, when many threads append at once: one of them for all, and the others only wait.

Knows tickets and locks, nothing of what is written. An append is staged before its thread comes here.
"""

from __future__ import annotations

import threading

from forebay.wal.staging import Ticket

FOLLOW_SECONDS = 1.0
"""How long a follower trusts its leader: one that died (Ctrl-C) between its steps leaves it waiting."""


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
