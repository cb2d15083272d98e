"""Keeps full garbage collections short in a process that serves many topics.

Python's collector walks every object that lives, again and again: a second for ten thousand topics, in which nothing is
answered. What outlives a full collection is set apart (`gc.freeze`) and not walked any more, so that each collection
walks what has come since the one before: topics that were added are walked once. That begins before shards are
recovered, for collections come while there are more and more of them. What is set apart is freed by its
counts as ever, unless it is part of a circle; for those everything is walked again once many topics were deleted.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, Final

DELETED_MAX: Final = 1_000
"""After so many deleted topics what they may have left in circles is looked for."""


class SettledHeap:
    """What this process keeps for long is not walked by its collector. One for a process; for its event loop."""

    def __init__(self) -> None:
        self._deleted = 0

    def begin(self) -> None:
        """From now on, what outlives a full collection is set apart. Harmless when repeated."""
        if self._after_collection not in gc.callbacks:
            gc.callbacks.append(self._after_collection)

    def freeze(self) -> None:
        """Set apart what there is now: walks what has come since the last full collection. Once all topics are open."""
        self.begin()
        gc.collect()

    def note_deleted(self) -> None:
        """A topic was deleted."""
        self._deleted += 1
        if self._deleted >= DELETED_MAX:
            self._deleted = 0
            # The next full collection walks everything, and sets apart what is left.
            gc.unfreeze()

    def end(self) -> None:
        """Let everything be walked again."""
        if self._after_collection in gc.callbacks:
            gc.callbacks.remove(self._after_collection)
            gc.unfreeze()

    def _after_collection(self, phase: str, about: Mapping[str, Any]) -> None:
        if phase == "stop" and about["generation"] == 2:
            gc.freeze()
