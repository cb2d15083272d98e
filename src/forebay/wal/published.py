"""What readers see of a log that grows: everything below `head`, from the cache or from files.

Writes no record: it shows what is written, to readers in this process and in others, and wakes those who
wait for it. Readers take no lock of the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.errors import Closed
from forebay.locks import Rank, RankedCondition
from forebay.pages import Page
from forebay.records import Gap
from forebay.wal.cache import CachedFrame, TailCache, batches_in
from forebay.wal.files import FileList
from forebay.wal.live import LiveFile
from forebay.wal.writer import Writer

PAGE_BYTES = 1024 * 1024


class PublishedLog:
    """The readers' side of one shard's log."""

    def __init__(self, writer: Writer, files: FileList, live: LiveFile) -> None:
        self.writer = writer
        self.files = files
        self.live = live
        self.cache = TailCache(writer.settings.cache_bytes_max)
        self.head = writer.end
        """Readers see everything below."""
        self.wakers: set[Callable[[], None]] = set()
        """Called after each publication, when no lock is held, by the thread that published."""
        self.closed = False
        self.published = RankedCondition(Rank.LEAF, "wal.published")
        """Notified when `head` has moved, or something else that is waited for has come."""
        self._waiting = 0

    def bring_up(self) -> None:
        """Publish what was acknowledged already."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Records from `offset` on, at least one if there is any, up to about `bytes_max`.

        Raises `BelowFiles` for what lies before all local files.
        """
        self.check_open()
        if offset >= self.head:
            # Read your write.
            self.bring_up()
        head = self.head
        if offset >= head:
            return Page([], [], offset)
        frames = self.cache.frames_from(offset, bytes_max)
        if not frames:
            return self.files.read(offset, bytes_max).clipped(head)
        batches = batches_in(frames)
        if batches[0].base < offset:
            batches[0] = batches[0].slice(offset, batches[0].end)
        return Page(batches, [], frames[-1].end).clipped(head)

    def wait(self, offset: int, timeout: float | None) -> bool:
        """Wait until a record at or above `offset` may be read; false when the time is up or the log closed."""
        self.bring_up()
        with self.published:
            self._waiting += 1
            try:
                self.published.wait_for(lambda: self.head > offset or self.closed, timeout)
            finally:
                self._waiting -= 1
        return self.head > offset

    def offset_at_time(self, timestamp: int, start: int = 0) -> int | None:
        """The first record at or after the time, in files that reach beyond `start`; `None` if there is none."""
        self.check_open()
        self.bring_up()
        found = self.files.offset_at_time(timestamp, start)
        return found if found is not None and found < self.head else None

    def damage_at(self, offset: int) -> Gap | None:
        """The damaged range of the files that covers `offset`, if one does."""
        return self.files.damage_at(offset)

    def publish(self, made: Sequence[CachedFrame]) -> None:
        """Show what is written, and durable if the class asks for that, to every reader."""
        active = self.writer.active
        assert active is not None
        self.cache.add(made)
        active.publish(self.writer.end)
        # Commit point for readers: what is below `head` is never taken back while this process lives.
        self.head, self.writer.unsettled = self.writer.end, False
        self.live.publish(active, self.writer)

    def tell(self) -> None:
        """Tell other processes, and a later recovery, how far the log is published and durable."""
        if self.writer.active is not None:
            self.live.publish(self.writer.active, self.writer)

    def wake(self) -> None:
        """Wake the threads that wait for more in `wait`."""
        # A waiting thread says so before it looks at `head`, which has moved by now: none is missed.
        if self._waiting:
            with self.published:
                self.published.notify_all()

    def check_open(self) -> None:
        """`Closed` if the log is."""
        if self.closed:
            raise Closed(f"{self.writer.place} is closed")
