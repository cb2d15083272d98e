"""Backfill: rows of files or tables into a topic, by bulk load: all rows of a load or none, and each load once.

A backfill has an id, given or worked out from what it reads. Each of its loads is recorded by the very transaction that
commits it, as a batch of a streaming query is: a run that is repeated adds nothing, one that was ended goes on. Through
a broker the same is recorded in the same place.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from urllib.parse import unquote

import pyarrow as pa

from forebay.bulk import BackfillPlan, BackfillState
from forebay.clock import SystemClock
from forebay.errors import Invalid, UnknownLoad
from forebay.loads.book import LoadBook
from forebay.loads.prepare import Sink
from forebay.spark.jobs.report import Figure, JobProgress, JobReport, Part, Unseen, summed
from forebay.spark.place.addresses import literal
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened, opened
from forebay.spark.tables.catalog import look_up_table
from forebay.spark.tables.files import files_of
from forebay.spark.writing.brokered import broker_loads
from forebay.spark.writing.delivery import TaskResult, deliver
from forebay.spark.writing.options import ATTACH_SECONDS, Target, WriteOptions, load_id_of, look
from forebay.spark.writing.rows import TYPES, check_columns
from forebay.topics import TopicName, TopicSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from forebay.client.blocking import RemoteLoads

COLUMNS: Final = tuple(TYPES)
_CASTS: Final = {"tag": "string", "timestamp": "timestamp", "partition": "int"}
_STAGED: Final = "result binary"
_STAGED_SCHEMA: Final = pa.schema([("result", pa.binary())])
_LOCAL: Final = "file:"
FILE: Final = "file"
"""As an order: by the names of files, and by line in each."""
_FILE_PLACE: Final = ("_metadata.file_path", "_metadata.file_block_start")
KINDS: Final = ("parquet", "json", "csv", "text", "orc")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The rows of a source at the moment when it was looked at."""

    fingerprint: str | None
    """Names these rows: another one if a file was added, taken away or replaced; `None` if that cannot be seen."""
    files: tuple[str, ...]
    frame: Callable[[tuple[str, ...]], DataFrame]
    """The rows of some of the files."""

    def slices(self, files_each: int | None) -> list[DataFrame]:
        """The rows, all together or so many files at a time, always cut in the same way."""
        if files_each is None:
            return [self.frame(self.files)]
        if self.fingerprint is None and not self.files:
            raise Invalid("only files are brought some at a time: leave files_each out")
        groups = (self.files[first : first + files_each] for first in range(0, len(self.files), files_each))
        return [self.frame(group) for group in groups]


class Source(Protocol):
    """Rows to be brought into a topic."""

    def look(self, spark: SparkSession) -> Seen:
        """The rows as they are now: what comes later is not among them."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files of one kind, or directories of such."""

    paths: tuple[str, ...]
    kind: str = "parquet"
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Invalid(f"files are of kind {', '.join(KINDS)}, not {self.kind!r}")
        if not self.paths:
            raise Invalid("a backfill from files names at least one")

    def look(self, spark: SparkSession) -> Seen:
        whole = self._frame(spark, self.paths)
        files = tuple(sorted(map(unquote, whole.inputFiles())))
        stamps = self._stamps(spark, files)
        facts = [self.kind, *(f"{k}={v}" for k, v in sorted(self.options.items()))]
        is_certain = all(stamps[name] for name in files)
        return Seen(
            fingerprint=_digest([*facts, *(f"{name} {stamps[name]}" for name in files)]) if is_certain else None,
            files=files,
            frame=lambda chosen: whole if chosen == files else self._frame(spark, tuple(map(literal, chosen))),
        )

    def _stamps(self, spark: SparkSession, files: Sequence[str]) -> Mapping[str, str]:
        """By which each file differs from another of its name: size and time. Empty where that cannot be seen."""
        here = {name: _stamp(name) for name in files if name.startswith(_LOCAL)}
        away = [name for name in files if name not in here]
        return {**here, **self._remote_stamps(spark, away)} if away else here

    def _remote_stamps(self, spark: SparkSession, files: Sequence[str]) -> Mapping[str, str]:
        """The same for files that Spark reaches and this process does not; no file is opened for it."""
        # Looked up recursively, folders named a=b do not become columns.
        reader = spark.read.options(**self.options).option("recursiveFileLookup", "true")
        facts = reader.format("binaryFile").load(list(map(literal, files)))
        rows = facts.selectExpr("path", "length", "unix_millis(modificationTime) AS modified_ms").collect()
        found = {row.path: f"{row.length} {row.modified_ms}" if row.modified_ms else "" for row in rows}
        if not found.keys() <= set(files):
            return dict.fromkeys(files, "")
        # Spark leaves files without content out.
        return {name: found.get(name, "no content") for name in files}

    def _frame(self, spark: SparkSession, paths: Sequence[str]) -> DataFrame:
        from pyspark.errors import AnalysisException

        reader = spark.read.options(**self.options)
        if len(self.paths) == 1 and Path(self.paths[0]).is_dir() and self.kind != "text":
            # So that columns in the names of folders are there also when single files are read.
            reader = reader.option("basePath", self.paths[0])
        if self.kind == "json" and "mode" not in {name.lower() for name in self.options}:
            reader = reader.option("mode", "FAILFAST")  # a line that is no JSON must not become a row of nulls
        try:
            return reader.format(self.kind).load(list(paths))
        except AnalysisException as error:
            raise Invalid(f"{', '.join(self.paths)} cannot be read as {self.kind}: {_first_line(error)}") from error


@dataclass(frozen=True, kw_only=True)
class Table:
    """An Iceberg table of the catalog in the settings, as it is now."""

    location: Location
    name: str

    def look(self, spark: SparkSession) -> Seen:
        table = look_up_table(self.location, self.name)
        if table is None:
            raise Invalid(f"there is no table {self.name} in the catalog of the settings")
        found = files_of(table)
        return Seen(
            fingerprint=_digest([self.name, *found.files]), files=found.files, frame=partial(found.frame, spark)
        )


@dataclass(frozen=True)
class Frame:
    """Rows that the caller has: only they know whether those are the same again."""

    frame: DataFrame

    def look(self, spark: SparkSession) -> Seen:
        return Seen(fingerprint=None, files=(), frame=self._whole)

    def _whole(self, _: tuple[str, ...]) -> DataFrame:
        return self.frame


class _Landed(NamedTuple):
    """One load in the topic: records by partition, and where each begins."""

    records: dict[int, int]
    starts: dict[int, int]


class _Book(Protocol):
    """Where backfills are recorded, for one topic."""

    def state(self, backfill_id: str) -> BackfillState:
        """How far a backfill has come."""

    def begin(self, backfill_id: str, plan: BackfillPlan) -> BackfillState:
        """From here on the id stands for these rows; `Conflict` if it does for others."""

    def landed(self, load_id: str) -> _Landed:
        """What a load has brought; nothing if another one of its batch was faster."""


class _FileBook:
    """The metadata store."""

    def __init__(self, found: Opened, spec: TopicSpec) -> None:
        self._book = LoadBook(found.metadata, found.settings.metadata.prefix, found.clock)
        self._spec = spec

    def state(self, backfill_id: str) -> BackfillState:
        return self._book.backfill(self._spec, backfill_id)

    def begin(self, backfill_id: str, plan: BackfillPlan) -> BackfillState:
        return self._book.begin_backfill(self._spec, backfill_id, plan)

    def landed(self, load_id: str) -> _Landed:
        stored = self._book.find(load_id)
        shards = stored.load.shards if stored is not None else ()
        return _Landed(
            {one.partition: one.records for one in shards}, {one.partition: one.start or 0 for one in shards}
        )


class _BrokerBook:
    """A broker, which writes the same into its metadata store."""

    def __init__(self, loads: RemoteLoads) -> None:
        self._loads = loads

    def state(self, backfill_id: str) -> BackfillState:
        return self._loads.backfill(backfill_id)

    def begin(self, backfill_id: str, plan: BackfillPlan) -> BackfillState:
        return self._loads.begin_backfill(backfill_id, plan)

    def landed(self, load_id: str) -> _Landed:
        try:
            parts = self._loads.get(load_id).parts
        except UnknownLoad:
            parts = ()
        return _Landed({one.partition: one.records for one in parts}, {one.partition: one.start or 0 for one in parts})


@contextlib.contextmanager
def _book(target: Target, *, read_only: bool = True) -> Iterator[_Book]:
    """The book of the topic, opened for a moment: a load may take hours."""
    if target.location.broker is not None:
        with broker_loads(target.location, target.spec.name) as (_, loads):
            yield _BrokerBook(loads)
    else:
        with opened(target.location, read_only=read_only) as found:
            yield _FileBook(found, target.spec)


def run(
    spark: SparkSession,
    location: Location,
    topic: str,
    source: Source,
    *,
    columns: Mapping[str, str] | None = None,
    order_by: Sequence[str] = (),
    backfill_id: str | None = None,
    files_each: int | None = None,
    attach_seconds: float = ATTACH_SECONDS,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Bring all rows of the source into the topic, once however often it is run.

    `columns` are SQL expressions for `value`, `key`, `tag`, `timestamp`, `partition` and `headers`; left out, columns
    of these names are taken, or all columns together as JSON. Records lie in their partitions in the order of
    their timestamps, equal ones and those without one by file name and line; `order_by` gives other columns or SQL
    expressions of the rows, or `file` for the names of files and lines alone. All rows come
    in one load, all or none, unless `files_each` says how many files one load brings: it is ordered by
    itself. Raises `Conflict` if the id was used for other rows.
    """
    clock = SystemClock()
    begun = clock.monotonic()
    if files_each is not None and files_each < 1:
        raise Invalid(f"files_each is {files_each}: a load brings at least one file")
    target = look(WriteOptions(location=location, topic=TopicName.parse(topic), attach_seconds=attach_seconds))
    seen = source.look(spark)
    slices = [ordered(frame, columns or {}, order_by) for frame in seen.slices(files_each)]
    fingerprint = _fingerprint(seen.fingerprint, columns or {}, files_each, order_by)
    if fingerprint is None and backfill_id is None:
        raise Invalid("it cannot be seen whether these rows are the same next time: give the backfill an id (--id)")
    named = backfill_id or f"files-{fingerprint}"
    plan = BackfillPlan(fingerprint=fingerprint or "", loads=len(slices))
    with _book(target, read_only=dry_run) as book:
        state = book.state(named) if dry_run else book.begin(named, plan)
    work = _Backfill(spark, target, named, state)
    before = state.done
    shown = progress or Unseen()
    shown.total(len(slices))
    shown.advance(min(before, len(slices)))
    for number, frame in enumerate(slices):
        if number >= before and not dry_run:
            work.bring(number, frame)
            shown.advance(1)
    planned = sum(frame.count() for frame in slices[before:]) if dry_run else None
    return work.report(len(slices), before, planned, seconds=clock.monotonic() - begun)


class _Backfill:
    """One run."""

    def __init__(self, spark: SparkSession, target: Target, backfill_id: str, state: BackfillState) -> None:
        self._spark = spark
        self._target = target
        self._id = backfill_id
        self._query = state.query_id
        self._landed: list[_Landed] = []

    def bring(self, number: int, frame: DataFrame) -> None:
        """On return the topic has these rows, once."""
        sink = Sink(query_id=self._query, batch_id=number)
        load_id = load_id_of(self._target, sink)
        rows = frame.mapInArrow(_stager(self._target, load_id), _STAGED).collect()
        results: list[TaskResult] = [pickle.loads(row["result"]) for row in rows]
        deliver(self._target, load_id, results, sink)
        with _book(self._target) as book:
            self._landed.append(book.landed(load_id))

    def report(self, loads: int, before: int, planned: int | None, *, seconds: float) -> JobReport:
        """What was brought."""
        name = str(self._target.spec.name)
        parts = tuple(
            Part(
                topic=name,
                partition=partition,
                figures={
                    "records": sum(landed.records.get(partition, 0) for landed in self._landed),
                    "from": min(landed.starts[partition] for landed in self._landed if partition in landed.starts),
                },
            )
            for partition in sorted({number for landed in self._landed for number in landed.records})
        )
        records = planned if planned is not None else summed(parts).get("records", 0)
        figures: dict[str, Figure] = {"records": records, "loads": loads, "loads_before": min(before, loads)}
        doing = "to be brought" if planned is not None else "brought"
        summary = f"{records} records {doing} into {name} by backfill {self._id}"
        return JobReport(
            job="backfill",
            summary=summary,
            dry_run=planned is not None,
            figures=figures,
            parts=parts,
            seconds=seconds,
        )


def ordered(frame: DataFrame, columns: Mapping[str, str], order_by: Sequence[str] = ()) -> DataFrame:
    """The rows with the columns that a topic takes, in the order in which they shall lie in each partition.

    Spark sorts them: ranges of rows become tasks, and segments are attached in the order of tasks. Rows of a DataFrame
    without timestamps stay as they are, unless an order is given.
    """
    expressions = _expressions(frame, columns)
    keys = [*order_by] if list(order_by) != [FILE] else []
    if not order_by and "timestamp" in expressions:
        keys = [f"CAST({expressions['timestamp']} AS timestamp)"]
    places = _places(frame)
    if not keys and not places:
        if order_by:
            raise Invalid("these rows are of no files: order them by columns")
        return shaped(frame, expressions)
    # Within a block of a file rows have rising numbers.
    found = [*keys, *places, "monotonically_increasing_id()"]
    names = [f"forebay_order_{number}" for number in range(len(found))]
    marked = shaped(frame, expressions, [f"{text} AS {name}" for text, name in zip(found, names, strict=True)])
    return marked.orderBy(*names).drop(*names)


def _places(frame: DataFrame) -> list[str]:
    """Expressions for the file of a row and where its block begins there; none for rows that are of no files."""
    from pyspark.errors import AnalysisException

    try:
        frame.selectExpr(*_FILE_PLACE)
    except AnalysisException:
        return []
    return [*_FILE_PLACE]


def shaped(frame: DataFrame, columns: Mapping[str, str], beside: Sequence[str] = ()) -> DataFrame:
    """The rows with the columns that a topic takes; `Invalid` names what is wrong with one.

    `beside` are expressions for further columns, which the topic does not take.
    """
    from pyspark.errors import AnalysisException, ParseException

    chosen = _expressions(frame, columns)
    try:
        made = frame.selectExpr(*(_expression(name, text) for name, text in chosen.items()), *beside)
        fields = made.schema.fields[: len(chosen)]
        check_columns([(field.name, field.dataType.simpleString()) for field in fields])
    except (AnalysisException, ParseException) as error:
        said = str(error).strip().partition("\n")[0]
        raise Invalid(f"the rows have columns {', '.join(frame.columns)}, and {said}") from error
    return made


def _expressions(frame: DataFrame, columns: Mapping[str, str]) -> dict[str, str]:
    """What each column of a record is made of."""
    for name in columns:
        if name not in COLUMNS:
            raise Invalid(f"a record has no {name!r}: give expressions for {', '.join(COLUMNS)}")
    chosen = dict(columns)
    if not chosen and "value" in frame.columns:
        chosen = {name: f"`{name}`" for name in frame.columns if name in COLUMNS}
    chosen.setdefault("value", "to_json(struct(*))")
    return chosen


def _expression(name: str, text: str) -> str:
    return f"CAST({text} AS {_CASTS[name]}) AS {name}" if name in _CASTS else f"{text} AS {name}"


def _stager(target: Target, load_id: str) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def staged(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from forebay.spark.writing.writers import stage_rows

        result = stage_rows(target, load_id, iter(batches))
        yield pa.RecordBatch.from_pylist([{"result": pickle.dumps(result)}], schema=_STAGED_SCHEMA)

    return staged


def _fingerprint(
    rows: str | None, columns: Mapping[str, str], files_each: int | None, order_by: Sequence[str]
) -> str | None:
    """Of the rows and of how they are shaped, cut and, if that was chosen, ordered."""
    if rows is None:
        return None
    facts = [rows, *(f"{name}={text}" for name, text in sorted(columns.items())), str(files_each), *order_by]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _stamp(address: str) -> str:
    """By what a file on this machine differs from another of its name; nothing if it is not seen from here."""
    path = Path(address.removeprefix("file://"))
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


def _digest(facts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
