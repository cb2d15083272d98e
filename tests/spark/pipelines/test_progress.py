"""What is reported of a run while it goes on: batches once each, lag, tasks."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import pytest

from forebay.spark.pipelines.progress import RunReport, SinkProgress
from forebay.spark.pipelines.running import Running, Tasks, beside, tasks_of
from tests.spark.pipelines.files import BATCH, pipeline_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ID: Final = "0" * 32


class _Enough(Exception):
    """Ends a run where the test has seen enough."""


def _told(batch: int, rows: int, end: dict[str, int], latest: dict[str, int] | None) -> dict[str, Any]:
    def offsets(points: dict[str, int]) -> dict[str, Any]:
        partitions = {partition: {"offset": offset, "epoch": 1} for partition, offset in points.items()}
        return {"version": 1, "topics": {"shop/orders": {"id": _ID, "partitions": partitions}}}

    source = {"endOffset": offsets(end), "latestOffset": offsets(latest) if latest is not None else None}
    return {
        "batchId": batch,
        "numInputRows": rows * 2,
        "processedRowsPerSecond": 12.5,
        "observedMetrics": {"forebay_rows": {"rows": rows}},
        "sources": [source, {"endOffset": "7", "latestOffset": None}],
    }


def test_each_batch_is_counted_once_and_the_lag_is_that_of_the_last() -> None:
    sink = SinkProgress(name="out", writes="shop/out")

    for reported in (
        _told(0, 5, {"0": 5}, {"0": 9, "1": 3}),
        _told(0, 5, {"0": 5}, None),
        _told(1, 2, {"0": 9, "1": 3}, None),
    ):
        sink.take(reported)
        sink.take(reported)

    assert (sink.batch, sink.batches, sink.rows, sink.read) == (1, 2, 7, 14)
    assert sink.lag is None, "nothing was said of the latest offsets"
    sink.take(_told(2, 0, {"0": 9, "1": 3}, {"0": 12, "1": 3, "2": 4}))
    assert sink.lag == 3 + 4
    assert str(sink) == "out: batch 2, 14 rows read, 7 written, 12/s, lag 7"
    sink.take({"batchId": 3, "sources": [{"endOffset": json.dumps({"version": 1, "topics": {}}), "latestOffset": "5"}]})
    assert (sink.rows, sink.lag) == (7, None)


def test_a_batch_of_spark_connect_counts_as_any_other() -> None:
    """Spark Connect shows what it counted as values beside their schema, and rows read of each source alone."""
    sink = SinkProgress(name="out", writes="shop/out")
    counted = {"values": [500], "schema": {"type": "struct", "fields": [{"name": "rows", "type": "long"}]}}
    source = {"endOffset": None, "latestOffset": None, "numInputRows": 300, "processedRowsPerSecond": 75.5}

    sink.take({"batchId": 0, "observedMetrics": {"forebay_rows": counted}, "sources": [source, source]})

    assert (sink.rows, sink.read, sink.rows_per_second) == (500, 600, 151.0)


def test_the_session_of_a_run_is_begun_inside_the_guard(tmp_path: Path) -> None:
    """A signal that comes between must not cut a call into Spark in two."""
    held, seen = [False], []

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        held[0] = True
        yield
        held[0] = False

    def new_session() -> Any:
        seen.append(held[0])
        raise _Enough

    running = Running(pipeline=pipeline_of(tmp_path, BATCH), place={}, guard=guard)
    with pytest.raises(_Enough):
        running.run(cast("SparkSession", SimpleNamespace(newSession=new_session)))

    assert seen == [True]


def test_a_report_is_lines_for_a_person_and_plain_for_a_program() -> None:
    sink = SinkProgress(name="out", writes="shop/out", rows=1234, batches=2)

    report = RunReport(pipeline="p", mode="streaming", sinks=(sink,), seconds=1.25, outcome="stopped")

    assert report.lines() == ["out: 1,234 rows to shop/out, 2 batches", "pipeline p: stopped after 1.2 s"]
    assert report.plain()["sinks"][0]["rows"] == 1234 and json.dumps(report.plain())


class _Context:
    """Two stages of one job, of which a third is forgotten; work ends when its group is cancelled for a second time."""

    def __init__(self) -> None:
        self.groups: list[str] = []
        self.cancelled: list[str] = []
        self.released = threading.Event()

    def getJobIdsForGroup(self, group: str) -> list[int]:  # noqa: N802 - Spark's name
        return [1, 2] if group == "g" else []

    def getJobInfo(self, job: int) -> Any:  # noqa: N802 - Spark's name
        return SimpleNamespace(stageIds=[10, 11, 12]) if job == 1 else None

    def getStageInfo(self, stage: int) -> Any:  # noqa: N802 - Spark's name
        return None if stage == 12 else SimpleNamespace(numCompletedTasks=stage - 9, numTasks=4)

    def setJobGroup(self, group: str, description: str, *, interruptOnCancel: bool) -> None:  # noqa: N802, N803
        self.groups.append(f"{group} in {threading.current_thread().name}")

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802 - Spark's name
        self.cancelled.append(group)
        if len(self.cancelled) == 2:
            self.released.set()

    def work(self) -> None:
        assert self.released.wait(60)
        raise RuntimeError("cancelled")


def test_tasks_are_those_of_the_stages_that_are_known() -> None:
    assert tasks_of(_Context(), "g") == Tasks(3, 8) and tasks_of(_Context(), "other") == Tasks(0, 0)
    sink = SinkProgress(name="out", writes="t", tasks=Tasks(3, 8))
    assert str(sink) == "out: 3 of 8 tasks, 0 rows written"


def test_work_beside_ends_with_the_block_and_its_failure_is_reported() -> None:
    context = _Context()
    with pytest.raises(KeyboardInterrupt), beside(context, "g", context.work) as begun:
        raise KeyboardInterrupt
    assert begun.done() and context.cancelled == ["g", "g"]
    assert context.groups == ["g in forebay-pipeline_0"], "Spark knows groups by thread"

    with beside(context, "g", context.work) as begun:
        pass
    with pytest.raises(RuntimeError, match="cancelled"):
        begun.result()
    assert len(context.cancelled) == 2
