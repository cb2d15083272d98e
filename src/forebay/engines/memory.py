"""The memory engine: records live as long as the process, offsets for ever. The model the others are compared with.

Deliberately plain: a list of batches, one lock, nothing in the background. Offsets are reserved in the
metadata store before they are used, so that after a restart none is ever given out twice. What does not fit
into `memory.bytes_max` is evicted, oldest first.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable

from forebay.clock import Clock
from forebay.engines.operations import ShardedEngine, wanted
from forebay.engines.seam import PAGE_BYTES
from forebay.errors import Closed, Invalid, Unavailable
from forebay.format.batch import Batch, ColumnBytes, batch_of, encode_row
from forebay.format.control import WindowEntry
from forebay.metadata import MetadataStore
from forebay.pages import Page
from forebay.records import Gap, Offsets, Reason
from forebay.sealed import first_at_time
from forebay.settings import Settings
from forebay.shard import Owner, RecoveryDecision, ShardRef, Source, acquire
from forebay.shard.reservation import reserve_in_state
from forebay.topics import Durability
from forebay.wal.hearing import is_inside
from forebay.wal.staging import INSIDE, Entry, Producing, Ticket
from forebay.wal.window import ProducerWindow

EVICTED_PART = 8
"""At the limit this part of the bytes goes at once."""


class MemoryShard:
    """One shard in memory. An append is published before it returns."""

    def __init__(
        self,
        ref: ShardRef,
        settings: Settings,
        *,
        clock: Clock,
        epoch: int,
        start: int,
        reserve: Callable[[int], int],
    ) -> None:
        self.ref = ref
        self.epoch = epoch
        self.durability = Durability.EPHEMERAL
        self.wakers: set[Callable[[], None]] = set()
        self.failure: str | None = None
        self.poll_seconds: float | None = None
        self.decision = _decision(start)
        self._clock = clock
        self._settings = settings
        self._reserve = reserve
        self._reserved_end = start
        self._start = start
        self._floor = start
        """Everything from `start` up to here was evicted."""
        self._next = start
        self._bytes = 0
        self._batches: list[Batch] = []
        self._bases: list[int] = []
        self._sizes: list[int] = []
        self._window = ProducerWindow(settings.wal.producers_max, settings.wal.producer_appends_max)
        self._lock = threading.RLock()
        self._is_inside = is_inside(self._lock)
        self._published = threading.Condition(self._lock)
        self._closed: str | None = None

    def stage_one(self, entry: Entry, size: int) -> Ticket:
        """See `OpenShard`."""
        return self.stage_many(encode_row(entry[:5]), entry.producing, entry.ticket)

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        """See `OpenShard`."""
        if self._is_inside():
            # A signal handler in the middle of an append: it would be given the same offset.
            raise Unavailable(INSIDE)
        with self._published:
            self._check_open()
            repeated = self._window.expect(*producing, None, columns.count) if producing is not None else None
            ticket.offset = repeated if repeated is not None else self._append(columns, producing)
            ticket.count = columns.count
            self._published.notify_all()
        ticket.finish()
        for waker in tuple(self.wakers):
            waker()
        return ticket

    def _append(self, columns: ColumnBytes, producing: Producing | None) -> int:
        base, end = self._next, self._next + columns.count
        if columns.size > self._settings.memory.bytes_max:
            raise Invalid(
                f"{columns.size} bytes in one append to {self.ref}, which keeps memory.bytes_max "
                f"({self._settings.memory.bytes_max}): send less at once, or raise the setting"
            )
        if end > self._reserved_end:
            self._reserved_end = self._reserve(end + self._settings.wal.reserve_records_min)
        batch = batch_of(columns, base=base, epoch=self.epoch, appended_at=self._clock.now_ms())
        if producing is not None:
            self._window.add(WindowEntry(*producing, 1, columns.count, base))
        self._batches.append(batch)
        self._bases.append(base)
        self._sizes.append(columns.size)
        self._bytes += columns.size
        self._next = end
        self._evict()
        return base

    def _evict(self) -> None:
        """Let the oldest go until the rest fits. In bulk: each front deletion costs the length of the lists."""
        if self._bytes <= self._settings.memory.bytes_max:
            return
        target = self._settings.memory.bytes_max - self._settings.memory.bytes_max // EVICTED_PART
        count = 0
        while self._bytes > target and count < len(self._batches) - 1:
            self._bytes -= self._sizes[count]
            count += 1
        del self._batches[:count], self._bases[:count], self._sizes[:count]
        self._floor = self._bases[0]

    def settle(self, ticket: Ticket) -> int:
        """See `OpenShard`."""
        return ticket.result()

    def is_held(self, ticket: Ticket) -> bool:
        """See `OpenShard`."""
        return ticket.done

    def commit(self) -> None:
        """Nothing ever waits."""

    def commit_within(self, seconds: float) -> None:
        """Nothing ever waits."""

    def last_sequence(self, producer: int) -> int | None:
        """See `OpenShard`."""
        return self._window.last_sequence(producer)

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """See `OpenShard`."""
        with self._published:
            self._check_open()
            if offset >= self._next or self._next == self._start:
                return Page([], [], offset)
            events = self._holes(offset)
            offset = events[-1].stop if events else offset
            first = bisect_right(self._bases, offset) - 1
            found = [self._batches[first].slice(offset, self._batches[first].end)]
            left = bytes_max - self._sizes[first]
            for place in range(first + 1, len(self._batches)):
                left -= self._sizes[place]
                if left < 0:
                    break
                found.append(self._batches[place])
            return Page(found, events, found[-1].end)

    def _holes(self, offset: int) -> list[Gap]:
        """What a reader at `offset` has missed: records of an earlier life, then evicted ones."""
        holes = [Gap(offset, self._start, Reason.LOST)] if offset < self._start else []
        if offset < self._floor > self._start:
            holes.append(Gap(max(offset, self._start), self._floor, Reason.CAP))
        return holes

    def wait(self, offset: int, timeout: float | None) -> bool:
        """See `OpenShard`."""
        with self._published:
            self._published.wait_for(lambda: self._next > max(offset, self._start) or self._closed, timeout)
            return self._next > max(offset, self._start)

    def offset_at_time(self, timestamp: int) -> int | None:
        """See `OpenShard`."""
        with self._published:
            self._check_open()
            return first_at_time(self._batches, timestamp)

    def offsets(self) -> Offsets:
        """See `OpenShard`."""
        with self._published:
            floor = self._floor if self._floor > self._start else 0
            return Offsets(earliest=self._floor, evict_floor=floor, durable=0, exported=0, next=self._next)

    def published(self) -> int:
        """See `OpenShard`."""
        return self._next

    def flush(self) -> None:
        """Nothing can be made durable here."""
        self._check_open()

    def rotate(self) -> None:
        """There are no files."""
        self._check_open()

    def end(self, reason: str) -> None:
        """Refuse everything from now on, let the records go and wake whoever waits for more."""
        with self._published:
            self._closed = reason
            self._batches, self._bases, self._sizes = [], [], []
            self._published.notify_all()
        for waker in tuple(self.wakers):
            waker()

    def abandon(self, reason: str) -> None:
        """As `end`, in a forked child, where whoever held the lock does not exist."""
        self._published = threading.Condition()
        self.end(reason)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise Closed(f"{self.ref} {self._closed}")


def _decision(start: int) -> RecoveryDecision:
    gap = Gap(0, start, Reason.LOST) if start else None
    source = Source.CATALOG if start else Source.EMPTY
    return RecoveryDecision(next_offset=start, source=source, exact=not start, gap=gap)


class MemoryEngine(ShardedEngine[MemoryShard]):
    """Shards in memory, owned by this process."""

    def __init__(self, settings: Settings, *, clock: Clock, metadata: MetadataStore, owner: Owner) -> None:
        super().__init__()
        self._settings = settings
        self._clock = clock
        self._metadata = metadata
        self._owner = owner

    def _close(self, shard: MemoryShard) -> None:
        shard.end("is closed")

    def _abandon(self, shard: MemoryShard) -> None:
        shard.abandon("was opened before a fork: open it anew in the child")

    def _open(self, ref: ShardRef) -> MemoryShard:
        shard = wanted(ref, self._settings)
        before, epoch = acquire(self._metadata, [shard], self._owner)[0]
        return MemoryShard(
            ref,
            self._settings,
            clock=self._clock,
            epoch=epoch,
            start=before.reserved_end if before is not None else 0,
            reserve=reserve_in_state(self._metadata, shard.key, epoch),
        )

    def _remove(self, ref: ShardRef, shard: MemoryShard | None) -> None:
        if shard is not None:
            shard.end("was deleted")
