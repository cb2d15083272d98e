"""Owners of the segment engine killed while they delete, evict, seal and export: what was acknowledged has happened.

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

from forebay.records import Record
from tests.engines.rocks_children import LIMITS, STEPS, Straight
from tests.engines.segment_children import home_in
from tests.engines.streams import APPENDS, answer, seeded, seen, standing
from tests.engines.test_rocksdb_kills import ROOT, Model
from tests.ledger import Ledger
from tests.support.processes import Child, hear
from tests.support.soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

STREAMS: Final = 20 if SOAK else 1
KILLS: Final = 5


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Whatever happens, none is left behind."""
    found: list[Child] = []
    yield found
    for child in found:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("durability", ["disk", "fsync"])
@pytest.mark.parametrize("mode", ["local", "shared_fs"])
@pytest.mark.proves("I2", "I4", "I23", "I24")
def test_a_killed_owner_has_done_what_it_acknowledged_and_at_most_the_step_under_way(
    tmp_path: Path, mode: str, durability: str, children: list[Child], ledger: Ledger
) -> None:
    """I2, I4, I23, I24: no deleted record comes back, no floor goes back, and nothing else is lost."""
    for seed in range(STREAMS):
        chance = Random(f"{mode} {durability} {seed}")
        directory = str(tmp_path / str(seed))
        first = 0
        for left in range(KILLS, 0, -1):
            wanted = chance.choice(removing(seed, first, first + (STEPS - first) // left))
            done = killed(children, [directory, mode, durability, str(seed), str(first)], first, wanted)
            ledger.count("kills of an owner that deletes", mode=mode, durability=durability)
            ledger.count("acks before them", done - first)
            first = checked(directory, mode, durability, seed, done)


def removing(seed: int, first: int, last: int) -> list[int]:
    """After how many steps, of these, something has just ended.

    Not before the first record: until there is a file, offsets that were reserved for it count as lost.
    """
    script = seeded(seed, STEPS)
    begun = next(place for place, step in enumerate(script, start=1) if step.kind in APPENDS)
    steps = [step for step in range(begun, last) if script[step - 1].kind.startswith(("delete", "evict"))]
    return [step for step in steps if step > first] or [max(begun, first)]


def killed(children: list[Child], arguments: list[str], done: int, wanted: int) -> int:
    """A child changes the shard and is killed once it has done so many steps; how many it said it did."""
    command = [sys.executable, "-m", "tests.engines.segment_children", *arguments]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    children.append(child)
    while done < wanted:
        done = int(hear(child))
    child.kill()
    assert child.stdout is not None
    done = max([done, *map(int, child.stdout.read().rpartition("\n")[0].split())])
    child.wait()
    return done


def checked(directory: str, mode: str, durability: str, seed: int, done: int) -> int:
    """See that so many steps are done, and the next one wholly, in part or not; the step to go on with."""
    home = home_in(directory, mode, durability)
    engine, ref = home.open(), home.ref(0, **LIMITS)
    script = seeded(seed, STEPS)
    before, after = Model(script[:done]), Model(script[: done + 1])
    found = standing(engine, ref)
    following = done
    if found != before.standing():
        following += 1
    if found not in (before.standing(), after.standing()):
        # A delete of many records is several writes, each whole.
        assert script[done].kind.startswith(("delete", "evict")), script[done].kind
        live = {step.offset for step in seen(engine, ref) if isinstance(step, Record)}
        assert after.live() <= live <= before.live()
        answer(Straight(engine, ref, home.clock), script[done])
        assert standing(engine, ref) == after.standing()
    repeats = [step for step in script[:done] if step.kind == "produce"]
    if repeats:
        life = Straight(engine, ref, home.clock)
        assert answer(life, repeats[-1]) == answer(before.life, repeats[-1])
    engine.close()
    home.metadata.close()
    return following
