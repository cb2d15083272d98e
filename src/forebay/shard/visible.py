"""A stream without what ended in it: deleted records become silent holes, evicted ones a tombstone.

Knows pages, offsets and floors; knows nothing of where they are recorded. Whoever does sets `ended`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from forebay.format.control import NO_FLOOR, Floor
from forebay.format.offsets import WINDOW, OffsetSet
from forebay.format.vectors import without
from forebay.pages import Page
from forebay.records import Gap, Reason
from forebay.sealed import first_at_time

PAGE_BYTES = 1024 * 1024


class Stream(Protocol):
    """All that is stored, whether it ended or not."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """A page; an empty one at the end."""

    def offset_at_time(self, timestamp: int) -> int | None:
        """The first record at or after the time."""

    def damage_at(self, offset: int) -> Gap | None:
        """The damaged range that covers `offset`, if one does whose times are not known."""


class Ended(NamedTuple):
    """What ended, as of one moment. No offset below `floor.earliest` needs to be in `deleted`."""

    deleted: OffsetSet
    floor: Floor


NOTHING: Final = Ended(OffsetSet(), NO_FLOOR)


class Visible:
    """What readers of a shard are shown. Safe for concurrent use."""

    def __init__(self, stream: Stream, head: Callable[[], int]) -> None:
        self._stream = stream
        self._head = head
        self.ended = NOTHING
        """Replaced as a whole; a reader goes on with the one it has."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Live records from `offset` on, at least one if there is any; an empty page at the end."""
        while True:
            deleted, floor = self.ended
            if offset < floor.earliest:
                return Page([], _below(offset, floor), floor.earliest)
            start = min(run_end(deleted, offset), max(self._head(), offset))
            page = self._stream.read(start, bytes_max)
            # Else what lies there may have been removed meanwhile.
            if offset >= self.ended.floor.earliest:
                return _shown(page, offset, start, deleted)

    def offset_at_time(self, timestamp: int) -> int | None:
        """The first live record at or after the time; `None` if there is none.

        Where a damaged range lies right before it, the start of that: the record may have stood there, and a reader
        that begins there meets it.
        """
        found = self._live_at_time(timestamp)
        end = found if found is not None else self._head()
        deleted, floor = self.ended
        gap = self._stream.damage_at(end - 1) if end > floor.earliest else None
        if gap is None:
            return found
        start = run_end(deleted, max(gap.start, floor.earliest))
        return start if start < end else found

    def _live_at_time(self, timestamp: int) -> int | None:
        found = self._stream.offset_at_time(timestamp)
        deleted, floor = self.ended
        if found is None or (found >= floor.earliest and found not in deleted):
            return found
        at = max(found, floor.earliest)
        while (page := self.read(at)).next > at:
            matching = first_at_time(page.batches, timestamp)
            if matching is not None:
                return matching
            at = page.next
        # A bulk load that is not committed yet: who begins there waits, and misses nothing of it.
        return at if at < self._head() else None


def run_end(deleted: OffsetSet, offset: int) -> int:
    """The first offset from there on that was not deleted."""
    while offset in deleted:
        stop = (offset & -WINDOW) + WINDOW
        left = OffsetSet.of_range(offset, stop) - deleted
        offset = next(iter(left), stop)
    return offset


def _below(offset: int, floor: Floor) -> list[Gap]:
    """What a reader at `offset` is told of everything below `earliest`."""
    gaps = []
    if offset < floor.evict_floor:
        gaps.append(Gap(offset, floor.evict_floor, floor.reason or Reason.CAP))
        offset = floor.evict_floor
    return [*gaps, Gap(offset, floor.earliest, Reason.DELETED)] if offset < floor.earliest else gaps


def _shown(page: Page, offset: int, start: int, deleted: OffsetSet) -> Page:
    """The page from `start` on without deleted records; `[offset, start)` are deleted too."""
    if start == offset and not deleted.count_in(offset, page.next):
        return page
    batches = []
    events = list(page.events)
    if start > offset:
        events.append(Gap(offset, start, Reason.DELETED))
    for batch in page.batches:
        kept, gone = without(batch, deleted)
        batches += kept
        events += gone
    return Page(batches, _joined(sorted(events)), page.next)


def _joined(gaps: list[Gap]) -> list[Gap]:
    """Holes in offset order, those of one reason that touch made one."""
    found: list[Gap] = []
    for gap in gaps:
        if found and found[-1].stop == gap.start and found[-1].reason is gap.reason:
            found[-1] = found[-1]._replace(stop=gap.stop)
        else:
            found.append(gap)
    return found
