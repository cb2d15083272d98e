"""Ctrl-C and SIGTERM: end the command in order, but never in the middle of an append."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = 128 + number


class Interruptions:
    """While this is entered, signals raise `Interrupted`; inside `held`, only once the block is left."""

    def __init__(self) -> None:
        self._holding = False
        self._waiting: int | None = None

    @contextmanager
    def heeded(self) -> Iterator[Interruptions]:
        """Take over the signals for the block; does nothing outside the main thread, which alone gets them."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, self._arrived)
        try:
            yield self
        finally:
            for number, former in before.items():
                signal.signal(number, former)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let the block come to its end first. A second signal does not wait."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._waiting is not None:
            raise Interrupted(self._waiting)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._holding and self._waiting is None:
            self._waiting = number
            return
        raise Interrupted(number)
