"""Results for people: a table, a plot, and a page that is kept."""

# ruff: noqa: PLC0415 - what is not installed is left out

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench.results import Result

KEPT = Path(__file__).parent / "results"
MARKS = {True: "met", False: "MISSED", None: ""}


def table(results: Sequence[Result]) -> str:
    """Plain text, one line for each figure and one below for each peer."""
    lines = []
    for found in results:
        lines.append(f"{found.case:9} {found.metric:68} {_number(found.ours):>10} {found.unit:9} {_verdict(found)}")
        for name, value in found.peers.items():
            ratio = found.ratio[name]
            against = "missing" if value is None else f"{_number(value):>10} {found.unit:9} ratio {ratio:g}"
            lines.append(f"{'':9}   {'against ' + name:66} {against}")
    return "\n".join(lines)


def keep(results: Sequence[Result], seconds: float) -> None:
    """Write the lines, the page and the plot of this run; cases that were not run keep what they had."""
    KEPT.mkdir(exist_ok=True)
    cases = list(dict.fromkeys(found.case for found in results))
    for case in cases:
        lines = [msgspec.json.encode(found) for found in results if found.case == case]
        (KEPT / f"{case}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    everything = [found for path in sorted(KEPT.glob("*.jsonl")) for found in read(path)]
    (KEPT / "RESULTS.md").write_text(page(everything, _runs(cases, seconds)))
    plot(everything, KEPT / "ratios.png")


def _runs(cases: Sequence[str], seconds: float) -> dict[str, str]:
    """When and under which load each case was run; this run noted."""
    path = KEPT / "runs.json"
    runs: dict[str, str] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    line = (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {seconds:.0f} s for {', '.join(cases)}; {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    )
    runs |= dict.fromkeys(cases, line)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(runs)) + b"\n")
    return runs


def read(path: Path) -> list[Result]:
    """The results kept in a file."""
    return [msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines()]


def page(results: Sequence[Result], runs: Mapping[str, str]) -> str:
    """A page in Markdown."""
    missed = [found for found in results if found.met is False]
    lines = [
        "# Results",
        "",
        "Made by `python -m bench`: medians of interleaved rounds. Only ratios inside one run count; one below 1.5",
        "either way is a tie, and on a machine that is loaded beyond its cores even more is noise.",
        "",
        *[f"- {case}: {run}" for case, run in sorted(runs.items())],
        "",
        f"{sum(found.met is True for found in results)} aims met, {len(missed)} missed" + (":" if missed else "."),
        *[f"- {found.case}: {found.metric}: {_number(found.ours)} {found.unit}, aim {found.aim}" for found in missed],
        "",
        "| case | metric | ours | unit | peers (ratio) | aim | |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in results:
        peers = "; ".join(_peer(found, name) for name in found.peers)
        row = [found.case, found.metric, _number(found.ours), found.unit, peers, found.aim or "", MARKS[found.met]]
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
    return f"{name} missing" if value is None else f"{name} {_number(value)} ({ratio:.3g}×)"


def _verdict(found: Result) -> str:
    return f"{MARKS[found.met]} (aim {found.aim})" if found.aim else ""


def _number(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:.2f} M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.1f} k"
    return f"{value:.4g}"
