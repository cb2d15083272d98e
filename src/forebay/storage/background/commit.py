"""The threads that commit what callers have queued and do not wait for, as by `append_nowait` and from asyncio.

A caller that waits for its append commits in its own thread and needs none of them. Each committer serves one shard at
a time, the one that has waited longest, and a shard is served by one thread at a time. There are three groups:

- shards whose commits sync (class `fsync`): all threads at once, since each waits for the disk most of the time;
- shards whose commits only write: one thread, because two would wait for the interpreter; another joins in when the
  first has been at one shard for some milliseconds;
- commits that must first wait for something else (offsets reserved in the metadata store, a new file): these have
  threads of their own, so that however many shards wait, they keep no committer from the others.

So a shard that hangs keeps one thread, and the others go on.
"""

from __future__ import annotations

from forebay.clock import Clock
from forebay.engines import OwnedShard
from forebay.workers import ItemPool

PATIENCE_SECONDS = 0.005
"""So long one thread that only writes is given for one shard before another thread goes on with the next."""
STUCK_SECONDS = 1.0
"""A commit that takes longer is left to its thread: another is begun where all of them are so."""


class Committers:
    """Commits the queues of shards, soon after they are asked for."""

    def __init__(self, clock: Clock, threads: int) -> None:
        """At most `threads` in each group, begun when they are first needed."""
        self._writing: ItemPool[OwnedShard] = ItemPool(
            "forebay-committer",
            self._commit,
            clock=clock,
            threads=threads,
            patience_s=PATIENCE_SECONDS,
            stuck_s=STUCK_SECONDS,
        )
        self._syncing: ItemPool[OwnedShard] = ItemPool(
            "forebay-syncing-committer", self._commit, clock=clock, threads=threads, stuck_s=STUCK_SECONDS
        )
        self._waiting: ItemPool[OwnedShard] = ItemPool(
            "forebay-waiting-committer", _commit, clock=clock, threads=threads, stuck_s=STUCK_SECONDS
        )

    @property
    def workers(self) -> tuple[ItemPool[OwnedShard], ...]:
        """Their threads."""
        return self._writing, self._syncing, self._waiting

    def ask(self, shard: OwnedShard) -> None:
        """Commit what the shard has queued, soon. For any thread, an event loop too: it waits for nothing."""
        pool = self._syncing if shard.durability.policy.syncs_before_ack else self._writing
        pool.ask(shard)

    def is_inside(self) -> bool:
        """Whether a signal handler has interrupted the calling thread while it asked for a commit."""
        return self._writing.is_inside() or self._syncing.is_inside()

    def _commit(self, shard: OwnedShard) -> None:
        if shard.commits_slowly:
            self._waiting.ask(shard)
        else:
            shard.commit()


def _commit(shard: OwnedShard) -> None:
    shard.commit()
