"""A benchmark, at toy size: it runs, checks what it wrote, and says what it found in the agreed shape.

Toy sizes show nothing of Forebay that other tests do not: one case stands for the shape, and a soak run has them all.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench import payload, report
from bench.cases import CASES
from bench.plan import TOY, Plan
from bench.results import Result, at_least, at_most, result
from tests.support.soak import SOAK

pytestmark = pytest.mark.slow

EVERY_DAY = ["append"]
FIELDS = ["case", "metric", "unit", "ours", "peers", "ratio", "aim", "met"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return Plan(TOY, tmp_path_factory.mktemp("bench"), peers=False, servers=False)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.spark) if case == "spark" else case
        for case in (CASES if SOAK else EVERY_DAY)
    ],
)
def test_case_gives_figures_in_the_agreed_shape(case: str, plan: Plan, request: pytest.FixtureRequest) -> None:
    if case == "spark":
        request.getfixturevalue("spark")  # the session of the run, before the case would start its own
    found = list(CASES[case](plan))

    assert found
    for one in found:
        line = msgspec.json.decode(msgspec.json.encode(one))
        assert list(line) == FIELDS
        assert line["case"] == case
        assert line["ours"] >= 0
        assert set(line["peers"]) == set(line["ratio"])
        assert isinstance(line["aim"], str | None)
        assert line["met"] in ((None,) if line["aim"] is None else (True, False, None))
    assert len({one.metric for one in found}) == len(found)
    assert all(one.metric in report.table(found) for one in found)


def test_ratio_is_ours_over_the_peer_and_decides_the_aim() -> None:
    fast = result("c", "m", "s", 2.0, {"a": 4.0, "b": 1.0}, [at_most(0.5, "a"), at_least(2, "b")])
    slow = result("c", "m", "s", 2.0, {"a": 3.0}, [at_most(0.5, "a")])

    assert (fast.ratio, fast.met, fast.aim) == ({"a": 0.5, "b": 2.0}, True, "≤ 0.5 × a, ≥ 2 × b")
    assert slow.met is False


def test_an_aim_against_a_missing_peer_is_open_unless_it_is_missed_anyway() -> None:
    missing = result("c", "m", "s", 2.0, {"a": None}, [at_most(0.5, "a")])
    missed = result("c", "m", "s", 2.0, {"a": None}, [at_most(0.5, "a"), at_most(1)])

    assert (missing.met, missed.met) == (None, False)
    assert "missing" in report.table([missing])


def test_records_that_differ_or_are_too_many_are_reported() -> None:
    expected = payload.values(20)

    payload.check("store", expected, iter(expected))
    with pytest.raises(payload.Wrong):
        payload.check("store", expected, iter([*expected[:19], b"other"]))
    with pytest.raises(payload.Wrong):
        payload.check("store", expected, iter(expected[:19]))
    with pytest.raises(payload.Wrong):
        payload.check("store", expected, iter([*expected, b"more"]))


def test_results_are_kept_by_case_as_lines_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "KEPT", tmp_path / "results")
    monkeypatch.setattr(report, "plot", lambda results, path: None)
    first, second = _one("append", 1.0), _one("read", 2.0)

    report.keep([first], 1.0)
    report.keep([second], 1.0)

    assert report.read(tmp_path / "results" / "append.jsonl") == [first]
    page = (tmp_path / "results" / "RESULTS.md").read_text()
    assert "| append | m | 1 |" in page and "| read | m | 2 |" in page


def _one(case: str, ours: float) -> Result:
    return result(case, "m", "s", ours)
