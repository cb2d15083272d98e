"""Commits for the event loop of a server: what the requests of one turn have queued in a shard is committed once.

The loop itself never writes: a disk that stops answering would hold it, and with it every request. A thread of the log
commits (`storage.background.commit`). To wake one for each request costs more than its write: the thread waits for the
interpreter, takes it from the loop in the middle of a turn, and wakes the loop again. So a server asks for commits at
the end of the turn that the appends were queued in, once for each shard: one write, one switch there and one back for
all requests of the turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from forebay.engines import OwnedShard


class TurnCommits:
    """What was queued in the shards of one topic in this turn of the loop. For calls in that loop."""

    def __init__(self, commit_soon: Callable[[OwnedShard], None]) -> None:
        """`commit_soon` has another thread commit a shard."""
        self._loop = asyncio.get_running_loop()
        self._commit_soon = commit_soon
        self._asked: dict[OwnedShard, None] = {}

    def ask(self, shard: OwnedShard) -> None:
        """Have committed what the shard has queued: from the end of this turn on, or now if that means a sync."""
        if shard.durability.policy.syncs_before_ack:
            self._commit_soon(shard)
            return
        if not self._asked:
            self._loop.call_soon(self._commit)
        self._asked[shard] = None

    def _commit(self) -> None:
        asked, self._asked = self._asked, {}
        for shard in asked:
            self._commit_soon(shard)
