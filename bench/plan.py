"""How much to measure, where, and what is shared between cases."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Figures: TypeAlias = dict[str, float]
"""Metric → value of one round."""
Contender: TypeAlias = Callable[[], Figures]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many of what; the same for every contender unless a slow one gets fewer of the same."""

    records: int = 1_000_000
    bulk_records: int = 500_000
    kilobyte_records: int = 200_000
    export_times: int = 5
    moved_records: int = 1_000
    durable_batches: int = 100
    durable_single: int = 500
    durable_many: int = 25_600
    producers: tuple[int, ...] = (1, 8, 64, 256)
    tasks: int = 256
    """Coroutines that append batches at once."""
    task_batches: int = 20
    batched: tuple[int, ...] = (1, 10, 100)
    written_topics: tuple[int, ...] = (1_000, 10_000)
    written_seconds: float = 1.0
    keyed_batches: int = 200
    stuck_seconds: float = 2.0
    paced_seconds: float = 1.0
    history: tuple[int, ...] = (1_000_000, 10_000_000)
    growth: tuple[int, ...] = (750_000, 1_500_000, 3_000_000)
    topics: tuple[int, ...] = (1, 100, 10_000)
    idle_seconds: float = 2.0
    churned: int = 10_000
    deleted_objects: int = 5_000
    watchers: tuple[int, ...] = (1, 100, 1_000)
    idle_watchers: int = 10_000
    watched_appends: int = 100
    watched_step_seconds: float = 0.1
    looked_up: int = 10_000_000
    lookups: int = 200
    spark_records: int = 10_000_000
    http_connections: tuple[int, int, int] = (1, 16, 256)
    http_seconds: float = 2.0
    warm_seconds: float = 0.5
    """Before each measurement over connections."""
    http_records: int = 200_000
    http_watchers: tuple[int, ...] = (1, 100, 1_000)
    http_events: int = 200
    turn_topics: tuple[int, ...] = (1, 100, 1_000, 10_000)
    """Topics that are appended to in turn."""
    appended_topics: tuple[int, ...] = (64, 1_000, 10_000)
    """The same in process, beginning with as many as have their files open."""
    turn_seconds: float = 2.0
    segments: tuple[int, ...] = (250, 2_000, 16_000)
    segment_times: int = 20
    subscribed: int = 200_000
    """Records that consumers of a server take."""
    dispatched: int = 40_000
    consumers: tuple[int, int] = (1, 16)
    acked: tuple[int, ...] = (1_000, 30_000, 1_000_000)
    """Records that are acknowledged behind one that is not."""
    cursor_times: int = 20
    dispatch_events: int = 200
    rounds: int = 5


LARGE = Sizes(history=(1_000_000, 10_000_000, 100_000_000))
TOY = Sizes(
    records=3_000,
    bulk_records=3_000,
    kilobyte_records=2_000,
    export_times=2,
    moved_records=100,
    durable_batches=2,
    durable_single=5,
    durable_many=100,
    producers=(1, 4),
    tasks=4,
    task_batches=2,
    batched=(1, 3),
    written_topics=(3,),
    written_seconds=1.0,
    keyed_batches=2,
    stuck_seconds=0.05,
    paced_seconds=0.02,
    history=(2_000, 4_000),
    growth=(1_000, 2_000, 4_000),
    topics=(1, 5),
    idle_seconds=0.05,
    churned=20,
    deleted_objects=20,
    watchers=(1, 5),
    idle_watchers=20,
    watched_appends=5,
    watched_step_seconds=0.005,
    looked_up=4_000,
    lookups=5,
    spark_records=5_000,
    http_connections=(1, 2, 4),
    http_seconds=0.01,
    warm_seconds=0.01,
    http_records=20_000,
    http_watchers=(1, 3),
    http_events=5,
    turn_topics=(1, 3),
    appended_topics=(2, 3),
    turn_seconds=0.02,
    segments=(2, 4, 8),
    segment_times=2,
    subscribed=2_000,
    dispatched=2_000,
    consumers=(1, 3),
    acked=(50, 200),
    cursor_times=2,
    dispatch_events=5,
    rounds=1,
)


SHORT = Sizes(
    records=100_000,
    bulk_records=100_000,
    kilobyte_records=20_000,
    durable_batches=20,
    durable_single=100,
    durable_many=2_560,
    task_batches=5,
    written_topics=(100,),
    keyed_batches=50,
    stuck_seconds=0.5,
    paced_seconds=0.2,
    history=(10_000, 100_000),
    growth=(100_000, 200_000, 400_000),
    topics=(1, 100, 1_000),
    idle_seconds=0.5,
    churned=500,
    deleted_objects=200,
    idle_watchers=1_000,
    watched_appends=20,
    watched_step_seconds=0.05,
    looked_up=100_000,
    lookups=20,
    spark_records=100_000,
    http_seconds=0.5,
    warm_seconds=0.1,
    http_records=50_000,
    http_events=20,
    turn_topics=(1, 100, 1_000),
    appended_topics=(64, 1_000),
    turn_seconds=0.5,
    segments=(25, 100, 400),
    subscribed=40_000,
    dispatched=20_000,
    acked=(1_000, 30_000),
    dispatch_events=20,
    rounds=1,
)
"""To see that everything works, peers too; its rates say little, its ratios of processor time something."""


@dataclass
class Plan:
    """One run: sizes, a directory of its own, and whether peers and servers take part."""

    sizes: Sizes
    root: Path
    peers: bool = True
    servers: bool = True
    say: Callable[[str], None] = lambda _: None
    opened: dict[int, Figures] = field(default_factory=dict)
    """What opening that many topics took."""
    _made: dict[str, Path] = field(default_factory=dict)
    _fresh: list[Path] = field(default_factory=list)
    _count: int = 0

    def fresh(self) -> Path:
        """A new, empty directory; gone after the round."""
        self._count += 1
        path = self.root / f"{self._count:05d}"
        path.mkdir()
        self._fresh.append(path)
        return path

    def _tidy(self) -> None:
        """What one contender wrote must not be on its way to the disk while the next is timed."""
        for path in self._fresh:
            shutil.rmtree(path, ignore_errors=True)
        self._fresh.clear()

    def shared(self, name: str, make: Callable[[Path], None]) -> Path:
        """What `make` wrote into a directory, made once for all cases of the run."""
        if name not in self._made:
            self.say(f"preparing {name}")
            path = self._made[name] = self.root / name
            path.mkdir()
            make(path)
        return self._made[name]

    def copy(self, source: Path) -> Path:
        """A directory with the same content."""
        path = self.fresh()
        shutil.copytree(source, path, dirs_exist_ok=True)
        return path

    def compare(self, contenders: Mapping[str, Contender | None]) -> dict[str, Figures]:
        """Medians over rounds in which all take part, each round beginning with another; missing ones have none."""
        present = [name for name, run in contenders.items() if run is not None]
        seen: dict[str, list[Figures]] = {name: [] for name in contenders}
        for turn in range(self.sizes.rounds):
            shift = turn % len(present)
            for name in present[shift:] + present[:shift]:
                run = contenders[name]
                assert run is not None
                self.say(f"round {turn + 1}: {name}")
                seen[name].append(run())
                self._tidy()
        return {name: medians(rounds) for name, rounds in seen.items()}


def medians(rounds: list[Figures]) -> Figures:
    """The median of each metric."""
    return {metric: statistics.median(r[metric] for r in rounds) for metric in (rounds[0] if rounds else {})}


def scratch(parent: str | None) -> tempfile.TemporaryDirectory[str]:
    """A directory for a run, gone at its end."""
    return tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=parent, ignore_cleanup_errors=True)
