"""Spark before 4.3, by what it offers: micro-batches without a limit, tasks without a partition; 4.0 has no sink."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import datasource
from pyspark.sql.types import StringType, StructField, StructType

import forebay
from forebay.errors import Unsupported
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.streaming import reader
from forebay.spark.reading.streaming.limited import LimitedStreamReader
from forebay.spark.reading.streaming.reader import WholeStreamReader, stream_reader
from forebay.spark.source import ForebayDataSource

COLUMNS = ("offset", "value")
_WITHOUT: Final = """
from pyspark.sql import datasource

for name in [name for name in vars(datasource) if "Filter" in name or "Stream" in name and "ArrowWriter" in name]:
    delattr(datasource, name)
for kind in list(vars(datasource).values()):
    if isinstance(kind, type) and kind.__name__ in {"EqualTo", "LessThan", "In", "Not"}:
        delattr(datasource, kind.__name__)

import forebay.spark
import forebay.spark.source
from forebay.spark.reading import pushing

for name in forebay.spark.__all__:
    getattr(forebay.spark, name)
assert pushing.is_old("4.0.5")
"""
"""Spark 4.0 has no classes for filters, and no writer of Arrow batches for streams."""


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    with forebay.open(tmp_path / "data") as log:
        topic = log.create_topic("shop/orders")
        topic.append_many([b"0", b"1", b"2"])
    return {"path": str(tmp_path / "data"), "topic": "shop/orders", "startingOffsets": "earliest"}


def test_a_micro_batch_reaches_to_the_end_where_spark_says_no_limit(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "find_spec", lambda _: None)
    stream = stream_reader(ReadOptions.parse(options, streaming=True), COLUMNS)
    assert isinstance(stream, WholeStreamReader)
    try:
        start = stream.initialOffset()
        end = stream.latestOffset()
        rows = [
            row for part in stream.partitions(start, end) for batch in stream.read(part) for row in batch.to_pylist()
        ]
        assert stream.partitions(end, stream.latestOffset()) == []
    finally:
        stream.stop()

    assert rows == [{"offset": number, "value": b"%d" % number} for number in range(3)]
    assert list(stream.read(None)) == []


@pytest.mark.parametrize("limit", ["maxOffsetsPerTrigger", "maxBytesPerTrigger"])
def test_a_limit_that_spark_cannot_keep_is_refused_by_name(
    options: dict[str, str], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = ReadOptions.parse({**options, limit: "10"}, streaming=True)
    assert isinstance(stream_reader(parsed, COLUMNS), LimitedStreamReader)

    monkeypatch.setattr(reader, "find_spec", lambda _: None)
    with pytest.raises(Unsupported, match=rf"cannot limit a micro-batch.*{limit}"):
        stream_reader(parsed, COLUMNS)


def test_a_sink_that_spark_does_not_have_is_refused_with_the_way_out(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ForebayDataSource({"path": options["path"], "topic": options["topic"]})
    schema = StructType([StructField("value", StringType())])
    assert source.streamWriter(schema, overwrite=False) is not None

    monkeypatch.delattr(datasource, "DataSourceStreamArrowWriter")
    with pytest.raises(Unsupported, match="use Spark 4.1 or newer, or foreachBatch with the options queryId"):
        source.streamWriter(schema, overwrite=False)


@pytest.mark.slow
def test_everything_else_loads_without_what_spark_4_0_lacks() -> None:
    ended = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
