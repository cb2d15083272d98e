"""Runs append callbacks after the log's locks are released, so that a callback may use the log.

Knows tickets, nothing of what was written. A ticket stays in its queue until its callback has run: if the thread is
interrupted (Ctrl-C), the next thread that comes here runs the rest.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from forebay.appends.waiting import is_inside

logger = logging.getLogger(__name__)


class Answered(Protocol):
    """An append whose outcome is known and whose callbacks are due."""

    def call_back(self) -> None:
        """Run each callback that has not run yet."""


class _Here(threading.local):
    """What this thread is working through, if it is."""

    def __init__(self) -> None:
        self.queues: deque[deque[Answered]] = deque()
        self.running = threading.RLock()
        """A lock of one thread, as a mark that no exception at any instant leaves behind."""
        self.is_running = is_inside(self.running)


_HERE = _Here()


def in_callback() -> bool:
    """Whether this thread is in the callback of an append."""
    return _HERE.is_running()


def call_back(due: deque[Answered]) -> None:
    """Call all that is due. Inside a callback only later: a callback that appends must not nest without end."""
    queues = _HERE.queues
    queues.append(due)
    if _HERE.is_running():
        return
    with _HERE.running:
        while queues:
            _emptied(queues.popleft())


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Callbacks that become due inside run at the end, when a lock that was taken inside is released."""
    try:
        with _HERE.running:
            yield
    finally:
        call_back(deque())


@contextlib.contextmanager
def left_due() -> Iterator[list[deque[Answered]]]:
    """What becomes due inside is not called back here. At the end the list names the queues: another thread calls."""
    left: list[deque[Answered]] = []
    with _HERE.running:
        try:
            yield left
        finally:
            left.extend(_HERE.queues)
            _HERE.queues.clear()


def _emptied(due: deque[Answered]) -> None:
    while due:
        try:
            answered = due[0]
            answered.call_back()
            due.remove(answered)
        except (IndexError, ValueError):
            continue  # another thread was quicker


class Waking:
    """The wakers of one shard, to be called in turn with the callbacks of appends: when no lock is held.

    One for each publication: a thread that has called the wakers for it takes out that one alone.
    """

    def __init__(self, wakers: Iterable[Callable[[], None]], name: object) -> None:
        self._wakers = wakers
        self._name = name

    def call_back(self) -> None:
        """See `Answered`."""
        wake_all(self._wakers, self._name)


def wake_all(wakers: Iterable[Callable[[], None]], name: object) -> None:
    """Call each waker; what one raises is logged, and fails neither the append nor the others. No lock is held."""
    for waker in tuple(wakers):
        try:
            waker()
        except Exception:
            logger.exception("%s: a reader could not be woken", name)
