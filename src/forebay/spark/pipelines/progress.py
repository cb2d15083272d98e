"""How far the sinks of a pipeline are, while it runs and in the end. Plain values; knows nothing of Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from forebay.spark.pipelines.checkpoints import points_of

ROWS = "forebay_rows"
"""The name under which Spark counts what a sink is given."""


class SinkProgress(msgspec.Struct, kw_only=True):
    """One sink so far. `read` are rows of its sources, `rows` those it was given to write."""

    name: str
    writes: str
    batch: int | None = None
    batches: int = 0
    read: int = 0
    rows: int = 0
    rows_per_second: float = 0.0
    lag: int | None = None
    """How many offsets were left behind the last batch; unknown before the first."""
    tasks: tuple[int, int] | None = None
    """Of a batch: how many tasks are done, of how many that were begun."""

    def take(self, reported: Mapping[str, Any]) -> None:
        """Take what Spark reports of a batch, each batch once."""
        batch = int(reported["batchId"])
        if self.batch is not None and batch <= self.batch:
            return
        self.batch = batch
        self.batches += 1
        self.read += int(_over_sources(reported, "numInputRows"))
        self.rows += _rows(reported)
        self.rows_per_second = float(_over_sources(reported, "processedRowsPerSecond"))
        self.lag = _lag(reported)

    def __str__(self) -> str:
        if self.tasks is not None:
            return f"{self.name}: {self.tasks[0]:,} of {self.tasks[1]:,} tasks, {self.rows:,} rows written"
        lag = f", lag {self.lag:,}" if self.lag is not None else ""
        batch = f"batch {self.batch}, " if self.batch is not None else ""
        return f"{self.name}: {batch}{self.read:,} rows read, {self.rows:,} written, {self.rows_per_second:,.0f}/s{lag}"


OnProgress: TypeAlias = Callable[[Sequence[SinkProgress]], None]
"""Called now and then with how far each sink is."""


class RunReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run did."""

    pipeline: str
    mode: str
    sinks: tuple[SinkProgress, ...]
    seconds: float
    outcome: str
    """`done`, `stopped` if it was asked to end before that, or `failed`."""

    def plain(self) -> Any:
        """For JSON."""
        return msgspec.to_builtins(self)

    def lines(self) -> list[str]:
        """For a person."""
        lines = []
        for sink in self.sinks:
            batches = f", {sink.batches:,} batches" if self.mode == "streaming" else ""
            lines.append(f"{sink.name}: {sink.rows:,} rows to {sink.writes}{batches}")
        return [*lines, f"pipeline {self.pipeline}: {self.outcome} after {self.seconds:.1f} s"]


def _over_sources(reported: Mapping[str, Any], figure: str) -> float:
    """A figure of a whole batch. Spark Connect has it of each source alone."""
    if reported.get(figure) is not None:
        return float(reported[figure])
    return sum(float(source.get(figure) or 0) for source in reported.get("sources") or ())


def _rows(reported: Mapping[str, Any]) -> int:
    """What Spark counted of a batch: as a mapping, or with Spark Connect as values beside their schema."""
    counted = (reported.get("observedMetrics") or {}).get(ROWS) or {}
    if "schema" in counted:
        names = (field["name"] for field in counted["schema"]["fields"])
        counted = dict(zip(names, counted["values"], strict=True))
    return int(counted.get("rows") or 0)


def _lag(reported: Mapping[str, Any]) -> int | None:
    """Offsets between the end of the batch and the latest, over the sources that report both."""
    left: int | None = None
    for source in reported.get("sources") or ():
        end, latest = points_of(source.get("endOffset")), points_of(source.get("latestOffset"))
        for topic, points in latest.items():
            behind = sum(max(0, at - end.get(topic, {}).get(partition, 0)) for partition, at in points.items())
            left = (left or 0) + behind
    return left
