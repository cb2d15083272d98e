"""One stream over pages: what a cursor steps over in silence, and what it must name."""

from __future__ import annotations

from typing import Final

import pytest

from forebay.errors import Corrupt
from forebay.format.columns.rows import encode_row
from forebay.format.frame.batch import Batch, batch_of
from forebay.pages import Page
from forebay.reading import Cursor
from forebay.records import Gap, Reason


def batch(offset: int) -> Batch:
    """One record at `offset`."""
    return batch_of(encode_row((b"%d" % offset, None, None, (), 1)), base=offset, epoch=1, appended_at=0)


class Scripted:
    """Pages by the offset they begin at."""

    def __init__(self, *pages: Page) -> None:
        self._pages = {_start(page): page for page in pages}

    def read(self, offset: int, bytes_max: int = 0) -> Page:
        return self._pages.get(offset, Page([], [], offset))


def _start(page: Page) -> int:
    return min([gap.start for gap in page.events] + [batch.base for batch in page.batches])


def test_deleted_ranges_are_stepped_over_in_silence_and_the_records_around_them_come_at_once() -> None:
    gaps: list[Gap] = []
    page = Page([batch(2), batch(5)], [Gap(0, 2, Reason.DELETED), Gap(3, 5, Reason.DELETED)], 6)
    cursor = Cursor(Scripted(page), 0, name="t", partition=0, on_gap=lambda _, gap: gaps.append(gap))

    assert [found.base for found in cursor.pull()] == [2, 5]
    assert cursor.next == 6
    assert gaps == []


def test_a_page_of_deleted_records_alone_leads_on_to_what_follows() -> None:
    nothing = Page([], [Gap(0, 100, Reason.DELETED)], 100)
    cursor = Cursor(Scripted(nothing, Page([batch(100)], [], 101)), 0, name="t", partition=0)

    assert [found.base for found in cursor.pull()] == [100]


def test_evicted_ranges_are_reported_and_stop_the_records_before_them() -> None:
    gaps: list[Gap] = []
    page = Page([batch(0), batch(9)], [Gap(1, 9, Reason.CAP)], 10)
    pages = Scripted(page, Page([batch(9)], [Gap(1, 9, Reason.CAP)], 10))
    cursor = Cursor(pages, 0, name="t", partition=0, on_gap=lambda _, gap: gaps.append(gap))

    assert [found.base for found in cursor.pull()] == [0]
    assert gaps == []
    assert [found.base for found in cursor.pull()] == [9]
    assert gaps == [Gap(1, 9, Reason.CAP)]


WRONG: Final = {
    "begins later": (4, Page([batch(5)], [], 6)),
    "begins earlier": (4, Page([batch(3), batch(4)], [], 5)),
    "skips an offset": (4, Page([batch(4), batch(6)], [], 7)),
    "skips an offset before a hole": (4, Page([batch(4)], [Gap(6, 8, Reason.LOST)], 8)),
    "gives an offset twice": (4, Page([batch(4), batch(4)], [], 5)),
    "gives a record inside of a hole": (4, Page([batch(5)], [Gap(4, 8, Reason.DELETED)], 8)),
    "stops short of what it says": (4, Page([batch(4)], [], 6)),
    "reaches further than it says": (4, Page([batch(4), batch(5)], [], 5)),
    "goes back": (4, Page([], [], 3)),
}


class Anywhere:
    """The same page, whatever is asked for."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def read(self, offset: int, bytes_max: int = 0) -> Page:
        return self._page


@pytest.mark.parametrize("name", WRONG)
def test_a_page_that_does_not_go_on_exactly_is_an_error_and_moves_no_caller(name: str) -> None:
    start, page = WRONG[name]
    gaps: list[Gap] = []
    cursor = Cursor(Anywhere(page), start, name="t", partition=0, on_gap=lambda _, gap: gaps.append(gap))

    with pytest.raises(Corrupt, match="^t: "):
        cursor.pull()

    assert (cursor.next, gaps) == (start, [])
