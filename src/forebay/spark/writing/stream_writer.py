"""The sink of a streaming query, for a Spark that hands micro-batches over as Arrow: 4.1 and newer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from forebay.errors import Unsupported
from forebay.spark.writing.delivery import deliver, give_up
from forebay.spark.writing.options import Target, load_id_of
from forebay.spark.writing.writers import (
    WrittenBatch,
    agreed,
    planned_target,
    results_of,
    sink_of_task,
    stage_rows,
)


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
