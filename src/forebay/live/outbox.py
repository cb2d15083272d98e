"""What waits for one watcher in an event loop: the partitions that have something for it, and pages up to a limit.

A watcher has a lane in the feed of each shard that it watches. A lane waits in its feed, at the end of the shard; or it
is ready, and out of the feed, until the watcher asks again. So a watcher that does not ask costs the others nothing,
and holds no more than one page per shard and `bytes_max` of all shards. Everything here runs in the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.live.feeds import Render, ShardFeed, SharedPage


class Outbox:
    """The lanes of one watcher, those of them that are ready, and the task that waits for one of them.

    Refers to nothing of the watcher itself, unless that has set `push`: a watcher that is dropped is collected although
    its lanes wait in feeds.
    """

    __slots__ = ("bytes_held", "bytes_max", "has_grown", "lanes", "push", "ready", "waiter")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        """What the pages count for that lanes hold."""
        self.lanes: list[Lane] = []
        self.ready: deque[Lane] = deque()
        """Lanes whose watcher should look, in turn."""
        self.has_grown = True
        """A topic may have partitions that are not watched yet."""
        self.waiter: asyncio.Future[None] | None = None
        self.push: Callable[[], bool] | None = None
        """Takes what is ready in place of the task that waits; false if that has to do it. Until `close`."""

    def wake(self) -> None:
        """Have what is ready taken, by `push` or by the task that waits, if one does."""
        if self.waiter is not None and not self.waiter.done() and (self.push is None or not self.push()):
            self.waiter.set_result(None)

    def rouse(self) -> None:
        """Have the task look that waits, if one does."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def drop(self, lane: Lane) -> None:
        """Have this lane leave its feed, and be ready no more; it stays among the lanes, which are numbered."""
        lane.feed.part(lane)
        lane.empty()
        if lane in self.ready:
            self.ready.remove(lane)

    def close(self) -> None:
        """Leave every feed; harmless when repeated."""
        lanes, self.lanes = self.lanes, []
        for lane in lanes:
            lane.feed.part(lane)
        self.ready.clear()
        self.bytes_held = 0
        self.push = None
        self.rouse()


class Lane:
    """One shard for one watcher: what it is given by the feed of that shard."""

    __slots__ = ("_failure", "feed", "number", "outbox", "page", "render", "waits_at")

    def __init__(self, outbox: Outbox, feed: ShardFeed, render: Render[Any]) -> None:
        """It joins the outbox, and is ready: its watcher has not looked yet."""
        self.outbox = outbox
        self.feed = feed
        self.render = render
        self.number = len(outbox.lanes)
        self.waits_at: int | None = None
        """The offset that it waits for in its feed."""
        self.page: SharedPage | None = None
        """What it was given, and `take` gives."""
        self._failure: BaseException | None = None
        outbox.lanes.append(self)
        outbox.ready.append(self)

    def hand(self, page: SharedPage) -> None:
        """What it waits for is there. With a full outbox the watcher reads the page again when it asks."""
        outbox = self.outbox
        held = outbox.bytes_held + page.bytes
        if held <= outbox.bytes_max:
            self.page = page
            outbox.bytes_held = held
        outbox.ready.append(self)

    def fail(self, error: BaseException) -> None:
        """What it waits for cannot be read."""
        self._failure = error
        self.outbox.ready.append(self)

    def empty(self) -> None:
        """Hold nothing of what it was given."""
        if self.page is not None:
            self.outbox.bytes_held -= self.page.bytes
        self.page = self._failure = None

    @property
    def has_failed(self) -> bool:
        """Whether `take` raises."""
        return self._failure is not None

    def take(self) -> SharedPage | None:
        """The page that it was given, if it was given one and has room for it; raises why it cannot be read."""
        page = self.page
        if page is not None:
            self.page = None
            self.outbox.bytes_held -= page.bytes
        elif self._failure is not None:
            failure, self._failure = self._failure, None
            # Many watchers get this one error: each begins its own trace.
            raise failure.with_traceback(None)
        return page
