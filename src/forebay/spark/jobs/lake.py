"""Lake: a topic into a typed table, range of offsets by range of offsets, each record once.

What the table has is known by the table itself: a run asks it, brings what is missing up to the topic's end, and each
commit says which offsets it brought. One run at a time for a topic, by a lease; through a broker there is none, and
the commit of a run that another one has overtaken is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from forebay.clock import Clock, SystemClock
from forebay.errors import Invalid
from forebay.format.metadata.keys import lake_key
from forebay.metadata.leases import leased
from forebay.spark.jobs.frames import frame_of, look_at
from forebay.spark.jobs.report import Figure, JobProgress, JobReport, Part, Unseen
from forebay.spark.place.location import Location
from forebay.spark.place.opening import opened
from forebay.spark.reading.snapshot import Snapshot
from forebay.spark.reading.where import parse_where
from forebay.spark.tables.file_writer import REPORT, Outlet, Written
from forebay.spark.tables.formats import ICEBERG
from forebay.spark.tables.lake_directory import DirectoryTarget
from forebay.spark.tables.lake_table import TableTarget
from forebay.spark.tables.targets import CommitRight, Marks, TableBatch, Target, Unleased, conditions_of
from forebay.spark.values.decoding import BAD_SCHEMA, SOURCE_COLUMNS, Decoding, decoding
from forebay.topics import TopicName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMIT_RECORDS: Final = 5_000_000
LEASE_GRACE_SECONDS: Final = 5.0

Offsets = dict[int, tuple[int, int]]


def run(
    spark: SparkSession,
    location: Location,
    topic: str,
    *,
    table: str | None = None,
    table_format: str = ICEBERG,
    directory: str | None = None,
    format: str = "json",
    schema: str | None = None,
    where: str | None = None,
    commit_records: int = COMMIT_RECORDS,
    fail_on_data_loss: bool = True,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Bring what is new in the topic into a table (`namespace.name`) or a directory of Parquet files.

    `table_format` is `iceberg` or `delta`; a table of Delta may also be named by its path or address.
    With `where` only the records come that meet a condition, as `forebay.spark.read` takes it: the table keeps it, and
    another one is a `Conflict` from then on. Bad rows go to `table_bad`, or `directory/bad`. At most about
    `commit_records` go into one commit. Raises `Unavailable` while another run has the topic, `Conflict` if another
    changed the table. Through a broker runs do not wait for each other: of two at once, one ends with `Conflict`, and
    no row is there twice.
    """
    if (table is None) == (directory is None):
        raise Invalid("lake brings a topic into a table or into a directory: name one of them")
    if commit_records < 1:
        raise Invalid(f"commit_records is {commit_records}: a commit brings at least one")
    clock = SystemClock()
    begun = clock.monotonic()
    how = decoding(format, schema)
    if where is not None:
        parse_where(where)
    name = TopicName.parse(topic)
    with contextlib.ExitStack() as stack:
        lease = None if dry_run else stack.enter_context(_alone(location, name, clock))
        target = stack.enter_context(
            contextlib.closing(_target(location, table, table_format, directory, how, where or ""))
        )
        snapshot = look_at(location, topic)
        work = LakeRun(spark, location, snapshot, target, how, where or "", fail_on_data_loss=fail_on_data_loss)
        work.bring(lease, commit_records, progress or Unseen())
    return work.report(dry_run=dry_run, seconds=clock.monotonic() - begun)


@contextlib.contextmanager
def _alone(location: Location, name: TopicName, clock: Clock) -> Iterator[CommitRight]:
    """The right to bring the topic for the block, alone as far as that can be had."""
    if location.broker is not None:
        yield Unleased()
        return
    with opened(location, read_only=False) as found:
        settings = found.settings.metadata
        key = lake_key(name.namespace, name.topic, prefix=settings.prefix)
        ttl_s = settings.lease_ttl_s
        wait_s = ttl_s + LEASE_GRACE_SECONDS
        with leased(found.metadata, key, f"lake {name}", ttl_s=ttl_s, wait_s=wait_s, clock=clock) as lease:
            yield lease


def _target(
    location: Location, table: str | None, table_format: str, directory: str | None, how: Decoding, where: str
) -> Target:
    if table is not None:
        return TableTarget(location, table, how.schema, table_format=table_format, where=where)
    assert directory is not None
    return DirectoryTarget(directory, grace_s=location.settings().table.orphan_grace_s, where=where)


class LakeRun:
    """One run."""

    def __init__(
        self,
        spark: SparkSession,
        location: Location,
        snapshot: Snapshot,
        target: Target,
        how: Decoding,
        where: str,
        *,
        fail_on_data_loss: bool,
    ) -> None:
        self._spark = spark
        self._location = location
        self._snapshot = snapshot
        self._target = target
        self._how = how
        self._where = where
        self._filters = conditions_of(where)
        self._fail_on_data_loss = fail_on_data_loss
        self._topic = snapshot.shards[0].topic
        self._topic_id = snapshot.shards[0].topic_id
        self._brought: Offsets = {}
        self._files: list[Written] = []
        self._commits = 0

    def _marks(self) -> Marks:
        """How far the target is; `Conflict` if it has another topic, or takes other records of it."""
        marks = self._target.marks()
        marks.check(self._topic, self._topic_id, self._target.name, self._where)
        return marks

    def bring(self, lease: CommitRight | None, commit_records: int, progress: JobProgress) -> None:
        """Bring everything that is missing; without a lease, only find out what that is."""
        marks = self._marks()
        if lease is not None:
            self._target.recover()
            marks = self._marks()
        missing = self._missing(marks)
        self._brought = missing
        progress.total(sum(end - start for start, end in missing.values()))
        if lease is None:
            return
        for offsets in chunks(missing, commit_records):
            files = self.write_files(offsets, self._marks())
            batch = TableBatch(topic=self._topic, topic_id=self._topic_id, offsets=offsets, files=tuple(files))
            self._target.commit(batch, lease)
            self._files += files
            self._commits += 1
            progress.advance(sum(end - start for start, end in offsets.values()))

    def _missing(self, marks: Marks) -> Offsets:
        """What the topic holds and the target does not have; records that are gone by now are a named failure."""
        missing: Offsets = {}
        for view in self._snapshot.shards:
            start = marks.start(view.partition)
            if start is None:
                start = view.earliest
            elif start < view.earliest:
                gone = f"{view} begins at {view.earliest}, and {self._target.name} ends at {start}"
                if self._fail_on_data_loss:
                    raise Invalid(f"{gone}: what lay between is gone; go on without it with fail_on_data_loss=False")
                start = view.earliest
            elif start > view.next:
                raise Invalid(
                    f"{view} ends at {view.next}, and {self._target.name} has it up to {start}: the topic lost its "
                    "end, or its history lies elsewhere; look at it before going on"
                )
            if start < view.next:
                missing[view.partition] = (start, view.next)
        return missing

    def write_files(self, offsets: Offsets, marks: Marks) -> list[Written]:
        """Files with the rows of these offsets that the target does not have yet."""
        good, bad = self._target.folders()
        outlet = Outlet(
            location=self._location,
            good=good,
            bad=bad,
            good_from=_starts(offsets, marks.good),
            bad_from=_starts(offsets, marks.bad),
            good_schema=self._target.file_schema(self._how.schema, bad=False),
            bad_schema=self._target.file_schema(BAD_SCHEMA, bad=True),
        )
        frame = frame_of(
            self._spark,
            self._snapshot,
            offsets,
            SOURCE_COLUMNS,
            filters=self._filters,
            fail_on_data_loss=self._fail_on_data_loss,
        )
        rows = self._how.select(frame).mapInArrow(partial(outlet.written, self._how), REPORT).collect()
        return [Written(row["bad"], row["path"], row["records"], row["bytes"]) for row in rows]

    def report(self, *, dry_run: bool, seconds: float) -> JobReport:
        """What was done."""
        parts = tuple(
            Part(topic=self._topic, partition=partition, figures={"from": start, "to": end, "offsets": end - start})
            for partition, (start, end) in self._brought.items()
        )
        offsets = sum(end - start for start, end in self._brought.values())
        figures: dict[str, Figure] = {"offsets": offsets}
        if not dry_run:
            figures["rows"] = sum(written.records for written in self._files if not written.bad)
            figures["bad_rows"] = sum(written.records for written in self._files if written.bad)
            figures["files"] = len(self._files)
            figures["bytes"] = sum(written.bytes for written in self._files)
            figures["commits"] = self._commits
        doing = "to be brought" if dry_run else "brought"
        summary = f"{offsets} offsets of {self._topic} {doing} into {self._target.name}"
        return JobReport(job="lake", summary=summary, dry_run=dry_run, figures=figures, parts=parts, seconds=seconds)


def chunks(missing: Offsets, records: int) -> Iterator[Offsets]:
    """The offsets in steps of about so many, all partitions moving on together; every offset in exactly one step."""
    total = sum(end - start for start, end in missing.values())
    steps = max(1, -(-total // records))
    for step in range(steps if total else 0):
        yield {
            partition: (start + (end - start) * step // steps, start + (end - start) * (step + 1) // steps)
            for partition, (start, end) in missing.items()
        }


def _starts(offsets: Mapping[int, tuple[int, int]], marks: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((partition, marks.get(partition, start)) for partition, (start, _) in offsets.items())
