"""Crashes of what lies above the log, with power loss, for topics of every class at either end."""

from __future__ import annotations

import pytest

from forebay.testing.simulated.disk import SimulatedDisk
from tests.ledger import Ledger
from tests.protocol.above import CLASSES, SCENARIOS, crashes
from tests.support.soak import sampled

pytestmark = pytest.mark.slow

ONE_IN = {"routers": 30, "dead letters": 15, "replay": 8}


@pytest.mark.parametrize("classes", CLASSES, ids=" to ".join)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_at_any_step_loses_nothing_and_doubles_nothing(
    name: str, classes: tuple[str, str], ledger: Ledger
) -> None:
    scenario, disk = SCENARIOS[name](), SimulatedDisk()
    scenario.run(disk, classes)
    violations = []
    for state in sampled(crashes(disk), one_in=ONE_IN[name], seed=f"{name} {classes}"):
        ledger.count("crashes above the log", scenario=name, damage=state.damage.value)
        violations += list(scenario.check(state))
    assert not violations
