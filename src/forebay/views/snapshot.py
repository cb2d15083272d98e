"""A partition at one moment: plain values, which are sent to other processes. Opens nothing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from forebay.format.control.frames import NO_FLOOR, Floor
from forebay.format.control.offsets import OffsetSet
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.records import Gap
from forebay.topics import shard_id


class ScanPiece(NamedTuple):
    """Offsets `[start, stop)` and who has them: a descriptor of history, or the local log. Plain values alone."""

    start: int
    stop: int
    bytes: int
    descriptor: SegmentDescriptor | None = None
    file: str | None = None
    """A sealed file of the local log that has them, unless it was replaced since."""

    @property
    def gap(self) -> Gap | None:
        """The gap that it is, if it is one."""
        gap = self.descriptor.gap if self.descriptor is not None else None
        return gap._replace(start=self.start, stop=self.stop) if gap is not None else None

    @property
    def is_columnar(self) -> bool:
        """Whether it is a Parquet segment."""
        return self.descriptor is not None and self.descriptor.kind is DescriptorKind.PARQUET


class PartitionBounds(NamedTuple):
    """What a partition of a topic holds at the moment of looking: `[earliest, next)`."""

    topic: str
    partition: int
    earliest: int
    next: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """One partition at one moment. Its pieces are all of `[earliest, next)`, in order."""

    topic: str
    topic_id: str
    partition: int
    is_durable: bool
    """Whether a loss of its records is one: those of class `memory` may go with their process."""
    epoch: int
    earliest: int
    next: int
    pieces: tuple[ScanPiece, ...]
    deleted: OffsetSet
    generation: int
    """Of the catalog: another one has other pieces."""
    floor: Floor = NO_FLOOR
    """Why it begins where it does: what lies below `evict_floor` was evicted, the rest deleted."""

    @property
    def shard(self) -> str:
        """The name of its shard."""
        return shard_id(self.topic_id, self.partition)

    @property
    def bounds(self) -> PartitionBounds:
        """What it holds."""
        return PartitionBounds(self.topic, self.partition, self.earliest, self.next)

    def pieces_of(self, start: int, stop: int) -> tuple[ScanPiece, ...]:
        """The pieces that have offsets of `[start, stop)`."""
        first = bisect_right(self.pieces, start, key=lambda piece: piece.stop)
        last = bisect_left(self.pieces, stop, key=lambda piece: piece.start)
        return self.pieces[first:last]

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"
