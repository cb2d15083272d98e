"""Spark's workers in tests start as soon as they can."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_workers_load_pyspark_where_it_is_installed_and_not_from_its_archive(spark: SparkSession) -> None:
    """The archive is compiled at every start, and Spark waits 10 seconds for a worker of a stream (decision 0076)."""

    def where(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"file": [sys.modules["pyspark"].__file__]})

    found = spark.range(1, numPartitions=1).mapInArrow(where, "file string").collect()

    assert [row.file for row in found] == [pyspark.__file__]
