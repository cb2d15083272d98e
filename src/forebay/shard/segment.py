"""A shard on the segment engine: acquired, recovered, open. The log does the work; this puts it together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from forebay.clock import Clock
from forebay.disk import Disk
from forebay.errors import Corrupt
from forebay.format.descriptor import ShardState
from forebay.settings import WalSettings
from forebay.shard.decision import RecoveryDecision, Situation, decide
from forebay.topics import Durability, TopicSpec, parse_compression, shard_id
from forebay.wal.begin import Start, begin
from forebay.wal.log import Wal
from forebay.wal.sealing import Sealer
from forebay.wal.staging import Ticket
from forebay.wal.survey import Survey, survey
from forebay.wal.turns import is_held
from forebay.wal.upkeep import Upkeep
from forebay.wal.writer import ShardPlace

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.001


class ShardRef(NamedTuple):
    """One partition of a topic."""

    spec: TopicSpec
    partition: int

    @property
    def id(self) -> str:
        """The name of the shard, of its directory and its objects."""
        return shard_id(self.spec.topic_id, self.partition)

    def __str__(self) -> str:
        return f"{self.spec.namespace}/{self.spec.topic}[{self.partition}]"


class SegmentShard:
    """An open shard: its log, the upkeep of it, and how it was recovered."""

    def __init__(self, ref: ShardRef, wal: Wal, upkeep: Upkeep, decision: RecoveryDecision, epoch: int) -> None:
        self.ref = ref
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
        self.read = wal.read
        self.wait = wal.wait
        self.offset_at_time = wal.offset_at_time
        self.offsets = wal.offsets
        self.flush = wal.flush
        self.rotate = wal.rotate

    @property
    def failure(self) -> str | None:
        """Why appends are refused, if they are."""
        return self.wal.failure

    def is_held(self, ticket: Ticket) -> bool:
        """Whether the durability class of a queued append holds already."""
        # Of class memory it does once the offset is reserved: even if it is lost, it never stands for another record.
        reserved = self.durability is Durability.MEMORY and ticket.offset + ticket.count <= self.wal.writer.reserved
        return ticket.done or reserved

    def published(self) -> int:
        """Where whoever wants only new records begins; see `OpenShard`."""
        if self.durability is Durability.MEMORY:
            # Acknowledged in the queue, so these are no new ones.
            self.wal.commit()
        return max(self.wal.head, self.wal.staging.first)

    def commit_within(self, seconds: float) -> None:
        """Settle everything that is queued, unless somebody else is still writing when the time is up."""
        clock = self.wal.writer.clock
        deadline = clock.monotonic() + seconds
        # Not by taking the lock: an exception (Ctrl-C) before it is given back would leave it taken for ever.
        while is_held(self.wal.committing) and not self.wal.is_inside():
            if clock.monotonic() >= deadline:
                return
            clock.sleep(PATIENCE_SECONDS)
        self.wal.commit()

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
        on_bytes: Callable[[int], None] | None = None,
    ) -> SegmentShard:
        """Recover the shard as its owner in `epoch`. What was decided is logged; nothing is written needlessly."""
        facts = survey(disk, directory, settings, on_bytes)
        _check_identity(facts, ref)
        identity = disk.identity(directory) if facts.last is not None else ""
        decision = decide(facts, before, Situation(str(ref), ref.spec.durability, identity, holder))
        zstd_level = parse_compression(ref.spec.compression)
        wal = begin(
            facts,
            Start(next_offset=decision.next_offset, gap=decision.gap),
            ShardPlace(directory, ref.spec.topic_id, ref.partition, epoch, str(ref)),
            settings,
            disk=disk,
            clock=clock,
            durability=ref.spec.durability,
            zstd_level=zstd_level,
        )
        level = logging.INFO if decision.exact and not decision.damage else logging.WARNING
        logger.log(level, "%s: epoch %d, %s", ref, epoch, decision)
        return cls(ref, wal, Upkeep(wal, Sealer(disk, settings, zstd_level)), decision, epoch)


def _check_identity(facts: Survey, ref: ShardRef) -> None:
    for scan in facts.logs:
        if (scan.header.topic_id, scan.header.partition) != (ref.spec.topic_id, ref.partition):
            raise Corrupt(
                f"{scan.path} belongs to shard {scan.header.topic_id}_{scan.header.partition}, not to {ref}: "
                "move it back to its own directory"
            )
