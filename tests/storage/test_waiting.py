"""How long a follower waits: by the clock, whatever its looks take."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay.storage import Storage
from forebay.storage.streams import REST, STOP_CHECK_SECONDS, Following, Stream, Waiting
from forebay.testing.simulated.clock import ManualClock
from tests.storage.rig import WatchedDisk, quick


class Bell(threading.Event):
    """An event no caller sets, whose waiting passes on the hand-turned clock; remembers how long each was."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self._clock.advance(timeout)
        return False


class Nothing(Following[bytes]):
    """A topic that stays empty, one look at which takes a while."""

    def __init__(self, clock: ManualClock, look_seconds: float, poll_seconds: float | None) -> None:
        super().__init__([], lambda batch, partition: [])
        self._poll_seconds = poll_seconds
        self.looks = 0
        self._clock = clock
        self._look_seconds = look_seconds

    @property
    def poll_seconds(self) -> float | None:
        return self._poll_seconds

    def next_page(self) -> Iterator[bytes] | None:
        self.looks += 1
        self._clock.advance(self._look_seconds)
        return None


def waited(look_seconds: float, poll_seconds: float | None, timeout: float) -> tuple[float, Nothing, list[float]]:
    clock = ManualClock()
    following = Nothing(clock, look_seconds, poll_seconds)
    waiting = Waiting(following, timeout, None, clock=clock)
    waiting._woken = bell = Bell(clock)
    assert list(Stream(waiting, lambda: None)) == []
    return clock.monotonic(), following, bell.waits


@pytest.mark.parametrize("poll_seconds", [None, 0.005])
@pytest.mark.parametrize("look_seconds", [0.0, 0.002, 0.03, 0.3])
def test_a_follower_ends_after_its_timeout_however_long_a_look_takes(
    look_seconds: float, poll_seconds: float | None
) -> None:
    """Only the pauses had been counted: one second took many over many partitions."""
    took, _, _ = waited(look_seconds, poll_seconds, 1.0)

    assert 1.0 <= took <= 1.0 + 2 * look_seconds


def test_a_timeout_of_nothing_looks_once_and_does_not_wait() -> None:
    _, following, waits = waited(0.01, 0.005, 0)

    assert (following.looks, waits) == (1, [])


def test_the_longer_a_look_takes_the_more_rarely_one_looks() -> None:
    assert set(waited(0.0005, 0.005, 1.0)[2][:-1]) == {0.005}
    assert waited(0.005, 0.005, 1.0)[2][0] == pytest.approx(REST * 0.005)
    assert waited(0.2, 0.005, 1.0)[2][0] == STOP_CHECK_SECONDS


def test_a_partition_without_a_file_costs_a_reader_no_look_at_the_lock(tmp_path: Path) -> None:
    disk = WatchedDisk()
    with forebay.open(tmp_path) as owner:
        owner.create_topic("t", partitions=8)
        with Storage.open(tmp_path, quick(), read_only=True, disk=disk) as log:
            assert list(log.topic("t").follow(timeout=0)) == []

    assert disk.calls["is_locked"] == 0
