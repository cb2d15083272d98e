"""A benchmark, at toy size: it runs, checks what it wrote, and says what it found in the agreed shape.

Toy sizes show nothing of Forebay that other tests do not: one case stands for the shape, and a soak run has them all.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from bench import pages, payload, report
from bench.cases import CASES
from bench.plan import TOY, Plan
from bench.results import Result, at_least, at_most, result
from bench.runs import Run
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


def test_records_repeated_by_batch_or_mixed_are_counted() -> None:
    batch = payload.values(3)
    mixed = [*batch, batch[1], batch[0], batch[2]]

    payload.check_repeated("store", batch, 2, [*batch, *batch])
    payload.check_each("store", batch, 2, mixed)
    for found in (batch, [*batch, *batch, batch[0]], mixed):
        with pytest.raises(payload.Wrong):
            payload.check_repeated("store", batch, 2, found)
    for found in (batch, [*mixed, batch[0]], [*batch, *batch[:2], b"other"]):
        with pytest.raises(payload.Wrong):
            payload.check_each("store", batch, 2, found)


def test_results_are_kept_by_case_as_lines_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "KEPT", tmp_path / "results")
    monkeypatch.setattr(report, "plot", lambda results, path: None)
    monkeypatch.setattr(pages, "write", lambda kept: None)
    first, second = _one("append", 1.0), _one("read", 2.0)

    report.keep([first], report.Clock("append").run(rounds=5))
    report.keep([second], report.Clock("read").run(rounds=1))
    report.write_page()

    assert report.read(tmp_path / "results" / "append.jsonl") == [first]
    page = (tmp_path / "results" / "RESULTS.md").read_text()
    assert "| append | m | 1 |" in page and "| read | m | 2 |" in page
    assert "- http: no figures are kept" in page and "- append: no figures" not in page


def test_the_page_says_of_each_case_what_was_measured_and_whether_all_is_of_one_commit() -> None:
    def run(case: str, commit: str | None) -> Run:
        return Run(case=case, commit=commit, begun="2026-01-01 12:00", cores=2, loads=(0.1, 1.9))

    one = report.page([], {"append": run("append", "abc"), "read": run("read", "abc")})
    two = report.page([], {"append": run("append", "abc"), "read": run("read", "def+")})
    unknown = report.page([], {"append": run("append", "abc"), "read": run("read", None)})

    assert "All cases are from commit abc." in one
    assert "- append: commit abc; 2026-01-01 12:00 UTC, 0 s; 2 cores, load 0.1 to 1.9" in one
    assert "**The cases are not from one commit** (abc, def+)" in two
    assert "**The cases are not from one commit** (abc, 1 cases from runs that did not note theirs)" in unknown


def test_the_commit_is_marked_if_what_is_measured_differs_from_it(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        author = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
        subprocess.run(["git", "-C", str(tmp_path), *author, *words], check=True, capture_output=True)

    outside = report.commit(tmp_path)
    git("init")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "core.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    clean = report.commit(tmp_path)
    (tmp_path / "README.md").write_text("not measured")
    (tmp_path / "src" / "core.py").write_text("2")

    assert outside is None
    assert clean is not None and len(clean) == 12
    assert report.commit(tmp_path) == f"{clean}+"


def _one(case: str, ours: float) -> Result:
    return result(case, "m", "s", ours)
