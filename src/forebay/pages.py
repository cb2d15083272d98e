"""What one read of a shard gives: batches of records, the gaps between them, and where to go on.

Every tier and every engine answers in this shape. Knows records and batches, nothing of where they lay.
"""

from __future__ import annotations

from typing import Final, Generic, NamedTuple, TypeVar

from forebay.format.frame.batch import Batch
from forebay.records import Gap, Reason, RecordPage

T = TypeVar("T")

LOOP_RECORDS_MAX: Final = 2_000
LOOP_BYTES_MAX: Final = 256 * 1024
"""An event loop checks, encodes or makes no more records at once, nor more bytes of them: it would stand still for a
millisecond or more. A thread does it."""


class Span(NamedTuple, Generic[T]):
    """Offsets `[start, stop)`, and the tier that has all of them."""

    start: int
    stop: int
    tier: T


class Page(NamedTuple):
    """Records and gaps of `[asked offset, next)`, each list in offset order. Empty at the end of the stream.

    `next` is where to ask again; it also moves over a page that holds only gaps.
    """

    batches: list[Batch]
    events: list[Gap]
    next: int

    def clipped(self, stop: int) -> Page:
        """The part of the page below `stop`."""
        if self.next <= stop:
            return self
        batches = [batch.slice(batch.base, min(batch.end, stop)) for batch in self.batches if batch.base < stop]
        events = [gap._replace(stop=min(gap.stop, stop)) for gap in self.events if gap.start < stop]
        return Page(batches, events, stop)

    @property
    def bytes(self) -> int:
        """What its records count for."""
        return sum([int(batch.sizes().sum()) for batch in self.batches])

    def holds_a_loop(self, records_max: int) -> bool:
        """Whether to make up to `records_max` records of it would hold an event loop."""
        count = sum([batch.count for batch in self.batches])
        return min(count, records_max) > LOOP_RECORDS_MAX or self.bytes > LOOP_BYTES_MAX


class Reach(NamedTuple):
    """Which offsets of a shard can be read: `[earliest, head)`. What lay below `evict_floor` was evicted."""

    earliest: int
    evict_floor: int
    head: int


def shortened(page: Page, records_max: int) -> Page:
    """No more than so many records of the page, without the gaps that callers do not see."""
    left = records_max
    for batch in page.batches:
        if batch.count >= left:
            page = page.clipped(batch.base + left)
            break
        left -= batch.count
    if not page.events:
        return page
    return page._replace(events=[gap for gap in page.events if gap.reason is not Reason.DELETED])


def record_page(page: Page, reach: Reach, partition: int) -> RecordPage:
    """The page for a caller, with an object for each record."""
    records = [record for batch in page.batches for record in batch.records(partition)]
    return RecordPage(records, page.events, page.next, max(reach.head, page.next), reach.earliest, reach.evict_floor)


def tombstone(offset: int, floor: int, reason: Reason) -> list[Gap]:
    """The gap that a reader at `offset` meets where records below `floor` were evicted."""
    return [Gap(offset, floor, reason)] if offset < floor else []


def joined(gaps: list[Gap]) -> list[Gap]:
    """Gaps in offset order, those of one reason that touch made one."""
    found: list[Gap] = []
    for gap in gaps:
        if found and found[-1].stop == gap.start and found[-1].reason is gap.reason:
            found[-1] = found[-1]._replace(stop=gap.stop)
        else:
            found.append(gap)
    return found
