"""I31: wherever the wall clock jumps, offsets, their order and who owns them stay as they are."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from forebay import Moved, Storage, Topic
from forebay.testing.simulated.clock import ManualClock
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, clear_up, id_of, numbers, state_of, told

pytestmark = pytest.mark.slow

DAY_MS = 86_400_000
JUMPS = {"back": [-30 * DAY_MS], "ahead": [30 * DAY_MS], "to and fro": [400 * DAY_MS, -800 * DAY_MS, 1]}


class Jumping:
    """Directories with one clock, which jumps at every step."""

    def __init__(self, root: Path, jumps: list[int]) -> None:
        self._environment = directories.shared_fs(root)
        self._clock = ManualClock()
        self._jumps = itertools.cycle(jumps)
        self.appended = 0

    def open(self, name: str) -> Storage:
        self.jump()
        return Storage.open(self._environment.root / name, self._environment.settings, clock=self._clock)

    def jump(self) -> None:
        # Never before 1970.
        by = next(self._jumps)
        self._clock.jump(by if self._clock.now_ms() + by > 0 else -by)

    def append(self, topic: Topic) -> None:
        for _ in range(5):
            self.jump()
            assert topic.append(b"%d" % self.appended) == self.appended
            self.appended += 1

    def read(self, topic: Topic) -> None:
        self.jump()
        assert told(topic.read()) == numbers(0, self.appended)


@pytest.mark.parametrize("jumps", JUMPS.values(), ids=JUMPS)
@pytest.mark.proves("I31")
def test_offsets_order_and_owners_do_not_follow_the_wall_clock(
    tmp_path: Path, jumps: list[int], ledger: Ledger
) -> None:
    environment = Jumping(tmp_path, jumps)
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, durability="fsync")
        environment.append(topic)
        a.export_topic(TOPIC)
        environment.append(topic)
        clear_up(a)
        with pytest.raises(Moved, match=id_of(a)):
            b.topic(TOPIC).append(b"not mine")
        environment.append(topic)
        assert state_of(a, topic).epoch == 1
        environment.jump()
        a.seal_topic(TOPIC, target=id_of(b))
        environment.append(b.topic(TOPIC))
        environment.read(b.topic(TOPIC))
    with environment.open("B") as b:
        topic = b.topic(TOPIC)
        assert topic.recovery().exact
        environment.append(topic)
        clear_up(b)
        environment.read(topic)
        assert state_of(b, topic).holder == id_of(b)
    ledger.count("histories", figure="owners under a wall clock that jumps (I31)")
