"""Compaction: many small segments of history become few large ones in Parquet, without what ended in them.

Executors read segments and write new ones straight to the store, under names of their own; the driver puts them into
the catalog, one swap for each. Beside the owner. Of a topic with cleanup "compact" the newest record
of each key stays, as far as history reaches. Whatever is cut short is done again by the next run, which finds nothing
to do where all was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, Protocol

from forebay.appends.producer_window import ProducerWindow
from forebay.cleanup.objects import ObjectCleanup
from forebay.clock import SystemClock
from forebay.compacting.merging import SegmentTarget, merge
from forebay.compacting.passes import Passes, ShardLease, Unit
from forebay.compacting.planning import Rules
from forebay.compacting.shard import CompactionOutlook, ShardCompaction
from forebay.errors import ForebayError, Unavailable
from forebay.format.control.offsets import OffsetSet
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.format.metadata.vectors import deleted_by, vectors_of
from forebay.inspection.findings import REACH, Finding, Severity
from forebay.metadata.leases import Lease, leased
from forebay.places import is_private, loads_name, local_name
from forebay.spark.jobs.report import Figure, JobProgress, JobReport, Part, refs_at, summed
from forebay.spark.jobs.superseding import KeyUnit, superseded_by_spark
from forebay.spark.jobs.units import spread
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened, opened
from forebay.topics import Cleanup, ShardRef

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEADER: Final = "compaction"
TOKEN_BYTES: Final = 8
AGAIN: Final = 'run "forebay verify"; what could not be read is left as it is'


class Work(Protocol):
    """Who does the work: executors, by way of Spark."""

    def write(self, units: Sequence[Unit]) -> Iterator[SegmentDescriptor | str]:
        """Write every unit: the descriptor of each, in their order, or why there is none."""

    def superseded(self, units: Sequence[KeyUnit]) -> OffsetSet:
        """Which records of a shard a later one with their key superseded; `units` are all its segments."""


class OnSpark:
    """The work, spread over executors."""

    def __init__(self, spark: SparkSession, location: Location, progress: JobProgress | None) -> None:
        self._spark = spark
        self._location = location
        self._progress = progress

    def write(self, units: Sequence[Unit]) -> Iterator[SegmentDescriptor | str]:
        outcomes = spread(
            self._spark,
            units,
            partial(written, self._location),
            unit_type=Unit,
            result_type=SegmentDescriptor,
            progress=self._progress,
            weight=lambda unit: sum(source.bytes for source in unit.task.sources),
        )
        return (outcome.result or outcome.error or "" for outcome in outcomes)

    def superseded(self, units: Sequence[KeyUnit]) -> OffsetSet:
        return superseded_by_spark(self._spark, self._location, units)


def run(
    spark: SparkSession,
    location: Location,
    topics: Sequence[str] = (),
    *,
    rules: Rules | None = None,
    wait_s: float = 0.0,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Compact the history of these topics, or of all. See `compact`."""
    return compact(
        OnSpark(spark, location, progress), location, topics, rules=rules or Rules(), wait_s=wait_s, dry_run=dry_run
    )


def compact(
    work: Work, location: Location, topics: Sequence[str], *, rules: Rules, wait_s: float = 0.0, dry_run: bool = False
) -> JobReport:
    """Compact; `work` says who does it. Shards that another compacts are left to it after `wait_s`, and named.

    Raises only where there is nothing to look at: `UnknownTopic`, `Unsupported`, `Unavailable`, `Denied`.
    """
    clock = SystemClock()
    begun = clock.monotonic()
    findings: list[Finding] = []
    parts: list[Part] = []
    with opened(location, read_only=dry_run) as found:
        for ref in refs_at(found, topics):
            shard = _Shard(found, ref, work, rules, findings)
            figures = shard.figures(shard.outlook_figures if dry_run else partial(shard.compact, wait_s))
            if figures:
                parts.append(Part(topic=str(ref.spec.name), partition=ref.partition, figures=figures))
    figures = summed(parts)
    done, removed = figures.get("rewrites", 0), figures.get("objects_removed", 0)
    said = [_counted(done, "rewrite")] if done else []
    said += [f"{_counted(removed, 'object')} removed"] if removed else []
    summary = ", ".join(said) or "nothing to do"
    seconds = clock.monotonic() - begun
    return JobReport(
        job="compact",
        summary=summary,
        dry_run=dry_run,
        figures=figures,
        parts=tuple(parts),
        findings=tuple(findings),
        seconds=round(seconds, 3),
    )


def _counted(count: Figure, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


class _Shard:
    """One shard under the job."""

    def __init__(self, found: Opened, ref: ShardRef, work: Work, rules: Rules, findings: list[Finding]) -> None:
        self._found = found
        self._ref = ref
        self._work = work
        self._rules = rules
        self._findings = findings
        self._compaction = ShardCompaction(
            found.catalog(ref),
            ref.spec.topic_id,
            found.places,
            readable=partial(_is_readable, found.holder),
            manifest=found.manifest,
        )

    def figures(self, done: Callable[[], dict[str, Figure]]) -> dict[str, Figure]:
        """The figures of what is done with the shard; what cannot be done is a finding, and the others go on."""
        try:
            return done()
        except Unavailable as error:
            self._add(str(error), REACH)
        except (ForebayError, OSError) as error:
            self._add(str(error), AGAIN)
        return {}

    def outlook_figures(self) -> dict[str, Figure]:
        """What a run would do now."""
        outlook = self._look()
        if not outlook.segments:
            return {}
        parts = [part for rewrite in outlook.rewrites for part in rewrite.parts if part.why]
        return {
            "segments": outlook.segments,
            "bytes": outlook.bytes,
            "rewrites": len(outlook.rewrites),
            "segments_to_read": sum(source.gap is None for part in parts for source in part.sources),
            "bytes_to_read": sum(part.bytes for part in parts),
        }

    def compact(self, wait_s: float) -> dict[str, Figure]:
        """Do what is to be done; the figures of it, none for a shard without history."""
        settings = self._found.settings.wal
        before = self._look()
        if not before.segments:
            return {}
        if not before.rewrites:
            return _figures(before, before, 0, self._swept_only())
        with self._leased(wait_s) as lease:
            # Before anything is replaced again: that would begin the grace of all once more.
            swept = self._swept(lease)
            window = (settings.producers_max, settings.producer_appends_max)
            passes = Passes(self._compaction, self._target, self._work.write, self._look, window)
            passes.run(ShardLease(lease.held, lease.check))
            for failure in passes.failures:
                self._add(failure.why, AGAIN, (failure.start, failure.end))
            return _figures(before, self._look(), passes.swapped, swept)

    def _leased(self, wait_s: float) -> AbstractContextManager[Lease]:
        return leased(
            self._found.metadata,
            self._compaction.lease_key,
            f"compaction of {self._ref}",
            ttl_s=self._found.settings.metadata.lease_ttl_s,
            wait_s=wait_s,
            clock=self._found.clock,
        )

    def _swept(self, lease: Lease) -> int:
        """Remove what was replaced long ago, where the shard has no owner; how many objects. Else a finding."""
        try:
            return sweep_unowned(self._found, self._ref, lease)
        except (ForebayError, OSError) as error:
            self._add(f"what was replaced is not removed yet: {error}", "run it again")
            return 0

    def _swept_only(self) -> int:
        """The same where there is nothing else to do; another who compacts does it then."""
        if not is_owned(self._found, self._ref):
            with suppress(Unavailable), self._leased(0.0) as lease:
                return self._swept(lease)
        return 0

    def _target(self) -> SegmentTarget:
        return SegmentTarget(*self._found.new_objects(), LEADER, self._found.clock.now_ms())

    def _look(self) -> CompactionOutlook:
        superseded = self._superseded if self._ref.spec.cleanup is Cleanup.COMPACT else None
        return self._compaction.outlook(self._rules, self._found.clock.now_ms(), superseded)

    @cached_property
    def _superseded(self) -> OffsetSet:
        """As of the first look: all keys of the history are read for it, and what was superseded stays so."""
        appended_max = self._found.clock.now_ms() - self._ref.spec.compact_lag_ms
        deleted, earliest = self._compaction.ended()
        readable = partial(_is_readable, self._found.holder)
        segments = [piece for piece in self._compaction.segments() if readable(piece) and piece.end > earliest]
        return self._work.superseded(
            [
                KeyUnit(piece, tuple(vectors_of(deleted.clipped(piece.start, piece.end), 1)), earliest, appended_max)
                for piece in segments
            ]
        )

    def _add(self, what: str, step: str, offsets: tuple[int, int] | None = None) -> None:
        self._findings.append(
            Finding(severity=Severity.ERROR, what=what, next_step=step, shard=str(self._ref), offsets=offsets)
        )


def _figures(before: CompactionOutlook, after: CompactionOutlook, done: int, swept: int) -> dict[str, Figure]:
    return {
        "rewrites": done,
        "segments_before": before.segments,
        "segments": after.segments,
        "bytes_before": before.bytes,
        "bytes": after.bytes,
        "records_before": before.records,
        "records": after.records,
        "objects_removed": swept,
    }


def _is_readable(holder: str, descriptor: SegmentDescriptor) -> bool:
    """Whether it does not lie in another data directory."""
    return not is_private(descriptor) or descriptor.store in (local_name(holder), loads_name(holder))


def written(location: Location, unit: Unit) -> SegmentDescriptor:
    """Write one segment; what the catalog will say of it. Done by an executor."""
    with opened(location) as found:
        return merge(
            unit.task,
            deleted_by(unit.ended),
            found.places,
            SegmentTarget(found.new_objects().store, unit.store, LEADER, unit.created_at),
            # An attempt that was given up may go on unseen: it must not touch the object of another.
            token=found.clock.random_bytes(TOKEN_BYTES).hex(),
            window=ProducerWindow(*unit.window),
        )


def is_owned(found: Opened, ref: ShardRef) -> bool:
    """Whether a living process has the shard: then that one sweeps."""
    stored = found.catalog(ref).state()
    owner = stored.state.owner if stored is not None else None
    return owner is not None and found.metadata.session_alive(owner)


def sweep_unowned(found: Opened, ref: ShardRef, lease: Lease) -> int:
    """Remove objects of a shard that are needed no more, by the rules that its owner has; how many. None if it has one.

    `lease` is that of the compaction of the shard: no other job may be about to name what lies there.
    """
    if is_owned(found, ref):
        return 0
    places = found.places
    cleanup = ObjectCleanup(found.metadata, found.settings, places, found.clock)

    def is_compacting() -> bool:
        # Asked once the objects are listed: what was listed while another had the lease is not ours to judge.
        lease.check()
        return False

    removed: list[str] = []
    if found.directory is not None:
        removed += cleanup.collect_private(ref, is_compacting)
        removed += cleanup.collect_loads(ref, places.loads, is_compacting)
    if found.settings.is_shared and places.store is not None:
        removed += cleanup.collect_shared(ref, is_compacting)
        removed += cleanup.collect_loads(ref, places.store, is_compacting)
    return len(removed)
