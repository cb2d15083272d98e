"""A thread that exists once it is needed, and only once: also where Ctrl-C falls into its start."""

from __future__ import annotations

import threading
from collections.abc import Callable

from forebay.locks import Rank, RankedRLock


class Background:
    """One daemon thread that runs `work`. It ends when `work` returns; telling it to is its owner's."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._name = name
        self._work = work
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: the thread is not there."""
        # Entered again by a signal handler that comes in between.
        self._starting = RankedRLock(Rank.STORE, "engines.thread")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Have the thread run from now on; nothing where it does.

        An exception in between (Ctrl-C) may leave a thread behind that nobody knows yet: whichever comes
        first to `_run` is the one, and any other goes away.
        """
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._known_as(thread)

    def join(self, seconds: float | None = None) -> bool:
        """Wait until the thread has ended; false if the time was not enough. Nothing inside the thread itself."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        if self._known_as(threading.current_thread()):
            self._work()

    def _known_as(self, thread: threading.Thread) -> bool:
        with self._starting:
            if self._thread is None:
                self._thread = thread
            return self._thread is thread
