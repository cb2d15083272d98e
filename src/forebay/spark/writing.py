"""`df.write.format("forebay")`: one write is one bulk load, all of its rows or none.

Spark pickles the writer to its tasks and, after them, to where it commits; it holds plain values only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from forebay.errors import Unsupported
from forebay.spark.delivery import TaskResult, deliver, give_up, load_store
from forebay.spark.incoming import check_columns
from forebay.spark.place.opening import opened
from forebay.spark.staging import Task, stage
from forebay.spark.target import Target, WriteOptions, load_id_of, look


@dataclass
class Written(WriterCommitMessage):
    """What a task reports to the driver."""

    result: TaskResult


class ForebayWriter(DataSourceArrowWriter):
    """Appends the rows of a DataFrame to a topic."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._load_id = f"spark-{target.run}" if target.sink is None else load_id_of(target, target.sink)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        return Written(stage_rows(self._target, self._load_id, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Bring in what all tasks have staged; if it is a batch of a query that the topic has, nothing."""
        deliver(self._target, self._load_id, results_of(messages), self._target.sink)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """See to it that nothing of it is ever brought in."""
        give_up(self._target, self._load_id, results_of(messages))


def plan_write(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> ForebayWriter:
    """The writer of a DataFrame with this schema."""
    if overwrite:
        raise Unsupported(
            'mode("overwrite") is not offered: a topic only grows. Write with mode("append"); to begin again, delete '
            "the topic and create it again"
        )
    return ForebayWriter(planned_target(options, schema))


def stage_rows(target: Target, load_id: str, rows: Iterator[pa.RecordBatch]) -> TaskResult:
    """In a task: write its rows into the store."""
    context = TaskContext.get()
    assert context is not None, "Spark writes inside of a task"
    task = Task(
        load_id=load_id,
        topic_id=target.spec.topic_id,
        partitions=target.spec.partitions,
        zstd_level=target.zstd_level,
        number=context.partitionId(),
        attempt=context.taskAttemptId(),
    )
    with opened(target.store_location) as found:
        staged = stage(load_store(found).store, task, rows, clock=found.clock)
    return TaskResult(load_id=load_id, number=task.number, staged=tuple(staged))


def results_of(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    """What the tasks that succeeded have staged."""
    return [message.result for message in messages if isinstance(message, Written)]


def planned_target(options: Mapping[str, str], schema: StructType) -> Target:
    """The topic that rows of this schema go into."""
    check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields])
    return look(WriteOptions.parse(options))
