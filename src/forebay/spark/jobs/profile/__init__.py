"""Profile: what is in a topic. Rates, sizes, keys and hot keys, tags, gaps, lateness; as figures and as a page.

Tasks read whole pieces of history in order and send back counts, never records; keys are counted by Spark. Reads only.
What is counted of pieces that do not change can be kept in a file, so that a run goes on where another was ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from forebay.clock import SystemClock
from forebay.disk import SystemDisk, replace_file
from forebay.inspection.findings import Finding, Severity
from forebay.spark.jobs.frames import frame_of, look_at
from forebay.spark.jobs.profile.page import KeyCounts, ReportPage, TopicPage, page_of, require_plots
from forebay.spark.jobs.profile.tallies import BEFORE_ALL, COLUMNS, LATE_SECONDS, Tally, merged, size_at, tallied
from forebay.spark.jobs.report import Figure, JobProgress, JobReport, Part, summed
from forebay.spark.jobs.resume import Results
from forebay.spark.jobs.units import said, spread
from forebay.spark.place.location import Location
from forebay.spark.place.reading import opened_to_read
from forebay.spark.reading.filters import NO_FILTERS, Filters
from forebay.spark.reading.options import parse_columns
from forebay.spark.reading.plan import plan
from forebay.spark.reading.snapshot import Range, ScanPiece, ShardView, Snapshot, Split
from forebay.spark.reading.task import read_split
from forebay.spark.reading.where import parse_where

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UNIT_BYTES: Final = 128 * 1024 * 1024
BUCKETS_MAX: Final = 500
BUCKETS_MS: Final = tuple(
    1000 * seconds for seconds in (1, 10, 60, 600, 3_600, 21_600, 86_400, 604_800, 2_592_000, 31_536_000)
)
HOT_KEYS: Final = 20
LOOK: Final = 'run "forebay history scrub"'


class _Wanted(NamedTuple):
    """What of the topics is counted: the records that meet a condition, and some of their columns."""

    where: str | None
    filters: Filters
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, where: str | None, columns: str | Sequence[str] | None) -> _Wanted:
        """All of it where nothing is said; `Invalid` names what cannot be."""
        named: Sequence[str] = COLUMNS
        if columns is not None:
            named = parse_columns(columns if isinstance(columns, str) else ",".join(columns))
        kept = tuple(name for name in COLUMNS if name == "timestamp" or name in named)
        return cls(where, parse_where(where) if where is not None else NO_FILTERS, kept)

    def __str__(self) -> str:
        condition = f" where {self.where}" if self.where is not None else ""
        return condition if self.columns == COLUMNS else f"{condition} by {', '.join(self.columns)}"

    def splits(self, snapshot: Snapshot, number: int, start: int, stop: int) -> list[Split]:
        """The read of some offsets of a partition; none if no record there may be wanted."""
        ranges = [Range(number, start, stop)]
        return plan(snapshot, ranges, columns=self.columns, filters=self.filters, fail_on_data_loss=False)

    def stretches(self, view: ShardView) -> list[_Stretch]:
        """A partition in parts that are counted each by itself.

        One if there is a condition: the latest time among the records that meet it is not known before they are read.
        """
        found = stretches(view)
        if self.where is None or len(found) <= 1:
            return found
        names = [stretch.name for stretch in found]
        return [
            _Stretch(
                start=found[0].start,
                stop=found[-1].stop,
                bytes=sum(stretch.bytes for stretch in found),
                newest=BEFORE_ALL,
                name=" ".join(names) if all(names) else "",
                expected=0,
            )
        ]

    def name(self, stretch: _Stretch, bucket_ms: int) -> str:
        """What the counts of a stretch are kept under; empty if they may change."""
        if not stretch.name:
            return ""
        if not str(self):
            return f"{stretch.name}:{bucket_ms}"
        return hashlib.sha256(f"{stretch.name}:{bucket_ms}{self}".encode()).hexdigest()[:32]


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
    where: str | None = None,
    columns: str | Sequence[str] | None = None,
    html: str | None = None,
    resume: str | None = None,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Count everything in these topics, or in all; with `html`, write a page with plots to that file.

    `where` chooses the records, by conditions as `forebay.spark.read` takes them, and `columns` what is counted of
    them: `key`, `value`, `headers`, `tag`; times are always. What neither needs is not read. `resume` is a file for
    what was counted of history: a run that names it again does not read that twice.
    """
    clock = SystemClock()
    begun = clock.monotonic()
    if html is not None:
        require_plots()
    wanted = _Wanted.parse(where, columns)
    with opened_to_read(location) as found:
        names = [str(spec.name) for spec in found.topics(topics)]
    known = Results(resume, Tally, read_only=dry_run)
    parts: list[Part] = []
    pages: list[TopicPage] = []
    findings: list[Finding] = []
    for snapshot in [look_at(location, name) for name in names]:
        if dry_run:
            parts += [_planned(snapshot, number, wanted) for number in range(len(snapshot.shards))]
            continue
        tallies, bucket_ms = _counted(spark, snapshot, wanted, known, findings, progress)
        keys = _keys(spark, snapshot, wanted, findings)
        parts += [_part(view, tally, wanted) for view, tally in zip(snapshot.shards, tallies, strict=True)]
        pages.append(TopicPage(snapshot.shards[0].topic, tuple(tallies), bucket_ms, keys))
        parts.append(_topic_part(pages[-1], wanted.columns))
    if html is not None and not dry_run:
        _write_page(html, ReportPage(tuple(pages), tuple(parts), clock.now_ms(), str(wanted)))
    totals = summed([part for part in parts if part.partition is not None])
    return JobReport(
        job="profile",
        summary=_summary(totals, len(names), wanted, html, dry_run=dry_run),
        dry_run=dry_run,
        figures={name: totals[name] for name in ("offsets", "records", "bytes") if name in totals},
        parts=tuple(parts),
        findings=tuple(findings),
        seconds=clock.monotonic() - begun,
    )


def _summary(totals: Mapping[str, Figure], topics: int, wanted: _Wanted, html: str | None, *, dry_run: bool) -> str:
    if dry_run:
        return f"{totals.get('offsets', 0)} records of {topics} topics to be read{wanted}"
    page = f", page in {html}" if html is not None else ""
    return f"{totals.get('records', 0)} records of {topics} topics counted{wanted}{page}"


def _write_page(path: str, page: ReportPage) -> None:
    with contextlib.closing(SystemDisk()) as disk:
        replace_file(disk, path, page_of(page).encode())


def _counted(
    spark: SparkSession,
    snapshot: Snapshot,
    wanted: _Wanted,
    known: Results[Tally],
    findings: list[Finding],
    progress: JobProgress | None,
) -> tuple[list[Tally], int]:
    """The counts of each partition, and the width of their time buckets; what cannot be read is a finding."""
    bucket_ms = bucket_of(snapshot)
    found: list[list[Tally]] = [[] for _ in snapshot.shards]
    units = []
    for unit in _units(snapshot, bucket_ms, wanted):
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
        # What is missing of all records shows by their number, of some by what the read could not look at.
        missing = tally.missing if wanted.where is not None else unit.expected - tally.records
        if missing > 0:
            what = f"{missing} records cannot be read"
            findings.append(Finding(severity=Severity.ERROR, what=what, next_step=LOOK, shard=place))
        elif unit.name:
            known.add(unit.name, tally)
        found[unit.shard].append(tally)
    return [merged(tallies) for tallies in found], bucket_ms


def count(unit: Counted) -> Tally:
    """What a task does."""
    missing: list[int] = []
    batches = (batch for split in pickle.loads(unit.splits) for batch in read_split(split, missing.append))
    found = tallied(batches, bucket_ms=unit.bucket_ms, newest=unit.newest)
    return msgspec.structs.replace(found, missing=sum(missing))


def bucket_of(snapshot: Snapshot) -> int:
    """A width that cuts the time that history spans into some hundred buckets."""
    described = [piece.descriptor for view in snapshot.shards for piece in view.pieces if piece.descriptor is not None]
    filled = [descriptor for descriptor in described if descriptor.records]
    if not filled:
        return BUCKETS_MS[2]
    span = max(piece.time_max for piece in filled) - min(piece.time_min for piece in filled)
    return next((width for width in BUCKETS_MS if span <= width * BUCKETS_MAX), BUCKETS_MS[-1])


def _units(snapshot: Snapshot, bucket_ms: int, wanted: _Wanted) -> Iterator[Counted]:
    for number, view in enumerate(snapshot.shards):
        for stretch in wanted.stretches(view):
            splits = wanted.splits(snapshot, number, stretch.start, stretch.stop)
            if not splits:
                continue
            name, sent = wanted.name(stretch, bucket_ms), pickle.dumps(splits)
            yield Counted(number, sent, stretch.newest, bucket_ms, _bytes_of(splits), name, stretch.expected)


def _bytes_of(splits: Sequence[Split]) -> int:
    """About how many bytes the pieces have that are read of one partition."""
    found = {piece.start: piece.bytes for split in splits for part in split.parts for piece in part.pieces}
    return sum(found.values())


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


def _keys(spark: SparkSession, snapshot: Snapshot, wanted: _Wanted, findings: list[Finding]) -> KeyCounts:
    """The keys of a topic, counted exactly; none if it cannot be read whole, which is a finding."""
    if "key" not in wanted.columns:
        return KeyCounts(distinct=0, once=0, hot=())
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        return _key_counts(spark, snapshot, wanted.filters)
    except (PySparkException, Py4JError) as error:
        what, place = f"its keys are not counted: {said(error)}", snapshot.shards[0].topic
        findings.append(Finding(severity=Severity.ERROR, what=what, next_step=LOOK, shard=place))
        return KeyCounts(distinct=0, once=0, hot=())


def _key_counts(spark: SparkSession, snapshot: Snapshot, filters: Filters) -> KeyCounts:
    from pyspark.sql import functions as f

    offsets = {number: (view.earliest, view.next) for number, view in enumerate(snapshot.shards)}
    frame = frame_of(spark, snapshot, offsets, ("key",), filters=filters, fail_on_data_loss=False)
    counted = frame.where("key is not null").groupBy("key").agg(f.count("*").alias("records")).persist()
    try:
        alone = f.sum(f.when(f.col("records") == 1, 1).otherwise(0))
        distinct, once = counted.agg(f.count("*"), alone).collect()[0]
        top = counted.orderBy(f.desc("records"), "key").limit(HOT_KEYS).collect()
    finally:
        counted.unpersist()
    hot = tuple((bytes(row["key"]), int(row["records"])) for row in top)
    return KeyCounts(distinct=int(distinct), once=int(once or 0), hot=hot)


def _planned(snapshot: Snapshot, number: int, wanted: _Wanted) -> Part:
    """What would be read of a partition."""
    view = snapshot.shards[number]
    splits = wanted.splits(snapshot, number, view.earliest, view.next)
    offsets = sum(part.stop - part.start for split in splits for part in split.parts)
    return Part(topic=view.topic, partition=view.partition, figures={"offsets": offsets, "bytes": _bytes_of(splits)})


def _part(view: ShardView, tally: Tally, wanted: _Wanted) -> Part:
    """The figures of one partition, as far as they can be known of what was counted."""
    span_s = ((tally.time_max or 0) - (tally.time_min or 0)) / 1000
    columns = wanted.columns
    figures: dict[str, Figure] = {"from": view.earliest, "to": view.next, "records": tally.records}
    if "key" in columns or "value" in columns:
        figures["bytes"] = tally.key_bytes + tally.value_bytes
    figures["records_per_s"] = round(tally.records / span_s, 3) if span_s > 0 else None
    if "key" in columns or "value" in columns:
        figures |= {"size_half": size_at(tally.sizes, 0.5), "size_99": size_at(tally.sizes, 0.99)}
    if "key" in columns:
        figures["without_key"] = tally.without_key
    if "value" in columns:
        figures["without_value"] = tally.without_value
    if wanted.where is None:
        figures |= _missing(view, tally)
    figures |= {"late": sum(tally.late[1:]), "late_max_s": tally.late_max_ms / 1000}
    return Part(topic=view.topic, partition=view.partition, figures=figures)


def _missing(view: ShardView, tally: Tally) -> dict[str, Figure]:
    """Offsets of a partition without a record: known where all records are counted."""
    gaps: Counter[str] = Counter()
    for piece in view.pieces:
        if piece.gap is not None:
            gaps[piece.gap.reason.name.lower()] += piece.gap.stop - piece.gap.start
    deleted = len(view.deleted)
    return {
        "deleted": deleted,
        "without_record": view.next - view.earliest - tally.records - deleted,
        **{f"gap_{reason}": count for reason, count in sorted(gaps.items())},
    }


def _topic_part(page: TopicPage, columns: Sequence[str]) -> Part:
    """The figures of a topic that its partitions do not have."""
    whole = merged(page.tallies)
    figures: dict[str, Figure] = {}
    if "key" in columns:
        hottest = page.keys.hot[0] if page.keys.hot else None
        figures |= {
            "keys": page.keys.distinct,
            "keys_once": page.keys.once,
            "hottest_key": hottest[0].decode(errors="backslashreplace") if hottest is not None else None,
            "hottest_share": round(hottest[1] / max(1, whole.records), 4) if hottest is not None else None,
        }
    if "tag" in columns:
        figures["tags"] = len(whole.tags)
    figures["late_over_1h"] = sum(whole.late[LATE_SECONDS.index(3_600) + 1 :])
    return Part(topic=page.topic, figures=figures)
