"""How a log, a topic and its open partitions fare, by one call. Opens nothing and asks neither metadata nor a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from forebay.engines import OwnedShard
from forebay.errors import Closed
from forebay.meter import LogMeter, Metric, Sample
from forebay.records import Offsets
from forebay.shard import RecoveryDecision, SegmentShard
from forebay.shard.history import ExportStatus
from forebay.workers import WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """How one partition fares that this process owns and has open."""

    topic: str
    partition: int
    engine: str
    durability: str
    epoch: int
    """Counts the owners of the partition."""
    decision: RecoveryDecision
    """How it was recovered when it was opened."""
    failure: str | None
    """Why it refuses appends, if it does."""
    offsets: Offsets
    segments: int
    """Log files in this directory, the active one included."""
    cache_bytes: int
    """Bytes of its newest records held in memory."""
    export: ExportStatus | None
    """How far its history is behind its log; `None` for engines without history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus:
    """How a topic fares in this process."""

    name: str
    partitions: int
    """How many the topic has."""
    open: tuple[PartitionStatus, ...]
    """Those that this process owns and has open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatus:
    """How a log fares: its open partitions, its background workers, and everything that is counted."""

    path: str | None
    """The data directory, if there is one."""
    directory_id: str | None
    read_only: bool
    open: tuple[PartitionStatus, ...]
    """The partitions that this process owns and has open."""
    workers: tuple[WorkerStatus, ...]
    metrics: tuple[Sample, ...]
    """Counters and histograms never fall while the log is open, whatever becomes of the partition they were made by."""


def partition_statuses(shards: Iterable[OwnedShard], *, reads: bool = True) -> tuple[PartitionStatus, ...]:
    """How these partitions fare; one that is closed meanwhile is left out. Unless it `reads`, it asks no disk."""
    found = []
    for shard in shards:
        try:
            found.append(_status_of(shard, reads=reads))
        except Closed:
            continue
    return tuple(found)


def lag_ends(shards: Iterable[OwnedShard]) -> dict[tuple[str, int], int]:
    """Where lag ends in these partitions, by topic and partition."""
    return {(str(shard.ref.spec.name), shard.ref.partition): shard.lag_end() for shard in shards}


def watch_shard(meter: LogMeter, shard: OwnedShard) -> None:
    """Add up what an open shard counts, from its opening on. Harmless when repeated."""
    spec = shard.ref.spec
    meter.watch(shard, shard.counts, topic=str(spec.name), durability=shard.durability.value, engine=spec.engine.value)


def gauges(partitions: Iterable[PartitionStatus], workers: Iterable[WorkerStatus], now_ms: int) -> list[Sample]:
    """What is so now, as numbers."""
    cached: Counter[tuple[str, str]] = Counter()
    waiting: Counter[tuple[str, str]] = Counter()
    late: dict[tuple[str, str], float] = {}
    opened = failed = 0
    for partition in partitions:
        kind = (partition.durability, partition.engine)
        cached[kind] += partition.cache_bytes
        if partition.export is not None:
            waiting[kind] += partition.export.lag_bytes
            since = partition.export.lag_since
            late[kind] = max(late.get(kind, 0.0), 0.0 if since is None else (now_ms - since) / 1000)
        opened += 1
        failed += partition.failure is not None
    by_kind = ((Metric.CACHE_BYTES, cached), (Metric.EXPORT_LAG_BYTES, waiting), (Metric.EXPORT_LAG_SECONDS, late))
    return [
        *(
            Sample(metric, (("durability", durability), ("engine", engine)), value)
            for metric, values in by_kind
            for (durability, engine), value in sorted(values.items())
        ),
        Sample(Metric.SHARDS_FAILED, (), failed),
        Sample(Metric.SHARDS_OPEN, (), opened),
        *(Sample(Metric.THREADS_STUCK, (("worker", worker.name),), worker.stuck) for worker in workers),
    ]


def _status_of(shard: OwnedShard, *, reads: bool) -> PartitionStatus:
    spec = shard.ref.spec
    log = shard if isinstance(shard, SegmentShard) else None
    return PartitionStatus(
        topic=str(spec.name),
        partition=shard.ref.partition,
        engine=spec.engine.value,
        durability=shard.durability.value,
        epoch=shard.epoch,
        decision=shard.decision,
        failure=shard.failure,
        offsets=shard.offsets(),
        segments=0 if log is None else len(log.wal.files.all),
        cache_bytes=0 if log is None else log.wal.tail.cache.bytes,
        export=None if log is None else log.history.status(reads=reads),
    )
