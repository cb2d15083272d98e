"""The segment engine seen from a second process: the same reading, no writing.

Reads files and `live`, never the owner's memory, so a reader here costs the owner nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from forebay.clock import Clock
from forebay.disk import Disk
from forebay.engines.registry import ShardedEngine
from forebay.engines.seam import PAGE_BYTES, PAGE_RECORDS
from forebay.errors import Closed, Unavailable, UnknownTopic, Unsupported
from forebay.format.control.frames import higher
from forebay.format.metadata.descriptor import LoadStatus
from forebay.locks import Rank, RankedLock
from forebay.pages import Page, Reach
from forebay.records import Offsets
from forebay.sealed import UNREADABLE
from forebay.settings import Settings
from forebay.shard import NextSource, RecoveryDecision, ShardContext
from forebay.shard.lookups import Lookups
from forebay.shard.tiers import LOOK_SECONDS, Ended, RecordedHistory, Tiers, Visible
from forebay.topics import ShardRef
from forebay.wal.files import REPLACED, FileList
from forebay.wal.readonly import CHANGING_SECONDS, POLL_SECONDS, FollowedLog, tries

UNUSED_SECONDS: Final = 60.0
"""A view of a shard that no reader has needed for so long is closed, and what it has read is forgotten."""


class _LocalFiles:
    """The local log of a shard as look-ups and reads begin with it; empty where another directory has the shard."""

    def __init__(self, log: FollowedLog, past: RecordedHistory) -> None:
        self._log = log
        self._past = past

    @property
    def files(self) -> FileList:
        """What lies here."""
        return FileList() if self._past.is_elsewhere else self._log.files

    @property
    def head(self) -> int:
        """The end of all that can be read."""
        end = self._past.history.end
        return end if self._past.is_elsewhere else max(end, self._log.head)

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page | None:
        """See `LocalLog`: history alone answers where another directory has the shard."""
        return None if self._past.is_elsewhere else self._log.read(offset, bytes_max)

    def offset_at_time(self, timestamp: int, start: int = 0) -> int | None:
        """See `LocalLog`."""
        return None if self._past.is_elsewhere else self._log.offset_at_time(timestamp, start)

    def check_open(self) -> None:
        """Nothing: `FollowedShard` has looked."""

    def bring_up(self) -> None:
        """See how far the owner has come."""
        self._log.refresh()


class FollowedView:
    """A shard as one reader at a time sees it: files, history and look-ups of its own."""

    def __init__(self, log: FollowedLog, past: RecordedHistory) -> None:
        self.log = log
        self.past = past
        local = _LocalFiles(log, past)
        tiers = Tiers(local, past)
        self.visible = Visible(tiers, lambda: max(past.history.end, log.head))
        self.lookups = Lookups(local, tiers, lambda: self.visible.ended)
        self.looks = 0
        """The last of the shard's looks that this view has made."""
        self.used_at = 0.0
        self.using = RankedLock(Rank.HISTORY, "engines.followed_view")
        """Held by the reader that has it. No other waits for it but the thread that closes the shard."""

    def offsets(self) -> Offsets:
        floor = self.visible.ended.floor
        return self.past.beside(self.log.offsets())._replace(earliest=floor.earliest, evict_floor=floor.evict_floor)

    def reaches(self, offset: int) -> bool:
        """Whether something at or above `offset` can be read now."""
        if self.past.exported <= offset and (self.past.is_elsewhere or not self.log.wait(offset, 0)):
            return False
        return not self.past.history.is_waiting(offset)


class FollowedShard:
    """A shard that another process owns, or that has no owner.

    Each reader that is inside has a view of its own, so that one whose disk or store is slow holds up no other. Views
    are kept for the next readers; there are as many as were inside at once a while ago.
    """

    failure: str | None = "opened read-only"
    epoch = 0
    poll_seconds: float | None = POLL_SECONDS

    def __init__(
        self,
        ref: ShardRef,
        log: FollowedLog,
        past: RecordedHistory,
        *,
        clock: Clock,
        is_known: Callable[[ShardRef], bool],
    ) -> None:
        self.ref = ref
        self.durability = ref.spec.durability
        self.wakers: set[Callable[[], None]] = set()
        self._clock = clock
        self._is_known = is_known
        self._lock = RankedLock(Rank.LEAF, "engines.followed")
        self._latest = FollowedView(log, past)
        """The view that was given back last: a new one knows as much."""
        self._views = [self._latest]
        self._idle = deque(self._views)
        """Views that no reader has; the one that was used last is the last."""
        self._ended = self._latest.visible.ended
        self._looked_at = float("-inf")
        self._looks = 0
        """How many looks were due so far: each view makes the newest of them before it is used."""
        self._closed: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether every call is refused: then the shard is to be asked for again."""
        return self._closed is not None

    @property
    def decision(self) -> RecoveryDecision:
        """Nothing was recovered here; the next offset is what is published, or the end of history where a holder is."""
        with self._view() as view:
            source = NextSource.CATALOG if view.past.is_elsewhere else NextSource.LOCAL
        return RecoveryDecision(next_offset=self.offsets().next, source=source, exact=True)

    def last_sequence(self, producer: int) -> int | None:
        """Refused: only the owner knows its producers."""
        raise Unsupported(f"{self.ref} is opened read-only: ask for producers in the process that owns the directory")

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """See `ReadShard`. Raises `UnknownTopic` once the owner has deleted the topic."""
        return self._page(lambda view: view.visible.read(offset, bytes_max))

    def read_cached(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page | None:
        """See `ReadShard`: nothing is in memory here."""
        return None

    def ended(self) -> object:
        """See `ReadShard`."""
        return self._ended

    def reach(self) -> Reach:
        """See `ReadShard`."""
        offsets = self.offsets()
        return Reach(offsets.earliest, offsets.evict_floor, offsets.next)

    def read_by_key(
        self,
        key: bytes,
        start: int = 0,
        *,
        history: bool = False,
        records_max: int = PAGE_RECORDS,
        bytes_max: int = PAGE_BYTES,
    ) -> Page:
        """See `ReadShard`; `UnknownTopic` as `read`."""

        def find(view: FollowedView) -> Page:
            return view.lookups.read_by_key(key, start, history=history, records_max=records_max, bytes_max=bytes_max)

        return self._page(lambda view: self._found(view, find))

    def read_by_tag(
        self, tag: str, start: int = 0, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> Page:
        """See `ReadShard`; `UnknownTopic` as `read`."""

        def find(view: FollowedView) -> Page:
            return view.lookups.read_by_tag(tag, start, records_max=records_max, bytes_max=bytes_max)

        return self._page(lambda view: self._found(view, find))

    def wait(self, offset: int, timeout: float | None) -> bool:
        """See `ReadShard`."""
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            with self._view() as view:
                if view.reaches(offset):
                    return True
            if deadline is not None and self._clock.monotonic() >= deadline:
                return False
            self._clock.sleep(POLL_SECONDS)

    def offset_at_time(self, timestamp: int) -> int | None:
        """See `ReadShard`."""
        with self._view() as view:
            self._look(view)
            return view.visible.offset_at_time(timestamp)

    def offsets(self) -> Offsets:
        """See `ReadShard`."""
        with self._view() as view:
            return self._offsets(view)

    def published(self) -> int:
        """See `ReadShard`."""
        return self.offsets().next

    def lag_end(self) -> int:
        """See `ReadShard`."""
        with self._view() as view:
            end = self._offsets(view).next
            if not view.past.is_elsewhere:
                end = view.log.files.before_gaps(end)
            return view.past.history.before_gaps(end)

    def loads(self) -> dict[str, int]:
        """Where each bulk load begins that may not be over, of the history as it is now."""
        history = self._latest.past.history
        history.refresh()
        return history.loads

    def load_status(self, load_id: str) -> LoadStatus:
        """How far a bulk load is."""
        return self._latest.past.history.load_status(load_id)

    def end_at_most(self) -> int:
        """Where the shard ends; if another directory has it, where it ends at most, by what is reserved there."""
        with self._view() as view:
            end = self._offsets(view).next
            return max(end, view.past.reserved_end) if view.past.is_elsewhere else end

    def end(self, reason: str) -> None:
        """Refuse everything from now on, and give descriptors back. Waits for readers that are inside."""
        self._closed = reason
        for view in list(self._views):
            # A reader that waits here too is refused as soon as it has the view.
            with view.using:
                view.log.close()
        self._latest.past.close()

    def refuse(self, reason: str) -> None:
        """Refuse every later call. Waits for no reader: where one is inside, its present page is the last."""
        self._closed = reason

    def end_if_idle(self) -> bool:
        """Give descriptors back, unless a reader is inside; whether that is done. Called after `refuse`."""
        if any(view.using.locked() for view in list(self._views)):
            return False
        # A reader that comes now is refused at once.
        self.end(self._closed or "is closed")
        return True

    @contextmanager
    def _view(self) -> Iterator[FollowedView]:
        """A view that no other reader has. `Closed` once the shard is closed.

        A reader that is interrupted (Ctrl-C) before it has given its view back may leave it to `end`, never taken.
        """
        self._check_open()
        view = self._taken()
        with view.using:
            # Again: `end` may have closed the view before this thread had it.
            self._check_open()
            try:
                yield view
            finally:
                self._give_back(view)
        self._close_unused()

    def _taken(self) -> FollowedView:
        with self._lock:
            if self._idle:
                view = self._idle.pop()
            else:
                view = FollowedView(self._latest.log.again(), self._latest.past.again())
                self._views.append(view)
            view.visible.ended = self._ended
        return view

    def _give_back(self, view: FollowedView) -> None:
        """Keep a view for the next reader."""
        view.used_at = self._clock.monotonic()
        with self._lock:
            self._latest = view
            self._idle.append(view)

    def _close_unused(self) -> None:
        """Close the views that no reader has needed for a while. The caller has none."""
        unused: list[FollowedView] = []
        now = self._clock.monotonic()
        with self._lock:
            while self._idle and now - self._idle[0].used_at > UNUSED_SECONDS:
                unused.append(self._idle.popleft())
                self._views.remove(unused[-1])
        for view in unused:
            with view.using:
                view.log.close()

    def _page(self, look: Callable[[FollowedView], Page]) -> Page:
        """A page, by what the owner has published and ended of late."""
        with self._view() as view:
            self._look(view)
            page = look(view)
            if any(gap.reason in UNREADABLE for gap in page.events):
                # It may have ended meanwhile, and be removed for that.
                self._look(view, again=True)
                page = look(view)
            self._check_known(view)
            return page

    def _offsets(self, view: FollowedView) -> Offsets:
        self._look(view)
        self._check_known(view)
        return view.offsets()

    def _found(self, view: FollowedView, find: Callable[[FollowedView], Page]) -> Page:
        """What a look-up finds, though its owner seals or removes files under it."""
        for _ in tries(self._clock):
            try:
                return find(view)
            except OSError as error:
                if error.errno not in REPLACED:
                    raise
                view.log.list_again()
                self._look(view, again=True)
        raise Unavailable(f"{self.ref}: its files changed for {CHANGING_SECONDS:g} s while it was searched; try again")

    def _look(self, view: FollowedView, *, again: bool = False) -> None:
        """See what has ended, at times, or now. The log first: what it no longer says is recorded by then.

        One view that looks has every other look before its next use: no reader sees less than another saw before.
        """
        now = self._clock.monotonic()
        with self._lock:
            if now - self._looked_at >= LOOK_SECONDS:
                self._looked_at = now
                self._looks += 1
            due = self._looks
        if not again and view.looks == due:
            return
        view.log.refresh()
        view.past.look()
        view.looks = due
        local, past = view.log.removals, view.past.ended
        with self._lock:
            deleted, floor = self._ended
            ended = Ended(deleted | past.deleted | local.deletes, higher(floor, higher(past.floor, local.floor)))
            if ended != self._ended:
                self._ended = ended
            view.visible.ended = self._ended

    def _check_open(self) -> None:
        if self._closed is not None:
            raise Closed(f"{self.ref} {self._closed}")

    def _check_known(self, view: FollowedView) -> None:
        """`UnknownTopic` once the topic is deleted, where an empty log or another directory may mean that."""
        if (view.past.is_elsewhere or view.log.head == 0) and not self._is_known(self.ref):
            raise UnknownTopic(f"{self.ref}: the topic was deleted by another process", shard=self.ref)


class LeftShards:
    """Shards that no reader finds any more. Each gives its descriptors back once no reader is inside."""

    def __init__(self) -> None:
        self._lock = RankedLock(Rank.SHARD, "engines.left")
        self._left: list[FollowedShard] = []
        """Those that a reader was inside when they were looked at last."""

    def add(self, shard: FollowedShard) -> None:
        """This shard refuses every call since now. Waits for no reader."""
        with self._lock:
            self._left = _not_idle((*self._left, shard))

    def close(self) -> None:
        """Give every descriptor back. Waits for readers that are inside."""
        for shard in self._left:
            shard.end("is closed")


def _not_idle(shards: Iterable[FollowedShard]) -> list[FollowedShard]:
    """Those that a reader is inside; the others give their descriptors back."""
    return [shard for shard in shards if not shard.end_if_idle()]


class FollowingEngine(ShardedEngine[FollowedShard]):
    """Shards below `<root>/shards`, for a process that does not own them."""

    def __init__(
        self,
        shards: str,
        settings: Settings,
        *,
        disk: Disk,
        clock: Clock,
        around: ShardContext,
        is_owned: Callable[[], bool],
        is_known: Callable[[ShardRef], bool],
    ) -> None:
        super().__init__()
        self._shards_root = shards
        self._around = around
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._is_owned = is_owned
        self._is_known = is_known
        self._left = LeftShards()

    def leave(self, ref: ShardRef) -> bool:
        """Drop a shard whose topic was deleted, for a background worker that waits for nothing; whether that is done.

        Not done while another thread opens the shard. A reader that is inside gets its present page.
        """
        return self.registry.take_out(ref, self._leave)

    def close(self) -> None:
        """See `StorageEngine`."""
        super().close()
        self._left.close()

    def _leave(self, shard: FollowedShard) -> None:
        shard.refuse("was deleted by another process")
        self._left.add(shard)

    def _close(self, shard: FollowedShard) -> None:
        shard.end("is closed")

    def _open(self, ref: ShardRef) -> FollowedShard:
        directory = f"{self._shards_root}/{ref.id}"
        log = FollowedLog(self._disk, self._clock, directory, self._settings.wal, self._is_owned)
        past = RecordedHistory(self._around.catalog(ref), self._around.places, self._around.holder, self._clock)
        return FollowedShard(ref, log, past, clock=self._clock, is_known=self._is_known)

    def _remove(self, ref: ShardRef, shard: FollowedShard | None) -> None:
        raise Unsupported(f"{ref} is opened read-only: delete it in the process that owns the directory")
