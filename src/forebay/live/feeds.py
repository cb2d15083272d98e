"""The shards that one event loop follows: wakes those who wait, reads each page once, renders it once per format.

A writer pays for one flag and at most one call into the loop, however many watchers wait there. Everything else runs
in the loop: pages come from the tail cache, or from a thread where that has not got them. Watchers are woken a few at
a time, so that a loop with thousands of them gives the writer's thread its turn.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from forebay.engines import ReadShard
from forebay.errors import Closed, Corrupt, ForebayError
from forebay.format.frame.batch import Batch
from forebay.live.calls import StartCall
from forebay.pages import Page
from forebay.reading import Cursor, check_page
from forebay.storage import Topic

if TYPE_CHECKING:
    from forebay.live.watcher import Watcher

T = TypeVar("T")
Render: TypeAlias = Callable[[Batch, int], Sequence[T]]
"""What watchers get for a batch of a partition. One function stands for one format and filter: it is called once per
batch, and all watchers share what it returns. So it returns what no watcher changes."""

PAGE_BYTES: Final = 128 * 1024
PAGES_MAX: Final = 64
"""So many pages are kept for watchers that come for them a little later; those of all shards count together."""
LOOK_SECONDS: Final = 0.5
"""How often a feed looks although no waker was called: a waker that an interrupt has cut short costs no more."""
LOOKS_REST: Final = 50
"""The pause between such rounds is so many times what the last one took: thousands of idle shards stay cheap."""
POLL_REST: Final = 4
"""Where a shard calls no waker, the pause between looks is so many times what the last one took."""
WOKEN_MAX: Final = 128
"""So many watchers are woken in one turn of the loop."""
WAKE_PAUSE_SECONDS: Final = 0.001


class SharedPage:
    """One page of a shard, for every watcher that comes to its first offset."""

    __slots__ = ("_partition", "_rendered", "ended", "page")

    def __init__(self, page: Page, partition: int, ended: object) -> None:
        self.page = page
        self.ended = ended
        """What had ended in the shard before the page was read; see `ReadShard.ended`."""
        self._partition = partition
        self._rendered: dict[Render[Any], Sequence[Any]] = {}

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
        # Before the look: what is published from here on calls again.
        self._is_rung = False
        feed = self._feed()
        if feed is not None:
            feed.look()


class ShardFeed:
    """One shard for all its watchers in one event loop."""

    def __init__(self, feeds: Feeds, topic: Topic, partition: int, shard: ReadShard) -> None:
        self.watchers: weakref.WeakSet[Watcher[Any]] = weakref.WeakSet()
        self.key = (topic.spec.topic_id, partition)
        self._feeds = feeds
        self._topic = topic
        self._partition = partition
        self._partitions = topic.partitions
        self._shard = shard
        self._waiting: dict[int, dict[Watcher[Any], None]] = {}
        """Watchers that have nothing to read, by the offset that they wait for."""
        self._quiet_at: int | None = None
        """Where the shard ended at the last look, if no waker was called since and it calls its wakers."""
        self._reads: dict[int, asyncio.Future[tuple[ReadShard, object, Page]]] = {}
        """By offset, what threads read at present."""
        self._poll: asyncio.TimerHandle | None = None
        """The next look, where the shard calls no waker."""
        self._bell = Bell(feeds.loop, self)
        self._end = weakref.finalize(self, self._bell.leave)
        # Before any watcher looks: a record that is published after a look calls the bell.
        self._bell.listen(shard)
        self._listening_since = feeds.loop.time()

    def page(self, offset: int, *, is_waiting: bool) -> SharedPage | None:
        """What there is from `offset` on; `None` if there is nothing yet, or a thread has to read it first.

        A watcher that then waits for this offset is woken when there is more. One that waits in any case
        (`is_waiting`) needs no look of its own where the last one found nothing and no waker was called since.
        """
        if is_waiting and offset == self._quiet_at:
            return None
        page = self._cached(offset)
        if page is None:
            self._fetch(offset)
            return None
        if page.page.next > offset:
            return page
        if self._shard.poll_seconds is None:
            self._quiet_at = offset
        return None

    def is_current(self, page: SharedPage) -> bool:
        """Whether no record of the shard has ended since the page was read."""
        return page.ended == self._shard.ended()

    def reading(self, offset: int) -> asyncio.Future[tuple[ReadShard, object, Page]] | None:
        """What a thread reads from this offset on, if one does."""
        return self._reads.get(offset)

    def wait(self, offset: int, watcher: Watcher[Any]) -> None:
        """Wake this watcher when something at `offset` can be read, or cannot be read for a reason."""
        self._waiting.setdefault(offset, {})[watcher] = None

    def leave(self, offset: int, watcher: Watcher[Any]) -> None:
        """This watcher does not wait any more; harmless if it did not."""
        waiting = self._waiting.get(offset)
        if waiting is not None:
            waiting.pop(watcher, None)
            if not waiting:
                del self._waiting[offset]

    def look(self) -> None:
        """Wake every watcher that waits for something that is there by now."""
        self._quiet_at = None
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
            self._feeds.wake(list(self.watchers))

    def end(self) -> None:
        """No watcher is left."""
        self._end()

    def _cached(self, offset: int) -> SharedPage | None:
        """What memory has from `offset` on, an empty page at the end; `None` if a thread has to read it."""
        ended = self._shard.ended()
        found = self._feeds.kept(self, offset)
        if found is not None and found.ended == ended:
            return found
        page = self._shard.read_cached(offset, PAGE_BYTES)
        return None if page is None else self._shared(offset, page, ended)

    def _shared(self, offset: int, page: Page, ended: object) -> SharedPage:
        shared = SharedPage(page, self._partition, ended)
        if page.next > offset:
            check_page(f"{self._topic.name}[{self._partition}]", offset, page)
            self._feeds.keep(self, offset, shared)
        return shared

    def _fetch(self, offset: int) -> None:
        """Have a thread read the page, unless one does so already."""
        if offset in self._reads:
            return
        try:
            reading = self._feeds.start(partial(self._topic.shard_page, self._partition, offset, PAGE_BYTES))
        except Closed as error:
            self._feeds.loop.call_soon(self._fail, offset, error)
            return
        self._reads[offset] = reading
        reading.add_done_callback(partial(self._fetched, offset, self._feeds.loop.time()))

    def _fetched(self, offset: int, begun: float, reading: asyncio.Future[tuple[ReadShard, object, Page]]) -> None:
        del self._reads[offset]
        if reading.cancelled() or not self._end.alive:
            # Of no use, or too late: a feed that has ended must not enter its waker into the shard again.
            return
        error = reading.exception()
        if error is not None:
            self._fail(offset, error)
            return
        shard, ended, page = reading.result()
        is_new = shard is not self._shard
        if is_new:
            # Closed and opened again, moved here or moved away: the waker goes with the watchers.
            self._shard = shard
            self._bell.listen(shard)
            self._listening_since = self._feeds.loop.time()
        try:
            shared = self._shared(offset, page, ended)
        except Corrupt as corrupt:
            self._fail(offset, corrupt)
            return
        if page.next > offset:
            self._hand(offset, shared)
        elif is_new or begun < self._listening_since:
            # What was published since the read, and before the waker was in this shard, has called none.
            self.look()
        elif shard.poll_seconds is not None and self._waiting and self._poll is None:
            took = self._feeds.loop.time() - begun
            self._poll = self._feeds.loop.call_later(max(shard.poll_seconds, POLL_REST * took), self._look_again)

    def _look_again(self) -> None:
        self._poll = None
        self.look()

    def _hand(self, offset: int, page: SharedPage) -> None:
        """Wake the watchers that wait for this page, and give it to them: by then it may be kept no more."""
        watchers = self._waiting.pop(offset, {})
        for watcher in watchers:
            watcher.hand(self._partition, offset, page)
        self._feeds.wake(watchers)

    def _fail(self, offset: int, error: BaseException) -> None:
        watchers = self._waiting.pop(offset, {})
        for watcher in watchers:
            watcher.fail(error)
        self._feeds.wake(watchers)


class Feeds:
    """Every shard that is followed in one event loop. Made in that loop, and used in it alone."""

    def __init__(self, start: StartCall) -> None:
        """`start` begins a call in a thread."""
        self.loop = asyncio.get_running_loop()
        self.start = start
        self._feeds: dict[tuple[str, int], ShardFeed] = {}
        self._pages: OrderedDict[tuple[str, int, int], SharedPage] = OrderedDict()
        self._due: deque[Watcher[Any]] = deque()
        """Watchers to be woken."""
        self._is_waking = False
        self._is_looking = False

    def __len__(self) -> int:
        """How many shards are followed."""
        return len(self._feeds)

    def join(self, topic: Topic, cursor: Cursor[ReadShard], watcher: Watcher[Any]) -> ShardFeed:
        """The feed of the partition that the cursor reads; the watcher is one of its watchers from now on."""
        feed = self._feeds.get((topic.spec.topic_id, cursor.partition))
        if feed is None:
            feed = ShardFeed(self, topic, cursor.partition, cursor.source)
            self._feeds[feed.key] = feed
            if not self._is_looking:
                self._is_looking = True
                self.loop.call_later(LOOK_SECONDS, self._look)
        feed.watchers.add(watcher)
        return feed

    def part(self, feed: ShardFeed, watcher: Watcher[Any]) -> None:
        """The watcher has ended."""
        feed.watchers.discard(watcher)
        self._end_if_unused(feed)

    def wake(self, watchers: Iterable[Watcher[Any]]) -> None:
        """Wake these, a few in each turn of the loop."""
        self._due.extend(watchers)
        if not self._is_waking:
            self._wake_some()

    def kept(self, feed: ShardFeed, offset: int) -> SharedPage | None:
        """The page of this shard that begins at `offset`, if it was read a short while ago."""
        return self._pages.get((*feed.key, offset))

    def keep(self, feed: ShardFeed, offset: int, page: SharedPage) -> None:
        """Keep a page for the next watchers that come to its offset."""
        self._pages[*feed.key, offset] = page
        self._pages.move_to_end((*feed.key, offset))
        if len(self._pages) > PAGES_MAX:
            self._pages.popitem(last=False)

    def _wake_some(self) -> None:
        for _ in range(min(WOKEN_MAX, len(self._due))):
            self._due.popleft().wake()
        self._is_waking = bool(self._due)
        if self._due:
            # A pause, not the next turn: while the loop sleeps the writer's thread runs at once.
            self.loop.call_later(WAKE_PAUSE_SECONDS, self._wake_some)

    def _look(self) -> None:
        """Look at every shard, and forget those whose watchers are gone without a word."""
        begun = self.loop.time()
        for feed in list(self._feeds.values()):
            if not self._end_if_unused(feed):
                feed.look_unasked()
        self._is_looking = bool(self._feeds)
        if self._feeds:
            self.loop.call_later(max(LOOK_SECONDS, LOOKS_REST * (self.loop.time() - begun)), self._look)

    def _end_if_unused(self, feed: ShardFeed) -> bool:
        if feed.watchers or self._feeds.get(feed.key) is not feed:
            return not feed.watchers
        del self._feeds[feed.key]
        feed.end()
        for key in [key for key in self._pages if key[:2] == feed.key]:
            del self._pages[key]
        return True
