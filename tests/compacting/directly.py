"""Compaction in this process, without Spark, and what a topic must show before and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pyarrow as pa

from forebay.catalog import ShardCatalog
from forebay.cleanup.objects import ObjectCleanup
from forebay.clock import SystemClock
from forebay.compacting.passes import Unit
from forebay.compacting.planning import Rules
from forebay.compacting.superseding import KEYS
from forebay.disk import SystemDisk
from forebay.format.control.offsets import OffsetSet
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.inspection import verify
from forebay.inspection.findings import Severity
from forebay.spark.jobs.compaction import compact, written
from forebay.spark.jobs.report import JobReport
from forebay.spark.jobs.superseding import KeyUnit, looked_through
from forebay.spark.place.location import Location
from forebay.storage import Storage, Topic
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.spark.mixed import ENVIRONMENT, settings_file
from tests.spark.topics import Row, in_order, rows_of
from tests.support.environments.directories import Environment, keys_of, metadata_of

AT_ONCE: Final = Rules(settle_ms=0, segments_min=2)


class Here:
    """The work, done in this process one by one; `meanwhile` is called between writing and the swaps."""

    def __init__(self, location: Location, meanwhile: Callable[[], object] = lambda: None) -> None:
        self._location = location
        self._meanwhile = meanwhile

    def write(self, units: Sequence[Unit]) -> Iterator[SegmentDescriptor | str]:
        made: list[SegmentDescriptor | str] = []
        for unit in units:
            try:
                made.append(written(self._location, unit))
            except Exception as error:  # noqa: BLE001 - as on executors: the other units go on
                made.append(f"{type(error).__name__}: {error}")
        self._meanwhile()
        return iter(made)

    def superseded(self, units: Sequence[KeyUnit]) -> OffsetSet:
        said = [looked_through(self._location, unit) for unit in units]
        whole = pa.concat_tables([KEYS.empty_table(), *(one.newest for one in said)])
        newest: dict[bytes, int] = {}
        for key, offset in zip(whole.column("key").to_pylist(), whole.column("offset").to_pylist(), strict=True):
            newest[key] = max(offset, newest.get(key, -1))
        gone = [row["offset"] for row in whole.to_pylist() if row["aged"] and row["offset"] < newest[row["key"]]]
        ended = OffsetSet.of(gone)
        for one in said:
            ended |= one.superseded
        return ended


def location_of(environment: Environment, name: str | None = "one") -> Location:
    """Where a directory of the environment is; without a name its store alone."""
    options = {"settings": settings_file(environment)}
    return Location.parse(options if name is None else {**options, "path": str(environment.root / name)}, ENVIRONMENT)


def compacted(
    environment: Environment,
    topics: Sequence[str] = (),
    *,
    rules: Rules = AT_ONCE,
    name: str | None = "one",
    meanwhile: Callable[[], object] = lambda: None,
    dry_run: bool = False,
) -> JobReport:
    """Compact beside whichever caller owns the directory."""
    location = location_of(environment, name)
    return compact(Here(location, meanwhile), location, topics, rules=rules, dry_run=dry_run)


def shown(topic: Topic) -> list[Row]:
    """What a reader sees of all partitions."""
    rows: list[Row] = []
    for partition in range(topic.partitions):
        rows += rows_of(topic.read(partition=partition))
    return in_order(rows)


def catalog_of(log: Storage, topic: Topic, partition: int = 0) -> ShardCatalog:
    """The history of a partition as recorded, manifests opened."""
    places = inside(log).places
    return ShardCatalog(
        metadata_of(log), keys_of(log, topic, partition), topic.spec.topic_id, places.manifest, clock=ManualClock()
    )


def kinds_of(log: Storage, topic: Topic, partition: int = 0) -> list[DescriptorKind]:
    """What the history of a partition is made of."""
    return [piece.kind for piece in catalog_of(log, topic, partition).descriptors()]


def check_sound(environment: Environment, name: str = "one") -> None:
    """Nothing is wrong with a directory and its history."""
    disk = SystemDisk()
    try:
        report = verify(str(environment.root / name), environment.settings, disk=disk, clock=SystemClock())
    finally:
        disk.close()
    assert [str(finding) for finding in report.findings if finding.severity is not Severity.NOTE] == []


class _Ahead(SystemClock):
    """The machine's clock, ahead of it."""

    def __init__(self, seconds: int) -> None:
        super().__init__()
        self._seconds = seconds

    def now_ms(self) -> int:
        return super().now_ms() + 1000 * self._seconds


def collect_without_grace(log: Storage, topic: Topic, partition: int = 0) -> list[str]:
    """Collect the objects of an open shard as if every grace were over."""
    clock = _Ahead(log.settings.export.orphan_grace_s + 60)
    cleanup = ObjectCleanup(metadata_of(log), log.settings, inside(log).places, clock)
    return cleanup.collect_owned(inside(topic).segment(partition))
