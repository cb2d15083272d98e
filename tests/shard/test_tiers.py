"""Who covers an offset: gaps of the local log are filled from history where that has the records, and only there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from forebay.errors import Unavailable
from forebay.format.columns.rows import Columns, encode_columns
from forebay.format.frame.batch import Batch, batch_of
from forebay.history import History, InHistory
from forebay.pages import Page, Span
from forebay.records import Gap, Reason
from forebay.shard.tiers import Tiers
from forebay.wal.files import FileList, SealedFile


def _batch(start: int, stop: int) -> Batch:
    count = stop - start
    return batch_of(
        encode_columns(Columns(values=[b"v"] * count, timestamps=[0] * count)), base=start, epoch=1, appended_at=0
    )


def _files(start: int, end: int) -> FileList:
    file = SimpleNamespace(start=start, previous_end=start, end=end, leading_gap=None)
    return FileList([cast("SealedFile", file)])


class Log:
    """Ten offsets in one file, with a gap in the middle."""

    head = 10

    def __init__(self, reason: Reason) -> None:
        self.files = _files(0, self.head)
        self._pieces = [_batch(0, 3), Gap(3, 6, reason), _batch(6, 10)]

    def read(self, offset: int, bytes_max: int = 0) -> Page | None:
        batches = [p.slice(max(offset, p.base), p.end) for p in self._pieces if isinstance(p, Batch) and p.end > offset]
        gaps = [p._replace(start=max(offset, p.start)) for p in self._pieces if isinstance(p, Gap) and p.stop > offset]
        return Page(batches, gaps, self.head) if offset < self.head else Page([], [], offset)

    def offset_at_time(self, timestamp: int, start: int = 0) -> int | None:
        return None


class Cut(Log):
    """The same, of which the front has gone: what is left begins behind the gap, or nothing is left."""

    def __init__(self, begins: int | None) -> None:
        super().__init__(Reason.LOST)
        self.files = FileList() if begins is None else _files(begins, self.head)
        self._begins = self.head if begins is None else begins

    def read(self, offset: int, bytes_max: int = 0) -> Page | None:
        return None if offset < self._begins else super().read(offset, bytes_max)


class Past:
    """A history that has everything below its end, or does not answer."""

    def __init__(self, exported: int, *, away: bool = False) -> None:
        self.exported = exported
        self._away = away

    @property
    def history(self) -> History:
        return cast("History", self)

    def read(self, offset: int, bytes_max: int = 0) -> Page:
        if self._away:
            raise Unavailable("the store is away")
        if offset >= self.exported:
            return Page([], [], offset)
        return Page([_batch(offset, self.exported)], [], self.exported)

    def cover(self, start: int, stop: int) -> list[Span[InHistory | Gap]]:
        segment = cast("InHistory", SimpleNamespace(waits=False))
        return [Span(start, min(stop, self.exported), segment)] if start < self.exported else []

    def is_waiting(self, offset: int) -> bool:
        return False

    def offset_at_time(self, timestamp: int, end: int = 0) -> int | None:
        return 7 if self.exported > 7 else None


class Committing(Past):
    """A history whose bulk load is committed right after the first look for its records."""

    is_committed = False

    def read(self, offset: int, bytes_max: int = 0) -> Page:
        if self.is_committed:
            return super().read(offset, bytes_max)
        self.is_committed = True
        return Page([], [], offset)

    def is_waiting(self, offset: int) -> bool:
        return not self.is_committed


class Late(Past):
    """A history that has lost its front, and begins at 5."""

    def read(self, offset: int, bytes_max: int = 0) -> Page:
        return Page([], [], offset) if offset < 5 else super().read(offset, bytes_max)

    def cover(self, start: int, stop: int) -> list[Span[InHistory | Gap]]:
        return super().cover(max(start, 5), stop) if stop > 5 else []


class Leaving(Cut):
    """A log from which everything below 9 goes, into history, before it is asked for the first record of a time."""

    def __init__(self, past: Past) -> None:
        super().__init__(begins=6)
        self._past = past

    def offset_at_time(self, timestamp: int, start: int = 0) -> int | None:
        self._past.exported, self.files = 9, _files(9, self.head)
        return 9


def _stream(tiers: Tiers) -> list[tuple[int, int] | Gap]:
    pieces: list[tuple[int, int] | Gap] = []
    offset = 0
    while (page := tiers.read(offset)).next > offset:
        pieces += [(batch.base, batch.end) for batch in page.batches]
        pieces += page.events
        offset = page.next
    return pieces


@pytest.mark.parametrize("reason", [Reason.DAMAGED, Reason.HISTORY])
def test_a_gap_in_the_middle_of_a_page_is_filled_from_history(reason: Reason) -> None:
    assert _stream(Tiers(Log(reason), Past(8))) == [(0, 3), (3, 6), (6, 10)]


def test_a_gap_that_history_does_not_have_stays_and_is_reported() -> None:
    gap = Gap(3, 6, Reason.DAMAGED)
    assert _stream(Tiers(Log(Reason.DAMAGED), Past(2))) == [(0, 3), (6, 10), gap]
    assert _stream(Tiers(Log(Reason.DAMAGED), Past(8, away=True))) == [(0, 3), (6, 10), gap]


def test_what_only_history_holds_is_never_taken_for_empty() -> None:
    with pytest.raises(Unavailable, match="the store is away"):
        _stream(Tiers(Log(Reason.HISTORY), Past(8, away=True)))


def test_a_load_that_is_committed_while_a_reader_looks_is_never_reported_as_lost() -> None:
    """Found by review: the reader was sent past the load, with a gap, though all of its records could be read."""
    tiers = Tiers(Log(Reason.HISTORY), Committing(8))

    assert tiers.read(3) == Page([], [], 3)
    assert _stream(tiers) == [(0, 3), (3, 6), (6, 10)]


@pytest.mark.parametrize("reason", [Reason.DAMAGED, Reason.HISTORY])
def test_what_history_has_of_the_end_of_a_gap_is_read(reason: Reason) -> None:
    """Found by review: the gap was reported as a whole, and what could be read of it skipped."""
    assert _stream(Tiers(Log(reason), Late(8))) == [(0, 3), Gap(3, 5, reason), (5, 6), (6, 10)]


def test_a_lost_range_is_no_business_of_history() -> None:
    assert _stream(Tiers(Log(Reason.LOST), Past(8))) == [(0, 3), (6, 10), Gap(3, 6, Reason.LOST)]


@pytest.mark.parametrize(("begins", "stop"), [(6, 6), (None, 10)])
@pytest.mark.parametrize("exported", [0, 4])
def test_what_neither_the_files_nor_history_have_is_reported_and_never_taken_for_the_end(
    begins: int | None, stop: int, exported: int
) -> None:
    found = _stream(Tiers(Cut(begins), Past(exported)))

    assert found == [
        *([(0, exported)] if exported else []),
        Gap(exported, stop, Reason.DAMAGED),
        *([(6, 10)] if begins else []),
    ]


def test_a_record_that_became_history_and_left_between_two_looks_is_found_by_its_time() -> None:
    past = Past(6)

    assert Tiers(Leaving(past), past).offset_at_time(0) == 7
