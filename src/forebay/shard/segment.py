"""One open shard of the segment engine: how it is recovered, and every verb that engines and storage use.

Owns the log and the history of the shard; the parts that do the work are made here, in one place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from forebay.appends.producer_window import ProducerWindow, Recalled
from forebay.appends.queue import Producing, QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.catalog import ShardCatalog
from forebay.clock import Clock
from forebay.disk import Disk
from forebay.errors import Corrupt, DataLoss, Fenced, Unavailable, UnknownTopic, Unsupported
from forebay.format.columns.rows import ColumnBytes, Row
from forebay.format.control.offsets import OffsetSet
from forebay.format.index.lookups import Sought
from forebay.format.metadata.descriptor import ShardState, gap_descriptor
from forebay.pages import Page, Reach
from forebay.places import is_local
from forebay.records import Gap, Offsets
from forebay.settings import Settings, WalSettings
from forebay.shard.context import ShardContext
from forebay.shard.deletes import DeleteBefore, DeleteKey, DeleteOffsets, Deletes, DeleteTag, Deletion, RangeDelete
from forebay.shard.eviction import Eviction
from forebay.shard.history import OwnedHistory, ShardHistory
from forebay.shard.limits import Evicted, Holding, Limits
from forebay.shard.lookups import PAGE_RECORDS, Lookups
from forebay.shard.ownership import record_reserved, record_unknown, reserve_in_state, wanted
from forebay.shard.recovery import (
    NextSource,
    RecoveryDecision,
    Situation,
    decide,
    known_in_history,
    known_in_log,
    with_undone,
)
from forebay.shard.tiers import NOTHING, PAGE_BYTES, NoHistory, Tiers, Visible
from forebay.topics import ShardRef, TopicSpec, parse_compression
from forebay.wal.bounds import MemoryBounds
from forebay.wal.log import Wal
from forebay.wal.recovery.resume import Start, resume
from forebay.wal.recovery.survey import Survey, survey
from forebay.wal.sealing import Sealer
from forebay.wal.upkeep import Upkeep
from forebay.wal.writer import ShardPlace

logger = logging.getLogger(__name__)

ROTATE_ATTEMPTS = 20
LOAD_POLL_SECONDS = 0.05
STALL_POLL_SECONDS = 0.05
"""So long an append that finds the queue full waits before it asks again, where the disk does not take the queue."""
_USUAL = Settings()
"""Of a log alone: it has no settings of its own."""


@dataclass(slots=True)
class LoadPause:
    """The pause of a shard's appends while a bulk load is attached. Changed by `loads.attach` alone."""

    since: float | None = None
    """When the pause began, by the monotonic clock; `None` while appends go on."""
    at_risk: tuple[str, tuple[int, int, int]] | None = None
    """The load, and the revisions it was compared with, if a transaction was sent whose outcome is not known."""


class SegmentShard:
    """One shard of the segment engine, open in its owner: the log, its upkeep, and its history. For many threads."""

    poll_seconds: float | None = None

    def __init__(
        self,
        ref: ShardRef,
        wal: Wal,
        sealer: Sealer,
        decision: RecoveryDecision,
        epoch: int,
        *,
        past: OwnedHistory | NoHistory,
        before: ShardState | None,
        settings: Settings,
    ) -> None:
        """`before` is what was recorded of the shard when it was acquired."""
        self.ref = ref
        self.wal = wal
        wal.queue.adopt_generation(ref.spec.partition_generation)
        self.counts = wal.counters
        self.decision = decision
        self.epoch = epoch
        self.durability = wal.durability
        self.wakers = wal.tail.wakers
        self.load_pause = LoadPause()
        self._past = past
        self._tiers = Tiers(wal, past)
        self._visible = Visible(self._tiers, lambda: wal.head)
        self.deletes = Deletes(wal, self._tiers, self._visible, past, before)
        self.lookups = Lookups(wal, self._tiers, lambda: self._visible.ended)
        self._retention = settings.retention
        limits = Limits.of(ref.spec, self._retention)
        self._eviction = Eviction(wal, self.deletes, limits, self._tiers, past.history)
        self._history: ShardHistory | None = None
        if isinstance(past, OwnedHistory):
            disk, clock = wal.writer.disk, wal.writer.clock
            self._history = ShardHistory(wal, past, self.deletes, settings, disk=disk, clock=clock)
        self.upkeep = Upkeep(wal, sealer, self._history.holds if self._history else lambda start, stop: False)

    @property
    def history(self) -> ShardHistory:
        """The exports of the shard; `Unsupported` where it is a log alone."""
        if self._history is None:
            raise Unsupported(f"{self.ref} was opened as a log alone: it has no history")
        return self._history

    # Appending

    def append(self, row: Row, size: int, producing: Producing | None) -> int:
        """See `OwnedShard`."""
        wal = self.wal
        if self._eviction.limits.rejects or producing is not None or wal.policy.acks_in_queue:
            return self.acknowledge(self.stage_one(QueuedRecord(*row, producing, Ticket()), size))
        return wal.append(row, size)

    def stage_one(self, entry: QueuedRecord, size: int) -> Ticket:
        """See `OwnedShard`; `Full` where the topic refuses appends at its caps."""
        if self._eviction.limits.rejects:
            return self._eviction.stage_one(entry, size)
        return self.wal.stage_one(entry, size)

    def stage_many(self, columns: ColumnBytes, producing: Producing | None, ticket: Ticket) -> Ticket:
        """See `OwnedShard`; `Full` where the topic refuses appends at its caps."""
        if self._eviction.limits.rejects:
            return self._eviction.stage_many(columns, producing, ticket)
        return self.wal.stage_many(columns, producing, ticket)

    def recall(self, producing: Producing) -> Recalled | None:
        """See `OwnedShard`."""
        self.wal.check_open()
        return self.wal.queue.recall(producing)

    def stages_slowly(self, count: int) -> bool:
        """See `OwnedShard`: a shard that refuses appends at its caps may have to count what it holds."""
        return self._eviction.limits.rejects and self._eviction.stages_slowly()

    def acknowledge(self, ticket: Ticket) -> int:
        """See `OwnedShard`."""
        # Only class memory acknowledges in the queue: for the others that question would cost each append a call.
        if self.wal.policy.acks_in_queue:
            return self.wal.acknowledge(ticket)
        return self.wal.group.wait(ticket)

    @property
    def commits_slowly(self) -> bool:
        """See `OwnedShard`."""
        writer = self.wal.writer
        if self.wal.policy.syncs_before_ack and writer.syncing:
            return True
        return writer.waits_before(self.wal.queue.next)

    def commit(self) -> None:
        """See `OwnedShard`."""
        self.wal.commit()

    def is_inside(self) -> bool:
        """See `OwnedShard`."""
        return self.wal.group.is_inside() or self.wal.queue.is_inside()

    def flush(self) -> None:
        """See `OwnedShard`."""
        self.wal.flush()

    # Reading

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """See `OwnedShard`."""
        if self._visible.ended is NOTHING:
            page = self._tiers.read(offset, bytes_max)
            if self._visible.ended is NOTHING:
                return page
        return self._visible.read(offset, bytes_max)

    def read_cached(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page | None:
        """See `ReadShard`."""
        page = self._visible.read_cached(offset, lambda start: self.wal.read_cached(start, bytes_max))
        # At the end of the log history may go on: a bulk load lies there.
        return None if page is not None and page.next == offset < self._past.exported else page

    def ended(self) -> object:
        """See `ReadShard`."""
        return self._visible.ended

    def reach(self) -> Reach:
        """See `ReadShard`."""
        floor = self.wal.writer.removals.floor
        return Reach(floor.earliest, floor.evict_floor, self.wal.head)

    def offset_at_time(self, timestamp: int) -> int | None:
        """See `OwnedShard`."""
        return self._visible.offset_at_time(timestamp)

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
        return self.lookups.read_by_key(key, start, history=history, records_max=records_max, bytes_max=bytes_max)

    def read_by_tag(
        self, tag: str, start: int = 0, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> Page:
        """See `OwnedShard`."""
        return self.lookups.read_by_tag(tag, start, records_max=records_max, bytes_max=bytes_max)

    # Limits

    def evict(self, now_ms: int) -> Evicted:
        """See `OwnedShard`."""
        return self._eviction.evict(now_ms)

    def holding(self) -> Holding:
        """See `OwnedShard`."""
        return self._eviction.holding()

    def adopt(self, spec: TopicSpec) -> None:
        """Go by this definition of the same topic from now on: its limits have changed, or its partitions."""
        self.ref = ShardRef(spec, self.ref.partition)
        self.wal.queue.adopt_generation(spec.partition_generation)
        self._eviction.limits = Limits.of(spec, self._retention)

    def leave(self, why: UnknownTopic) -> None:
        """See `OwnedShard`."""
        self.wal.leave(why)

    @property
    def is_session_over(self) -> bool:
        """Whether the session in which the shard was acquired has ended. Takes no lock and waits for nothing."""
        return self.wal.is_session_over

    def check_owner(self) -> None:
        """Stop for ever if the session in which the shard was acquired has ended. Waits for the thread that commits."""
        if self.wal.fenced is None and self.is_session_over:
            self.wal.fence("the session in which it was acquired has ended")

    def rotate(self) -> None:
        """Begin a new file, if the present one has records."""
        for _ in range(ROTATE_ATTEMPTS):
            try:
                return self.wal.rotate()
            except Unavailable:
                if not self.wal.writer.syncing:
                    raise
                # The upkeep was quicker with its next sync: it does not last.
        return self.wal.rotate()

    def reserve_ahead(self) -> None:
        """Ask for more offsets before they are needed, so that no append waits for it."""
        try:
            self.wal.writer.reserve_ahead()
        except Fenced as error:
            self.wal.fence(error)

    def wait(self, offset: int, timeout: float | None) -> bool:
        """Wait until something at or above `offset` can be read; false if the time is up."""
        past, clock = self._past, self.wal.writer.clock
        if offset >= past.exported:
            return self.wal.wait(offset, timeout)
        deadline = None if timeout is None else clock.monotonic() + timeout
        while past.history.is_waiting(offset):
            if deadline is not None and clock.monotonic() >= deadline:
                return False
            clock.sleep(LOAD_POLL_SECONDS)
        return True

    def offsets(self) -> Offsets:
        """The watermarks now."""
        return self.wal.offsets()._replace(exported=self._past.exported)

    def delete(self, what: Deletion) -> int:
        """How many live records it ended: of those published before the call, and no later one.

        On return it holds by the durability class of the topic. What is not there is no error.
        """
        match what:
            case RangeDelete(start, stop):
                return self.deletes.delete_range(start, stop)
            case DeleteOffsets(offsets):
                return self.deletes.delete(offsets)
            case DeleteBefore(offset):
                return self.deletes.delete_before(offset)
            case DeleteKey(key):
                return self.deletes.delete(self._sought(Sought.of_key(key), "this key"))
            case DeleteTag(tag):
                return self.deletes.delete(self._sought(Sought.of_tag(tag), "this tag"))

    def _sought(self, sought: Sought, what: str) -> OffsetSet:
        """Where the records are that a delete means; `DataLoss` if some of them may lie where nothing can be read.

        A delete names offsets: it would not hold for a damaged frame whose file is restored later.
        """
        offsets, unread = self.lookups.offsets(sought)
        if self.wal.stall is not None:
            raise Unavailable(f"{self.ref}: nothing is deleted, records with {what} may be among those: {self.failure}")
        if unread:
            ranges = ", ".join(f"[{gap.start}, {gap.stop})" for gap in unread)
            raise DataLoss(
                f"{self.ref}: offsets {ranges} are damaged and may hold records with {what}: nothing is deleted. "
                'Restore the file or object ("forebay verify" names it), or delete these offsets first with '
                f"delete_by_offset({unread[0].start}, {unread[0].stop}); then repeat it",
                shard=self.ref,
                start=unread[0].start,
                stop=unread[0].stop,
                reason=unread[0].reason.name.lower(),
            )
        return offsets

    @property
    def export_failure(self) -> str | None:
        """Why no more of the shard becomes history, if so: a damaged file, or what the last export ended with."""
        stopped = self.upkeep.stopped
        if stopped is not None:
            return str(stopped)
        return self._history.error if self._history is not None else None

    @property
    def failure(self) -> str | None:
        """Why appends are refused, or why acknowledged ones wait in memory, if so."""
        wal = self.wal
        return wal.failure or (str(wal.stall) if wal.stall is not None else None)

    def is_held(self, ticket: Ticket) -> bool:
        """Whether the durability class of a queued append holds already."""
        return ticket.done or self.wal.is_held_queued(ticket)

    def published(self) -> int:
        """Where a reader of new records alone begins; see `ReadShard`."""
        if self.wal.policy.acks_in_queue:
            # Acknowledged in the queue, so these are no new ones.
            self.wal.commit()
            held = min(self.wal.queue.next, self.wal.writer.reserved)
            return max(self.wal.head, self.wal.queue.first, held)
        return max(self.wal.head, self.wal.queue.first)

    def lag_end(self) -> int:
        """See `ReadShard`. A gap that the log ends in is in its newest file, or is not written yet, or in history."""
        gap, following = self.wal.writer.opening_gap, self.wal.queue.next
        end = gap.start if gap is not None and gap.stop == following else following
        return self.history.segments.before_gaps(self.wal.files.before_gaps(end))

    def commit_within(self, seconds: float) -> None:
        """Commit everything that is queued, unless the log still pauses or is written when the time is up."""
        clock, deadline = self.wal.writer.clock, self.wal.writer.clock.monotonic() + seconds
        self.wal.group.commit_within(seconds, clock)
        if self.wal.stall is not None:
            # The queue stays full until the disk takes it: to ask at once again would only keep a processor busy.
            clock.sleep(max(0.0, min(STALL_POLL_SECONDS, deadline - clock.monotonic())))

    def last_sequence(self, producer: int) -> int | None:
        """The newest acknowledged sequence of an idempotent producer."""
        if self.wal.policy.acks_in_queue:
            # Acknowledged in the queue; the producer window learns it when it is written.
            self.wal.commit()
        return self.wal.queue.last_sequence(producer)

    @classmethod
    def open(
        cls,
        ref: ShardRef,
        directory: str,
        settings: WalSettings,
        *,
        disk: Disk,
        clock: Clock,
        before: ShardState | None,
        epoch: int,
        holder: str,
        around: ShardContext | None = None,
        on_bytes: Callable[[int], None] | None = None,
        on_dirty: Callable[[], None] = lambda: None,
    ) -> SegmentShard:
        """Recover the shard as its owner in `epoch`. What was decided is logged; nothing is written needlessly.

        Without surroundings it is a log alone, as if there were no history. For `on_dirty` see `Wal`.
        """
        facts = survey(disk, directory, settings, on_bytes, trusting=True)
        _check_identity(facts, ref)
        here = Situation(str(ref), ref.spec.durability, disk.identity(directory) if facts.last else "", holder)
        catalog = around.catalog(ref) if around is not None else None
        if around is not None and catalog is not None:
            here = _beside_history(here, catalog, facts, around)
        decision = with_undone(decide(facts, before, here), facts.undone)
        gap = _local_gap(decision, catalog, ref, epoch, clock)
        zstd_level = parse_compression(ref.spec.compression)
        wal = resume(
            facts,
            Start(next_offset=decision.next_offset, gap=gap, set_aside=decision.set_aside),
            ShardPlace(directory, ref.spec.topic_id, ref.partition, epoch, str(ref)),
            settings,
            disk=disk,
            clock=clock,
            durability=ref.spec.durability,
            zstd_level=zstd_level,
            reserved_end=before.reserved_end if before is not None else 0,
            on_dirty=on_dirty,
            **_of_surroundings(around, ref, epoch, before, decision, facts),
        )
        is_sound = decision.exact and not decision.damage and not decision.undone
        logger.log(logging.INFO if is_sound else logging.WARNING, "%s: epoch %d, %s", ref, epoch, decision)
        sealer = Sealer(disk, settings, zstd_level)
        if around is None:
            return cls(ref, wal, sealer, decision, epoch, past=NoHistory(), before=before, settings=_USUAL)
        # A gap that is in the catalog reaches up to where the log begins.
        end = decision.next_offset if decision.source is NextSource.CATALOG else here.frontier
        past = OwnedHistory(around, ref, epoch, disk=disk, clock=clock, end=end)
        return cls(ref, wal, sealer, decision, epoch, past=past, before=before, settings=around.settings)


class _Ties(TypedDict, total=False):
    """What a log is given of the world around it."""

    reserve: Callable[[int], int] | None
    window: ProducerWindow | None
    still_owner: Callable[[], bool] | None
    bounds: MemoryBounds | None


def _of_surroundings(
    around: ShardContext | None,
    ref: ShardRef,
    epoch: int,
    before: ShardState | None,
    decision: RecoveryDecision,
    facts: Survey,
) -> _Ties:
    """What the log needs of its surroundings. A log that is new here inherits what it must recognise as repeats."""
    if around is None:
        return {}
    catalog, shard = around.catalog(ref), wanted(ref, around.settings)
    shared, clock = around.settings.is_shared, around.places.clock
    if shared and before is not None and before.reserved_in_log:
        record_reserved(around.metadata, shard, epoch, decision.next_offset, clock=clock)
    unknown_below = before.producers_unknown_below if before is not None else 0
    if facts.is_empty or decision.set_aside:
        known = known_in_history(catalog, around.places, around.settings.wal, unknown_below)
    else:
        known = known_in_log(facts, unknown_below)
    if known.unknown_below != unknown_below:
        record_unknown(around.metadata, shard, epoch, known.unknown_below, clock=clock)
    return {
        "reserve": reserve_in_state(around.metadata, shard, epoch, clock=clock) if shared else None,
        "window": known.window,
        "still_owner": around.still_owner,
        "bounds": around.bounds,
    }


def _beside_history(here: Situation, catalog: ShardCatalog, facts: Survey, around: ShardContext) -> Situation:
    """The same, with what the catalog says. Raises if what lies before the local files cannot be read from here."""
    shared = around.settings.is_shared
    frontier = covered = catalog.frontier().next
    if not shared:
        covered = 0
        if facts.begins:
            pieces = catalog.descriptors()
            for piece in pieces:
                if piece.gap is None and piece.start < facts.begins:
                    around.places.segment(piece).close()
            inner = next((piece.start for piece in pieces if is_local(piece)), frontier)
            covered = min(inner, frontier)
    return here._replace(frontier=frontier, shared=shared, covered=covered)


def _local_gap(
    decision: RecoveryDecision, catalog: ShardCatalog | None, ref: ShardRef, epoch: int, clock: Clock
) -> Gap | None:
    """The gap that the local log itself records. A gap that history must record is recorded there first."""
    gap = decision.gap
    if catalog is None or gap is None or decision.source is not NextSource.CATALOG:
        return gap
    # In history at once: a reader must not wait for the next record to learn of it.
    described = gap_descriptor(gap, topic_id=ref.spec.topic_id, epoch=epoch, created_at=clock.now_ms())
    catalog.extend(epoch, [described])
    return None


def _check_identity(facts: Survey, ref: ShardRef) -> None:
    for scan in facts.logs:
        if (scan.header.topic_id, scan.header.partition) != (ref.spec.topic_id, ref.partition):
            raise Corrupt(
                f"{scan.path} belongs to shard {scan.header.topic_id}_{scan.header.partition}, not to {ref}: "
                "move it back to its own directory"
            )
