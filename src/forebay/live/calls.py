"""Calls that may wait for a disk, made from an event loop: a thread runs them, a task waits for the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class StartCall(Protocol):
    """Begins a call in a thread. Cancelling what waits for it does not stop it; `Closed` once the log is closed."""

    def __call__(self, call: Callable[[], T], /) -> asyncio.Future[T]:
        """The answer, or the error, of the call."""


class KeptCall(Generic[T]):
    """One call at a time in a thread. The answer that a cancelled task did not take is given to the next one."""

    def __init__(self, start: StartCall) -> None:
        self._start = start
        self._pending: asyncio.Future[T] | None = None

    async def answer(self, call: Callable[[], T]) -> T:
        """The answer to `call`, or to the call that a cancelled task has left under way."""
        pending = self._pending
        if pending is None:
            pending = self._pending = self._start(call)
        try:
            answer = await asyncio.shield(pending)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        return answer
