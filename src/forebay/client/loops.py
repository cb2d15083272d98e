"""An event loop in a thread, for callers who wait in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Final, TypeVar

from forebay.disk.forks import ForkGuard
from forebay.errors import Closed

T = TypeVar("T")

END_SECONDS: Final = 10.0


class LoopThread:
    """Runs the calls of any number of threads in one event loop. Takes no lock; a forked child may not use it."""

    def __init__(self, name: str, at_end: Callable[[], Coroutine[object, object, None]]) -> None:
        """`at_end` closes what the calls have opened; it runs in the loop when that ends, in whatever way."""
        self._guard = ForkGuard()
        self._name = name
        self._at_end = at_end
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_ended = False
        self._thread.start()

    def _run(self) -> None:
        """The thread. What is still under way at the end, as a stream that was not closed, is cancelled."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
            # Also where the last call was interrupted (Ctrl-C) before it had closed them.
            runner.run(self._at_end())

    @property
    def is_ended(self) -> bool:
        """Whether it does no more calls: it was ended, or this is a forked child."""
        return self._is_ended or self._guard.is_forked

    def call(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """What the coroutine comes to. An interrupt (Ctrl-C) in the waiting thread cancels it."""
        self._guard.check(self._name)
        if self._is_ended:
            raise Closed(f"{self._name} is closed")
        if threading.current_thread() is self._thread:
            raise Closed(f"{self._name} is asked in its own thread, as by on_gap: it would wait for itself")
        waiting = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()
            raise

    def end(self) -> None:
        """Stop the loop and wait for its thread. Harmless when repeated; nothing in a forked child."""
        if self._is_ended or self._guard.is_forked:
            return
        self._is_ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_SECONDS)
