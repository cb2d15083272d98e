"""What is Delta's own: where tables lie, what their log says of files, tables of other programs. No Spark runs."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.schema import PrimitiveType

import forebay
from forebay.errors import Conflict, Invalid, Unavailable, Unsupported
from forebay.settings import TableSettings
from forebay.spark.place.location import Location
from forebay.spark.tables.commit import QueryBatch, TableChange, commit
from forebay.spark.tables.delta import DeltaLakeTable, address_of_table
from forebay.spark.tables.delta_files import look_up_delta
from forebay.spark.tables.file_writer import write_rows
from tests.spark.topics import SETTINGS
from tests.support import servers
from tests.support.servers import ACCESS_KEY, BUCKET, SECRET_KEY

AT = datetime.datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=datetime.UTC)
SCHEMA = pa.schema(
    [("id", pa.int32()), ("at", pa.timestamp("us", "UTC")), ("tags", pa.list_(pa.string())), ("key", pa.binary())]
)


@pytest.fixture
def location(tmp_path: Path) -> Location:
    with forebay.open(str(tmp_path / "data"), SETTINGS):
        pass
    return Location.of(tmp_path / "data")


def put(table: DeltaLakeTable, name: str, *ids: int | None) -> str:
    address = f"{table.folder('data/x y')}/{name}.parquet"
    path = Path(address.removeprefix("file://"))
    path.parent.mkdir(parents=True, exist_ok=True)
    count = len(ids)
    columns = {"id": list(ids), "at": [AT] * count, "tags": [["a"]] * count, "key": [b"k"] * count}
    pq.write_table(pa.table(columns, SCHEMA), path)
    return address


def test_the_log_says_between_which_values_rows_lie_and_every_reader_reads_them(location: Location) -> None:
    table = DeltaLakeTable(location, "shop.orders")
    table.make(SCHEMA, {})
    files = [put(table, "a %20", 3, None, 7), put(table, "b", 9), put(table, "c", None)]

    commit(table, TableChange(added=files), basis=table.version)

    actions = {Path(address).stem: action for address, action in table.files().items()}
    assert {name: action["num_records"] for name, action in actions.items()} == {"a %20": 3, "b": 1, "c": 1}
    first = actions["a %20"]
    assert (first["min"]["id"], first["max"]["id"], first["null_count"]["id"]) == (3, 7, 1)
    assert first["min"]["at"] <= AT <= first["max"]["at"]
    assert actions["c"]["null_count"]["id"] == 1
    path = table.address.removeprefix("file://")
    assert sorted(pa.table(DeltaTable(path).scan(predicate="id > 5"))["id"].to_pylist()) == [7, 9]
    at_that_time = DeltaTable(path).to_pyarrow_table(filters=[("at", "=", AT)])
    assert at_that_time.num_rows == polars.read_delta(path).height == 5


def test_where_a_table_lies(location: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert address_of_table(location, "shop.orders") == f"file://{location.path}/tables/delta/shop/orders"
    assert address_of_table(location, ("shop", "or.ders")) == f"file://{location.path}/tables/delta/shop/or.ders"
    assert address_of_table(location, "lake/orders/") == f"file://{tmp_path}/lake/orders"
    assert address_of_table(location, "s3://bucket/orders") == "s3://bucket/orders"
    with pytest.raises(Invalid, match="write NAMESPACE.NAME"):
        address_of_table(location, "orders")


def test_the_same_batch_is_refused_though_delta_would_take_it_twice(location: Location) -> None:
    """Why each writer looks first: the format itself lets a transaction come again."""
    table = DeltaLakeTable(location, "shop.orders")
    table.make(SCHEMA, {})
    change = TableChange(added=[put(table, "a", 1)], batch=QueryBatch("q", 1))
    commit(table, change, basis=table.version)
    twice = TableChange(added=[put(table, "b", 1)], batch=QueryBatch("q", 1))
    table.attempt(twice)
    assert len(table.files()) == 2, "deltalake refuses it by now: the check before each commit may go"

    late = DeltaLakeTable(location, "shop.orders")
    late.look()
    third = TableChange(added=[put(table, "c", 2)], batch=QueryBatch("q", 2))
    commit(table, third, basis=table.version)
    with pytest.raises(Conflict):
        commit(late, third, basis=lambda: late.last_batch("q"))
    assert len(table.files()) == 3


def test_progress_outlives_checkpoints_and_the_end_of_the_log(location: Location) -> None:
    place = Location(path=location.path, overrides=(("table.snapshots_kept_s", "0"),))
    table = DeltaLakeTable(place, "shop.orders")
    table.make(SCHEMA, {})
    for number in range(4):
        commit(table, TableChange(added=[put(table, str(number), number)], batch=QueryBatch("q", number)), basis=object)

    assert table.expire(place.settings().table, 10**15) == 4
    assert len(list(Path(table.address.removeprefix("file://"), "_delta_log").glob("*.json"))) == 1
    table.look()
    assert table.last_batch("q") == 3 and len(table.files()) == 4


def _made(path: Path, rows: dict[str, Any], **more: Any) -> str:
    write_deltalake(path, pa.table(rows), **more)
    return str(path)


def test_a_table_of_another_program_is_taken_or_refused_by_name(location: Location, tmp_path: Path) -> None:
    days = {"id": [1, 2], "day": ["1/a", None]}
    plain = DeltaLakeTable(location, _made(tmp_path / "plain", {"id": pa.array([1], pa.int64()), "n": ["a"]}))
    parted = _made(tmp_path / "parted", days, partition_by=["day"])
    mapped = _made(tmp_path / "mapped", {"id": [1]})
    DeltaTable(mapped).alter.add_constraint({"positive": "id > 0"})

    plain.make(SCHEMA, {})
    narrower = plain.check(pa.schema([("n", pa.string()), ("id", pa.int32())]))
    assert narrower == pa.schema([("n", pa.string()), ("id", pa.int64())]), "files have the types of the table"
    with pytest.raises(Invalid, match=r"column id of the table .*plain is long, and the rows have double: cast it"):
        plain.check(pa.schema([("id", pa.float64()), ("n", pa.string())]))
    for path, reason in ((parted, "partitions by day"), (mapped, "delta.constraints.positive")):
        with pytest.raises(Unsupported, match=reason):
            DeltaLakeTable(location, path).make(SCHEMA, {})
    found = look_up_delta(location, parted)
    assert found is not None and found.base == f"file://{parted}" and len(found.files) == 2
    assert look_up_delta(location, str(tmp_path / "none")) is None
    Path(found.files[0].removeprefix("file://")).unlink()
    with pytest.raises(Unavailable, match="is not there, seen from this machine"):
        look_up_delta(location, parted)


def test_a_column_that_delta_cannot_have_is_named(location: Location) -> None:
    with pytest.raises(Invalid, match=r"shop\.orders cannot have the column span, month_day_nano_interval"):
        DeltaLakeTable(location, "shop.orders").make(pa.schema([("span", pa.month_day_nano_interval())]), {})


@pytest.mark.slow
def test_a_table_in_a_bucket_has_one_winner_for_each_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.open(str(tmp_path / "data"), SETTINGS):
        pass
    with servers.moto(tmp_path) as server:
        options = {
            "s3.endpoint": server.endpoint,
            "s3.region": "us-east-1",
            "s3.access-key-id": ACCESS_KEY,
            "s3.secret-access-key": SECRET_KEY,
        }
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        overrides = (("table.warehouse", f"s3://{BUCKET}/{tmp_path.name}"), ("table.options", text))
        place = Location(path=str(tmp_path / "data"), overrides=overrides)
        one, other = DeltaLakeTable(place, "shop.orders"), DeltaLakeTable(place, "shop.orders")
        one.make(SCHEMA, {})
        other.make(SCHEMA, {})
        rows = pa.RecordBatch.from_pylist([{"id": 5, "at": AT}], schema=SCHEMA)
        (written,) = write_rows(place, one.folder("data"), SCHEMA, [rows])
        files = written.column("path").to_pylist()
        commit(one, TableChange(added=files, batch=QueryBatch("q", 0)), basis=lambda: one.last_batch("q"))
        with pytest.raises(Conflict, match="changed by another job"):
            commit(other, TableChange(batch=QueryBatch("q", 0)), basis=lambda: other.last_batch("q"))

        assert other.last_batch("q") == 0 and other.version() == 1
        assert list(other.files()) == files
        assert pa.table(other.table.scan())["id"].to_pylist() == [5]
        assert other.remove_strays(other.folder("data"), TableSettings(orphan_grace_s=0), 10**15) == 0


@pytest.mark.parametrize("micros", [253_402_300_799_999_999, 253_402_300_800_000_000, -62_135_596_800_000_001])
@pytest.mark.parametrize("zone", ["UTC", None])
def test_times_at_and_beyond_the_ends_of_the_calendar_are_committed(
    location: Location, micros: int, zone: str | None
) -> None:
    schema = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", zone))])
    table = DeltaLakeTable(location, "shop.times")
    table.make(schema, {})
    folder = Path(table.folder("data").removeprefix("file://"))
    folder.mkdir(parents=True)
    rows = pa.table({"id": [1, 2], "at": pa.array([0, micros]).cast(schema.field("at").type)}, schema)
    pq.write_table(rows, folder / "a.parquet")

    commit(table, TableChange(added=[f"{table.folder('data')}/a.parquet"]), basis=table.version)

    assert pa.table(table.table.scan(columns=["id"]))["id"].to_pylist() == [1, 2]
    (action,) = table.files().values()
    assert (action["num_records"], action["min"]["id"], action["max"]["id"]) == (2, 1, 2)


@pytest.mark.parametrize("rule", ["delta.generationExpression", "delta.invariants", "delta.identity.start"])
def test_a_table_whose_columns_have_rules_is_not_written(location: Location, rule: str, tmp_path: Path) -> None:
    ruled = Field("next", PrimitiveType("long"), metadata={rule: "1"})
    DeltaTable.create(str(tmp_path / "ruled"), Schema([Field("id", PrimitiveType("long")), ruled]))
    table = DeltaLakeTable(location, str(tmp_path / "ruled"))

    with pytest.raises(Unsupported, match=rf"has {rule} of the column next, which Forebay does not write"):
        table.make(pa.schema([("id", pa.int64()), ("next", pa.int64())]), {})
