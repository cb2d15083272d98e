"""Backfill: the topic has every row once, however often it is run and wherever it was ended."""

from __future__ import annotations

import json
import os
import random  # noqa: TID251  # seeded
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import forebay
from forebay.errors import Conflict, Invalid, UnknownTopic
from forebay.loads.book import LoadBook
from forebay.spark.jobs import backfill
from forebay.spark.jobs.backfill import Files, Frame, Table
from forebay.spark.jobs.report import JobReport
from forebay.spark.place.location import Location
from forebay.spark.place.opening import opened
from forebay.spark.tables.catalog import open_catalog
from forebay.spark.writing.delivery import deliver
from forebay.testing.simulated.clock import ManualClock
from tests.ledger import Ledger
from tests.spark.topics import SETTINGS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def location(tmp_path: Path) -> Location:
    path = tmp_path / "data"
    with forebay.open(str(path), SETTINGS) as log:
        log.create_topic("shop/orders", partitions=2)
    return Location.of(path)


@pytest.fixture(autouse=True)
def _no_load_is_left_offered(location: Location) -> Iterator[None]:
    yield
    with opened(location) as found:
        assert LoadBook(found.metadata, "/forebay", ManualClock()).pending() == {}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Three Parquet files with 100 orders each, in a folder with a space in its name."""
    folder = tmp_path / "old orders"
    folder.mkdir()
    for number in range(3):
        ids = list(range(number * 100, number * 100 + 100))
        columns = {
            "id": ids,
            "customer": [f"c{i % 7}" for i in ids],
            "total": [i / 4 for i in ids],
            "at": pa.array([1_700_000_000_000 + i for i in ids], pa.timestamp("ms", "UTC")),
        }
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet")
    return folder


def _records(location: Location) -> list[forebay.Record]:
    assert location.path is not None
    with forebay.open(location.path, SETTINGS) as log:
        topic = log.topic("shop/orders")
        return [record for partition in range(2) for record in topic.read(partition=partition)]


def _ids(location: Location) -> list[int]:
    return sorted(json.loads(record.value or b"")["id"] for record in _records(location))


def test_files_come_once_with_the_columns_chosen(spark: SparkSession, location: Location, files: Path) -> None:
    source = Files(paths=(str(files),))
    columns = {
        "value": "to_json(struct(id, total))",
        "key": "customer",
        "tag": "concat('t', id % 3)",
        "timestamp": "at",
    }

    planned = backfill.run(spark, location, "shop/orders", source, columns=columns, dry_run=True)
    nothing_yet = _ids(location)
    first = backfill.run(spark, location, "shop/orders", source, columns=columns)
    second = backfill.run(spark, location, "shop/orders", source, columns=columns)

    assert (planned.figures, nothing_yet) == ({"records": 300, "loads": 1, "loads_before": 0}, [])
    assert first.figures == {"records": 300, "loads": 1, "loads_before": 0}
    assert second.figures == {"records": 0, "loads": 1, "loads_before": 1}
    records = _records(location)
    assert len(records) == 300
    for record in records:
        order = json.loads(record.value or b"")
        number = order["id"]
        assert order == {"id": number, "total": number / 4}
        assert record.key == f"c{number % 7}".encode() and record.tag == f"t{number % 3}"
        assert record.timestamp == 1_700_000_000_000 + number
    assert len({(record.key, record.partition) for record in records}) == 7, "a key has one partition"


def test_a_file_that_comes_while_a_backfill_looks_is_another_backfills(
    spark: SparkSession, location: Location, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in the name that stands for the rows and not among them: no later run brought it."""
    late = files / "part-9.parquet"
    shaped = backfill.shaped

    def shaped_late(*arguments: Any) -> Any:
        pq.write_table(pq.read_table(files / "part-0.parquet"), late)
        return shaped(*arguments)

    monkeypatch.setattr(backfill, "shaped", shaped_late)
    backfill.run(spark, location, "shop/orders", Files(paths=(str(files),)))
    monkeypatch.undo()
    late.rename(files.parent / "late.parquet")
    again = backfill.run(spark, location, "shop/orders", Files(paths=(str(files),)))

    assert again.figures == {"records": 0, "loads": 1, "loads_before": 1}
    assert _ids(location) == list(range(300))


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """Forty files of JSON, one a day, of very different sizes; lines and days are shuffled, some times are equal."""
    chance = random.Random("days")  # seeded: the same files in every run
    folder = tmp_path / "days"
    folder.mkdir()
    for day in chance.sample(range(40), 40):
        lines = []
        for line in range(chance.choice([3, 30, 300])):
            at = 86_400 * day + chance.randrange(0, 86_400, 600)
            lines.append({"at": at, "customer": f"c{chance.randrange(9)}", "line": line, "day": day})
        chance.shuffle(lines)
        text = "".join(json.dumps({**one, "place": place}) + "\n" for place, one in enumerate(lines))
        (folder / f"day-{day:02}.json").write_text(text)
    return folder


ORDERS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "by time": ((), ("at", "day", "place")),
    "by file": (("file",), ("day", "place")),
    "by columns": (("line", "at"), ("line", "at", "day", "place")),
}
"""What is asked for, and by what rows are in order then."""


@pytest.mark.parametrize("name", ORDERS)
def test_records_lie_in_the_order_that_was_asked_for(
    name: str, spark: SparkSession, location: Location, days: Path
) -> None:
    order_by, fields = ORDERS[name]
    columns = {"key": "customer", "timestamp": "timestamp_seconds(at)", "value": "to_json(struct(*))"}

    backfill.run(
        spark, location, "shop/orders", Files(paths=(str(days),), kind="json"), columns=columns, order_by=order_by
    )

    found: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}
    for record in _records(location):
        row = json.loads(record.value or b"")
        found[record.partition].append(tuple(row[field] for field in fields))
    assert all(len(rows) > 1_000 and rows == sorted(rows) for rows in found.values())


def test_rows_without_a_time_lie_by_file_and_line_and_a_frame_without_one_stays_as_it_is(
    spark: SparkSession, location: Location, days: Path
) -> None:
    backfill.run(spark, location, "shop/orders", Files(paths=(str(days),), kind="json"), columns={"key": "customer"})
    rows = [(record.partition, json.loads(record.value or b"")) for record in _records(location)]
    assert rows == sorted(rows, key=lambda row: (row[0], row[1]["day"], row[1]["place"]))
    before = len(rows)

    frame = spark.range(50, 0, -1).selectExpr("cast(id AS string) AS value", "'k' AS key").coalesce(1)
    backfill.run(spark, location, "shop/orders", Frame(frame), backfill_id="falling")

    late = [int(record.value or b"") for record in _records(location) if record.key == b"k"]
    assert late == sorted(late, reverse=True) and len(_records(location)) == before + 50
    with pytest.raises(Invalid, match="of no files"):
        backfill.run(spark, location, "shop/orders", Frame(frame), backfill_id="filed", order_by=["file"])
    with pytest.raises(Invalid, match="none_such"):
        backfill.run(spark, location, "shop/orders", Frame(frame), backfill_id="odd", order_by=["none_such"])


@pytest.mark.slow
def test_a_remote_file_that_was_replaced_comes_and_one_that_was_not_does_not(
    spark: SparkSession, location: Location, tmp_path: Path
) -> None:
    """A file system that this process does not see, with names that Spark would take for patterns."""
    folder = tmp_path / "far"
    folder.mkdir()
    for name, lines in {"a b": '{"id": 1}\n', "b": "", "c[1]": '{"id": 2}\n', "c1": '{"id": 3}\n'}.items():
        (folder / f"{name}.json").write_text(lines)
    shop = tmp_path.name.replace("_", "-")
    mounted = {f"fs.viewfs.mounttable.{shop}.link./old": f"file://{folder}"}
    source = Files(paths=(f"viewfs://{shop}/old",), kind="json", options=mounted)

    def run(**more: Any) -> Any:
        return backfill.run(spark, location, "shop/orders", source, **more).figures["records"]

    assert [run(), run()] == [3, 0]
    (folder / "a b.json").write_text('{"id": 4}\n')  # as long as before
    os.utime(folder / "a b.json", (1_800_000_000, 1_800_000_000))
    assert run() == 3
    os.utime(folder / "a b.json", (0, 0))  # a file system that does not show the time
    with pytest.raises(Invalid, match=r"cannot be seen .* give the backfill an id \(--id\)"):
        run()
    assert run(backfill_id="by-hand", files_each=2) == 3
    assert _ids(location) == [1, 2, 2, 2, 3, 3, 3, 4, 4]


def test_what_was_ended_goes_on_load_by_load(
    spark: SparkSession, location: Location, files: Path, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    source = Files(paths=(str(files),))
    calls = []

    def ended(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt  # staged, and never offered
        deliver(*arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt  # in the topic, and no caller was answered

    def run() -> JobReport:
        return backfill.run(spark, location, "shop/orders", source, files_each=1)

    monkeypatch.setattr(backfill, "deliver", ended)
    for expected in (100, 300):
        with pytest.raises(KeyboardInterrupt):
            run()
        ledger.count("interruptions")
        assert len(_ids(location)) == expected

    last = run()

    assert last.figures == {"records": 0, "loads": 3, "loads_before": 3}
    assert _ids(location) == list(range(300))


def test_an_id_stands_for_the_same_rows_for_ever(spark: SparkSession, location: Location, files: Path) -> None:
    first = Files(paths=tuple(str(files / f"part-{number}.parquet") for number in (0, 1)))
    other = Files(paths=(str(files / "part-2.parquet"),))

    backfill.run(spark, location, "shop/orders", first, backfill_id="once")

    with pytest.raises(Conflict, match="backfill once into shop/orders brings other rows"):
        backfill.run(spark, location, "shop/orders", other, backfill_id="once")
    with pytest.raises(Conflict, match="cut otherwise"):
        backfill.run(spark, location, "shop/orders", first, backfill_id="once", files_each=1)
    assert _ids(location) == list(range(200))
    backfill.run(spark, location, "shop/orders", other, backfill_id="again")
    assert _ids(location) == list(range(300))


def test_tables_lines_and_frames_are_sources_too(spark: SparkSession, location: Location, tmp_path: Path) -> None:
    catalog = open_catalog(location)
    catalog.create_namespace("old")
    rows = pa.table({"id": pa.array([1, 2], pa.int64())})
    catalog.create_table("old.orders", rows.schema).append(rows)
    catalog.close()
    (tmp_path / "lines.json").write_text('{"id": 3}\n{"id": 4}\n')
    (tmp_path / "lines.csv").write_text("id,key\n5,a\n6,b\n")
    frame = spark.createDataFrame([(b'{"id": 7}', b"k", "left out")], "value binary, key binary, other string")

    for source, name in (
        (Table(location=location, name="old.orders"), None),
        (Files(paths=(str(tmp_path / "lines.json"),), kind="json"), None),
        (
            Files(paths=(str(tmp_path / "lines.csv"),), kind="csv", options={"header": "true", "inferSchema": "true"}),
            None,
        ),
        (Frame(frame), "by-hand"),
    ):
        backfill.run(spark, location, "shop/orders", source, backfill_id=name)
    again = backfill.run(spark, location, "shop/orders", Frame(frame), backfill_id="by-hand")

    assert _ids(location) == [1, 2, 3, 4, 5, 6, 7] and again.figures["loads_before"] == 1


def test_calls_that_make_no_sense_are_refused(
    spark: SparkSession, location: Location, files: Path, tmp_path: Path
) -> None:
    source = Files(paths=(str(files),))
    for options, message in (
        ({"columns": {"valeu": "id"}}, "a record has no 'valeu'"),
        ({"columns": {"value": "idd"}}, "the rows have columns id, customer, total, at"),
        ({"columns": {"value": "id"}}, 'column "value" is bigint'),
        ({"backfill_id": "a/b"}, "no id of a backfill"),
        ({"files_each": 0}, "at least one file"),
    ):
        with pytest.raises(Invalid, match=message):
            backfill.run(spark, location, "shop/orders", source, **options)
    with pytest.raises(Invalid, match="give the backfill an id"):
        backfill.run(spark, location, "shop/orders", Frame(spark.range(1)))
    with pytest.raises(Invalid, match="cannot be read as parquet"):
        backfill.run(spark, location, "shop/orders", Files(paths=(str(tmp_path / "nowhere"),)))
    with pytest.raises(Invalid, match="there is no table no.orders"):
        backfill.run(spark, location, "shop/orders", Table(location=location, name="no.orders"))
    with pytest.raises(Invalid, match="files are of kind"):
        Files(paths=("a",), kind="xml")
    with pytest.raises(UnknownTopic, match="there is no topic shop/none"):
        backfill.run(spark, location, "shop/none", source)
