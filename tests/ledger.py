"""What a run has shown, in figures: tests count, and the end of the run prints the sums by area.

Figures travel with pytest's own test reports, so they arrive from every worker and only from tests that ran.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import pytest

_PROPERTY: Final = "ledger"
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


class LedgerPlugin:
    """Sums the reports of a run; under xdist only the controller prints."""

    def __init__(self) -> None:
        self._areas: defaultdict[str, _Area] = defaultdict(_Area)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        area = self._areas[area_of(report.nodeid)]
        area.seconds += report.duration
        area.failed += report.failed
        if report.when == "call":
            area.tests += 1
        if report.when == "teardown":
            for name, entries in report.user_properties:
                if name == _PROPERTY:
                    _add(area, entries)  # type: ignore[arg-type]  # our own entries, written by enclose()

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
            yield from _table(("area", "figure", "of", "count", "violations"), figures)

    def _area_rows(self) -> Iterator[tuple[str, ...]]:
        total = sum(area.seconds for area in self._areas.values()) or 1.0
        for name, area in sorted(self._areas.items()):
            figures = (str(area.tests), str(area.failed), str(area.violations.total()))
            yield (name, *figures, f"{area.seconds:.1f}", f"{area.seconds / total:.0%}")

    def _figure_rows(self) -> Iterator[tuple[str, ...]]:
        for name, area in sorted(self._areas.items()):
            for figure in sorted(area.counts.keys() | area.violations.keys()):
                yield (name, *figure, str(area.counts[figure]), str(area.violations[figure]))


def enclose(ledger: Ledger, item: pytest.Item) -> None:
    """Put a test's figures into its report."""
    entries = ledger.entries()
    if entries:
        item.user_properties.append((_PROPERTY, entries))


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
