"""The views of a pipeline in a Spark session, analysed before anything runs: errors are raised with their line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forebay.spark.pipelines.context import Context
from forebay.spark.pipelines.failures import errors_at
from forebay.spark.pipelines.file.document import Word, flawed
from forebay.spark.pipelines.file.model import Mode, Output, Pipeline
from forebay.spark.pipelines.kinds.protocol import PipelineSink
from forebay.spark.start.session import context_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHUFFLES: Final = "spark.sql.shuffle.partitions"
_NOT_REMOTE: Final = "which Spark Connect (sc://) cannot run: name another master, as spark://host:7077 or local[*]"


@dataclass(frozen=True)
class Outlet:
    """A sink and the rows that it gets."""

    sink: PipelineSink
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
    context = Context(pipeline=pipeline, place=place)
    for source in pipeline.sources:
        with errors_at(source.name, f"source {source.name}"):
            views[source.name.lower()] = source.frame(spark, context)
        views[source.name.lower()].createOrReplaceTempView(str(source.name))
    for step in pipeline.steps:
        with errors_at(step.sql, f"step {step.name}"):
            frame = spark.sql(str(step.sql))
            _ = frame.schema  # where analysis is lazy, it happens now
            frame.createOrReplaceTempView(str(step.name))
        views[step.name.lower()] = frame
    outlets = [Outlet(sink, sink.rows(views[sink.view.lower()])) for sink in pipeline.sinks]
    if pipeline.mode is Mode.STREAMING:
        for outlet in outlets:
            _check_streaming(spark, outlet)
    return outlets


def _check_streaming(spark: SparkSession, outlet: Outlet) -> None:
    """What cannot run as a stream is refused before the first query starts, where this Spark can be asked."""
    if context_of(spark) is None:
        _check_remote(outlet.sink)
    jvm = getattr(spark, "_jvm", None)
    frame = getattr(outlet.frame, "_jdf", None)
    if jvm is None or frame is None:
        return
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    mode = modes.Append() if outlet.sink.output is Output.APPEND else modes.Update()
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    with errors_at(outlet.sink.view, f"sink {outlet.sink.name}"):
        checker.checkForStreaming(frame.queryExecution().analyzed(), mode)


def _check_remote(sink: PipelineSink) -> None:
    """Refuse a sink whose batches this process would write: a Spark Connect server calls no function of its client.

    Such a function would run in a process of the server, which does not give it the id of its query: without the id
    the sink cannot know a batch that it has written before.
    """
    if sink.elsewhere is not None:
        flawed(sink.name.place, f"sink {sink.name} {sink.elsewhere}, {_NOT_REMOTE}")
