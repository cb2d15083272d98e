"""The worker that ends records by caps, time to live and key compaction, and follows what others alter.

Key compaction: records that a later one with their key has superseded are deleted. Each record is looked at once, when
it has reached `compact_lag_ms`; then everything older of its key goes. So a record ends at the latest when the one that
superseded it is as old, and never before it is itself. The newest of a key stays, and so do records without a key.
"""

from __future__ import annotations

import logging
import weakref
from itertools import takewhile
from typing import NamedTuple

from forebay.appends.callbacks import deferred
from forebay.clock import Clock
from forebay.engines import OwnedShard
from forebay.errors import Closed, ForebayError, Moved, Unavailable, UnknownTopic
from forebay.locks import Rank, RankedRLock
from forebay.metadata import Compacted, Watch
from forebay.shard import ShardRef, refs_of
from forebay.shard.deletes import RangeDelete
from forebay.storage.alter import Alterations
from forebay.storage.definitions import Defined, Definitions
from forebay.storage.shards import Shards
from forebay.topics import Cleanup, Engine, TopicSpec
from forebay.workers import STOP_SECONDS, AtWork, Worker

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
        definitions: Definitions,
        alterations: Alterations,
        *,
        clock: Clock,
        interval_s: float,
    ) -> None:
        self._shards = shards
        self._definitions = definitions
        self._alterations = alterations
        self._clock = clock
        self._interval_s = interval_s
        self._compacted: weakref.WeakKeyDictionary[OwnedShard, int] = weakref.WeakKeyDictionary()
        """How far each open shard was looked at for key compaction; one that is opened again, from its front."""
        self._left_alone: weakref.WeakSet[OwnedShard] = weakref.WeakSet()
        """Shards that are being given up or removed."""
        self._unopened: dict[str, TopicSpec] = {}
        """Topics with limits, by id, whose shards here are not all open yet."""
        self._at_work = AtWork()
        self._hearing = RankedRLock(Rank.ROUND, "storage.following")
        """Held by the thread that asks for changes to topics; others leave it to that one."""
        self._watch: Watch | None = None
        self._heard_at = float("-inf")
        self.worker = Worker("forebay-limits", self.step, clock=clock, interval_s=interval_s)

    def step(self) -> None:
        """Go by changes of others, open idle shards with limits, and end what the limits of each open shard ask for."""
        self.hear()
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

    def hear(self) -> None:
        """Go by what others have altered, if it is time to look. Asks the metadata store."""
        if not self._hearing.acquire(blocking=False):
            return
        try:
            now = self._clock.monotonic()
            if now - self._heard_at >= self._interval_s:
                self._heard_at = now
                self._hear()
        except ForebayError as error:
            self._end_watch()
            logger.warning("changes to topics are not seen for now: %s", error)
        finally:
            self._hearing.release()

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

    def end(self) -> None:
        """Give back what it has of the metadata store, after a thread that asks it for changes now."""
        is_ours = self._hearing.acquire(timeout=STOP_SECONDS)
        try:
            self._end_watch()
        finally:
            if is_ours:
                self._hearing.release()

    def _is_watched(self, shard: OwnedShard) -> bool:
        return shard not in self._left_alone and self._shards.find(shard.ref) is shard

    def _hear(self) -> None:
        if self._watch is None:
            # First the watch, then the look: a change in between is seen twice rather than never.
            self._watch = self._definitions.watch()
            self._take(self._definitions.all_defined())
        try:
            self._take(self._definitions.changed(self._watch))
        except Compacted:
            self._end_watch()
            self._heard_at = float("-inf")

    def _end_watch(self) -> None:
        """Begin with a look at everything next time."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _take(self, found: list[Defined]) -> None:
        for defined in found:
            self._alterations.adopt_changed(defined)
            spec = defined.spec
            if spec.engine is not Engine.MEMORY and spec.ends_records:
                self._unopened[spec.topic_id] = spec
                self.worker.start()
            else:
                self._unopened.pop(spec.topic_id, None)

    def _open_idle(self) -> None:
        """Open the idle shards that lie here; what cannot be opened for now is tried again."""
        for topic_id, spec in list(self._unopened.items()):
            is_done = True
            for ref in refs_of(spec):
                if not self.worker.goes_on():
                    return
                # Not as the shard itself: a thread that waits for this worker to leave the shard may hold up openings.
                with self._at_work.at(f"opening {ref.id}") as is_free:
                    is_done = is_free and self._is_seen_to(ref) and is_done
            if is_done and self._unopened.get(topic_id) is spec:
                # Gone already if it was altered just now.
                self._unopened.pop(topic_id, None)

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
        ended = sum(_delete_superseded(shard, key, end) for key in keys)
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


def _delete_superseded(shard: OwnedShard, key: bytes, end: int) -> int:
    """Delete the records of a key below `end`, but for its newest."""
    newest = shard.read_by_key(key).batches
    ended = at = 0
    while newest and at < min(end, newest[0].base):
        page = shard.read_by_key(key, at, history=True)
        for batch in page.batches:
            stop = min(batch.end, end, newest[0].base)
            if batch.base < stop:
                ended += shard.delete(RangeDelete(batch.base, stop))
        at = page.next
    return ended
