"""kill -9 on the real file system, at random moments and at named steps.

This shows that nothing acknowledged depends on the process living on. It cannot show a missing fsync:
the page cache outlives the process. That is what the crash states on the simulated disk are for.
"""

from __future__ import annotations

import os
import random  # noqa: TID251 - seeded: the same kills again
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from forebay.disk.system import SystemDisk
from forebay.testing.checks.history import AppendAnswered, AppendOutcome, Begun, Event, Reading, ShardEvents
from forebay.testing.checks.invariants import check_log
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.support.soak import SOAK
from tests.wal.kill.zygote import SETTINGS, Life
from tests.wal.rig import Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

RANDOM_KILLS: Final = 400 if SOAK else 28
NAMED_ROUNDS: Final = 10 if SOAK else 2
NAMED: Final = (
    ("rotate", Life(directory="", durability="", epoch=0, kind="rename", suffix=".seg.tmp", count=2)),
    ("rotate, named", Life(directory="", durability="", epoch=0, kind="renamed", suffix=".seg.tmp", count=2)),
    ("re-frame", Life(directory="", durability="", epoch=0, kind="rename", suffix=".reframing.tmp")),
    ("re-framed", Life(directory="", durability="", epoch=0, kind="renamed", suffix=".reframing.tmp")),
    ("seal", Life(directory="", durability="", epoch=0, kind="rename", suffix=".idx.tmp")),
    ("checkpoint", Life(directory="", durability="", epoch=0, kind="rename", suffix="checkpoint.tmp")),
    ("sync", Life(directory="", durability="", epoch=0, kind="sync", suffix=".seg", count=7)),
    ("set aside", Life(directory="", durability="", epoch=0, kind="rename", suffix=".tmp")),
    ("cut", Life(directory="", durability="", epoch=0, kind="truncate", suffix=".seg")),
    ("heal", Life(directory="", durability="", epoch=0, kind="rename", suffix=".healing.tmp", fail=True)),
    ("healed", Life(directory="", durability="", epoch=0, kind="renamed", suffix=".healing.tmp", fail=True)),
)
TORN: Final = {"set aside", "cut"}


class Parent:
    """Keeps what every child of the zygote was answered, and kills them."""

    def __init__(self, directory: Path, durability: Durability) -> None:
        self.directory = str(directory / "shard")
        self.durability = durability
        self.events: list[Event] = []
        self.epoch = 0
        self.kills = 0
        self.acks = 0
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.wal.kill.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )

    def run(self, life: Life, kill_after: int | None) -> None:
        """One child from birth to death; with `kill_after`, killed once that many of its appends were acknowledged."""
        assert self._zygote.stdin is not None
        life = msgspec.structs.replace(
            life, directory=self.directory, durability=self.durability.value, epoch=self.epoch
        )
        self.epoch += 1
        self._zygote.stdin.write(msgspec.json.encode(life) + b"\n")
        self._zygote.stdin.flush()
        pid, acks = 0, 0
        for word, *rest in self._lines():
            if word == "born":
                pid = int(rest[0])
            elif word == "ack":
                acks += 1
                self._hear(*rest)
            elif word == "dead":
                assert int(rest[0]) == -signal.SIGKILL, f"the child ended by itself: {rest[0]}"
                break
            if kill_after is not None and pid and acks >= kill_after:
                os.kill(pid, signal.SIGKILL)
                kill_after = None
        self.kills += 1
        self.acks += acks

    def tear(self) -> None:
        """Leave a torn tail, as a crash in mid-write does."""
        with open(max(Path(self.directory).glob("*.seg")), "ab") as file:
            file.write(b"torn" * 5)

    def check(self) -> list[str]:
        """Recover in this process and compare."""
        self.epoch += 1
        rig = Rig(
            SystemDisk(), self.durability, epoch=self.epoch - 1, settings=SETTINGS, directory=self.directory
        ).open()
        try:
            reading = rig.reading()
        finally:
            rig.wal.close()
        return [str(violation) for violation in check_log(self._history(reading), reading)]

    def end(self) -> None:
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        self._zygote.stdin.close()
        self._zygote.wait()
        self._zygote.stdout.close()

    def _lines(self) -> Iterator[list[str]]:
        assert self._zygote.stdout is not None
        for line in self._zygote.stdout:
            yield line.decode().split()

    def _hear(self, values: str, offset: str) -> None:
        attempt = len(self.events)
        caller = ".".join(values.split(".")[:2])
        self.events.append(Begun(attempt, tuple(values.encode().split(b",")), caller=caller))
        self.events.append(AppendAnswered(attempt, AppendOutcome.ACKED, int(offset)))

    def _history(self, reading: Reading) -> ShardEvents:
        """What was acknowledged, and what is there beside it if a child can have appended it."""
        history = ShardEvents(self.durability, self.events)
        known = {value for append in history.appends.values() for value in append.begun.values}
        unheard: set[str] = set()
        for _, value in reading.records:
            if value is not None and value not in known:
                unheard.add(value.decode().rpartition(".")[0])
        for attempt, name in enumerate(sorted(unheard), start=len(self.events)):
            count = 1 + int(name.rpartition(".")[2]) % 3
            history.add(Begun(attempt, tuple(f"{name}.{place}".encode() for place in range(count))))
        return history


@pytest.fixture(params=[Durability.DISK, Durability.FSYNC])
def parent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Parent]:
    parent = Parent(tmp_path, request.param)
    yield parent
    parent.end()


FIGURE: Final = "kill -9 (cannot show a missing fsync)"


@pytest.mark.proves("I2")
def test_nothing_acknowledged_is_lost_by_kills_at_random_moments(parent: Parent, ledger: Ledger) -> None:
    chance = random.Random(f"kills {parent.durability}")
    for number in range(RANDOM_KILLS):
        parent.run(Life(directory="", durability="", epoch=0), kill_after=chance.randrange(80))
        if number % 10 == 9:
            assert parent.check() == []

    ledger.count(FIGURE, n=parent.kills, at="random")
    ledger.count("acks before kills", n=parent.acks, durability=parent.durability.value)
    assert parent.check() == []


@pytest.mark.proves("I2")
def test_nothing_acknowledged_is_lost_by_kills_at_named_steps(parent: Parent, ledger: Ledger) -> None:
    parent.run(Life(directory="", durability="", epoch=0), kill_after=200)
    for _ in range(NAMED_ROUNDS):
        for name, life in NAMED:
            if name in TORN:
                parent.tear()
            parent.run(life, kill_after=None)
            ledger.count(FIGURE, at=name)
            assert parent.check() == [], name
    ledger.count("acks before kills", n=parent.acks, durability=parent.durability.value)
