"""A streaming pipeline into Delta that dies by kill -9 between the commit of its second batch and Spark's own.

`python -m tests.spark.pipelines.delta_child FILE` runs the pipeline; the driver and its JVM die together.
"""

from __future__ import annotations

import sys

import forebay.spark
from forebay.spark.pipelines.file.parsing import load_pipeline
from forebay.spark.pipelines.outline import outline
from forebay.spark.pipelines.running import Running
from forebay.spark.tables.commit import TableChange
from forebay.spark.tables.delta import DeltaLakeTable
from tests.spark.stream_child import SETTINGS
from tests.support.processes import die_together, die_with_all

BATCH = 1


def main(file: str) -> None:
    die_together()
    attempt = DeltaLakeTable.attempt

    def dying(table: DeltaLakeTable, change: TableChange) -> None:
        attempt(table, change)
        if change.batch is not None and change.batch.number == BATCH:
            die_with_all()

    setattr(DeltaLakeTable, "attempt", dying)  # noqa: B010 - a method, for a test
    pipeline = load_pipeline(file)
    spark = forebay.spark.session("a pipeline that dies", master="local[2]", settings=SETTINGS)
    Running(pipeline=pipeline, place=outline(pipeline).location).run(spark)


if __name__ == "__main__":
    main(sys.argv[1])
