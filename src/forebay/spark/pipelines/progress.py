"""How far the sinks of a pipeline are: while it runs, in the end, and as Spark's checkpoint says of a stream.

Plain values and files; knows nothing of Spark itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from forebay.errors import ForebayError
from forebay.spark.reading.streaming.offsets import StreamOffsets

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


class LastBatch(NamedTuple):
    """The last batch that was begun. It is done again unless it was `committed`."""

    batch: int
    committed: bool
    offsets: dict[str, dict[int, int]]
    """Behind the batch, by topic and partition."""


def standing(checkpoint: str) -> LastBatch | None:
    """Where a sink stands; `None` if it has not begun, or if its checkpoint is not on this machine."""
    begun, done = _batches(Path(checkpoint, "offsets")), _batches(Path(checkpoint, "commits"))
    if not begun:
        return None
    content = Path(checkpoint, "offsets", str(begun[-1])).read_text()
    offsets: dict[str, dict[int, int]] = {}
    for line in content.splitlines()[1:]:
        for topic, points in points_of(line).items():
            offsets.setdefault(topic, {}).update(points)
    return LastBatch(begun[-1], bool(done) and done[-1] == begun[-1], offsets)


def may_have_begun(checkpoint: str) -> bool:
    """Whether a sink goes on from its checkpoint, as far as is seen from this machine: another may know of one."""
    return not Path(checkpoint).is_absolute() or standing(checkpoint) is not None


def points_of(stored: Any) -> dict[str, dict[int, int]]:
    """The offsets by topic and partition, if they are ours, as JSON or as what it stands for; else nothing."""
    with contextlib.suppress(msgspec.MsgspecError, ForebayError):
        found = StreamOffsets.parse(msgspec.json.decode(stored) if isinstance(stored, str) else stored)
        return {
            topic: {partition: point.offset for partition, point in points.points.items()}
            for topic, points in found.topics.items()
        }
    return {}


def _batches(directory: Path) -> list[int]:
    if not directory.is_absolute() or not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())
