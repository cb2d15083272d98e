"""Figures in documents, made from the results that are kept: what a page says is what was measured last.

A page has blocks, each between `<!-- bench: NAME -->` and `<!-- end of bench: NAME -->`. `python -m bench --page`
writes what is between. A figure of a case that was measured at another commit than the newest is marked as older.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench.results import Result
from bench.runs import Run

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = ("README.md", "docs/performance.md", "docs/comparison.md", "docs/engines.md")
BLOCK: Final = re.compile(
    r"<!-- bench: (?P<name>[^>]*?) -->\n(?P<text>.*?)<!-- end of bench: (?P=name) -->\n", re.DOTALL
)
MARKS: Final = {True: "met", False: "missed", None: ""}
SHORTLY: Final = (
    ("append", "append_many 1000 × 100 B, disk"),
    ("append", "append_many 1000 × 100 B, fsync"),
    ("recovery", "restart with 1,000,000 records written by 1000"),
    ("read", "to records, sealed, written by 1000"),
    ("read", "to Arrow, sealed, written by 1000"),
    ("spark", "sum of lengths of 10,000,000 rows, forebay table"),
)
"""What a reader asks first, by case and metric."""


class Kept(NamedTuple):
    """Everything that is kept of runs."""

    results: Sequence[Result]
    runs: Mapping[str, Run]

    @property
    def commit(self) -> str | None:
        """The commit of the newest run that has noted one."""
        noted = [run for run in self.runs.values() if run.commit]
        return max(noted, key=lambda run: run.begun).commit if noted else None

    def of(self, case: str) -> str:
        """What a figure of this case was measured at: the newest commit, or it is older."""
        run = self.runs.get(case)
        if run is not None and run.commit is not None and run.commit == self.commit:
            return f"`{run.commit}`"
        return f"older: {run.commit or run.begun.partition(' ')[0]}" if run is not None else "older"


def write(kept: Kept, root: Path = ROOT) -> None:
    """Write the blocks of all pages."""
    for name in PAGES:
        path = root / name
        text = path.read_text(encoding="utf-8")
        path.write_text(rewritten(text, kept), encoding="utf-8")


def rewritten(text: str, kept: Kept) -> str:
    """A page with its blocks as the results have them; `ValueError` if a block has no end or no such name."""

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in BLOCKS:
            raise ValueError(f"there is no block {name!r}: choose from {', '.join(BLOCKS)}")
        lines = BLOCKS[name](kept)
        return "\n".join([f"<!-- bench: {name} -->", *lines, f"<!-- end of bench: {name} -->", ""])

    if len(re.findall(r"<!-- bench: ", text)) != len(BLOCK.findall(text)):
        raise ValueError("a block of figures has no end, or another's")
    return BLOCK.sub(block, text)


def number(value: float) -> str:
    """A figure in as few digits as say something."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.2f} M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.1f} k"
    return f"{value:.4g}"


def _aims(kept: Kept) -> list[str]:
    """Every figure that has an aim."""
    lines = ["| case | | reached | aim | | measured at |", "|---|---|---|---|---|---|"]
    for found in kept.results:
        if found.aim is not None:
            reached = "; ".join([f"{number(found.ours)} {found.unit}", *_ratios(found)])
            row = (found.case, found.metric, reached, found.aim, MARKS[found.met], kept.of(found.case))
            lines.append(f"| {' | '.join(row)} |")
    return lines


def _shortly(kept: Kept) -> list[str]:
    """A few figures, and how many aims are met."""
    known = {(found.case, found.metric): found for found in kept.results}
    lines = ["| | Forebay | in proportion to | measured at |", "|---|---|---|---|"]
    for case, metric in SHORTLY:
        found = known.get((case, metric))
        row = ("no figure is kept", "", "") if found is None else _short_row(found, kept)
        lines.append(f"| {metric} | {' | '.join(row)} |")
    aimed = [found for found in kept.results if found.met is not None]
    lines += ["", f"Of {len(aimed)} aims {sum(found.met is True for found in aimed)} are met."]
    return lines


def _short_row(found: Result, kept: Kept) -> tuple[str, str, str]:
    return f"{number(found.ours)} {found.unit}", ", ".join(_ratios(found)), kept.of(found.case)


def _ratios(found: Result) -> list[str]:
    return [f"{ratio:.2g} × {name}" for name, ratio in found.ratio.items() if ratio is not None]


def _engines(kept: Kept) -> list[str]:
    """The engines beside each other, and beside two peers."""
    ours, peers = ("memory", "rocksdb", "segment"), ("plain rocksdb", "sqlite")
    rows: dict[str, dict[str, str]] = {}
    for found in kept.results:
        if found.case == "engines":
            engine, _, what = found.metric.partition(": ")
            row = rows.setdefault(what, {})
            row[engine] = f"{number(found.ours)} {found.unit}"
            row.update((name, f"{number(value)} {found.unit}") for name, value in found.peers.items() if value)
    lines = [f"| | {' | '.join(f'`{one}`' for one in ours)} | plain RocksDB | SQLite |", "|---|---|---|---|---|---|"]
    lines += [f"| {what} | {' | '.join(row.get(one, '') for one in (*ours, *peers))} |" for what, row in rows.items()]
    return [*lines, "", f"Measured at: {kept.of('engines')}."]


BLOCKS: Final[Mapping[str, Callable[[Kept], list[str]]]] = {"aims": _aims, "shortly": _shortly, "engines": _engines}
