"""The worker that looks after a data directory as a whole: owners, bulk loads, shards that moved, deleted topics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from forebay.blobs import Stat
from forebay.cleanup.collector import named_by
from forebay.cleanup.deleted_topics import Deletions, KeepsTopics
from forebay.cleanup.moved_shards import clearing_of_moved
from forebay.cleanup.objects import ObjectCleanup
from forebay.clock import Clock
from forebay.definitions import Definitions
from forebay.disk import Disk
from forebay.engines import OwnedShard
from forebay.engines.directory import Engines
from forebay.engines.memory import MemoryShard
from forebay.errors import ForebayError
from forebay.loads.service import AloneWith, Loads
from forebay.places import is_private
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.storage.background.history import FIRST_SWEEP_SECONDS, LOOK_SECONDS
from forebay.topics import ShardRef, refs_of
from forebay.workers import AtWork, Worker

logger = logging.getLogger(__name__)

FINISH_PAUSE_SECONDS = 1.0
"""How soon a deletion that could not be finished is tried again; each failure doubles it."""


class CleanupWorker:
    """Looks after the directory as a whole. What fails is logged and tried again, and stops nothing else."""

    def __init__(
        self,
        engines: Engines,
        objects: ObjectCleanup,
        definitions: Definitions,
        deletions: Deletions,
        loads: Loads,
        settings: Settings,
        *,
        holder: str,
        disk: Disk,
        clock: Clock,
        was_here: Callable[[ShardRef], bool],
        open_shard: Callable[[ShardRef], OwnedShard],
        alone_with: AloneWith,
        relieve: Callable[[], None],
    ) -> None:
        """`holder` is this data directory.

        `was_here` says whether a shard may be opened here in the background, and `open_shard` does that.
        `relieve` has other threads take over from stuck workers.
        """
        self._engines = engines
        self._objects = objects
        self._holder = holder
        self._alone_with = alone_with
        self._was_here = was_here
        self._loads = loads
        self._definitions = definitions
        self._deletions = deletions
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._cleared_at = float("-inf")
        self._sweep_at = clock.monotonic() + min(FIRST_SWEEP_SECONDS, settings.export.sweep_interval_s)
        self._handoff_swept_at = float("-inf")
        self._finished_at = clock.monotonic()
        self._finish_pause_s = FINISH_PAUSE_SECONDS
        self._open_shard = open_shard
        self._relieve = relieve
        self._at_work = AtWork()
        self.worker = Worker("forebay-cleanup", self.step, clock=clock, interval_s=LOOK_SECONDS)

    def look_for_moved(self) -> None:
        """A shard was given up or lost here: see to its files at the next step."""
        self._cleared_at = float("-inf")

    def step(self) -> None:
        """Everything that is due. May run in two threads, if the first is stuck: each part is begun by one of them."""
        self._relieve()
        # The look costs a fraction of the work for a shard, and nearly all sessions live. What is over is seen to
        # shard by shard: those in memory go on in a new session, or end if another owner has had them.
        shards: list[SegmentShard | MemoryShard] = [*self._engines.segment.shards(), *self._engines.memory.shards()]
        for shard in shards:
            if shard.is_session_over:
                self._for_shard(shard, shard.check_owner)
        self._safely(self._loads.step)
        now = self._clock.monotonic()
        if self._is_finishing_due(now):
            self._finished_at = now
            self._safely(self._finish_deletions)
        if now - self._cleared_at >= self._settings.retention.check_interval_s:
            self._cleared_at = now
            self._safely(partial(self.clear_moved, wait=False))
        if now >= self._sweep_at:
            self._sweep_at = now + self._settings.export.sweep_interval_s
            self._sweep()
        if now - self._handoff_swept_at >= self._settings.export.sweep_interval_s:
            self._handoff_swept_at = now
            self._safely(self._sweep_handoff)

    def _is_finishing_due(self, now: float) -> bool:
        """Whether to look for deletions that are not finished: soon after one failed here, else now and then."""
        check_s = self._settings.retention.check_interval_s
        pause_s = min(self._finish_pause_s, check_s) if self._deletions.is_behind else check_s
        return now - self._finished_at >= pause_s

    def _finish_deletions(self) -> None:
        """Remove what deleted topics left, here and where a process has died at it; less often while that fails."""
        is_left = bool(self._deletions.finish())
        self._finish_pause_s = 2 * self._finish_pause_s if is_left else FINISH_PAUSE_SECONDS

    def clear_moved(self, *, wait: bool = True) -> None:
        """Local files of shards that another directory has now: gone if history has them, else set aside.

        Of a topic that another directory has deleted nothing is left; a shard of it that is still open here stops.
        """
        engine = self._engines.segment
        late = self._deletions.notes.late_objects()
        deleted = {shard for topic in late for shard in topic.shard_ids}
        for piece in clearing_of_moved(engine, self._disk, self._defined, deleted, wait=wait):
            self._safely(piece)
        engines: list[KeepsTopics] = [self._engines.memory, self._engines.rocksdb]
        for topic in late:
            self._safely(partial(self._deletions.clear_here, topic, engines, self._local_shards))

    def _defined(self) -> list[ShardRef]:
        """Every shard that a topic defines."""
        return [ref for spec in self._definitions.all() for ref in refs_of(spec)]

    def _local_shards(self) -> set[str]:
        """The ids of shards on engine `segment` that have files here or are open."""
        engine = self._engines.segment
        return {*self._disk.list_directory(engine.directory), *(shard.ref.id for shard in engine.shards())}

    def _sweep(self) -> None:
        """Each of them, whatever becomes of the others: the next time is far off."""
        self._safely(self._deletions.sweep_late)
        self._safely(self.collect_directory)
        for store in self._engines.segment.places.stores:
            self._safely(partial(store.abort_stale_uploads, self._settings.export.orphan_grace_s))

    def collect_directory(self) -> None:
        """Collect what loads and shards that are not open here have left; nothing while a topic cannot be read."""
        owned = {shard.ref.id for shard in self._engines.segment.shards()}
        self._objects.collect_directory(self._definitions.every, owned)

    def _sweep_handoff(self) -> None:
        """Remove what an unfinished seal has left where topics are handed over, and what history names no more.

        Only the directory that has a shard may do that, and while the shard is open: a seal may name it again.
        """
        engine = self._engines.segment
        store = engine.places.store if not self._settings.is_shared else None
        if store is None:
            return
        found: dict[str, list[Stat]] = {}
        for stat in self._objects.collector.may_go(store.list()):
            found.setdefault(stat.key.partition("/")[0], []).append(stat)
        present = {shard.ref.id for shard in engine.shards()}
        for ref in [ref for ref in self._defined() if ref.id in found]:
            self._safely(partial(self._sweep_shard, ref, found[ref.id], is_open=ref.id in present))

    def _sweep_shard(self, ref: ShardRef, found: Sequence[Stat], *, is_open: bool) -> None:
        """Collect what the shard has where topics are handed over. One of which history names it all is not opened."""
        engine = self._engines.segment
        if not is_open:
            if not self._was_here(ref):
                return
            named = named_by(engine.catalog(ref), lambda piece: not is_private(piece))
            if not self._objects.collector.may_go(found, named):
                return
        shard = self._open_shard(ref)
        assert isinstance(shard, SegmentShard), "others are not handed over"
        # A thread that gives the shard up waits for the end of it.
        self._alone_with(shard, self._objects.collect_owned)

    def _for_shard(self, shard: OwnedShard, work: Callable[[], object]) -> None:
        """Work for one shard, unless another thread is at that, and is stuck."""
        if self.worker.goes_on():
            with self._at_work.at(shard.ref.id) as is_free:
                if is_free:
                    self._safely(work)

    def _safely(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (ForebayError, OSError) as error:
            logger.warning("will be tried again: %s", error)
            self.worker.note_failure(error)
        except Exception as error:
            logger.exception("the upkeep of the directory failed and will be tried again")
            self.worker.note_failure(error)
