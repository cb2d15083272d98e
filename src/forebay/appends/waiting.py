"""How a thread waits for another that writes for it, safe for an exception (Ctrl-C) at any instant.

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


def shut_gate() -> threading.Lock:
    """What one thread waits at by `acquire`, until another opens it by `release`.

    Not an event: an exception in `wait` of that may leave it locked, and the thread that sets it stuck.
    """
    gate = threading.Lock()
    gate.acquire()
    return gate


def followed(ticket: Ticket) -> bool:
    """Wait until the leader has answered this append; false if that takes suspiciously long."""
    gate = shut_gate()
    # The commit sets `done` and then looks for a callback; here it is the other way round.
    ticket.callback = lambda _: gate.release()
    return ticket.done or gate.acquire(timeout=FOLLOW_SECONDS)


def is_held(lock: threading.RLock) -> bool:
    """Whether any thread holds the lock, without touching it: before 3.14 only its description says so."""
    return repr(lock).startswith("<locked")


def is_inside(lock: threading.RLock) -> Callable[[], bool]:
    """A function that says whether the thread that calls it holds the lock."""
    owned: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]
    return owned
