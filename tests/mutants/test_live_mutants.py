"""Deliberate breaks of what followers check after a wait: something that ends inside a step must find each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from forebay.live import polling
from forebay.live.feeds import ShardFeed, SharedPage
from forebay.pages import Page
from forebay.reading import PAGE_BYTES, Cursor
from forebay.shard.tiers import Tiers, Visible
from forebay.storage import Topic
from tests.live import test_gates as gates
from tests.live.test_gates import Follower, FollowStep, PollFollower, StreamFollower, play_one

pytestmark = pytest.mark.slow


class Broken(NamedTuple):
    """A break, and where it must be noticed."""

    mutate: Callable[[pytest.MonkeyPatch], None]
    face: type[Follower]
    step: FollowStep
    event: gates.Event
    at_end: bool = False


def _ended_alone(patch: pytest.MonkeyPatch) -> None:
    """As it was: what ended is compared, whichever shard gave the page."""
    patch.setattr(ShardFeed, "is_current", lambda feed, page: page.ended == page.shard.ended())
    patch.setattr(Topic, "is_served_by", lambda *_: True)


def _never_asked(patch: pytest.MonkeyPatch) -> None:
    def is_current(feed: ShardFeed, page: SharedPage) -> bool:
        return True

    patch.setattr(ShardFeed, "is_current", is_current)


def _source_not_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    whole = Cursor.__init__

    def without_find(cursor: Cursor[Any], *arguments: Any, **options: Any) -> None:
        options.pop("find", None)
        whole(cursor, *arguments, **options)

    patch.setattr(Cursor, "__init__", without_find)


def _deleted_of_before(patch: pytest.MonkeyPatch) -> None:
    """What is shown goes by what had ended when the read began."""

    def read(visible: Visible, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        return whole(copy.copy(visible), offset, bytes_max)

    whole = Visible.read
    patch.setattr(Visible, "read", read)


BROKEN: Final = {
    "a page counts for the next shard": Broken(
        _ended_alone,
        StreamFollower,
        FollowStep(Topic, "shard_page", "after"),
        gates.lose_shard_and_delete_record,
    ),
    "a watcher takes a page as it was": Broken(
        _never_asked, StreamFollower, FollowStep(Topic, "shard_page", "after"), gates.delete_record
    ),
    "a poll takes a page as it was": Broken(
        _never_asked, PollFollower, FollowStep(polling, "_reach", "after"), gates.delete_record, at_end=True
    ),
    "a stream takes a page of a shard that was lost": Broken(
        _source_not_asked_for_again, Follower, FollowStep(Tiers, "read", "after"), gates.lose_shard_and_delete_record
    ),
    "what is deleted during a read is shown": Broken(
        _deleted_of_before, Follower, FollowStep(Tiers, "read", "after"), gates.delete_record, at_end=True
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_follower_that_trusts_what_it_had_before_a_wait_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = BROKEN[name]
    broken.mutate(monkeypatch)

    with pytest.raises(AssertionError):
        play_one(tmp_path, broken.face, broken.step, broken.event, at_end=broken.at_end)
