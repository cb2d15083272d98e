"""The thread of a process that makes history: exports, local retention, sweeps, and what is left of shards that moved.

One for all shards, fair to each: a file of one, then a file of the next. Nothing here is on the way of an append.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from forebay.appends.callbacks import deferred
from forebay.clock import Clock
from forebay.engines.background import Background
from forebay.errors import Corrupt, Fenced, ForebayError, Unavailable
from forebay.locks import Rank, RankedCondition, RankedRLock
from forebay.settings import Settings
from forebay.shard import SegmentShard

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 1.0
END_SECONDS = 10.0
RETRY_SECONDS = 5.0
"""How long a shard is left alone after an attempt that failed."""
FIRST_SWEEP_SECONDS = 60.0
"""A shard is first swept so long after it was opened: a process that never lives for an interval sweeps, too."""


class HistoryWorker:
    """Looks after the history of all open shards."""

    def __init__(self, clock: Clock, settings: Settings, collect: Callable[[SegmentShard], object]) -> None:
        """`collect` removes objects of a shard that nothing needs any more."""
        self._collect = collect
        self.chores: Callable[[], None] = lambda: None
        """What is due now and then for the directory as a whole."""
        self._clock = clock
        self._settings = settings
        self._changed = RankedCondition(Rank.LEAF, "storage.exporting")
        self._stepping = RankedRLock(Rank.CHORES, "storage.export_round")
        """Whoever steps; nobody waits for it who only wants one shard to be left alone."""
        self._at: tuple[str, int] | None = None
        """The shard that is worked on, and the thread that does it."""
        self._watched: dict[str, SegmentShard] = {}
        self._behind: dict[str, SegmentShard] = {}
        self._retry_at: dict[str, float] = {}
        self._sweep_at: dict[str, float] = {}
        self._retained_at = self._chores_at = clock.monotonic()
        self._ended = False
        self._thread = Background("forebay-archiving", self._run)

    def begin(self) -> None:
        """Look after what time asks for, even if no shard has anything to export."""
        with self._changed:
            self._start()

    def watch(self, shard: SegmentShard) -> None:
        """Look after the history of this shard from now on."""
        first_s = min(FIRST_SWEEP_SECONDS, self._settings.export.sweep_interval_s)
        self._sweep_at[shard.ref.id] = self._clock.monotonic() + first_s
        self._watched[shard.ref.id] = shard
        self.begin()
        self.notice(shard)

    def alone_with(self, shard: SegmentShard, work: Callable[[SegmentShard], T]) -> T:
        """Work on a shard now, while nothing else does; `Unavailable` if it is to be left alone."""
        with deferred(), self._stepping:
            if not self._attend(shard):
                raise Unavailable(f"{shard.ref} is being given up here: try again where it is then")
            try:
                return work(shard)
            finally:
                self._leave()

    def notice(self, shard: SegmentShard) -> None:
        """There may be something to export."""
        known = self._watched.get(shard.ref.id) is shard
        if shard.ref.id in self._behind or not known or not shard.archive.is_behind:
            return
        with self._changed:
            self._start()
            self._changed.notify_all()
            self._behind[shard.ref.id] = shard

    def forget(self, shard_id: str) -> None:
        """Leave the shard alone; on return nothing works on it any more. Waits for an export, so for the store."""
        self._watched.pop(shard_id, None)
        with self._changed:
            self._changed.wait_for(lambda: self.drop(shard_id))

    def drop(self, shard_id: str) -> bool:
        """Begin no more work on the shard; whether none is under way. Does not wait."""
        with self._changed:
            self._watched.pop(shard_id, None)
            if self._is_at(shard_id):
                return False
            self._behind.pop(shard_id, None)
            self._retry_at.pop(shard_id, None)
            self._sweep_at.pop(shard_id, None)
            return True

    def step(self) -> None:
        """Everything that is due: one file of each shard in turn, until none is left, and what time asks for.

        What time asks for does not wait until all is exported: local files go meanwhile, and owners are checked.
        """
        with self._stepping:
            more = True
            while more:
                more = self._export_round()
                self._retain()
                self._sweep()
            self._do_chores()

    def end(self) -> None:
        """Stop the thread; its present step is waited for, but not for long."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if not self._thread.join(END_SECONDS):
            # A store that does not answer must not keep the log from closing: what it is at is repeated later.
            logger.warning("an export is left unfinished: the store has not answered for %d s", END_SECONDS)

    def abandon(self) -> None:
        """In a forked child: the thread is not there."""
        self._thread.abandon()
        self._ended = True
        self._stepping = RankedRLock(Rank.CHORES, "storage.export_round")
        self._changed = RankedCondition(Rank.LEAF, "storage.exporting")
        self._at = None

    def _start(self) -> None:
        if not self._ended:
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended, LOOK_SECONDS)
                if self._ended:
                    return
            try:
                self.step()
            except BaseException:
                # A callback may run here, and raise what is no `Exception`.
                logger.exception("the upkeep of history failed and will be tried again")

    def _is_at(self, shard_id: str) -> bool:
        """Whether another thread works on the shard. One that comes here by a callback must not wait for itself."""
        return self._at is not None and self._at[0] == shard_id and self._at[1] != threading.get_ident()

    def _export_round(self) -> bool:
        """One file of each shard that is due; true if some shard has more."""
        more = False
        for shard_id, shard in list(self._behind.items()):
            now = self._clock.monotonic()
            if self._ended or self._retry_at.get(shard_id, now) > now:
                continue
            more = self._safely(shard, partial(_step_if_due, now)) or more
            if self._behind.get(shard_id) is shard:
                # Out first and in again: a file that is sealed meanwhile must find the shard out and bring it back.
                self._behind.pop(shard_id, None)
                self.notice(shard)
        return more

    def _retain(self) -> None:
        now = self._clock.monotonic()
        if now - self._retained_at >= self._settings.retention.check_interval_s:
            self._retained_at = now
            for shard in list(self._watched.values()):
                self._safely(shard, lambda shard: shard.archive.retain())

    def _sweep(self) -> None:
        """Sweep shards that are due; of many the rest comes after the next exports."""
        begun = self._clock.monotonic()
        for shard in list(self._watched.values()):
            if self._sweep_at.get(shard.ref.id, begun + 1) <= begun:
                self._sweep_at[shard.ref.id] = begun + self._settings.export.sweep_interval_s
                self._safely(shard, self._collect)
                if self._clock.monotonic() - begun >= LOOK_SECONDS:
                    return

    def _do_chores(self) -> None:
        """Their trouble keeps no shard from history, whatever it is; nor do they come again before a look is due."""
        try:
            self.chores()
        except (ForebayError, OSError) as error:
            logger.warning("will be tried again: %s", error)
        except Exception:
            logger.exception("the upkeep of the directory failed and will be tried again")
        finally:
            self._chores_at = self._clock.monotonic()

    def _safely(self, shard: SegmentShard, work: Callable[[SegmentShard], object]) -> bool:
        """Work on the shard, unless it is to be left alone. Its trouble is logged and does not stop the others."""
        if self._ended:
            return False
        if self._clock.monotonic() - self._chores_at >= LOOK_SECONDS:
            # A store that does not answer takes long to say so, once for each shard.
            self._do_chores()
        if not self._attend(shard):
            return False
        known = shard.archive.error
        try:
            with deferred():
                done = bool(work(shard))
        except Fenced as error:
            logger.warning("%s: %s", shard.ref, error)
        except (ForebayError, OSError) as error:
            # Damage stays until somebody repairs it, and is found only at the end of an upload.
            pause_s = self._settings.export.interval_s if isinstance(error, Corrupt) else RETRY_SECONDS
            self._pause(shard, pause_s)
            # Said once: damage stays the same until the file is restored.
            level = logging.DEBUG if isinstance(error, Corrupt) and str(error) == known else logging.WARNING
            logger.log(level, "%s: history ends at %d for now: %s", shard.ref, shard.archive.exported, error)
        except Exception:
            self._pause(shard, RETRY_SECONDS)
            logger.exception("%s: the upkeep of its history failed and will be tried again", shard.ref)
        else:
            return done
        finally:
            self._leave()
        return False

    def _pause(self, shard: SegmentShard, seconds: float) -> None:
        """Export nothing of the shard for so long, or for as long as was said before."""
        until = self._clock.monotonic() + seconds
        self._retry_at[shard.ref.id] = max(until, self._retry_at.get(shard.ref.id, until))

    def _attend(self, shard: SegmentShard) -> bool:
        """Be at this shard from now on; false if it is to be left alone."""
        with self._changed:
            if self._watched.get(shard.ref.id) is not shard:
                return False
            self._at = (shard.ref.id, threading.get_ident())
            return True

    def _leave(self) -> None:
        with self._changed:
            self._at = None
            self._changed.notify_all()


def _step_if_due(now: float, shard: SegmentShard) -> bool:
    return shard.archive.is_due(now) and shard.archive.step()
