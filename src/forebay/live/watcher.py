"""One watcher of a topic in an event loop: its own offsets, pages that it shares with the other watchers.

A watcher that is slow costs the others nothing: it asks for its own offsets, which are read from files or history where
memory has not got them any more, and shares pages again once it has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from forebay.disk.forks import ForkGuard
from forebay.engines import ReadShard
from forebay.live.calls import KeptCall
from forebay.live.feeds import Feeds, Render, ShardFeed, SharedPage
from forebay.reading import Cursor
from forebay.records import Record
from forebay.storage import Topic
from forebay.storage.streams import Following

T = TypeVar("T")


class Watcher(Generic[T]):
    """All partitions of a topic in turn, without an end. For one task at a time, in the loop of its feeds.

    A task that is cancelled takes nothing with it: the next one that asks goes on at the same record.
    """

    def __init__(
        self,
        feeds: Feeds,
        topic: Topic,
        begin: Callable[[], Following[Record]],
        render: Render[T],
        timeout: float | None = None,
    ) -> None:
        """`begin` decides where to start; it runs in a thread. The watcher ends when nothing came for `timeout` s."""
        self._feeds = feeds
        self._topic = topic
        self._begin = begin
        self._render = render
        self._timeout = timeout
        self._guard = ForkGuard()
        self._begun: KeptCall[Following[Record]] = KeptCall(feeds.start)
        self._grown: KeptCall[None] = KeptCall(feeds.start)
        self._following: Following[Record] | None = None
        self._joined: list[tuple[Cursor[ReadShard], ShardFeed]] = []
        self._turn = 0
        self._waiter: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._handed: dict[int, tuple[int, SharedPage]] = {}
        """By partition, the page that the task waited for, and its offset."""
        self._closed = False

    async def begin(self) -> None:
        """Decide where to start; harmless when repeated."""
        if self._following is None and not self._closed:
            self._following = await self._begun.answer(self._begin)
            self._join()

    async def next_page(self) -> Sequence[T]:
        """What comes next of any partition; empty when nothing came in time, or the watcher was closed.

        Raises what a read of the topic raises; asked again, it goes on.
        """
        loop = self._feeds.loop
        deadline = None if self._timeout is None else loop.time() + self._timeout
        is_last = False
        while not self._closed:
            self._guard.check("this stream")
            assert self._following is not None, "begin comes first"
            while self._following.has_grown:
                # More than once where the first answer is that of a call which a cancelled task has left under way.
                await self._grown.answer(self._following.grow)
            self._join()
            rows = self._look()
            if rows or is_last:
                return rows
            is_last = deadline is not None and loop.time() >= deadline
            if not is_last:
                await self._wait_until(deadline)
            elif not await self._wait_for_reads():
                break
        return ()

    def wake(self) -> None:
        """Have the task that waits look again. In the loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def hand(self, partition: int, offset: int, page: SharedPage) -> None:
        """What the task waits for: taken when it looks again. In the loop."""
        self._handed[partition] = (offset, page)

    def fail(self, error: BaseException) -> None:
        """Why a page that the task waits for cannot be read: raised when the task looks again. In the loop."""
        self._failure = error

    def close(self) -> None:
        """End: the task that waits gets nothing more. Harmless when repeated. In the loop."""
        self._closed = True
        self.wake()
        for _, feed in self._joined:
            self._feeds.part(feed, self)
        self._joined.clear()

    def _join(self) -> None:
        if self._following is not None and not self._closed:
            for cursor in self._following.cursors[len(self._joined) :]:
                self._joined.append((cursor, self._feeds.join(self._topic, cursor, self)))

    def _look(self) -> Sequence[T]:
        """What there is now of the next partition that has something."""
        failure, self._failure = self._failure, None
        if failure is not None:
            # Many watchers get this one error: each begins its own trace.
            raise failure.with_traceback(None)
        for _ in self._joined:
            cursor, feed = self._joined[self._turn]
            self._turn = (self._turn + 1) % len(self._joined)
            rows = self._rows(cursor, feed)
            if rows:
                return rows
        return ()

    def _rows(self, cursor: Cursor[ReadShard], feed: ShardFeed) -> Sequence[T]:
        """The next rows of one partition; empty if there are none yet."""
        while (shared := self._next_shared(cursor, feed)) is not None:
            if not shared.page.events:
                cursor.next = shared.page.next
                rows = shared.rows(self._render)
            else:
                # Here gaps are reported, so what is shown depends on the watcher.
                batches = cursor.take(shared.page)
                rows = [row for batch in batches for row in self._render(batch, cursor.partition)]
            if rows:
                return rows
        return ()

    def _next_shared(self, cursor: Cursor[ReadShard], feed: ShardFeed) -> SharedPage | None:
        offset, page = self._handed.pop(cursor.partition, (-1, None))
        if page is not None and offset == cursor.next and feed.is_current(page):
            return page
        return feed.page(cursor.next, is_waiting=self._timeout is None)

    async def _wait_until(self, deadline: float | None) -> None:
        """Wait until there may be more, the time is up, or the watcher is closed.

        The loop takes no other step between the last look and this: what is published since then wakes the task.
        """
        self._waiter = self._feeds.loop.create_future()
        timer = None if deadline is None else self._feeds.loop.call_at(deadline, self.wake)
        try:
            await self._entered(self._waiter)
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    async def _wait_for_reads(self) -> bool:
        """Where the time is up: wait for what threads read for this watcher; false if they read nothing."""
        reads = [read for cursor, feed in self._joined if (read := feed.reading(cursor.next)) is not None]
        if reads:
            await self._entered(asyncio.wait(reads))
        return bool(reads)

    async def _entered(self, wait: Awaitable[object]) -> None:
        """Wait as one of those who are given what comes at the offsets of this watcher."""
        waiting = [(feed, cursor.next) for cursor, feed in self._joined]
        for feed, offset in waiting:
            feed.wait(offset, self)
        try:
            await wait
        finally:
            for feed, offset in waiting:
                feed.leave(offset, self)
