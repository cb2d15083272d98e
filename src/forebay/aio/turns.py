"""Commits in the event loop of a server: what the requests of one turn have queued in a shard is written once.

A commit by another thread costs a request more than the write itself: the thread is woken, waits for the interpreter,
and has to wake the loop again. So a server commits shards whose class asks for no sync at the end of the turn that the
appends were queued in. What may wait for more than a write is left to the committers of the log, and so is everything
while the disk is not known to be quick: while a sync takes long, and for a while after a write that did.
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
REST_SECONDS_MAX: Final = 60.0
"""So long after it other threads write, in all topics: twice as long after each that comes soon after a rest."""
SYNC_PATIENCE_SECONDS: Final = 0.5
"""A sync that takes longer is one of a disk that may be stuck: writes go on into memory for a while, and then hang."""
LOOK_SECONDS: Final = 0.05
"""So often a loop that writes looks for such a sync."""


class TurnPace:
    """Whether the loop may write itself, in all topics of a log. For calls in that loop."""

    def __init__(self, syncing_seconds: Callable[[], float]) -> None:
        """`syncing_seconds` says for how long the sync that is under way has taken by now."""
        self._syncing_seconds = syncing_seconds
        self._looks_at = 0.0
        self._rests_until = 0.0
        self._rest = REST_SECONDS

    def allows(self, now: float) -> bool:
        """Whether the disk is known to be quick at this time of the loop."""
        if now < self._rests_until:
            return False
        if now >= self._looks_at:
            self._looks_at = now + LOOK_SECONDS
            if self._syncing_seconds() > SYNC_PATIENCE_SECONDS:
                # The next look comes before the next write, for as long as it takes.
                self._looks_at = now
                return False
        return True

    def note_write(self, begun: float, ended: float) -> None:
        """The loop has written from one time to the other."""
        if ended - begun <= PATIENCE_SECONDS:
            return
        is_again = begun < self._rests_until + REST_SECONDS_MAX
        self._rest = min(2 * self._rest, REST_SECONDS_MAX) if is_again and self._rests_until else REST_SECONDS
        self._rests_until = ended + self._rest
        logger.warning("a write took %.0f ms: for %.0f s other threads write", (ended - begun) * 1000, self._rest)


class TurnCommits:
    """What was queued in the shards of one topic in this turn of the loop. For calls in that loop."""

    def __init__(self, commit_soon: Callable[[OwnedShard], None], pace: TurnPace) -> None:
        """`commit_soon` has another thread commit a shard."""
        self._loop = asyncio.get_running_loop()
        self._commit_soon = commit_soon
        self._pace = pace
        self._asked: dict[OwnedShard, None] = {}

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
            if not self._pace.allows(begun) or not self._is_committed(shard):
                self._commit_soon(shard)
            else:
                self._pace.note_write(begun, self._loop.time())

    def _is_committed(self, shard: OwnedShard) -> bool:
        try:
            return shard.commit_at_once(TURN_BYTES_MAX)
        except Exception:
            # Its appends have their answer; those of other shards get theirs.
            logger.exception("%s: a commit failed", shard.ref)
            return False
