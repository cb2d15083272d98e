"""Every crash that the simulated disk knows, at every step of every scenario, compared with what was promised."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from typing import Final

import pytest

from forebay.errors import Unavailable
from forebay.testing.checks.invariants import (
    acks_follow_syncs,
    names_follow_bytes,
)
from forebay.testing.simulated.crashes import CrashState, explore
from forebay.testing.simulated.damage import CrashDamage
from forebay.testing.simulated.trace import Trace
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.support.soak import SOAK, sampled
from tests.wal.checks import Recoveries
from tests.wal.rig import Rig, after, simulated
from tests.wal.scenarios import SCENARIOS, Scenario, fail_next

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

STATES_MAX: Final = 64 if SOAK else 5
RECOVERIES: Final = 16 if SOAK else 2
NAMES_MAX: Final = 16 if SOAK else 4

CASES: Final = [
    pytest.param(scenario, durability, id=f"{scenario.name}-{durability}")
    for scenario in SCENARIOS
    for durability in scenario.durabilities
]


@pytest.mark.parametrize(("scenario", "durability"), CASES)
@pytest.mark.proves("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I9", "I10", "I11", "I13", "I14", "I26")
def test_no_crash_breaks_a_promise(scenario: Scenario, durability: Durability, ledger: Ledger) -> None:
    disk = simulated()
    # Salts of its own, so that no state of one case is also one of another.
    rig = Rig(disk, durability, seed=f"{scenario.name} {durability}").open()
    scenario.before(rig)
    begun, trace = len(disk.trace), disk.trace
    scenario.run(rig)

    assert list(names_follow_bytes(trace)) == []
    if durability is Durability.FSYNC:
        assert list(acks_follow_syncs(trace)) == []
    prefixes = range(begun, len(trace) + 1)
    states = explore(trace, prefixes, states_max=STATES_MAX, names_max=NAMES_MAX)
    _judge(states, durability, scenario.name, ledger)


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
@pytest.mark.proves("I11")
def test_no_crash_inside_a_recovery_breaks_a_promise(durability: Durability, ledger: Ledger) -> None:
    """Torn tails are set aside and cut, gaps opened, new files begun: each of these may be cut short, too."""
    disk = simulated()
    rig = Rig(disk, durability, seed=f"recovery {durability}").open()
    for _ in range(3):
        rig.append()
    begun = len(disk.trace)
    rig.group(1, 2, 1)
    rig.see()
    rig.append(size=600)

    torn = _torn(disk.trace, range(begun, len(disk.trace) + 1))
    _judge(
        itertools.chain.from_iterable(_recovering(state, durability) for state in torn), durability, "recovery", ledger
    )


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
@pytest.mark.proves("I9")
def test_what_a_restart_has_shown_survives_though_its_sync_had_failed(durability: Durability, ledger: Ledger) -> None:
    """The system reports a failed sync once and calls the pages clean: another sync would make nothing durable."""
    disk = simulated()
    killed = Rig(disk, durability, seed=f"failed sync {durability}").open()
    killed.append(3)
    killed.flush()
    killed.append(size=5000)
    killed.append(2)
    fail_next(killed, "sync", errno.EIO)
    killed.append()
    if durability is Durability.DISK:
        with pytest.raises(Unavailable, match="EIO"):
            killed.flush()
    assert killed.wal.failure is not None
    disk.note("crash", CrashDamage.KILLED.value)
    begun = len(disk.trace)

    again = Rig(disk, durability, epoch=1).open()
    again.see()
    again.append()
    again.see()
    again.flush()

    states = explore(disk.trace, range(begun, len(disk.trace) + 1), states_max=STATES_MAX, names_max=NAMES_MAX)
    _judge(states, durability, "restart after a failed sync", ledger)


def _recovering(state: CrashState, durability: Durability) -> Iterator[CrashState]:
    """Every crash of the recovery from a crash, and of the first appends after it."""
    again = after(state, durability)
    trace = again.disk.trace
    first = len(trace)
    again.open()
    again.append()
    again.see()
    again.append(2)
    yield from explore(trace, range(first, len(trace) + 1), states_max=5, names_max=3)


def _torn(trace: Trace, prefixes: range) -> list[CrashState]:
    """A few crashes of each kind that leave something to repair."""
    chosen: dict[CrashDamage, list[CrashState]] = {}
    for state in explore(trace, prefixes, states_max=3, names_max=2):
        chosen.setdefault(state.damage, []).append(state)
    return [state for states in chosen.values() for state in states[:: max(1, len(states) // RECOVERIES)]]


def _judge(states: Iterator[CrashState], durability: Durability, name: str, ledger: Ledger) -> None:
    broken: list[str] = []
    digests: set[bytes] = set()
    recoveries = Recoveries(durability)
    for state in sampled(states, one_in=2, seed=f"{name} {durability}"):
        digests.add(state.digest())
        ledger.count("crash states", scenario=name, damage=state.damage.value)
        violations = recoveries.violations(state)
        if violations:
            ledger.violation("crash states", scenario=name, damage=state.damage.value)
            broken += [f"{state}: {violation}" for violation in violations]
    ledger.count("distinct crash states", n=len(digests), scenario=name)
    assert broken[:10] == []
