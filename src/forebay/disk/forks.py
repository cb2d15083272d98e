"""Who must be told of a fork: handles that may not be carried into a child as they are.

Knows that processes fork, nothing of who listens. Listeners are held weakly and told in the order of
their registration before the fork, in the reverse order after it. What a listener raises is lost.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class ForkListener(Protocol):
    """What a handle is told, in the thread that forks."""

    def before_fork(self) -> None:
        """Come to rest and stay there; every `before_fork` is followed by one of the other two."""

    def after_fork_in_parent(self) -> None:
        """Go on as before."""

    def after_fork_in_child(self) -> None:
        """End, without touching anything the parent shares. No other thread runs."""


class _Forks:
    """The listeners of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: weakref.WeakValueDictionary[int, ForkListener] = weakref.WeakValueDictionary()
        self._count = 0
        self._told: list[ForkListener] = []

    def tell(self, listener: ForkListener) -> None:
        with self._lock:
            self._count += 1
            self._listeners[self._count] = listener

    def before(self) -> None:
        self._lock.acquire()
        for _, listener in sorted(self._listeners.items(), key=lambda item: item[0]):
            self._told.append(listener)
            listener.before_fork()

    def after_in_parent(self) -> None:
        try:
            while self._told:
                self._told.pop().after_fork_in_parent()
        finally:
            self._lock.release()

    def after_in_child(self) -> None:
        try:
            while self._told:
                self._told.pop().after_fork_in_child()
        finally:
            self._lock.release()


_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_forks.before, after_in_parent=_forks.after_in_parent, after_in_child=_forks.after_in_child
    )


def tell_of_forks(listener: ForkListener) -> None:
    """From now on and as long as it lives, tell `listener` of every fork of this process."""
    _forks.tell(listener)
