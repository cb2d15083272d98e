"""Streaming pipelines run by Spark: exactly once through stops and restarts, and no query left behind a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import forebay
from forebay.errors import ForebayError, Invalid
from forebay.spark.pipelines.file.document import Flawed
from forebay.spark.pipelines.file.parsing import load_pipeline
from forebay.spark.pipelines.kinds.topic import into_topic
from forebay.spark.pipelines.outline import outline
from forebay.spark.pipelines.progress import SinkProgress
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import open_catalog
from forebay.spark.tables.open_table import OpenTable, QueryBatch
from tests.cli.rig import Shell
from tests.spark.pipelines import revenue
from tests.spark.pipelines.files import built, pipeline_of, records_of, running_of
from tests.spark.topics import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_example_of_revenue_is_exact_through_stops_and_restarts(spark: SparkSession, tmp_path: Path) -> None:
    home = revenue.shipped(tmp_path)
    shell, file = Shell(home / "data"), str(home / "revenue.yml")

    first = shell.ok("pipeline", "run", file, "--json").items[0]
    assert first["outcome"] == "done" and [sink["lag"] for sink in first["sinks"]] == [0, 0]
    revenue.add_orders(home, 600, 300)
    _run_until_stopped(spark, revenue.endless(home))
    revenue.add_orders(home, 900, 298)
    last = shell.ok("pipeline", "run", file, "--json").items[0]

    assert revenue.in_topic(home) == revenue.in_table(spark, home) == revenue.expected(1198)
    assert all(sink["rows"] for sink in last["sinks"])
    assert shell.ok("pipeline", "plan", file).out.count("goes on behind batch") == 2


def _run_until_stopped(spark: SparkSession, file: Path) -> None:
    """Run without an end, and be interrupted once something was written."""

    def interrupt(sinks: Sequence[SinkProgress]) -> None:
        if any(sink.rows for sink in sinks):
            raise KeyboardInterrupt

    running = running_of(load_pipeline(str(file)), interrupt)
    with _nothing_left(), pytest.raises(KeyboardInterrupt):
        running.run(spark)
    assert running.report.outcome == "stopped" and any(sink.rows for sink in running.report.sinks)


@contextmanager
def _nothing_left() -> Iterator[None]:
    """The block starts queries, and behind it none of them is active."""
    started: list[StreamingQuery] = []
    start = DataStreamWriter.start

    def noted(writer: DataStreamWriter) -> StreamingQuery:
        started.append(start(writer))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataStreamWriter, "start", noted)
        yield
    assert len(started) == 2 and [query.name for query in started if query.isActive] == []


_STREAM: Final = """\
name: p
mode: streaming
trigger: availableNow
checkpoint: state
location: {path: data}
sources:
  - name: orders
    topic: shop/orders
    format: json
    schema: id STRING, amount DOUBLE, at TIMESTAMP
steps:
  - name: sums
    sql: SELECT id AS shop, sum(amount) AS total FROM orders GROUP BY id
  - name: sorted
    sql: SELECT * FROM orders ORDER BY amount
sinks:
  - name: out
    from: sums
    topic: shop/out
    key: shop
    output: update
  - name: copy
    from: orders
    table: shop.copy
    format: iceberg
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A topic with a value that fits no schema at its end."""
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        topic = log.create_topic("shop/orders")
        topic.append_many([json.dumps({"id": f"s{number % 3}", "amount": 1.5}).encode() for number in range(30)])
        log.create_topic("shop/out")
    return tmp_path


@pytest.mark.parametrize(
    ("before", "after", "place", "text"),
    [
        ("output: update", "output: append", "18:11", "append"),
        ("from: orders", "from: sorted", "23:11", "Sorting is not supported"),
    ],
)
def test_what_cannot_run_as_a_stream_is_reported_before_any_query_starts(
    spark: SparkSession, home: Path, before: str, after: str, place: str, text: str
) -> None:
    pipeline = pipeline_of(home, _STREAM.replace(before, after))

    with pytest.raises(Flawed, match=text) as failure:
        built(spark, home, pipeline)

    assert failure.value.flaws[0].startswith(f"{home}/p.yml:{place}: sink ") and not (home / "state").exists()


def test_a_sink_that_fails_ends_the_others_and_says_where(spark: SparkSession, home: Path) -> None:
    with forebay.open(str(home / "data"), SETTINGS) as log:
        log.topic("shop/orders").append(b"{bad")
    running = running_of(pipeline_of(home, _STREAM))

    with (
        _nothing_left(),
        pytest.raises(ForebayError, match=r"sink (out|copy): source orders: .* at shop/orders\[0\] offset 30: {bad"),
    ):
        running.run(spark)

    assert running.report.outcome == "failed"
    # Once the source learns what to do with it, the same checkpoint goes on.
    pipeline = pipeline_of(home, _STREAM.replace("format: json\n", "format: json\n    badRecords: drop\n"))
    report = running_of(pipeline).run(spark)
    assert [sink.rows for sink in report.sinks] == [3, 30]
    assert sorted(row["_offset"] for row in _rows(home)) == list(range(30))
    values = [json.loads(record.value or b"") for record in records_of(home, "shop/out")]
    assert sorted((value["shop"], value["total"]) for value in values) == [("s0", 15.0), ("s1", 15.0), ("s2", 15.0)]


def test_a_topic_takes_a_batch_of_updates_once(spark: SparkSession, home: Path) -> None:
    started: Future[str] = Future()
    put = into_topic({"path": f"{home}/data", "topic": "shop/out"}, started)
    started.set_result("4b7e")
    rows = spark.createDataFrame([("a",), ("b",)], "value STRING")

    for number in (0, 0, 1, 0):
        put(rows, number)

    assert sorted(record.value or b"" for record in records_of(home, "shop/out")) == [b"a", b"a", b"b", b"b"]


def _rows(home: Path) -> list[dict[str, Any]]:
    """What other engines see of the table."""
    catalog = open_catalog(Location.of(home / "data"))
    found: list[dict[str, Any]] = catalog.load_table("shop.copy").scan().to_arrow().to_pylist()
    return found


def test_a_table_takes_a_batch_once_and_rows_of_a_run_as_a_whole(spark: SparkSession, home: Path) -> None:
    table = OpenTable(Location.of(home / "data"), "shop.copy")
    rows = spark.createDataFrame([(1, "a"), (2, "b")], "id BIGINT, name STRING")

    for number in (0, 0, 1, 0):
        table.put(rows, batch=QueryBatch("query", number))
    assert sorted(row["id"] for row in _rows(home)) == [1, 1, 2, 2]
    table.put(rows, batch=QueryBatch("another", 0))
    assert len(_rows(home)) == 6
    table.put(rows.limit(1), overwrite=True)
    assert len(_rows(home)) == 1
    table.put(rows)
    assert len(_rows(home)) == 3
    with pytest.raises(Invalid, match=r"shop.copy has the columns id, name, the rows have id: name another table"):
        table.put(rows.select("id"))
    table.close()

    flaws = (
        ("name: p\nmode: batch", "is there already: write `write: append` or `write: overwrite`"),
        ("name: p\nmode: streaming\ncheckpoint: state", None),
    )
    for head, flaw in flaws:
        text = f"{head}\nlocation: {{path: data}}\nsources:\n  - {{name: orders, topic: shop/orders}}\n"
        pipeline = pipeline_of(
            home, f"{text}sinks:\n  - {{name: a, from: orders, table: shop.copy, format: iceberg}}\n"
        )
        with pytest.raises(Flawed, match=flaw) if flaw is not None else nullcontext():
            outline(pipeline)


_MARKED: Final = """\
name: p
mode: streaming
trigger: availableNow
checkpoint: state
location: {path: data}
sources:
  - name: orders
    topic: shop/orders
    format: json
    schema: "amount INT, `NAMED` TIMESTAMP, shop STRING"
    watermark: {column: "GIVEN", delay: 1 minute}
steps:
  - name: sums
    sql: |
      SELECT sum(amount) AS total FROM orders GROUP BY window(`NAMED`, '1 minute')
sinks:
  - {name: out, from: sums, topic: shop/out}
"""


def test_the_column_of_a_watermark_may_have_a_dot_or_a_backtick_in_its_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark takes a dot there for a field of a struct, and knows no quotes."""
    name, given = "at.ti`me", "AT.ti`me"
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        log.create_topic("shop/out")
        times = ("2026-01-01T00:00:10Z", "2026-01-01T00:00:50Z", "2026-01-01T00:01:10Z", "2026-01-01T05:00:00Z")
        values = [json.dumps({name: time, "amount": 2, "shop": "a"}).encode() for time in times]
        log.create_topic("shop/orders").append_many(values)
    text = _MARKED.replace("NAMED", name.replace("`", "``")).replace("GIVEN", given)

    running_of(pipeline_of(tmp_path, text)).run(spark)

    # Groups that are final by the watermark are written, and the last one is not.
    totals = [json.loads(record.value or b"")["total"] for record in records_of(tmp_path, "shop/out")]
    assert sorted(totals) == [2, 4]
