"""The RocksDB engine killed at work, and without room: nothing half done, nothing forgotten, no offset twice.

A kill does not show a missing sync: the system's cache outlives the process.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random  # noqa: TID251  # seeded: the same run again
from typing import Final

import pytest

from forebay.engines import NewRecord
from forebay.records import Record
from tests.engines.audit import violations
from tests.engines.lookup_homes import LookupMemoryHome
from tests.engines.rocks_children import LIMITS, STEPS, Straight, home_in
from tests.engines.streams import Step, answer, seeded, seen, standing
from tests.ledger import Ledger
from tests.support.processes import Child, hear
from tests.support.soak import SOAK

pytestmark = pytest.mark.slow

KILLS: Final = 100 if SOAK else 6
ROOT: Final = Path(__file__).parents[2]


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Whatever happens, none is left behind."""
    found: list[Child] = []
    yield found
    for child in found:
        child.kill()
        child.communicate()


def start(children: list[Child], *arguments: str) -> Child:
    """A child at work."""
    command = [sys.executable, "-m", "tests.engines.rocks_children", *arguments]
    children.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    return children[-1]


class Model:
    """The memory engine after the first steps of a stream."""

    def __init__(self, script: list[Step]) -> None:
        home = LookupMemoryHome()
        self.life = Straight(home.open(), home.ref(0, **LIMITS), home.clock)
        for step in script:
            answer(self.life, step)

    def standing(self) -> list[object]:
        return standing(self.life.engine, self.life.ref(0))

    def live(self) -> set[int]:
        steps = seen(self.life.engine, self.life.ref(0))
        return {step.offset for step in steps if isinstance(step, Record)}


@pytest.mark.parametrize("durability", ["disk", "fsync"])
@pytest.mark.proves("I2", "I4", "I23", "I24")
def test_a_kill_leaves_no_index_without_its_record_and_no_record_without_its_index(
    tmp_path: Path, durability: str, children: list[Child], ledger: Ledger
) -> None:
    """I2, I4, I23, I24: what is there is what was acknowledged, and at most the one step under way."""
    chance = Random(len(durability))
    for seed in range(KILLS):
        directory = tmp_path / str(seed)
        directory.mkdir()
        child = start(children, "change", str(directory), durability, str(seed))
        done, wanted = 0, chance.randrange(1, STEPS)
        while done < wanted:
            done = int(hear(child))
        child.kill()
        assert child.stdout is not None
        done = max([done, *map(int, child.stdout.read().rpartition("\n")[0].split())])
        child.wait()

        home = home_in(str(directory), durability)
        ref = home.ref(0, **LIMITS)
        assert violations(home.path, ref) == []
        engine = home.open()
        found = standing(engine, ref)
        assert engine.open_shard(ref).decision.exact
        script = seeded(seed, STEPS)
        before, after = Model(script[:done]), Model(script[: done + 1])
        if found not in (before.standing(), after.standing()):
            # A delete of many records is several writes, each whole.
            assert script[done].kind.startswith(("delete", "evict"))
            live = {step.offset for step in seen(engine, ref) if isinstance(step, Record)}
            assert after.live() < live < before.live()
        _goes_on(Straight(engine, ref, home.clock), before, after, script[:done])
        engine.close()
        assert violations(home.path, ref) == []
        ledger.count("kills", durability=durability)
        ledger.count("acks", done)


def _goes_on(life: Straight, before: Model, after: Model, done: list[Step]) -> None:
    """The shard takes the next record at the next offset, and a repeat is known."""
    repeats = [step for step in done if step.kind == "produce"]
    if repeats:
        assert answer(life, repeats[-1]) == answer(before.life, repeats[-1])
    heads = [model.life.engine.open_shard(model.life.ref(0)).published() for model in (before, after)]
    assert life.engine.write(life.ref(0), NewRecord(b"next", 1)) in heads


@pytest.mark.proves("I28")
def test_without_room_the_shard_is_read_only_and_what_was_acknowledged_stays(
    tmp_path: Path, children: list[Child], ledger: Ledger
) -> None:
    """I28: no file may grow beyond a limit, as on a full disk."""
    child = start(children, "fill", str(tmp_path), "200000")
    kind, acked = hear(child).split()
    assert kind == "Indeterminate"
    assert hear(child) == "Unavailable"
    assert int(hear(child)) == int(acked) + 1
    assert hear(child) == "True"
    child.kill()
    child.wait()

    home = home_in(str(tmp_path), "disk")
    ref = home.ref()
    assert violations(home.path, ref) == []
    engine = home.open()
    found = [step for step in seen(engine, ref) if isinstance(step, Record)]
    assert [record.offset for record in found] == list(range(len(found)))
    assert len(found) in (int(acked) + 1, int(acked) + 2)
    assert engine.write(ref, NewRecord(b"again", 1)) == len(found)
    engine.close()
    ledger.count("faults")
