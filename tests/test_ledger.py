"""The ledger must add up what tests counted, on one worker or several."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.ledger import Ledger, LedgerPlugin, area_of, enclose


def test_area_is_the_first_directory_under_tests() -> None:
    assert area_of("tests/wal/crash/test_append.py::test_cut[1/2]") == "wal"
    assert area_of("tests/test_settings.py::test_ranges") == "settings"
    assert area_of("tests/test_tidy.py::test_names") == "static"


def test_figures_of_all_reports_are_summed_by_area_and_label(request: pytest.FixtureRequest) -> None:
    plugin = LedgerPlugin()

    for nodeid, states in (("tests/wal/test_a.py::test_one", 12), ("tests/wal/test_b.py::test_two", 30)):
        ledger = Ledger()
        ledger.count("crash states", n=states, scenario="append", damage="cut")
        plugin.pytest_runtest_logreport(_report(nodeid, "call", request.node, Ledger()))
        plugin.pytest_runtest_logreport(_report(nodeid, "teardown", request.node, ledger))

    lines = [line.split() for line in plugin.lines()]
    assert ["wal", "2", "0", "0", "2.0", "100%"] in lines
    assert ["wal", "crash", "states", "scenario", "append,", "damage", "cut", "42", "0"] in lines


def test_violation_is_shown_beside_what_was_counted(request: pytest.FixtureRequest) -> None:
    plugin = LedgerPlugin()
    ledger = Ledger()

    ledger.count("kills")
    ledger.violation("kills")
    plugin.pytest_runtest_logreport(_report("tests/wal/test_a.py::test_one", "teardown", request.node, ledger))

    assert ["wal", "kills", "1", "1"] in [line.split() for line in plugin.lines()]


def _report(nodeid: str, when: Literal["call", "teardown"], item: pytest.Item, ledger: Ledger) -> pytest.TestReport:
    before = list(item.user_properties)
    enclose(ledger, item)
    properties = item.user_properties[len(before) :]
    item.user_properties[:] = before
    location = (nodeid.split("::", maxsplit=1)[0], 1, nodeid)
    return pytest.TestReport(nodeid, location, {}, "passed", None, when, user_properties=properties, duration=0.5)
