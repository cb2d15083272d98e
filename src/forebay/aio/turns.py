"""Commits in the event loop of a server: what the requests of one turn have queued in a shard is written once.

A commit by another thread costs a request more than the write itself: the thread is woken, waits for the interpreter,
and has to wake the loop again. So a server commits shards whose class asks for no sync at the end of the turn that the
appends were queued in. What may wait for more than a write is left to the committers of the log, and so is everything
for a while after a write that took long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from forebay.engines import OwnedShard

logger = logging.getLogger(__name__)

TURN_BYTES_MAX: Final = 4 * 1024 * 1024
"""The loop writes no more of a shard at once: it would stand still for some milliseconds."""
PATIENCE_SECONDS: Final = 0.05
"""A write that takes longer is one of a disk that does not keep up."""
REST_SECONDS: Final = 1.0
"""So long after it other threads write."""


class TurnCommits:
    """What was queued in the shards of one topic in this turn of the loop. For calls in that loop."""

    def __init__(self, commit_soon: Callable[[OwnedShard], None]) -> None:
        """`commit_soon` has another thread commit a shard."""
        self._loop = asyncio.get_running_loop()
        self._commit_soon = commit_soon
        self._asked: dict[OwnedShard, None] = {}
        self._rests_until = 0.0

    def ask(self, shard: OwnedShard) -> None:
        """Commit what the shard has queued: at the end of this turn, or soon."""
        if shard.durability.policy.syncs_before_ack:
            self._commit_soon(shard)
            return
        if not self._asked:
            self._loop.call_soon(self._commit)
        self._asked[shard] = None

    def _commit(self) -> None:
        asked, self._asked = self._asked, {}
        for shard in asked:
            begun = self._loop.time()
            if begun < self._rests_until or not self._is_committed(shard):
                self._commit_soon(shard)
            elif self._loop.time() - begun > PATIENCE_SECONDS:
                self._rests_until = self._loop.time() + REST_SECONDS

    def _is_committed(self, shard: OwnedShard) -> bool:
        try:
            return shard.commit_at_once(TURN_BYTES_MAX)
        except Exception:
            # Its appends have their answer; those of other shards get theirs.
            logger.exception("%s: a commit failed", shard.ref)
            return False
