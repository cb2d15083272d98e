"""Every reader that is installed here takes a Parquet segment as compaction writes it, with all that a row may hold."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import duckdb
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyspark.sql import SparkSession

from forebay.format.columns.rows import Row
from forebay.format.parquet import file as parquet_format
from forebay.testing.simulated.blobs import SimulatedBlobs
from tests.columnar.rows import KEY, Appended, stored

COLUMNS: Final = ("offset", "timestamp", "key", "value", "tag", "headers", "partition", "appended_at", "producer")
ROWS: Final = 3_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def row(number: int) -> Row:
    """Rows of which some have no value, key, tag or headers, or empty ones; values from nothing to 40 KB."""
    size = 40_000 if number % 1_000 == 7 else number % 2_000
    value = None if number % 11 == 0 else (b"%d " % number) * (size // 5)
    key = None if number % 5 == 0 else b"key-%d" % (number % 97)
    tag = None if number % 3 == 0 else ("", "eu", "\u00e9\u20ac")[number % 3]
    headers = () if number % 4 else (("trace", b"%d" % number), ("note", None), ("", b""))
    return value, key, tag, headers, 1_700_000_000_000 + number


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A segment in a file, with several row groups and several pages of values in each; and its rows."""
    appends = [
        Appended(first + first // 1_000, [row(number) for number in range(first, first + 500)], producer=first % 1_000)
        for first in range(0, ROWS, 500)
    ]
    store = SimulatedBlobs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_format, "GROUP_BYTES", 1_000_000)
        stored(store, appends, 0, ROWS + 10)
    path = tmp_path_factory.mktemp("readers") / "segment.parquet"
    path.write_bytes(store.contents[KEY])
    rows = [
        {
            "offset": record.offset,
            "timestamp": EPOCH + timedelta(milliseconds=record.timestamp),
            "key": record.key,
            "value": record.value,
            "tag": record.tag,
            "headers": [{"key": name, "value": value} for name, value in record.headers],
            "partition": 0,
            "appended_at": EPOCH + timedelta(milliseconds=append.at),
            "producer": append.producer or None,
        }
        for append in appends
        for record in append.records()
    ]
    return path, rows


def test_the_file_is_written_as_said(made: tuple[Path, list[dict[str, Any]]]) -> None:
    metadata = pq.read_metadata(made[0])
    named = {metadata.schema.column(leaf).path: leaf for leaf in range(metadata.num_columns)}
    assert metadata.num_row_groups > 2
    for group in range(metadata.num_row_groups):
        value = metadata.row_group(group).column(named["value"])
        assert "DELTA_LENGTH_BYTE_ARRAY" in value.encodings and "PLAIN" not in value.encodings
        assert value.compression == "ZSTD" and value.has_offset_index
        assert "DELTA_BINARY_PACKED" in metadata.row_group(group).column(named["offset"]).encodings


def by_pyarrow(path: Path) -> pa.Table:
    return pq.read_table(path)


def by_duckdb(path: Path) -> pa.Table:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return connection.execute("SELECT * FROM read_parquet(?)", [str(path)]).to_arrow_table()


def by_polars(path: Path) -> pa.Table:
    return polars.read_parquet(path).to_arrow()


def by_pyiceberg(path: Path) -> pa.Table:
    catalog = SqlCatalog("readers", uri=f"sqlite:///{path.parent}/catalog.sqlite", warehouse=f"file://{path.parent}")
    try:
        catalog.create_namespace("shop")
        table = catalog.create_table("shop.orders", schema=parquet_format.SCHEMA)
        table.add_files([f"file://{path}"])
        return table.scan().to_arrow()
    finally:
        catalog.close()


@pytest.mark.parametrize("read", [by_pyarrow, by_duckdb, by_polars, by_pyiceberg])
def test_it_is_read_whole(made: tuple[Path, list[dict[str, Any]]], read: Callable[[Path], pa.Table]) -> None:
    path, rows = made

    found = read(path).sort_by("offset").select(COLUMNS)

    assert found.to_pylist() == rows


def test_rows_are_chosen_by_each(made: tuple[Path, list[dict[str, Any]]]) -> None:
    """By statistics, bloom filters and pages: a reader that skips too much has fewer rows."""
    path, rows = made
    wanted = [entry["offset"] for entry in rows if entry["key"] == b"key-31" and entry["offset"] > 1_000]
    chosen = (pc.field("key") == b"key-31") & (pc.field("offset") > 1_000)

    by_arrow = pq.read_table(path, filters=chosen)
    lazy = polars.scan_parquet(path).filter((polars.col("key") == b"key-31") & (polars.col("offset") > 1_000))
    with duckdb.connect() as connection:
        asked = 'SELECT "offset" FROM read_parquet(?) WHERE key = \'key-31\'::BLOB AND "offset" > 1000 ORDER BY 1'
        by_sql = connection.execute(asked, [str(path)]).fetchall()

    assert wanted and by_arrow.column("offset").to_pylist() == wanted
    assert lazy.collect().get_column("offset").to_list() == wanted
    assert [offset for (offset,) in by_sql] == wanted


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("vectorized", [True, False])
def test_spark_reads_it_by_batches_and_by_rows(
    made: tuple[Path, list[dict[str, Any]]], spark: SparkSession, *, vectorized: bool
) -> None:
    path, rows = made
    spark.conf.set("spark.sql.parquet.enableVectorizedReader", str(vectorized).lower())
    try:
        frame = spark.read.parquet(str(path)).select(*COLUMNS)
        plan = frame._jdf.queryExecution().toString()
        found = frame.toArrow().sort_by("offset").to_pylist()
        picked = frame.where("key = X'6b65792d3331' and offset > 1000").select("offset").collect()
    finally:
        spark.conf.unset("spark.sql.parquet.enableVectorizedReader")

    assert f"Batched: {str(vectorized).lower()}" in plan
    assert found == rows
    wanted = [entry["offset"] for entry in rows if entry["key"] == b"key-31" and entry["offset"] > 1_000]
    assert sorted(entry.offset for entry in picked) == wanted
