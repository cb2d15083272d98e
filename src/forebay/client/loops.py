"""An event loop in a thread, for callers who wait in threads of their own."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

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
        self._is_over = False
        """Whether the loop takes no step any more."""
        self._tasks: set[asyncio.Task[object]] = set()
        """The calls that the loop is at."""
        self._waiting: set[Future[Any]] = set()
        """What threads wait for."""
        self._thread.start()

    def _run(self) -> None:
        """The thread. What is still under way at the end, as a stream that was not closed, is cancelled."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
            # Also where the last call was interrupted (Ctrl-C) before it had closed them.
            runner.run(self._at_end())
            runner.run(self._end_calls())
        # In this order: a thread adds what it waits for, and looks at the mark then.
        self._is_over = True
        for waiting in list(self._waiting):
            waiting.cancel()

    async def _end_calls(self) -> None:
        """Have every call end, which says what came of it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def is_ended(self) -> bool:
        """Whether it does no more calls: it was ended, or this is a forked child."""
        return self._is_ended or self._guard.is_forked

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the loop, which cannot wait for a call."""
        return threading.current_thread() is self._thread

    def call(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """What the coroutine comes to; `Closed` if the loop ends first, unless the coroutine says more of that.

        An interrupt (Ctrl-C) in the waiting thread cancels it.
        """
        self._guard.check(self._name)
        if self._is_ended:
            raise self._closed()
        if self.is_here:
            raise Closed(f"{self._name} is asked in its own thread, as by on_gap: it would wait for itself")
        called = self._called(work)
        try:
            waiting = asyncio.run_coroutine_threadsafe(called, self._loop)
        except RuntimeError:
            called.close()
            raise self._closed() from None
        self._waiting.add(waiting)
        try:
            if self._is_over:
                waiting.cancel()
            return waiting.result()
        except CancelledError:
            if not self._is_ended:
                raise
            if inspect.getcoroutinestate(called) == inspect.CORO_CREATED:
                called.close()
            raise self._closed() from None
        except BaseException:
            waiting.cancel()
            raise
        finally:
            self._waiting.discard(waiting)

    async def _called(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        task = asyncio.current_task()
        assert task is not None, "it is called in a task"
        self._tasks.add(task)
        try:
            return await work()
        finally:
            self._tasks.discard(task)

    def _closed(self) -> Closed:
        return Closed(f"{self._name} is closed")

    def end(self) -> None:
        """Stop the loop and wait for its thread. Harmless when repeated; nothing in a forked child."""
        if self._is_ended or self._guard.is_forked:
            return
        self._is_ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_SECONDS)
