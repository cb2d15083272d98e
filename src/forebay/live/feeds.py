"""The shards that one event loop follows: wakes those who wait, reads each page once, renders it once per format.

A writer pays for one flag and at most one call into the loop, however many watchers wait there. Everything else runs
in the loop: pages come from the tail cache, or from a thread where that has not got them, or where rendering them would
hold the loop. Watchers are woken a few at a time, so that a loop with thousands of them gives the writer's thread its
turn.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from forebay.engines import ReadShard
from forebay.errors import Closed, Corrupt, ForebayError
from forebay.format.frame.batch import Batch
from forebay.live.calls import CallKey, StartCall
from forebay.live.deadlines import Deadlines
from forebay.live.outbox import Lane, Outbox
from forebay.pages import LOOP_BYTES_MAX, LOOP_RECORDS_MAX, Page
from forebay.reading import check_page
from forebay.records import Gap, Reason
from forebay.storage import Topic

T = TypeVar("T")
Render: TypeAlias = Callable[[Batch, int], Sequence[T]]
"""What watchers get for a batch of a partition. One function stands for one format and filter: it is called once per
batch, in the loop or in a thread, and all watchers share what it returns. So it returns what no watcher changes."""

PAGE_BYTES: Final = 128 * 1024
PAGES_MAX: Final = 64
"""So many pages are kept for watchers that come for them a little later; those of all shards count together."""
PAGES_BYTES_MAX: Final = 16 * 1024 * 1024
"""So many bytes of pages are kept, each counted once more for each of its renderings."""
LOOK_SECONDS: Final = 0.5
"""How often a feed looks although no waker was called: a waker that an interrupt has cut short costs no more."""
LOOKS_REST: Final = 50
"""The pause between such rounds is so many times what the last one took: thousands of idle shards stay cheap."""
POLL_REST: Final = 4
"""Where a shard calls no waker, the pause between looks is so many times what the last one took."""
WOKEN_MAX: Final = 128
"""So many watchers are woken at once."""
CROWD_MIN: Final = 16
"""A shard with so many watchers is looked at after a pause."""
WAKE_PAUSE_SECONDS: Final = 0.001
"""The loop really sleeps before and between crowds of watchers: meanwhile the writer's thread runs, which would wait
for the interpreter otherwise, most of all to end the very append that woke the loop."""


class SharedPage:
    """One page of a shard, for every watcher that comes to its first offset."""

    __slots__ = ("_partition", "_rendered", "bytes", "ended", "gaps", "made", "page", "read_at", "shard")

    def __init__(self, page: Page, partition: int, shard: ReadShard, ended: object, read_at: float) -> None:
        self.page = page
        self.shard = shard
        """What gave it."""
        self.read_at = read_at
        """When it was asked for, by the time of the loop."""
        self.ended = ended
        """What had ended in the shard before the page was read; see `ReadShard.ended`."""
        self.bytes = page.bytes
        """What its records count for."""
        self.gaps: Sequence[Gap] = [gap for gap in page.events if gap.reason is not Reason.DELETED]
        """The gaps of the page that a reader is to know of."""
        self.made: dict[Hashable, Any] = {}
        """What watchers have made of its rows, for others that would make the same; as long as the page is kept."""
        self._partition = partition
        self._rendered: dict[Render[Any], Sequence[Any]] = {}

    @property
    def holds_a_loop(self) -> bool:
        """Whether to render it would hold the event loop."""
        return self.bytes > LOOP_BYTES_MAX or sum([batch.count for batch in self.page.batches]) > LOOP_RECORDS_MAX

    @property
    def cost(self) -> int:
        """About what it takes in memory."""
        return self.bytes * (1 + len(self._rendered) + len(self.made))

    def rows(self, render: Render[T]) -> Sequence[T]:
        """What `render` makes of all batches of the page."""
        found = self._rendered.get(render)
        if found is None:
            found = [row for batch in self.page.batches for row in render(batch, self._partition)]
            self._rendered[render] = found
        return found


class Bell:
    """The waker of one feed. Writers call it in their threads; many calls before the loop comes to it cost one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, feed: ShardFeed) -> None:
        self._loop = loop
        # Weak: a loop that was closed without ending its watchers leaves nothing behind in the shard.
        self._feed = weakref.ref(feed)
        self._shard: ReadShard | None = None
        self._is_rung = False

    def __call__(self) -> None:
        """Have the feed look. Any thread; holds no lock and never waits."""
        if self._is_rung:
            return
        self._is_rung = True
        try:
            self._loop.call_soon_threadsafe(self._rung)
        except RuntimeError:
            # The loop is closed.
            self.leave()

    def listen(self, shard: ReadShard) -> None:
        """Be called by this shard from now on, and by no other."""
        self.leave()
        self._shard = shard
        shard.wakers.add(self)

    def leave(self) -> None:
        """Be called no more. Any thread."""
        if self._shard is not None:
            self._shard.wakers.discard(self)

    def reset(self) -> None:
        """Forget a call that was cut short by an interrupt before it reached the loop."""
        self._is_rung = False

    def _rung(self) -> None:
        feed = self._feed()
        if feed is not None and len(feed.lanes) >= CROWD_MIN:
            self._loop.call_later(WAKE_PAUSE_SECONDS, self._look)
        else:
            self._look()

    def _look(self) -> None:
        # Before the look: what is published from here on calls again.
        self._is_rung = False
        feed = self._feed()
        if feed is not None:
            feed.look()


class ShardFeed:
    """One shard for all its watchers in one event loop."""

    def __init__(self, feeds: Feeds, topic: Topic, partition: int, shard: ReadShard) -> None:
        self.lanes: dict[Lane, None] = {}
        self.key = (topic.spec.topic_id, partition)
        self._feeds = feeds
        self._topic = topic
        self._partition = partition
        self._partitions = topic.partitions
        self._shard = shard
        self._waiting: dict[int, dict[Lane, None]] = {}
        """Lanes that have nothing to read, by the offset that they wait for."""
        self.quiet_at: int | None = None
        """Where the shard ended at the last look, if no waker was called since and it calls its wakers."""
        self._reads: dict[int, asyncio.Future[SharedPage]] = {}
        """By offset, what threads read at present."""
        self._missed: set[int] = set()
        """Offsets of reads during which a waker was called: one that comes back empty was too early."""
        self._poll: asyncio.TimerHandle | None = None
        """The next look, where the shard calls no waker."""
        self._bell = Bell(feeds.loop, self)
        self._end = weakref.finalize(self, self._bell.leave)
        # Before any watcher looks: a record that is published after a look calls the bell.
        self._bell.listen(shard)
        self._listening_since = feeds.loop.time()

    def page(self, offset: int, render: Render[Any], *, is_waiting: bool) -> SharedPage | None:
        """What there is from `offset` on; `None` if there is nothing yet, or a thread has to read it first.

        A lane that then waits for this offset is handed the page when there is more. One that waits in any case
        (`is_waiting`) needs no look of its own where the last one found nothing and no waker was called since.
        """
        if is_waiting and offset == self.quiet_at:
            return None
        page = self._cached(offset)
        if page is None:
            self._fetch(offset, render)
            return None
        if page.page.next > offset:
            return page
        if self._shard.poll_seconds is None:
            self.quiet_at = offset
        return None

    def is_current(self, page: SharedPage) -> bool:
        """Whether no record of the page can have ended since it was read: its shard serves on, and ended no more.

        Another shard may count alike what ended in it, so a page is of one shard only.
        """
        shard = page.shard
        return page.ended == shard.ended() and self._topic.is_served_by(self._partition, shard)

    def reading(self, offset: int) -> asyncio.Future[SharedPage] | None:
        """What a thread reads from this offset on, if one does."""
        return self._reads.get(offset)

    def wait(self, lane: Lane, offset: int) -> None:
        """Make this lane ready when something at `offset` can be read, or cannot be read for a reason."""
        lane.waits_at = offset
        waiting = self._waiting.get(offset)
        if waiting is None:
            waiting = self._waiting[offset] = {}
        waiting[lane] = None

    def leave(self, lane: Lane) -> None:
        """This lane does not wait any more; harmless if it did not."""
        offset, lane.waits_at = lane.waits_at, None
        waiting = None if offset is None else self._waiting.get(offset)
        if offset is not None and waiting is not None:
            waiting.pop(lane, None)
            if not waiting:
                del self._waiting[offset]

    def part(self, lane: Lane) -> None:
        """The watcher of this lane has ended."""
        self.leave(lane)
        self.lanes.pop(lane, None)
        if not self.lanes:
            self._feeds.end(self)

    def look(self) -> None:
        """Make every lane ready that waits for something that is there by now."""
        self.quiet_at = None
        for offset in list(self._waiting):
            try:
                page = self._cached(offset)
            except ForebayError as error:
                self._fail(offset, error)
                continue
            if page is None:
                self._fetch(offset)
            elif page.page.next > offset:
                self._hand(offset, page)

    def look_unasked(self) -> None:
        """Look although no waker was called; and wake all, if the topic has got more partitions."""
        self._bell.reset()
        self.look()
        if self._partitions != self._topic.partitions:
            self._partitions = self._topic.partitions
            outboxes = [lane.outbox for lane in self.lanes]
            for outbox in outboxes:
                outbox.has_grown = True
            self._feeds.rouse(outboxes)

    def end(self) -> None:
        """No watcher is left."""
        self._end()

    def _cached(self, offset: int) -> SharedPage | None:
        """What memory has from `offset` on, an empty page at the end; `None` if a thread has to read it."""
        shard, now = self._shard, self._feeds.loop.time()
        found = self._feeds.kept(self, offset)
        # A shard that calls no waker learns only by reads what its owner has ended.
        is_fresh = found is not None and (shard.poll_seconds is None or now < found.read_at + LOOK_SECONDS)
        if found is not None and is_fresh and self.is_current(found):
            return found
        ended = shard.ended()
        page = shard.read_cached(offset, PAGE_BYTES)
        shared = None if page is None else SharedPage(page, self._partition, shard, ended, now)
        if shared is None or shared.holds_a_loop:
            return None
        return self._checked(offset, shared)

    def _checked(self, offset: int, shared: SharedPage) -> SharedPage:
        """The page, kept for others; `Corrupt` unless it goes on at `offset`."""
        if shared.page.next > offset:
            check_page(f"{self._topic.name}[{self._partition}]", offset, shared.page)
            self._feeds.keep(self, offset, shared)
        return shared

    def _fetch(self, offset: int, render: Render[Any] | None = None) -> None:
        """Have a thread read the page, unless one does so already: for the lanes that wait, or for this render."""
        if offset in self._reads:
            if render is None and self._shard.poll_seconds is None:
                self._missed.add(offset)
            return
        renders = {lane.render for lane in self._waiting[offset]} if render is None else {render}
        try:
            key = CallKey.of(self._topic, self._partition)
            reading = self._feeds.start(key, partial(self._read, offset, renders, self._feeds.loop.time()))
        except Closed as error:
            self._feeds.loop.call_soon(self._fail, offset, error)
            return
        self._reads[offset] = reading
        reading.add_done_callback(partial(self._fetched, offset))

    def _read(self, offset: int, renders: Collection[Render[Any]], now: float) -> SharedPage:
        """Read a page in a thread, and render it there if that would hold the loop. The thread holds no lock."""
        shard, ended, page = self._topic.shard_page(self._partition, offset, PAGE_BYTES)
        shared = SharedPage(page, self._partition, shard, ended, now)
        if shared.holds_a_loop:
            for render in renders:
                shared.rows(render)
        return shared

    def _fetched(self, offset: int, reading: asyncio.Future[SharedPage]) -> None:
        del self._reads[offset]
        is_missed = offset in self._missed
        self._missed.discard(offset)
        if reading.cancelled() or not self._end.alive:
            # Of no use, or too late: a feed that has ended must not enter its waker into the shard again.
            return
        error = reading.exception()
        if error is not None:
            self._fail(offset, error)
            return
        shared = reading.result()
        shard, begun = shared.shard, shared.read_at
        if not self._topic.is_served_by(self._partition, shard):
            # Lost, moved or deleted while the thread read: what it has read may have ended, and its shard wakes none.
            self.look()
            return
        is_new = shard is not self._shard
        if is_new:
            # Closed and opened again, moved here or moved away: the waker goes with the watchers.
            self._shard = shard
            self._bell.listen(shard)
            self._listening_since = self._feeds.loop.time()
        try:
            self._checked(offset, shared)
        except Corrupt as corrupt:
            self._fail(offset, corrupt)
            return
        is_empty = shared.page.next <= offset
        if not is_empty:
            self._hand(offset, shared)
        if is_new or (is_empty and (is_missed or begun < self._listening_since)):
            # What was published since the read, and before the waker was in this shard, has called none.
            self.look()
        elif is_empty and shard.poll_seconds is not None and self._waiting and self._poll is None:
            took = self._feeds.loop.time() - begun
            self._poll = self._feeds.loop.call_later(max(shard.poll_seconds, POLL_REST * took), self._look_again)

    def _look_again(self) -> None:
        self._poll = None
        self.look()

    def _hand(self, offset: int, page: SharedPage) -> None:
        """Give the page to the lanes that wait for it: by the time their tasks run it may be kept no more."""
        lanes = self._waiting.pop(offset, {})
        for lane in lanes:
            lane.waits_at = None
            lane.hand(page)
        self._feeds.wake([lane.outbox for lane in lanes])

    def _fail(self, offset: int, error: BaseException) -> None:
        lanes = self._waiting.pop(offset, {})
        for lane in lanes:
            lane.waits_at = None
            lane.fail(error)
        self._feeds.rouse([lane.outbox for lane in lanes])


class Feeds:
    """Every shard that is followed in one event loop. Made in that loop, and used in it alone."""

    def __init__(self, start: StartCall) -> None:
        """`start` begins a call in a thread, by what it may wait for."""
        self.loop = asyncio.get_running_loop()
        self.start = start
        self.deadlines = Deadlines(self.loop, self.rouse)
        self._feeds: dict[tuple[str, int], ShardFeed] = {}
        self._pages: OrderedDict[tuple[str, int, int], SharedPage] = OrderedDict()
        self._due: deque[Callable[[], None]] = deque()
        """What wakes the watchers that are to be woken."""
        self._is_waking = False
        self._is_looking = False

    def __len__(self) -> int:
        """How many shards are followed."""
        return len(self._feeds)

    def join(self, topic: Topic, partition: int, shard: ReadShard, outbox: Outbox, render: Render[Any]) -> Lane:
        """A lane of this outbox in the feed of a partition; `shard` is that partition as it is open now."""
        feed = self._feeds.get((topic.spec.topic_id, partition))
        if feed is None:
            feed = ShardFeed(self, topic, partition, shard)
            self._feeds[feed.key] = feed
            if not self._is_looking:
                self._is_looking = True
                self.loop.call_later(LOOK_SECONDS, self._look)
        lane = Lane(outbox, feed, render)
        feed.lanes[lane] = None
        return lane

    def end(self, feed: ShardFeed) -> None:
        """A feed without watchers."""
        if self._feeds.get(feed.key) is feed:
            del self._feeds[feed.key]
            for key in [key for key in self._pages if key[:2] == feed.key]:
                del self._pages[key]
        feed.end()

    def wake(self, outboxes: Iterable[Outbox]) -> None:
        """Have what is ready for these taken, where a task waits for it, a few in each turn of the loop."""
        self._call([outbox.wake for outbox in outboxes if outbox.waiter is not None])

    def rouse(self, outboxes: Iterable[Outbox]) -> None:
        """Wake the tasks of these that wait, a few in each turn of the loop."""
        self._call([outbox.rouse for outbox in outboxes if outbox.waiter is not None])

    def _call(self, wakes: Iterable[Callable[[], None]]) -> None:
        self._due.extend(wakes)
        if not self._is_waking:
            self._wake_some()

    async def sleep(self, outbox: Outbox, deadline: float) -> None:
        """Wait until the outbox is woken, or the time of the loop is `deadline`."""
        waiter = outbox.waiter = self.loop.create_future()
        tick = self.deadlines.enter(deadline, outbox)
        try:
            await waiter
        finally:
            outbox.waiter = None
            self.deadlines.leave(tick, outbox)

    def kept(self, feed: ShardFeed, offset: int) -> SharedPage | None:
        """The page of this shard that begins at `offset`, if it was read a short while ago."""
        return self._pages.get((*feed.key, offset))

    def keep(self, feed: ShardFeed, offset: int, page: SharedPage) -> None:
        """Keep a page for the next watchers that come to its offset."""
        pages = self._pages
        pages[*feed.key, offset] = page
        pages.move_to_end((*feed.key, offset))
        cost = sum([page.cost for page in pages.values()])
        while len(pages) > PAGES_MAX or (cost > PAGES_BYTES_MAX and len(pages) > 1):
            cost -= pages.popitem(last=False)[1].cost

    def _wake_some(self) -> None:
        for _ in range(min(WOKEN_MAX, len(self._due))):
            self._due.popleft()()
        self._is_waking = bool(self._due)
        if self._due:
            # The pause begins when the tasks that were woken have run.
            self.loop.call_soon(self.loop.call_later, WAKE_PAUSE_SECONDS, self._wake_some)

    def _look(self) -> None:
        """Look at every shard."""
        begun = self.loop.time()
        for feed in list(self._feeds.values()):
            feed.look_unasked()
        self._is_looking = bool(self._feeds)
        if self._feeds:
            self.loop.call_later(max(LOOK_SECONDS, LOOKS_REST * (self.loop.time() - begun)), self._look)
