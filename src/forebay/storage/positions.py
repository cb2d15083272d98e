"""What a caller of a topic means by `partition`, `start` and `stop`: which partitions, and which offsets in them.

Checks what callers give and asks shards where a position lies. Reads no records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forebay.arguments import StoredOffset, checked_position
from forebay.engines import ReadShard
from forebay.engines.readonly import FollowedShard
from forebay.errors import Invalid, OffsetOutOfRange
from forebay.records import EARLIEST, LATEST, Position, Start
from forebay.shard import SegmentShard
from forebay.storage.shards import TopicShards


class Positions:
    """The partitions of one topic and the positions in them, as its callers name them. Safe for concurrent use."""

    def __init__(self, shards: TopicShards) -> None:
        self._shards = shards

    def partitions(self, partition: int | None) -> Sequence[int]:
        """The partition that is named, or all of them."""
        return range(self._shards.spec.partitions) if partition is None else [self._shards.partition(partition)]

    def only(self, partition: int | None) -> int:
        """The partition that an offset without a partition lies in; `Invalid` if the topic has several."""
        spec = self._shards.spec
        if partition is None and spec.partitions > 1:
            raise Invalid(
                f"{spec.name} has {spec.partitions} partitions and an offset is a place in one of them: "
                "name the partition"
            )
        return self._shards.partition(partition or 0)

    def chosen(self, start: Start, partition: int | None, stop: int | None = None) -> Sequence[int]:
        """The partitions to read: the one that is named, those that `start` names, else all."""
        spec = self._shards.spec
        if partition is not None:
            return [self._shards.partition(partition)]
        if isinstance(start, Mapping):
            return sorted(self._shards.partition(number) for number in start)
        if spec.partitions > 1 and (checked_position(start).kind == "offset" or stop is not None):
            raise Invalid(
                f"{spec.name} has {spec.partitions} partitions and an offset is a place in one of them: "
                "name the partition, or give {partition: offset} for each"
            )
        return range(spec.partitions)

    def first(self, partition: int, start: Start) -> int:
        """The offset in the partition that a caller means by `start`; `OffsetOutOfRange` if it lies behind the end."""
        place = start.get(partition, EARLIEST) if isinstance(start, Mapping) else start
        first = self.resolve(place, partition)
        if not isinstance(place, StoredOffset) and checked_position(place).kind == "offset":
            self.check_start(first, partition)
        return first

    def check_start(self, offset: int, partition: int) -> None:
        """`OffsetOutOfRange` for an offset that a caller has named and that lies behind the end of the partition."""
        end = self._shards.ask(partition, _end_at_most)
        if offset > end:
            name = self._shards.spec.name
            raise OffsetOutOfRange(
                f"{name}[{partition}] ends at offset {end}, and start is {offset}: start at most there, or at LATEST",
                topic=name,
                partition=partition,
                offset=offset,
                earliest=self._shards.ask(partition, lambda shard: shard.offsets()).earliest,
                next=end,
            )

    def resolve(self, position: Position | int, partition: int) -> int:
        """The offset that a position means in this partition now."""
        position = checked_position(position)
        if position == EARLIEST:
            return self._shards.ask(partition, lambda shard: shard.offsets()).earliest
        if position == LATEST:
            return self._shards.ask(partition, lambda shard: shard.published())
        if position.kind == "time":
            found = self._shards.ask(partition, lambda shard: shard.offset_at_time(position.value))
            return found if found is not None else self._shards.ask(partition, lambda shard: shard.published())
        return position.value


def lag_end(shard: ReadShard) -> int:
    """See `ReadShard.lag_end`; history may end in a gap too, so it is looked at if that was not done yet."""
    if isinstance(shard, SegmentShard):
        shard.history.know_end()
    return shard.lag_end()


def _end_at_most(shard: ReadShard) -> int:
    return shard.end_at_most() if isinstance(shard, FollowedShard) else shard.offsets().next
