"""Topics at one moment, and what a task reads of that: plain values, which are sent to other processes.

Knows descriptors of history; opens nothing and knows nothing of Spark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forebay.format.control.offsets import OffsetSet
from forebay.spark.place.location import Location
from forebay.spark.reading.filters import Filters
from forebay.topics import shard_id
from forebay.views.snapshot import PartitionBounds, ScanPiece, ShardView

__all__ = ["Part", "PartitionBounds", "Range", "ScanPiece", "ShardView", "Snapshot", "Split"]


class Range(NamedTuple):
    """Offsets `[start, stop)` of a partition, which is the one of this place in the snapshot."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What there is to read at one moment, whatever is appended later."""

    location: Location
    shards: tuple[ShardView, ...]

    @property
    def bounds(self) -> list[PartitionBounds]:
        """What each partition holds."""
        return [view.bounds for view in self.shards]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Offsets `[start, stop)` of one partition for one task, and where they lie. Plain values alone."""

    topic: str
    topic_id: str
    partition: int
    is_durable: bool
    start: int
    stop: int
    pieces: tuple[ScanPiece, ...]
    deleted: OffsetSet

    @property
    def shard(self) -> str:
        """The name of its shard."""
        return shard_id(self.topic_id, self.partition)

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What one task reads. Plain values alone: it travels to another process, perhaps on another machine."""

    location: Location
    parts: tuple[Part, ...]
    columns: tuple[str, ...]
    filters: Filters
    fail_on_data_loss: bool
