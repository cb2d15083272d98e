"""What a run has shown, in figures: tests count, and the end of the run prints the sums by area.

Figures travel with pytest's own test reports, so they arrive from every worker and only from tests that ran.
"""

from __future__ import annotations

import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, TypeAlias

import pytest

_PROPERTY: Final = "ledger"
_BUDGETS: Final = Path(__file__).with_name("budgets.toml")
_REPORTS_PER_LOOP: Final = 100
_LOOPS: Final = 300_000
_STATIC: Final = {"ledger", "namespace", "tidy"}  # tests of the project as text

Figure: TypeAlias = tuple[str, str]  # what was counted, and its labels as text
Entry: TypeAlias = tuple[str, str, int, int]  # the figure, its count, its violations: plain, to cross processes


class Ledger:
    """The figures of one test."""

    def __init__(self) -> None:
        self._counts: Counter[Figure] = Counter()
        self._violations: Counter[Figure] = Counter()

    def count(self, figure: str, /, n: int = 1, **labels: str) -> None:
        """Add `n` to a figure: `ledger.count("crash states", n=12, scenario="append", damage="cut")`."""
        self._counts[figure, _text(labels)] += n

    def violation(self, figure: str, /, n: int = 1, **labels: str) -> None:
        """Add `n` broken promises to a figure that was counted under the same labels."""
        self._violations[figure, _text(labels)] += n

    def entries(self) -> list[Entry]:
        figures = self._counts.keys() | self._violations.keys()
        return [(*figure, self._counts[figure], self._violations[figure]) for figure in sorted(figures)]


@dataclass(slots=True)
class _Area:
    tests: int = 0
    failed: int = 0
    seconds: float = 0.0
    counts: Counter[Figure] = field(default_factory=Counter)
    violations: Counter[Figure] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """How many seconds the tests of each area may take on a machine that runs the fixed loop in `loop_seconds`."""

    loop_seconds: float
    area_seconds: float
    areas: Mapping[str, float]

    @classmethod
    def load(cls) -> Self:
        return cls(**tomllib.loads(_BUDGETS.read_text()))

    def exceeded(self, seconds: Mapping[str, float], loops: Sequence[float]) -> list[str]:
        """A line for each area that took more. `loops` are what the fixed loop took at moments of the run."""
        slowness = max(1.0, sum(loops) / len(loops) / self.loop_seconds) if loops else 1.0
        return [
            f"area {name} took {taken:.0f} s, its budget is {budget:.0f} s on a machine {slowness:.1f} times as slow: "
            "make its tests quicker, or say in tests/budgets.toml why it needs more"
            for name, taken in sorted(seconds.items())
            if taken > (budget := self.areas.get(name, self.area_seconds) * slowness)
        ]


class LedgerPlugin:
    """Sums the reports of a run; under xdist only the controller prints. An area beyond its budget fails the run."""

    def __init__(self, budgets: Budgets | None = None) -> None:
        self._areas: defaultdict[str, _Area] = defaultdict(_Area)
        self._budgets = budgets
        self._reports = 0
        self._loops: list[float] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._budgets is not None and self._reports % _REPORTS_PER_LOOP == 0:
            self._loops.append(timed_loop())
        self._reports += 1
        area = self._areas[area_of(report.nodeid)]
        area.seconds += report.duration
        area.failed += report.failed
        if report.when == "call":
            area.tests += 1
        if report.when == "teardown":
            for name, entries in report.user_properties:
                if name == _PROPERTY:
                    _add(area, entries)  # type: ignore[arg-type]  # our own entries, written by enclose()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._exceeded() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if any(area.tests or area.failed for area in self._areas.values()):
            terminalreporter.section("ledger")
            for line in self.lines():
                terminalreporter.write_line(line)

    def lines(self) -> Iterator[str]:
        yield from _table(("area", "tests", "failed", "violations", "seconds", "share"), list(self._area_rows()))
        figures = list(self._figure_rows())
        if figures:
            yield ""
            yield from _table(("area", "figure", "kinds", "count", "violations"), figures)
        yield from self._broken()
        yield from self._exceeded()

    def _exceeded(self) -> list[str]:
        if self._budgets is None:
            return []
        return self._budgets.exceeded({name: area.seconds for name, area in self._areas.items()}, self._loops)

    def _area_rows(self) -> Iterator[tuple[str, ...]]:
        total = sum(area.seconds for area in self._areas.values()) or 1.0
        for name, area in sorted(self._areas.items()):
            figures = (str(area.tests), str(area.failed), str(area.violations.total()))
            yield (name, *figures, f"{area.seconds:.1f}", f"{area.seconds / total:.0%}")

    def _figure_rows(self) -> Iterator[tuple[str, ...]]:
        """Each figure of an area in one row, summed over its labels; `kinds` is how many of those there are."""
        for name, area in sorted(self._areas.items()):
            labels = area.counts.keys() | area.violations.keys()
            for figure in sorted({figure for figure, _ in labels}):
                same = [key for key in labels if key[0] == figure]
                sums = (sum(counter[key] for key in same) for counter in (area.counts, area.violations))
                yield (name, figure, str(len(same)), *map(str, sums))

    def _broken(self) -> Iterator[str]:
        """What was violated, with its labels."""
        for name, area in sorted(self._areas.items()):
            for (figure, labels), count in sorted(area.violations.items()):
                if count:
                    yield f"violated in {name}: {figure}, {labels or 'no labels'}: {count} times"


def enclose(ledger: Ledger, item: pytest.Item) -> None:
    """Put a test's figures into its report."""
    entries = ledger.entries()
    if entries:
        item.user_properties.append((_PROPERTY, entries))


def timed_loop() -> float:
    """The seconds of a fixed piece of work, as a measure of how quick this machine is at this moment."""
    begun = time.perf_counter()
    total = 0
    for number in range(_LOOPS):
        total += number * number % 7
    return time.perf_counter() - begun


def area_of(nodeid: str) -> str:
    """The first directory under tests/; a file directly in tests/ is an area by its own name."""
    area = nodeid.split("::", 1)[0].split("/")[1].removeprefix("test_").removesuffix(".py")
    return "static" if area in _STATIC else area


def _add(area: _Area, entries: Sequence[Entry]) -> None:
    for figure, labels, count, violations in entries:
        area.counts[figure, labels] += count
        area.violations[figure, labels] += violations


def _text(labels: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in labels.items())


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    numeric = [all(row[column][:1].isdigit() for row in rows) for column in range(len(head))]
    for row in (head, *rows):
        cells = zip(row, widths, numeric, strict=True)
        yield "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()
