"""Which bulk loads a look at topics shows: each in all partitions that it went into, or in none. Knows the catalog.

A history may name thousands of loads, and almost all of them are over. The metadata store lists those that are not
below `offers/`, so a look reads that list once and asks for single loads only if they are on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from forebay.catalog import ShardCatalog
from forebay.format.metadata.descriptor import LoadStatus
from forebay.loads.book import LoadBook

T = TypeVar("T")


class FoundHistory(NamedTuple):
    """The history of a partition as found: where it stands, and the loads that it names."""

    generation: int
    next: int
    loads: frozenset[str]


class _Looked(NamedTuple):
    """A partition that this look has passed."""

    catalog: ShardCatalog
    history: FoundHistory


class LoadsSeen:
    """How far loads are, for one look after the other. For one thread."""

    def __init__(self) -> None:
        self._over: dict[str, LoadStatus] = {}
        """How a load ended never changes."""
        self._looked: list[_Looked] = []
        self._waiting: set[str] = set()
        """Loads before which this look ends a partition."""
        self._is_closed = False
        self._is_torn = False
        self._is_doubtful = False

    def whole(self, look: Callable[[], T]) -> T:
        """What a look at partition after partition sees.

        A load that is committed on the way may be missing in partitions that were looked at before: then the look is
        repeated, and what is committed only by then waits for the next time.
        """
        self._begin(is_closed=False)
        seen = look()
        if self._is_torn or (self._is_doubtful and self._has_moved()):
            self._begin(is_closed=True)
            seen = look()
        return seen

    def history_and_loads(
        self, catalog: ShardCatalog, history: Callable[[], FoundHistory]
    ) -> tuple[FoundHistory, Mapping[str, LoadStatus]]:
        """The history of a partition, and how far each load is that it names.

        `history` reads it, or finds it unchanged at the cost of one look at its end.
        """
        found = history()
        unknown = frozenset[str]() if self._is_closed else found.loads - self._over.keys()
        over = frozenset[str]()
        if unknown:
            over = unknown - LoadBook(catalog.store, catalog.keys.prefix, catalog.clock).pending().keys()
            # Read again: a load that was given up leaves gaps in the history first and that list last. What is named
            # now, and was not on the list before, is therefore committed.
            found = history()
        statuses = {load: self._status(catalog, load, is_committed=load in over) for load in found.loads}
        self._looked.append(_Looked(catalog, found))
        return found, statuses

    def _begin(self, *, is_closed: bool) -> None:
        self._looked, self._waiting = [], set()
        self._is_closed, self._is_torn, self._is_doubtful = is_closed, False, False

    def _status(self, catalog: ShardCatalog, load_id: str, *, is_committed: bool) -> LoadStatus:
        known = self._over.get(load_id)
        if known is not None or self._is_closed:
            return known or LoadStatus.OFFERED
        status = LoadStatus.COMMITTED if is_committed else catalog.load_status(load_id)
        if status is LoadStatus.OFFERED:
            self._waiting.add(load_id)
            return status
        self._over[load_id] = status
        self._is_torn |= load_id in self._waiting
        self._is_doubtful |= bool(self._looked)
        return status

    def _has_moved(self) -> bool:
        """Whether the history of a partition went on since this look passed it, by a load perhaps."""
        now = ((catalog.frontier(), history) for catalog, history in self._looked)
        return any((front.cur.generation, front.next) != (before.generation, before.next) for front, before in now)
