"""The newest end of a log as readers see it: how far they may read, the newest frames in memory, who waits for more.

Writes no record: it shows what is written, to readers in this process and, by the `live` file, in others. Readers
take no lock of the writer.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forebay.clock import Clock
from forebay.disk import Disk, File
from forebay.format.files.live import LIVE_BYTES, Live, decode_live, encode_live
from forebay.format.frame.batch import Batch, decode, unpacked_bytes
from forebay.format.frame.head import HEADER_SIZE, WHOLE_HEAD, FrameHead, Verdict
from forebay.format.frame.scan import table_at
from forebay.format.frame.small_frames import STRETCH_MIN, batches_of
from forebay.locks import Rank, RankedCondition, RankedLock, RankedRLock
from forebay.meter import ShardCounts
from forebay.pages import Page
from forebay.workers import Worker

if TYPE_CHECKING:
    from forebay.wal.files import LogFile
    from forebay.wal.writer import ActiveFile, Writer

logger = logging.getLogger(__name__)

LIVE_NAME = "live"
SMALL_BYTES = 2048
"""Frames up to here are worth copying to be read together."""
FRAME_COST = 256
"""What Python needs for a cached frame beside its bytes, about."""
NOTED_BYTES = 4096
"""A cache reports what it holds to the budget of its process once that has changed by more than this."""
FRAMES_AT_ONCE = 1000
"""So many frames are dropped from a cache before a reader or an append that waits for its lock gets it."""
EVICTED_PART = 16
"""Once the budget is exceeded, this part of it is freed beyond the excess, so that not every append exceeds it."""


class CachedFrame(NamedTuple):
    """One published data frame: the offsets it covers and its bytes."""

    base: int
    end: int
    data: bytes | bytearray

    def batch(self) -> Batch:
        """The records of the frame."""
        _, length, _, _, *rest = WHOLE_HEAD.unpack_from(self.data)
        return decode(self.data, 0, FrameHead(self.base, length + HEADER_SIZE, *rest))


class Tail:
    """What readers of a log that grows go by. Only the thread that commits changes it."""

    def __init__(
        self,
        head: int,
        epoch: int,
        cache_bytes_max: int,
        budget: CacheBudget,
        live: LiveFile,
        counts: ShardCounts,
        *,
        is_packed: bool,
    ) -> None:
        """`is_packed` says that frames may be compressed."""
        self.head = head
        """Readers see everything below."""
        self.cache = TailCache(cache_bytes_max, budget, counts)
        self.live = live
        self.wakers: set[Callable[[], None]] = set()
        """Called after each publication, when no lock is held, by the thread that published."""
        self._is_packed = is_packed
        self._epoch = epoch
        self._changed = RankedCondition(Rank.LEAF, "wal.published")
        """Notified when `head` has moved, or will never move again."""
        self.waiting = 0
        """Threads in `wait`."""
        self._is_ended = False

    def publish(self, made: Sequence[CachedFrame], writer: Writer) -> None:
        """Show the frames that `writer` has written, and synced if the class asks for that, to every reader."""
        active = writer.active
        assert active is not None, "there is a file once a frame is written"
        active.publish(writer.end)
        # Commit point for readers: what is below `head` is never taken back while this process lives.
        self.head = writer.end
        # Before the write below: an interrupt there (Ctrl-C) must not cost the trust in a file that is published.
        writer.account()
        # Last: memory must not show what an interrupt before `head` has moved makes a lost range.
        self.cache.add(made)
        self.live.publish(active, self._epoch, writer.durable)

    def show(self, active: ActiveFile | None, durable: int, *, doubtful: bool = False) -> None:
        """Show other processes, and a later recovery, how far the log is published and durable.

        `doubtful` says that the file may not reach the disk: a recovery in this life of the machine must know.
        """
        if active is not None:
            self.live.publish(active, self._epoch, durable, doubtful=doubtful)

    def read(self, offset: int, bytes_max: int, *, unpack_max: int | None = None) -> Page | None:
        """Records in memory from `offset` on, up to about `bytes_max`; `None` if they are not in memory any more.

        With `unpack_max` also `None` where more bytes would have to be decompressed for it.
        """
        frames = self.cache.frames_from(offset, bytes_max)
        if not frames:
            return None
        if self._is_packed:
            frames, unpacked = _fitting(frames, bytes_max)
            if unpack_max is not None and unpacked > unpack_max:
                return None
        self.cache.note_read()
        batches = batches_in(frames)
        if batches[0].base < offset:
            batches[0] = batches[0].slice(offset, batches[0].end)
        return Page(batches, [], frames[-1].end)

    def wait(self, offset: int, timeout: float | None) -> bool:
        """Wait until a record at or above `offset` may be read; false when the time is up or the log closed."""
        with self._changed:
            self.waiting += 1
            try:
                self._changed.wait_for(lambda: self.head > offset or self._is_ended, timeout)
            finally:
                self.waiting -= 1
        return self.head > offset

    @property
    def is_watched(self) -> bool:
        """Whether some reader wants to be woken when records are published."""
        return bool(self.wakers) or self.waiting > 0

    def wake(self) -> None:
        """Wake the threads in `wait`."""
        # A waiting thread counts itself before it looks at `head`, which has moved by now: none is missed.
        if self.waiting:
            with self._changed:
                self._changed.notify_all()

    def end(self) -> None:
        """No record will follow: threads in `wait` return, and what was in memory is read from files, if at all."""
        self._is_ended = True
        self.wake()
        self.cache.clear()


def _fitting(frames: list[CachedFrame], bytes_max: int) -> tuple[list[CachedFrame], int]:
    """The first of these frames, at least one, that have no more than `bytes_max` once they are decompressed.

    And how many bytes are decompressed for them. By what the frames claim: a small one may hold a thousand times more.
    """
    size = unpacked = 0
    for number, frame in enumerate(frames):
        claimed = unpacked_bytes(frame.data)
        size += len(frame.data) if claimed is None else claimed
        if number and size > bytes_max:
            return frames[:number], unpacked
        unpacked += claimed or 0
    return frames, unpacked


def batches_in(frames: Sequence[CachedFrame]) -> list[Batch]:
    """The records of consecutive frames; those of many small ones are put together."""
    if len(frames) < STRETCH_MIN or len(frames[0].data) > SMALL_BYTES:
        return [frame.batch() for frame in frames]
    sizes = [len(frame.data) for frame in frames]
    positions = np.array([0, *accumulate(sizes[:-1])], dtype=np.int64)
    buffer = b"".join([frame.data for frame in frames])
    return [batch for batch, _ in batches_of(buffer, table_at(buffer, positions))]


class TailCache:
    """The newest published frames, in offset order without a gap; the oldest go first when the limit is reached.

    Holds them exactly as they were written, so that it costs no second encoding and can replace a damaged tail byte for
    byte. While the caches of the process hold more than their budget, it does not grow; the newest frame stays until
    the background worker of the budget drops it.
    """

    def __init__(self, bytes_max: int, budget: CacheBudget, counts: ShardCounts) -> None:
        self._bytes_max = bytes_max
        self._budget = budget
        self.read_at = 0
        """Which of all reads from caches of the process was the last of this one; 0 before the first."""
        self.noted = 0
        """What the budget counts for it."""
        self._frames: dict[int, CachedFrame] = {}
        self._bases: list[int] = []
        self._dropped = 0
        self._end = -1
        self.lock = RankedLock(Rank.LEAF, "wal.tail")
        self.bytes = 0
        self._counts = counts
        budget.enter(self)

    @property
    def cost(self) -> int:
        """About what it takes in memory."""
        return self.bytes + FRAME_COST * len(self._frames)

    def add(self, frames: Sequence[CachedFrame]) -> None:
        """Append frames that continue the newest one; a jump in offsets empties the cache first."""
        with self.lock:
            bytes_max = min(self._bytes_max, self.bytes) if self._budget.is_full else self._bytes_max
            for frame in frames:
                base, end, data = frame
                if base != self._end:
                    self._clear()
                self._frames[base] = frame
                self._bases.append(base)
                self._end = end
                self.bytes += len(data)
            while self.bytes > bytes_max and len(self._frames) > 1:
                self._drop_oldest()
        if not -NOTED_BYTES <= self.bytes + FRAME_COST * len(self._frames) - self.noted <= NOTED_BYTES:
            self._budget.note(self)

    def note_read(self) -> None:
        """A reader found what it asked for here: other caches give up theirs first."""
        self.read_at = next(self._budget.reads)

    def drop(self, cost: int) -> int:
        """Give up the oldest frames, to free about so much, but only so many at once; how much that was."""
        with self.lock:
            before, held = self.cost, self._frames
            if before <= cost:
                self._clear()
            for _ in range(min(FRAMES_AT_ONCE, len(self._frames))):
                if self.cost <= before - cost:
                    break
                self._drop_oldest()
            freed = before - self.cost
        # Where a whole cache is given up, its memory is freed here, when no lock is held.
        del held
        self._budget.note(self)
        return freed

    def forget(self, stop: int) -> None:
        """Give up the frames that end at `stop` or before it."""
        with self.lock:
            while self._frames and self._frames[self._bases[self._dropped]].end <= stop:
                self._drop_oldest()
        self._budget.note(self)

    def frames_from(self, offset: int, bytes_max: int) -> list[CachedFrame]:
        """Frames that cover `offset` and on, at least one if any, up to about `bytes_max`; empty if not held."""
        with self.lock:
            frame = self._covering(offset)
            if frame is None:
                self._counts.cache_misses += 1
                return []
            self._counts.cache_hits += 1
            found = [frame]
            size = len(frame.data)
            while (frame := self._frames.get(frame.end)) is not None:
                size += len(frame.data)
                if size > bytes_max:
                    break
                found.append(frame)
            return found

    def next_frame(self, offset: int) -> CachedFrame | None:
        """The first held frame that starts at `offset` or later."""
        with self.lock:
            index = max(bisect_left(self._bases, offset), self._dropped)
            return self._frames[self._bases[index]] if index < len(self._bases) else None

    def read_cached_since(self, offset: int) -> tuple[list[Batch], int]:
        """All cached records at or after `offset`, and the offset that follows them (the watermark)."""
        with self.lock:
            held = [frame for frame in self._frames.values() if frame.end > offset]
        batches = [frame.batch() for frame in held]
        if batches and batches[0].base < offset:
            batches[0] = batches[0].slice(offset, batches[0].end)
        return batches, held[-1].end if held else offset

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            self._clear()
        self._budget.note(self)

    def _covering(self, offset: int) -> CachedFrame | None:
        index = bisect_right(self._bases, offset) - 1
        frame = self._frames.get(self._bases[index]) if index >= self._dropped else None
        return frame if frame is not None and offset < frame.end else None

    def _clear(self) -> None:
        self._frames, self._bases = {}, []
        self._dropped = 0
        self.bytes = 0

    def _drop_oldest(self) -> None:
        # The list of bases is trimmed in bulk: deleting from its front each time would cost its length.
        self.bytes -= len(self._frames.pop(self._bases[self._dropped]).data)
        self._dropped += 1
        if self._dropped * 2 > len(self._bases):
            del self._bases[: self._dropped]
            self._dropped = 0


class CacheBudget:
    """How many bytes the tail caches of a process may hold together; those that were read least recently give up first.

    A background worker drops frames, so an append never waits for the cache of another shard. Until it has, caches do
    not grow, each at most by the newest frame. Safe for concurrent use, in signal handlers too.
    """

    def __init__(self, bytes_max: int, clock: Clock) -> None:
        self.bytes_max = bytes_max
        self.is_full = False
        """Whether the caches hold more than they may."""
        self.evicted_bytes = 0
        """How much caches have given up for others."""
        self.reads = count(1)
        """Numbers the reads from all caches."""
        self.worker = Worker("forebay-cache", self.evict, clock=clock)
        self.noted = 0
        """What the caches hold, as far as they have said so."""
        self._caches: weakref.WeakValueDictionary[int, TailCache] = weakref.WeakValueDictionary()
        self._numbers = count()
        self._lock = RankedRLock(Rank.LEAF, "wal.cache_budget")

    def enter(self, cache: TailCache) -> None:
        """Count this cache too, while it lives."""
        self._caches[next(self._numbers)] = cache

    @property
    def bytes(self) -> int:
        """What all caches take in memory now, about."""
        return sum(cache.cost for cache in self._living())

    def note(self, cache: TailCache) -> None:
        """A cache has changed. Called without its lock by the thread that commits and by the worker; it never waits."""
        with self._lock:
            cost = cache.cost
            self.noted += cost - cache.noted
            cache.noted = cost
            self.is_full = self.noted > self.bytes_max
        if self.is_full:
            self.worker.wake()

    def evict(self) -> None:
        """Drop frames until the caches are within the budget again. A step of the worker; takes one lock at a time."""
        caches = self._living()
        with self._lock:
            # Counted again: a cache may have ended, or an interrupt (Ctrl-C) cut its note short.
            self.noted = sum([cache.noted for cache in caches])
            self.is_full = self.noted > self.bytes_max
        if not self.is_full:
            return
        target = self.bytes_max - self.bytes_max // EVICTED_PART
        for cache in sorted(caches, key=attrgetter("read_at")):
            while (excess := self.noted - target) > 0 and cache.cost and self.worker.goes_on():
                self.evicted_bytes += cache.drop(excess)

    def _living(self) -> list[TailCache]:
        """Every cache, by one step that no other thread comes into."""
        return [cache for living in self._caches.valuerefs() if (cache := living()) is not None]


class LiveFile:
    """The `live` file of a shard: how far other processes may read. One small write per commit, never synced.

    Losing it, or a write to it, costs other processes time and never a fact, so its errors end here.
    """

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._path = f"{directory}/{LIVE_NAME}"
        self._file: File | None = None
        self._sequence = 0
        self._failed = False
        self._ended = False

    def publish(self, active: LogFile, epoch: int, durable: int, *, doubtful: bool = False) -> None:
        """Show other processes what they may read now; `doubtful` if the file may not reach the disk."""
        if self._ended:
            return
        self._sequence += 1
        header, sequence = active.header, self._sequence
        content = encode_live(epoch, header.epoch, active.start, active.limit, durable, active.end, sequence, doubtful)
        file = self._file
        if file is None or self._failed:
            self._write(content)
            return
        try:
            file.write_at(content, 0)
        except OSError as error:
            self._note_failure(error)

    def doubt(self, shown: Live) -> None:
        """Say that a sync of the newest file has failed before the log was open: the next opening copies the file."""
        self._write(encode_live(*shown._replace(doubtful=True)))
        self.close()

    def _write(self, content: bytes) -> None:
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write_at(content, 0)
            self._failed = False
        except OSError as error:
            self._note_failure(error)

    def _note_failure(self, error: OSError) -> None:
        if not self._failed:
            logger.warning("%s cannot be written (%s): other processes do not see new records", self._path, error)
        self._failed = True
        # Its name may lead elsewhere by now: the next publishing opens it again.
        self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def end(self) -> None:
        """Publish nothing any more: the directory may be another's."""
        self._ended = True
        self.close()

    def _open(self) -> File:
        try:
            return self._disk.open(self._path, writable=True, scratch=True)
        except FileNotFoundError:
            self._disk.create(self._path).close()
            return self._disk.open(self._path, writable=True, scratch=True)


def read_live(disk: Disk, directory: str) -> Live | None:
    """What the owner published last; `None` if there is nothing to go by."""
    try:
        file = disk.open(f"{directory}/{LIVE_NAME}")
    except FileNotFoundError:
        return None
    try:
        live = decode_live(file.read_at(LIVE_BYTES, 0))
    finally:
        file.close()
    return None if isinstance(live, Verdict) else live
