"""The worker that makes appends of all shards durable in the background, and rotates files that have reached their age.

Its own thread goes round the shards that are due something, and waits for none of them: a log that is in use is left
for the next round, or its sync is begun by the thread that writes it. What touches the files of one shard is a job
with that shard as its key: a disk that hangs for some shards holds up these alone. Where many are due, one sync of
their file system is made in the thread itself. Other workers are asked for what copies files, commits, calls back or
waits for a store.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Collection
from functools import partial
from heapq import nsmallest
from typing import Final

from forebay.appends.callbacks import left_due
from forebay.appends.waiting import is_held
from forebay.clock import Clock
from forebay.disk import Disk, SyncFailedBefore
from forebay.executor import WorkClass
from forebay.settings import RuntimeSettings
from forebay.shard import SegmentShard
from forebay.storage.background.jobs import StorageJobs
from forebay.wal.sync_request import SyncRequest
from forebay.wal.upkeep import AT_ONCE, MOMENT_SECONDS, NEVER
from forebay.wal.writer import SyncTarget
from forebay.workers import AtWork, ItemWorker, Worker

logger = logging.getLogger(__name__)

SYNC_WORKER = "forebay-sync"
"""What the status of workers calls the thread that syncs."""
AGE_CHECK_SECONDS = 1.0
FAILED: Final = "%s: upkeep failed and will be tried again"
STUCK_SECONDS = 1.0
"""A sync that takes longer is left to its thread: another goes on with the syncs of other shards."""
SEALING_SECONDS = 5.0
"""A shard whose files another worker was asked to seal is looked at again after that, if they are not sealed yet."""
UNSEALED_MAX = 256
"""While so many shards wait to be sealed, no file is rotated by age."""
BEGIN_SECONDS = 0.1
"""So long a sync of many logs waits, once for all of them, for the threads that have some of these logs."""
RETRY_SECONDS = 0.1
"""A log that is in use is looked at again after that."""
UPKEEP: Final = WorkClass(name="upkeep", threads=8, slow_s=STUCK_SECONDS, per_key=1)
"""Marks and rotations by age, which write the file of a shard."""


class FileSystem:
    """Where the logs of a directory lie: one sync makes all of them durable, at less cost than one for each of many."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._root = root
        self._identity: str | None = None

    def holds(self, shard: SegmentShard) -> bool:
        """Whether the log lies here, and not in another file system that is mounted below; false if that is unknown."""
        try:
            if self._identity is None:
                self._identity = self._disk.identity(self._root)
            return shard.wal.writer.identity == self._identity
        except OSError as error:
            logger.warning("%s: in which file system it lies is not known: %s", shard.ref, error)
            return False

    def sync(self) -> OSError | None:
        """Make everything that was written here durable; why that failed, if it did.

        The failure may be that of any file there, also of another process: then no file counts as synced.
        """
        try:
            self._disk.sync_filesystem(self._root)
        except OSError as error:
            return error
        return None


class SyncWorker:
    """Background syncs, marks and rotation by age of all shards that have something to do."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        root: str,
        settings: RuntimeSettings,
        *,
        jobs: StorageJobs,
        hand_on: Callable[[SegmentShard], None],
        relieve: Callable[[], None],
        unsealed: Callable[[], int] = lambda: 0,
    ) -> None:
        """`hand_on` asks other workers for what a shard that was looked after needs; it never waits.

        `relieve` has other threads take over from workers that are stuck. `unsealed` says how many shards wait for
        the worker that seals.
        """
        self._jobs = jobs
        # Fewer than this many shards are synced one by one, and each of them may hang.
        self._singly = WorkClass(name="sync", threads=settings.shards_syncfs_min, slow_s=STUCK_SECONDS, per_key=1)
        self._handed_out: set[str] = set()
        """Shards for which a job waits or is at work."""
        self._hand_on = hand_on
        self._filesystem = FileSystem(disk, root)
        self._clock = clock
        self._ages_checked = clock.monotonic()
        self._old_at = float("inf")
        """No file of a watched shard that has nothing else to do reaches its age before that."""
        self._unsealed = unsealed
        self._settings = settings
        self._relieve = relieve
        self._callbacks: ItemWorker[SegmentShard] = ItemWorker(
            "forebay-callbacks", lambda shard: shard.wal.group.call_back(), clock=clock
        )
        self._busy: dict[str, float] = {}
        """When shards with something to do are looked at, by the monotonic clock. Only those that are watched."""
        self._watched: dict[str, SegmentShard] = {}
        self._at_work = AtWork()
        self.worker = Worker(
            SYNC_WORKER,
            self._step_with_jobs,
            clock=clock,
            interval_s=AGE_CHECK_SECONDS,
            delay_s=settings.maintenance_interval_ms / 1000,
            stuck_s=STUCK_SECONDS,
        )

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Its threads: the one that syncs, and the one that calls back."""
        return self.worker, self._callbacks.worker

    def watch(self, shard: SegmentShard) -> None:
        """Look after the shard from now on: at once if it has work, and whenever `wake` is called for it."""
        with self.worker.changed:
            self._watched[shard.ref.id] = shard
        self._note_age(shard)
        if shard.upkeep.is_busy:
            self.wake(shard.ref.id)

    def step(self) -> None:
        """One round over all shards that are due something, in the calling thread alone. Called by tests."""
        self._step(self._do)

    def _step_with_jobs(self) -> None:
        """One round, in which other threads do what touches the files of a shard."""
        self._step(self._hand_out)

    def _step(self, do: Callable[[WorkClass, SegmentShard], None]) -> None:
        self._relieve()
        self.find_old()
        self._with_callbacks(partial(self._round, do))
        if self._busy:
            self.worker.wake()

    def _with_callbacks(self, work: Callable[[], list[SegmentShard]]) -> None:
        """Work on shards. Callbacks that become due are called by a thread of their own, without any lock.

        They may open or delete topics, which waits for the work, and they may take long.
        """
        with left_due() as queues:
            shards = work()
        left = {id(queue) for queue in queues}
        for shard in shards:
            if id(shard.wal.queue.due) in left:
                self._callbacks.ask(shard)

    def find_old(self) -> None:
        """Files reach their age without anything happening to them: look at all shards once the first may have.

        The oldest are rotated, as many as can be sealed soon: each that waits for that takes a descriptor and memory.
        """
        now = self._clock.monotonic()
        if now - self._ages_checked < AGE_CHECK_SECONDS or now < self._old_at:
            return
        self._ages_checked = now
        with self.worker.changed:
            # Before the look: what is noted from here on counts for the next one.
            self._old_at = float("inf")
        room = max(0, UNSEALED_MAX - self._unsealed())
        oldest = nsmallest(room, (shard for shard in self._watched.copy().values() if shard.upkeep.is_old), key=_old_at)
        for shard in self._watched.copy().values():
            self._note_age(shard)
        for shard in oldest:
            self._enlist(shard, AT_ONCE)

    def _note_age(self, shard: SegmentShard) -> None:
        """Look at the ages of files again when that of this shard has reached its own."""
        old_at = shard.upkeep.old_at
        if old_at < self._old_at:
            with self.worker.changed:
                self._old_at = min(self._old_at, old_at)

    def drop(self, shard_id: str) -> bool:
        """Begin no more work on the shard; whether none is under way. Does not wait."""
        with self.worker.changed:
            self._watched.pop(shard_id, None)
            self._busy.pop(shard_id, None)
        return self._at_work.is_idle(shard_id)

    def forget(self, shard_id: str) -> None:
        """Leave the shard alone from now on; on return nothing works on it any more, and it never comes back."""
        self.drop(shard_id)
        self._at_work.wait_idle(shard_id)

    def _round(self, do: Callable[[WorkClass, SegmentShard], None]) -> list[SegmentShard]:
        now = self._clock.monotonic()
        looked_at = [self._watched.get(shard_id) for shard_id, at in self._busy.copy().items() if at <= now]
        shards = [shard for shard in looked_at if shard is not None and shard.ref.id not in self._handed_out]
        together = {shard for shard in shards if shard.upkeep.is_sync_due}
        if len(together) >= self._settings.shards_syncfs_min:
            together = {shard for shard in together if self._filesystem.holds(shard)}
            self.sync_together(together)
        else:
            together.clear()
        for shard in shards:
            if not self.worker.goes_on():
                break
            if shard.upkeep.is_sync_due and shard not in together:
                do(self._singly, shard)
            elif shard.upkeep.is_write_due:
                do(UPKEEP, shard)
            else:
                self._look_after(shard)
        return shards

    def _hand_out(self, kind: WorkClass, shard: SegmentShard) -> None:
        """Have another thread do this work for the shard, which no round looks at meanwhile."""
        self._handed_out.add(shard.ref.id)

        def work() -> None:
            try:
                self._with_callbacks(partial(self._done, kind, shard))
            finally:
                self._handed_out.discard(shard.ref.id)
                if shard.ref.id in self._busy:
                    self.worker.wake()

        if not self._jobs.start(kind, shard.ref.id, work):
            self._handed_out.discard(shard.ref.id)

    def _done(self, kind: WorkClass, shard: SegmentShard) -> list[SegmentShard]:
        self._do(kind, shard)
        return [shard]

    def _do(self, kind: WorkClass, shard: SegmentShard) -> None:
        """Sync or write the shard's file, unless other threads write it for longer than a moment."""
        with self._at_work.at(shard.ref.id) as is_free:
            if not is_free or not self._is_watched(shard):
                return
            try:
                if kind is self._singly:
                    shard.upkeep.sync()
                if shard.upkeep.is_write_due and not shard.upkeep.is_in_use(MOMENT_SECONDS):
                    shard.upkeep.write_due(may_rotate=self._unsealed() < UNSEALED_MAX)
            except Exception as error:
                logger.exception(FAILED, shard.ref)
                self.worker.note_failure(error)
        self._look_after(shard)

    def _look_after(self, shard: SegmentShard) -> None:
        """What needs no file: callbacks, and what other workers are asked for. Waits for nothing.

        One shard's trouble is logged and does not stop the others.
        """
        next_at = AT_ONCE
        with self._at_work.at(shard.ref.id) as is_free:
            if not is_free or not self._is_watched(shard):
                return
            try:
                shard.upkeep.call_back_left()
                shard.wal.do_errands()
                # Out first and in again: a shard that gets work meanwhile must find itself out and come back by itself.
                self._busy.pop(shard.ref.id, None)
                if self._is_watched(shard):
                    self._hand_on(shard)
                next_at = shard.upkeep.due_at
                if is_held(shard.wal.committing):
                    next_at = max(next_at, self._clock.monotonic() + RETRY_SECONDS)
                if shard.upkeep.rotated():
                    # Another worker was asked to seal them. Where that fails, it is asked again.
                    next_at = min(next_at, self._clock.monotonic() + SEALING_SECONDS)
                self._note_age(shard)
            except Exception as error:
                logger.exception(FAILED, shard.ref)
                self.worker.note_failure(error)
            if next_at < NEVER:
                self._enlist(shard, next_at)

    def wake(self, shard_id: str) -> None:
        """The shard may have work. Called by its log, under that log's locks; nothing if the shard is not watched."""
        shard = self._watched.get(shard_id)
        if shard is None:
            return
        look_at = shard.upkeep.due_at
        if look_at == NEVER or shard.upkeep.rotated():
            # A log that was fenced has no work, and is looked at all the same: to be given up.
            look_at = AT_ONCE
        if self._busy.get(shard_id, NEVER) > look_at:
            with self.worker.changed:
                self.worker.wake()
                # Last: a shard that is in here is looked after, also if an interrupt (Ctrl-C) comes now.
                self._enlist(shard, look_at)

    def find(self, shard_id: str) -> SegmentShard | None:
        """The shard, if it is watched. Takes no lock."""
        return self._watched.get(shard_id)

    def _enlist(self, shard: SegmentShard, look_at: float) -> None:
        """The first round from then on looks at the shard, unless it was given up meanwhile."""
        with self.worker.changed:
            if self._is_watched(shard):
                self._busy[shard.ref.id] = min(look_at, self._busy.get(shard.ref.id, NEVER))

    def _is_watched(self, shard: SegmentShard) -> bool:
        return self._watched.get(shard.ref.id) is shard

    def sync_together(self, shards: Collection[SegmentShard]) -> None:
        """Many dirty files: one sync of their file system costs less than one each.

        Whatever happens, each sync that was begun gets its outcome: until then the log's own syncs wait for it.
        """
        targets: list[tuple[SegmentShard, SyncTarget]] = []
        failure: OSError | None = OSError(errno.EINTR, "a sync was interrupted")
        with self._at_work.at_many(shard.ref.id for shard in shards) as free:
            try:
                targets = self._begun([shard for shard in shards if shard.ref.id in free])
                failure = self._filesystem.sync()
            finally:
                # All of them first: a log that another thread writes for long keeps no other from its answer.
                outcomes = [_outcome(target, failure) for _, target in targets]
                for (shard, target), outcome in zip(targets, outcomes, strict=True):
                    shard.wal.report_background_sync(target, outcome)
                for (shard, target), outcome in zip(targets, outcomes, strict=True):
                    self._end_sync(shard, target, outcome)

    def _begun(self, shards: list[SegmentShard]) -> list[tuple[SegmentShard, SyncTarget]]:
        """Begin the syncs of these shards; those that have begun. Waits once for all logs in use."""
        unanswered, answered = [shard.ref for shard in shards], threading.Event()

        def note() -> None:
            unanswered.pop()
            if not unanswered:
                answered.set()

        requests = [(shard, SyncRequest(shard.wal, note)) for shard in shards]
        if unanswered:
            answered.wait(BEGIN_SECONDS)
        ended = [(shard, request.end()) for shard, request in requests]
        return [(shard, target) for shard, target in ended if target is not None]

    def _end_sync(self, shard: SegmentShard, target: SyncTarget, failure: OSError | None) -> None:
        try:
            if failure is None:
                shard.wal.end_background_sync(target)
            else:
                shard.wal.fail_background_sync(target, failure)
        except Exception as error:
            logger.exception(FAILED, shard.ref)
            self.worker.note_failure(error)


def _outcome(target: SyncTarget, failure: OSError | None) -> OSError | None:
    """Why one file was not synced: where another has failed before, each is asked for itself."""
    if not isinstance(failure, SyncFailedBefore):
        return failure
    try:
        target.active.file.sync()
    except OSError as error:
        return error
    except Exception:
        logger.exception("%s: a sync failed", target.active.path)
        return failure
    return None


def _old_at(shard: SegmentShard) -> float:
    return shard.upkeep.old_at
