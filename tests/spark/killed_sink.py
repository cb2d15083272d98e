"""A streaming query that dies by kill -9 at a named step of its sink, driver and JVM together.

`python -m tests.spark.killed_sink STEP DIRECTORY` reads the Parquet files in DIRECTORY/in, a file for each
micro-batch, and writes them into a topic of DIRECTORY/data. It dies in batch 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

import forebay.spark
from forebay.loads.book import LoadBook
from forebay.spark.source import ForebayDataSource
from forebay.spark.writing import delivery
from forebay.spark.writing.options import Target
from forebay.spark.writing.stream_writer import ForebayStreamWriter, plan_stream_write
from forebay.spark.writing.writers import BATCH_ID
from tests.spark.stream_child import SETTINGS
from tests.support.processes import die_together, die_with_all

TOPIC: Final = "shop/orders"
STEPS: Final = ("writing", "staged", "offered", "attached", "committed", "next batch")
BATCH: Final = 1
_STEP: Final = "FOREBAY_KILLED_STEP"


class DyingWriter(ForebayStreamWriter):
    """Does what the sink does, up to the step."""

    def __init__(self, target: Target, step: str) -> None:
        super().__init__(target)
        self._step = step

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        written = super().write(iterator)
        if self._step == "writing" and context.getLocalProperty(BATCH_ID) == str(BATCH):
            die_with_all()
        return written

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        step = self._step if batchId == BATCH else "next batch" if batchId == BATCH + 1 else ""
        if step in ("staged", "next batch") and step == self._step:
            die_with_all()
        if step == "offered":
            _dies_instead(delivery.Delivery, "finish")
        if step == "attached":
            _dies_instead(LoadBook, "commit")
        super().commit(messages, batchId)
        if step == "committed":
            die_with_all()


def _dies_instead(owner: type, method: str) -> None:
    def dying(*_: Any, **__: Any) -> NoReturn:
        die_with_all()

    setattr(owner, method, dying)


class DyingSource(ForebayDataSource):
    """The source, with a sink that dies."""

    @classmethod
    def name(cls) -> str:
        return "forebay_dying"

    def streamWriter(self, schema: StructType, overwrite: Any) -> ForebayStreamWriter:  # noqa: N802 - Spark's name
        planned = plan_stream_write(self.options, schema, overwrite=overwrite)
        return DyingWriter(planned.target, os.environ[_STEP])


def run(spark: SparkSession, directory: Path, sink: str, tasks: int) -> None:
    """Bring everything that is there into the topic, in so many tasks for each batch."""
    files = spark.readStream.schema("number long").option("maxFilesPerTrigger", "1").parquet(f"{directory}/in")
    query = (
        files.selectExpr("cast(number AS string) AS value", "cast(number % 7 AS string) AS key")
        .repartition(tasks)
        .writeStream.format(sink)
        .options(path=f"{directory}/data", topic=TOPIC, checkpointLocation=f"{directory}/checkpoint")
        .option("wal.free_bytes_min", "0")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main(step: str, directory: Path) -> None:
    die_together()
    os.environ[_STEP] = step
    spark = forebay.spark.session("a query that dies", master="local[2]", settings=SETTINGS)
    spark.dataSource.register(DyingSource)
    run(spark, directory, DyingSource.name(), 2)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
