"""The worker that seals rotated files and heals failed logs, shard after shard.

Both may copy a whole file, so no background sync and no export is done in its thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from forebay.clock import Clock
from forebay.shard import SegmentShard
from forebay.workers import AtWork, Worker

logger = logging.getLogger(__name__)


class SealWorker:
    """Mends the shards that it is asked to, in the order of asking; a log that takes no appends comes first.

    At most every second turn is given out of order: a log that does not heal is asked for again and again.
    A turn seals the files that the shard has rotated by then, and no more: the next shard waits for those at most.
    """

    def __init__(self, clock: Clock, on_sealed: Callable[[SegmentShard], None]) -> None:
        """`on_sealed` is called after each turn, in the worker's thread, without a lock."""
        self._on_sealed = on_sealed
        self._asked: dict[str, SegmentShard] = {}
        self._failed: dict[str, SegmentShard] = {}
        """Those that take no appends, in a list of their own: a turn must not look at each shard that waits."""
        self._at_work = AtWork()
        self._went_ahead = False
        """The last turn was given to a failed log, before others that had waited longer."""
        self.worker = Worker("forebay-seal", self.step, clock=clock)

    def ask(self, shard: SegmentShard) -> None:
        """Mend the shard soon."""
        asked = self._asked if shard.wal.failure is None else self._failed
        if asked.get(shard.ref.id) is shard:
            self.worker.relieve()
            return
        with self.worker.changed:
            self.worker.wake()
            # Last: a shard that is in here gets its turn, also if an interrupt (Ctrl-C) comes now.
            asked[shard.ref.id] = shard

    def is_asked(self, shard: SegmentShard) -> bool:
        """Whether the shard waits for its turn."""
        return shard in (self._asked.get(shard.ref.id), self._failed.get(shard.ref.id))

    def waiting(self) -> int:
        """How many shards wait for their turn."""
        return len(self._asked) + len(self._failed)

    def step(self) -> None:
        """Mend every shard that was asked for and that no other thread is at."""
        while self.worker.goes_on() and (shard := self._next()) is not None:
            with self._at_work.at(shard.ref.id) as is_free:
                if is_free and self._is_taken(shard):
                    self._mend(shard)
            if self.is_asked(shard):
                self.worker.wake()

    def _is_taken(self, shard: SegmentShard) -> bool:
        """Take the shard off the list, before it is mended: an `ask` from here on asks for another turn."""
        with self.worker.changed:
            is_asked = self.is_asked(shard)
            if is_asked:
                self._take_off(shard.ref.id)
            return is_asked

    def _mend(self, shard: SegmentShard) -> None:
        try:
            shard.upkeep.mend()
            self._on_sealed(shard)
        except Exception as error:
            logger.exception("%s: sealing failed and will be tried again", shard.ref)
            self.worker.note_failure(error)

    def drop(self, shard_id: str) -> bool:
        """Begin no more work on the shard; whether none is under way. Does not wait."""
        with self.worker.changed:
            self._take_off(shard_id)
        return self._at_work.is_idle(shard_id)

    def forget(self, shard_id: str) -> None:
        """Leave the shard alone, which no thread asks for any more; on return nothing works on it."""
        self.drop(shard_id)
        self._at_work.wait_idle(shard_id)

    def _next(self) -> SegmentShard | None:
        """The shard whose turn it is. One that another thread is at stays on the list, and that thread wakes this."""
        with self.worker.changed:
            failed, other = self._first(self._failed), self._first(self._asked)
            shard = other if failed is None or (self._went_ahead and other is not None) else failed
            self._went_ahead = shard is not other
            return shard

    def _first(self, asked: dict[str, SegmentShard]) -> SegmentShard | None:
        return next((shard for shard in asked.values() if self._at_work.is_free(shard.ref.id)), None)

    def _take_off(self, shard_id: str) -> None:
        self._asked.pop(shard_id, None)
        self._failed.pop(shard_id, None)
