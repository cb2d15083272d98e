"""Profile: what is in a topic. Rates, sizes, keys and hot keys, tags, gaps, lateness; as figures and as a page.

Tasks read whole pieces of history in order and send back counts, never records; keys are counted by Spark. Reads only.
What is counted of pieces that do not change can be kept in a file, so that a run goes on where another was ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from forebay.clock import SystemClock
from forebay.disk import SystemDisk, replace_file
from forebay.inspection.findings import Finding, Severity
from forebay.spark.jobs.frames import frame_of, look_at
from forebay.spark.jobs.pages import KeyCounts, ReportPage, TopicPage, page_of, require_plots
from forebay.spark.jobs.report import Figure, JobProgress, JobReport, Part, summed
from forebay.spark.jobs.resume import Results
from forebay.spark.jobs.tallies import BEFORE_ALL, COLUMNS, LATE_SECONDS, Tally, merged, size_at, tallied
from forebay.spark.jobs.units import said, spread
from forebay.spark.place.location import Location
from forebay.spark.place.reading import opened_to_read
from forebay.spark.reading.plan import plan
from forebay.spark.reading.snapshot import Range, ScanPiece, ShardView, Snapshot
from forebay.spark.reading.task import read_split

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UNIT_BYTES: Final = 128 * 1024 * 1024
BUCKETS_MAX: Final = 500
BUCKETS_MS: Final = tuple(
    1000 * seconds for seconds in (1, 10, 60, 600, 3_600, 21_600, 86_400, 604_800, 2_592_000, 31_536_000)
)
HOT_KEYS: Final = 20
LOOK: Final = 'run "forebay history scrub"'


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """What one task counts: splits as they are sent, the latest time before them, and the width of time buckets."""

    shard: int
    splits: bytes
    newest: int
    bucket_ms: int
    size: int
    name: str
    """Of what does not change: empty if it may."""
    expected: int
    """At least so many records are there, as the catalog says."""


class _Stretch(NamedTuple):
    """Pieces that one task counts, one behind the other."""

    start: int
    stop: int
    bytes: int
    newest: int
    name: str
    expected: int


def run(
    spark: SparkSession,
    location: Location,
    topics: Sequence[str] = (),
    *,
    html: str | None = None,
    resume: str | None = None,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Count everything in these topics, or in all; with `html`, write a page with plots to that file.

    `resume` is a file for what was counted of history: a run that names it again does not read that twice.
    """
    clock = SystemClock()
    begun = clock.monotonic()
    if html is not None:
        require_plots()
    with opened_to_read(location) as found:
        names = [str(spec.name) for spec in found.topics(topics)]
    known = Results(resume, Tally, read_only=dry_run)
    snapshots = [look_at(location, name) for name in names]
    parts: list[Part] = []
    pages: list[TopicPage] = []
    findings: list[Finding] = []
    for snapshot in snapshots:
        if dry_run:
            parts += [_planned(view) for view in snapshot.shards]
            continue
        tallies, bucket_ms = _counted(spark, snapshot, known, findings, progress)
        keys = _keys(spark, snapshot, findings)
        parts += [_part(view, tally) for view, tally in zip(snapshot.shards, tallies, strict=True)]
        pages.append(TopicPage(snapshot.shards[0].topic, tuple(tallies), bucket_ms, keys))
        parts.append(_topic_part(pages[-1]))
    if html is not None and not dry_run:
        made = page_of(ReportPage(tuple(pages), tuple(parts), clock.now_ms()))
        with contextlib.closing(SystemDisk()) as disk:
            replace_file(disk, html, made.encode())
    totals = summed([part for part in parts if part.partition is not None])
    doing = "to be read" if dry_run else "counted"
    return JobReport(
        job="profile",
        summary=f"{totals.get('offsets' if dry_run else 'records', 0)} records of {len(names)} topics {doing}"
        + (f", page in {html}" if html is not None and not dry_run else ""),
        dry_run=dry_run,
        figures={name: totals[name] for name in ("offsets", "records", "bytes") if name in totals},
        parts=tuple(parts),
        findings=tuple(findings),
        seconds=clock.monotonic() - begun,
    )


def _counted(
    spark: SparkSession,
    snapshot: Snapshot,
    known: Results[Tally],
    findings: list[Finding],
    progress: JobProgress | None,
) -> tuple[list[Tally], int]:
    """The counts of each partition, and the width of their time buckets; what cannot be read is a finding."""
    bucket_ms = bucket_of(snapshot)
    found: list[list[Tally]] = [[] for _ in snapshot.shards]
    units = []
    for unit in _units(snapshot, bucket_ms):
        before = known.get(unit.name) if unit.name else None
        if before is None:
            units.append(unit)
        else:
            found[unit.shard].append(before)
    outcomes = spread(
        spark, units, count, unit_type=Counted, result_type=Tally, progress=progress, weight=lambda unit: unit.size
    )
    for unit, tally, error in outcomes:
        place = str(snapshot.shards[unit.shard])
        if tally is None:
            what = f"some of it is not counted: {error}"
            findings.append(Finding(severity=Severity.ERROR, what=what, next_step=LOOK, shard=place))
            continue
        if tally.records < unit.expected:
            what = f"{unit.expected - tally.records} records cannot be read"
            findings.append(Finding(severity=Severity.ERROR, what=what, next_step=LOOK, shard=place))
        elif unit.name:
            known.add(unit.name, tally)
        found[unit.shard].append(tally)
    return [merged(tallies) for tallies in found], bucket_ms


def count(unit: Counted) -> Tally:
    """What a task does."""
    batches = (batch for split in pickle.loads(unit.splits) for batch in read_split(split))
    return tallied(batches, bucket_ms=unit.bucket_ms, newest=unit.newest)


def bucket_of(snapshot: Snapshot) -> int:
    """A width that cuts the time that history spans into some hundred buckets."""
    described = [piece.descriptor for view in snapshot.shards for piece in view.pieces if piece.descriptor is not None]
    filled = [descriptor for descriptor in described if descriptor.records]
    if not filled:
        return BUCKETS_MS[2]
    span = max(piece.time_max for piece in filled) - min(piece.time_min for piece in filled)
    return next((width for width in BUCKETS_MS if span <= width * BUCKETS_MAX), BUCKETS_MS[-1])


def _units(snapshot: Snapshot, bucket_ms: int) -> Iterator[Counted]:
    for number, view in enumerate(snapshot.shards):
        for stretch in stretches(view):
            ranges = [Range(number, stretch.start, stretch.stop)]
            splits = plan(snapshot, ranges, columns=COLUMNS, fail_on_data_loss=False)
            name = f"{stretch.name}:{bucket_ms}" if stretch.name else ""
            sent = pickle.dumps(splits)
            yield Counted(number, sent, stretch.newest, bucket_ms, stretch.bytes, name, stretch.expected)


class _Held(NamedTuple):
    """A piece of a stretch: its bytes, what it is, its latest time, and how many records it has at least."""

    bytes: int
    name: str
    newest: int
    records: int

    @classmethod
    def of(cls, piece: ScanPiece) -> _Held:
        found = piece.descriptor
        if found is None:
            return cls(piece.bytes, "", BEFORE_ALL, 0)
        is_whole = (piece.start, piece.stop) == (found.start, found.end)
        name = found.content_hash or f"gap {piece.start}"
        return cls(piece.bytes, name, found.time_max if found.records else BEFORE_ALL, found.records if is_whole else 0)


def stretches(view: ShardView) -> list[_Stretch]:
    """A partition cut between pieces, so that it is known of each stretch which time came before it.

    From the first piece on that the catalog does not describe, all is one stretch: its times are not known before.
    """
    found: list[_Stretch] = []
    newest, at = BEFORE_ALL, view.earliest
    known = next((piece.start for piece in view.pieces if piece.descriptor is None), view.next)
    held: list[_Held] = []

    def close(stop: int) -> None:
        nonlocal at, newest
        if stop > at:
            deleted = len(view.deleted.clipped(at, stop))
            text = " ".join([view.shard, f"{at} {stop} {newest} {deleted}", *(one.name for one in held)])
            name = hashlib.sha256(text.encode()).hexdigest()[:32] if stop <= known else ""
            expected = sum(one.records for one in held) - deleted
            found.append(_Stretch(at, stop, sum(one.bytes for one in held), newest, name, expected))
        newest = max([newest, *(one.newest for one in held)])
        at = stop
        held.clear()

    for piece in view.pieces:
        is_full = sum(one.bytes for one in held) + piece.bytes > UNIT_BYTES
        if held and (piece.start == known or (piece.start < known and is_full)):
            close(piece.start)
        held.append(_Held.of(piece))
    close(view.next)
    return found


def _keys(spark: SparkSession, snapshot: Snapshot, findings: list[Finding]) -> KeyCounts:
    """The keys of a topic, counted exactly; none if it cannot be read whole, which is a finding."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        return _key_counts(spark, snapshot)
    except (PySparkException, Py4JError) as error:
        what, place = f"its keys are not counted: {said(error)}", snapshot.shards[0].topic
        findings.append(Finding(severity=Severity.ERROR, what=what, next_step=LOOK, shard=place))
        return KeyCounts(distinct=0, once=0, hot=())


def _key_counts(spark: SparkSession, snapshot: Snapshot) -> KeyCounts:
    from pyspark.sql import functions as f

    offsets = {number: (view.earliest, view.next) for number, view in enumerate(snapshot.shards)}
    frame = frame_of(spark, snapshot, offsets, ("key",), fail_on_data_loss=False)
    counted = frame.where("key is not null").groupBy("key").agg(f.count("*").alias("records")).persist()
    try:
        alone = f.sum(f.when(f.col("records") == 1, 1).otherwise(0))
        distinct, once = counted.agg(f.count("*"), alone).collect()[0]
        top = counted.orderBy(f.desc("records"), "key").limit(HOT_KEYS).collect()
    finally:
        counted.unpersist()
    hot = tuple((bytes(row["key"]), int(row["records"])) for row in top)
    return KeyCounts(distinct=int(distinct), once=int(once or 0), hot=hot)


def _planned(view: ShardView) -> Part:
    size = sum(piece.bytes for piece in view.pieces)
    return Part(
        topic=view.topic, partition=view.partition, figures={"offsets": view.next - view.earliest, "bytes": size}
    )


def _part(view: ShardView, tally: Tally) -> Part:
    """The figures of one partition."""
    offsets = view.next - view.earliest
    deleted = len(view.deleted)
    gaps: Counter[str] = Counter()
    for piece in view.pieces:
        if piece.gap is not None:
            gaps[piece.gap.reason.name.lower()] += piece.gap.stop - piece.gap.start
    late = sum(tally.late[1:])
    span_s = ((tally.time_max or 0) - (tally.time_min or 0)) / 1000
    figures: dict[str, Figure] = {
        "from": view.earliest,
        "to": view.next,
        "records": tally.records,
        "bytes": tally.key_bytes + tally.value_bytes,
        "records_per_s": round(tally.records / span_s, 3) if span_s > 0 else None,
        "size_half": size_at(tally.sizes, 0.5),
        "size_99": size_at(tally.sizes, 0.99),
        "without_key": tally.without_key,
        "without_value": tally.without_value,
        "deleted": deleted,
        "without_record": offsets - tally.records - deleted,
        **{f"gap_{reason}": count for reason, count in sorted(gaps.items())},
        "late": late,
        "late_max_s": tally.late_max_ms / 1000,
    }
    return Part(topic=view.topic, partition=view.partition, figures=figures)


def _topic_part(page: TopicPage) -> Part:
    """The figures of a topic that its partitions do not have."""
    whole = merged(page.tallies)
    hottest = page.keys.hot[0] if page.keys.hot else None
    figures: dict[str, Figure] = {
        "keys": page.keys.distinct,
        "keys_once": page.keys.once,
        "hottest_key": hottest[0].decode(errors="backslashreplace") if hottest is not None else None,
        "hottest_share": round(hottest[1] / max(1, whole.records), 4) if hottest is not None else None,
        "tags": len(whole.tags),
        "late_over_1h": sum(whole.late[LATE_SECONDS.index(3_600) + 1 :]),
    }
    return Part(topic=page.topic, figures=figures)
