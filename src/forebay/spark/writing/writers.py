"""`df.write.format("forebay")` and `df.writeStream.format("forebay")`: each write, and each micro-batch, is one bulk
load, all of its rows or none; a micro-batch is in the topic exactly once.

Spark pickles a writer to its tasks and makes it again where it commits; it holds plain values only. A micro-batch is
known by the id of its query, which its checkpoint keeps, and by its number; what tasks know of it goes to the commit
in their messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyspark
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from forebay.errors import Conflict, Unsupported
from forebay.loads.prepare import Sink
from forebay.spark.place.opening import opened
from forebay.spark.writing.brokered import BrokerStaging
from forebay.spark.writing.delivery import TaskResult, deliver, give_up, load_store
from forebay.spark.writing.options import Target, WriteOptions, load_id_of, look
from forebay.spark.writing.rows import check_columns
from forebay.spark.writing.staging import StoreWriter, Task, stage


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
    if target.is_staged_by_broker:
        with contextlib.closing(BrokerStaging(target, task)) as writer:
            staged = stage(writer, task, rows)
    else:
        with opened(target.store_location) as found:
            staged = stage(StoreWriter(load_store(found).store, task, found.clock), task, rows)
    return TaskResult(load_id=load_id, number=task.number, staged=tuple(staged))


def results_of(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    """What the tasks that succeeded have staged."""
    return [message.result for message in messages if isinstance(message, Written)]


def planned_target(options: Mapping[str, str], schema: StructType) -> Target:
    """The topic that rows of this schema go into."""
    check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields])
    return look(WriteOptions.parse(options))


QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
"""What Spark gives its tasks. These are no promised names: where they are missing, nothing is written."""


@dataclass
class WrittenBatch(Written):
    """What a task reports to the driver of a micro-batch; `target` is what the tasks wrote for."""

    sink: Sink
    target: Target


def check_stream_sink() -> None:
    """`Unsupported` for a Spark that has no sink of this kind, with the way out."""
    if not hasattr(datasource, "DataSourceStreamArrowWriter"):
        raise Unsupported(
            f"Spark {pyspark.__version__} cannot hand a stream to a Python sink as Arrow: use Spark 4.1 or newer, or "
            "foreachBatch with the options queryId and batchId, which has each row once as well"
        )


def sink_of_task() -> Sink:
    context = TaskContext.get()
    assert context is not None, "Spark writes inside of a task"
    found = {name: context.getLocalProperty(name) for name in (QUERY_ID, BATCH_ID)}
    for name, value in found.items():
        if not value:
            raise Unsupported(
                f"Spark has not given its task the local property {name}: without it a repeated batch could not "
                "be distinguished from a new one, so nothing is written; use the version of Spark that Forebay names"
            )
    return Sink(query_id=str(found[QUERY_ID]), batch_id=int(str(found[BATCH_ID])))


def agreed(messages: Sequence[WriterCommitMessage | None], batch_id: int) -> tuple[Target, Sink]:
    """What all tasks of a batch say of it."""
    written = [message for message in messages if isinstance(message, WrittenBatch)]
    batches = {(message.sink.query_id, message.sink.batch_id, message.result.load_id) for message in written}
    if len(batches) != 1 or written[0].sink.batch_id != batch_id:
        raise Conflict(f"the tasks of batch {batch_id} have written {sorted(batches)}: nothing of it is brought in")
    return written[0].target, written[0].sink
