"""The life of the process: whatever is open is closed in order at its end, and not carried through a fork.

The only room that knows signals and interpreter exit. A SIGTERM closes everything and then has its usual
effect; a handler that the program set itself is left alone.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol

from forebay.disk.forks import tell_of_forks

logger = logging.getLogger(__name__)


class Lasting(Protocol):
    """Something that must end in order."""

    def close(self) -> None:
        """End in order."""

    def before_fork(self) -> None:
        """Come to rest."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """End without touching what the parent shares."""


class _OpenLogs:
    """What is open in this process."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[Lasting] = weakref.WeakSet()
        self._watching = False

    def watch(self, lasting: Lasting) -> None:
        self._open.add(lasting)
        tell_of_forks(lasting)
        if not self._watching:
            self._watching = True
            atexit.register(self.close_all)
            main = threading.current_thread() is threading.main_thread()
            if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminated)

    def forget(self, lasting: Lasting) -> None:
        self._open.discard(lasting)

    def close_all(self) -> None:
        for lasting in list(self._open):
            try:
                lasting.close()
            except Exception:
                logger.exception("could not be closed in order at the end of the process")

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self.close_all()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


_OPEN = _OpenLogs()


def close_with_process(lasting: Lasting) -> None:
    """From now on `lasting` is closed at exit and at SIGTERM, and told of forks. It is held weakly."""
    _OPEN.watch(lasting)


def closed(lasting: Lasting) -> None:
    """`lasting` has ended by itself."""
    _OPEN.forget(lasting)
