"""Waiting in a test for what another thread, process or task does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Final

from forebay.clock import SystemClock

PATIENCE: Final = 240.0
"""Seconds after which what a test waits for does not come: as long as a test may take, for it waits for events."""


PAUSE_MIN: Final = 0.002
PAUSE_MAX: Final = 0.1


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return once the condition holds; fail if it does not in a long time.

    The longer it has waited, the longer it waits before it looks again, a twentieth of that time: what comes soon is
    seen at once, and waiting for a lease to end keeps no server busy with questions.
    """
    waiting = threading.Event()
    for pause in _pauses(condition, seconds):
        waiting.wait(pause)


async def async_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """The same in an event loop, whose other tasks go on meanwhile."""
    for pause in _pauses(condition, seconds):
        await asyncio.sleep(pause)


def _pauses(condition: Callable[[], object], seconds: float) -> Iterator[float]:
    clock = SystemClock()
    begun = clock.monotonic()
    while not condition():
        waited = clock.monotonic() - begun
        assert waited < seconds, f"still not so after {seconds:g} s"
        yield min(max(PAUSE_MIN, waited / 20), PAUSE_MAX)
