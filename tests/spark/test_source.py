"""The source inside Spark: its rows equal a plain computation, whichever process holds the directory."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import forebay
from forebay.records import Gap, Reason
from forebay.spark.source import ForebayDataSource
from tests.spark.topics import SETTINGS, Filled, flip_a_bit, in_order, skip_offsets, spark_rows

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]  # starting Spark beside other work can take a minute


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def log(path: Path) -> Iterator[forebay.Storage]:
    with forebay.open(str(path), SETTINGS) as opened:
        yield opened


@pytest.fixture
def load(spark: SparkSession, path: Path) -> Callable[..., DataFrame]:
    def loaded(topic: str = "shop/orders", **options: str) -> DataFrame:
        return spark.read.format("forebay").options(**{"path": str(path), "topic": topic, **options}).load()

    return loaded


def test_rows_of_every_tier_equal_what_was_appended(load: Callable[..., DataFrame], log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders", partitions=3, compression="zstd")
    filled.every_tier()

    frame = load()

    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "headers:array<struct<key:string,value:binary>>,tag:string>"
    )
    assert spark_rows(frame) == in_order(filled.rows)


def test_aggregates_equal_a_plain_computation(load: Callable[..., DataFrame], log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders", partitions=2)
    filled.every_tier()

    counted = load().where("value is not null").groupBy("tag").agg(f.count("*"), f.sum(f.length("value")))

    present = [row for row in filled.rows if row["value"] is not None]
    counts = Counter(row["tag"] for row in present)
    lengths: Counter[str | None] = Counter()
    for row in present:
        lengths[row["tag"]] += len(row["value"])
    assert {tuple(row) for row in counted.collect()} == {(tag, counts[tag], lengths[tag]) for tag in counts}


@pytest.mark.proves("I32")
def test_a_data_frame_shows_the_moment_of_its_load(load: Callable[..., DataFrame], log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders", partitions=2)
    filled.many(100, 0)
    before = load()
    assert before.count() == 100

    filled.many(50, 1)
    filled.seal()
    filled.singles(10, 0)

    assert before.count() == 100
    assert before.join(before, ["partition", "offset"]).count() == 100
    assert load().count() == 160


_WRITER = """
import sys, forebay
log = forebay.open(sys.argv[1], {"wal": {"free_bytes_min": 0, "rotate_bytes_max": 16384}})
topic = log.create_topic("shop/orders", partitions=2)
number = 0
for line in sys.stdin:
    for _ in range(200):
        topic.append(b"%d" % number, partition=number % 2)
        number += 1
    topic.append_many([b"%d" % n for n in range(number, number + 3000)], partition=number % 2)
    number += 3000
    print(number, flush=True)
log.close()
"""


def test_rows_are_whole_while_another_process_writes(load: Callable[..., DataFrame], path: Path) -> None:
    """What was acknowledged before the load is there, in a row; the writer goes on meanwhile."""
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        for _ in range(4):
            writer.stdin.write("go\n")
            writer.stdin.flush()
            acknowledged = int(writer.stdout.readline())
            frame = load(columns="value,partition,offset")
            writer.stdin.write("go\n")
            writer.stdin.flush()

            _check_whole(frame, acknowledged)
            writer.stdout.readline()
        writer.stdin.close()
        assert writer.wait(60) == 0

    _check_whole(load(columns="value,partition,offset"), acknowledged + 3200)


def _check_whole(frame: DataFrame, acknowledged: int) -> None:
    rows = frame.collect()
    numbers = [int(row.value) for row in rows]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) >= set(range(acknowledged))
    for partition in (0, 1):
        offsets = sorted(row.offset for row in rows if row.partition == partition)
        assert offsets == list(range(len(offsets)))


def test_reading_leaves_the_directory_as_it_is(load: Callable[..., DataFrame], path: Path) -> None:
    with forebay.open(str(path), SETTINGS) as log:
        Filled(log, "shop/orders", partitions=2).every_tier()
    before = _contents(path)

    load().count()

    assert _contents(path) == before


def _contents(path: Path) -> dict[str, str]:
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("metadata.sqlite-"))
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_offsets_per_partition_bound_the_read(load: Callable[..., DataFrame], log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders", partitions=2)
    filled.every_tier()

    frame = load(
        startingOffsets='{"shop/orders": {"0": 2990, "1": -2}}', endingOffsets='{"shop/orders": {"0": -1, "1": 7}}'
    )

    wanted = [row for row in filled.rows if (row["offset"] >= 2990 if row["partition"] == 0 else row["offset"] < 7)]
    assert spark_rows(frame) == in_order(wanted)


def test_columns_narrow_the_schema_in_the_order_given(load: Callable[..., DataFrame], log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders")
    filled.many(10)

    frame = load(columns="offset, value")

    assert frame.columns == ["offset", "value"]
    assert [tuple(row) for row in frame.orderBy("offset").collect()] == [(r["offset"], r["value"]) for r in filled.rows]


def test_own_schema_narrows_as_columns_do(spark: SparkSession, path: Path, log: forebay.Storage) -> None:
    Filled(log, "shop/orders").many(10)
    reader = spark.read.format("forebay").option("topic", "shop/orders")

    assert reader.schema("partition int, offset long").load(str(path)).distinct().count() == 10
    with pytest.raises(PySparkException, match="the schema wants offset as string: it is bigint; cast it after"):
        reader.schema("offset string").load(str(path)).collect()


def test_min_partitions_makes_more_tasks(load: Callable[..., DataFrame], log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders", partitions=2)
    filled.every_tier()

    frame = load(minPartitions="5")

    assert frame.rdd.getNumPartitions() == 5
    assert load().rdd.getNumPartitions() == 1
    assert spark_rows(frame) == in_order(filled.rows)


def test_lost_offsets_fail_by_name_unless_asked_to_go_on(load: Callable[..., DataFrame], path: Path) -> None:
    with forebay.open(str(path), SETTINGS) as log:
        filled = Filled(log, "shop/orders")
        filled.many(10)
    skip_offsets(path, filled.topic.spec, Gap(10, 25, Reason.LOST))

    with pytest.raises(PySparkException, match=r"DataLoss: shop/orders\[0\]: offsets \[10, 25\) lost cannot be read"):
        load().count()
    assert load(failOnDataLoss="false").count() == 11


def test_flipped_bit_fails_by_name(load: Callable[..., DataFrame], path: Path) -> None:
    with forebay.open(str(path), SETTINGS) as log:
        filled = Filled(log, "shop/orders")
        filled.topic.append_many([b"victim" * 5000] * 10)
        filled.many(3000)
        filled.seal()
    flip_a_bit(path, b"victim" * 5000)

    with pytest.raises(PySparkException, match=r"DataLoss: shop/orders\[0\]: offsets \[0, 10\) damaged cannot be read"):
        load().collect()
    assert spark_rows(load(failOnDataLoss="false")) == filled.rows


def test_empty_topic_has_columns_and_nospark_rows(load: Callable[..., DataFrame], log: forebay.Storage) -> None:
    log.create_topic("shop/orders", partitions=2)

    frame = load()

    assert len(frame.columns) == 8
    assert frame.collect() == []


def test_source_is_found_by_name_and_may_be_registered(
    spark: SparkSession, load: Callable[..., DataFrame], log: forebay.Storage
) -> None:
    class Renamed(ForebayDataSource):
        @classmethod
        def name(cls) -> str:
            return "forebay_registered"

    Filled(log, "shop/orders").many(10)
    frame = load()
    spark.dataSource.register(Renamed)
    registered = spark.read.format("forebay_registered").options(**_options_of(log)).load()

    assert frame.count() == registered.count() == 10


def _options_of(log: forebay.Storage) -> dict[str, str]:
    assert log.path is not None
    return {"path": log.path, "topic": "shop/orders"}


def test_source_is_a_view_in_sql(spark: SparkSession, path: Path, log: forebay.Storage) -> None:
    Filled(log, "shop/orders").many(10)

    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW appended USING forebay OPTIONS (path '{path}', topic 'shop/orders')")

    assert spark.sql("SELECT count(*), max(offset) FROM appended").first() == (10, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "shop/other"}, "UnknownTopic: there is no topic shop/other"),
        ({"topic": "shop/memory"}, "Unsupported: shop/memory lives in the memory of its owner"),
        ({"path": "/nowhere"}, "Invalid: /nowhere is not a Forebay data directory"),
        (
            {"colour": "red"},
            'Invalid: option "colour" is not known to the forebay source: the options are path',
        ),
        ({"startingOffsets": "{bad"}, 'Invalid: option "startingOffsets" is'),
        ({"endingOffsets": '{"shop/orders": {"0": 11}}'}, "endingOffsets is 11, its end is at 10"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_named_by_load_itself(
    load: Callable[..., DataFrame], log: forebay.Storage, options: dict[str, Any], message: str
) -> None:
    log.create_topic("shop/memory", durability="ephemeral")
    Filled(log, "shop/orders").many(10)

    with pytest.raises(PySparkException, match=message):
        load(**options)
