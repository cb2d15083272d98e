"""Wakes the tasks of an event loop whose time is up: one timer for all of them, however many wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Final

from forebay.live.outbox import Outbox

TICK_SECONDS: Final = 0.02
"""A task is woken so much too late at most."""
WAIT_SECONDS_MAX: Final = 3600.0
"""A task with a later deadline, or none (infinity), is woken then as well: it looks at the time and waits on."""


class Deadlines:
    """The deadlines of all watchers of one event loop, by tick. For calls in that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[Iterable[Outbox]], None]) -> None:
        """`wake` is called with those whose time is up."""
        self._loop = loop
        self._wake = wake
        self._waiting: dict[int, dict[Outbox, None]] = {}
        """By tick, who waits until then."""
        self._ticks: list[int] = []
        """A heap of the ticks that have an entry."""
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, deadline: float, outbox: Outbox) -> int:
        """Wake this one at the deadline (time of the loop) or before, unless it leaves the tick that is returned."""
        tick = math.ceil(min(deadline, self._loop.time() + WAIT_SECONDS_MAX) / TICK_SECONDS)
        waiting = self._waiting.get(tick)
        if waiting is None:
            waiting = self._waiting[tick] = {}
            heappush(self._ticks, tick)
            if self._ticks[0] == tick:
                self._set_timer()
        waiting[outbox] = None
        return tick

    def leave(self, tick: int, outbox: Outbox) -> None:
        """Do not wake this one; harmless if it was woken."""
        waiting = self._waiting.get(tick)
        if waiting is not None:
            waiting.pop(outbox, None)

    def _set_timer(self) -> None:
        """Be called at the first tick, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._ticks[0] * TICK_SECONDS, self._run) if self._ticks else None

    def _run(self) -> None:
        now = self._loop.time()
        while self._ticks and self._ticks[0] * TICK_SECONDS <= now:
            self._wake(self._waiting.pop(heappop(self._ticks)))
        self._set_timer()
