"""What ends while it is read: a reader learns of the end, and never of the damage that removing it leaves."""

from __future__ import annotations

import pytest

from forebay.format.control.frames import Floor
from forebay.format.control.offsets import OffsetSet
from forebay.pages import Page
from forebay.records import Gap, Reason
from forebay.shard.tiers import NOTHING, Ended, Visible


class Removed:
    """Offsets whose records go away under the first look at them, because the floor has passed them just then."""

    def __init__(self, floor: Floor) -> None:
        self.visible: Visible
        self._floor = floor

    def read(self, offset: int, bytes_max: int = 0) -> Page:
        if offset >= self._floor.earliest:
            return Page([], [], offset)
        self.visible.ended = self.visible.ended._replace(floor=self._floor)
        return Page([], [Gap(offset, 10, Reason.DAMAGED)], 10)

    def offset_at_time(self, timestamp: int) -> int | None:
        raise AssertionError("nobody asks for a time here")

    def damage_at(self, offset: int) -> Gap | None:
        raise AssertionError("nobody asks for a time here")


@pytest.mark.parametrize(
    "before", [NOTHING, Ended(OffsetSet.of([20]), NOTHING.floor), Ended(OffsetSet(), Floor(1, 0, None))]
)
def test_a_floor_that_passes_a_reader_is_what_it_gets(before: Ended) -> None:
    stream = Removed(Floor(10, 6, Reason.TTL))
    stream.visible = Visible(stream, lambda: 30)
    stream.visible.ended = before

    assert stream.visible.read(4) == Page([], [Gap(4, 6, Reason.TTL), Gap(6, 10, Reason.DELETED)], 10)
