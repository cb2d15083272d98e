"""The thread of a process that seals rotated files and heals failed logs, shard after shard.

Both may copy a whole file, so they have a thread of their own: no background sync and no export waits for them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from forebay.engines.background import Background
from forebay.locks import Rank, RankedCondition
from forebay.shard import SegmentShard

logger = logging.getLogger(__name__)


class SealWorker:
    """Mends the shards that it is asked to, in the order of asking; a log that takes no appends comes first.

    At most every second turn is given out of order: a log that does not heal is asked for again and again.

    A turn seals the files that the shard has rotated by then, and no more: the next shard waits for those at most.
    """

    def __init__(self, on_sealed: Callable[[SegmentShard], None]) -> None:
        """`on_sealed` is called after each turn, by this thread, without a lock."""
        self._on_sealed = on_sealed
        self._changed = RankedCondition(Rank.LEAF, "storage.sealing")
        self._asked: dict[str, SegmentShard] = {}
        self._at: tuple[str, int] | None = None
        """The shard that is worked on, and the thread that does it."""
        self._went_ahead = False
        """The last turn was given to a failed log, before others that had waited longer."""
        self._ended = False
        self._thread = Background("forebay-sealing", self._run)

    def ask(self, shard: SegmentShard) -> None:
        """Mend the shard soon."""
        if self._asked.get(shard.ref.id) is shard:
            return
        with self._changed:
            if not self._ended:
                self._thread.start()
            self._changed.notify_all()
            self._asked[shard.ref.id] = shard

    def step(self) -> None:
        """Mend every shard that was asked for. Called by the thread, and by tests."""
        while (shard := self._next()) is not None:
            try:
                shard.upkeep.mend()
                self._on_sealed(shard)
            except Exception:
                logger.exception("%s: sealing failed and will be tried again", shard.ref)
            finally:
                self._leave()

    def drop(self, shard_id: str) -> bool:
        """Begin no more work on the shard; whether none is under way. Does not wait."""
        with self._changed:
            self._asked.pop(shard_id, None)
            return not self._is_at(shard_id)

    def forget(self, shard_id: str) -> None:
        """Leave the shard alone, which no thread asks for any more; on return nothing works on it."""
        with self._changed:
            self._asked.pop(shard_id, None)
            self._changed.wait_for(lambda: not self._is_at(shard_id))

    def end(self) -> None:
        """Stop the thread and wait for its present turn. What is left is sealed when the shard is closed."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def abandon(self) -> None:
        """In a forked child: the thread is not there."""
        self._thread.abandon()
        self._ended = True
        self._changed = RankedCondition(Rank.LEAF, "storage.sealing")
        self._at = None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._ended)
                if self._ended:
                    return
            self.step()

    def _next(self) -> SegmentShard | None:
        with self._changed:
            if self._ended or not self._asked:
                return None
            first = next(iter(self._asked))
            failed = (name for name, shard in self._asked.items() if shard.wal.failure is not None)
            name = first if self._went_ahead else next(failed, first)
            self._went_ahead = name != first
            self._at = (name, threading.get_ident())
            return self._asked.pop(name)

    def _leave(self) -> None:
        with self._changed:
            self._at = None
            self._changed.notify_all()

    def _is_at(self, shard_id: str) -> bool:
        """Whether another thread works on the shard."""
        return self._at is not None and self._at[0] == shard_id and self._at[1] != threading.get_ident()
