"""The memory that the logs of one process share: what waits to be written, and the newest records kept for readers."""

from __future__ import annotations

from typing import NamedTuple

from forebay.appends.budget import QueueBudget
from forebay.clock import Clock
from forebay.settings import RuntimeSettings
from forebay.wal.tail import CacheBudget


class MemoryBounds(NamedTuple):
    """The two budgets of a process, over all of its shards."""

    queues: QueueBudget
    caches: CacheBudget

    @classmethod
    def of(cls, settings: RuntimeSettings, clock: Clock) -> MemoryBounds:
        """As the settings say. No thread runs before a bound is reached."""
        return cls(QueueBudget(settings.queue_bytes_max), CacheBudget(settings.cache_bytes_max, clock))
