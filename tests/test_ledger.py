"""The ledger must add up what tests counted, on one worker or several."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from tests.ledger import Budgets, Ledger, LedgerPlugin, area_of, enclose


def test_area_is_the_first_directory_under_tests() -> None:
    assert area_of("tests/wal/crash/test_append.py::test_cut[1/2]") == "wal"
    assert area_of("tests/test_settings.py::test_ranges") == "settings"
    assert area_of("tests/test_tidy.py::test_names") == "static"


def test_figures_of_all_reports_are_summed_by_area_and_figure(request: pytest.FixtureRequest) -> None:
    plugin = LedgerPlugin()

    for nodeid, states in (("tests/wal/test_a.py::test_one", 12), ("tests/wal/test_b.py::test_two", 30)):
        ledger = Ledger()
        ledger.count("crash states", n=states, scenario="append", damage="cut")
        ledger.count("crash states", n=1, scenario="append", damage="zero")
        plugin.pytest_runtest_logreport(_report(nodeid, "call", request.node, Ledger()))
        plugin.pytest_runtest_logreport(_report(nodeid, "teardown", request.node, ledger))

    lines = [line.split() for line in plugin.lines()]
    assert ["wal", "2", "0", "0", "2.0", "100%"] in lines
    assert ["wal", "crash", "states", "2", "44", "0"] in lines


def test_violation_is_shown_beside_what_was_counted(request: pytest.FixtureRequest) -> None:
    plugin = LedgerPlugin()
    ledger = Ledger()

    ledger.count("kills", at="rotation")
    ledger.violation("kills", at="rotation")
    plugin.pytest_runtest_logreport(_report("tests/wal/test_a.py::test_one", "teardown", request.node, ledger))

    lines = list(plugin.lines())
    assert ["wal", "kills", "1", "1", "1"] in [line.split() for line in lines]
    assert "violated in wal: kills, at rotation: 1 times" in lines


def test_an_area_beyond_its_budget_is_named_and_fails_the_run(request: pytest.FixtureRequest) -> None:
    budgets = Budgets(loop_seconds=60.0, area_seconds=10.0, areas={"wal": 0.1})
    plugin = LedgerPlugin(budgets)
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)

    for nodeid in ("tests/wal/test_a.py::test_one", "tests/cli/test_b.py::test_two"):
        plugin.pytest_runtest_logreport(_report(nodeid, "call", request.node, Ledger()))
    plugin.pytest_sessionfinish(session)  # type: ignore[arg-type]  # what the plugin needs of one

    assert [line.partition(" its")[0] for line in plugin.lines() if "budget" in line] == ["area wal took 0 s,"]
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED


def test_a_machine_that_is_slower_has_larger_budgets() -> None:
    budgets = Budgets(loop_seconds=0.01, area_seconds=10.0, areas={})

    assert budgets.exceeded({"wal": 25.0}, [0.02, 0.04]) == []
    assert len(budgets.exceeded({"wal": 31.0}, [0.02, 0.04])) == 1
    assert len(budgets.exceeded({"wal": 11.0}, [0.001])) == 1, "a quicker one has no smaller budgets"


def test_every_budget_is_for_an_area_that_exists() -> None:
    directories = {path.name for path in Path(__file__).parent.iterdir() if path.is_dir()}

    assert sorted(Budgets.load().areas.keys() - directories) == []


def _report(nodeid: str, when: Literal["call", "teardown"], item: pytest.Item, ledger: Ledger) -> pytest.TestReport:
    before = list(item.user_properties)
    enclose(ledger, item)
    properties = item.user_properties[len(before) :]
    item.user_properties[:] = before
    location = (nodeid.split("::", maxsplit=1)[0], 1, nodeid)
    return pytest.TestReport(nodeid, location, {}, "passed", None, when, user_properties=properties, duration=0.5)
