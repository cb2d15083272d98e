"""The threads of a process that has a storage open: one for background syncs, others for what must not delay them.

All end with the storage. None exists per shard, and none before it is needed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from functools import partial

from forebay.appends.callbacks import in_callback, left_due
from forebay.appends.waiting import INSIDE, is_inside
from forebay.clock import Clock
from forebay.disk import Disk
from forebay.engines import OpenShard
from forebay.engines.background import Background
from forebay.errors import Unavailable
from forebay.locks import Rank, RankedCondition, RankedRLock
from forebay.settings import RuntimeSettings
from forebay.shard import SegmentShard
from forebay.storage.background.seal import SealWorker
from forebay.wal.writer import SyncTarget
from forebay.workers import ItemWorker

logger = logging.getLogger(__name__)

AGE_CHECK_SECONDS = 1.0


class SyncWorker:
    """Background syncs of all shards that have something to do, in one thread.

    Nothing else is done in that thread that may take long: what copies files, and what calls back, it only asks for.
    """

    def __init__(self, disk: Disk, clock: Clock, root: str, settings: RuntimeSettings, sealing: SealWorker) -> None:
        self.on_kept: Callable[[SegmentShard], None] | None = None
        """Hears of every shard that was looked after."""
        self._disk = disk
        self._clock = clock
        self._ages_checked = clock.monotonic()
        self._root = root
        self._settings = settings
        self._sealing = sealing
        self._callbacks: ItemWorker[SegmentShard] = ItemWorker(
            "forebay-callbacks", lambda shard: shard.wal.group.call_back(), clock=clock
        )
        self._changed = RankedCondition(Rank.LEAF, "storage.syncing")
        self._busy: dict[str, SegmentShard] = {}
        """Shards with something to do. Only those that are watched: see `_enlist`."""
        self._watched: dict[str, SegmentShard] = {}
        self._stepping = RankedRLock(Rank.ROUND, "storage.sync_round")
        """Entered again where a round finds that a shard was lost."""
        self._ended = False
        self._thread = Background("forebay-maintenance", self._run)

    def watch(self, shard: SegmentShard) -> None:
        """Look after the shard whenever it says that there may be work."""
        shard.wal.on_dirty = lambda: self._wake(shard)
        with self._changed:
            self._watched[shard.ref.id] = shard
        if shard.upkeep.is_busy:
            self._wake(shard)

    def step(self) -> None:
        """One round over all shards that are due something.

        Callbacks that become due are called by a thread of their own, without any lock: they may open or delete
        topics, which waits for a round, and they may take long.
        """
        with left_due() as queues, self._stepping:
            shards = self._step()
        left = {id(queue) for queue in queues}
        for shard in shards:
            if id(shard.wal.queue.due) in left:
                self._callbacks.ask(shard)

    def _step(self) -> list[SegmentShard]:
        shards = list(self._busy.values())
        due = [shard for shard in shards if _safely(shard, shard.upkeep.prepare)]
        if len(due) >= self._settings.shards_syncfs_min:
            self._sync_together(due)
        else:
            for shard in due:
                _safely(shard, shard.upkeep.sync)
        for shard in shards:
            _safely(shard, shard.upkeep.finish)
            # Out first and in again: a shard that gets work meanwhile must find itself out and come back by itself.
            self._busy.pop(shard.ref.id, None)
            if not _safely(shard, partial(self._is_done, shard)):
                self._enlist(shard)
        return shards

    def _is_done(self, shard: SegmentShard) -> bool:
        """Hand on what other threads do for the shard; whether there will soon be no more work."""
        if self._is_watched(shard):
            if shard.upkeep.needs_mending:
                self._sealing.ask(shard)
            if self.on_kept is not None:
                self.on_kept(shard)
        return not shard.upkeep.is_busy

    def forget(self, shard_id: str) -> None:
        """Leave the shard alone from now on; on return nothing works on it any more, and it never comes back."""
        with self._changed:
            self._watched.pop(shard_id, None)
            self._busy.pop(shard_id, None)
        with self._stepping:
            pass

    def end(self) -> None:
        """Stop the thread and wait for its present round."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        self._callbacks.worker.stop()

    def abandon(self) -> None:
        """In a forked child: the threads are not there."""
        self._thread.abandon()
        self._callbacks.worker.abandon()
        self._ended = True
        self._stepping = RankedRLock(Rank.ROUND, "storage.sync_round")
        self._changed = RankedCondition(Rank.LEAF, "storage.syncing")

    def _wake(self, shard: SegmentShard) -> None:
        if self._busy.get(shard.ref.id) is shard:
            return
        with self._changed:
            if not self._is_watched(shard):
                return
            if not self._ended:
                self._thread.start()
            self._changed.notify_all()
            # Last: whoever is in here is looked after, whatever falls in between (Ctrl-C).
            self._busy[shard.ref.id] = shard

    def _enlist(self, shard: SegmentShard) -> None:
        """The next round looks at the shard, unless it was given up meanwhile."""
        with self._changed:
            if self._is_watched(shard):
                self._busy[shard.ref.id] = shard

    def _is_watched(self, shard: SegmentShard) -> bool:
        return self._watched.get(shard.ref.id) is shard

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._busy or self._ended, AGE_CHECK_SECONDS)
                self._changed.wait_for(lambda: self._ended, self._settings.maintenance_interval_ms / 1000)
                if self._ended:
                    return
            try:
                self._find_old()
                self.step()
            except BaseException:
                # The thread of all background syncs must not end by the failure of one.
                logger.exception("a round of background syncs failed and will be tried again")

    def _find_old(self) -> None:
        """Files reach their age without anything happening to them: look at all shards now and then."""
        now = self._clock.monotonic()
        if now - self._ages_checked >= AGE_CHECK_SECONDS:
            self._ages_checked = now
            for shard in list(self._watched.values()):
                if shard.upkeep.is_old:
                    self._enlist(shard)

    def _sync_together(self, shards: list[SegmentShard]) -> None:
        """Many dirty files: one sync of their file system costs less than one each.

        Whatever happens, each sync that was begun gets its outcome: until then the log's own syncs wait for it.
        """
        targets: list[tuple[SegmentShard, SyncTarget]] = []
        failure: OSError | None = OSError(errno.EINTR, "a sync was interrupted")
        try:
            for shard in shards:
                target = shard.wal.begin_background_sync()
                if target is not None:
                    targets.append((shard, target))
            self._disk.sync_filesystem(self._root)
            failure = None
        except OSError as error:
            failure = error
        finally:
            for shard, target in targets:
                _safely(shard, partial(_sync_over, shard, target, failure))


def _sync_over(shard: SegmentShard, target: SyncTarget, failure: OSError | None) -> None:
    if failure is None:
        shard.wal.end_background_sync(target)
    else:
        shard.wal.fail_background_sync(failure)


def _safely(shard: SegmentShard, step: Callable[[], bool | None]) -> bool:
    """One shard's trouble is logged and does not stop the others."""
    try:
        return bool(step())
    except Exception:
        logger.exception("%s: upkeep failed and will be tried again", shard.ref)
        return False


def committing(clock: Clock) -> ItemWorker[OpenShard]:
    """Commits the appends of callers that do not wait for them."""
    return ItemWorker("forebay-committer", lambda shard: shard.commit(), clock=clock)


class Closing:
    """One thread closes at a time, and never one that is in the middle of an append."""

    def __init__(self) -> None:
        self._lock = RankedRLock(Rank.LOG, "storage.closing")

    def run(self, close: Callable[[], None], shards: Iterable[OpenShard], committer: ItemWorker[OpenShard]) -> None:
        """Close, after whoever is at it.

        In a callback only if nobody is: who closes may be waiting for the callback to return. `Unavailable`
        inside an append or a closing of this thread, which a signal handler has interrupted.
        """
        logs = [shard.wal for shard in shards if isinstance(shard, SegmentShard)]
        in_append = any(is_inside(lock)() for log in logs for lock in (log.committing, log.queue.lock))
        if in_append or committer.worker.is_inside():
            raise Unavailable(INSIDE)
        closes_here = is_inside(self._lock)()
        if in_callback():
            if not closes_here and self._lock.acquire(blocking=False):
                try:
                    close()
                finally:
                    self._lock.release()
            return
        if closes_here:
            raise Unavailable(INSIDE)
        with self._lock:
            close()
