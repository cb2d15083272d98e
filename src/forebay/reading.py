"""Reads one partition from an offset on, and checks that nothing is skipped, repeated or missing without a name.

Asks its source again at every page and trusts only offsets: a page must go on exactly where the one before ended, and
every jump must be a gap with a reason. Knows nothing of where records lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from forebay.errors import Closed, Corrupt, DataLoss, Unavailable
from forebay.format.frame.batch import Batch
from forebay.pages import Page
from forebay.records import Gap, OnGap, Reason

PAGE_BYTES = 1024 * 1024
LOSS = (Reason.LOST, Reason.DAMAGED, Reason.HISTORY)
"""Gaps in which records were that are gone, or cannot be read now."""


class Readable(Protocol):
    """Anything that gives pages by offset."""

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        """Records from `offset` on; an empty page at the end."""


R = TypeVar("R", bound=Readable)


class Cursor(Generic[R]):
    """The next offset of a reader in one partition. For one thread at a time; holds no more than one page."""

    def __init__(
        self,
        source: R,
        start: int,
        *,
        name: str,
        partition: int,
        on_gap: OnGap | None = None,
        find: Callable[[int], R] | None = None,
    ) -> None:
        """`find` gives the source of a partition again, once the present one is closed."""
        self.next = start
        self.partition = partition
        self.source = source
        """What the next page is read from."""
        self._name = name
        self._on_gap = on_gap
        self._find = find

    def pull(self, stop: int | None = None, bytes_max: int = PAGE_BYTES) -> list[Batch]:
        """The next records, below `stop` if given; empty at the end. Gaps are reported before what follows them.

        Deleted records are stepped over in silence. Without `on_gap`, a lost or damaged range raises `DataLoss` once;
        the next pull goes on behind it. A source that was closed, before the read or during it, is asked for again:
        that says why (moved, deleted, the log closed as a whole), or gives the one that was opened since, and the
        cursor goes on there.
        """
        is_second = False
        while stop is None or self.next < stop:
            try:
                page = self.source.read(self.next, bytes_max)
            except Closed:
                before = self.source
                if is_second or self._find is None or (found := self._find(self.partition)) is before:
                    raise
                self.source, is_second = found, True
                continue
            except OSError as error:
                raise Unavailable(f"{self._name} cannot be read at offset {self.next}: {error}; try again") from error
            if page.next == self.next:
                return []
            if self._find is not None and (found := self._find(self.partition)) is not self.source:
                # Lost, moved or opened again while it was read: what it gave may have ended since.
                self.source = found
                continue
            if stop is not None:
                page = page.clipped(stop)
            check_page(self._name, self.next, page)
            batches = self.take(page)
            if batches:
                return batches
        return []

    def take(self, page: Page) -> list[Batch]:
        """The records of a page before its first gap; or, if it begins with one, report that and give what follows.

        The page begins at `next`, which moves behind what is given and reported.
        """
        batches: list[Batch] = []
        for piece in in_order(page):
            if isinstance(piece, Gap):
                if batches and piece.reason is not Reason.DELETED:
                    return batches
                self.next = piece.stop
                self._report(piece)
            else:
                batches.append(piece)
                self.next = piece.end
        return batches

    def _report(self, gap: Gap) -> None:
        if gap.reason is Reason.DELETED:
            return
        if self._on_gap is not None:
            self._on_gap(self.partition, gap)
        elif gap.reason in LOSS:
            raise _data_loss(self._name, gap)


def check_page(name: str, start: int, page: Page) -> None:
    """`Corrupt` unless the page goes on at `start` and leads without a break to its own end."""
    expected = start
    for piece in in_order(page):
        start, stop = (piece.start, piece.stop) if isinstance(piece, Gap) else (piece.base, piece.end)
        if start != expected:
            raise Corrupt(f'{name}: the stream goes on at {start}, expected {expected}: run "forebay verify"')
        expected = stop
    if expected != page.next:
        raise Corrupt(f"{name}: a page ends at {expected} but says {page.next}")


def report_gap(topic: str, on_gap: OnGap | None, partition: int, gap: Gap) -> None:
    """What a reader does at a gap: `on_gap` takes it, else a lost or damaged range is `DataLoss`."""
    if gap.reason is Reason.DELETED:
        return
    if on_gap is not None:
        on_gap(partition, gap)
    elif gap.reason in LOSS:
        raise _data_loss(f"{topic}[{partition}]", gap)


def _data_loss(name: str, gap: Gap) -> DataLoss:
    return DataLoss(
        f"{name}: offsets {gap} cannot be read: pass on_gap to be given such ranges and go on, "
        'or start behind it; "forebay verify" says more',
        shard=name,
        start=gap.start,
        stop=gap.stop,
        reason=gap.reason.name.lower(),
    )


def in_order(page: Page) -> Iterator[Batch | Gap]:
    """Batches and gaps of a page by offset."""
    if not page.events:
        return iter(page.batches)
    pieces: list[Batch | Gap] = [*page.batches, *page.events]
    return iter(sorted(pieces, key=_start))


def _start(piece: Batch | Gap) -> int:
    return piece.start if isinstance(piece, Gap) else piece.base
