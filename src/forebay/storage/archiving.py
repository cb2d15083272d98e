"""The thread of a process that makes history: exports, local retention, sweeps, and what is left of shards that moved.

One for all shards, fair to each: a file of one, then a file of the next. Nothing here is on the way of an append.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from forebay.clock import Clock
from forebay.errors import Fenced, ForebayError
from forebay.settings import Settings
from forebay.shard import SegmentShard

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
END_SECONDS = 10.0
RETRY_SECONDS = 5.0
"""How long a shard is left alone after an attempt that failed."""


class Archiving:
    """Looks after the history of all open shards."""

    def __init__(self, clock: Clock, settings: Settings) -> None:
        self.chores: Callable[[], None] = lambda: None
        """What is due now and then for the directory as a whole."""
        self._clock = clock
        self._settings = settings
        self._changed = threading.Condition()
        self._stepping = threading.RLock()
        self._watched: dict[str, SegmentShard] = {}
        self._behind: dict[str, SegmentShard] = {}
        self._retry_at: dict[str, float] = {}
        self._retained_at = self._swept_at = clock.monotonic()
        self._ended = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Look after what time asks for, even if no shard has anything to export."""
        with self._changed:
            self._start()

    def watch(self, shard: SegmentShard) -> None:
        """Look after the history of this shard from now on."""
        self._watched[shard.ref.id] = shard
        self.notice(shard)

    def notice(self, shard: SegmentShard) -> None:
        """There may be something to export."""
        if shard.ref.id in self._behind or shard.ref.id not in self._watched or not shard.archive.is_behind:
            return
        with self._changed:
            self._behind[shard.ref.id] = shard
            self._start()
            self._changed.notify_all()

    def forget(self, shard_id: str) -> None:
        """Leave the shard alone; on return nothing works on it any more."""
        self._watched.pop(shard_id, None)
        with self._stepping:
            self._behind.pop(shard_id, None)
            self._retry_at.pop(shard_id, None)

    def step(self) -> None:
        """Everything that is due: one file of each shard in turn, until none is left, then what time asks for."""
        with self._stepping:
            while self._export_round():
                pass
            self._retain()
            self._sweep()
            self.chores()

    def end(self) -> None:
        """Stop the thread; its present step is waited for, but not for long."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)
            if self._thread.is_alive():
                # A store that does not answer must not keep the log from closing: what it is at is repeated later.
                logger.warning("an export is left unfinished: the store has not answered for %d s", END_SECONDS)

    def abandon(self) -> None:
        """In a forked child: the thread is not there."""
        self._thread = None
        self._ended = True
        self._stepping = threading.RLock()
        self._changed = threading.Condition()

    def _start(self) -> None:
        if self._thread is None and not self._ended:
            self._thread = threading.Thread(target=self._run, name="forebay-archiving", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended, LOOK_SECONDS)
                if self._ended:
                    return
            try:
                self.step()
            except Exception:
                logger.exception("the upkeep of history failed and will be tried again")

    def _export_round(self) -> bool:
        """One file of each shard that is due; true if some shard has more."""
        more = False
        for shard_id, shard in list(self._behind.items()):
            now = self._clock.monotonic()
            if self._ended or self._retry_at.get(shard_id, now) > now or not shard.archive.is_due(now):
                continue
            more = self._safely(shard, shard.archive.step) or more
            if not shard.archive.is_behind:
                self._behind.pop(shard_id, None)
        return more

    def _retain(self) -> None:
        now = self._clock.monotonic()
        if now - self._retained_at >= self._settings.retention.check_interval_s:
            self._retained_at = now
            for shard in list(self._watched.values()):
                self._safely(shard, shard.archive.retain)

    def _sweep(self) -> None:
        now = self._clock.monotonic()
        if now - self._swept_at >= self._settings.export.sweep_interval_s:
            self._swept_at = now
            for shard in list(self._watched.values()):
                self._safely(shard, shard.archive.sweep)

    def _safely(self, shard: SegmentShard, work: Callable[[], object]) -> bool:
        """One shard's trouble is logged and does not stop the others."""
        try:
            done = bool(work())
        except Fenced as error:
            logger.warning("%s: %s", shard.ref, error)
        except (ForebayError, OSError) as error:
            self._retry_at[shard.ref.id] = self._clock.monotonic() + RETRY_SECONDS
            behind = shard.archive.status().behind.records
            logger.warning("%s: history is %d records behind: %s", shard.ref, behind, error)
        else:
            self._retry_at.pop(shard.ref.id, None)
            return done
        return False
