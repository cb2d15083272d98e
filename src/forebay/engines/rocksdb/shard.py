"""One shard in the database. Appends that wait are written together, in one batch; readers take no lock.

Locks, outer first: `_changing` (one delete or eviction at a time), that of the group commit (one writer), the queue's
own. Readers go by the state, which moves only after the records it counts may be shown. A write that fails half way
ends appends for good: only the next opening of the shard finds out what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from forebay.appends.budget import QueueBudget
from forebay.appends.callbacks import Waking, deferred
from forebay.appends.free_space import FreeSpace
from forebay.appends.group_commit import GroupCommit
from forebay.appends.producer_window import ProducerWindow, Recalled
from forebay.appends.queue import AppendQueue, Producing
from forebay.appends.queue import QueuedRecord as Queued
from forebay.appends.ticket import Ticket
from forebay.clock import Clock
from forebay.engines.rocksdb.database import RocksDatabase
from forebay.engines.rocksdb.layout import Bounds, ShardCounters
from forebay.engines.rocksdb.reads import Pages
from forebay.engines.rocksdb.removal import Making, Removal
from forebay.engines.rocksdb.rows import RowsState, ShardRows, put_runs
from forebay.engines.seam import PAGE_BYTES, PAGE_RECORDS
from forebay.errors import Closed, Corrupt, ForebayError, Full, Indeterminate, Unavailable, UnknownTopic
from forebay.format.columns.rows import ColumnBytes, Row
from forebay.format.frame.batch import batch_of
from forebay.locks import Rank, RankedCondition, RankedRLock
from forebay.meter import ShardCounts
from forebay.pages import Page, Reach
from forebay.records import Gap, Offsets
from forebay.settings import RetentionSettings, WalSettings
from forebay.shard import RecoveryDecision
from forebay.shard.deletes import DeleteBefore, DeleteKey, DeleteOffsets, DeleteTag, Deletion
from forebay.shard.limits import Evicted, Holding, Limits, plan
from forebay.topics import ShardRef, TopicSpec

logger = logging.getLogger(__name__)


class RocksShard:
    """An open shard. Made by the engine, which has recovered it."""

    poll_seconds: float | None = None
    _left: UnknownTopic | None = None  # why nothing is acknowledged any more, if the topic was deleted

    def __init__(
        self,
        ref: ShardRef,
        settings: WalSettings,
        retention: RetentionSettings,
        *,
        database: RocksDatabase,
        rows: ShardRows,
        clock: Clock,
        decision: RecoveryDecision,
        epoch: int,
        bounds: Bounds,
        identity: str,
        state: RowsState,
        gap: Gap | None,
        window: ProducerWindow,
        on_dirty: Callable[[], None],
        queues: QueueBudget,
    ) -> None:
        """`gap` is what the rows end in, if they end in a gap."""
        self.ref = ref
        self.decision = decision
        self.epoch = epoch
        self.durability = ref.spec.durability
        self._syncs_before_ack = self.durability.policy.syncs_before_ack
        self.wakers: set[Callable[[], None]] = set()
        self.counts = ShardCounts()
        self._state = state
        self._gap = gap
        self.durable = state.counters.next if bounds.clean or self._syncs_before_ack else 0
        """Everything below is synced."""
        self._settings, self._retention = settings, retention
        self._database, self._rows = database, rows
        self._clock = clock
        self._bounds, self._identity = bounds, identity
        self._window = window
        self._on_dirty = on_dirty
        self._limits = Limits.of(ref.spec, retention)
        self._space = FreeSpace(database.disk, database.path, ref, settings.free_bytes_min)
        self._closed: str | None = None
        self._changing = RankedRLock(Rank.LIMITS, "rocksdb.deletes")
        self._capping = RankedRLock(Rank.DELETES, "rocksdb.caps")
        self._admitted = state.counters.total  # what all records count for, with those that wait
        self._published = RankedCondition(Rank.LEAF, "rocksdb.published")
        self._pages = Pages(str(ref), database, rows)
        self._removal = Removal(database, rows, self._change)
        self.failure: str | None = None
        self._in_doubt = False  # some of the batch at hand may be written already
        self._queue = AppendQueue(state.counters.next, window, settings, queues, ref.spec.partition_generation)
        self._group = GroupCommit(str(ref), self._queue, self._commit_taken)

    # Appending

    def append(self, row: Row, size: int, producing: Producing | None) -> int:
        """See `OwnedShard`."""
        return self.acknowledge(self.stage_one(Queued(*row, producing, Ticket()), size))

    def stage_one(self, entry: Queued, size: int) -> Ticket:
        """See `OwnedShard`."""
        if not self._limits.rejects:
            return self._queue.stage_one(entry, size)
        return self._stage_capped(lambda: self._queue.stage_one(entry, size), 1, size, entry.producing)

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        """See `OwnedShard`."""
        queue = self._queue
        if not self._limits.rejects:
            return queue.stage_many(columns, producing, ticket)
        size = int(batch_of(columns, base=0, epoch=0, appended_at=0).sizes().sum())
        return self._stage_capped(lambda: queue.stage_many(columns, producing, ticket), columns.count, size, producing)

    def recall(self, producing: Producing) -> Recalled | None:
        """See `OwnedShard`."""
        self._check_open()
        return self._queue.recall(producing)

    def stages_slowly(self, count: int) -> bool:
        """See `OwnedShard`: at its cap a shard writes what waits, to recognise a repeat."""
        return self._limits.rejects

    def _stage_capped(self, stage: Callable[[], Ticket], count: int, size: int, producing: Producing | None) -> Ticket:
        """Queue an append to a topic that refuses new records at its caps; a repeat needs no room."""
        # To recognise a repeat it writes what waits: callbacks of that run when the lock is given back.
        with deferred(), self._capping:
            counters, queue = self._state.counters, self._queue
            if queue.next == counters.next:
                self._admitted = counters.total
            try:
                held = self._admitted + size - counters.below
                self._limits.check_room(self.ref, queue.next + count - counters.earliest, held)
            except Full:
                if producing is None or not self._is_repeat(producing):
                    raise
            before = queue.next
            ticket = stage()
            if queue.next > before:
                self._admitted += size
            return ticket

    def _is_repeat(self, producing: Producing) -> bool:
        self.commit()
        last = self._window.last_sequence(producing.producer)
        return last is not None and producing.sequence <= last

    def is_held(self, ticket: Ticket) -> bool:
        """See `OwnedShard`."""
        return ticket.done

    @property
    def commits_slowly(self) -> bool:
        """See `OwnedShard`."""
        return False

    def commit(self) -> None:
        """See `OwnedShard`."""
        self._group.commit()

    def acknowledge(self, ticket: Ticket) -> int:
        """See `OwnedShard`."""
        return self._group.wait(ticket)

    def refuse_inside(self) -> None:
        """`Unavailable` for a signal handler that interrupted a write of this shard."""
        self._group.refuse_inside()

    def is_inside(self) -> bool:
        """See `OwnedShard`."""
        return self._group.is_inside() or self._queue.is_inside()

    def commit_within(self, seconds: float) -> None:
        """See `OwnedShard`."""
        self._group.commit_within(seconds, self._clock)

    def last_sequence(self, producer: int) -> int | None:
        """See `OwnedShard`."""
        return self._window.last_sequence(producer)

    def _commit_taken(self) -> None:
        """One turn of the group commit: take what waits, write it, acknowledge it."""
        try:
            if self._queue.taken:
                # A thread was interrupted (Ctrl-C) while it failed these, or acknowledged them.
                raise Unavailable(f"{self.ref}: interrupted before the appends were answered")
            self._in_doubt = False
            self._queue.take()
            if self._queue.taken:
                self._write()
                self._queue.acknowledge()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, OSError | ForebayError):
                raise

    def _fail(self, error: BaseException) -> None:
        """A write ended in an exception: answer every waiter, and trust nothing if something may be written."""
        queue, head = self._queue, self._state.counters.next
        if queue.taken and queue.taken[-1].end <= head:
            # Published already: a later failure did not fail these appends.
            queue.acknowledge()
            return
        reason = str(error) or type(error).__name__
        if self._left is not None:
            # Of a deleted topic no append ever appears, written or not.
            queue.fail(self._left, self._left, head)
            return
        if not self._in_doubt:
            ours = isinstance(error, ForebayError)
            refusal = error if ours else Unavailable(f"{self.ref}: not written ({reason})")
            queue.fail(refusal, refusal, head)  # type: ignore[arg-type]
            return
        self.failure = reason
        logger.error("%s: a write failed at offset %d: %s", self.ref, head, reason)
        later = Unavailable(f"{self.ref} is read-only since a write failed ({reason}): open the log again")
        written = Indeterminate(
            f"{self.ref}: the append was being written when that failed ({reason}): it is not visible now and may "
            "appear, once, when the log is opened again; read before you repeat it"
        )
        queue.refusal = later
        queue.fail(written, later, head)

    def _write(self) -> None:
        """Write everything that was taken from the queue, in one batch, and publish it."""
        frames = self._queue.taken
        now = self._clock.monotonic()
        waiting = sum(frame.size for frame in frames)
        if now >= self._space.due or waiting > self._space.left:
            self._space.check(now, waiting)
        self._space.left -= waiting
        appended_at, keys = self._clock.now_ms(), self._rows.keys
        batch, state, size = self._database.batch(), self._state, 0
        for frame in frames:
            columns = frame.encode()
            found = batch_of(columns, base=frame.base, epoch=self.epoch, appended_at=appended_at)
            state = self._rows.add(batch, state, found, columns)
            size += columns.size
        put_runs(batch, keys, frames, self._window)
        bounds = self._bounds
        if bounds.epoch != self.epoch or bounds.clean or state.counters.next > bounds.reserved_end:
            bounds = Bounds(self.epoch, False, state.counters.next + self._settings.reserve_records_min, self._identity)
            batch.put(keys.bounds, bounds.encode())
        batch.put(keys.counters, state.counters.encode())
        # A reservation must not outlive a power loss less than the records it was made for.
        sync = self._syncs_before_ack or bounds is not self._bounds
        self._in_doubt = True
        self._database.write(batch, sync=sync)
        # After everything that takes time and before the answer.
        if self._left is not None:
            raise self._left
        self._bounds = bounds
        counts, head = self.counts, self._state.counters.next
        self._publish(state, synced=sync)
        counts.commits += 1
        counts.records += state.counters.next - head
        counts.bytes_written += size
        counts.append_seconds.observe(self._clock.monotonic() - now)

    def _publish(self, state: RowsState, *, synced: bool) -> None:
        with self._published:
            self._state = state
            if synced:
                self.durable = state.counters.next
            self._published.notify_all()
        if not synced:
            self._on_dirty()
        if self.wakers:
            # Called by `GroupCommit.call_back`, when no lock is held.
            self._queue.due.append(Waking(self.wakers, self.ref))

    def _change(self, make: Making) -> None:
        """Write what `make` puts into a batch, beside the appends."""
        self._group.refuse_inside()
        with self._group.lock:
            self._check_writable()
            self._in_doubt = False
            batch = self._database.batch()
            try:
                state = make(batch, self._state)
                if state is None:
                    return
                batch.put(self._rows.keys.counters, state.counters.encode())
                self._in_doubt = True
                sync = self._syncs_before_ack
                self._database.write(batch, sync=sync)
                self._publish(state, synced=sync)
            except BaseException as error:
                if self._in_doubt:
                    self._fail(error)
                raise
        self._group.call_back()

    # Reading

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """See `OwnedShard`."""
        while True:
            self._check_open()
            counters = self._state.counters
            if offset >= counters.next:
                return Page([], [], offset)
            page = self._pages.read(counters, offset, bytes_max)
            if page is not None:
                return page
            with self._group.lock:
                # A thread that moved the floor while we read has recorded it by now.
                if self._state.counters.earliest == counters.earliest:
                    raise Corrupt(f"{self.ref}: an entry behind {offset} is not in the database: restore a backup")

    def read_by_key(
        self,
        key: bytes,
        start: int = 0,
        *,
        history: bool = False,
        records_max: int = PAGE_RECORDS,
        bytes_max: int = PAGE_BYTES,
    ) -> Page:
        """See `OwnedShard`."""
        self._check_open()
        prefix, counters = self._rows.keys.of_key(key), self._state.counters
        if history:
            return self._pages.found(counters, prefix, start, records_max, bytes_max)
        return self._pages.newest(counters, prefix, start)

    def read_by_tag(
        self, tag: str, start: int = 0, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> Page:
        """See `OwnedShard`."""
        self._check_open()
        return self._pages.found(self._state.counters, self._rows.keys.of_tag(tag), start, records_max, bytes_max)

    def offset_at_time(self, timestamp: int) -> int | None:
        """See `OwnedShard`."""
        self._check_open()
        state = self._state
        with self._database.view() as view:
            return self._rows.first_at_time(view, state, timestamp)

    def read_cached(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page | None:
        """See `ReadShard`: memory knows where the records end, and no record."""
        is_end = self._closed is None and offset >= self._state.counters.next
        return Page([], [], offset) if is_end else None

    def ended(self) -> object:
        """See `ReadShard`."""
        counters = self._state.counters
        return counters.earliest, counters.next - counters.live

    def reach(self) -> Reach:
        """See `ReadShard`."""
        counters = self._state.counters
        return Reach(counters.earliest, counters.evict_floor, counters.next)

    def wait(self, offset: int, timeout: float | None) -> bool:
        """See `OwnedShard`."""
        with self._published:
            self._published.wait_for(lambda: self._state.counters.next > offset or self._closed, timeout)
            return self._state.counters.next > offset

    def offsets(self) -> Offsets:
        """See `OwnedShard`."""
        counters = self._state.counters
        return Offsets(counters.earliest, counters.evict_floor, self.durable, 0, self._queue.next)

    def published(self) -> int:
        """See `OwnedShard`."""
        return self._state.counters.next

    def lag_end(self) -> int:
        """See `ReadShard`."""
        gap, following = self._gap, self._queue.next
        return gap.start if gap is not None and gap.stop == following else following

    # Deleting

    def delete(self, what: Deletion) -> int:
        """See `OwnedShard`."""
        # Before the lock: a delete that waits for another reaches nothing that is appended meanwhile.
        head = self._state.counters.next
        with deferred(), self._changing:
            self._check_writable()
            earliest, keys = self._state.counters.earliest, self._rows.keys
            if isinstance(what, DeleteBefore):
                target = min(what.offset, head)
                return self._removal.drop_below(target) if target > earliest else 0
            if isinstance(what, DeleteOffsets):
                return self._removal.delete_offsets(what.offsets.clipped(earliest, head))
            if isinstance(what, DeleteKey):
                return self._removal.delete_found(keys.of_key(what.key), head)
            if isinstance(what, DeleteTag):
                return self._removal.delete_found(keys.of_tag(what.tag), head)
            return self._removal.delete_range(max(what.start, earliest), min(what.stop, head))

    def evict(self, now_ms: int) -> Evicted:
        """See `OwnedShard`."""
        with deferred(), self._changing:
            self._check_writable()
            state = self._state
            counters = state.counters
            with self._database.view() as view:
                stretches = partial(self._rows.stretches, view, counters)
                floor, evicted = plan(self._limits, _holding(counters), stretches, now_ms)
            if evicted.reason is not None:
                self._removal.drop_below(floor, evicted.reason)
            return evicted

    def holding(self) -> Holding:
        """See `OwnedShard`."""
        return _holding(self._state.counters)

    def adopt(self, spec: TopicSpec) -> None:
        """See `OwnedShard`."""
        with deferred(), self._changing, self._capping:
            self.ref, self._limits = ShardRef(spec, self.ref.partition), Limits.of(spec, self._retention)
            self._queue.adopt_generation(spec.partition_generation)

    # Ending

    def flush(self) -> None:
        """See `OwnedShard`."""
        self.commit()
        self._check_writable()
        head = self._state.counters.next
        self._database.sync()
        self.synced_to(head)

    def synced_to(self, head: int) -> None:
        """Everything below `head` is durable."""
        self.durable = max(self.durable, head)

    def rotate(self) -> None:
        """There are no files of this shard."""
        self._check_open()

    def end(self, reason: str, *, clean: bool) -> None:
        """Write what waits, say that it ended in order if asked, and refuse everything from now on.

        Wakers run when the caller is out of `deferred`, so after the lock of the shard is free.
        """
        if self._closed is not None:
            return
        self._group.refuse_inside()
        # Before what waits is written: an append queued behind that would be written into a shard that has ended.
        refusal = self._left or Closed(f"{self.ref} {reason}")
        self._queue.refusal = refusal
        self.commit()
        with deferred(), self._changing, self._group.lock:
            self._queue.refusal = refusal
            self._closed = reason
            if clean and self.failure is None and self._bounds.epoch == self.epoch and not self._bounds.clean:
                batch = self._database.batch()
                batch.put(self._rows.keys.bounds, self._bounds._replace(clean=True).encode())
                self._database.write(batch, sync=True)
        with self._published:
            self._published.notify_all()
        self._queue.due.append(Waking(self.wakers, self.ref))
        self._group.call_back()

    def leave(self, why: UnknownTopic) -> None:
        """See `OwnedShard`."""
        self._left = why
        self.end("was deleted from another directory", clean=False)

    def _check_open(self) -> None:
        if self._left is not None:
            raise self._left
        if self._closed is not None:
            raise Closed(f"{self.ref} {self._closed}")

    def _check_writable(self) -> None:
        self._check_open()
        if self.failure is not None:
            raise Unavailable(f"{self.ref} is read-only since a write failed ({self.failure}): open the log again")


def _holding(counters: ShardCounters) -> Holding:
    held = counters.total - counters.below
    return Holding(counters.evict_floor, counters.earliest, counters.next, counters.live, held)
