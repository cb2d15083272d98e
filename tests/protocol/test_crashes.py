"""Every crash that the simulated disk knows, at every step of sealing, taking over, retaining, deleting and moving.

The metadata store survives each crash as it stood at that moment. Whichever caller comes next, the same directory or
another, finishes what was broken off, and every promise holds.
"""

from __future__ import annotations

import random  # noqa: TID251  # seeded: the same choice in every run
from typing import Final

import pytest

from forebay.testing.checks.catalogs import check_history
from forebay.testing.checks.invariants import Violation, names_follow_bytes
from forebay.testing.checks.moves import commits_of
from forebay.testing.simulated.crashes import CrashState, explore
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.protocol.environment import KEYS, OwnersEnvironment
from tests.protocol.judging import excuse, finished, passings
from tests.protocol.scenarios import SCENARIOS, InterruptedScenario
from tests.support.soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

STATES_MAX: Final = 16 if SOAK else 1
NAMES_MAX: Final = 16 if SOAK else 3

CASES: Final = [
    pytest.param(scenario, mode, durability, id=f"{scenario.name}-{mode}-{durability}")
    for scenario in SCENARIOS
    for mode in scenario.modes
    for durability in ((Durability.FSYNC, Durability.DISK) if SOAK else (Durability.FSYNC,))
]


@pytest.mark.parametrize(("scenario", "mode", "durability"), CASES)
@pytest.mark.proves("I15", "I16", "I17", "I22")
def test_no_crash_keeps_it_from_being_finished(
    scenario: InterruptedScenario, mode: str, durability: Durability, ledger: Ledger
) -> None:
    environment = OwnersEnvironment(mode, durability)
    nodes = scenario.before(environment)
    trace = environment.disk.trace
    begun = len(trace)
    scenario.run(environment, nodes)

    # A store that is probed loses nothing with its probes, and `live` is never relied on after a crash.
    assert [v for v in names_follow_bytes(trace) if not (".probe" in v.message or v.message.startswith("live "))] == []
    broken: list[str] = []
    digests: set[bytes] = set()
    # In a normal run one of those who may finish it, by chance: each state of a prefix meets another.
    chance = random.Random(f"{scenario.name} {mode} {durability}")
    for state in explore(trace, range(begun, len(trace) + 1), states_max=STATES_MAX, names_max=NAMES_MAX):
        digests.add(state.digest())
        for name in scenario.by if SOAK else [chance.choice(scenario.by)]:
            ledger.count("crash states", scenario=f"{scenario.name}, {mode}", damage=state.damage.value)
            violations = _broken(state, scenario, mode, durability, name)
            if violations:
                ledger.violation("crash states", scenario=f"{scenario.name}, {mode}", damage=state.damage.value)
                broken += [f"{state}, then {name}: {violation}" for violation in violations]
    ledger.count("distinct crash states", n=len(digests), scenario=f"{scenario.name}, {mode}")
    assert broken[:10] == []


def _broken(
    state: CrashState, scenario: InterruptedScenario, mode: str, durability: Durability, name: str
) -> list[Violation]:
    environment = OwnersEnvironment.after(state, mode, durability)
    return [*_at_that_moment(environment), *finished(environment, scenario, name)]


def _at_that_moment(environment: OwnersEnvironment) -> list[Violation]:
    """I15 to I17 on what the crash left, before anyone repairs anything; but a deletion may have begun."""
    commits = commits_of(KEYS, environment.committed)
    catalog = environment.catalog
    if environment.state is None or environment.state.phase == "deleting":
        return []
    history = excuse(environment.history(), passings(commits))
    local = {f"{name}/{path}": content for name in "abc" for path, content in environment.log_files(name).items()}
    return check_history(history, catalog.descriptors(), catalog.frontier().next, environment.fetch, local)
