"""Who must be told of a fork: handles that may not be carried into a child as they are.

Knows that processes fork, nothing of who listens. Listeners are held weakly. Before the fork the last
registered is told first, after it the first: whoever uses another handle was registered after it, and must
come to rest while that other still works. What a listener raises is logged and stops no other.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Protocol

from forebay.locks import Rank, RankedRLock

_log = logging.getLogger(__name__)


class ForkListener(Protocol):
    """What a handle is told, in the thread that forks."""

    def before_fork(self) -> None:
        """Come to rest and stay there; every `before_fork` is followed by one of the other two."""

    def after_fork_in_parent(self) -> None:
        """Go on as before."""

    def after_fork_in_child(self) -> None:
        """End, without touching anything the parent shares. No other thread runs."""


class Forks:
    """The listeners of this process."""

    def __init__(self) -> None:
        self._lock = RankedRLock(Rank.LEAF, "disk.forks")
        self._listeners: weakref.WeakValueDictionary[int, ForkListener] = weakref.WeakValueDictionary()
        self._count = 0
        self._told: list[ForkListener] = []

    def tell(self, listener: ForkListener) -> None:
        with self._lock:
            self._count += 1
            self._listeners[self._count] = listener

    def before(self) -> None:
        self._lock.acquire()
        for _, listener in sorted(self._listeners.items(), key=lambda item: -item[0]):
            self._told.append(listener)
            _call(listener.before_fork)

    def after_in_parent(self) -> None:
        while self._told:
            _call(self._told.pop().after_fork_in_parent)
        self._lock.release()

    def after_in_child(self) -> None:
        while self._told:
            _call(self._told.pop().after_fork_in_child)
        self._lock.release()


def _call(tell: Callable[[], None]) -> None:
    try:
        tell()
    except Exception:  # noqa: BLE001  # a fork cannot be refused any more; the others must still be told
        _log.exception("a handle failed to get ready for a fork")


_forks = Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_forks.before, after_in_parent=_forks.after_in_parent, after_in_child=_forks.after_in_child
    )


def tell_of_forks(listener: ForkListener) -> None:
    """From now on and as long as it lives, tell `listener` of every fork of this process."""
    _forks.tell(listener)
