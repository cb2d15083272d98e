"""The workers that look after the open shards of the segment engine, put together: each hands work on to the next ones.

The sync worker looks after each shard first. It waits for no shard, so what it finds to do is asked of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from forebay.clock import Clock
from forebay.disk import Disk
from forebay.engines import OwnedShard
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.storage.background.history import HistoryWorker
from forebay.storage.background.jobs import StorageJobs
from forebay.storage.background.seal import SealWorker
from forebay.storage.background.sync import SyncWorker
from forebay.workers import ItemWorker, Worker

logger = logging.getLogger(__name__)


class SegmentWorkers:
    """Background syncs, sealing, history and reservations of all open shards of the segment engine."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        root: str,
        settings: Settings,
        *,
        collect: Callable[[SegmentShard], object],
        jobs: StorageJobs,
        commit_soon: Callable[[OwnedShard], None],
        on_lost: Callable[[SegmentShard], None],
        relieve: Callable[[], None],
    ) -> None:
        """`root` is the directory of the shards; `collect` removes objects of a shard that nothing needs any more.

        `commit_soon` and `on_lost`, which is called with a shard that another owner has, ask other workers and return
        at once. `relieve` has other threads take over from workers that are stuck.
        """
        self._commit_soon = commit_soon
        self._on_lost = on_lost
        self.history = HistoryWorker(clock, settings, collect)
        self.seal = SealWorker(clock, self.history.notice)
        self._reserving = ItemWorker("forebay-reserving", SegmentShard.reserve_ahead, clock=clock)
        self.sync = SyncWorker(
            disk,
            clock,
            root,
            settings.runtime,
            jobs=jobs,
            hand_on=self.hand_on,
            relieve=relieve,
            unsealed=self.seal.waiting,
        )

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All their threads."""
        return (*self.sync.workers, self.seal.worker, self.history.worker, self._reserving.worker)

    def watch(self, shard: SegmentShard) -> None:
        """Look after a shard that was just opened. Called with its lock held."""
        self.sync.watch(shard)
        self.history.watch(shard)

    def wake(self, shard_id: str) -> None:
        """A shard may have work. Called by its log, under that log's locks: it asks workers and never waits."""
        self.sync.wake(shard_id)
        shard = self.sync.find(shard_id)
        if shard is not None and shard.upkeep.is_commit_due:
            # Not at the next round of the sync worker: a reader that follows class `memory` waits for this.
            self._commit_soon(shard)

    def hand_on(self, shard: SegmentShard) -> None:
        """Ask other workers for what a shard needs that was looked after. Called by the sync worker; never waits."""
        if shard.wal.fenced is not None:
            if not shard.wal.has_left:
                logger.warning("%s: this process has lost the shard: %s", shard.ref, shard.wal.fenced)
            self.sync.drop(shard.ref.id)
            self._on_lost(shard)
            return
        if shard.upkeep.is_commit_due:
            self._commit_soon(shard)
        if shard.upkeep.needs_mending:
            self.seal.ask(shard)
        self.history.notice(shard)
        if shard.wal.writer.touched and shard.wal.writer.wants_reservation:
            self._reserving.ask(shard)

    def drop(self, shard_id: str) -> bool:
        """Begin no more work on the shard; whether none is under way. Does not wait."""
        return all([self.sync.drop(shard_id), self.seal.drop(shard_id), self.history.drop(shard_id)])

    def forget(self, shard_id: str) -> None:
        """Leave the shard alone; on return nothing works on it any more. Waits for an export, so for the store."""
        # In this order: each asks only the next ones for work on the shard.
        self.sync.forget(shard_id)
        self.seal.forget(shard_id)
        self.history.forget(shard_id)
