"""Rows of a topic as a DataFrame, from a snapshot that a job took: the same rows, however often they are read."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from forebay.spark.place.location import Location
from forebay.spark.reading.columns import SPARK_TYPES
from forebay.spark.reading.filters import NO_FILTERS, Filters
from forebay.spark.reading.options import Topics
from forebay.spark.reading.plan import plan
from forebay.spark.reading.snapshot import Range, Snapshot
from forebay.spark.reading.task import read_split
from forebay.spark.reading.view import look
from forebay.topics import TopicName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ALL: Final = tuple(SPARK_TYPES)


def look_at(location: Location, topic: str) -> Snapshot:
    """One topic as it is now."""
    return look(location, Topics(names=(TopicName.parse(topic),)))


def frame_of(
    spark: SparkSession,
    snapshot: Snapshot,
    offsets: Mapping[int, tuple[int, int]],
    columns: tuple[str, ...] = ALL,
    *,
    filters: Filters = NO_FILTERS,
    fail_on_data_loss: bool = True,
) -> DataFrame:
    """The records of these offsets, `[start, end)` by partition of the one topic, that pass, with these columns."""
    from forebay.spark.reading.schema import spark_schema

    ranges = [Range(partition, start, end) for partition, (start, end) in offsets.items() if start < end]
    splits = plan(snapshot, ranges, columns=columns, filters=filters, fail_on_data_loss=fail_on_data_loss)
    rows = [(bytearray(pickle.dumps(split)),) for split in splits]
    tasks = spark.createDataFrame(rows, "split binary").repartition(max(1, len(rows)))
    return tasks.mapInArrow(_read, spark_schema(columns))


def _read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for split in batch.column(0).to_pylist():
            yield from read_split(pickle.loads(split))
