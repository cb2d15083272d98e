"""Lake: tables equal what the records say, bad rows stand aside with their reason, and nothing is there twice."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import forebay
from forebay.clock import SystemClock
from forebay.errors import Conflict, Fenced, Invalid, Unavailable
from forebay.metadata.leases import Lease, leased
from forebay.spark.jobs import lake
from forebay.spark.jobs.report import JobProgress, JobReport, Unseen
from forebay.spark.place.location import Location
from forebay.spark.place.opening import opened
from forebay.spark.tables.catalog import open_catalog
from forebay.spark.tables.delta import DeltaLakeTable
from forebay.spark.tables.delta_files import look_up_delta
from forebay.spark.tables.file_writer import Written
from forebay.spark.tables.lake_directory import DirectoryTarget
from forebay.spark.tables.lake_table import FOLDER, TableTarget
from forebay.spark.tables.targets import TableBatch, Unleased
from forebay.spark.tables.upkeep import own_folder
from forebay.spark.values.avro import AvroValues
from forebay.testing.inside import inside
from tests.ledger import Ledger
from tests.spark.jobs.lake_child import Halves, append, local_frame
from tests.spark.topics import SETTINGS, noted_reads
from tests.support import servers
from tests.support.servers import ACCESS_KEY, BUCKET, SECRET_KEY
from tests.support.soak import SOAK

pytestmark = pytest.mark.slow

SCHEMA: Final = "id BIGINT NOT NULL, total DOUBLE, at TIMESTAMP, lines ARRAY<STRUCT<sku: STRING, pieces: INT>>"
BAD: Final = (b"no json", b'{"id":"seven"}', None, b'{"total":1.5}', b"[1]")
AT: Final = datetime(2026, 11, 15, 12, 30, tzinfo=UTC)
Rows = list[dict[str, Any]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def log(path: Path) -> Iterator[forebay.Storage]:
    with forebay.open(str(path), SETTINGS) as opened:
        yield opened


class Orders:
    """A topic of JSON, and the rows that its tables must have."""

    def __init__(self, log: forebay.Storage) -> None:
        self.topic = log.create_topic("shop/orders", partitions=2)
        self.good: Rows = []
        self.bad: Rows = []
        self._count = 0

    def append(self, count: int) -> None:
        for number in range(self._count, self._count + count):
            lines = [{"sku": f"s{n}", "pieces": n} for n in range(number % 3)]
            order = {"id": number, "total": number / 2, "at": AT.isoformat(), "lines": lines}
            is_bad = number % 7 == 3
            value = BAD[number % len(BAD)] if is_bad else json.dumps(order).encode()
            partition, key = number % 2, b"k%d" % (number % 5)
            offset = self.topic.append(value, key=key, tag="eu", partition=partition)
            place = {"_partition": partition, "_offset": offset, "_key": key, "_tag": "eu"}
            if is_bad:
                self.bad.append({"partition": partition, "offset": offset, "key": key, "value": value})
            else:
                self.good.append({**place, **order, "at": AT})
        self._count += count


def _rows(table: pa.Table, *ordered_by: str) -> Rows:
    rows: Rows = table.drop_columns(["_timestamp" if "_timestamp" in table.column_names else "timestamp"]).to_pylist()
    return sorted(rows, key=lambda row: [row[name] for name in ordered_by])


def _directory_rows(directory: Path) -> tuple[Rows, Rows]:
    good = pq.read_table(str(directory / "data"))
    bad = pq.read_table(str(directory / "bad"))
    return _rows(good, "_partition", "_offset"), _rows(bad, "partition", "offset")


def delta_table(path: Path, name: str) -> DeltaLakeTable:
    table = DeltaLakeTable(Location.of(path), name)
    assert table.look()
    return table


def _table_rows(path: Path, name: str, kind: str = "table") -> tuple[Rows, Rows]:
    if kind == "delta":
        good, bad = (delta_table(path, table).table.to_pyarrow_table() for table in (name, f"{name}_bad"))
        return _rows(good, "_partition", "_offset"), _rows(bad, "partition", "offset")
    catalog = open_catalog(Location.of(path))
    try:
        good, bad = (catalog.load_table(table).scan().to_arrow() for table in (name, f"{name}_bad"))
    finally:
        catalog.close()
    return _rows(good, "_partition", "_offset"), _rows(bad, "partition", "offset")


def _check(found: tuple[Rows, Rows], orders: Orders) -> None:
    good, bad = found
    assert good == sorted(orders.good, key=lambda row: (row["_partition"], row["_offset"]))
    reasons = {row["error"] for row in bad}
    assert reasons == {"the value is not JSON of this schema", "the record has no value", "id is null or missing"}
    assert all(row.pop("error") and row.pop("topic") == "shop/orders" for row in bad)
    assert bad == sorted(orders.bad, key=lambda row: (row["partition"], row["offset"]))


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_json_into_a_directory_in_steps(spark: SparkSession, log: forebay.Storage, path: Path, tmp_path: Path) -> None:
    orders = Orders(log)
    orders.append(150)
    (tmp_path / "orders.ddl").write_text(SCHEMA)
    out = tmp_path / "out"

    def run(**options: Any) -> JobReport:
        schema = str(tmp_path / "orders.ddl")
        return lake.run(spark, Location.of(path), "shop/orders", directory=str(out), schema=schema, **options)

    planned = run(dry_run=True)
    nothing_yet = out.exists()
    first = run(commit_records=80)
    orders.append(60)
    second = run()
    third = run()

    assert planned.figures == {"offsets": 150} and not nothing_yet
    assert [part.figures for part in planned.parts] == [{"from": 0, "to": 75, "offsets": 75}] * 2
    assert (first.figures["commits"], first.figures["rows"], first.figures["bad_rows"]) == (2, 129, 21)
    assert [(part.figures["from"], part.figures["to"]) for part in second.parts] == [(75, 105)] * 2
    assert (third.figures["offsets"], third.figures["commits"]) == (0, 0)
    _check(_directory_rows(out), orders)
    assert spark.read.parquet(str(out / "data")).count() == len(orders.good)


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_json_into_a_table_that_gains_a_column(spark: SparkSession, log: forebay.Storage, path: Path) -> None:
    orders = Orders(log)
    orders.append(150)
    location = Location.of(path)

    lake.run(spark, location, "shop/orders", table="shop.typed", schema=SCHEMA)
    before = _table_rows(path, "shop.typed")
    orders.append(60)
    orders.topic.append(b'{"id": 1000, "note": "by hand"}', key=b"k", tag="us", partition=0)
    lake.run(spark, location, "shop/orders", table="shop.typed", schema=f"{SCHEMA}, note STRING")

    assert len(before[0]) == 129
    good, bad = _table_rows(path, "shop.typed")
    last = good.pop(next(place for place, row in enumerate(good) if row["note"]))
    assert (last["id"], last["note"], last["total"]) == (1000, "by hand", None)
    assert {row.pop("note") for row in good} == {None}
    _check((good, bad), orders)
    catalog = open_catalog(location)
    snapshots = catalog.load_table("shop.typed").snapshots()
    catalog.close()
    brought = [snapshot.summary["forebay.offsets"] for snapshot in snapshots if snapshot.summary]
    assert brought == ['{"0":[[0,75]],"1":[[0,75]]}', '{"0":[[75,106]],"1":[[75,105]]}']
    with pytest.raises(Invalid, match="column id of the table shop.typed is long, and the rows have string"):
        lake.run(spark, location, "shop/orders", table="shop.typed", schema="id STRING")


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_json_into_a_delta_table_by_its_path(
    spark: SparkSession, log: forebay.Storage, path: Path, tmp_path: Path
) -> None:
    orders = Orders(log)
    orders.append(40)
    out, location = str(tmp_path / "lake" / "orders"), Location.of(path)

    def run(schema: str = SCHEMA, **options: Any) -> JobReport:
        return lake.run(spark, location, "shop/orders", table=out, table_format="delta", schema=schema, **options)

    planned = run(dry_run=True)
    assert planned.figures["offsets"] == 40 and not Path(out).exists()
    first = run(commit_records=25)
    orders.append(20)
    second, third = run(), run()
    with pytest.raises(Invalid, match=f"column id of the table {out} is long, and the rows have string"):
        run("id STRING")

    figures = [(report.figures["commits"], report.figures["offsets"]) for report in (first, second, third)]
    assert figures == [(2, 40), (1, 20), (0, 0)]
    _check(_table_rows(path, out, "delta"), orders)
    assert next(delta_table(path, out).commits()) == {0: [(20, 30)], 1: [(20, 30)]}
    orders.topic.append(b'{"note": "by hand"}', partition=1)
    run("id BIGINT, total DOUBLE, note STRING")  # where no column is required, none can be missing
    assert [row["id"] for row in _table_rows(path, out, "delta")[0] if row["note"]] == [None]
    read = look_up_delta(location, out)
    assert read is not None
    rows = read.frame(spark).where("note IS NULL AND id >= 10").select("id", "lines").collect()
    assert sorted(row.id for row in rows) == [row["id"] for row in sorted(orders.good, key=_id) if row["id"] >= 10]


def _id(row: dict[str, Any]) -> int:
    return int(row["id"])


AVRO: Final[dict[str, Any]] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {"name": "lines", "type": {"type": "array", "items": {"type": "record", "name": "Line", "fields": [
            {"name": "sku", "type": "string"}]}}},
    ],
}  # fmt: skip


def _avro(record: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, AVRO, record)
    return stream.getvalue()


def _avro_order(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "note": None if number % 2 else f"note {number}",
        "at": AT,
        "price": Decimal(number) / 4,
        "tags": {"a": number},
        "lines": [{"sku": "x"}],
    }


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_avro_values_become_columns(spark: SparkSession, log: forebay.Storage, path: Path, tmp_path: Path) -> None:
    topic = log.create_topic("shop/orders")
    values = [_avro(_avro_order(number)) for number in range(40)]
    topic.append_many([*values, values[0] + b"more", values[0][:-3], None])
    (tmp_path / "order.avsc").write_text(json.dumps(AVRO))
    location = Location.of(path)

    report = lake.run(
        spark, location, "shop/orders", table="shop.avro", format="avro", schema=str(tmp_path / "order.avsc")
    )

    good, bad = _table_rows(path, "shop.avro")
    expected = [{**_avro_order(number), "tags": [("a", number)]} for number in range(40)]
    assert [{name: row[name] for name in expected[0]} for row in good] == expected
    assert [row["offset"] for row in bad] == [40, 41, 42] and report.figures["bad_rows"] == 3
    assert "4 bytes are left behind" in bad[0]["error"] and bad[2]["error"] == "the record has no value"


def test_an_avro_value_that_does_not_fit_costs_itself_alone() -> None:
    fields = [pa.field("id", pa.int64()), pa.field("price", pa.decimal128(5, 2))]
    kept = [field for field in AVRO["fields"] if field["name"] in ("id", "price")]
    schema = {**AVRO, "fields": kept}
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, schema, {"id": 1, "price": Decimal("1234567.25")})

    records, errors = AvroValues(schema, pa.struct(fields)).decode(pa.array([stream.getvalue(), None], pa.binary()))

    assert records.to_pylist() == [None, None]
    assert "has no place in its column" in errors[0].as_py() and errors[1].as_py() is None


IN_DIRECTORY: Final = ("files written", "before the manifest", "behind the manifest", "files in place", "second commit")
IN_TABLE: Final = ("files written", "before the side table", "between the tables", "behind the table", "second commit")
IN_DELTA: Final = (*IN_TABLE, "before Delta's commit", "behind Delta's commit")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps"), [("directory", IN_DIRECTORY), ("table", IN_TABLE), ("delta", IN_DELTA)])
def test_kills_at_every_step_leave_no_row_twice_and_none_out(
    path: Path, tmp_path: Path, kind: str, steps: tuple[str, ...], ledger: Ledger
) -> None:
    out, rounds = tmp_path / "out", 4 if SOAK else 1
    target = str(out) if kind == "directory" else kind

    def left() -> list[Path]:
        return list((out / "_staged").rglob("*.parquet")) if kind == "directory" else _strays(path, kind)

    said = _child(str(path), target, *(steps * rounds))
    assert left(), "within the grace of a day what killed runs left stays"
    _child(str(path), target, FOREBAY_TABLE__ORPHAN_GRACE_S="0")

    assert left() == []
    ledger.count("kills", len(steps) * rounds, target=kind)
    expected = sorted((partition, offset, value.encode()) for partition, offset, value in json.loads(said))
    good, bad = _directory_rows(out) if kind == "directory" else _table_rows(path, "shop.raw", kind)
    found = [(row["_partition"], row["_offset"], row["value"]) for row in good]
    found_bad = [(row["partition"], row["offset"], row["value"]) for row in bad]
    assert found == [row for row in expected if row[2].startswith(b"good")]
    assert found_bad == [row for row in expected if row[2].startswith(b"bad")]


def _child(*words: str, **environment: str) -> str:
    """What runs of lake say that are killed at these steps, and one that is not."""
    child = [sys.executable, "-m", "tests.spark.jobs.lake_child", *words]
    ended = subprocess.run(
        child,
        cwd=Path(__file__).parents[3],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _strays(path: Path, kind: str) -> list[Path]:
    if kind == "delta":
        tables = [delta_table(path, name) for name in ("shop.raw", "shop.raw_bad")]
        known = {address for table in tables for address in table.files()}
        return [file for file in path.rglob("data/lake/*.parquet") if f"file://{file}" not in known]
    catalog = open_catalog(Location.of(path))
    named = {
        name
        for table in ("shop.raw", "shop.raw_bad")
        for name in catalog.load_table(table).inspect.all_files()["file_path"].to_pylist()
    }
    catalog.close()
    return [file for file in path.rglob("data/lake/*/*.parquet") if file.as_uri() not in named]


BUCKET_SETTINGS: Final = """
table:
  orphan_grace_s: {grace_s}
  warehouse: s3://{bucket}/{prefix}
  uri: sqlite:///{catalog}
  options:
    s3.endpoint: "{endpoint}"
    s3.region: us-east-1
    s3.access-key-id: "${{TEST_KEY}}"
    s3.secret-access-key: "${{TEST_SECRET}}"
"""


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("frame_of", local_frame), ("decoding", lambda kind, schema: Halves())):
        monkeypatch.setattr(lake, name, value)


def _raw(location: Location, **options: Any) -> JobReport:
    return lake.run(None, location, "shop/orders", table="shop.raw", **options)  # type: ignore[arg-type]


def _fill_by_tag(log: forebay.Storage, step: int) -> list[tuple[int, str, bytes]]:
    """Sealed segments of one tag each, then records that are not sealed; those that have the tag "eu"."""
    topic = log.create_topic("shop/orders", exist_ok=True)
    found: list[tuple[int, str, bytes]] = []
    for tag in ("us", "eu", "asia", "both"):
        tags = [tag if tag != "both" else ("eu", "us")[number % 2] for number in range(100)]
        values = [b"%s %d %d" % (b"bad" if number % 5 == 0 else b"good", step, number) for number in range(100)]
        offsets = topic.append_many(values, tags=tags)
        if tag != "both":
            topic.rotate()
            inside(topic).segment(0).upkeep.seal_rotated()
        found += [row for row in zip(offsets, tags, values, strict=True) if row[1] == "eu"]
    return found


@pytest.mark.usefixtures("without_spark")
@pytest.mark.parametrize("kind", ["table", "delta", "directory"])
def test_a_condition_is_kept_by_the_table_and_no_other_is_taken(
    kind: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = noted_reads(monkeypatch)
    expected: list[tuple[int, str, bytes]] = []

    def run(where: str | None, **options: Any) -> JobReport:
        into: Any = {"directory": str(tmp_path / "out")} if kind == "directory" else {"table": "shop.eu"}
        if kind == "delta":
            into["table_format"] = "delta"
        return lake.run(None, Location.of(path), "shop/orders", **into, where=where, **options)  # type: ignore[arg-type]

    def check() -> None:
        good, bad = _directory_rows(tmp_path / "out") if kind == "directory" else _table_rows(path, "shop.eu", kind)
        rows = [(row["_offset"], row["_tag"], row["value"]) for row in good]
        rows += [(row["offset"], "eu", row["value"]) for row in bad]
        assert sorted(rows) == sorted(expected)

    with forebay.open(str(path), SETTINGS) as log:
        expected += _fill_by_tag(log, 1)
        with pytest.raises(Invalid, match="cannot be applied"):
            run("value = 'x'")
        planned = run("tag = 'eu'", dry_run=True)
        report = run("tag = 'eu'", commit_records=150)
        looked_at, steps = sum(read), report.figures["commits"]
        check()
        expected += _fill_by_tag(log, 2)
        again = run("( tag = 'eu' )")
        for other in (None, "tag = 'us'", "tag = 'eu' AND offset < 10"):
            for dry_run in (True, False):
                with pytest.raises(Conflict, match=r"takes the records where tag = 'eu', not .*: give the condition"):
                    run(other, dry_run=dry_run)
        last = run("tag = 'eu'")

    assert (planned.figures["offsets"], report.figures["offsets"], again.figures["offsets"]) == (400, 400, 400)
    assert (report.figures["rows"], report.figures["bad_rows"], last.figures["offsets"]) == (120, 30, 0)
    assert steps == 3 and looked_at < 300, "segments without the tag are not read"
    check()


@pytest.mark.usefixtures("without_spark")
@pytest.mark.parametrize("kind", ["table", "delta", "directory"])
def test_of_two_runs_without_a_lease_that_choose_otherwise_one_is_refused(
    kind: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As through a broker: the other comes between the look of the first and its commit."""
    into: Any = {"directory": str(tmp_path / "out")} if kind == "directory" else {"table": "shop.eu"}
    if kind == "delta":
        into["table_format"] = "delta"
    appended = append(str(path), "first")
    recover, others = TableTarget.recover, ["partition = 1"]

    def run(where: str, progress: JobProgress | None = None) -> JobReport:
        options: Any = {**into, "where": where, "progress": progress}
        return lake.run(None, Location.of(path), "shop/orders", **options)  # type: ignore[arg-type]

    def other() -> None:
        if others:
            run(others.pop())

    class BehindTheOther(Unseen):
        """It gets the total between the look and the first commit."""

        def total(self, amount: int) -> None:
            other()

    def recovered(target: TableTarget) -> None:
        other()
        recover(target)

    monkeypatch.setattr(lake, "leased", lambda *_, **__: contextlib.nullcontext(Unleased()))
    # A table has its condition from its making, a directory from its first commit.
    monkeypatch.setattr(TableTarget, "recover", recovered)

    with pytest.raises(Conflict, match="takes the records where partition = 1, not the records where partition = 0"):
        run("partition = 0", BehindTheOther())

    good, bad = _directory_rows(tmp_path / "out") if kind == "directory" else _table_rows(path, "shop.eu", kind)
    found = sorted((row["_offset"], row["value"].decode()) for row in good)
    found += [(row["offset"], row["value"].decode()) for row in bad]
    assert sorted(found) == sorted((offset, value) for partition, offset, value in appended if partition == 1)


@pytest.mark.usefixtures("without_spark")
@pytest.mark.parametrize("kind", ["table", "delta", "directory"])
def test_a_table_of_all_records_takes_no_condition(kind: str, path: Path, tmp_path: Path) -> None:
    append(str(path), "first")
    into: Any = {"directory": str(tmp_path / "out")} if kind == "directory" else {"table": "shop.raw"}
    if kind == "delta":
        into["table_format"] = "delta"
    lake.run(None, Location.of(path), "shop/orders", **into)  # type: ignore[arg-type]

    with pytest.raises(Conflict, match=r"takes all records, not the records where partition = 0, and does not go back"):
        lake.run(None, Location.of(path), "shop/orders", **into, where="partition = 0")  # type: ignore[arg-type]


@pytest.mark.usefixtures("without_spark")
def test_a_table_in_a_bucket(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", ACCESS_KEY)
    monkeypatch.setenv("TEST_SECRET", SECRET_KEY)
    appended = append(str(path), "first")
    with servers.moto(tmp_path) as server:

        def location(grace_s: int) -> Location:
            text = BUCKET_SETTINGS.format(
                grace_s=grace_s,
                bucket=BUCKET,
                prefix=path.parent.name,
                catalog=tmp_path / "catalog.db",
                endpoint=server.endpoint,
            )
            (tmp_path / "settings.yaml").write_text(text)
            return Location.of(path, tmp_path / "settings.yaml")

        report = _raw(location(3_600), commit_records=50)
        catalog = open_catalog(location(3_600))
        table = catalog.load_table("shop.raw")
        stray = f"{own_folder(table, FOLDER)}/{'5' * 32}.parquet"
        with table.io.new_output(stray).create() as file:
            file.write(b"of a run that was killed")
        again = _raw(location(3_600))
        in_grace = table.io.new_input(stray).exists()
        _raw(location(0))
        in_the_end = table.io.new_input(stray).exists()
        rows = _rows(catalog.load_table("shop.raw").scan().to_arrow(), "_partition", "_offset")
        catalog.close()

    assert (in_grace, in_the_end) == (True, False)
    assert (report.figures["commits"], report.figures["bad_rows"], again.figures["offsets"]) == (3, 26, 0)
    assert table.location().startswith("s3://") and not list(tmp_path.rglob("*.parquet"))
    expected = sorted((partition, offset, value) for partition, offset, value in appended if value.startswith("good"))
    assert [(row["_partition"], row["_offset"], row["value"].decode()) for row in rows] == expected


@pytest.mark.usefixtures("without_spark")
def test_snapshots_of_earlier_runs_are_expired_and_no_row_goes_with_them(path: Path) -> None:
    location = Location(path=str(path), overrides=(("table.snapshots_kept_max", "2"),))
    appended = append(str(path), "first")
    _raw(location, commit_records=30)
    for number in range(3):
        appended += append(str(path), f"later {number}", 10)
        report = _raw(location)

    assert report.figures["offsets"] == 10
    good, bad = _table_rows(path, "shop.raw")
    found = [(row["_partition"], row["_offset"], row["value"].decode()) for row in good]
    found += [(row["partition"], row["offset"], row["value"].decode()) for row in bad]
    assert sorted(found) == sorted(appended)
    catalog = open_catalog(location)
    for name in ("shop.raw", "shop.raw_bad"):
        assert len(catalog.load_table(name).snapshots()) == 3, "two that were kept, and that of the last run"
    catalog.close()


def test_one_run_at_a_time(log: forebay.Storage, path: Path) -> None:
    Orders(log)
    with opened(Location.of(path), read_only=False) as one, opened(Location.of(path), read_only=False) as other:
        clock = SystemClock()
        key = "/forebay/lakes/shop/orders"
        first = leased(one.metadata, key, "lake one", ttl_s=10, wait_s=0, clock=clock)
        second = leased(other.metadata, key, "lake two", ttl_s=10, wait_s=0, clock=clock)
        third = leased(other.metadata, key, "lake three", ttl_s=10, wait_s=0, clock=clock)
        with first, pytest.raises(Unavailable, match="lake two waits for lake one"), second:
            pass
        with third as held:
            held.check()
        with pytest.raises(Fenced, match="lost its lease"):
            held.check()


class _Held(Lease):
    """A lease that is asked at the last moment before a commit, when something may happen yet."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._meanwhile = meanwhile

    def check(self) -> None:
        self._meanwhile()


def test_of_two_commits_of_a_directory_one_is_refused(tmp_path: Path) -> None:
    one, other = (DirectoryTarget(str(tmp_path), grace_s=0) for _ in range(2))
    batch = TableBatch(topic="shop/orders", topic_id="x", offsets={0: (0, 10)}, files=())
    one.recover()
    other.recover()

    one.commit(batch, _Held())

    with pytest.raises(Conflict, match="commit 1 was made by another job"):
        other.commit(batch, _Held())
    assert other.marks().good == {0: 10}
    one.close()
    other.close()


def test_files_of_a_commit_whose_job_was_killed_come_into_place_before_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by a job that had lost its lease unnoticed, after the next one had recovered the directory."""
    late, other = (DirectoryTarget(str(tmp_path), grace_s=0) for _ in range(2))
    for target in (late, other):
        target.recover()
    staged = tmp_path / "_staged" / "a.parquet"
    staged.write_bytes(b"rows")
    files = (Written(False, f"file://{staged}", 1, 4),)
    monkeypatch.setattr(late, "place_files", lambda commit: None)
    late.commit(TableBatch(topic="shop/orders", topic_id="x", offsets={0: (0, 10)}, files=files), _Held())

    assert other.marks().good == {0: 10}
    other.commit(TableBatch(topic="shop/orders", topic_id="x", offsets={0: (10, 20)}, files=()), _Held())
    other.recover()

    assert [path.name for path in tmp_path.rglob("*.parquet")] == ["a.parquet"] and not staged.exists()
    late.close()
    other.close()


def test_old_commits_of_a_directory_go_and_the_last_one_shows_how_far_it_is(tmp_path: Path) -> None:
    target = DirectoryTarget(str(tmp_path), grace_s=1_000)
    target.recover()
    for start in range(0, 50, 10):
        target.commit(
            TableBatch(topic="shop/orders", topic_id="x", offsets={0: (start, start + 10)}, files=()), _Held()
        )
    commits = sorted((tmp_path / "_forebay").iterdir())
    for path in commits[:2]:
        os.utime(path, (1_000, 1_000))

    target.recover()
    assert sorted((tmp_path / "_forebay").iterdir()) == commits[2:]
    for path in commits[2:]:
        os.utime(path, (1_000, 1_000))
    target.recover()

    assert sorted((tmp_path / "_forebay").iterdir()) == commits[-1:]
    assert target.marks().good == {0: 50}
    target.close()


def test_a_file_that_is_gone_is_not_committed(tmp_path: Path) -> None:
    target = DirectoryTarget(str(tmp_path), grace_s=0)
    target.recover()
    files = (Written(False, f"file://{tmp_path}/_staged/gone.parquet", 1, 1),)

    with pytest.raises(Conflict, match="gone.parquet was removed before it was committed"):
        target.commit(TableBatch(topic="shop/orders", topic_id="x", offsets={0: (0, 10)}, files=files), _Held())

    assert target.marks().good == {}
    target.close()


def test_of_two_commits_of_a_table_one_is_refused(path: Path, log: forebay.Storage) -> None:
    from forebay.spark.values.decoding import RawDecoding  # noqa: PLC0415

    Orders(log)
    schema = RawDecoding().schema
    one, other = (TableTarget(Location.of(path), "shop.raw", schema) for _ in range(2))
    batch = TableBatch(topic="shop/orders", topic_id="x", offsets={0: (0, 10)}, files=())
    one.recover()
    other.recover()

    one.commit(batch, _Held())

    with pytest.raises(Conflict, match="was changed by another job"):
        other.commit(batch, _Held())
    other.recover()
    later = TableBatch(topic="shop/orders", topic_id="x", offsets={0: (10, 20)}, files=())
    with pytest.raises(Conflict, match="was changed by another job"):
        other.commit(later, _Held(lambda: one.commit(later, _Held())))
    catalog = open_catalog(Location.of(path))
    assert [len(catalog.load_table(name).snapshots()) for name in ("shop.raw", "shop.raw_bad")] == [2, 2]
    other.recover()
    last = TableBatch(topic="shop/orders", topic_id="x", offsets={0: (20, 30)}, files=())
    others: list[int] = []

    def change_otherwise() -> None:
        if not others:
            others.append(1)
            with catalog.load_table("shop.raw_bad").transaction() as change, change.update_snapshot().fast_append():
                pass

    other.commit(last, _Held(change_otherwise))
    assert [len(catalog.load_table(name).snapshots()) for name in ("shop.raw", "shop.raw_bad")] == [3, 4]
    assert other.marks().bad == other.marks().good == {0: 30}
    catalog.close()
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name one of them"),
        ({"table": "a.b", "directory": "c"}, "name one of them"),
        ({"directory": "c", "commit_records": 0}, "at least one"),
        ({"directory": "c"}, 'values of format "json" need a schema'),
        ({"directory": "c", "format": "raw", "schema": "id INT"}, "take no schema"),
        ({"directory": "c", "format": "xml", "schema": "id INT"}, "json, avro or raw"),
        ({"directory": "c", "schema": "nowhere.ddl"}, "cannot read the schema"),
    ],
)
def test_calls_that_make_no_sense_are_refused(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        lake.run(None, Location(path=str(path)), "shop/orders", **options)  # type: ignore[arg-type]


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_schemas_and_topics_that_do_not_fit_are_refused(
    spark: SparkSession, log: forebay.Storage, path: Path, tmp_path: Path
) -> None:
    Orders(log).append(10)
    location, out = Location.of(path), str(tmp_path / "out")
    for schema, message in (
        ("id BIGINTEGER", "is no schema of columns"),
        ("_offset INT", "a column _offset that the table has already"),
    ):
        with pytest.raises(Invalid, match=message):
            lake.run(spark, location, "shop/orders", directory=out, schema=schema)
    lake.run(spark, location, "shop/orders", directory=out, format="raw")
    log.delete_topic("shop/orders")
    log.create_topic("shop/orders").append(b"another life")
    with pytest.raises(Conflict, match="filled from another topic of the name"):
        lake.run(spark, location, "shop/orders", directory=out, format="raw")


def test_steps_hold_every_offset_once() -> None:
    missing = {0: (10, 110), 1: (0, 3), 2: (5, 5)}

    steps = list(lake.chunks(missing, 25))

    assert len(steps) == 5
    for partition, (start, end) in missing.items():
        covered = [offset for step in steps for offset in range(*step[partition])]
        assert covered == list(range(start, end))
    assert list(lake.chunks({}, 25)) == []
