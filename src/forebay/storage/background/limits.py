"""The worker that ends records by caps, time to live and key compaction.

Key compaction: records that a later one with their key has superseded are deleted. Each record is looked at once, when
it has reached `compact_lag_ms`; then everything older of its key goes. So a record ends at the latest when the one that
superseded it is as old, and never before it is itself. The newest of a key stays, and so do records without a key.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

from forebay.appends.callbacks import deferred
from forebay.clock import Clock
from forebay.engines import OwnedShard
from forebay.errors import Closed, ForebayError, Moved, Unavailable, UnknownTopic
from forebay.format.control.offsets import OffsetSet
from forebay.shard.deletes import DeleteOffsets
from forebay.storage.shards import Shards
from forebay.topics import Cleanup, Engine, ShardRef, TopicName, TopicSpec, refs_of
from forebay.workers import AtWork, Worker

logger = logging.getLogger(__name__)

PASS_PAGES = 16
"""No more than so many pages are looked at in one pass, so that a long topic does not keep the others waiting."""


class EndedCounts(NamedTuple):
    """How many records of a shard one pass over its limits ended: by caps and age, and as superseded by their key."""

    evicted: int
    compacted: int


class LimitsWorker:
    """Keeps all shards to the limits of their topics; never inside an append.

    Idle shards of topics with limits are opened once, so that their records end without being used. Its thread exists
    once there is something to keep.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        clock: Clock,
        interval_s: float,
        follow_changes: Callable[[], None],
    ) -> None:
        """`follow_changes` calls `look_after` with what other processes have changed."""
        self._shards = shards
        self._clock = clock
        self._follow_changes = follow_changes
        self._compacted: weakref.WeakKeyDictionary[OwnedShard, int] = weakref.WeakKeyDictionary()
        """How far each open shard was looked at for key compaction; one that is opened again, from its front."""
        self._left_alone: weakref.WeakSet[OwnedShard] = weakref.WeakSet()
        """Shards that are being given up or removed."""
        self._unopened: dict[TopicName, TopicSpec] = {}
        """Topics with limits whose shards here are not all open yet."""
        self._at_work = AtWork()
        self.worker = Worker("forebay-limits", self.step, clock=clock, interval_s=interval_s)

    def step(self) -> None:
        """Go by changes of others, open idle shards with limits, and end what the limits of each open shard ask for."""
        self._follow_changes()
        self._open_idle()
        for shard in self._shards.all():
            if not self.worker.goes_on():
                return
            with deferred(), self._at_work.at(shard.ref.id) as is_free:
                if is_free and self._is_watched(shard):
                    self._keep(shard)

    def apply(self, shard: OwnedShard) -> EndedCounts:
        """Apply the limits of one shard now, in the caller's thread, which may hold no lock; its trouble is raised."""
        with deferred(), self._at_work.after_others(shard.ref.id):
            return self._ended_by_limits(shard)

    def look_after(self, spec: TopicSpec) -> None:
        """A topic is defined so from now on: open its idle shards here if it has limits."""
        if spec.engine is not Engine.MEMORY and spec.ends_records:
            self._unopened[spec.name] = spec
            self.worker.start()
        else:
            self.leave(spec.name)

    def leave(self, name: TopicName, topic_id: str | None = None) -> None:
        """The topic of this name, with this id if one is given, has no limits any more, or is gone."""
        known = self._unopened.get(name)
        if known is not None and topic_id in (None, known.topic_id):
            self._unopened.pop(name, None)

    def drop(self, ref: ShardRef) -> bool:
        """Begin no more work on the shard that is open now; whether none is under way. Does not wait."""
        shard = self._shards.find(ref)
        if shard is not None:
            self._left_alone.add(shard)
        return self._at_work.is_idle(ref.id)

    def forget(self, ref: ShardRef) -> None:
        """Leave the shard alone that is open now; on return nothing works on it. One opened later is looked after."""
        self.drop(ref)
        self._at_work.wait_idle(ref.id)

    def _is_watched(self, shard: OwnedShard) -> bool:
        return shard not in self._left_alone and self._shards.find(shard.ref) is shard

    def _open_idle(self) -> None:
        """Open the idle shards that lie here; what cannot be opened for now is tried again."""
        for name, spec in list(self._unopened.items()):
            is_done = True
            for ref in refs_of(spec):
                if not self.worker.goes_on():
                    return
                # Not as the shard itself: a thread that waits for this worker to leave the shard may hold up openings.
                with self._at_work.at(f"opening {ref.id}") as is_free:
                    is_done = is_free and self._is_seen_to(ref) and is_done
            if is_done and self._unopened.get(name) is spec:
                # Gone already if it was altered just now.
                self._unopened.pop(name, None)

    def _is_seen_to(self, ref: ShardRef) -> bool:
        try:
            if self._shards.find(ref) is None and self._shards.was_here(ref):
                self._shards.ours(ref)
        except (Closed, Moved, UnknownTopic):
            return True
        except (ForebayError, OSError) as error:
            logger.warning("%s: its limits are not applied while it cannot be opened: %s", ref, error)
            self.worker.note_failure(error)
            return not isinstance(error, Unavailable | OSError)
        return True

    def _keep(self, shard: OwnedShard) -> None:
        """Apply the limits of a shard. Its trouble is logged and does not stop the others."""
        try:
            self._ended_by_limits(shard)
        except Closed:
            # It was closed since it was listed.
            return
        except (ForebayError, OSError) as error:
            logger.warning("%s: its limits are not applied for now: %s", shard.ref, error)
            self.worker.note_failure(error)

    def _ended_by_limits(self, shard: OwnedShard) -> EndedCounts:
        evicted = self._evict(shard) if shard.ref.spec.is_limited else 0
        compacted = self._compact(shard) if shard.ref.spec.cleanup is Cleanup.COMPACT else 0
        if compacted:
            logger.info("%s: compacted %d superseded records away", shard.ref, compacted)
        return EndedCounts(evicted, compacted)

    def _evict(self, shard: OwnedShard) -> int:
        evicted = shard.evict(self._clock.now_ms())
        if evicted.reason is not None:
            logger.info(
                "%s: evicted %d records, %d bytes, up to offset %d (%s)",
                shard.ref,
                evicted.records,
                evicted.bytes,
                evicted.floor,
                evicted.reason.name.lower(),
            )
        if evicted.held_back:
            logger.warning(
                "%s: more records are too old than may go at once: the rest goes next time; is the clock right?",
                shard.ref,
            )
        return evicted.records

    def _compact(self, shard: OwnedShard) -> int:
        """One pass of key compaction over a shard; how many records it ended."""
        start = max(self._compacted.get(shard, 0), shard.offsets().earliest)
        keys, end = _aged(shard, start, self._clock.now_ms() - shard.ref.spec.compact_lag_ms)
        superseded: list[int] = []
        try:
            for key in keys:
                superseded += _superseded(shard, key, end)
        finally:
            # Once for all keys: each delete in history is a transaction. What was found before a key could not be
            # read goes all the same, for the pass is repeated from its beginning.
            ended = shard.delete(DeleteOffsets(OffsetSet.of(superseded))) if superseded else 0
        self._compacted[shard] = end
        return ended


def _aged(shard: OwnedShard, start: int, appended_max: int) -> tuple[dict[bytes, None], int]:
    """The keys of records from `start` on that were appended by then, and where those end."""
    keys: dict[bytes, None] = {}
    at = start
    for _ in range(PASS_PAGES):
        page = shard.read(at)
        for batch in page.batches:
            aged = sum(run.records for run in takewhile(lambda run: run.at <= appended_max, batch.appended()))
            keys.update((key, None) for key in (batch.keys() or [])[:aged] if key is not None)
            if aged < batch.count:
                return keys, batch.base + aged
        if page.next == at:
            break
        at = page.next
    return keys, at


def _superseded(shard: OwnedShard, key: bytes, end: int) -> list[int]:
    """The records of a key below `end`, but for its newest."""
    newest = shard.read_by_key(key).batches
    found: list[int] = []
    at = 0
    while newest and at < min(end, newest[0].base):
        page = shard.read_by_key(key, at, history=True)
        for batch in page.batches:
            stop = min(batch.end, end, newest[0].base)
            found += range(batch.base, stop)
        at = page.next
    return found
