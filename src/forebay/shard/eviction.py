"""The caps and the time to live of one shard: which records end, and which appends find no room.

`forebay.shard.limits` decides; this says what the shard holds, and moves the floors. Bytes are counted once over all
tiers and then kept up to date by the appends themselves: an append at a cap reads nothing under a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.appends.callbacks import deferred
from forebay.appends.queue import Producing, QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.appends.waiting import INSIDE, is_inside
from forebay.errors import Full, Unavailable
from forebay.format.columns.rows import ColumnBytes
from forebay.format.control.offsets import OffsetSet
from forebay.format.frame.batch import Batch, batch_of
from forebay.format.index.sections import find_offset
from forebay.history import History, InHistory
from forebay.locks import Rank, RankedLock, RankedRLock
from forebay.records import Gap
from forebay.sealed import SealedSegment
from forebay.shard.deletes import Deletes
from forebay.shard.limits import Evicted, Holding, Limits, Stretch, plan
from forebay.shard.tiers import NoHistory, Tiers
from forebay.wal.files import LogFile, SealedFile
from forebay.wal.log import Wal

PAGE_BYTES = 1024 * 1024
COUNT_ATTEMPTS = 100
"""So often a thread counts again what others have changed meanwhile. Each time one of them has got on."""


class Weight(NamedTuple):
    """What a range counts for."""

    bytes: int
    waiting: int | None
    """The first offset that counts for nothing yet, because the load that brought it is not committed."""


def weigh(tiers: Tiers, start: int, stop: int) -> Weight:
    """What the records of `[start, stop)` count for, by the indexes of sealed files and segments where they say it."""
    return tiers.steady(lambda: _weigh(tiers, start, stop))


def _weigh(tiers: Tiers, start: int, stop: int) -> Weight:
    total, waiting = 0, None
    for low, high, tier in tiers.cover(start, stop):
        if isinstance(tier, SealedFile):
            total += _by_index(tiers, low, high, tier)
        elif isinstance(tier, LogFile):
            total += _by_records(tiers, low, high)
        elif isinstance(tier, InHistory) and not tier.waits:
            total += _by_index(tiers, low, high, tier.open())
        elif isinstance(tier, InHistory) and waiting is None:
            waiting = low
    return Weight(total, waiting)


def _by_index(tiers: Tiers, start: int, stop: int, segment: SealedSegment) -> int:
    totals = segment.totals()
    entries = segment.index().entries
    if totals is None or not len(entries):
        return _by_records(tiers, start, stop)
    bases = entries["offset"].tolist()
    ends = (entries["offset"] + entries["count"]).tolist()
    first, last = find_offset(entries, start), find_offset(entries, stop)
    # Whole frames by the index, and by their records those that the range begins or ends in.
    whole_from = first if first == len(bases) or bases[first] >= start else first + 1
    if last <= whole_from:
        return _by_records(tiers, start, stop)
    total = int(totals[last - 1]) - (int(totals[whole_from - 1]) if whole_from else 0)
    if whole_from > first:
        total += _by_records(tiers, start, ends[first])
    if last < len(bases) and bases[last] < stop:
        total += _by_records(tiers, bases[last], stop)
    return total


def _by_records(tiers: Tiers, start: int, stop: int) -> int:
    total = 0
    while start < stop:
        page = tiers.read(start, PAGE_BYTES).clipped(stop)
        if page.next == start:
            break
        total += sum(int(batch.sizes().sum()) for batch in page.batches)
        start = page.next
    return total


class _Staged(NamedTuple):
    """An append on its way."""

    ticket: Ticket
    bytes: int
    total: int
    """Its bytes, and those of all that were staged before it."""


class ByteCount:
    """How many bytes the records of a shard count for, published ones and those on their way.

    `lock` protects numbers alone. A caller that holds it checks for room and stages; under it nothing is read from a
    tier, written or waited for but the append queue. Methods with an underscore need it. An exception that comes at
    any instant (Ctrl-C) leaves numbers that are right, or that `known` sees to be out of date.
    """

    def __init__(self, wal: Wal, tiers: Tiers, history: History | NoHistory, earliest: Callable[[], int]) -> None:
        self._wal = wal
        self._tiers = tiers
        self._history = history
        self._earliest = earliest
        self.lock = RankedRLock(Rank.COMMIT, "shard.caps")
        """Its owner is known, so that a signal handler that comes in between is refused. Never entered twice."""
        self._is_inside = is_inside(self.lock)
        self._start = self._stop = self._bytes = 0
        """What `[start, stop)` counts for."""
        self._staged: deque[_Staged] = deque()
        """Appends behind `stop`."""
        self._standing: tuple[int, object] = (0, None)
        self._waiting: int | None = None
        self._changes = 0

    def check_outside(self) -> None:
        """`Unavailable` in a signal handler that has interrupted this thread while it holds `lock`."""
        if self._is_inside():
            raise Unavailable(f"{self._wal.writer.place}: {INSIDE}")

    def note_staged(self, ticket: Ticket, size: int) -> None:
        """An append has entered the queue. The caller holds `lock`."""
        before = self._staged[-1].total if self._staged else 0
        self._staged.append(_Staged(ticket, size, before + size))

    def known(self) -> int | None:
        """What everything counts for, appends on their way included; `None` if `count` is due. Under `lock`."""
        self._take_published()
        staged = self._staged
        is_next = bool(staged) and staged[0].ticket.offset == self._stop
        if self._is_same() and (self._stop >= self._wal.head or is_next):
            return self._bytes + (staged[-1].total - staged[0].total + staged[0].bytes if staged else 0)
        return None

    def count(self) -> None:
        """Count over the tiers what is not counted yet. The caller holds no lock that an append needs."""
        with self.lock:
            self._take_published()
            changes, head = self._changes, self._wal.head
            earliest, standing = self._earliest(), self._stands()
            goes_on = self._is_same() and self._stop <= head
            start, before, waiting = (self._stop, self._bytes, self._waiting) if goes_on else (earliest, 0, None)
        more = weigh(self._tiers, start, head)
        with self.lock:
            # Else the numbers have moved meanwhile, and these are of another moment.
            if changes == self._changes:
                self._start, self._stop, self._bytes, self._standing, self._waiting, self._changes = (
                    earliest,
                    head,
                    before + more.bytes,
                    standing,
                    more.waiting if waiting is None else waiting,
                    changes + 1,
                )
                # What was published by then is in it, though its thread may not have been answered yet.
                while self._staged and self._staged[0].ticket.offset < head:
                    self._staged.popleft()

    def published(self, head: int) -> int:
        """What the records below `head` count for, read from the tiers as far as that is not known."""
        self.check_outside()
        waiting = self._waiting
        if waiting is not None and self._tiers.read(waiting, 1).next > waiting:
            # The load is over: what it brought counts now, or never.
            with self.lock:
                self._start, self._changes = -1, self._changes + 1
        for _ in range(COUNT_ATTEMPTS):
            with self.lock:
                if self.known() is not None:
                    staged = (size for ticket, size, _ in self._staged if ticket.offset + ticket.count <= head)
                    return self._bytes + sum(staged)
            self.count()
        raise self.unsteady()

    def move(self, start: int, stop: int, bytes_gone: int) -> None:
        """The records of `[start, stop)` have ended, and counted for so much."""
        with self.lock:
            if self._start == start:
                self._start, self._bytes, self._changes = stop, self._bytes - bytes_gone, self._changes + 1

    def unsteady(self) -> Unavailable:
        """For a caller that has tried long enough."""
        return Unavailable(
            f"{self._wal.writer.place}: what it holds changed {COUNT_ATTEMPTS} times while it was counted; try again"
        )

    def _take_published(self) -> None:
        """Count appends that are published, and leave out those that failed."""
        while self._staged and self._staged[0].ticket.done:
            ticket, size, _ = self._staged[0]
            if ticket.error is None and ticket.offset > self._stop:
                # Something else lies in between, as a bulk load or a gap: `count` looks.
                break
            if ticket.error is None and ticket.offset == self._stop:
                self._stop, self._bytes, self._changes = (
                    self._stop + ticket.count,
                    self._bytes + size,
                    self._changes + 1,
                )
            # Last: what is counted already is never counted again.
            self._staged.popleft()

    def _is_same(self) -> bool:
        return self._start == self._earliest() and self._standing == self._stands()

    def _stands(self) -> tuple[int, object]:
        """Changes whenever what was counted may count for less.

        Compaction takes records out of history; those of a local file count until the file is removed.
        """
        compactions, files = self._history.compactions, self._wal.files.all
        return compactions, files[0] if compactions and files else None


class Eviction:
    """Applies the limits of one shard. Safe for concurrent use."""

    def __init__(self, wal: Wal, deletes: Deletes, limits: Limits, tiers: Tiers, history: History | NoHistory) -> None:
        self._wal = wal
        self._deletes = deletes
        self.limits = limits
        self._tiers = tiers
        self._count = ByteCount(wal, tiers, history, lambda: deletes.floor.earliest)
        self._passing = RankedLock(Rank.LIMITS, "shard.limits")
        """One pass at a time. No append waits for it."""

    def evict(self, now_ms: int) -> Evicted:
        """See `OwnedShard`."""
        limits = self.limits
        self._wal.check_open()
        if limits.cap_records is None and limits.cap_bytes is None and limits.ttl_ms is None:
            return Evicted(self._deletes.floor.evict_floor)
        self._wal.bring_up()
        with deferred(), self._passing:
            holding = self._holding(live=limits.ttl_ms is not None, sizes=limits.cap_bytes is not None)
            at, evicted = plan(limits, holding, lambda: self._stretches(holding.earliest, holding.head), now_ms)
            if evicted.reason is not None:
                self._deletes.evict_below(at, evicted.reason)
                self._count.move(holding.earliest, at, evicted.bytes)
            return evicted

    def holding(self) -> Holding:
        """See `OwnedShard`."""
        self._wal.check_open()
        self._wal.bring_up()
        return self._holding(live=True, sizes=True)

    def _holding(self, *, live: bool, sizes: bool) -> Holding:
        """What is held; live records and bytes are counted only if asked for."""
        floor, head = self._deletes.floor, self._wal.head
        count = len(self._deletes.live(floor.earliest, head)) if live else 0
        held = self._count.published(head) if sizes else 0
        return Holding(floor.evict_floor, floor.earliest, head, count, held)

    def stage_one(self, entry: QueuedRecord, size: int) -> Ticket:
        """As the log does, unless there is no room: `Full` then."""
        return self._stage(1, size, entry.producing, lambda: self._wal.stage_one(entry, size))

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        """As the log does, unless there is no room: `Full` then."""
        size = int(batch_of(columns, base=0, epoch=0, appended_at=0).sizes().sum())
        stage = self._wal.stage_many
        return self._stage(columns.count, size, producing, lambda: stage(columns, producing, ticket))

    def stages_slowly(self) -> bool:
        """Whether an append may first read files to count what the shard holds, or write to recognise a repeat."""
        if self._wal.policy.acks_in_queue:
            return True
        if self.limits.cap_bytes is None:
            return False
        self._count.check_outside()
        with self._count.lock:
            return self._count.known() is None

    def _stage(self, count: int, size: int, producing: Producing | None, stage: Callable[[], Ticket]) -> Ticket:
        # In a forked child the lock may have a holder that does not exist there.
        self._wal.check_open()
        self._count.check_outside()
        for _ in range(COUNT_ATTEMPTS):
            with self._count.lock:
                held = self._count.known() if self.limits.cap_bytes is not None else 0
                following = self._wal.queue.next
                full = None if held is None else self._refusal(following + count, held + size)
                if held is not None and full is None:
                    ticket = stage()
                    # A repeat has the offset of its original.
                    if self.limits.cap_bytes is not None and ticket.offset >= following:
                        self._count.note_staged(ticket, size)
                    return ticket
            if full is not None:
                # A repeat needs no room.
                if producing is None or not self._is_known(producing):
                    raise full
                return stage()
            self._count.count()
        raise self._count.unsteady()

    def _refusal(self, end: int, held: int) -> Full | None:
        try:
            self.limits.check_room(self._wal.writer.place, end - self._deletes.floor.earliest, held)
        except Full as full:
            return full
        return None

    def _is_known(self, producing: Producing) -> bool:
        """Whether this append was acknowledged before."""
        self._wal.bring_up()
        last = self._wal.queue.last_sequence(producing.producer)
        return last is not None and producing.sequence <= last

    def _stretches(self, start: int, stop: int) -> Iterator[Stretch]:
        """Everything of `[start, stop)`, frame by frame; read only as far as it is asked for."""
        deleted = self._deletes.deleted
        size = 1
        while start < stop:
            page = self._tiers.read(start, size).clipped(stop)
            if page.next == start:
                return
            pieces: list[Batch | Gap] = [*page.batches, *page.events]
            for piece in sorted(pieces, key=_start):
                yield from [_of_gap(piece)] if isinstance(piece, Gap) else _of_batch(piece, deleted)
            start, size = page.next, PAGE_BYTES


def _start(piece: Batch | Gap) -> int:
    return piece.start if isinstance(piece, Gap) else piece.base


def _of_gap(gap: Gap) -> Stretch:
    return Stretch(gap.start, gap.stop, False, None, 0, lambda: np.zeros(gap.stop - gap.start, np.int64))


def _of_batch(batch: Batch, deleted: OffsetSet) -> Iterator[Stretch]:
    sizes = batch.sizes()
    gone = deleted.mask(batch.base, batch.count)
    start = 0
    for count, at in batch.appended():
        here = gone[start : start + count]
        edges = [0, *(np.flatnonzero(here[1:] != here[:-1]) + 1).tolist(), count]
        for first, last in pairwise(start + edge for edge in edges):
            part = sizes[first:last]
            yield Stretch(batch.base + first, batch.base + last, not gone[first], at, int(part.sum()), _giving(part))
        start += count


def _giving(sizes: npt.NDArray[np.int64]) -> Callable[[], npt.NDArray[np.int64]]:
    return lambda: sizes
