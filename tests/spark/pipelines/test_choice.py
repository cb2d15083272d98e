"""`where` and `columns` of a source: less is read, and the view has the same rows whichever way it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import forebay
from forebay.spark.pipelines.context import Context
from forebay.spark.pipelines.decoding import decoded
from forebay.spark.pipelines.kinds.topic import TopicSource
from forebay.spark.pipelines.outline import outline
from tests.spark.pipelines.files import flaws_of, pipeline_of, running_of
from tests.spark.topics import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIPELINE = """\
name: p
location: {path: data}
sources:
  - name: orders
    topic: shop/orders
    format: json
    schema: id STRING, amount INT
    where: tag = 'eu' AND offset < 8
    columns: [amount, _key]
  - {name: shops, table: shops, where: country LIKE 'D%', columns: shop}
sinks:
  - {name: out, from: orders, table: out}
  - {name: chosen, from: shops, table: chosen}
"""
STREAM = PIPELINE.replace("name: p\n", "name: p\nmode: streaming\ntrigger: availableNow\ncheckpoint: state\n")
STREAM = STREAM.partition("  - {name: chosen")[0]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        topic = log.create_topic("shop/orders")
        for number in range(12):
            value = json.dumps({"id": f"o{number}", "amount": number}).encode()
            topic.append(value, key=b"k%d" % number, tag="eu" if number % 2 else "us")
    (tmp_path / "shops").mkdir()
    pq.write_table(pa.table({"shop": ["a", "b"], "country": ["DE", "FR"]}), tmp_path / "shops" / "part.parquet")
    return tmp_path


def _read_options(home: Path, text: str) -> dict[str, str]:
    pipeline = pipeline_of(home, text)
    source = pipeline.sources[0]
    assert isinstance(source, TopicSource)
    options = source.read_options(Context(pipeline=pipeline, place={}))
    return {name: options[name] for name in ("where", "columns") if name in options}


def test_the_read_is_asked_for_no_more_than_is_needed(home: Path) -> None:
    where = "tag = 'eu' AND offset < 8"
    dropping = PIPELINE.replace("    where", "    badRecords: drop\n    where")
    raw = PIPELINE.replace("format: json\n    schema: id STRING, amount INT", "format: text")

    # Where a value does not fit, the message names its topic, partition and offset.
    assert _read_options(home, PIPELINE) == {"where": where, "columns": "key,value,topic,partition,offset"}
    assert _read_options(home, dropping) == {"where": where, "columns": "key,value"}
    assert _read_options(home, raw.replace("[amount, _key]", "[Offset, key]")) == {
        "where": where,
        "columns": "key,offset",
    }
    assert _read_options(home, STREAM) == _read_options(home, PIPELINE)


def test_texts_without_their_values_are_decoded_by_nothing(home: Path) -> None:
    text = PIPELINE.replace("format: json\n    schema: id STRING, amount INT", "format: text")
    source = pipeline_of(home, text.replace("[amount, _key]", "[Offset, key]")).sources[0]
    assert isinstance(source, TopicSource)
    records: Any = object()

    assert decoded(records, source) is records, "the read shows no value that could be made a text"


def test_the_plan_shows_what_is_chosen(home: Path) -> None:
    found = outline(pipeline_of(home, PIPELINE))

    orders, shops = found.sources
    assert (orders.where, orders.columns) == ("tag = 'eu' AND offset < 8", ("amount int", "_key binary"))
    assert [(extent.start, extent.stop) for extent in orders.extents] == [(0, 8)], "the read leaves out the rest"
    assert (shops.where, shops.columns) == ("country LIKE 'D%'", ("shop string",))
    assert "              where tag = 'eu' AND offset < 8\n" in "\n".join(found.lines())
    assert found.plain()["sources"][1]["where"] == "country LIKE 'D%'"


@pytest.mark.parametrize(
    ("before", "after", "flaw"),
    [
        ("[amount, _key]", "[amont, _key]", "p.yml:9:15: source orders has no column amont: did you mean amount?"),
        ("[amount, _key]", "[amount, Amount]", "p.yml:9:23: columns of source orders names Amount twice"),
        ("columns: shop", "columns: shp", "p.yml:10:68: source shops has no column shp: did you mean shop?"),
        ("tag = 'eu' AND", "amount = 3 AND", 'p.yml:8:12: source orders: option "where" cannot be applied at'),
        ("    where", "    options: {columns: key}\n    where", "p.yml:8:15: columns has a word of its own"),
        ("    where", "    options: {where: offset > 1}\n    where", "p.yml:9:12: where is given twice"),
        (
            "    where",
            "    watermark: {column: _timestamp, delay: 1 minute}\n    where",
            "p.yml:8:25: source orders has no column _timestamp",
        ),
    ],
)
def test_what_cannot_be_chosen_is_reported_with_its_line(home: Path, before: str, after: str, flaw: str) -> None:
    flaws = flaws_of(home, PIPELINE.replace(before, after), outline)

    assert [one for one in flaws if one.startswith(flaw)] != [], flaws


@pytest.mark.spark
@pytest.mark.slow
def test_a_batch_and_a_stream_show_the_same_rows(spark: SparkSession, home: Path) -> None:
    expected = [(number, b"k%d" % number) for number in (1, 3, 5, 7)]

    running_of(pipeline_of(home, PIPELINE)).run(spark)
    running_of(pipeline_of(home, STREAM.replace("table: out", "table: streamed"))).run(spark)

    for table in ("out", "streamed"):
        found = spark.read.parquet(str(home / table))
        assert found.columns == ["amount", "_key"]
        assert sorted((row["amount"], bytes(row["_key"])) for row in found.collect()) == expected
    assert [row["shop"] for row in spark.read.parquet(str(home / "chosen")).collect()] == ["a"]
