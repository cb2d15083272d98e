"""The segment engine seen from a second process: the same reading, no writing.

Reads files and `live`, never the owner's memory, so a reader here costs the owner nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from forebay.clock import Clock
from forebay.disk import Disk
from forebay.engines.registry import ShardedEngine
from forebay.engines.seam import PAGE_BYTES, PAGE_RECORDS
from forebay.errors import Closed, Unavailable, UnknownTopic, Unsupported
from forebay.format.control.frames import higher
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
from forebay.wal.readonly import ATTEMPTS, POLL_SECONDS, FollowedLog


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


class FollowedShard:
    """A shard that another process owns, or that has no owner."""

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
        self.log = log
        self._past = past
        local = _LocalFiles(log, past)
        tiers = Tiers(local, past)
        self._visible = Visible(tiers, self._reach)
        self._lookups = Lookups(local, tiers, lambda: self._visible.ended)
        self._clock = clock
        self._looked_at = float("-inf")
        self._is_known = is_known
        self._lock = RankedLock(Rank.HISTORY, "engines.followed")
        self._closed: str | None = None

    @property
    def decision(self) -> RecoveryDecision:
        """Nothing was recovered here; the next offset is what is published, or the end of history where a holder is."""
        source = NextSource.CATALOG if self._past.is_elsewhere else NextSource.LOCAL
        return RecoveryDecision(next_offset=self.offsets().next, source=source, exact=True)

    def last_sequence(self, producer: int) -> int | None:
        """Refused: only the owner knows its producers."""
        raise Unsupported(f"{self.ref} is opened read-only: ask for producers in the process that owns the directory")

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """See `ReadShard`. Raises `UnknownTopic` once the owner has deleted the topic."""
        return self._page(lambda: self._visible.read(offset, bytes_max))

    def read_cached(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page | None:
        """See `ReadShard`: nothing is in memory here."""
        return None

    def ended(self) -> object:
        """See `ReadShard`."""
        return self._visible.ended

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
        find = partial(self._lookups.read_by_key, history=history, records_max=records_max, bytes_max=bytes_max)
        return self._page(lambda: self._found(lambda: find(key, start)))

    def read_by_tag(
        self, tag: str, start: int = 0, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> Page:
        """See `ReadShard`; `UnknownTopic` as `read`."""
        find = partial(self._lookups.read_by_tag, records_max=records_max, bytes_max=bytes_max)
        return self._page(lambda: self._found(lambda: find(tag, start)))

    def wait(self, offset: int, timeout: float | None) -> bool:
        """See `ReadShard`."""
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            with self._lock:
                self._check_open()
                if self._reaches(offset) and not self._past.history.is_waiting(offset):
                    return True
            if deadline is not None and self._clock.monotonic() >= deadline:
                return False
            self._clock.sleep(POLL_SECONDS)

    def offset_at_time(self, timestamp: int) -> int | None:
        """See `ReadShard`."""
        with self._lock:
            self._check_open()
            self._look()
            return self._visible.offset_at_time(timestamp)

    def offsets(self) -> Offsets:
        """See `ReadShard`."""
        with self._lock:
            self._check_open()
            self._look()
            self._check_known()
            floor = self._visible.ended.floor
            return self._past.beside(self.log.offsets())._replace(
                earliest=floor.earliest, evict_floor=floor.evict_floor
            )

    def published(self) -> int:
        """See `ReadShard`."""
        return self.offsets().next

    def end_at_most(self) -> int:
        """Where the shard ends; if another directory has it, where it ends at most, by what is reserved there."""
        end = self.offsets().next
        with self._lock:
            return max(end, self._past.reserved_end) if self._past.is_elsewhere else end

    def end(self, reason: str) -> None:
        """Give descriptors back and refuse everything from now on."""
        with self._lock:
            self._closed = reason
            self.log.close()
            self._past.close()

    def refuse(self, reason: str) -> None:
        """Refuse every later call. Waits for no reader: where one is inside, its present page is the last."""
        self._closed = reason

    def end_if_idle(self) -> bool:
        """Give descriptors back, unless a reader is inside; whether that is done. Called after `refuse`."""
        # Not by taking the lock: an exception (Ctrl-C) before it is given back would leave it taken for ever.
        if self._lock.locked():
            return False
        # A reader that comes now is refused at once.
        self.end(self._closed or "is closed")
        return True

    def _page(self, look: Callable[[], Page]) -> Page:
        """A page, by what the owner has published and ended of late."""
        with self._lock:
            self._check_open()
            self._look()
            page = look()
            if any(gap.reason in UNREADABLE for gap in page.events):
                # It may have ended meanwhile, and be removed for that.
                self._look(again=True)
                page = look()
            self._check_known()
            return page

    def _found(self, look: Callable[[], Page]) -> Page:
        """What a look-up finds, though its owner seals or removes files under it."""
        for _ in range(ATTEMPTS):
            try:
                return look()
            except OSError as error:
                if error.errno not in REPLACED:
                    raise
                self.log.list_again()
                self._look(again=True)
        raise Unavailable(f"{self.ref}: its files changed {ATTEMPTS} times while it was searched; try again")

    def _look(self, *, again: bool = False) -> None:
        """See what has ended, at times, or now. The log first: what it no longer says is recorded by then."""
        now = self._clock.monotonic()
        if not again and now - self._looked_at < LOOK_SECONDS:
            return
        self.log.refresh()
        self._past.look()
        self._looked_at = now
        local, past = self.log.removals, self._past.ended
        ended = Ended(past.deleted | local.deletes, higher(past.floor, local.floor))
        if ended != self._visible.ended:
            self._visible.ended = ended

    def _reach(self) -> int:
        return max(self._past.history.end, self.log.head)

    def _reaches(self, offset: int) -> bool:
        """Whether something at or above `offset` can be read."""
        if self._past.exported > offset:
            return True
        return not self._past.is_elsewhere and self.log.wait(offset, 0)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise Closed(f"{self.ref} {self._closed}")

    def _check_known(self) -> None:
        """`UnknownTopic` once the topic is deleted, where an empty log or another directory may mean that."""
        if (self._past.is_elsewhere or self.log.head == 0) and not self._is_known(self.ref):
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
