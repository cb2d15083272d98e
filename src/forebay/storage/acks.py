"""The acknowledgement of an append that was not waited for: await it, ask it, or be called back."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from functools import partial

from forebay.appends.callbacks import Answered, in_callback
from forebay.appends.ticket import Ticket
from forebay.disk.forks import FORKS
from forebay.errors import Closed, ForebayError, Indeterminate
from forebay.locks import Rank, RankedRLock
from forebay.storage.arguments import checked_seconds

logger = logging.getLogger(__name__)


_FIRST = RankedRLock(Rank.LEAF, "storage.first_callback")
"""Held while an ack gets its first callback."""


class Ack(Ticket):
    """One append on its way. Settled by another thread, once; callbacks run there, after the log's lock is released.

    Takes no lock: a callback is first entered and `done` looked at afterwards, while settling turns `done`
    true first and looks for callbacks afterwards. The thread that comes second sees the other's step, and a list gives
    each of its entries to one thread only.
    """

    __slots__ = ("_callbacks", "_generation", "_wakers", "partition")

    def __init__(self, partition: int) -> None:
        super().__init__()
        self.partition = partition
        self._generation = FORKS.generation
        self._wakers: list[Callable[[Ack], None]] = []
        """Wake those who wait, at once, whatever lock is held."""
        self._callbacks: list[Callable[[Ack], None]] | None = None

    @property
    def ticket(self) -> Ticket:
        """What the shard settles."""
        return self

    def finish(self, error: ForebayError | None = None, due: deque[Answered] | None = None) -> None:
        """See `Ticket`."""
        super().finish(error, due)
        if self._wakers:
            _call(self._wakers, self)
        if self._callbacks:
            if due is None:
                self.call_back()
            else:
                due.append(self)

    def result(self, timeout: float | None = None) -> int:
        """Wait for the first offset of the append, or the error it failed with.

        `Indeterminate` if the time is up: the append is still on its way, and this may be asked again. In a
        callback at once: the thread that runs it may be the one that is to write.
        """
        if timeout is not None:
            checked_seconds("timeout", timeout)
        if not self.done:
            if self._generation != FORKS.generation:
                raise Closed("this append was queued before a fork, and only the parent gets its offset")
            if in_callback():
                raise Indeterminate("asked in the callback of an append, which cannot wait for another: add a callback")
            settled = threading.Event()
            self._wake(lambda _: settled.set())
            if not settled.wait(timeout):
                raise Indeterminate(f"not acknowledged within {timeout} s: it may still be; ask again")
        return super().result()

    def add_callback(self, callback: Callable[[Ack], None]) -> None:
        """Call `callback(ack)` when the outcome is known; at once if it is already.

        Called once, by the thread that wrote or one of the log's own, with no lock held: it may append, read,
        and close the log. Until it returns that thread writes nothing for others, so it should be quick; and it
        cannot wait for another ack: `result()` raises `Indeterminate` there. An exception in it is logged.
        """
        with _FIRST:
            if self._callbacks is None:
                self._callbacks = []
        self._callbacks.append(callback)
        if self.done:
            self.call_back()

    def call_back(self) -> None:
        """Call each callback that was not called yet."""
        if self._callbacks:
            _call(self._callbacks, self)

    def _wake(self, waker: Callable[[Ack], None]) -> None:
        self._wakers.append(waker)
        if self.done:
            _call(self._wakers, self)

    def __await__(self) -> Generator[object, None, int]:
        if not self.done:
            wakeups = _wakeups()
            settled = wakeups.loop.create_future()
            self._wake(partial(wakeups.add, settled))
            yield from settled
        return super().result()


def _call(callbacks: list[Callable[[Ack], None]], ack: Ack) -> None:
    while callbacks:
        try:
            callback = callbacks.pop(0)
        except IndexError:
            return
        try:
            callback(ack)
        except Exception:
            # The append is what it is; the callback's target may be gone (a closed event loop).
            logger.exception("the callback of an append failed")


class Wakeups:
    """Futures of one event loop that are to be settled: one call into the loop for all that come together.

    A call from another thread costs more than an append does, so there is at most one on its way.
    """

    __slots__ = ("_asked", "_due", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due: deque[asyncio.Future[None]] = deque()
        self._asked = False

    def add(self, future: asyncio.Future[None], _: Ack | None = None) -> None:
        """Settle the future, in its loop, soon. For any thread."""
        self._due.append(future)
        if not self._asked:
            self._asked = True
            self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        # In this order: what is added from here on either is found below or asks again.
        self._asked = False
        due = self._due
        while due:
            future = due.popleft()
            if not future.done():
                future.set_result(None)


class _Running(threading.local):
    """The wake-ups of the loop that this thread runs."""

    wakeups: Wakeups | None = None


_RUNNING = _Running()


def _wakeups() -> Wakeups:
    loop = asyncio.get_running_loop()
    found = _RUNNING.wakeups
    if found is None or found.loop is not loop:
        found = _RUNNING.wakeups = Wakeups(loop)
    return found
