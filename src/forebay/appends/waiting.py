"""Which thread writes next, and how the others wait for it: safe for an exception (Ctrl-C) at any instant.

Knows tickets and locks, nothing of what is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.appends.ticket import Ticket

INSIDE = (
    "called from inside an append of the same log, as by a signal handler: nothing was done; "
    "let the handler only set a flag or raise, and do this when the append is over"
)
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


def is_inside(lock: threading.RLock) -> Callable[[], bool]:
    """What tells whether the thread that asks holds the lock."""
    owned: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]
    return owned
