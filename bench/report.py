"""Results for people: a table, a plot, and a page that is kept."""

# ruff: noqa: PLC0415 - what is not installed is left out

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench import pages
from bench.cases import CASES
from bench.pages import number
from bench.results import Result
from bench.runs import Run

KEPT = Path(__file__).parent / "results"
MARKS = {True: "met", False: "MISSED", None: ""}


def table(results: Sequence[Result]) -> str:
    """Plain text, one line for each figure and one below for each peer."""
    lines = []
    for found in results:
        lines.append(f"{found.case:9} {found.metric:68} {number(found.ours):>10} {found.unit:9} {_verdict(found)}")
        for name, value in found.peers.items():
            ratio = found.ratio[name]
            against = "missing" if value is None else f"{number(value):>10} {found.unit:9} ratio {ratio:g}"
            lines.append(f"{'':9}   {'against ' + name:66} {against}")
    return "\n".join(lines)


def keep(results: Sequence[Result], run: Run) -> None:
    """Write the lines of a case and the run they are from; other cases keep what they had."""
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{run.case}.jsonl").write_bytes(b"".join(msgspec.json.encode(found) + b"\n" for found in results))
    _write_runs(_runs() | {run.case: run})


def write_page() -> None:
    """Make the page, the plot and the figures in documents from the lines that are kept."""
    found = kept()
    (KEPT / "RESULTS.md").write_text(page(found.results, found.runs))
    plot(found.results, KEPT / "ratios.png")
    pages.write(found)


def kept() -> pages.Kept:
    """All figures that are kept, with the runs that they are from."""
    return pages.Kept([found for path in sorted(KEPT.glob("*.jsonl")) for found in read(path)], _runs())


class Clock:
    """Notes what the run of a case begins with."""

    def __init__(self, case: str) -> None:
        self._case = case
        self._begun, self._monotonic, self._load = datetime.now(UTC), time.monotonic(), os.getloadavg()[0]
        self._commit = commit()

    def run(self, rounds: int) -> Run:
        """The run, at its end."""
        return Run(
            case=self._case,
            commit=self._commit,
            begun=f"{self._begun:%Y-%m-%d %H:%M}",
            seconds=round(time.monotonic() - self._monotonic, 1),
            rounds=rounds,
            cores=os.cpu_count() or 0,
            loads=(round(self._load, 1), round(os.getloadavg()[0], 1)),
            system=f"Python {platform.python_version()}, {platform.system()} {platform.release()}",
        )


def commit(root: Path = KEPT.parents[1]) -> str | None:
    """The commit of the files that are measured, with a `+` if they differ from it; `None` outside of a repository.

    Results and documents do not count: they are written from what was measured.
    """
    try:
        found = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", "src", "bench/*.py", "bench/cases", "pyproject.toml")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{found}+" if changed else found


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _runs() -> dict[str, Run]:
    """The run that each case is from."""
    path = KEPT / "runs.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Run]) if path.exists() else {}


def _write_runs(runs: Mapping[str, Run]) -> None:
    (KEPT / "runs.json").write_bytes(msgspec.json.format(msgspec.json.encode(runs)) + b"\n")


def _commits(runs: Mapping[str, Run]) -> str:
    """Whether the figures belong together."""
    named = sorted({run.commit for run in runs.values() if run.commit})
    unknown = sum(run.commit is None for run in runs.values())
    if len(named) == 1 and not unknown:
        return f"All cases are from commit {named[0]}."
    said = [*named, *([f"{unknown} cases from runs that did not note theirs"] if unknown else [])]
    return f"**The cases are not from one commit** ({', '.join(said) or 'none was run'}): compare inside a case only."


def read(path: Path) -> list[Result]:
    """The results kept in a file."""
    return [msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines()]


def page(results: Sequence[Result], runs: Mapping[str, Run]) -> str:
    """A page in Markdown."""
    without = [case for case in sorted(CASES) if case not in runs]
    missed = [found for found in results if found.met is False]
    lines = [
        "# Results",
        "",
        "Made by `python -m bench`: medians of interleaved rounds. Only ratios inside one run count; one below 1.5",
        "either way is a tie, and on a machine that is loaded beyond its cores even more is noise. Where servers are",
        "compared, the processor time of a record stands beside each rate: server and client share the machine.",
        "",
        _commits(runs),
        "",
        *[f"- {case}: {run}" for case, run in sorted(runs.items())],
        *[f"- {case}: no figures are kept" for case in without],
        "",
        f"{sum(found.met is True for found in results)} aims met, {len(missed)} missed" + (":" if missed else "."),
        *[f"- {found.case}: {found.metric}: {number(found.ours)} {found.unit}, aim {found.aim}" for found in missed],
        "",
        "| case | metric | ours | unit | peers (ratio) | aim | |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in results:
        peers = "; ".join(_peer(found, name) for name in found.peers)
        row = [found.case, found.metric, number(found.ours), found.unit, peers, found.aim or "", MARKS[found.met]]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", "![ratios](ratios.png)", ""])


def plot(results: Sequence[Result], path: Path) -> None:
    """Ours over each peer, on a logarithmic axis; left out without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    from matplotlib import pyplot

    bars = [(f"{r.case}: {r.metric} / {name}", ratio) for r in results for name, ratio in r.ratio.items() if ratio]
    figure, axes = pyplot.subplots(figsize=(12, 0.22 * len(bars) + 1.5))
    axes.barh(range(len(bars)), [ratio for _, ratio in bars], color="#4477aa", height=0.7)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=6)
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("Forebay / peer (for times and latencies, less is better)")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=75)
    pyplot.close(figure)


def _peer(found: Result, name: str) -> str:
    value, ratio = found.peers[name], found.ratio[name]
    return f"{name} missing" if value is None else f"{name} {number(value)} ({ratio:.3g}×)"


def _verdict(found: Result) -> str:
    return f"{MARKS[found.met]} (aim {found.aim})" if found.aim else ""
