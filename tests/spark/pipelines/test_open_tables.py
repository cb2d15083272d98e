"""Iceberg tables that pipelines write do not grow without end: old snapshots go, and what killed runs left."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyiceberg.table import Table

import forebay
from forebay.spark.pipelines.kinds import iceberg, tables
from forebay.spark.pipelines.kinds.tables import TableBatches
from forebay.spark.place.location import Location
from forebay.spark.tables import open_table
from forebay.spark.tables.catalog import look_up_table
from forebay.spark.tables.formats import ICEBERG
from forebay.spark.tables.iceberg import IcebergTable
from forebay.spark.tables.open_table import FOLDER, OpenTable
from forebay.spark.tables.upkeep import named_files, own_folder
from tests.spark.pipelines.files import pipeline_of, running_of
from tests.spark.topics import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PIPELINE = """\
name: p
location: {path: data, table.snapshots_kept_max: 1, table.orphan_grace_s: 0}
sources: [{name: orders, topic: shop/orders}]
sinks: [{name: out, from: orders, table: shop.copy, format: iceberg, write: overwrite}]
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        log.create_topic("shop/orders").append_many([b"a", b"b"])
    return tmp_path


def _table(home: Path) -> Table:
    found = look_up_table(Location.of(home / "data"), "shop.copy")
    assert found is not None
    return found


def _present(home: Path) -> set[str]:
    return {path.name for path in (home / "data" / "tables").rglob("*.parquet")}


def _named(home: Path) -> set[str]:
    return {address.rpartition("/")[2] for address in named_files(_table(home))}


def _stray(home: Path) -> str:
    path = Path(own_folder(_table(home), FOLDER).removeprefix("file://"), f"{'5' * 32}.parquet")
    path.write_bytes(b"of a run that was killed")
    return path.name


def test_a_batch_leaves_nothing_that_no_caller_names(spark: SparkSession, home: Path) -> None:
    pipeline = pipeline_of(home, PIPELINE)
    for _ in range(3):
        running_of(pipeline).run(spark)
    stray = _stray(home)

    running_of(pipeline).run(spark)

    assert stray not in _present(home)
    assert len(_table(home).snapshots()) == 3, "the last of before, what it replaced, and itself"
    assert _present(home) == _named(home)
    assert _table(home).scan().to_arrow().num_rows == 2


def test_a_stream_tidies_up_once_and_expires_many_at_a_time(
    spark: SparkSession, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_table, "EXPIRED_AT_LEAST", 3)
    place = {"path": str(home / "data"), "table.snapshots_kept_max": "1", "table.orphan_grace_s": "0"}
    location = Location.parse(place)
    started: Future[str] = Future()
    started.set_result("query")
    rows = spark.createDataFrame([(1,)], "id BIGINT")
    with contextlib.closing(TableBatches(location, "shop.copy", ICEBERG, started)) as first:
        first.put(rows, 0)
    stray = _stray(home)

    batches = TableBatches(location, "shop.copy", ICEBERG, started)
    counted = []
    for number in range(1, 6):
        batches.put(rows, number)
        assert stray not in _present(home)
        counted.append(len(_table(home).snapshots()))
    _stray(home)
    batches.put(rows, 6)
    batches.close()

    assert counted == [2, 3, 1, 2, 3]
    assert stray in _present(home), "only the first batch looks through the folder"
    assert _table(home).scan().to_arrow().num_rows == 7


def test_rows_that_are_in_are_no_failure_though_old_snapshots_cannot_be_expired(
    spark: SparkSession, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by review: it was said that nothing was written, and the next run added the rows once more."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError("the catalog does not answer")

    monkeypatch.setattr(IcebergTable, "expire", refuse)
    table = OpenTable(Location.of(home / "data"), "shop.copy")

    table.put(spark.createDataFrame([(1,)], "id BIGINT"))
    table.close()

    assert _table(home).scan().to_arrow().num_rows == 1
    assert "shop.copy: old snapshots are left to the next run: the catalog does not answer" in caplog.text


def test_runs_open_a_table_once_and_close_it(spark: SparkSession, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[OpenTable] = []
    closed: list[OpenTable] = []

    class Noted(OpenTable):
        def __init__(self, location: Location, name: str, *, table_format: str = ICEBERG) -> None:
            super().__init__(location, name, table_format=table_format)
            opened.append(self)

        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(iceberg, "OpenTable", Noted)
    monkeypatch.setattr(tables, "OpenTable", Noted)
    running_of(pipeline_of(home, PIPELINE)).run(spark)
    assert len(opened) == 1

    stream = PIPELINE.replace("name: p\n", "name: p\nmode: streaming\ncheckpoint: state\ntrigger: availableNow\n")
    stream = stream.replace("{name: orders,", "{name: orders, options: {maxOffsetsPerTrigger: 1},")
    running_of(pipeline_of(home, stream.replace(", write: overwrite", ""))).run(spark)

    assert len(opened) == 2, "not once for each batch"
    assert closed == opened
    assert _table(home).scan().to_arrow().num_rows == 4
