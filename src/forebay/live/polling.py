"""Long polls: one page of a partition, waited for if there is none yet, read and rendered once for all who ask."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

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
    shard = topic.shard_if_open(partition)
    if shard is None:
        shard = (await feeds.start(partial(topic.shard_page, partition, offset, PAGE_BYTES)))[0]
    outbox = Outbox(sys.maxsize)
    lane = feeds.join(topic, partition, shard, outbox, render)
    try:
        if offset > (await _reach(feeds, topic, partition)).head:
            # It says whether the offset lies behind the end: offsets may be given out that no reader sees yet.
            await feeds.start(partial(topic.page, partition, offset, records_max=1))
        deadline = feeds.loop.time() + wait_seconds
        rows: Sequence[T] = ()
        gaps: Sequence[Gap] = ()
        while not rows and not gaps and (page := await _page_at(feeds, lane, offset, deadline)) is not None:
            rows, gaps, offset = page.rows(render), page.gaps, page.page.next
        earliest, evict_floor, head = await _reach(feeds, topic, partition)
        return PolledPage(rows, gaps, offset, max(head, offset), earliest, evict_floor)
    finally:
        outbox.close()


async def _page_at(feeds: Feeds, lane: Lane, offset: int, deadline: float) -> SharedPage | None:
    """The page at `offset`, waited for until the deadline, and longer while a thread reads it; `None` if none came."""
    feed, outbox = lane.feed, lane.outbox
    feed.wait(lane, offset)
    try:
        page = feed.page(offset, lane.render, is_waiting=False)
        if page is not None:
            return page
        while lane.waits_at is not None and feeds.loop.time() < deadline:
            await feeds.sleep(outbox, deadline)
        reading = feed.reading(offset)
        if lane.waits_at is not None and reading is not None:
            await asyncio.wait([reading])
        page = lane.take()
        if page is not None and not feed.is_current(page):
            page = feed.page(offset, lane.render, is_waiting=False)
        return page
    finally:
        feed.leave(lane)


async def _reach(feeds: Feeds, topic: Topic, partition: int) -> Reach:
    """Which offsets can be read now. Of a shard that is not open here, a thread asks."""
    shard = topic.shard_if_open(partition)
    if shard is not None:
        return shard.reach()
    offsets = await feeds.start(partial(topic.offsets, partition))
    return Reach(offsets.earliest, offsets.evict_floor, offsets.next)
