"""A shard on the segment engine: acquired, recovered, open. The log does the work; this puts it together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypedDict

from forebay.appends.producer_window import ProducerWindow
from forebay.appends.ticket import Ticket
from forebay.catalog import ShardCatalog
from forebay.catalog.removals import RecordedRemovals
from forebay.clock import Clock
from forebay.disk import Disk
from forebay.errors import Corrupt, DataLoss, Fenced, Unavailable, Unsupported
from forebay.eviction import Limits
from forebay.format.descriptor import ShardState, gap_descriptor
from forebay.format.offsets import OffsetSet
from forebay.records import Gap, Offsets
from forebay.settings import RetentionSettings, WalSettings
from forebay.shard.archive import Archive
from forebay.shard.decision import RecoveryDecision, Situation, Source, decide, told_of
from forebay.shard.deletes import Deletes, PastRemovals
from forebay.shard.deletion import DeleteBefore, DeleteKey, DeleteRange, DeleteTag, Deletion
from forebay.shard.evicting import Evicting, Read, Weights
from forebay.shard.extents import Extents
from forebay.shard.inheritance import known_in_history, known_in_log
from forebay.shard.lookups import Lookups, Sought
from forebay.shard.places import is_local
from forebay.shard.reservation import reserve_in_state, tell_reserved, tell_unknown
from forebay.shard.surroundings import ShardRef, Surroundings
from forebay.shard.tiers import Tiers
from forebay.shard.visible import Visible
from forebay.topics import Durability, TopicSpec, parse_compression
from forebay.wal.begin import Start, begin
from forebay.wal.log import Wal
from forebay.wal.sealing import Sealer
from forebay.wal.survey import Survey, survey
from forebay.wal.upkeep import Upkeep
from forebay.wal.writer import ShardPlace

logger = logging.getLogger(__name__)

ROTATE_ATTEMPTS = 20
LOAD_POLL_SECONDS = 0.05


class SegmentShard:
    """An open shard: its log, the upkeep of it, and how it was recovered; with an archive, its history too."""

    def __init__(
        self,
        ref: ShardRef,
        wal: Wal,
        upkeep: Upkeep,
        decision: RecoveryDecision,
        epoch: int,
    ) -> None:
        self.ref = ref
        self._archive: Archive | None = None
        self._still_owner: Callable[[], bool] = lambda: True
        self.wal = wal
        self.upkeep = upkeep
        self.decision = decision
        self.epoch = epoch
        self.durability = wal.durability
        self.wakers = wal.wakers
        self.poll_seconds: float | None = None
        # The log's own methods, so that the hot path has no call in between.
        self.stage_one = wal.stage_one
        self.stage_many = wal.stage_many
        self.settle = wal.settle
        self.commit = wal.commit
        visible = Visible(wal, lambda: wal.head)
        self.deletes = Deletes(wal, visible, Extents(wal.files))
        self.read, self.offset_at_time = visible.read, visible.offset_at_time
        self.lookups = Lookups(wal, wal.read, lambda: visible.ended)
        self._limit(wal.read, Weights(wal.files, wal.read, lambda start, stop: []), RetentionSettings())
        self.read_by_key, self.read_by_tag = self.lookups.read_by_key, self.lookups.read_by_tag
        self.flush = wal.flush

    def keep_history(self, archive: Archive, around: Surroundings, before: ShardState | None) -> None:
        """From now on what the log does not have is read from history. `before` is what was recorded of the shard."""
        self._archive, self._still_owner = archive, around.still_owner
        tiers = Tiers(self.wal, archive)
        visible = Visible(tiers, lambda: self.wal.head)
        past = PastRemovals(RecordedRemovals(archive.catalog), self.epoch, lambda: archive.exported)
        extents = Extents(self.wal.files, archive.catalog, around.places)
        self.deletes = Deletes(self.wal, visible, extents, past, before)
        self.read, self.offset_at_time = visible.read, visible.offset_at_time
        self.lookups = Lookups(self.wal, tiers.read, lambda: visible.ended, archive)
        weights = Weights(self.wal.files, tiers.read, archive.segments, lambda: archive.compactions)
        self._limit(tiers.read, weights, around.settings.retention)
        self.read_by_key, self.read_by_tag = self.lookups.read_by_key, self.lookups.read_by_tag
        archive.heed(self.deletes)

    def _limit(self, read: Read, weights: Weights, settings: RetentionSettings) -> None:
        """Heed the caps and the time to live of the topic."""
        self._retention = settings
        self._evicting = Evicting(self.wal, self.deletes, Limits.of(self.ref.spec, settings), read, weights)
        self.evict, self.holding = self._evicting.evict, self._evicting.holding
        self.adopt(self.ref.spec)

    def adopt(self, spec: TopicSpec) -> None:
        """Go by this definition of the same topic from now on: its limits have changed, or its partitions."""
        self.ref, limits = ShardRef(spec, self.ref.partition), Limits.of(spec, self._retention)
        self._evicting.limits = limits
        gate = self._evicting if limits.rejects else self.wal
        self.stage_one, self.stage_many = gate.stage_one, gate.stage_many

    @property
    def archive(self) -> Archive:
        """The way into history."""
        if self._archive is None:
            raise Unsupported(f"{self.ref} was opened as a log alone: it has no history")
        return self._archive

    def check_owner(self) -> None:
        """Stop for ever if the session in which the shard was acquired has ended."""
        if self.wal.fenced is None and not self._still_owner():
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
            self.wal.fence(str(error))

    def wait(self, offset: int, timeout: float | None) -> bool:
        """Wait until something at or above `offset` can be read; false if the time is up."""
        archive, clock = self._archive, self.wal.writer.clock
        if archive is None or offset >= archive.exported:
            return self.wal.wait(offset, timeout)
        deadline = None if timeout is None else clock.monotonic() + timeout
        while archive.history.is_waiting(offset):
            if deadline is not None and clock.monotonic() >= deadline:
                return False
            clock.sleep(LOAD_POLL_SECONDS)
        return True

    def offsets(self) -> Offsets:
        """The watermarks now."""
        offsets = self.wal.offsets()
        return offsets if self._archive is None else offsets._replace(exported=self._archive.exported)

    def delete(self, what: Deletion) -> int:
        """How many live records it ended: of those published before the call, and no later one.

        On return it holds by the durability class of the topic. What is not there is no error.
        """
        match what:
            case DeleteRange(start, stop):
                return self.deletes.delete_range(start, stop)
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
        if unread:
            ranges = ", ".join(f"[{gap.start}, {gap.stop})" for gap in unread)
            raise DataLoss(
                f"{self.ref}: offsets {ranges} are damaged and may hold records with {what}: nothing is deleted. "
                'Restore the file or object ("forebay verify" names it), or delete these offsets first with '
                f"delete_by_offset({unread[0].start}, {unread[0].stop}); then repeat it"
            )
        return offsets

    @property
    def export_failure(self) -> str | None:
        """Why no more of the shard becomes history, if so: a damaged file, or what the last export ended with."""
        stopped = self.upkeep.stopped
        if stopped is not None:
            return str(stopped)
        return self._archive.error if self._archive is not None else None

    @property
    def failure(self) -> str | None:
        """Why appends are refused, if they are."""
        return self.wal.failure

    def is_held(self, ticket: Ticket) -> bool:
        """Whether the durability class of a queued append holds already."""
        return ticket.done or self.wal.is_held_queued(ticket)

    def published(self) -> int:
        """Where whoever wants only new records begins; see `OpenShard`."""
        if self.durability is Durability.MEMORY:
            # Acknowledged in the queue, so these are no new ones.
            self.wal.commit()
        return max(self.wal.head, self.wal.queue.first)

    def commit_within(self, seconds: float) -> None:
        """Commit everything that is queued, unless the log still pauses or is written when the time is up."""
        self.wal.commit_within(seconds)

    def last_sequence(self, producer: int) -> int | None:
        """The newest acknowledged sequence of an idempotent producer."""
        if self.durability is Durability.MEMORY:
            # Acknowledged in the queue; the window hears of it when it is written.
            self.wal.commit()
        return self.wal.writer.window.last_sequence(producer)

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
        around: Surroundings | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> SegmentShard:
        """Recover the shard as its owner in `epoch`. What was decided is logged; nothing is written needlessly.

        Without surroundings it is a log alone, as if there were no history.
        """
        facts = survey(disk, directory, settings, on_bytes, trusting=True)
        _check_identity(facts, ref)
        identity = disk.identity(directory) if facts.last is not None else ""
        here = Situation(str(ref), ref.spec.durability, identity, holder)
        catalog = around.catalog(ref) if around is not None else None
        if around is not None and catalog is not None:
            here = _beside_history(here, catalog, facts, around)
        decision = told_of(decide(facts, before, here), facts.undone)
        gap = _local_gap(decision, catalog, ref, epoch, clock)
        zstd_level = parse_compression(ref.spec.compression)
        wal = begin(
            facts,
            Start(next_offset=decision.next_offset, gap=gap, set_aside=decision.set_aside),
            ShardPlace(directory, ref.spec.topic_id, ref.partition, epoch, str(ref)),
            settings,
            disk=disk,
            clock=clock,
            durability=ref.spec.durability,
            zstd_level=zstd_level,
            reserved_end=before.reserved_end if before is not None else 0,
            **_of_surroundings(around, ref, epoch, before, decision, facts),
        )
        is_whole = decision.exact and not decision.damage and not decision.undone
        level = logging.INFO if is_whole else logging.WARNING
        logger.log(level, "%s: epoch %d, %s", ref, epoch, decision)
        sealer = Sealer(disk, settings, zstd_level)
        if around is None:
            return cls(ref, wal, Upkeep(wal, sealer), decision, epoch)
        archive = _archive(wal, around, ref, epoch, decision, here.frontier)
        shard = cls(ref, wal, Upkeep(wal, sealer, archive.holds), decision, epoch)
        shard.keep_history(archive, around, before)
        return shard


def _archive(
    wal: Wal, around: Surroundings, ref: ShardRef, epoch: int, decision: RecoveryDecision, frontier: int
) -> Archive:
    """The way into history of a shard that was recovered so, when history ended at `frontier`."""
    # A gap that the catalog was told of reaches up to where the log begins.
    end = decision.next_offset if decision.source is Source.CATALOG else frontier
    return Archive(wal, around, ref, epoch, disk=wal.writer.disk, clock=wal.writer.clock, frontier=end)


class _Ties(TypedDict, total=False):
    """What a log is given of the world around it."""

    reserve: Callable[[int], int] | None
    window: ProducerWindow | None
    still_owner: Callable[[], bool] | None


def _of_surroundings(
    around: Surroundings | None,
    ref: ShardRef,
    epoch: int,
    before: ShardState | None,
    decision: RecoveryDecision,
    facts: Survey,
) -> _Ties:
    """What the log needs of its surroundings. A log that is new here inherits what it must recognise as repeats."""
    if around is None:
        return {}
    catalog = around.catalog(ref)
    shared = around.settings.is_shared
    if shared and before is not None and before.reserved_in_log:
        tell_reserved(around.metadata, catalog.keys.state, epoch, decision.next_offset)
    unknown_below = before.producers_unknown_below if before is not None else 0
    if facts.is_empty or decision.set_aside:
        known = known_in_history(catalog, around.places, around.settings.wal, unknown_below)
    else:
        known = known_in_log(facts, unknown_below)
    if known.unknown_below != unknown_below:
        tell_unknown(around.metadata, catalog.keys.state, epoch, known.unknown_below)
    return {
        "reserve": reserve_in_state(around.metadata, catalog.keys.state, epoch) if shared else None,
        "window": known.window,
        "still_owner": around.still_owner,
    }


def _beside_history(here: Situation, catalog: ShardCatalog, facts: Survey, around: Surroundings) -> Situation:
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
    """The hole that the local log itself tells of. What history must tell of is told there first."""
    gap = decision.gap
    if catalog is None or gap is None or decision.source is not Source.CATALOG:
        return gap
    # In history at once, so that nobody waits for the next record to hear of it.
    told = gap_descriptor(gap, topic_id=ref.spec.topic_id, epoch=epoch, created_at=clock.now_ms())
    catalog.extend(epoch, [told])
    return None


def _check_identity(facts: Survey, ref: ShardRef) -> None:
    for scan in facts.logs:
        if (scan.header.topic_id, scan.header.partition) != (ref.spec.topic_id, ref.partition):
            raise Corrupt(
                f"{scan.path} belongs to shard {scan.header.topic_id}_{scan.header.partition}, not to {ref}: "
                "move it back to its own directory"
            )
