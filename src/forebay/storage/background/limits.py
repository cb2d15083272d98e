"""Keeps topics to their definitions: applies caps and times to live, and hears of what others have altered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from forebay.appends.callbacks import deferred
from forebay.clock import Clock
from forebay.engines import OpenShard
from forebay.engines.background import Background
from forebay.engines.seam import LookedUpShard, offering, offers
from forebay.errors import Closed, ForebayError
from forebay.locks import Rank, RankedCondition, RankedRLock
from forebay.metadata import Compacted, Watch
from forebay.storage.altering import Alterations
from forebay.storage.compaction import Compaction
from forebay.storage.definitions import Defined, Definitions
from forebay.storage.limited import Limited

logger = logging.getLogger(__name__)


class Ended(NamedTuple):
    """How many records of a shard one pass over its limits ended: by caps and age, and as superseded by their key."""

    evicted: int
    compacted: int


class LimitsWorker:
    """In a thread that exists once there is something to keep; never inside an append."""

    def __init__(
        self,
        shards: Callable[[], list[OpenShard]],
        definitions: Definitions,
        alterations: Alterations,
        limited: Limited,
        *,
        clock: Clock,
        interval_s: float,
    ) -> None:
        self._shards = shards
        self._definitions = definitions
        self._alterations = alterations
        self._limited = limited
        self._clock = clock
        self._interval_s = interval_s
        self._compaction = Compaction()
        self._changed = RankedCondition(Rank.LEAF, "storage.limits")
        self._stepping = RankedRLock(Rank.ROUND, "storage.limits_round")
        self._watch: Watch | None = None
        self._heard_at = float("-inf")
        self._ended = False
        self._thread = Background("forebay-keeping", self._run)

    def begin(self) -> None:
        """Step from now on, every interval."""
        with self._changed:
            if not self._ended:
                self._thread.start()

    def step(self) -> None:
        """Hear of changes, and end what the limits of shards ask for, used by anybody or not."""
        self.hear()
        # Not while stepping: whoever deletes a topic keeps others from opening shards, and waits for a step.
        self._limited.open_due(lambda: self._ended)
        for shard in self._shards():
            with deferred(), self._stepping:
                # Beside the owner nothing ends records but the owner.
                if not self._ended and offers(shard, "evict"):
                    self._keep(shard)

    def apply(self, shard: OpenShard) -> Ended:
        """Apply the limits of one shard now, in the caller's thread, which may hold no lock; its trouble is raised."""
        with deferred(), self._stepping:
            return self._ended_by_limits(shard)

    def hear(self) -> None:
        """Go by what others have altered, if it is time to look."""
        with self._stepping:
            now = self._clock.monotonic()
            if self._ended or now - self._heard_at < self._interval_s:
                return
            self._heard_at = now
            try:
                self._hear()
            except ForebayError as error:
                self._end_watch()
                logger.warning("changes to topics are not seen for now: %s", error)

    def forget(self) -> None:
        """On return nothing works on a shard that was let go of before the call."""
        with self._stepping:
            pass

    def end(self) -> None:
        """Stop the thread and wait for its present step."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        # The thread that makes history hears of changes too, and may be at it.
        with self._stepping:
            self._end_watch()

    def abandon(self) -> None:
        """In a forked child: the thread is not there."""
        self._thread.abandon()
        self._watch = None
        self._ended = True
        self._changed = RankedCondition(Rank.LEAF, "storage.limits")
        self._stepping = RankedRLock(Rank.ROUND, "storage.limits_round")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended, self._interval_s)
                if self._ended:
                    return
            try:
                self.step()
            except BaseException:
                # A callback may run here, and raise what is no `Exception`.
                logger.exception("the limits of topics were not applied and will be tried again")

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
            if self._limited.note(defined.spec):
                self.begin()

    def _keep(self, shard: OpenShard) -> None:
        """Apply the limits of a shard. Its trouble is logged and does not stop the others."""
        try:
            self._ended_by_limits(shard)
        except Closed:
            # It was closed since it was listed.
            return
        except (ForebayError, OSError) as error:
            logger.warning("%s: its limits are not applied for now: %s", shard.ref, error)

    def _ended_by_limits(self, shard: OpenShard) -> Ended:
        evicted = self._evict(offering(shard, "evict")) if shard.ref.spec.is_limited else 0
        compacted = self._compaction.step(shard, self._clock.now_ms())
        if compacted:
            logger.info("%s: compacted %d superseded records away", shard.ref, compacted)
        return Ended(evicted, compacted)

    def _evict(self, shard: LookedUpShard) -> int:
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
