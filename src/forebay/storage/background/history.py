"""The worker that makes history of sealed files, removes local copies, and sweeps objects that no reader needs.

Fair to all shards: a file of one, then a file of the next. Nothing here is on the way of an append. A shard that
another thread works on is left for the next round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from forebay.appends.callbacks import deferred
from forebay.clock import Clock
from forebay.errors import Corrupt, Fenced, ForebayError, Unavailable
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.workers import AtWork, Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 1.0
RETRY_SECONDS = 5.0
"""How long a shard is left alone after an attempt that failed."""
FIRST_SWEEP_SECONDS = 60.0
"""A shard is first swept so long after it was opened: a process that never lives for an interval sweeps, too."""


class HistoryWorker:
    """Looks after the history of all open shards."""

    def __init__(self, clock: Clock, settings: Settings, collect: Callable[[SegmentShard], object]) -> None:
        """`collect` removes objects of a shard that nothing needs any more."""
        self._collect = collect
        self._clock = clock
        self._settings = settings
        self._at_work = AtWork()
        self._watched: dict[str, SegmentShard] = {}
        self._behind: dict[str, SegmentShard] = {}
        self._retry_at: dict[str, float] = {}
        self._retain_at: dict[str, float] = {}
        self._sweep_at: dict[str, float] = {}
        self.worker = Worker("forebay-history", self.step, clock=clock, interval_s=LOOK_SECONDS)

    def watch(self, shard: SegmentShard) -> None:
        """Look after the history of this shard from now on."""
        now = self._clock.monotonic()
        self._retain_at[shard.ref.id] = now + self._settings.retention.check_interval_s
        self._sweep_at[shard.ref.id] = now + min(FIRST_SWEEP_SECONDS, self._settings.export.sweep_interval_s)
        self._watched[shard.ref.id] = shard
        self.worker.start()
        self.notice(shard)

    def alone_with(self, shard: SegmentShard, work: Callable[[SegmentShard], T]) -> T:
        """Work on a shard now, after any other thread; `Unavailable` if it is to be left alone.

        Callbacks of appends that end meanwhile run when the shard is free again.
        """
        with deferred(), self._at_work.after_others(shard.ref.id):
            if not self._is_watched(shard):
                raise Unavailable(f"{shard.ref} is being given up here: try again where it is then")
            return work(shard)

    def notice(self, shard: SegmentShard) -> None:
        """There may be something to export, or to give back."""
        if shard.ref.id not in self._behind and self._is_watched(shard):
            history = shard.history
            if history.is_behind or history.has_unused:
                self._behind[shard.ref.id] = shard

    def drop(self, shard_id: str) -> bool:
        """Begin no more work on the shard; whether none is under way. Does not wait."""
        for shards in (self._watched, self._behind):
            shards.pop(shard_id, None)
        for times in (self._retry_at, self._retain_at, self._sweep_at):
            times.pop(shard_id, None)
        return self._at_work.is_idle(shard_id)

    def forget(self, shard_id: str) -> None:
        """Leave the shard alone; on return nothing works on it any more. Waits for an export, so for the store."""
        self.drop(shard_id)
        self._at_work.wait_idle(shard_id)
        # What the export has noted meanwhile.
        self.drop(shard_id)

    def step(self) -> None:
        """Everything that is due: one file of each shard in turn, until none is left, and what time asks for.

        What time asks for does not wait until all is exported: local files go meanwhile.
        """
        more = True
        while more and self.worker.goes_on():
            more = self._export_round()
            for shard in self._due(self._retain_at, self._settings.retention.check_interval_s):
                self._safely(shard, lambda shard: shard.history.retain())
            self._sweep()

    def _is_watched(self, shard: SegmentShard) -> bool:
        return self._watched.get(shard.ref.id) is shard

    def _export_round(self) -> bool:
        """One file of each shard that is due; true if some shard has more."""
        more = False
        for shard_id, shard in list(self._behind.items()):
            now = self._clock.monotonic()
            if self._retry_at.get(shard_id, now) > now:
                continue
            if not self.worker.goes_on():
                return False
            more = self._safely(shard, partial(_step_if_due, now)) or more
            if self._at_work.is_free(shard_id) and self._behind.get(shard_id) is shard:
                # Out first and in again: a file that is sealed meanwhile must find the shard out and bring it back.
                self._behind.pop(shard_id, None)
                self.notice(shard)
        return more

    def _due(self, at: dict[str, float], interval_s: float) -> Iterator[SegmentShard]:
        """The shards for which it is time, each with its next time set before it is given out."""
        begun = self._clock.monotonic()
        for shard_id in [shard_id for shard_id, due in at.copy().items() if due <= begun]:
            shard = self._watched.get(shard_id)
            if shard is not None and self.worker.goes_on():
                at[shard_id] = begun + interval_s
                yield shard

    def _sweep(self) -> None:
        """Sweep shards that are due; of many the rest comes after the next exports."""
        begun = self._clock.monotonic()
        for shard in self._due(self._sweep_at, self._settings.export.sweep_interval_s):
            self._safely(shard, self._collect)
            if self._clock.monotonic() - begun >= LOOK_SECONDS:
                return

    def _safely(self, shard: SegmentShard, work: Callable[[SegmentShard], object]) -> bool:
        """Work on the shard, unless it is to be left alone. Its trouble is logged and does not stop the others.

        Callbacks of appends that end meanwhile run when the shard is free again.
        """
        with deferred(), self._at_work.at(shard.ref.id) as is_free:
            return is_free and self._is_watched(shard) and self._guarded(shard, work)

    def _guarded(self, shard: SegmentShard, work: Callable[[SegmentShard], object]) -> bool:
        known = shard.history.error
        try:
            return bool(work(shard))
        except Fenced as error:
            logger.warning("%s: %s", shard.ref, error)
        except (ForebayError, OSError) as error:
            # Damage stays until an operator repairs it, and is found only at the end of an upload.
            pause_s = self._settings.export.interval_s if isinstance(error, Corrupt) else RETRY_SECONDS
            self._pause(shard, pause_s)
            # Said once: damage stays the same until the file is restored.
            level = logging.DEBUG if isinstance(error, Corrupt) and str(error) == known else logging.WARNING
            logger.log(level, "%s: history ends at %d for now: %s", shard.ref, shard.history.exported, error)
            self.worker.note_failure(error)
        except Exception as error:
            self._pause(shard, RETRY_SECONDS)
            logger.exception("%s: the upkeep of its history failed and will be tried again", shard.ref)
            self.worker.note_failure(error)
        return False

    def _pause(self, shard: SegmentShard, seconds: float) -> None:
        """Export nothing of the shard for so long, or for as long as was said before."""
        until = self._clock.monotonic() + seconds
        self._retry_at[shard.ref.id] = max(until, self._retry_at.get(shard.ref.id, until))


def _step_if_due(now: float, shard: SegmentShard) -> bool:
    shard.history.learn()
    return shard.history.is_due(now) and shard.history.step()
