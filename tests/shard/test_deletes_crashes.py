"""Crash states of deletes, floors, exports and drops: the disk and the metadata store as of any moment.

Recovered by the same directory or, where that is possible, by another.
"""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same choice in every run
from collections.abc import Callable
from typing import Final, NamedTuple

import pytest

from forebay.records import Reason
from forebay.testing.simulated.crashes import CrashState, explore
from forebay.testing.simulated.damage import CrashDamage
from forebay.testing.simulated.trace import Note
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.protocol.environment import MODES, Node, OwnersEnvironment
from tests.support.environments.simulated import GRACE_S
from tests.support.soak import SOAK, sampled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

STATES_MAX: Final = 16 if SOAK else 1
NAMES_MAX: Final = 8 if SOAK else 2
NOTE: Final = "ended"


class Ended(NamedTuple):
    """Offsets that were to end, or have."""

    offsets: range
    acked: bool


def _end(node: Node, offsets: range, work: Callable[[], object]) -> None:
    node.environment.disk.note(NOTE, Ended(offsets, False))
    work()
    node.environment.disk.note(NOTE, Ended(offsets, True))


def _delete(node: Node, start: int, stop: int) -> None:
    bound = min(stop, node.shard.wal.head)
    _end(node, range(start, bound), lambda: node.shard.deletes.delete_range(start, stop))


def _run(node: Node) -> None:
    """Ends records on both sides of the frontier, and moves it, and lets the front go."""
    _delete(node, 1, 3)
    node.append(2)
    _delete(node, 5, 6)
    node.export()
    _delete(node, 3, 4)
    node.append(3)
    _delete(node, 6, 10)
    _end(node, range(5), lambda: node.shard.deletes.evict_below(5, Reason.CAP))
    node.export()
    node.append()
    node.shard.history.retain()
    node.environment.clock.advance(2 * GRACE_S)
    node.cleanup.collect_owned(node.shard)
    _end(node, range(10), lambda: node.shard.deletes.delete_before(11))


def _expected(notes: tuple[Note, ...], durability: Durability) -> tuple[set[int], set[int]]:
    """What must be gone, and what may be."""
    promised, begun = set[int](), set[int]()
    for note in notes:
        if note.kind == NOTE and isinstance(note.payload, Ended):
            begun |= set(note.payload.offsets)
            if note.payload.acked:
                promised |= set(note.payload.offsets)
        elif note.kind == "crash" and durability is Durability.DISK and note.payload != CrashDamage.KILLED.value:
            promised.clear()
    return promised, begun


def _violations(state: CrashState, mode: str, durability: Durability, name: str) -> list[str]:
    environment = OwnersEnvironment.after(state, mode, durability)
    promised, begun = _expected(tuple(environment.disk.trace.notes()), durability)
    node = environment.node(name)
    first = node.reading()
    alive = {offset for offset, _ in first.records}
    broken = [f"I23: back are {sorted(alive & promised)}"] if alive & promised else []
    acked = {offset for append in environment.history().acked for offset, _ in append.records}
    reported = {
        offset for gap in first.gaps for offset in range(gap.start, gap.stop) if gap.reason is not Reason.DELETED
    }
    if durability is Durability.FSYNC and acked - begun - alive - (reported if name == "b" else set()):
        broken.append(f"I23: nobody deleted {sorted(acked - begun - alive)}")
    if [gap for gap in first.gaps if gap.reason is Reason.DAMAGED]:
        broken.append(f"I12: {first.gaps}")
    node.append()
    node.export()
    node.die()
    back = {offset for offset, _ in environment.node(name).reading().records} & (begun - alive)
    if back:
        broken.append(f"I23: back at the second recovery are {sorted(back)}")
    return broken


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.proves("I23", "I24")
def test_no_crash_brings_a_record_back_or_ends_another(mode: str, durability: Durability, ledger: Ledger) -> None:
    """I23, I24."""
    environment = OwnersEnvironment(mode, durability)
    node = environment.node("a")
    node.append(4)
    begun = len(environment.disk.trace)
    _run(node)

    broken: list[str] = []
    # In a normal run one of those who may recover it, by chance.
    chance = random.Random(f"{mode} {durability}")
    trace = environment.disk.trace
    states = explore(trace, range(begun, len(trace) + 1), states_max=STATES_MAX, names_max=NAMES_MAX)
    names = ("a", "b") if mode == "shared_fs" else ("a",)
    for state in sampled(states, one_in=2, seed=f"{mode} {durability}"):
        for name in names if SOAK else [chance.choice(names)]:
            ledger.count("crash states", scenario=f"deletes in {mode}, by {name}", damage=state.damage.value)
            broken += [f"{state}: {violation}" for violation in _violations(state, mode, durability, name)]
    assert broken[:10] == []
