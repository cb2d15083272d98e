"""Tables as sources of pipelines: looked at before Spark starts, read as they mean it, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType, TimeType

import forebay
from forebay.errors import Unsupported
from forebay.spark.jobs import lake, register
from forebay.spark.pipelines.file.document import Flawed
from forebay.spark.pipelines.outline import outline
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import look_up_table, open_catalog, table_names
from forebay.spark.tables.files import files_of
from tests.compacting.directly import compacted, location_of
from tests.spark.mixed import Mixed
from tests.spark.pipelines.files import built, flaws_of, pipeline_of, running_of
from tests.spark.topics import SETTINGS
from tests.support.environments.directories import TOPIC, local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = pa.table(
    {
        "id": pa.array([1, 2, 3], pa.int64()),
        "name": ["a", "b", None],
        "at": pa.array([1, 2, 3], pa.timestamp("us", "UTC")),
        "lines": pa.array([[{"sku": "x"}], [], None], pa.list_(pa.struct([("sku", pa.string())]))),
    }
)
PIPELINE = """\
name: p
location: {path: data}
sources:
  - name: orders
    table: shop.typed
    format: iceberg
sinks:
  - {name: out, from: orders, topic: shop/out, key: name}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        log.create_topic("shop/out")
    return tmp_path


@pytest.fixture
def catalog(home: Path) -> Iterator[Catalog]:
    found = open_catalog(Location.of(home / "data"))
    found.create_namespace("shop")
    yield found
    found.close()


def test_a_table_is_looked_at_before_spark_starts(home: Path, catalog: Catalog) -> None:
    catalog.create_table("shop.typed", ROWS.schema).append(ROWS)
    catalog.create_table("shop.other", ROWS.schema)

    found = outline(pipeline_of(home, PIPELINE)).sources[0]

    assert (found.reads, found.format) == ("shop.typed", "iceberg")
    assert found.columns == ("id bigint", "name string", "at timestamp", "lines array<struct<`sku`: string>>")
    assert flaws_of(home, PIPELINE.replace("shop.typed", "shop.tiped"), outline) == [
        f"p.yml:5:12: there is no table shop.tiped in the catalog of {home}/data: did you mean shop.typed?"
    ]
    assert flaws_of(home, PIPELINE.replace("key: name", "key: nme"), outline) == [
        "p.yml:8:53: orders has no column nme: did you mean name?"
    ]


def test_without_a_catalog_there_is_no_table_and_none_is_made(home: Path) -> None:
    before = sorted(home.rglob("*"))

    assert "there is no table shop.typed" in flaws_of(home, PIPELINE, outline)[0]

    assert table_names(Location.of(home / "data")) == []
    assert not (home / "data" / "tables").exists()
    assert [path for path in sorted(home.rglob("*")) if "sqlite-" not in path.name] == [*before, home / "p.yml"]


@pytest.mark.parametrize(
    ("before", "after", "flaw"),
    [
        ("shop.typed", "typed", "p.yml:5:12: typed is not the name of a table: write NAMESPACE.NAME"),
        (
            "    format: iceberg",
            "    format: iceberg\n    schema: id INT",
            "p.yml:7:5: schema does not go with format iceberg in source orders",
        ),
        (
            "    format: iceberg",
            "    format: iceberg\n    options: {a: b}",
            "p.yml:7:5: options does not go with format iceberg in source orders",
        ),
        ("format: iceberg", "format: csv", "p.yml:6:13: format of source orders is 'csv'"),
        ("table: shop.typed", "files: shop.typed", "p.yml:6:13: format of source orders is 'iceberg'"),
        (
            "topic: shop/out, key: name",
            "table: shop.typed, format: iceberg",
            "p.yml:8:38: source orders reads the table that sink out writes",
        ),
    ],
)
def test_words_that_do_not_fit_are_reported_with_their_line(tmp_path: Path, before: str, after: str, flaw: str) -> None:
    flaws = flaws_of(tmp_path, PIPELINE.replace(before, after))

    assert [one for one in flaws if one.startswith(flaw)] != [], flaws


def test_what_spark_would_read_otherwise_is_refused_by_name(home: Path, catalog: Catalog) -> None:
    renamed = catalog.create_table("shop.renamed", ROWS.schema)
    with renamed.update_schema() as update:
        update.rename_column("name", "title")
    again = catalog.create_table("shop.again", ROWS.schema)
    with again.update_schema() as update:
        update.delete_column("name")
    with again.update_schema() as update:
        update.add_column("name", LongType())
    catalog.create_table("shop.timed", Schema(NestedField(1, "at", TimeType())))
    gone = catalog.create_table("shop.gone", ROWS.schema)
    gone.append(ROWS)
    Path(next(iter(gone.scan().plan_files())).file.file_path.removeprefix("file://")).unlink()

    for name, message in {
        "renamed": "column title of shop.renamed was renamed",
        "again": "column name of shop.again was renamed, or its name was given again",
        "timed": "column at of shop.timed is time, which Spark does not read",
        "gone": "is not there, seen from this machine",
    }.items():
        text = PIPELINE.replace("shop.typed", f"shop.{name}").replace(", key: name", "")
        flaws = flaws_of(home, text, outline)
        assert len(flaws) == 1 and flaws[0].startswith("p.yml:5:12: source orders: ") and message in flaws[0], flaws


@pytest.mark.spark
def test_files_whose_names_look_like_patterns_are_read(spark: SparkSession, catalog: Catalog, tmp_path: Path) -> None:
    table = catalog.create_table("shop.odd", ROWS.schema)
    for folder in ("od*d", "odd", "o[d]{d,e}"):
        (tmp_path / folder).mkdir()
        pq.write_table(ROWS, tmp_path / folder / "a.parquet")
        if folder != "odd":  # which is what a pattern would find
            table.add_files([f"file://{tmp_path}/{folder}/a.parquet"])

    assert files_of(table).frame(spark).count() == 2 * ROWS.num_rows


def test_deletes_and_other_formats_are_refused(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    table = catalog.create_table("shop.typed", ROWS.schema)
    table.append(ROWS)
    task = next(iter(table.scan().plan_files()))

    def planned(**changes: Any) -> None:
        class Planned:
            delete_files = changes.get("delete_files", set())
            file = changes.get("file", task.file)

        class Scan:
            def plan_files(self) -> list[Any]:
                return [Planned()]

        monkeypatch.setattr(table, "scan", Scan)

    planned(delete_files={task.file})
    with pytest.raises(Unsupported, match=r"shop\.typed has files of deletes"):
        files_of(table)

    class Orc:
        value = "ORC"

    class Bucket:
        file_path, file_format = "s3://lake/a.parquet", task.file.file_format

    class Other:
        file_path, file_format = "file:///a.orc", Orc()

    for file, message in ((Bucket(), "where Spark does not reach"), (Other(), "is no Parquet file")):
        planned(file=file)
        with pytest.raises(Unsupported, match=message):
            files_of(table)


def test_a_directory_of_parquet_files_is_looked_at_as_well(home: Path) -> None:
    text = PIPELINE.replace("shop.typed\n    format: iceberg", "old")
    (home / "old" / "country=DE").mkdir(parents=True)
    assert flaws_of(home, text, outline) == [f"p.yml:5:12: source orders: {home}/old holds no Parquet file"]
    (home / "old" / "_SUCCESS").touch()
    pq.write_table(ROWS, home / "old" / "country=DE" / "a.parquet")

    found = outline(pipeline_of(home, text.replace("key: name", "key: country"))).sources[0]

    assert found.columns is not None
    assert found.columns[:3] == ("id bigint", "name string", "at timestamp") and found.columns[-1] == "country"
    assert (
        "orders has no column nme: did you mean name?"
        in flaws_of(home, text.replace("key: name", "key: nme"), outline)[0]
    )
    (home / "old" / "country=DE" / "a.parquet").write_bytes(b"something else")
    assert "is no Parquet file" in flaws_of(home, text, outline)[0]


@pytest.mark.spark
@pytest.mark.slow
def test_rows_of_a_table_are_those_that_its_catalog_says(spark: SparkSession, home: Path, catalog: Catalog) -> None:
    table = catalog.create_table("shop.typed", ROWS.schema)
    table.append(ROWS)
    table.append(ROWS.slice(1))
    with table.update_schema() as update:
        update.add_column("note", StringType())
    table.append(ROWS.slice(2).append_column("note", pa.array(["new"])))
    table.delete("id == 1")
    catalog.create_table("shop.empty", ROWS.schema)
    text = PIPELINE.replace("sinks:", "  - {name: nothing, table: shop.empty, format: iceberg}\nsinks:")
    text += "  - {name: copy, from: orders, table: copy}\n  - {name: none, from: nothing, table: none}\n"
    pipeline = pipeline_of(home, text)

    report = running_of(pipeline).run(spark)

    assert [sink.rows for sink in report.sinks] == [5, 5, 0]
    expected = table.refresh().scan().to_arrow()
    found = spark.read.parquet(str(home / "copy")).toArrow().cast(expected.schema)
    assert sorted(map(str, found.to_pylist())) == sorted(map(str, expected.to_pylist()))
    assert pq.read_schema(next((home / "none").glob("*.parquet"))).names == ROWS.schema.names
    catalog.drop_table("shop.typed")
    with pytest.raises(Flawed, match="the table shop.typed is gone"):
        built(spark, home, pipeline)
    assert look_up_table(Location.of(home / "data"), "shop.typed") is None


@pytest.mark.spark
@pytest.mark.slow
def test_tables_that_lake_and_register_made_are_read_with_every_row(spark: SparkSession, tmp_path: Path) -> None:
    home = tmp_path / "with a space"
    home.mkdir()
    environment = local(home)
    mixed = Mixed(environment)
    mixed.every_tier()
    compacted(environment, [TOPIC])
    location = location_of(environment)
    register.run(location, TOPIC)
    lake.run(spark, location, TOPIC, table="shop.raw", format="raw")

    named, raw = (look_up_table(location, name) for name in ("shop.orders", "shop.raw"))
    assert named is not None
    assert raw is not None
    rows = files_of(raw).frame(spark).select("_partition", "_offset", "_key", "_tag", "value", "_timestamp").collect()
    found = files_of(named).frame(spark).drop("headers").toArrow()

    wanted = [(row["partition"], row["offset"], row["key"], row["tag"], row["value"]) for row in mixed.rows]
    assert sorted(tuple(row[:5]) for row in rows) == sorted(wanted, key=lambda row: row[:2])
    assert all(row["_timestamp"] is not None for row in rows)
    expected = named.scan().to_arrow().drop_columns("headers")
    order = [("partition", "ascending"), ("offset", "ascending")]
    assert found.cast(expected.schema).sort_by(order).to_pylist() == expected.sort_by(order).to_pylist()
    mixed.close()
