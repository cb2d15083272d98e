"""Figures in documents are those that are kept, and older ones say that they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import pages, report
from bench.cases import CASES
from bench.pages import BLOCK, PAGES, ROOT, Kept
from bench.results import Result, at_most, result
from bench.runs import Run

OLDER = re.compile(r"<!-- older figures -->\n.*?<!-- end of older figures -->\n", re.DOTALL)
CLAIM = re.compile(
    r"\d ?(?:[kMG] ?)?(?:B|(?:records|rows|msgs|appends) ?)?/s\b|\d ?µs\b"
    r"|\d ?× ?(?:\w+ )?(?:LMDB|RocksDB|SQLite|Redis|NATS|Parquet)",
    re.IGNORECASE,
)
"""A rate, a short time, or a ratio to a peer."""


def claims(text: str) -> list[str]:
    """The lines with figures of speed that are neither made from results nor said to be older."""
    plain = OLDER.sub("", BLOCK.sub("", text))
    return [line for line in plain.splitlines() if CLAIM.search(line)]


@pytest.mark.parametrize("name", PAGES)
def test_the_figures_of_a_page_are_those_that_are_kept(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")

    assert BLOCK.search(text), "it has no figures that are made from results"
    assert pages.rewritten(text, report.kept()) == text, "run: python -m bench --page"
    assert claims(text) == []


def test_the_page_of_results_is_that_of_those_that_are_kept() -> None:
    found = report.kept()
    assert (report.KEPT / "RESULTS.md").read_text(encoding="utf-8") == report.page(found.results, found.runs)


@pytest.mark.parametrize(
    "claim",
    [
        "appends reach 3.5 M/s",
        "an append takes 15 µs",
        "1.3 × LMDB",
        "0.8× plain RocksDB",
        "490 MB/s",
        "60 k records/s",
    ],
)
def test_a_claim_outside_of_what_is_made_from_results_is_found(claim: str) -> None:
    text = f"# Page\n\n| {claim} |\n"

    assert claims(text) == [f"| {claim} |"]
    assert claims(f"<!-- bench: aims -->\n{claim}\n<!-- end of bench: aims -->\n") == []
    assert claims(f"<!-- older figures -->\n{claim}\n<!-- end of older figures -->\n") == []
    assert claims("`append_many` of 1,000 records, 4 partitions, 10 ms") == []


def kept(*runs: Run) -> Kept:
    results = [result(run.case, f"{run.case} of one", "µs", 12.5, {"lmdb": 10.0}, [at_most(1, "lmdb")]) for run in runs]
    return Kept(results, {run.case: run for run in runs})


def test_a_figure_of_another_commit_than_the_newest_is_marked_as_older() -> None:
    found = kept(
        Run(case="append", commit="aaa", begun="2026-01-02 10:00"),
        Run(case="read", commit="bbb", begun="2026-01-01 10:00"),
        Run(case="watch", begun="2026-01-03 10:00"),
    )

    page = pages.rewritten("<!-- bench: aims -->\nold\n<!-- end of bench: aims -->\n", found)

    assert "| append | append of one | 12.5 µs; 1.2 × lmdb | ≤ 1 × lmdb | missed | `aaa` |" in page
    assert "| missed | older: bbb |" in page and "| missed | older: 2026-01-03 |" in page
    assert "\nold\n" not in page
    assert pages.rewritten(page, found) == page


def test_a_figure_that_is_not_kept_is_named_as_such() -> None:
    page = pages.rewritten("<!-- bench: shortly -->\n<!-- end of bench: shortly -->\n", Kept([], {}))

    assert page.count("no figure is kept") == len(pages.SHORTLY)
    assert "Of 0 aims 0 are met." in page


@pytest.mark.parametrize(
    "text",
    [
        "<!-- bench: aims -->\nno end\n",
        "<!-- bench: aims -->\n<!-- end of bench: shortly -->\n",
        "<!-- bench: unknown -->\n<!-- end of bench: unknown -->\n",
    ],
)
def test_a_block_without_an_end_or_of_no_known_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        pages.rewritten(text, Kept([], {}))


def test_all_pages_are_written_at_once(tmp_path: Path) -> None:
    for name in PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("<!-- bench: aims -->\n<!-- end of bench: aims -->\n", encoding="utf-8")

    pages.write(kept(Run(case="append", commit="aaa", begun="2026-01-02 10:00")), tmp_path)

    assert all("append of one" in (tmp_path / name).read_text(encoding="utf-8") for name in PAGES)


def made(found: Result) -> tuple[str, str]:
    return found.case, found.metric


def test_what_a_reader_asks_first_is_measured() -> None:
    """A metric that is given another name is found by its rows being empty."""
    known = set(map(made, report.kept().results))
    assert {case for case, _ in pages.SHORTLY} <= set(CASES)
    assert {one for one in pages.SHORTLY if one not in known} == set()
