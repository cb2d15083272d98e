"""The caps and the time to live of one shard: what goes, and which appends find no room.

Which records end is decided by `eviction`; this tells it what the shard holds, and moves the floors. Bytes are
counted by the indexes of sealed files where they tell them, else by the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from forebay.appends.callbacks import deferred
from forebay.appends.queue import Entry, Producing
from forebay.appends.ticket import Ticket
from forebay.errors import Full
from forebay.eviction import Evicted, Holding, Limits, Stretch, plan
from forebay.format.batch import Batch, ColumnBytes, batch_of
from forebay.format.index import find_offset
from forebay.format.offsets import OffsetSet
from forebay.history import History, InHistory
from forebay.locks import Rank, RankedLock
from forebay.records import Gap
from forebay.sealed import SealedSegment
from forebay.shard.deletes import Deletes
from forebay.shard.tiers import NoHistory, Tiers
from forebay.wal.files import FileList, LogFile, SealedFile
from forebay.wal.log import Wal

PAGE_BYTES = 1024 * 1024


class Weights:
    """How many bytes the records of a range count for. Remembers the last answer. One thread at a time."""

    def __init__(self, files: FileList, tiers: Tiers, history: History | NoHistory) -> None:
        self._files = files
        self._tiers = tiers
        self._history = history
        self._standing: tuple[int, int | None] = (0, None)
        self._start = self._stop = self._bytes = 0
        self._waiting: int | None = None
        """The first place that could not be read yet, because a load was not committed: it counts for nothing."""

    def look(self) -> None:
        """Count anew what comes next if a load that was waited for is over."""
        waiting = self._waiting
        if waiting is not None and self._tiers.read(waiting, 1).next > waiting:
            self._begin(self._start)

    def between(self, start: int, stop: int) -> int:
        """What `[start, stop)` counts for. Cheap where `start` is the same as before and `stop` a little further on."""
        compactions = self._history.compactions
        # Where records went for good, those of a local file count until the file goes too.
        standing = (compactions, self._files.begins if compactions else None)
        if start != self._start or stop < self._stop or standing != self._standing:
            self._standing = standing
            self._begin(start)
        self._bytes += self._tiers.steady(lambda: self._weigh(self._stop, stop))
        self._stop = stop
        return self._bytes

    def _begin(self, start: int) -> None:
        self._start = self._stop = start
        self._bytes, self._waiting = 0, None

    def move(self, start: int, bytes_gone: int) -> None:
        """The range begins at `start` from now on, so much lighter: whoever let the front go knows by how much."""
        self._start, self._bytes = start, self._bytes - bytes_gone

    def _weigh(self, start: int, stop: int) -> int:
        total = 0
        for low, high, tier in self._tiers.cover(start, stop):
            if isinstance(tier, SealedFile):
                total += self._by_index(low, high, tier)
            elif isinstance(tier, LogFile):
                total += self._by_records(low, high)
            elif isinstance(tier, InHistory) and not tier.waits:
                total += self._by_index(low, high, tier.open())
            elif isinstance(tier, InHistory) and self._waiting is None:
                self._waiting = low
        return total

    def _by_index(self, start: int, stop: int, segment: SealedSegment) -> int:
        totals = segment.totals()
        entries = segment.index().entries
        if totals is None or not len(entries):
            return self._by_records(start, stop)
        bases = entries["offset"].tolist()
        ends = (entries["offset"] + entries["count"]).tolist()
        first, last = find_offset(entries, start), find_offset(entries, stop)
        # Whole frames by the index, and by their records those that the range begins or ends in.
        whole_from = first if first == len(bases) or bases[first] >= start else first + 1
        if last <= whole_from:
            return self._by_records(start, stop)
        total = int(totals[last - 1]) - (int(totals[whole_from - 1]) if whole_from else 0)
        if whole_from > first:
            total += self._by_records(start, ends[first])
        if last < len(bases) and bases[last] < stop:
            total += self._by_records(bases[last], stop)
        return total

    def _by_records(self, start: int, stop: int) -> int:
        total = 0
        while start < stop:
            page = self._tiers.read(start, PAGE_BYTES).clipped(stop)
            if page.next == start:
                break
            total += sum(int(batch.sizes().sum()) for batch in page.batches)
            start = page.next
        return total


class Evicting:
    """Applies the limits of one shard."""

    def __init__(self, wal: Wal, deletes: Deletes, limits: Limits, tiers: Tiers, weights: Weights) -> None:
        self._wal = wal
        self._deletes = deletes
        self.limits = limits
        self._tiers = tiers
        self._weights = weights
        self._counting = RankedLock(Rank.LIMITS, "shard.caps")
        self._staged: list[tuple[int, int, int]] = []
        """Start, end and bytes of appends that may not be published yet."""

    def evict(self, now_ms: int) -> Evicted:
        """See `OwnedShard`."""
        limits = self.limits
        self._wal.check_open()
        if limits.cap_records is None and limits.cap_bytes is None and limits.ttl_ms is None:
            return Evicted(self._deletes.floor.evict_floor)
        self._wal.bring_up()
        with deferred(), self._counting:
            holding = self._holding(live=limits.ttl_ms is not None, sizes=limits.cap_bytes is not None)
            at, evicted = plan(limits, holding, lambda: self._stretches(holding.earliest, holding.head), now_ms)
            if evicted.reason is not None:
                self._deletes.evict_below(at, evicted.reason)
                self._weights.move(at, evicted.bytes)
            return evicted

    def holding(self) -> Holding:
        """See `OwnedShard`."""
        self._wal.check_open()
        self._wal.bring_up()
        with self._counting:
            return self._holding(live=True, sizes=True)

    def _holding(self, *, live: bool, sizes: bool) -> Holding:
        """What is held; live records and bytes are counted only if asked for."""
        floor, head = self._deletes.floor, self._wal.head
        count = len(self._deletes.live(floor.earliest, head)) if live else 0
        if sizes:
            self._weights.look()
        held = self._weights.between(floor.earliest, head) if sizes else 0
        return Holding(floor.evict_floor, floor.earliest, head, count, held)

    def stage_one(self, entry: Entry, size: int) -> Ticket:
        """As the log does, unless there is no room: `Full` then."""
        # To recognise a repeat it writes what waits: callbacks of that run when the lock is given back.
        with deferred(), self._counting:
            self._check_room(1, size, entry.producing)
            return self._noted(self._wal.stage_one(entry, size), 1, size)

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        """As the log does, unless there is no room: `Full` then."""
        size = int(batch_of(columns, base=0, epoch=0, appended_at=0).sizes().sum())
        with deferred(), self._counting:
            self._check_room(columns.count, size, producing)
            return self._noted(self._wal.stage_many(columns, producing, ticket), columns.count, size)

    def _check_room(self, count: int, size: int, producing: Producing | None) -> None:
        try:
            self._check_limits(count, size)
        except Full:
            # A repeat needs no room.
            if producing is None or not self._is_known(producing):
                raise

    def _is_known(self, producing: Producing) -> bool:
        """Whether this append was acknowledged before."""
        self._wal.bring_up()
        last = self._wal.writer.window.last_sequence(producing.producer)
        return last is not None and producing.sequence <= last

    def _check_limits(self, count: int, size: int) -> None:
        earliest, head, following = self._deletes.floor.earliest, self._wal.head, self._wal.queue.next
        held = 0
        if self.limits.cap_bytes is not None:
            self._staged = [part for part in self._staged if head < part[1] <= following]
            held = self._weights.between(earliest, head) + sum(part[2] for part in self._staged)
        self.limits.check_room(self._wal.writer.place, following + count - earliest, held + size)

    def _noted(self, ticket: Ticket, count: int, size: int) -> Ticket:
        if self.limits.cap_bytes is not None:
            self._staged = [part for part in self._staged if part[1] <= ticket.offset]
            self._staged.append((ticket.offset, ticket.offset + count, size))
        return ticket

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
