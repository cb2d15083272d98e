"""Backfill: rows of files or tables into a topic, by bulk load: all rows of a load or none, and each load once.

A backfill has an id, given or worked out from what it reads. Each of its loads is recorded by the very transaction that
commits it, as a batch of a streaming query is: a run that is repeated adds nothing, one that was ended goes on. Through
a broker the same is recorded in the same place.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import pyarrow as pa

from forebay.bulk import BackfillPlan, BackfillState
from forebay.clock import SystemClock
from forebay.errors import Invalid, UnknownLoad
from forebay.loads.book import LoadBook
from forebay.loads.prepare import Sink
from forebay.spark.jobs.report import Figure, JobProgress, JobReport, Part, Unseen, summed
from forebay.spark.jobs.sources import Source
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened, opened
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
    backfill_id: str | None = None,
    files_each: int | None = None,
    attach_seconds: float = ATTACH_SECONDS,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Bring all rows of the source into the topic, once however often it is run.

    `columns` are SQL expressions for `value`, `key`, `tag`, `timestamp`, `partition` and `headers`; left out, columns
    of these names are taken, or all columns together as JSON. All rows come in one load, all or none, unless
    `files_each` says how many files one load brings. Raises `Conflict` if the id was used for other rows.
    """
    clock = SystemClock()
    begun = clock.monotonic()
    if files_each is not None and files_each < 1:
        raise Invalid(f"files_each is {files_each}: a load brings at least one file")
    target = look(WriteOptions(location=location, topic=TopicName.parse(topic), attach_seconds=attach_seconds))
    seen = source.look(spark)
    slices = [shaped(frame, columns or {}) for frame in seen.slices(files_each)]
    fingerprint = _fingerprint(seen.fingerprint, columns or {}, files_each)
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


def shaped(frame: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """The rows with the columns that a topic takes; `Invalid` names what is wrong with one."""
    from pyspark.errors import AnalysisException, ParseException

    for name in columns:
        if name not in COLUMNS:
            raise Invalid(f"a record has no {name!r}: give expressions for {', '.join(COLUMNS)}")
    chosen = dict(columns)
    if not chosen and "value" in frame.columns:
        chosen = {name: f"`{name}`" for name in frame.columns if name in COLUMNS}
    chosen.setdefault("value", "to_json(struct(*))")
    try:
        made = frame.selectExpr(*(_expression(name, text) for name, text in chosen.items()))
        check_columns([(field.name, field.dataType.simpleString()) for field in made.schema.fields])
    except (AnalysisException, ParseException) as error:
        said = str(error).strip().partition("\n")[0]
        raise Invalid(f"the rows have columns {', '.join(frame.columns)}, and {said}") from error
    return made


def _expression(name: str, text: str) -> str:
    return f"CAST({text} AS {_CASTS[name]}) AS {name}" if name in _CASTS else f"{text} AS {name}"


def _stager(target: Target, load_id: str) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def staged(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from forebay.spark.writing.writers import stage_rows

        result = stage_rows(target, load_id, iter(batches))
        yield pa.RecordBatch.from_pylist([{"result": pickle.dumps(result)}], schema=_STAGED_SCHEMA)

    return staged


def _fingerprint(rows: str | None, columns: Mapping[str, str], files_each: int | None) -> str | None:
    """Of the rows and of how they are shaped and cut."""
    if rows is None:
        return None
    facts = [rows, *(f"{name}={text}" for name, text in sorted(columns.items())), str(files_each)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
