"""`df.writeStream.format("forebay")`: every micro-batch is one bulk load, and each is in the topic exactly once.

A batch is known by the id of its query, which its checkpoint keeps, and by its number. Spark makes the writer again
for the commit: what the tasks know goes there in their messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from forebay.errors import Conflict, Unsupported
from forebay.loads.prepare import Sink
from forebay.spark.delivery import deliver, give_up
from forebay.spark.target import Target, load_id_of
from forebay.spark.writing import Written, planned_target, results_of, stage_rows

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
"""What Spark gives its tasks. These are no promised names: where they are missing, nothing is written."""


@dataclass
class WrittenBatch(Written):
    """What a task reports to the driver of a micro-batch; `target` is what the tasks wrote for."""

    sink: Sink
    target: Target


class ForebayStreamWriter(DataSourceStreamArrowWriter):
    """Appends the micro-batches of a streaming query to a topic."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        sink = sink_of_task()
        result = stage_rows(self.target, load_id_of(self.target, sink), iterator)
        return WrittenBatch(result, sink, self.target)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Bring in what all tasks have staged, unless the topic has the batch."""
        target, sink = agreed(messages, batchId)
        deliver(target, load_id_of(target, sink), results_of(messages), sink)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """See to it that nothing of it is ever brought in by this attempt; Spark runs the batch again."""
        if any(isinstance(message, WrittenBatch) for message in messages):
            target, sink = agreed(messages, batchId)
            give_up(target, load_id_of(target, sink), results_of(messages))


def plan_stream_write(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> ForebayStreamWriter:
    """The writer of a streaming query with this schema."""
    if overwrite:
        raise Unsupported('outputMode("complete") is not offered: a topic only grows. Use outputMode("append")')
    return ForebayStreamWriter(planned_target(options, schema))


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
