"""Bounds what waits to be written in all append queues of a process together.

Each queue has a share of the budget, which grows in steps before appends enter the queue and shrinks once they are
answered. A queue in which nothing waits takes one append in any case, so a backlog of other shards, however long it
lasts, slows a shard down to one append per commit and never stops it.
"""

from __future__ import annotations

import weakref

from forebay.locks import Rank, RankedRLock

STEP_BYTES = 4096
"""A share grows by so much at least: small appends ask the budget once for many of them."""
RECOUNT_REFUSALS = 64
"""At so many refusals the shares are counted again: an interrupt (Ctrl-C) may have cut a change of one short."""


class QueueBudget:
    """How many bytes all append queues of a process may hold. Safe for concurrent use, in signal handlers too."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.refusals = 0
        """How often a share could not grow."""
        self.used = 0
        """What the shares come to."""
        self._lock = RankedRLock(Rank.LEAF, "appends.queue_budget")
        self._shares: weakref.WeakSet[QueueShare] = weakref.WeakSet()

    def share(self) -> QueueShare:
        """The share of one more queue; it ends with the queue."""
        share = QueueShare(self)
        with self._lock:
            self._shares.add(share)
        return share

    @property
    def bytes(self) -> int:
        """What all queues hold now, in the steps of their shares."""
        with self._lock:
            return sum(share.bytes for share in self._shares)

    def grow(self, share: QueueShare, size: int, *, always: bool) -> bool:
        """Give a share `size` bytes more; false if the budget has no room and not `always`. Waits for no queue."""
        with self._lock:
            if not always and self.used + size > self.bytes_max:
                if self.refusals % RECOUNT_REFUSALS == 0:
                    self.used = sum(other.bytes for other in self._shares)
                if self.used + size > self.bytes_max:
                    self.refusals += 1
                    return False
            share.bytes += size
            self.used += size
            return True

    def shrink(self, share: QueueShare, size: int) -> None:
        """Leave a share these bytes."""
        with self._lock:
            self.used += size - share.bytes
            share.bytes = size


class QueueShare:
    """What one queue may hold of the budget of its process. Changed by the budget alone."""

    __slots__ = ("__weakref__", "budget", "bytes")

    def __init__(self, budget: QueueBudget) -> None:
        self.budget = budget
        self.bytes = 0
