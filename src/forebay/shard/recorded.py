"""The history of a shard as somebody sees it who does not own it: what the catalog says, looked at anew when asked."""

from __future__ import annotations

from functools import cached_property

from forebay.catalog import ShardCatalog
from forebay.clock import Clock
from forebay.history import History
from forebay.records import Offsets
from forebay.shard.places import Places

LOOK_SECONDS = 0.2


class Recorded:
    """History beside whoever makes it."""

    def __init__(self, catalog: ShardCatalog, places: Places, clock: Clock) -> None:
        self._catalog = catalog
        self._places = places
        self._clock = clock
        self._looked_at = float("-inf")

    @cached_property
    def history(self) -> History:
        """What is catalogued."""
        return History(self._catalog, self._places.segment)

    @property
    def exported(self) -> int:
        """The end of history, as of a moment ago."""
        now = self._clock.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self.history.refresh()
        return self.history.end

    def beside(self, local: Offsets) -> Offsets:
        """The watermarks, where a local log says the rest: what another directory holds is seen by its history."""
        exported = self.exported
        return local._replace(exported=exported, next=max(local.next, exported), durable=max(local.durable, exported))

    def close(self) -> None:
        """Give back what is held."""
        if "history" in vars(self):
            self.history.close()
