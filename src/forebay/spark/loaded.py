"""Which bulk loads a look at topics shows: each in all partitions that it went into, or in none. Knows the catalog."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from forebay.catalog import ShardCatalog
from forebay.format.descriptor import LoadStatus

T = TypeVar("T")


class LoadsSeen:
    """How far loads are, for one look after the other. For one thread."""

    def __init__(self) -> None:
        self._over: dict[str, LoadStatus] = {}
        """How a load ended never changes."""
        self._is_closed = False
        self._is_torn = False

    def whole(self, look: Callable[[], T]) -> T:
        """What a look at partition after partition sees.

        A load that turns out to be committed on the way may be missing in partitions that were looked at before: then
        it is looked once more, and what is committed only by then waits for the next time.
        """
        self._is_closed = self._is_torn = False
        seen = look()
        if self._is_torn:
            self._is_closed = True
            seen = look()
        return seen

    def status(self, catalog: ShardCatalog, load_id: str) -> LoadStatus:
        """How far a load is that the history of a partition names."""
        known = self._over.get(load_id)
        if known is not None or self._is_closed:
            return known or LoadStatus.OFFERED
        status = catalog.load_status(load_id)
        if status is not LoadStatus.OFFERED:
            self._over[load_id] = status
            self._is_torn = True
        return status
