"""Long polls: one page of a partition, waited for if there is none yet, read and rendered once for all who ask."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from forebay.live.calls import CallKey
from forebay.live.feeds import PAGE_BYTES, Feeds, Render, SharedPage
from forebay.live.outbox import Lane, Outbox
from forebay.pages import Reach
from forebay.records import Gap, check_offset
from forebay.storage import Topic

T = TypeVar("T")


class PolledPage(NamedTuple, Generic[T]):
    """Rows and gaps of one partition from an offset on, and where the partition stood; see `records.RecordPage`."""

    rows: Sequence[T]
    """Shared with others who ask: not to be changed."""
    gaps: Sequence[Gap]
    next: int
    head: int
    earliest: int
    evict_floor: int

    @property
    def caught_up(self) -> bool:
        """Whether there was nothing more to read."""
        return self.next >= self.head


async def poll(
    feeds: Feeds, topic: Topic, partition: int, offset: int, render: Render[T], *, wait_seconds: float = 0
) -> PolledPage[T]:
    """The page at `offset`, or without rows and gaps where none came in time. In the loop of the feeds.

    An offset behind the end is `Invalid`. The waiter is entered before the page is looked for, so nothing that is
    published meanwhile is missed.
    """
    check_offset(offset)
    key = CallKey.of(topic, partition)
    shard = topic.shard_if_open(partition)
    if shard is None:
        shard = (await feeds.start(key, partial(topic.shard_page, partition, offset, PAGE_BYTES)))[0]
    outbox = Outbox(sys.maxsize)
    lane = feeds.join(topic, partition, shard, outbox, render)
    try:
        if offset > (await _reach(feeds, topic, partition)).head:
            # It says whether the offset lies behind the end: offsets may be given out that no reader sees yet.
            await feeds.start(key, partial(topic.page, partition, offset, records_max=1))
        deadline = feeds.loop.time() + wait_seconds
        while (page := await _page_at(feeds, lane, offset, deadline)) is not None:
            reach = await _reach(feeds, topic, partition)
            if not lane.feed.is_current(page):
                # Records of it have ended while a thread asked for the ends.
                continue
            rows, offset = page.rows(render), page.page.next
            if rows or page.gaps:
                return _polled(rows, page.gaps, offset, reach)
        return _polled((), (), offset, await _reach(feeds, topic, partition))
    finally:
        outbox.close()


def _polled(rows: Sequence[T], gaps: Sequence[Gap], offset: int, reach: Reach) -> PolledPage[T]:
    earliest, evict_floor, head = reach
    return PolledPage(rows, gaps, offset, max(head, offset), earliest, evict_floor)


async def _page_at(feeds: Feeds, lane: Lane, offset: int, deadline: float) -> SharedPage | None:
    """The page at `offset`, waited for until the deadline, and longer while a thread reads it; `None` if none came."""
    feed, outbox = lane.feed, lane.outbox
    try:
        while True:
            feed.wait(lane, offset)
            page = feed.page(offset, lane.render, is_waiting=False)
            if page is not None:
                return page
            while lane.waits_at is not None and feeds.loop.time() < deadline:
                await feeds.sleep(outbox, deadline)
            while lane.waits_at is not None and (reading := feed.reading(offset)) is not None:
                await asyncio.wait([reading])
            page = lane.take()
            if page is None or feed.is_current(page):
                return page
            # Records of it have ended meanwhile: it is asked for again.
    finally:
        feed.leave(lane)


async def _reach(feeds: Feeds, topic: Topic, partition: int) -> Reach:
    """Which offsets can be read now. Of a shard that is not open here, a thread asks."""
    shard = topic.shard_if_open(partition)
    if shard is not None:
        return shard.reach()
    offsets = await feeds.start(CallKey.of(topic, partition), partial(topic.offsets, partition))
    return Reach(offsets.earliest, offsets.evict_floor, offsets.next)
