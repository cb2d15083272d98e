"""The demo's part in Spark, and queries that leave rows unread: `python -m tests.spark.quiet_child ROOT`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

import forebay
from demo import orders
from demo.spark import ORDERS, compact_and_ask, revenue_by_country, run_pipeline
from forebay.spark import read, session


def fill(data: Path) -> int:
    """Orders of which a task has more than one page; how many."""
    made = 0
    with forebay.open(str(data)) as log:
        topic = log.create_topic(ORDERS, partitions=2)
        for batch in orders.batches(60_000):
            topic.append_many(batch.values, keys=batch.keys, tags=batch.tags, timestamps=batch.timestamps)
            made += len(batch.values)
    return made


def leave_rows(spark: SparkSession, data: Path) -> None:
    """Ask for fewer rows than tasks have."""
    frame = read(spark, ORDERS, path=str(data))
    assert len(frame.limit(3).collect()) == len(frame.take(3)) == 3
    assert frame.first() is not None
    assert not frame.isEmpty()


def fail(spark: SparkSession) -> str:
    """What a failure in a worker says."""

    def failing(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        raise ValueError("a failure that must be seen")

    try:
        spark.range(1).mapInArrow(failing, "id long").collect()
    except PythonException as error:
        return str(error)
    return ""


def main(root: str) -> None:
    data = Path(root) / "shop"
    made = fill(data)
    spark = session(master="local[2]", settings={"spark.sql.shuffle.partitions": "2"})
    leave_rows(spark, data)
    assert revenue_by_country(spark, data).orders == made
    assert run_pipeline(spark, data).records
    assert compact_and_ask(spark, data).minutes
    assert "a failure that must be seen" in fail(spark)
    spark.stop()
    print("done")  # noqa: T201 - to the test


if __name__ == "__main__":
    main(*sys.argv[1:])
