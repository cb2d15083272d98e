"""Deletes and floors of one shard, as its owner makes them: durable first, then in effect.

Deletes above the end of history are recorded in the log, those below it in the metadata store. A thread that extends
history does so inside `publishing`, which first records what ended up to there: no record becomes history alive
that was deleted before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_
from typing import NamedTuple, Protocol, TypeAlias

from forebay.appends.callbacks import deferred
from forebay.errors import Fenced
from forebay.format.control.frames import NO_FLOOR, Floor, higher
from forebay.format.control.offsets import WINDOW, OffsetSet
from forebay.format.metadata.descriptor import ShardState
from forebay.history import InHistory
from forebay.locks import Rank, RankedRLock
from forebay.records import OFFSET_MAX, Gap, Reason
from forebay.shard.tiers import NOTHING, Ended, Tiers, Visible
from forebay.wal.files import SealedFile
from forebay.wal.log import Wal
from forebay.wal.removals import Removals


class RangeDelete(NamedTuple):
    """Delete the records with offsets in `[start, stop)`."""

    start: int
    stop: int


class DeleteOffsets(NamedTuple):
    """Delete the records with exactly these offsets, all by one change."""

    offsets: OffsetSet


class DeleteKey(NamedTuple):
    """Delete every record with exactly this key."""

    key: bytes


class DeleteTag(NamedTuple):
    """Delete every record with exactly this tag."""

    tag: str


class DeleteBefore(NamedTuple):
    """Delete everything below `offset`: `earliest` moves there."""

    offset: int


Deletion: TypeAlias = RangeDelete | DeleteOffsets | DeleteKey | DeleteTag | DeleteBefore


class PastRemovals(Protocol):
    """Where an owner records what ended in history."""

    @property
    def exported(self) -> int:
        """The end of history as far as it is known."""

    def record(self, deleted: OffsetSet, floor: Floor) -> None:
        """On return these offsets are recorded as deleted and the floors are at least so far; else raises.

        `Fenced` once another epoch owns the shard.
        """

    def deleted(self) -> OffsetSet:
        """Every offset that is recorded as deleted."""


class Deletes:
    """What ended in one shard. Safe for concurrent use."""

    def __init__(
        self,
        wal: Wal,
        tiers: Tiers,
        visible: Visible,
        past: PastRemovals,
        before: ShardState | None,
    ) -> None:
        """`before` is the recorded state that the shard was opened with."""
        self._wal = wal
        self._tiers = tiers
        self._visible = visible
        self._past = past
        self._reach = 0
        """History may end here, though it is not recorded yet."""
        self._changing = RankedRLock(Rank.DELETES, "shard.deletes")
        """Held from looking where history ends to having written what follows from it.

        Callbacks of appends that end meanwhile (another owner was found) are deferred until it is released.
        """
        deleted, removals = wal.writer.removals.deletes, wal.writer.removals
        # What the log says of history is recorded already: it was, before it became history.
        removals.deletes = deleted.clipped(self._reached(), OFFSET_MAX)
        if before is not None:
            removals.floor = higher(removals.floor, before.floor)
            deleted |= past.deleted() if before.deletes else OffsetSet()
        self._show(deleted)

    @property
    def floor(self) -> Floor:
        """The watermarks."""
        return self._wal.writer.removals.floor

    @property
    def deleted(self) -> OffsetSet:
        """Every deleted offset from `earliest` on."""
        return self._visible.ended.deleted

    def live(self, start: int, stop: int) -> OffsetSet:
        """The offsets of `[start, stop)` that stand for live records."""
        start, stop = max(start, self.floor.earliest), min(stop, self._wal.head)
        if start >= stop:
            return OffsetSet()
        return self._tiers.steady(lambda: self._records(start, stop)) - self.deleted

    def _records(self, start: int, stop: int) -> OffsetSet:
        """The offsets of `[start, stop)` that stand for records, deleted ones included.

        Damaged ones count as if they did: what is deleted there stays so if the bytes are restored. Reads indexes at
        most, and only of files and segments with gaps.
        """
        found = OffsetSet()
        for low, high, tier in self._tiers.cover(start, stop):
            if isinstance(tier, Gap) or (isinstance(tier, InHistory) and tier.waits):
                continue
            if not isinstance(tier, InHistory):
                gaps = tier.index().gaps if isinstance(tier, SealedFile) else tier.gaps
                found |= _without(OffsetSet.of_range(low, high), gaps)
            elif tier.is_whole:
                found |= OffsetSet.of_range(low, high)
            else:
                segment = tier.open()
                damaged = (gap for gap in segment.index().gaps if gap.reason is Reason.DAMAGED)
                ranges = (OffsetSet.of_range(max(gap.start, low), min(gap.stop, high)) for gap in damaged)
                found = reduce(or_, ranges, found | segment.held(low, high))
        return found

    def delete_range(self, start: int, stop: int) -> int:
        """End the published records of `[start, stop)`; how many were live. Durable as the class asks on return."""
        head = self._begin()
        with deferred(), self._changing:
            return self._delete(self.live(start, min(stop, head)))

    def delete(self, offsets: OffsetSet) -> int:
        """End the published records at these offsets; how many were live. Durable as the class asks on return."""
        windows = list(offsets.windows())
        if not windows:
            return 0
        first, last = windows[0][0] + windows[0][1].min(), windows[-1][0] + WINDOW
        head = self._begin()
        with deferred(), self._changing:
            # Both hold few windows where the other does not matter: take away what is not live.
            return self._delete(offsets - (offsets - self.live(first, min(last, head))))

    def delete_before(self, offset: int) -> int:
        """Move `earliest` to `offset`, or to the head; how many live records that ended."""
        offset = min(offset, self._begin())
        with deferred(), self._changing:
            if offset <= self.floor.earliest:
                return 0
            ended = len(self.live(0, offset))
            self.move(self.floor._replace(earliest=offset))
            return ended

    def evict_below(self, offset: int, reason: Reason) -> None:
        """Move both floors to `offset`, for `reason`."""
        with deferred(), self._changing:
            self.move(Floor(max(offset, self.floor.earliest), max(offset, self.floor.evict_floor), reason))

    def move(self, floor: Floor) -> None:
        """Move the floors; on return it is durable and in effect."""
        with deferred(), self._changing:
            if self.floor.earliest < self._reached():
                self._record(OffsetSet(), floor)
                self._wal.writer.removals.add(Removals(floor=floor))
            else:
                self._wal.remove(Removals(floor=floor))
            self._show()

    @contextlib.contextmanager
    def publishing(self, end: int) -> Iterator[None]:
        """Inside, history may be extended up to `end`: what ended below it is recorded, and nothing more can end."""
        with deferred(), self._changing:
            self._reach = max(self._reach, end)
            removals = self._wal.writer.removals
            if removals.is_some:
                self._record(removals.deletes.clipped(0, end), removals.floor)
            yield
            removals.deletes = removals.deletes.clipped(end, OFFSET_MAX)

    def _begin(self) -> int:
        """The head at the call, which bounds a delete: everything acknowledged so far lies below it.

        The caller holds no lock. In a forked child a lock may have an owner that does not exist there; and a delete
        that waits for an export to end must not reach what is appended meanwhile.
        """
        self._wal.check_open()
        self._wal.bring_up()
        return self._wal.head

    def _delete(self, offsets: OffsetSet) -> int:
        reach = self._reached()
        below, above = offsets.clipped(0, reach), offsets.clipped(reach, OFFSET_MAX)
        if len(below):
            self._record(below, NO_FLOOR)
            self._show(below)
        if len(above):
            self._wal.remove(Removals(above))
            self._show(above)
        return len(offsets)

    def _reached(self) -> int:
        return max(self._reach, self._past.exported)

    def _record(self, deleted: OffsetSet, floor: Floor) -> None:
        try:
            self._past.record(deleted, floor)
        except Fenced as error:
            self._wal.fence(error)
            raise

    def _show(self, more: OffsetSet | None = None) -> None:
        """Let readers see what ended, `more` included."""
        removals = self._wal.writer.removals
        deleted = (self._visible.ended.deleted | removals.deletes | (more or OffsetSet())).clipped(
            removals.floor.earliest, OFFSET_MAX
        )
        ended = Ended(deleted, removals.floor)
        self._visible.ended = ended if ended != NOTHING else NOTHING


def _without(offsets: OffsetSet, gaps: Iterable[Gap]) -> OffsetSet:
    """The offsets without those of gaps in which no record was."""
    for gap in gaps:
        if gap.reason is not Reason.DAMAGED:
            offsets -= OffsetSet.of_range(gap.start, gap.stop)
    return offsets
