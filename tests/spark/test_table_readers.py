"""Files of Iceberg tables have ids for their columns, and readers take them beside files that have none yet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import polars
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.schema import index_by_name
from pyiceberg.table import Table
from pyspark.sql import SparkSession

import forebay
from forebay.compacting.planning import Rules
from forebay.errors import Unsupported
from forebay.format.parquet import file as parquet_format
from forebay.format.parquet.ids import ids_of
from forebay.spark.jobs import lake, register
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import look_up_table
from forebay.spark.tables.files import files_of
from forebay.spark.tables.iceberg import IcebergTable
from forebay.spark.tables.open_table import OpenTable
from tests.compacting.directly import compacted, location_of
from tests.spark.topics import SETTINGS
from tests.support.environments.directories import Environment, local

TOPIC: Final = "shop/orders"
LAKE: Final = "shop.typed"
SCHEMA: Final = "id BIGINT, lines ARRAY<STRUCT<sku: STRING, pieces: INT>>, sizes MAP<STRING, INT>"
Rows = list[dict[str, Any]]


def by_pyiceberg(table: Table) -> Rows:
    rows: Rows = table.scan().to_arrow().to_pylist()
    return rows


def by_polars(table: Table) -> Rows:
    """By the reader of Polars itself, which knows columns by their ids alone."""
    return polars.scan_iceberg(table.metadata_location, reader_override="native").collect().to_dicts()


def by_polars_and_pyiceberg(table: Table) -> Rows:
    return polars.scan_iceberg(table.metadata_location, reader_override="pyiceberg").collect().to_dicts()


def loaded(location: Location, name: str | tuple[str, str]) -> Table:
    found = look_up_table(location, name)
    assert found is not None
    return found


def ids_in_files(table: Table) -> list[dict[str, int]]:
    """Of each file of a table."""
    paths = [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]
    return [ids_of(pq.read_schema(path)) for path in sorted(paths)]


def ids_in(table: Table) -> dict[str, int]:
    """By the whole way to each column."""
    schema = table.schema()
    return {name: number for name, number in index_by_name(schema).items() if schema.find_column_name(number) == name}


def by_offset(rows: Rows) -> list[tuple[object, ...]]:
    columns = ("partition", "offset", "key", "value", "tag", "headers")
    return sorted(tuple(json.dumps(row[name], default=bytes.hex) for name in columns) for row in rows)


class History:
    """A topic whose compacted history is registered as a table, and the rows that the table must show."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.log = environment.open("one")
        self.topic = self.log.create_topic(TOPIC, partitions=2)
        self.rows: Rows = []

    def compact(self) -> None:
        """So many records that a compaction leaves what it makes of them alone from then on."""
        for _ in range(2):
            for partition in range(2):
                first = self.topic.offsets(partition).next
                for offset in range(first, first + 40):
                    self._append(partition, offset)
            self.log.export_topic(TOPIC)
        compacted(self.environment, [TOPIC], rules=Rules(settle_ms=0, segments_min=2, target_bytes=2_000))

    def _append(self, partition: int, offset: int) -> None:
        key = None if offset % 5 == 0 else b"key-%d" % (offset % 7)
        headers = () if offset % 3 else (("trace", b"%d" % offset), ("note", None))
        tag = "eu" if offset % 2 else None
        self.topic.append(b"%d" % offset, key=key, tag=tag, headers=headers, partition=partition)
        shown = [{"key": name, "value": value} for name, value in headers]
        fields = {"key": key, "value": b"%d" % offset, "tag": tag, "headers": shown}
        self.rows.append({"partition": partition, "offset": offset, **fields})

    def register(self) -> Table:
        register.run(location_of(self.environment), TOPIC)
        return loaded(location_of(self.environment), ("shop", "orders"))


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(local(tmp_path))
    yield history
    history.log.close()


def test_ids_of_segments_are_those_that_a_catalog_gives_their_columns() -> None:
    with InMemoryCatalog("ids") as catalog:
        catalog.create_namespace("shop")
        table = catalog.create_table("shop.orders", parquet_format.SCHEMA)

        assert ids_in(table) == parquet_format.FIELD_IDS == ids_of(parquet_format.FILE_SCHEMA)


@pytest.mark.parametrize("read", [by_pyiceberg, by_polars, by_polars_and_pyiceberg])
def test_registered_history_is_read_by_ids(history: History, read: Callable[[Table], Rows]) -> None:
    history.compact()

    table = history.register()

    assert ids_in_files(table) and all(ids == parquet_format.FIELD_IDS for ids in ids_in_files(table))
    assert by_offset(read(table)) == by_offset(history.rows)


@pytest.mark.parametrize("times", [1, 2], ids=["at once", "one after the other"])
@pytest.mark.parametrize("read", [by_pyiceberg, by_polars_and_pyiceberg])
def test_older_segments_are_read_by_names_beside_newer_ones(
    history: History, monkeypatch: pytest.MonkeyPatch, read: Callable[[Table], Rows], times: int
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(parquet_format, "FILE_SCHEMA", parquet_format.SCHEMA)
        history.compact()
        if times == 2:
            history.register()
    history.compact()

    table = history.register()

    assert {len(ids) for ids in ids_in_files(table)} == {0, len(parquet_format.FIELD_IDS)}
    assert by_offset(read(table)) == by_offset(history.rows)


@pytest.mark.spark
def test_spark_reads_segments_with_and_without_ids(
    history: History, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(parquet_format, "FILE_SCHEMA", parquet_format.SCHEMA)
        history.compact()
    history.compact()

    table = history.register()
    found = files_of(table).frame(spark).toArrow().to_pylist()
    through_forebay = list(history.topic.read())

    assert {len(ids) for ids in ids_in_files(table)} == {0, len(parquet_format.FIELD_IDS)}
    assert by_offset(found) == by_offset(history.rows)
    assert len(through_forebay) == len(history.rows)


def test_a_table_that_knows_a_column_by_another_id_is_refused_and_left_as_it_was(history: History) -> None:
    history.compact()
    table = history.register()
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("tag")
    with table.update_schema() as update:
        update.add_column("tag", table.schemas()[0].find_field("tag").field_type)
    before = loaded(location_of(history.environment), ("shop", "orders")).current_snapshot()
    history.compact()

    with pytest.raises(Unsupported, match="column tag of the table shop.orders has the id 15, and 5 in the files"):
        history.register()

    assert loaded(location_of(history.environment), ("shop", "orders")).current_snapshot() == before


def without_ids(table: IcebergTable, schema: Any) -> Any:
    """As earlier versions wrote files."""
    del table
    return schema


@pytest.mark.spark
@pytest.mark.parametrize("first", ["now", "earlier"])
def test_tables_of_lake_and_their_bad_rows_have_ids(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    location, wanted = Location.of(tmp_path / "data"), []

    def bring(start: int, schema: str) -> None:
        with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
            topic = log.create_topic(TOPIC, exist_ok=True)
            for number in range(start, start + 10):
                lines, sizes = [{"sku": f"s{number}", "pieces": number}], {"x": number}
                topic.append(json.dumps({"id": number, "lines": lines, "sizes": sizes, "total": number}).encode())
                wanted.append((number, lines, [("x", number)], number if "total" in schema else None))
            topic.append(b"no json")
        lake.run(spark, location, TOPIC, table=LAKE, schema=schema)

    with monkeypatch.context() as earlier:
        if first == "earlier":
            earlier.setattr(IcebergTable, "file_schema", without_ids)
        bring(0, SCHEMA)
    bring(10, f"total INT, {SCHEMA}")

    table, bad = loaded(location, LAKE), loaded(location, f"{LAKE}_bad")
    ids = [found for found in ids_in_files(table) if found]
    assert {len(found) for found in ids_in_files(table)} == ({0, 14} if first == "earlier" else {13, 14})
    assert all(found.items() <= ids_in(table).items() for found in ids)
    for read in (by_pyiceberg, by_polars_and_pyiceberg if first == "earlier" else by_polars):
        assert sorted(map(_shown, read(table))) == wanted
        assert [row["value"] for row in read(bad)] == [b"no json"] * 2
    assert sorted(_shown(row) for row in files_of(table).frame(spark).toArrow().to_pylist()) == wanted


def _shown(row: dict[str, Any]) -> tuple[object, ...]:
    sizes = [(one["key"], one["value"]) if isinstance(one, dict) else tuple(one) for one in row["sizes"]]
    return row["id"], row["lines"], sizes, row["total"]


@pytest.mark.spark
def test_rows_of_pipelines_get_ids_also_in_a_table_that_their_commit_makes(tmp_path: Path, spark: SparkSession) -> None:
    with forebay.open(str(tmp_path / "data"), SETTINGS):
        location = Location.of(tmp_path / "data")
    target = OpenTable(location, "shop.counts")
    try:
        target.put(spark.sql("SELECT 1 AS a, named_struct('b', 'x') AS c"), new=True)
        target.put(spark.sql("SELECT 2 AS a, named_struct('b', 'y') AS c"))
    finally:
        target.close()

    table = loaded(location, "shop.counts")
    assert ids_in_files(table) == [{"a": 1, "c": 2, "c.b": 3}] * 2 == [ids_in(table)] * 2
    assert sorted(row["a"] for row in by_polars(table)) == [1, 2]
