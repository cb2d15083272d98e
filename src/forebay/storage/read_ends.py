"""Where a read of several partitions ends: at one look, with each bulk load in all of them or in none.

A load becomes visible in one transaction, after it was attached to every partition. A look that passes partition after
partition may find it in a later one and not in an earlier. So a load counts only if it was known to be over before the
look began: what a look learns on the way makes it look once more, and what is new by then waits for the next read.
Knows shards; reads no records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from forebay.engines import ReadShard
from forebay.engines.readonly import FollowedShard
from forebay.format.metadata.descriptor import LoadStatus
from forebay.shard import SegmentShard


class PartitionEnd(NamedTuple):
    """Where a partition ends, and where bulk loads begin in it that may not be over."""

    end: int
    loads: Mapping[str, int]


def end_of(shard: ReadShard) -> PartitionEnd:
    """The end of a partition as it is now. The loads are asked for last: one that lies below the end is among them."""
    end = shard.offsets().next
    if isinstance(shard, SegmentShard):
        return PartitionEnd(end, shard.history.loads())
    return PartitionEnd(end, shard.loads() if isinstance(shard, FollowedShard) else {})


def load_status(shard: ReadShard, load_id: str) -> LoadStatus:
    """How far a bulk load is that a shard has named."""
    if isinstance(shard, SegmentShard):
        return shard.history.segments.load_status(load_id)
    assert isinstance(shard, FollowedShard), "no other has loads"
    return shard.load_status(load_id)


class ReadEnds:
    """Finds the ends of the partitions of one topic, again and again. Safe for concurrent use.

    `_over` holds the loads that are known to be over, as far as partitions still name them.
    """

    def __init__(self) -> None:
        self._over: frozenset[str] = frozenset()

    def of(
        self,
        partitions: Sequence[int],
        look: Callable[[int], PartitionEnd],
        status: Callable[[int, str], LoadStatus],
    ) -> list[int]:
        """The ends of these partitions, in their order. `look` asks one, `status` asks for a load that it named."""
        over = self._over
        seen, learned = self._look(partitions, look, status, over)
        if learned:
            over |= learned
            # Whatever is committed from here on waits: it may be missing in the partitions that come first.
            seen, _ = self._look(partitions, look, None, over)
        self._over = over & {load_id for found in seen for load_id in found.loads}
        return [found.end for found in seen]

    @staticmethod
    def _look(
        partitions: Sequence[int],
        look: Callable[[int], PartitionEnd],
        status: Callable[[int, str], LoadStatus] | None,
        over: frozenset[str],
    ) -> tuple[list[PartitionEnd], frozenset[str]]:
        """One look, and the loads that were found to be over and are not among `over`. Without `status` none is."""
        seen: list[PartitionEnd] = []
        learned: set[str] = set()
        for partition in partitions:
            found = look(partition)
            end = found.end
            for load_id, start in found.loads.items():
                if load_id in over or start >= end:
                    continue
                if status is not None and status(partition, load_id) is not LoadStatus.OFFERED:
                    learned.add(load_id)
                else:
                    end = start
            seen.append(found._replace(end=end))
        return seen, frozenset(learned)
