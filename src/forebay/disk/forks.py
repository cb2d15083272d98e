"""What a fork means for open handles: the child may use none of them, and keeps nothing of its parent's alive.

A handle that was made before the fork has another generation than the child and refuses every call there, before it
takes a lock: a thread that held the lock at the fork does not exist in the child. Descriptors, lock files and
connections cannot be left as they are: their owners enter themselves here, and the child abandons each of them.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from forebay.errors import Closed
from forebay.locks import Rank, RankedLock, RankedRLock

_log = logging.getLogger(__name__)


class ForkHandle(Protocol):
    """What must not be carried into a child as it is."""

    def abandon(self) -> None:
        """End in the child, without touching what the parent shares. No other thread runs there."""


class RestingHandle(ForkHandle, Protocol):
    """What must also be at rest while the process forks."""

    def rest(self) -> None:
        """Come to rest before the fork; `go_on` follows, in the parent and in the child."""

    def go_on(self) -> None:
        """The fork is over; in the child after `abandon`."""


class Forks:
    """The forks of this process, and what its children must abandon. Entries are held weakly.

    What was entered last comes to rest first, and goes on last: it may use what was entered before it. A failure is
    logged and stops no other.
    """

    def __init__(self) -> None:
        self.generation = 0
        """How many forks lie between the first process and this one."""
        self.gate = RankedLock(Rank.DISK, "disk.lock_files")
        """Held by every fork, and from the opening of a lock file until its disk knows it: else a child could inherit
        a lock that it does not abandon, and keep it alive after its owner's death."""
        self._is_gated = False
        """Whether the thread that forks holds the gate."""
        self._lock = RankedRLock(Rank.LEAF, "disk.forks")
        self._entered: weakref.WeakValueDictionary[int, ForkHandle | RestingHandle] = weakref.WeakValueDictionary()
        self._count = 0
        self._forking: list[ForkHandle | RestingHandle] = []

    def enter(self, handle: ForkHandle | RestingHandle) -> None:
        """Abandon `handle` in every child that is forked while it lives."""
        with self._lock:
            self._count += 1
            self._entered[self._count] = handle

    def before(self) -> None:
        """Called by the thread that forks."""
        self._lock.acquire()
        try:
            self._forking = [handle for _, handle in sorted(self._entered.items(), key=lambda item: -item[0])]
            for handle in self._forking:
                if (rest := getattr(handle, "rest", None)) is not None:
                    _call(rest)
        finally:
            # Python forks also where this is interrupted (Ctrl-C): what has come to rest must go on after it.
            self._is_gated = self.gate.acquire()

    def after_in_parent(self) -> None:
        """Called by the thread that has forked."""
        self._open_gate()
        while self._forking:
            self._go_on(self._forking.pop())
        self._lock.release()

    def after_in_child(self) -> None:
        """Called by the only thread of the child."""
        self.generation += 1
        if not self._is_gated:
            # A thread that is not there may have held it.
            self.gate = RankedLock(Rank.DISK, "disk.lock_files")
        self._open_gate()
        while self._forking:
            handle = self._forking.pop()
            _call(handle.abandon)
            self._go_on(handle)
        self._lock.release()

    def _open_gate(self) -> None:
        if self._is_gated:
            self._is_gated = False
            self.gate.release()

    def _go_on(self, handle: ForkHandle | RestingHandle) -> None:
        if (go_on := getattr(handle, "go_on", None)) is not None:
            _call(go_on)


def _call(step: Callable[[], None]) -> None:
    try:
        step()
    except BaseException:  # noqa: BLE001  # Ctrl-C too: Python forks all the same, and the other handles still need it
        _log.exception("a handle failed at a fork")


FORKS: Final = Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=FORKS.before, after_in_parent=FORKS.after_in_parent, after_in_child=FORKS.after_in_child)


class ForkGuard:
    """Knows whether a handle is used in the process that made it."""

    __slots__ = ("generation",)

    def __init__(self) -> None:
        self.generation = FORKS.generation

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that made the handle."""
        return self.generation != FORKS.generation

    def check(self, what: str) -> None:
        """`Closed` in a child of the process that made the handle. Called on entry, before any lock is taken."""
        if self.generation != FORKS.generation:
            raise Closed(f"{what} was opened before a fork: open it in the child")
