"""The memory engine: records live as long as the process, offsets for ever. The model the others are compared with.

One lock, nothing in the background. Offsets are reserved in the metadata store before they are used, so that
after a restart none is ever given out twice. What does not fit into `memory.bytes_max` is evicted, oldest first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from forebay.appends.callbacks import Waking, call_back, wake_all
from forebay.appends.producer_window import ProducerWindow, Recalled
from forebay.appends.queue import Producing, QueuedRecord, check_generation
from forebay.appends.ticket import Ticket
from forebay.appends.waiting import INSIDE, is_held, is_inside
from forebay.catalog import read_state
from forebay.clock import Clock
from forebay.engines.memory_records import HeldRecords
from forebay.engines.registry import ShardedEngine
from forebay.engines.seam import PAGE_BYTES, PAGE_RECORDS
from forebay.errors import Closed, Conflict, Fenced, Full, Moved, TooLarge, Unavailable, UnknownTopic
from forebay.format.columns.rows import ColumnBytes, Row, content_checksum, encode_row
from forebay.format.control.frames import WindowEntry
from forebay.format.frame.batch import Batch, batch_of
from forebay.format.metadata.descriptor import ShardState
from forebay.locks import Rank, RankedRLock, condition_of
from forebay.metadata import MetadataStore
from forebay.meter import ShardCounts
from forebay.pages import Page, Reach, joined, tombstone
from forebay.records import Gap, Offsets, Reason
from forebay.sealed import Gathered
from forebay.settings import Settings
from forebay.shard import NextSource, Owner, RecoveryDecision, acquire
from forebay.shard.deletes import DeleteBefore, DeleteKey, DeleteOffsets, Deletion, RangeDelete
from forebay.shard.limits import Evicted, Holding, Limits, plan
from forebay.shard.owner_loss import TakeOver
from forebay.shard.ownership import Check, MayOwn, OwnerSession, anywhere, reserve_in_state, wanted
from forebay.topics import Durability, ShardRef, TopicSpec

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
        owner: MemoryOwner,
        owned: OwnedEpoch,
        start: int,
        on_lost: Callable[[MemoryShard], None],
    ) -> None:
        """`on_lost` is called when the shard has ended here because another owner has it, without a lock."""
        self.ref = ref
        self.durability = Durability.EPHEMERAL
        self.wakers: set[Callable[[], None]] = set()
        self.failure: str | None = None
        self.counts = ShardCounts()
        self.poll_seconds: float | None = None
        self.decision = _decision(start)
        self._clock = clock
        self._settings = settings
        self._limits = Limits.of(ref.spec, settings.retention)
        self._on_lost = on_lost
        self._owner = owner
        self._owned = owned
        self._reserved_end = start
        self._start = start
        """Where this life began."""
        self._evict_floor = 0
        self._evict_reason = Reason.CAP
        self._held = HeldRecords(start)
        self._window = ProducerWindow(settings.wal.producers_max, settings.wal.producer_appends_max)
        self._looked = ref.spec.partition_generation
        """See `AppendQueue`."""
        self._appending: tuple[WindowEntry, int] | None = None
        """The append that the window is to know once its records are in."""
        self._lock = RankedRLock(Rank.COMMIT, "memory.shard")
        self._is_inside = is_inside(self._lock)
        self._published = condition_of(self._lock)
        self._closed: str | None = None
        self._left: UnknownTopic | None = None
        """Why nothing is acknowledged any more, if the topic was deleted."""

    @property
    def epoch(self) -> int:
        """Which owner in turn this is."""
        return self._owned.epoch

    def append(self, row: Row, size: int, producing: Producing | None) -> int:
        """See `OwnedShard`."""
        return self.acknowledge(self.stage_one(QueuedRecord(*row, producing, Ticket()), size))

    def stage_one(self, entry: QueuedRecord, size: int) -> Ticket:
        """See `OwnedShard`."""
        return self.stage_many(encode_row(entry[:5]), entry.producing, entry.ticket)

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        """See `OwnedShard`."""
        if self._is_inside():
            # A signal handler in the middle of an append: it would be given the same offset.
            raise Unavailable(INSIDE)
        try:
            self._rejoin()
            with self._published:
                self._check_open()
                self._remember()
                repeated = self._repeated(columns, producing) if producing is not None else None
                ticket.offset = repeated if repeated is not None else self._append(columns, producing)
                ticket.count = columns.count
                self._published.notify_all()
        except Fenced as error:
            self._lose(error)
            if self._left is not None:
                raise self._left from error
            raise
        ticket.finish()
        wake_all(self.wakers, self.ref)
        return ticket

    def recall(self, producing: Producing) -> Recalled | None:
        """See `OwnedShard`."""
        if self._is_inside():
            raise Unavailable(INSIDE)
        with self._published:
            self._check_open()
            self._remember()
            self._looked = max(self._looked, producing.generation or 0)
            return self._window.recall(producing.producer, producing.sequence)

    def stages_slowly(self, count: int) -> bool:
        """See `OwnedShard`: offsets must be reserved, the session has ended, or another thread is at the shard."""
        if self._held.next + count > self._reserved_end or not self._owned.still_owner():
            return True
        return is_held(self._lock) and not self._is_inside()

    def _append(self, columns: ColumnBytes, producing: Producing | None) -> int:
        base, end = self._held.next, self._held.next + columns.count
        batch = batch_of(columns, base=base, epoch=self._owned.epoch, appended_at=self._clock.now_ms())
        self._check_room(batch, columns.size)
        if end > self._reserved_end:
            self._reserved_end = self._owned.reserve(end + self._settings.wal.reserve_records_min)
        # After everything that takes time, and before any waker runs.
        self._hold_on()
        if self._left is not None:
            raise self._left
        if producing is not None:
            entry = WindowEntry(producing.producer, producing.sequence, 1, columns.count, base)
            self._appending = entry, content_checksum(columns)
        self._held.append(batch, columns.size)
        self._remember()
        self.counts.commits += 1
        self.counts.records += columns.count
        self.counts.bytes_written += columns.size
        self._fit()
        return base

    def _repeated(self, columns: ColumnBytes, producing: Producing) -> int | None:
        """The offset of the append that this one repeats, if it does. The caller holds the lock."""
        found = self._window.expect(*producing[:3], None, columns.count, content_checksum(columns))
        if found is None:
            check_generation(producing, self._looked)
        return found

    def _remember(self) -> None:
        """Have the window know the append that was made last, if its records are in. The caller holds the lock.

        Asked for again before the window is used: an interrupt (Ctrl-C) may have come between the two.
        """
        if self._appending is None:
            return
        made, checksum = self._appending
        if made.offset < self._held.next:
            last = self._window.last_sequence(made.producer)
            if last is None or last < made.sequence:
                self._window.add(made, checksum)
        self._appending = None

    @property
    def is_session_over(self) -> bool:
        """Whether the session in which the shard is ours has ended. Takes no lock and waits for nothing."""
        return self._closed is None and not self._owned.still_owner()

    def check_owner(self) -> None:
        """Go on as the owner in a new session if the last has ended; end if another owner has the shard."""
        try:
            self._rejoin()
            with self._published:
                if self._closed is None:
                    self._hold_on()
        except Fenced as error:
            self._lose(error)

    def _rejoin(self) -> None:
        """Before the lock is taken: readers need not wait for a metadata store that is away."""
        if not self._owned.still_owner() and self._closed is None:
            self._owner.rejoin(self.ref)

    def _hold_on(self) -> None:
        """On return the session lives in which the shard is ours. What it holds stays, if no other owner has had it."""
        if not self._owned.still_owner():
            self._owned = self._owner.regain(self.ref, self.epoch)

    def _lose(self, error: Fenced) -> None:
        if self._closed is None and error.deleted:
            # What follows the definitions closes it, and records that it has stopped.
            self.leave(UnknownTopic(f"{self.ref}: the topic was deleted: this handle has ended", shard=self.ref))
        elif self._closed is None:
            self.end(f"has ended here: {error}")
            self._on_lost(self)

    def _check_room(self, batch: Batch, size: int) -> None:
        most = self._settings.memory.bytes_max
        if size > most:
            raise TooLarge(
                f"{size} bytes in one append to {self.ref}, which keeps memory.bytes_max "
                f"({most}): send less at once, or raise the setting",
                shard=self.ref,
                size=size,
                limit=most,
            )
        if not self._limits.rejects:
            return
        counted = self._held.bytes + int(batch.sizes().sum())
        self._limits.check_room(self.ref, batch.end - self._held.earliest, counted)
        if self._held.size + size > most:
            raise Full(
                f"{self.ref} is full: it keeps memory.bytes_max ({most}): delete records, or raise the setting",
                shard=self.ref,
            )

    def _fit(self) -> None:
        """Evict the oldest until the rest fits. In bulk: each time costs the length of the lists."""
        most = self._settings.memory.bytes_max
        if self._held.size > most:
            floor = self._held.fit_into(most - most // EVICTED_PART)
            if floor > self._held.earliest:
                self._held.drop_below(floor)
                self._evict_floor, self._evict_reason = floor, Reason.CAP

    def acknowledge(self, ticket: Ticket) -> int:
        """See `OwnedShard`."""
        return ticket.result()

    def is_held(self, ticket: Ticket) -> bool:
        """See `OwnedShard`."""
        return ticket.done

    def commit(self) -> None:
        """Nothing ever waits."""

    @property
    def commits_slowly(self) -> bool:
        """See `OwnedShard`."""
        return False

    def commit_within(self, seconds: float) -> None:
        """Nothing ever waits."""

    def is_inside(self) -> bool:
        """See `OwnedShard`."""
        return self._is_inside()

    def last_sequence(self, producer: int) -> int | None:
        """See `OwnedShard`."""
        with self._published:
            self._remember()
            return self._window.last_sequence(producer)

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """See `OwnedShard`."""
        with self._published:
            self._check_open()
            if offset >= self._held.next or self._held.next == self._start:
                return Page([], [], offset)
            page = Gathered(offset, bytes_max)
            for gap in self._gaps_below(offset):
                page.add_gap(gap)
            for piece, size in self._held.pieces(page.next):
                if not page.is_empty and size > page.left:
                    break
                if isinstance(piece, Gap):
                    page.add_gap(piece)
                else:
                    page.add(piece, size)
            found = page.page()
            return found._replace(events=joined(found.events))

    def read_cached(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page | None:
        """See `ReadShard`; `None` while another thread is at the shard, for that one may wait for metadata."""
        if self._closed is not None or self._is_inside():
            return None
        lock = self._lock
        # Taken inside: an exception (Ctrl-C) right after that must find the block that gives the lock back.
        try:
            return self.read(offset, bytes_max) if lock.acquire(blocking=False) and self._closed is None else None
        finally:
            try:  # noqa: SIM105 - a call before the release could be interrupted
                lock.release()
            except RuntimeError:
                pass  # another thread has it

    def ended(self) -> object:
        """See `ReadShard`."""
        held = self._held
        return held.earliest, held.endings

    def reach(self) -> Reach:
        """See `ReadShard`."""
        held = self._held
        return Reach(held.earliest, self._evict_floor, held.next)

    def _gaps_below(self, offset: int) -> list[Gap]:
        """What a reader at `offset` has missed: records of an earlier life, then evicted and deleted ones."""
        gaps = [Gap(offset, self._start, Reason.LOST)] if offset < self._start else []
        gaps += tombstone(max(offset, self._start), self._evict_floor, self._evict_reason)
        return [*gaps, Gap(offset, self._held.earliest, Reason.DELETED)]

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
        with self._published:
            self._check_open()
            offsets = self._held.of_key(key)
            return self._found(offsets if history else offsets[-1:], start, records_max, bytes_max)

    def read_by_tag(
        self, tag: str, start: int = 0, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> Page:
        """See `OwnedShard`."""
        with self._published:
            self._check_open()
            return self._found(self._held.of_tag(tag), start, records_max, bytes_max)

    def _found(self, offsets: Sequence[int], start: int, records_max: int, bytes_max: int) -> Page:
        """A page of the records at these offsets."""
        batches: list[Batch] = []
        events = tombstone(start, self._evict_floor, self._evict_reason)
        first = bisect_left(offsets, start)
        for offset in offsets[first : first + records_max]:
            batch, size = self._held.one(offset)
            if batches and size > bytes_max:
                break
            batches.append(batch)
            bytes_max -= size
        more = first + len(batches) < len(offsets)
        return Page(batches, events, batches[-1].end if more else max(start, self._held.next))

    def delete(self, what: Deletion) -> int:
        """See `OwnedShard`."""
        # Before the lock: a delete that waits for another reaches nothing that is appended meanwhile.
        head = self._held.next
        with self._published:
            self._check_open()
            if isinstance(what, DeleteBefore):
                offset = min(what.offset, head)
                return self._held.drop_below(offset) if offset > self._held.earliest else 0
            if isinstance(what, RangeDelete):
                return self._held.delete(self._held.within(what.start, min(what.stop, head)))
            if isinstance(what, DeleteOffsets):
                wanted = what.offsets.offsets()
                reach = (int(wanted[0]), min(int(wanted[-1]) + 1, head)) if len(wanted) else (0, 0)
                return self._held.delete(offset for offset in self._held.within(*reach) if offset in what.offsets)
            found = self._held.of_key(what.key) if isinstance(what, DeleteKey) else self._held.of_tag(what.tag)
            return self._held.delete(offset for offset in found if offset < head)

    def evict(self, now_ms: int) -> Evicted:
        """See `OwnedShard`."""
        with self._published:
            self._check_open()
            floor, evicted = plan(self._limits, self.holding(), self._held.stretches, now_ms)
            if evicted.reason is not None:
                self._held.drop_below(floor)
                self._evict_floor, self._evict_reason = floor, evicted.reason
            return evicted

    def holding(self) -> Holding:
        """See `OwnedShard`."""
        with self._published:
            held = self._held
            return Holding(self._evict_floor, held.earliest, held.next, held.live, held.bytes)

    def adopt(self, spec: TopicSpec) -> None:
        """See `OwnedShard`."""
        with self._published:
            self.ref = ShardRef(spec, self.ref.partition)
            self._limits = Limits.of(spec, self._settings.retention)
            self._looked = max(self._looked, spec.partition_generation)

    def wait(self, offset: int, timeout: float | None) -> bool:
        """See `OwnedShard`."""
        with self._published:
            self._published.wait_for(lambda: self._held.next > max(offset, self._start) or self._closed, timeout)
            return self._held.next > max(offset, self._start)

    def offset_at_time(self, timestamp: int) -> int | None:
        """See `OwnedShard`."""
        with self._published:
            self._check_open()
            return self._held.first_at_time(timestamp)

    def offsets(self) -> Offsets:
        """See `OwnedShard`."""
        with self._published:
            self._check_open()
            return Offsets(self._held.earliest, self._evict_floor, durable=0, exported=0, next=self._held.next)

    def published(self) -> int:
        """See `OwnedShard`."""
        return self._held.next

    def lag_end(self) -> int:
        """See `ReadShard`: what a life before this one held is gone, and no place in it can be behind anything."""
        following = self._held.next
        return following if following > self._start else 0

    def flush(self) -> None:
        """Nothing can be made durable here."""
        self._check_open()

    def rotate(self) -> None:
        """There are no files."""
        self._check_open()

    def end(self, reason: str) -> None:
        """Refuse everything from now on, drop the records and wake every reader that waits.

        Wakers run when the caller is out of `deferred`, so after the lock of the shard is free.
        """
        with self._published:
            self._closed = reason
            self._held = HeldRecords(self._held.next)
            self._published.notify_all()
        call_back(deque([Waking(self.wakers, self.ref)]))

    def leave(self, why: UnknownTopic) -> None:
        """See `OwnedShard`."""
        # First: an append that waits for a reservation under the lock is refused too.
        self._left = why
        self.end("was deleted from another directory")

    def _check_open(self) -> None:
        if self._left is not None:
            raise self._left
        if self._closed is not None:
            raise Closed(f"{self.ref} {self._closed}")


def _decision(start: int) -> RecoveryDecision:
    gap = Gap(0, start, Reason.LOST) if start else None
    source = NextSource.CATALOG if start else NextSource.EMPTY
    return RecoveryDecision(next_offset=start, source=source, exact=not start, gap=gap)


class OwnedEpoch(NamedTuple):
    """As what this process takes appends to one shard: an epoch, acquired in a session that must still live."""

    epoch: int
    reserve: Callable[[int], int]
    still_owner: Callable[[], bool]


class MemoryOwner:
    """This process as an owner: acquires shards, and again in a new session where the last one has ended."""

    def __init__(
        self,
        metadata: MetadataStore,
        settings: Settings,
        owner_session: OwnerSession,
        may_own: MayOwn,
        clock: Clock,
    ) -> None:
        self._may_own = may_own
        self._clock = clock
        self._metadata = metadata
        self._settings = settings
        self._owner_session = owner_session

    def acquire(self, ref: ShardRef) -> tuple[OwnedEpoch, ShardState | None]:
        """Own the shard from now on; what was recorded of it before."""
        return self._acquired(ref, lambda owner: lambda _, state: None)

    def rejoin(self, ref: ShardRef) -> None:
        """On return this process has a session that lives; may take long where the metadata store is away.

        `Fenced` if the shard may not be owned here any more.
        """
        if not self._may_own(ref):
            raise Fenced(f"{ref}: may_own of this log refuses it since the session has ended", shard=ref)
        _ = self._owner_session.session

    def regain(self, ref: ShardRef, epoch: int) -> OwnedEpoch:
        """Own the shard as before, in a session that lives; `Fenced` if another owner has had it since `epoch`."""

        def check(owner: Owner) -> Check:
            def refuse(_: object, state: ShardState | None) -> None:
                # By this session: an attempt whose answer was lost.
                if state is None or (state.epoch != epoch and state.owner != owner.session):
                    raise Fenced(
                        f"{ref}: another owner has had it since this one's session ended: open it again", shard=ref
                    )

            return refuse

        try:
            return self._acquired(ref, check)[0]
        except (Conflict, UnknownTopic) as error:
            raise Fenced(str(error), deleted=isinstance(error, UnknownTopic) or None) from error

    def _acquired(self, ref: ShardRef, check: Callable[[Owner], Check]) -> tuple[OwnedEpoch, ShardState | None]:
        session, shard = self._owner_session.session, wanted(ref, self._settings)
        owner = Owner(session.id, self._owner_session.holder)
        before, epoch = acquire(
            self._metadata, [shard], owner, clock=self._clock, take_over=TakeOver.FREELY, check=check(owner)
        )[0]
        reserve = reserve_in_state(self._metadata, shard, epoch, clock=self._clock)
        return OwnedEpoch(epoch, reserve, session.alive), before


class MemoryEngine(ShardedEngine[MemoryShard]):
    """Shards in memory, owned by this process."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock,
        metadata: MetadataStore,
        owner_session: OwnerSession,
        may_own: MayOwn = anywhere,
    ) -> None:
        """`may_own` is asked before an open shard goes on in a new session, without a lock."""
        super().__init__()
        self._settings = settings
        self._clock = clock
        self._metadata = metadata
        self._owner_session = owner_session
        self._owner = MemoryOwner(metadata, settings, owner_session, may_own, clock)

    def may_own(self, ref: ShardRef) -> bool:
        """See `ShardedEngine`; `Moved` if another directory has the shard: its records are in memory there."""
        stored = read_state(self._metadata, wanted(ref, self._settings).key)
        if stored is not None and stored.state.holder not in (None, self._owner_session.holder):
            raise Moved(
                f"{ref} lives in the memory of its owner, last in directory {stored.state.holder}: no other process "
                "can read it; once that owner is gone, an append here takes it over",
                shard=ref,
                holder=stored.state.holder,
            )
        return stored is not None

    def remove_topic(self, topic_id: str, partitions: int) -> None:
        """On return what is open of a topic that another directory has deleted has ended."""
        for partition in range(partitions):
            if self.registry.find(topic_id, partition) is not None:
                self.registry.give_up(topic_id, partition, _end_deleted)

    def _close(self, shard: MemoryShard) -> None:
        shard.end("is closed")

    def _open(self, ref: ShardRef) -> MemoryShard:
        owner = self._owner
        owned, before = owner.acquire(ref)
        start = before.reserved_end if before is not None else 0
        return MemoryShard(
            ref,
            self._settings,
            clock=self._clock,
            owner=owner,
            owned=owned,
            start=start,
            on_lost=self.registry.drop,
        )

    def _remove(self, ref: ShardRef, shard: MemoryShard | None) -> None:
        if shard is not None:
            shard.end("was deleted")


def _end_deleted(shard: MemoryShard | None) -> None:
    if shard is not None:
        shard.end("was deleted from another directory")
