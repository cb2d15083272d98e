"""Readers beside an owner that has recovered and not appended yet, while it seals the file that they read."""

from __future__ import annotations

import errno
from itertools import pairwise

import pytest

from forebay.errors import Unavailable
from forebay.pages import Page
from forebay.testing.checks.history import Reading, read_everything
from forebay.topics import Durability
from forebay.wal.files import FileList, SealedFile
from forebay.wal.readonly import CHANGING_SECONDS, POLL_SECONDS_MAX, FollowedLog
from tests.wal.rig import DIRECTORY, SMALL, Rig, Simulated, simulated
from tests.wal.scenarios import inside_next

MEMORY = Durability.MEMORY


def _recovered() -> Simulated:
    """An owner behind the gap that a kill of class `memory` leaves: nothing is written to the old file any more."""
    killed = Rig(simulated(), MEMORY).open()
    for _ in range(3):
        killed.append()
    killed.flush()
    return Rig(killed.disk, MEMORY, epoch=1).open()


def _beside(rig: Simulated) -> FollowedLog:
    return FollowedLog(rig.disk, rig.clock, DIRECTORY, SMALL, lambda: True)


def _read(follower: FollowedLog) -> Reading:
    def read(offset: int) -> Page:
        page = follower.read(offset)
        assert page is not None
        return page

    return read_everything(read, follower.offsets().next)


@pytest.mark.parametrize("is_new", [False, True], ids=["a reader from before", "a new reader"])
def test_a_file_in_larger_frames_is_shown_as_long_as_it_is(*, is_new: bool) -> None:
    """Found by review: it was shown as long as it had been, and each look failed until the next append."""
    rig = _recovered()
    follower = _beside(rig)
    before = _read(follower)
    assert rig.wal.writer.active is None and len(before.records) == 3

    rig.shard.upkeep.seal_rotated()

    assert isinstance(rig.wal.files.all[-1], SealedFile)
    follower = _beside(rig) if is_new else follower
    follower.list_again()
    assert _read(follower).steps == before.steps
    rig.append()
    rig.wal.commit()
    assert [value for _, value in _read(follower).records] == [value for _, value in rig.reading().records]


def test_a_look_between_the_new_file_and_its_showing_is_repeated_after_a_moment() -> None:
    rig = _recovered()
    follower, waited = _beside(rig), list[float]()

    def look() -> None:
        """The owner is inside its step, and does not go on before this returns."""
        began = rig.clock.monotonic()
        with pytest.raises(Unavailable, match=f"changed for {CHANGING_SECONDS:g} s"):
            follower.refresh()
        waited.append(rig.clock.monotonic() - began)

    inside_next(rig.disk, "write", look, suffix="live")
    rig.shard.upkeep.seal_rotated()

    assert waited == [pytest.approx(CHANGING_SECONDS, abs=POLL_SECONDS_MAX)]
    assert len(_read(follower).records) == 3


def test_a_read_goes_on_though_files_are_replaced_more_often_than_ten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = _recovered()
    follower = _beside(rig)
    before = _read(follower)
    whole, replaced = FileList.read, list[float]()

    def changing(files: FileList, offset: int, bytes_max: int) -> Page | None:
        if len(replaced) < 30:
            replaced.append(rig.clock.monotonic())
            raise FileNotFoundError(errno.ENOENT, "was sealed meanwhile")
        return whole(files, offset, bytes_max)

    monkeypatch.setattr(FileList, "read", changing)

    assert _read(follower).steps == before.steps
    pauses = [later - earlier for earlier, later in pairwise(replaced)]
    assert len(pauses) == 29 and all(0 < pause <= POLL_SECONDS_MAX + 1e-9 for pause in pauses)
