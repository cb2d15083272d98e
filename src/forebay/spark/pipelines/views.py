"""The views of a pipeline in a Spark session, analysed before anything runs: errors are raised with their line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from forebay.spark.pipelines.decoding import decoded, encoded_avro
from forebay.spark.pipelines.failures import errors_at
from forebay.spark.pipelines.file.document import Word, flawed, hint
from forebay.spark.pipelines.file.model import (
    FileFormat,
    FileSource,
    Format,
    Mode,
    Output,
    Pipeline,
    Sink,
    Source,
    TableFormat,
    TableSink,
    TopicSink,
)
from forebay.spark.pipelines.source_tables import table_files
from forebay.spark.pipelines.surroundings import read_options
from forebay.spark.place.location import Location
from forebay.spark.start.session import context_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SHUFFLES: Final = "spark.sql.shuffle.partitions"
_NOT_REMOTE: Final = "which Spark Connect (sc://) cannot run: name another master, as spark://host:7077 or local[*]"


@dataclass(frozen=True)
class Outlet:
    """A sink and the rows that it gets."""

    sink: Sink
    frame: DataFrame


@contextmanager
def own_session(spark: SparkSession, settings: Mapping[Word, Word]) -> Iterator[SparkSession]:
    """A session beside the given one, with views and settings of its own. Times are in UTC unless said otherwise.

    With Spark Connect it has a connection of its own, which ends with the block: left open, it can keep the
    interpreter from exiting. Without, it ends with the Spark context that it shares.
    """
    session = spark.newSession()
    try:
        _set_up(session, settings)
        yield session
    finally:
        if context_of(session) is None:
            session.stop()


def _set_up(session: SparkSession, settings: Mapping[Word, Word]) -> None:
    session.conf.set("spark.sql.session.timeZone", "UTC")
    _fit_shuffles(session)
    for name, value in settings.items():
        if session.conf.isModifiable(str(name)):
            with errors_at(name, str(name)):
                session.conf.set(str(name), str(value))


def _fit_shuffles(session: SparkSession) -> None:
    """As many shuffle partitions as there are cores, unless the user chose: a stream keeps state in each of them."""
    context = context_of(session)
    if context is not None and not context.getConf().contains(SHUFFLES):
        session.conf.set(SHUFFLES, str(context.defaultParallelism))


def build(spark: SparkSession, pipeline: Pipeline, place: Mapping[str, str]) -> list[Outlet]:
    """The sinks with their rows; nothing is read yet. `Flawed` has the line of a query that Spark does not take."""
    views: dict[str, DataFrame] = {}
    for source in pipeline.sources:
        views[source.name.lower()] = _source(spark, pipeline, source, place)
        views[source.name.lower()].createOrReplaceTempView(str(source.name))
    for step in pipeline.steps:
        with errors_at(step.sql, f"step {step.name}"):
            frame = spark.sql(str(step.sql))
            _ = frame.schema  # where analysis is lazy, it happens now
            frame.createOrReplaceTempView(str(step.name))
        views[step.name.lower()] = frame
    outlets = [Outlet(sink, _sink(views[sink.view.lower()], sink)) for sink in pipeline.sinks]
    if pipeline.mode is Mode.STREAMING:
        for outlet in outlets:
            _check_streaming(spark, outlet)
    return outlets


def _source(spark: SparkSession, pipeline: Pipeline, source: Source, place: Mapping[str, str]) -> DataFrame:
    with errors_at(source.name, f"source {source.name}"):
        if isinstance(source, FileSource):
            return _files(spark, pipeline, source, place)
        reader = spark.readStream if pipeline.mode is Mode.STREAMING else spark.read
        frame = decoded(reader.format("forebay").options(**read_options(pipeline, source, place)).load(), source)
        if source.watermark is not None:
            frame = frame.withWatermark(str(source.watermark.column), str(source.watermark.delay))
        return frame


def _files(spark: SparkSession, pipeline: Pipeline, source: FileSource, place: Mapping[str, str]) -> DataFrame:
    if source.format is FileFormat.ICEBERG:
        return table_files(Location.parse(place), source).frame(spark)
    reader = spark.read.format(str(source.format))
    if source.schema is not None:
        reader = reader.schema(source.schema.ddl)
    if source.format is FileFormat.CSV and source.schema is None:
        reader = reader.option("header", "true").option("inferSchema", "true")
    for name, text in source.options.items():
        reader = reader.option(str(name), str(text))
    return reader.load(pipeline.path_of(source.path))


def _sink(frame: DataFrame, sink: Sink) -> DataFrame:
    if isinstance(sink, TableSink):
        for word in sink.partition_by:
            _known_column(frame, sink, word)
        return frame
    columns = {"value": _value(frame, sink)}
    for name, word in sink.expressions.items():
        columns[name] = _expression(frame, word, name, sink)
    with errors_at(sink.name, f"sink {sink.name}"):
        rows = frame.select(*(column.alias(name) for name, column in columns.items()))
    return encoded_avro(rows, sink.schema) if sink.schema is not None else rows


def _value(frame: DataFrame, sink: TopicSink) -> Column:
    from pyspark.sql import functions as f

    if sink.format is Format.RAW:
        return _expression(frame, sink.value[0], "value", sink)
    for word in sink.value:
        _known_column(frame, sink, word)
    names = [str(word) for word in sink.value] or frame.columns
    struct = f.struct(*(f.col(f"`{name}`") for name in names))
    if sink.format is Format.JSON:
        return f.to_json(struct).cast("binary")
    return struct


def _known_column(frame: DataFrame, sink: Sink, word: Word) -> None:
    if word.lower() not in (name.lower() for name in frame.columns):
        flawed(word.place, f"{sink.view} has no column {word}: {hint(word, frame.columns, 'the columns are')}")


def _expression(frame: DataFrame, word: Word, name: str, sink: TopicSink) -> Column:
    """The expression of a column of records, in the type that it must have."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import BinaryType, MapType

    with errors_at(word, f"{name} of sink {sink.name}"):
        column: Column = f.expr(str(word))
        kind: Any = frame.select(column).schema.fields[0].dataType
        if name in ("key", "value") and not isinstance(kind, BinaryType):
            return column.cast("string").cast("binary")
        if name == "headers" and isinstance(kind, MapType):
            column = f.map_entries(column)
        cast = {
            "tag": "string",
            "partition": "int",
            "timestamp": "timestamp",
            "headers": "array<struct<key:string,value:binary>>",
        }.get(name)
        column = column.cast(cast) if cast is not None else column
        _ = frame.select(column).schema
    return column


def _check_streaming(spark: SparkSession, outlet: Outlet) -> None:
    """What cannot run as a stream is refused before the first query starts, where this Spark can be asked."""
    if context_of(spark) is None:
        _check_remote(outlet.sink)
    jvm = getattr(spark, "_jvm", None)
    frame = getattr(outlet.frame, "_jdf", None)
    if jvm is None or frame is None:
        return
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    output = outlet.sink.output if isinstance(outlet.sink, TopicSink) else Output.APPEND
    mode = modes.Append() if output is Output.APPEND else modes.Update()
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    with errors_at(outlet.sink.view, f"sink {outlet.sink.name}"):
        checker.checkForStreaming(frame.queryExecution().analyzed(), mode)


def _check_remote(sink: Sink) -> None:
    """Refuse a sink whose batches this process would write: a Spark Connect server calls no function of its client.

    Such a function would run in a process of the server, which does not give it the id of its query: without the id
    the sink cannot know a batch that it has written before.
    """
    if isinstance(sink, TopicSink):
        if sink.output is Output.UPDATE:
            flawed(sink.name.place, f"sink {sink.name} has `output: update`, {_NOT_REMOTE}")
    elif sink.format is TableFormat.ICEBERG:
        flawed(sink.name.place, f"sink {sink.name} is a stream into Iceberg, {_NOT_REMOTE}")
