"""Where the records of a topic lie at one moment, as a broker says it to those who read them past the log.

What lies in history is said by descriptors. It is left out of an answer to a client that has it already: `edition`
names the history of all partitions together.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from forebay.bulk import SharedStore
from forebay.format.control.offsets import OffsetSet, decode_bitmap, encode_bitmap
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.wire.messages import TopicItem


class HistoryPiece(msgspec.Struct, frozen=True, array_like=True):
    """Offsets `[start, stop)` in about so many bytes of the object that a descriptor names; or a gap.

    Without a descriptor only the log has them, although history goes on behind them.
    """

    start: int
    stop: int
    bytes: int
    descriptor: SegmentDescriptor | None


class LogPiece(msgspec.Struct, frozen=True, array_like=True):
    """Offsets `[start, stop)` that only the log has, in about so many bytes."""

    start: int
    stop: int
    bytes: int


class DeletedWindow(msgspec.Struct, frozen=True, array_like=True):
    """Deleted offsets from `start` on: so many, as a roaring bitmap that counts from there."""

    start: int
    count: int
    bitmap: bytes


class PlannedPartition(msgspec.Struct, frozen=True, kw_only=True):
    """What a partition holds: `[earliest, next)`, all of it in history, then in the log."""

    partition: int
    epoch: int
    earliest: int
    next: int
    evict_floor: int
    reason: int | None
    """Why `evict_floor` moved last; `null` if it never did."""
    generation: int
    """Of the catalog: another one after history was rewritten."""
    deleted: list[DeletedWindow]
    """What of it was deleted and is stored yet."""
    history: list[HistoryPiece] | UnsetType = UNSET
    """Left out if the caller has this edition of it."""
    log: list[LogPiece]


class TopicPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A topic at one moment, for those who read it past the log."""

    topic: TopicItem
    edition: str
    """Of what is in history: ask with it, and history is sent only if there is another."""
    partitions: list[PlannedPartition]
    store: SharedStore | None
    """The store of history, if others reach it. What lies in another store is read through the broker."""


def encode_deleted(deleted: OffsetSet) -> list[DeletedWindow]:
    """A set of offsets as it is sent."""
    return [DeletedWindow(start, len(bitmap), encode_bitmap(bitmap)) for start, bitmap in deleted.windows()]


def decode_deleted(windows: list[DeletedWindow]) -> OffsetSet:
    """The set that was sent."""
    return OffsetSet({window.start: decode_bitmap(window.bitmap, window.count) for window in windows})
