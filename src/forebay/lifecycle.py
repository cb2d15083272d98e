"""The end of the process: closes in order what is open.

The only room that knows signals and interpreter exit. A SIGTERM closes everything and then has its usual
effect; what the program itself does about that signal is left alone.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # see below
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from forebay.disk.forks import FORKS

logger = logging.getLogger(__name__)

# Closing at exit may load Arrow for the first time, which loads that module, which then cannot be loaded any more:
# it registers for the exit itself. So it is loaded above, while it can be.


class Lasting(Protocol):
    """Something that must end in order."""

    def close(self) -> None:
        """End in order."""


class _OpenLogs:
    """What is open in this process."""

    def __init__(self) -> None:
        # Held strongly: a program that forgets its log without closing it must still end in order.
        self._open: dict[Lasting, None] = {}
        self._at_exit = False
        self._at_signal = False
        self._ending: threading.Thread | None = None
        FORKS.enter(self)

    def abandon(self) -> None:
        """In a forked child: its parent closes what it has opened."""
        self._open.clear()

    def watch(self, lasting: Lasting) -> None:
        self._open[lasting] = None
        if not self._at_exit:
            self._at_exit = True
            atexit.register(self._exit)
        # Only the main thread may set this: where another opened the first log, a later one gets to it.
        if not self._at_signal and threading.current_thread() is threading.main_thread():
            self._at_signal = True
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminated)

    def forget(self, lasting: Lasting) -> None:
        self._open.pop(lasting, None)

    def close_all(self) -> None:
        for lasting in reversed(list(self._open)):
            try:
                lasting.close()
            except Exception:
                logger.exception("could not be closed in order at the end of the process")

    def _exit(self) -> None:
        if self._ending is not None:
            # It ends in the signal itself, so that the process ends the way it was asked to.
            self._ending.join()
        self.close_all()

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Close in a thread of its own: the main thread may be inside an append and hold what closing waits for.

        The signal has its usual effect from here on, so a second one does not wait.
        """
        signal.signal(number, signal.SIG_DFL)
        self._ending = threading.Thread(target=self._end_by, args=(number,), name="forebay-ending", daemon=True)
        self._ending.start()

    def _end_by(self, number: int) -> None:
        self.close_all()
        os.kill(os.getpid(), number)


_OPEN = _OpenLogs()


def close_with_process(lasting: Lasting) -> None:
    """From now on `lasting` is closed at exit and at SIGTERM, until `closed` is called."""
    _OPEN.watch(lasting)


def closed(lasting: Lasting) -> None:
    """`lasting` has ended by itself."""
    _OPEN.forget(lasting)


class StopSignals:
    """Has SIGTERM and SIGINT end a server in order: the first one asks for the end, a second one ends at once.

    For the main thread. On leaving, the signals have again the effect that they had.
    """

    def __init__(self, stop: Callable[[], object]) -> None:
        """`stop` is called once, in a signal handler of the main thread: it only asks, and returns."""
        self._stop = stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        self._stop()
