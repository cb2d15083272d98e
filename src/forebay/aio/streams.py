"""Streams for asyncio: pages are pulled in a thread, tasks wait in the loop.

A page that was being pulled when its task was cancelled is kept for whoever asks next, so nothing is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from forebay.aio.workers import Workers, wake_loop
from forebay.storage.streams import Following, Stream

T = TypeVar("T")

LOOK_SECONDS = 0.5
"""Wake-ups only wake: whoever waits looks again after this time without one."""


class AsyncSource(Protocol[T]):
    """Where an asynchronous stream gets its pages from."""

    async def begin(self) -> None:
        """Settle where the stream starts; harmless when repeated."""

    async def next_page(self) -> list[T]:
        """What comes next; empty at the end."""

    def close(self) -> None:
        """Nothing more will be asked for."""


class AsyncStream(Generic[T]):
    """An asynchronous iterator that may be left and entered again, also after an error. For one task at a time."""

    def __init__(self, source: AsyncSource[T]) -> None:
        self._source = source
        self._rows: Iterator[T] = iter(())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        for row in self._rows:
            return row
        await self._source.begin()
        page = await self._source.next_page()
        if not page:
            raise StopAsyncIteration
        self._rows = iter(page)
        return next(self._rows)

    async def aclose(self) -> None:
        """End the stream; harmless when repeated."""
        self._source.close()
        self._rows = iter(())

    async def __aenter__(self) -> Self:
        await self._source.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Kept(Generic[T]):
    """One call at a time in a thread; what a cancelled task did not take, the next one gets."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._pending: asyncio.Future[T] | None = None

    async def call(self, call: Callable[[], T]) -> T:
        pending = self._pending
        if pending is None:
            pending = self._pending = self._workers.start(call)
        try:
            answer = await asyncio.shield(pending)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        return answer


class Paged(Generic[T]):
    """The pages of a stream that ends."""

    def __init__(self, workers: Workers, begin: Callable[[], Stream[T]]) -> None:
        self._begin = begin
        self._begun: _Kept[Stream[T]] = _Kept(workers)
        self._pages: _Kept[list[T]] = _Kept(workers)
        self._stream: Stream[T] | None = None

    async def begin(self) -> None:
        """See `AsyncSource`."""
        if self._stream is None:
            self._stream = await self._begun.call(self._begin)

    async def next_page(self) -> list[T]:
        """See `AsyncSource`."""
        assert self._stream is not None
        return await self._pages.call(self._stream.next_page)

    def close(self) -> None:
        """See `AsyncSource`."""
        if self._stream is not None:
            self._stream.close()


class Followed(Generic[T]):
    """The pages of a stream that goes on; ends when nothing came for a time, or it is closed."""

    def __init__(self, workers: Workers, begin: Callable[[], Following[T]], timeout: float | None) -> None:
        self._begin = begin
        self._timeout = timeout
        self._begun: _Kept[Following[T]] = _Kept(workers)
        self._pages: _Kept[list[T]] = _Kept(workers)
        self._following: Following[T] | None = None
        self._bell: _Bell | None = None
        self._closed = False

    async def begin(self) -> None:
        """See `AsyncSource`."""
        if self._following is None:
            self._following = await self._begun.call(self._begin)
            self._bell = _Bell(asyncio.get_running_loop())
            self._following.listen(self._bell.ring)
            weakref.finalize(self, self._following.leave, self._bell.ring)

    async def next_page(self) -> list[T]:
        """See `AsyncSource`."""
        following, bell = self._following, self._bell
        assert following is not None and bell is not None
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout is None else loop.time() + self._timeout
        while not self._closed:
            bell.listen()
            page = await self._pages.call(partial(_rows, following))
            left = LOOK_SECONDS if deadline is None else deadline - loop.time()
            if page or left <= 0:
                return page
            if following.listen(bell.ring):
                continue
            await bell.wait(min(left, following.poll_seconds or LOOK_SECONDS))
        return []

    def close(self) -> None:
        """See `AsyncSource`."""
        self._closed = True
        if self._bell is not None and self._following is not None:
            self._following.leave(self._bell.ring)
            self._bell.ring()


def _rows(following: Following[T]) -> list[T]:
    return list(following.next_page() or ())


class _Bell:
    """Rung from any thread, heard in the loop: many rings cost one call into the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung = False
        self._heard = asyncio.Event()

    def ring(self) -> None:
        if not self._rung:
            self._rung = True
            wake_loop(self._loop, self._heard.set)

    def listen(self) -> None:
        """From here on a ring is heard. In this order: one in between sets the event after it is cleared."""
        self._rung = False
        self._heard.clear()

    async def wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._heard.wait(), seconds)
