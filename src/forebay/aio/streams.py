"""Streams for asyncio: a thread pulls the pages of a stream that ends; one that follows is a watcher of `forebay.live`.

A page that was being pulled when its task was cancelled is kept for the next task that asks, so nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from forebay.aio.workers import Workers
from forebay.live import CallKey, KeptCall
from forebay.storage.streams import Stream

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class AsyncSource(Protocol[T_co]):
    """Where an asynchronous stream gets its pages from."""

    async def begin(self) -> None:
        """Decide where the stream starts; harmless when repeated."""

    async def next_page(self) -> Sequence[T_co]:
        """What comes next, from where `begin` decides; empty at the end."""

    def close(self) -> None:
        """Nothing more will be asked for."""


class AsyncStream(Generic[T]):
    """An asynchronous iterator that may be left and entered again, also after an error. For one task at a time."""

    def __init__(self, source: AsyncSource[T], check_open: Callable[[], None]) -> None:
        """`check_open` raises `Closed` once the log is closed."""
        self._source = source
        self._check_open = check_open
        self._is_closed = False
        self._rows: Iterator[T] = iter(())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._is_closed:
            raise StopAsyncIteration
        self._check_open()
        for row in self._rows:
            return row
        page = await self._source.next_page()
        if not page:
            raise StopAsyncIteration
        self._rows = iter(page)
        return next(self._rows)

    async def aclose(self) -> None:
        """End the stream; harmless when repeated."""
        self._is_closed = True
        self._source.close()
        self._rows = iter(())

    async def __aenter__(self) -> Self:
        await self._source.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Paged(Generic[T]):
    """The pages of a stream that ends."""

    def __init__(self, workers: Workers, key: CallKey, begin: Callable[[], Stream[T]]) -> None:
        """`key` is what the stream may wait for."""
        self._begin = begin
        self._begun: KeptCall[Stream[T]] = KeptCall(workers.start_reading, key)
        self._pages: KeptCall[list[T]] = KeptCall(workers.start_reading, key)
        self._stream: Stream[T] | None = None

    async def begin(self) -> None:
        """See `AsyncSource`."""
        if self._stream is None:
            self._stream = await self._begun.answer(self._begin)

    async def next_page(self) -> list[T]:
        """See `AsyncSource`."""
        await self.begin()
        assert self._stream is not None, "it is begun"
        return await self._pages.answer(self._stream.next_page)

    def close(self) -> None:
        """See `AsyncSource`."""
        if self._stream is not None:
            self._stream.close()
