"""One watcher of topics in an event loop: its own offsets, pages that it shares with the other watchers.

A watcher that is slow costs the others nothing: it asks for its own offsets, which are read from files or history where
memory has not got them any more, and shares pages again once it has caught up.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from forebay.disk.forks import ForkGuard
from forebay.engines import ReadShard
from forebay.live.calls import CallKey, KeptCall
from forebay.live.feeds import Feeds, Render, SharedPage
from forebay.live.outbox import Lane, Outbox
from forebay.reading import Cursor
from forebay.records import EARLIEST, LATEST, Gap, Record, Start
from forebay.storage import Topic
from forebay.storage.streams import Following

T = TypeVar("T")
OUTBOX_BYTES_MAX: Final = 1024 * 1024


class WatchedTopic(Generic[T]):
    """One topic of a watcher: where to begin, and what to make of its records. For one watcher."""

    def __init__(
        self,
        topic: Topic,
        begin: Callable[[], Following[Record]],
        render: Render[T],
        gaps: list[Gap] | None = None,
    ) -> None:
        """`begin` runs in a thread. What its `on_gap` appends to `gaps` is given in band, before what follows it."""
        self.topic = topic
        self.begin = begin
        self.render = render
        self.gaps = gaps
        """What `take_gaps` gives next."""

    @classmethod
    def from_start(cls, topic: Topic, render: Render[T], start: Start = LATEST) -> WatchedTopic[T]:
        """The whole topic from `start` on, as `Topic.follow` takes it, with its gaps in band.

        Where `start` names offsets, it names one for each partition. Those that are added are followed in any case.
        """
        gaps: list[Gap] = []
        begin = partial(
            topic.following, start, start_of_added=lambda _: EARLIEST, on_gap=lambda _, gap: gaps.append(gap)
        )
        return cls(topic, begin, render, gaps)

    def take_gaps(self) -> Sequence[Gap]:
        """The gaps that were met since the last call."""
        if not self.gaps:
            return ()
        gaps = tuple(self.gaps)
        self.gaps.clear()
        return gaps


class Delivered(NamedTuple, Generic[T]):
    """What a watcher gets at once: rows of one partition, after gaps that came before them."""

    source: WatchedTopic[T]
    partition: int
    gaps: Sequence[Gap]
    rows: Sequence[T]
    """Shared with other watchers: not to be changed."""
    next: int
    """Where the watcher goes on in this partition."""
    shared: SharedPage | None = None
    """The page of these very rows, without gaps; `None` where they are this watcher's alone."""


class _Part(NamedTuple, Generic[T]):
    """One partition of a watcher."""

    source: WatchedTopic[T]
    cursor: Cursor[ReadShard]


class Watcher(Generic[T]):
    """All partitions of some topics in turn, without an end. For one task at a time, in the loop of its feeds.

    A task that is cancelled takes nothing with it: the next one that asks goes on at the same record.
    """

    def __init__(
        self,
        feeds: Feeds,
        sources: Sequence[WatchedTopic[T]],
        timeout: float | None = None,
        *,
        outbox_bytes_max: int = OUTBOX_BYTES_MAX,
    ) -> None:
        """It ends when nothing came for `timeout` s.

        Pages of more than `outbox_bytes_max` together do not wait for it: it reads them when it asks.
        """
        self._feeds = feeds
        self._sources = sources
        self._timeout = timeout
        self._guard = ForkGuard()
        keys = [CallKey.of(source.topic) for source in sources]
        key = keys[0] if len(keys) == 1 else tuple(keys)
        self._begun: KeptCall[list[Following[Record]]] = KeptCall(feeds.start, key)
        self._grown: KeptCall[None] = KeptCall(feeds.start, key)
        self._followings: list[Following[Record]] | None = None
        """What is followed of each topic."""
        self._joined = [0] * len(sources)
        """How many partitions of each topic have a lane."""
        self.outbox = Outbox(outbox_bytes_max)
        """What waits for it."""
        self._parts: list[_Part[T]] = []
        """By the number of its lane."""
        self._closed = False
        self.failed: WatchedTopic[T] | None = None
        """The topic of which the last `take` could read nothing more, for the reason that it raised."""
        self._left: set[WatchedTopic[T]] = set()
        # A watcher that is dropped leaves its feeds, in its loop: the collector may run in any thread.
        self._dropped = weakref.finalize(self, _call_in, feeds.loop, self.outbox.close)
        self._dropped.atexit = False

    async def begin(self) -> None:
        """Decide where to start; harmless when repeated."""
        if self._followings is None and not self._closed:
            self._followings = await self._begun.answer(partial(_begin, self._sources))
            self._join()

    async def next_page(self) -> Sequence[T]:
        """What comes next of any partition; empty when nothing came in time, or the watcher was closed."""
        found = await self.take()
        while found is not None and not found.rows:
            found = await self.take()
        return () if found is None else found.rows

    @property
    def is_closed(self) -> bool:
        """Whether it has ended: nothing comes any more."""
        return self._closed

    async def take(self, until: float | None = None) -> Delivered[T] | None:
        """What comes next of any partition; `None` when nothing came in time, or the watcher was closed.

        A watcher without a timeout of its own waits until this time of the loop, if one is given. Raises what a read of
        the topic raises; asked again, it goes on.
        """
        self.failed = None
        if self._followings is None:
            await self.begin()
        loop, outbox, timeout = self._feeds.loop, self.outbox, self._timeout
        deadline = until
        if timeout is not None:
            deadline = loop.time() + timeout
            self._look_everywhere()
        while not self._closed:
            self._guard.check("this stream")
            if outbox.has_grown and not await self._has_grown(until):
                return None
            found = self._look()
            if found is not None:
                return found
            # The loop takes no step between the look and the wait: what is published since then wakes the task.
            if deadline is None:
                waiter = outbox.waiter = loop.create_future()
                try:
                    await waiter
                finally:
                    outbox.waiter = None
            elif loop.time() < deadline:
                await self._feeds.sleep(outbox, deadline)
            else:
                return None if timeout is None else await self._last()
        return None

    def take_ready(self) -> Delivered[T] | None:
        """What was handed to it, without a wait; `None` if there is none, or `take` has more to do than to give it.

        For `Outbox.push`, while a task waits in `take`: in the loop.
        """
        outbox = self.outbox
        if self._closed or outbox.has_grown or any(lane.has_failed for lane in outbox.ready):
            return None
        return self._look()

    def take_last(self) -> tuple[SharedPage, Render[T]] | None:
        """The page that was handed to it, and its render, if that is all that there is and has rows.

        Else `None`, and nothing is taken.

        For `Outbox.push`, as `take_ready`, which does the rest: of a crowd, all but the first get their pages by this.
        """
        outbox = self.outbox
        ready = outbox.ready
        if len(ready) != 1 or outbox.has_grown or self._closed:
            return None
        lane = ready[0]
        feed, shared, (source, cursor) = lane.feed, lane.page, self._parts[lane.number]
        if shared is None or shared.page.next != feed.quiet_at or shared.gaps or source.gaps:
            return None
        if not feed.is_current(shared) or not shared.rows(source.render):
            return None
        ready.clear()
        lane.take()
        cursor.next = shared.page.next
        feed.wait(lane, cursor.next)
        return shared, source.render

    def offsets(self) -> list[list[int]]:
        """Where it goes on, for each topic in each of its partitions. Once it has begun; in the loop."""
        assert self._followings is not None, "begin comes first"
        return [[cursor.next for cursor in following.cursors] for following in self._followings]

    def leave(self, source: WatchedTopic[T]) -> None:
        """Watch one of the topics no more; `offsets` says on where it stood. In the loop."""
        self._left.add(source)
        for lane in self.outbox.lanes:
            if self._parts[lane.number].source is source:
                self.outbox.drop(lane)

    def close(self) -> None:
        """End: the task that waits gets nothing more. Harmless when repeated. In the loop."""
        self._closed = True
        self._dropped.detach()
        self.outbox.close()

    async def _has_grown(self, until: float | None) -> bool:
        """As `_grow`; false if the time was up first, and then the next one that asks goes on."""
        try:
            async with asyncio.timeout_at(until):
                await self._grow()
        except TimeoutError:
            return False
        return True

    async def _grow(self) -> None:
        """Watch the partitions, too, that the topics have got."""
        assert self._followings is not None, "begin comes first"
        self.outbox.has_grown = False
        try:
            for source, following in zip(self._sources, self._followings, strict=True):
                while following.has_grown and source not in self._left:
                    self.failed = source
                    # More than once where the first answer is that of a call which a cancelled task has left under way.
                    await self._grown.answer(following.grow)
                    self.failed = None
        except BaseException:
            self.outbox.has_grown = True
            raise
        self._join()

    def _join(self) -> None:
        if self._closed or self._followings is None:
            return
        for number, (source, following) in enumerate(zip(self._sources, self._followings, strict=True)):
            for cursor in following.cursors[self._joined[number] :]:
                self._parts.append(_Part(source, cursor))
                self._feeds.join(source.topic, cursor.partition, cursor.source, self.outbox, source.render)
                self._joined[number] += 1

    def _look(self) -> Delivered[T] | None:
        """What there is now in the next lane that has something; those that have nothing wait in their feeds."""
        ready = self.outbox.ready
        while ready:
            lane = ready.popleft()
            part = self._parts[lane.number]
            try:
                found = self._next(lane, part)
            except BaseException:
                ready.append(lane)
                self.failed = part.source
                raise
            if found is not None:
                if found.next == lane.feed.quiet_at and self._timeout is None:
                    # It has caught up: the next look would find nothing.
                    lane.feed.wait(lane, found.next)
                else:
                    ready.append(lane)
                return found
            if not self._closed:
                lane.feed.wait(lane, part.cursor.next)
        return None

    def _next(self, lane: Lane, part: _Part[T]) -> Delivered[T] | None:
        """The next rows or gaps of one partition; `None` if there are none yet."""
        source, cursor = part
        while True:
            shared = lane.take()
            if shared is None or not lane.feed.is_current(shared):
                shared = lane.feed.page(cursor.next, source.render, is_waiting=self._timeout is None)
                if shared is None:
                    return None
            if not shared.gaps:
                cursor.next = shared.page.next
                rows = shared.rows(source.render)
            else:
                # Here gaps are reported, so what is shown depends on the watcher.
                batches = cursor.take(shared.page)
                rows = [row for batch in batches for row in source.render(batch, cursor.partition)]
            gaps = source.take_gaps()
            if rows or gaps:
                return Delivered(
                    source, cursor.partition, gaps, rows, cursor.next, None if gaps or shared.gaps else shared
                )

    def _look_everywhere(self) -> None:
        """Have the next look ask for every lane, also those that no feed has made ready."""
        outbox = self.outbox
        outbox.has_grown = True
        for lane in outbox.lanes:
            if lane.waits_at is not None:
                lane.feed.leave(lane)
                outbox.ready.append(lane)

    async def _last(self) -> Delivered[T] | None:
        """Where the time is up: look at everything again, and wait for what threads read for this watcher."""
        self._look_everywhere()
        found = self._look()
        if found is None:
            reads = [_reading(lane) for lane in self.outbox.lanes]
            under_way = [read for read in reads if read is not None]
            if under_way:
                await asyncio.wait(under_way)
                found = self._look()
        return found


def _reading(lane: Lane) -> asyncio.Future[Any] | None:
    return None if lane.waits_at is None else lane.feed.reading(lane.waits_at)


def _begin(sources: Sequence[WatchedTopic[Any]]) -> list[Following[Record]]:
    return [source.begin() for source in sources]


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and its feeds with it
        loop.call_soon_threadsafe(call)
