"""The threads of a process that has a storage open: one for upkeep, and one each for work that nobody waits for.

All end with the storage. None exists per shard, and none before it is needed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial

from forebay.clock import Clock
from forebay.conditions import Condition
from forebay.disk import Disk
from forebay.engines import OpenShard
from forebay.engines.background import Background
from forebay.engines.rounds import Rounds
from forebay.errors import Unavailable
from forebay.settings import RuntimeSettings
from forebay.shard import SegmentShard
from forebay.wal.hearing import deferred, in_callback, is_inside
from forebay.wal.staging import INSIDE

logger = logging.getLogger(__name__)

AGE_CHECK_SECONDS = 1.0


class Maintenance:
    """Upkeep of all shards that have something to do, in one thread."""

    def __init__(self, disk: Disk, clock: Clock, root: str, settings: RuntimeSettings) -> None:
        self.on_kept: Callable[[SegmentShard], None] | None = None
        """Hears of every shard that was looked after."""
        self._disk = disk
        self._clock = clock
        self._ages_checked = clock.monotonic()
        self._root = root
        self._settings = settings
        self._changed = Condition()
        self._busy: dict[str, SegmentShard] = {}
        self._watched: dict[str, SegmentShard] = {}
        self._stepping = threading.RLock()
        """Entered again where a round finds that a shard was lost."""
        self._ended = False
        self._thread = Background("forebay-maintenance", self._run)

    def watch(self, shard: SegmentShard) -> None:
        """Look after the shard whenever it says that there may be work."""
        shard.wal.on_dirty = lambda: self._wake(shard)
        self._watched[shard.ref.id] = shard
        if shard.upkeep.is_busy:
            self._wake(shard)

    def step(self) -> None:
        """One round over all shards that are due something."""
        # Callbacks come when the round is over: they may open or delete topics, and whoever does waits for a round.
        with deferred(), self._stepping:
            self._step()

    def _step(self) -> None:
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
            if self.on_kept is not None:
                _safely(shard, partial(self.on_kept, shard))
            if shard.upkeep.is_busy:
                self._busy[shard.ref.id] = shard

    def forget(self, shard_id: str) -> None:
        """Leave the shard alone from now on; on return nothing works on it any more."""
        self._watched.pop(shard_id, None)
        self._busy.pop(shard_id, None)
        with self._stepping:
            self._busy.pop(shard_id, None)

    def end(self) -> None:
        """Stop the thread and wait for its present round."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def abandon(self) -> None:
        """In a forked child: the thread is not there."""
        self._thread.abandon()
        self._ended = True
        self._stepping = threading.RLock()
        self._changed = Condition()

    def _wake(self, shard: SegmentShard) -> None:
        if shard.ref.id in self._busy:
            return
        with self._changed:
            if not self._ended:
                self._thread.start()
            self._changed.notify_all()
            # Last: whoever is in here is looked after, whatever falls in between (Ctrl-C).
            self._busy[shard.ref.id] = shard

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._busy or self._ended, AGE_CHECK_SECONDS)
                self._changed.wait_for(lambda: self._ended, self._settings.maintenance_interval_ms / 1000)
                if self._ended:
                    return
            self._find_old()
            self.step()

    def _find_old(self) -> None:
        """Files reach their age without anything happening to them: look at all shards now and then."""
        now = self._clock.monotonic()
        if now - self._ages_checked >= AGE_CHECK_SECONDS:
            self._ages_checked = now
            self._busy.update((name, s) for name, s in list(self._watched.items()) if s.upkeep.is_old)

    def _sync_together(self, shards: list[SegmentShard]) -> None:
        """Many dirty files: one sync of their file system costs less than one each."""
        begun = ((shard, shard.upkeep.sync_begin()) for shard in shards)
        targets = [(shard, target) for shard, target in begun if target is not None]
        try:
            self._disk.sync_filesystem(self._root)
        except OSError as error:
            for shard, _ in targets:
                shard.upkeep.sync_failed(error)
            return
        for shard, target in targets:
            shard.upkeep.sync_end(target)


def _safely(shard: SegmentShard, step: Callable[[], bool | None]) -> bool:
    """One shard's trouble is logged and does not stop the others."""
    try:
        return bool(step())
    except Exception:
        logger.exception("%s: upkeep failed and will be tried again", shard.ref)
        return False


def committing() -> Rounds[OpenShard]:
    """Commits for appends that nobody waits for in a thread of its own."""
    return Rounds("forebay-committer", lambda shard: shard.commit())


class Closing:
    """One thread closes at a time, and never one that is in the middle of an append."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def run(self, close: Callable[[], None], shards: Iterable[OpenShard], committer: Rounds[OpenShard]) -> None:
        """Close, after whoever is at it.

        In a callback only if nobody is: who closes may be waiting for the callback to return. `Unavailable`
        inside an append or a closing of this thread, which a signal handler has interrupted.
        """
        logs = [shard.wal for shard in shards if isinstance(shard, SegmentShard)]
        if any(is_inside(lock)() for log in logs for lock in (log.committing, log.staging.lock, committer.lock)):
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
