"""The threads that commit what callers have queued and do not wait for, as by `append_nowait` and from asyncio.

A caller that waits for its append commits in its own thread and needs none of them. Each committer serves one shard at
a time, the one that has waited longest, and a shard is served by one thread at a time. There are three groups:

- shards whose commits sync (class `fsync`): all threads at once, since each waits for the disk most of the time;
- shards whose commits only write: one thread, because two would wait for the interpreter; another joins in when the
  first has been at one shard for some milliseconds;
- commits that must first wait for something else (offsets reserved in the metadata store, a new file): these have
  threads of their own, so that however many shards wait, they keep no committer from the others.

So a shard that hangs keeps one thread, and the others go on. Where all threads of a group hang, others are begun in
their place, up to a limit: behind that, shards of the group wait until one comes back.

Where many shards wait whose commits sync, one thread commits them in a round: it writes all of them, syncs their file
system once, and then publishes and acknowledges each. It holds their commit locks from the write to the
acknowledgement, so that nothing comes in between. What would have to wait takes no part in a round.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence

from forebay.clock import Clock
from forebay.disk.machine import descriptors_kept
from forebay.engines import OwnedShard
from forebay.settings import RuntimeSettings
from forebay.shard import SegmentShard
from forebay.storage.background.sync import FileSystem
from forebay.wal.log import WrittenCommit
from forebay.workers import ItemPool, ServeMany

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.005
"""So long one thread that only writes is given for one shard before another thread goes on with the next."""
STUCK_SECONDS = 1.0
"""A commit that takes longer is left to its thread: another is begun where all of them are so."""
STUCK_MAX = 256
"""So many commits of a group may hang, besides as many as it has threads, before other shards wait for them."""


class Committers:
    """Commits the queues of shards, soon after they are asked for."""

    def __init__(self, clock: Clock, settings: RuntimeSettings, filesystem: FileSystem | None = None) -> None:
        """Threads begin when they are first needed. Without a file system there are no rounds."""
        threads = settings.committers
        self._filesystem = filesystem
        self._writing: ItemPool[OwnedShard] = ItemPool(
            "forebay-committer",
            self._commit,
            clock=clock,
            threads=threads,
            patience_s=PATIENCE_SECONDS,
            stuck_s=STUCK_SECONDS,
            stuck_max=STUCK_MAX,
            name_of=_name_of,
        )
        # No more files than stay open while they have unsynced bytes: to open another one of them would be synced.
        rounds = ServeMany(
            self._commit_together, settings.shards_syncfs_min, descriptors_kept(settings.descriptors_max) // 2
        )
        self._syncing: ItemPool[OwnedShard] = ItemPool(
            "forebay-syncing-committer",
            self._commit,
            clock=clock,
            threads=threads,
            stuck_s=STUCK_SECONDS,
            stuck_max=STUCK_MAX,
            name_of=_name_of,
            many=rounds if filesystem is not None else None,
        )
        self._waiting: ItemPool[OwnedShard] = ItemPool(
            "forebay-waiting-committer",
            _commit,
            clock=clock,
            threads=threads,
            stuck_s=STUCK_SECONDS,
            stuck_max=STUCK_MAX,
            name_of=_name_of,
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

    def _commit_together(self, shards: Sequence[OwnedShard]) -> None:
        """A round. Takes the commit lock of each shard if it is free, and holds them until all are synced.

        Whatever happens, each commit that was begun is ended. One shard's trouble is logged and stops no other.
        """
        filesystem = self._filesystem
        assert filesystem is not None
        begun: list[tuple[SegmentShard, WrittenCommit]] = []
        left: set[OwnedShard] = set(shards)
        failure: OSError | None = OSError(errno.EINTR, "a sync was interrupted")
        try:
            for shard in shards:
                if isinstance(shard, SegmentShard) and filesystem.holds(shard):
                    written = _begun(shard)
                    if written is not None:
                        begun.append((shard, written))
                    # What is queued from here on in a shard that was written was asked for again.
                    if written is not None or shard.wal.queue.is_empty:
                        left.discard(shard)
            if begun:
                failure = filesystem.sync()
        finally:
            for one, written in begun:
                _end(one, written, failure)
            for other in left:
                self._waiting.ask(other)
        for shard in shards:
            if isinstance(shard, SegmentShard):
                shard.wal.group.call_back()


def _name_of(shard: OwnedShard) -> str:
    return str(shard.ref)


def _commit(shard: OwnedShard) -> None:
    shard.commit()


def _begun(shard: SegmentShard) -> WrittenCommit | None:
    try:
        return shard.wal.begin_commit()
    except Exception:
        logger.exception("%s: a commit failed", shard.ref)
        return None


def _end(shard: SegmentShard, written: WrittenCommit, failure: OSError | None) -> None:
    try:
        shard.wal.end_commit(written, failure)
    except Exception:
        logger.exception("%s: a commit failed", shard.ref)
