"""The history of a shard for a process that does not own it: what the catalog says at each call."""

from __future__ import annotations

from functools import cached_property

from forebay.catalog import ShardCatalog
from forebay.catalog.removals import RecordedRemovals
from forebay.clock import Clock
from forebay.format.control.frames import higher
from forebay.format.metadata.descriptor import ShardState
from forebay.history import History
from forebay.records import OFFSET_MAX, Offsets
from forebay.shard.context import Places
from forebay.shard.tiers import NOTHING, Ended

LOOK_SECONDS = 0.2


class Recorded:
    """History beside its owner, seen from the data directory `holder`."""

    def __init__(self, catalog: ShardCatalog, places: Places, holder: str, clock: Clock) -> None:
        self._catalog = catalog
        self._places = places
        self._holder = holder
        self._clock = clock
        self._looked_at = float("-inf")
        self._is_elsewhere = False
        self.ended = NOTHING
        """What ended in history, as of the last look."""
        self._deletes = 0
        self.reserved_end = 0
        """No offset at or above was ever given out, as of the last look; the highest of all where a log alone knows."""

    @cached_property
    def history(self) -> History:
        """What is catalogued."""
        return History(self._catalog, self._places.segment)

    @property
    def exported(self) -> int:
        """The end of history, as of a moment ago."""
        self._look()
        return self.history.end

    @property
    def is_elsewhere(self) -> bool:
        """Whether another directory has the shard, as of a moment ago. Files here are what it was before, then.

        What is not history of them, its new owner could not take over: it counts as lost everywhere.
        """
        self._look()
        return self._is_elsewhere

    def beside(self, local: Offsets) -> Offsets:
        """The watermarks, where a local log says the rest: what another directory holds is seen by its history."""
        end = self.exported
        if self._is_elsewhere:
            return local._replace(exported=end, next=end, durable=end)
        return local._replace(exported=end, next=max(local.next, end), durable=max(local.durable, end))

    def close(self) -> None:
        """Give back what is held."""
        if "history" in vars(self):
            self.history.close()

    def look(self) -> None:
        """Look at everything that is recorded, now."""
        stored = self._catalog.state()
        self._is_elsewhere = stored is not None and stored.state.holder not in (None, self._holder)
        if stored is not None:
            self._take(stored.state)
            self.reserved_end = OFFSET_MAX if stored.state.reserved_in_log else stored.state.reserved_end
        self.history.refresh()
        self._looked_at = self._clock.monotonic()

    def _look(self) -> None:
        if self._clock.monotonic() - self._looked_at >= LOOK_SECONDS:
            self.look()

    def _take(self, state: ShardState) -> None:
        deleted = self.ended.deleted
        if state.deletes != self._deletes:
            deleted |= RecordedRemovals(self._catalog).deleted()
            self._deletes = state.deletes
        elif state.floor == self.ended.floor:
            return
        self.ended = Ended(deleted, higher(self.ended.floor, state.floor))
