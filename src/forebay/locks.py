"""Locks with ranks: threads that take them in the order of their ranks never wait for each other in a circle.

`docs/locks.md` lists every lock of the core with its rank and what it protects; a test compares the page with the
code. Tests check the order (`check_order`); otherwise each lock is Python's own, at no cost.

No exception that comes at any instant (Ctrl-C) leaves one of these locks taken: a `with` statement calls the methods
of Python's own lock, and each of those is one step.
"""

from __future__ import annotations

import _thread
import threading
import traceback
from enum import IntEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self


class Rank(IntEnum):
    """The order of locks: a thread that holds one takes only locks of a higher rank, or the same one again."""

    LOG = 1
    REGISTRY = 2
    SHARD = 3
    ROUND = 4
    TOPIC = 5
    HISTORY = 6
    SEALING = 7
    LIMITS = 8
    DELETES = 9
    COMMIT = 10
    QUEUE = 11
    IO = 12
    LEAF = 13
    STORE = 14
    DISK = 15


class _Order:
    """Whether the order is checked, and what was found."""

    def __init__(self) -> None:
        self.is_checked = False
        self.violations: list[str] = []


_ORDER = _Order()


def check_order(*, on: bool) -> None:
    """Have the locks that are made from now on check their order, as tests want it, or not."""
    _ORDER.is_checked = on


def violations() -> list[str]:
    """What was found since the last call, also where a worker has logged the error and gone on."""
    found, _ORDER.violations = _ORDER.violations, []
    return found


if TYPE_CHECKING:
    _Reentrant = Any
    _Condition = threading.Condition
else:
    _Reentrant = _thread.RLock

    class _Condition(threading.Condition):
        """As Python's own, which enters and leaves in steps: an interrupt between two of them keeps its lock for ever.

        A `with` asks this one for its lock's own methods, and each of those is one step.
        """

        __enter__ = property(attrgetter("_lock.__enter__"))
        __exit__ = property(attrgetter("_lock.__exit__"))


def RankedLock(rank: Rank, name: str) -> threading.Lock:  # noqa: N802 - it stands for a class
    """A lock that its holder does not take again. `name` is that of its line in `docs/locks.md`."""
    return _Checked(rank, name, reentrant=False) if _ORDER.is_checked else threading.Lock()


def RankedRLock(rank: Rank, name: str) -> threading.RLock:  # noqa: N802 - it stands for a class
    """A lock that knows its holder, which may take it again."""
    return _Checked(rank, name, reentrant=True) if _ORDER.is_checked else threading.RLock()


def RankedCondition(rank: Rank, name: str) -> threading.Condition:  # noqa: N802 - it stands for a class
    """What threads wait for, with a `RankedRLock` of its own."""
    return _Condition(RankedRLock(rank, name))


def condition_of(lock: threading.RLock) -> threading.Condition:
    """What threads wait for under this lock."""
    return _Condition(lock)


class _Taken(threading.local):
    """The locks that this thread has taken, with some that it has released since."""

    def __init__(self) -> None:
        self.locks: list[_Checked] = []


_TAKEN = _Taken()


class _Checked(_Reentrant):  # type: ignore[misc]
    """A lock that refuses to be taken out of order. It looks before it is taken and never afterwards.

    So releasing it is a single step, as for Python's own lock. Which locks a thread still holds, each lock says.
    """

    def __new__(cls, rank: Rank, name: str, *, reentrant: bool) -> Self:
        made: Self = super().__new__(cls)
        return made

    def __init__(self, rank: Rank, name: str, *, reentrant: bool) -> None:
        self.rank, self.name, self.reentrant = rank, name, reentrant

    @property
    def __enter__(self) -> Any:
        self._check()
        return super().__enter__

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - as Python's own
        """Take the lock. A thread that does not wait, or not for ever, may take it in any order."""
        if blocking and timeout < 0:
            self._check()
        elif self._is_owned() and not self.reentrant:
            return False
        else:
            _TAKEN.locks.append(self)
        taken: bool = super().acquire(blocking, timeout)
        return taken

    def locked(self) -> bool:
        """Whether any thread holds it: before Python 3.14 only its description says so."""
        return repr(self).startswith("<locked")

    def _check(self) -> None:
        held = [lock for lock in _TAKEN.locks if lock._is_owned()]
        _TAKEN.locks = [*held, self]
        if self in held:
            if not self.reentrant:
                _refuse(f"{self.name} is taken again by the thread that holds it")
            return
        for lock in held:
            if lock.rank >= self.rank:
                _refuse(f"{self.name} ({self.rank.name}) is taken under {lock.name} ({lock.rank.name})")


def _refuse(what: str) -> None:
    """Fail the call that would break the order, and keep the failure for `violations`."""
    where = "".join(traceback.format_stack(limit=16)[:-2])
    _ORDER.violations.append(f"{what}; see docs/locks.md\n{where}")
    raise AssertionError(f"{what}: see docs/locks.md for the order of locks")
