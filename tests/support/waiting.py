"""Waiting in a test for what another thread or process does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from forebay.clock import SystemClock

PATIENCE: Final = 240.0
"""Seconds after which what a test waits for does not come: as long as a test may take, for it waits for events."""


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return once the condition holds; fail if it does not in a long time."""
    clock, waiting = SystemClock(), threading.Event()
    deadline = clock.monotonic() + seconds
    while not condition():
        assert clock.monotonic() < deadline, f"still not so after {seconds:g} s"
        waiting.wait(0.002)
