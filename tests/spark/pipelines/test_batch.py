"""Batch pipelines run by Spark: formats in and out, what is wrong reported before a row is read, all or nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import fastavro
import pytest

import forebay
from examples.fill import clicks
from forebay.errors import ForebayError, Invalid
from forebay.spark.pipelines.file.document import Flawed
from forebay.spark.pipelines.progress import RunReport
from tests.cli.rig import Shell
from tests.spark.pipelines.files import built, pipeline_of, records_of, running_of
from tests.spark.pipelines.revenue import shipped
from tests.spark.topics import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

_AVRO: Final = {
    "type": "record",
    "name": "order",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "amount", "type": ["null", "double"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "lines", "type": {"type": "array", "items": "int"}},
    ],
}
_AT: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Topics with values of every format."""
    home = tmp_path_factory.mktemp("batch")
    with forebay.open(str(home / "data"), SETTINGS) as log:
        orders = log.create_topic("shop/orders", partitions=2)
        for number in range(20):
            value = json.dumps({"id": f"o{number}", "amount": number / 4, "at": _AT.isoformat()}).encode()
            orders.append(value, key=b"k%d" % (number % 3), tag="eu", partition=number % 2)
        odd = log.create_topic("shop/odd")
        odd.append_many([b'{"id": "good", "amount": 1}', b"{bad", b'{"id": "wrong", "amount": "x"}', None])
        avro = log.create_topic("shop/avro")
        for number in range(3):
            avro.append(_avro({"id": f"a{number}", "amount": None, "at": _AT, "lines": [number]}))
        avro.append(b"\xff")
        log.create_topic("shop/out", partitions=3)
        log.create_topic("shop/avro-out")
    (home / "order.avsc").write_text(json.dumps(_AVRO))
    yield home


def _avro(record: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, _AVRO, record)
    return stream.getvalue()


def _run(spark: SparkSession, home: Path, text: str) -> RunReport:
    return running_of(pipeline_of(home, text)).run(spark)


def _pipeline(source: str, rest: str) -> str:
    return f"name: p\nlocation: {{path: data}}\nsources:\n  - name: orders\n{source}\n{rest}"


_ORDERS: Final = "    topic: shop/orders\n    format: json\n    schema: id STRING, amount DOUBLE, at TIMESTAMP"
_ODD: Final = "    topic: shop/odd\n    format: json\n    schema: id STRING, amount DOUBLE"


def test_what_spark_does_not_take_is_reported_with_its_line_before_a_row_is_read(
    spark: SparkSession, home: Path
) -> None:
    table = "sinks:\n  - {name: out, from: step, table: t}"
    topic = "sinks:\n  - name: out\n    from: orders\n    topic: shop/out\n    "
    cases = {
        "steps:\n  - name: step\n    sql: |\n      SELECT id,\n        amout\n      FROM orders\n" + table: "12:9",
        "steps:\n  - name: step\n    sql: SELECT amout FROM orders\n" + table: "10:17",
        "steps:\n  - name: step\n    sql: SELECT nosuch(id) FROM orders\n" + table: "10:17",
        "steps:\n  - name: step\n    sql: SELECT id FROM orders GROUP id\n" + table: "10:38",
        "steps:\n  - name: step\n    sql: SELECT id + array(1) AS x FROM orders\n" + table: "10:17",
        topic + "key: concat(idd, 'x')": "12:17",
        topic + "partition: array(1)": "12:16",
        topic + "format: raw\n    value: idd || 'x'": "13:12",
    }
    found = {}
    for rest, place in cases.items():
        pipeline = pipeline_of(home, _pipeline(_ORDERS, rest))
        with pytest.raises(Flawed) as failure:
            built(spark, home, pipeline)
        found[rest] = (failure.value.flaws[0].removeprefix(f"{home}/p.yml:").split(": ")[0], place)

    assert {rest: places for rest, places in found.items() if places[0] != places[1]} == {}


def test_views_and_settings_of_a_pipeline_are_its_own(spark: SparkSession, home: Path) -> None:
    pipeline = pipeline_of(home, _pipeline(_ORDERS, "sinks:\n  - {name: out, from: orders, table: t}"))

    session = built(spark, home, pipeline)

    assert session.catalog.tableExists("orders") and not spark.catalog.tableExists("orders")
    assert session.conf.get("spark.sql.session.timeZone") == "UTC"
    assert session.conf.get("spark.sql.shuffle.partitions") == "2", "what somebody chose stays"


def test_rows_become_records_as_the_sink_says(spark: SparkSession, home: Path) -> None:
    report = _run(
        spark,
        home,
        _pipeline(
            _ORDERS,
            "steps:\n  - {name: few, sql: 'SELECT *, _offset AS place FROM orders WHERE amount >= 3'}\n"
            "sinks:\n  - name: out\n    from: few\n    topic: shop/out\n    key: id\n    tag: _tag\n"
            "    partition: place % 3\n    timestamp: at\n    value: [id, place]\n"
            "    headers: map('amount', cast(amount AS STRING))\n"
            "  - {name: table, from: few, table: few, partitionBy: _partition}\n",
        ),
    )

    expected = {(f"o{number}", number // 2) for number in range(12, 20)}
    records = records_of(home, "shop/out")
    assert {
        (json.loads(record.value or b"")["id"], json.loads(record.value or b"")["place"]) for record in records
    } == (expected)
    for record in records:
        value = json.loads(record.value or b"")
        assert record.key == value["id"].encode() and record.tag == "eu" and record.partition == value["place"] % 3
        assert record.timestamp == int(_AT.timestamp() * 1000)
        assert list(record.headers) == [("amount", str(int(value["id"][1:]) / 4).encode())]
    assert [sink.rows for sink in report.sinks] == [8, 8]
    table = spark.read.parquet(str(home / "few"))
    assert {(row.id, row.place) for row in table.collect()} == expected and "_partition" in table.columns
    assert [path.name for path in home.iterdir() if path.name.startswith(".")] == []


def test_values_that_do_not_fit_fail_the_run_or_are_dropped_or_kept(spark: SparkSession, home: Path) -> None:
    sink = "sinks:\n  - {name: out, from: orders, table: odd, write: overwrite}\n"
    with pytest.raises(ForebayError, match=r"sink out: .*shop/odd\[0\] offset [12]: .*; nothing was written"):
        _run(spark, home, _pipeline(_ODD, sink))
    assert not (home / "odd").exists()

    _run(spark, home, _pipeline(f"{_ODD}\n    badRecords: drop", sink))
    assert [row.id for row in spark.read.parquet(str(home / "odd")).orderBy("_offset").collect()] == ["good", None]

    _run(spark, home, _pipeline(f"{_ODD}\n    badRecords: keep", sink))
    kept = spark.read.parquet(str(home / "odd")).orderBy("_offset").collect()
    assert [(row.id, row._corrupt is None) for row in kept] == [
        *(("good", True), (None, False), ("wrong", False), (None, True))
    ]


@pytest.mark.parametrize("bad", ["fail", "drop", "keep"])
def test_a_column_may_have_a_dot_a_space_or_a_backtick_in_its_name(
    spark: SparkSession, tmp_path: Path, bad: str
) -> None:
    """With `badRecords: keep` a name with a dot was taken for a field of a struct."""
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        log.create_topic("shop/orders").append_many([b'{"a.b": 1, "c d": {"e.f": 2}, "g`h": "x"}'])
    schema = "`a.b` INT, `c d` STRUCT<`e.f`: INT>, `g``h` STRING"
    source = f"    topic: shop/orders\n    format: json\n    schema: '{schema}'\n    badRecords: {bad}"
    sinks = "sinks:\n  - {name: all, from: orders, table: all}\n  - {name: some, from: few, table: some}\n"
    few = source.replace("shop/orders", "shop/orders\n    columns: ['g`h', a.b]")
    text = _pipeline(source, sinks).replace("sinks:", f"  - name: few\n{few}\nsinks:", 1)

    _run(spark, tmp_path, text)

    (row,) = spark.read.parquet(str(tmp_path / "all")).collect()
    assert (row["a.b"], row["c d"]["e.f"], row["g`h"]) == (1, 2, "x")
    assert [tuple(row) for row in spark.read.parquet(str(tmp_path / "some")).collect()] == [("x", 1)]


def test_avro_in_and_out(spark: SparkSession, home: Path) -> None:
    source = "    topic: shop/avro\n    format: avro\n    schema: order.avsc"
    sink = (
        "sinks:\n  - name: out\n    from: orders\n    topic: shop/avro-out\n    format: avro\n    schema: order.avsc\n"
        "    value: [id, amount, at, lines]\n    key: id\n"
    )
    with pytest.raises(ForebayError, match=r"shop/avro\[0\] offset 3: not Avro of this schema"):
        _run(spark, home, _pipeline(source, sink))
    assert records_of(home, "shop/avro-out") == []

    _run(spark, home, _pipeline(f"{source}\n    badRecords: drop", sink))

    records = records_of(home, "shop/avro-out")
    assert sorted(record.value or b"" for record in records) == [
        _avro({"id": f"a{number}", "amount": None, "at": _AT, "lines": [number]}) for number in range(3)
    ]
    assert sorted(record.key or b"" for record in records) == [b"a0", b"a1", b"a2"]


def test_text_and_raw_values_and_several_topics(spark: SparkSession, home: Path) -> None:
    text = _pipeline(
        "    topics: [shop/orders, shop/odd]\n    format: text\n    endingOffsets: latest",
        "steps:\n  - name: counted\n    sql: SELECT topic, count(*) AS n, max(upper(value)) FROM orders GROUP BY 1\n"
        "sinks:\n  - {name: out, from: counted, table: counted, write: overwrite}\n",
    )

    _run(spark, home, text)
    _run(spark, home, text)

    rows = {row.topic: row.n for row in spark.read.parquet(str(home / "counted")).collect()}
    assert rows == {"shop/orders": 20, "shop/odd": 4}


def test_the_example_of_sessions_runs_as_shipped(spark: SparkSession, tmp_path: Path) -> None:
    home = shipped(tmp_path)

    said = Shell(home / "data").ok("pipeline", "run", str(home / "sessions.yml"), "--json")

    sessions = [json.loads(record.value or b"") for record in records_of(home, "web/sessions")]
    expected = _sessions()
    assert sorted((one["visitor"], one["session"], one["clicks"], one["entry"]) for one in sessions) == expected
    assert said.items[0]["sinks"][0]["rows"] == len(expected)


def _sessions() -> list[tuple[str, int, int, str]]:
    """The same, in plain Python."""
    found: dict[tuple[str, int], tuple[int, str]] = {}
    last: dict[str, tuple[datetime, int]] = {}
    for click in clicks(500):
        at, visitor = datetime.fromisoformat(click["at"]), click["visitor"]
        before, number = last.get(visitor, (datetime.min.replace(tzinfo=UTC), 0))
        number += at - before > timedelta(minutes=30)
        last[visitor] = (at, number)
        count, entry = found.get((visitor, number), (0, click["url"]))
        found[visitor, number] = (count + 1, entry)
    return sorted((visitor, number, count, entry) for (visitor, number), (count, entry) in found.items())


def test_a_query_that_spark_refuses_ends_the_command_with_its_line(spark: SparkSession, home: Path) -> None:
    rest = "steps:\n  - name: step\n    sql: SELECT amout FROM orders\nsinks:\n  - {name: out, from: step, table: t}\n"
    (home / "bad.yml").write_text(_pipeline(_ORDERS, rest))

    outcome = Shell(home / "data").run("pipeline", "plan", str(home / "bad.yml"), "--check")

    assert outcome.code == 2 and outcome.out == ""
    assert f"{home}/bad.yml:10:17: step step: " in outcome.err and "amount" in outcome.err
    assert issubclass(Flawed, Invalid) and outcome.err.count("\n") == 1
