"""A pipeline run by Spark: a batch sink by sink, each all or nothing; a stream as one query for each sink, until it is
done, fails, or is stopped.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec

from forebay.clock import Clock, SystemClock
from forebay.errors import ForebayError
from forebay.spark.pipelines.context import Context
from forebay.spark.pipelines.failures import failure, quiet
from forebay.spark.pipelines.file.model import Mode, Pipeline
from forebay.spark.pipelines.kinds.protocol import PipelineSink
from forebay.spark.pipelines.progress import ROWS, OnProgress, RunReport, SinkProgress
from forebay.spark.pipelines.views import Outlet, build, own_session
from forebay.spark.start.session import context_of

if TYPE_CHECKING:
    from pyspark import SparkContext, StatusTracker
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.25
Guard: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(kw_only=True)
class Running:
    """One run. What is known of it so far stays here, however it ends."""

    pipeline: Pipeline
    place: Mapping[str, str]
    on_progress: OnProgress | None = None
    guard: Guard = contextlib.nullcontext
    """Entered for every call into Spark: what must not be cut in two."""
    clock: Clock = field(default_factory=SystemClock)
    outcome: str = "failed"

    def __post_init__(self) -> None:
        self._begun = self.clock.monotonic()
        self._context = Context(pipeline=self.pipeline, place=self.place)
        self._sinks = {
            str(sink.name): SinkProgress(name=str(sink.name), writes=sink.writes(self.pipeline))
            for sink in self.pipeline.sinks
        }

    @property
    def report(self) -> RunReport:
        """What was done so far."""
        return RunReport(
            pipeline=str(self.pipeline.name),
            mode=str(self.pipeline.mode),
            sinks=tuple(self._sinks.values()),
            seconds=self.clock.monotonic() - self._begun,
            outcome=self.outcome,
        )

    def run(self, spark: SparkSession) -> RunReport:
        """Analyse everything, then run it to its end. Interrupted, a stream stops its queries in order."""
        try:
            with contextlib.ExitStack() as stack:
                with self.guard():
                    session = stack.enter_context(own_session(spark, self.pipeline.spark))
                    outlets = build(session, self.pipeline, self.place)
                if self.pipeline.mode is Mode.BATCH:
                    self._run_batch(spark, outlets)
                else:
                    self._run_stream(outlets)
        except KeyboardInterrupt:
            self.outcome = "stopped"
            raise
        self.outcome = "done"
        return self.report

    def _run_batch(self, spark: SparkSession, outlets: Sequence[Outlet]) -> None:
        from pyspark.errors import PySparkException
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        written: list[str] = []
        for outlet in outlets:
            progress = self._sinks[str(outlet.sink.name)]
            observed = Observation(ROWS)
            rows = outlet.frame.observe(observed, f.count(f.lit(1)).alias("rows"))
            try:
                with quiet():
                    self._watched(spark, progress, partial(self._write, rows, outlet.sink))
            except (PySparkException, ForebayError) as error:
                before = f"; written before it: {', '.join(written)}" if written else "; nothing was written"
                failed = failure(error, f"sink {outlet.sink.name}")
                raise failed.restated(f"{failed}{before}") from error
            progress.rows, progress.batches = int(observed.get["rows"]), 1
            written.append(str(outlet.sink.name))
            self._show_progress()

    def _watched(self, spark: SparkSession, progress: SinkProgress, work: Callable[[], None]) -> None:
        """Do the work, and report how far its tasks are. Interrupted, its jobs end before this returns."""
        context = context_of(spark)
        if context is None:  # a session elsewhere, which cannot be asked
            work()
            return
        group = f"pipeline {self.pipeline.name}, sink {progress.name}, {self.clock.random_bytes(4).hex()}"
        with beside(context, group, work) as begun:
            while not begun.done():
                with self.guard():
                    progress.tasks = tasks_of(context.statusTracker(), group)
                self._show_progress()
                self.clock.sleep(POLL_SECONDS)
        begun.result()

    def _write(self, rows: DataFrame, sink: PipelineSink) -> None:
        # A thread of the JVM knows no session, and no source in Python either, until one was used in it.
        rows.sparkSession.createDataFrame([], "nothing INT")
        sink.write(rows, self._context)

    def _run_stream(self, outlets: Sequence[Outlet]) -> None:
        queries: dict[str, StreamingQuery] = {}
        # What sinks hold open is closed behind the queries that write into them.
        with contextlib.ExitStack() as closing, self._stopping(queries):
            for outlet in outlets:
                with self.guard():
                    queries[str(outlet.sink.name)] = self._start(outlet, closing)
            while not self._ended(queries):
                self.clock.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def _stopping(self, queries: dict[str, StreamingQuery]) -> Iterator[None]:
        """However the block ends, no query is left running behind it."""
        try:
            yield
        finally:
            for name, query in queries.items():
                with contextlib.suppress(Exception):  # the last progress is for the report alone
                    self._take(name, query)
                if query.isActive:
                    logger.info("stopping the query of sink %s", name)
                    query.stop()

    def _start(self, outlet: Outlet, closing: contextlib.ExitStack) -> StreamingQuery:
        from pyspark.errors import PySparkException
        from pyspark.sql import functions as f

        sink, pipeline = outlet.sink, self.pipeline
        started: Future[str] = Future()
        rows = outlet.frame.observe(ROWS, f.count(f.lit(1)).alias("rows"))
        writer = rows.writeStream.queryName(f"{pipeline.name}_{sink.name}")
        writer = writer.option("checkpointLocation", pipeline.checkpoint_of(sink))
        writer = sink.stream(writer, self._context, started, closing)
        if pipeline.trigger.available_now:
            writer = writer.trigger(availableNow=True)
        elif pipeline.trigger.interval is not None:
            writer = writer.trigger(processingTime=str(pipeline.trigger.interval))
        try:
            with quiet():
                query = writer.start()
                started.set_result(query.id)
                return query
        except PySparkException as error:
            raise failure(error, f"sink {sink.name}") from error

    def _ended(self, queries: Mapping[str, StreamingQuery]) -> bool:
        """Whether all are done; the first that failed is raised."""
        with self.guard():
            active = [name for name, query in queries.items() if query.isActive]
            for name, query in queries.items():
                self._take(name, query)
                error = query.exception()
                if error is not None:
                    raise failure(error, f"sink {name}") from error
        self._show_progress()
        return not active

    def _take(self, name: str, query: StreamingQuery) -> None:
        for reported in query.recentProgress:
            self._sinks[name].take(msgspec.json.decode(reported.json))

    def _show_progress(self) -> None:
        if self.on_progress is not None:
            self.on_progress(tuple(self._sinks.values()))


class Tasks(NamedTuple):
    """Of the jobs so far: how many are done, of how many that were begun."""

    done: int
    all: int


def tasks_of(tracker: StatusTracker | Any, group: str) -> Tasks:
    """The tasks of the stages that Spark has begun for a group of jobs."""
    done = total = 0
    for job in tracker.getJobIdsForGroup(group):
        found = tracker.getJobInfo(job)
        for stage in found.stageIds if found is not None else ():
            stage_info = tracker.getStageInfo(stage)
            if stage_info is not None:
                done, total = done + stage_info.numCompletedTasks, total + stage_info.numTasks
    return Tasks(done, total)


@contextlib.contextmanager
def beside(context: SparkContext | Any, group: str, work: Callable[[], None]) -> Iterator[Future[None]]:
    """The work, begun in another thread. If the block is left by an error, its jobs are ended first."""

    def grouped() -> None:
        context.setJobGroup(group, group, interruptOnCancel=True)
        work()

    with ThreadPoolExecutor(1, thread_name_prefix="forebay-pipeline") as pool:
        begun = pool.submit(grouped)
        try:
            yield begun
        except BaseException:
            while not begun.done():
                # Again and again: the work may be between two jobs.
                context.cancelJobGroup(group)
                wait([begun], timeout=0.2)
            raise
