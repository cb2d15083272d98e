"""Reading in Spark over all tiers and modes: its rows equal a plain computation, with `where` and without."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import Filter, LessThan

from forebay.errors import Invalid
from forebay.spark import read
from forebay.spark.reading.batch import Loaded, PushedReader, reader_for
from forebay.spark.reading.options import ReadOptions
from forebay.topics import TopicName
from tests.history.test_servers_killed import Bucket
from tests.spark.mixed import TOPIC, Mixed, folder_of
from tests.spark.topics import TIME, Filled, Row, spark_rows
from tests.support.environments import directories

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    bucket = Bucket(tmp_path_factory.mktemp("seaweed"))
    yield bucket
    bucket.kill()


@pytest.fixture(params=["local", "shared_fs", pytest.param("object_store", marks=pytest.mark.slow)])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mixed]:
    if request.param == "object_store":
        endpoint = request.getfixturevalue("bucket").endpoint
        environment = directories.object_store(tmp_path, endpoint, folder_of(tmp_path))
    else:
        environment = directories.local(tmp_path) if request.param == "local" else directories.shared_fs(tmp_path)
    mixed = Mixed(environment)
    mixed.every_tier()
    yield mixed
    mixed.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    mixed = Mixed(directories.shared_fs(tmp_path_factory.mktemp("shared")))
    mixed.every_tier()
    yield mixed
    mixed.close()


def _load(spark: SparkSession, mixed: Mixed, **options: str) -> DataFrame:
    return spark.read.format("forebay").options(**{**mixed.options, **options}).load()


def test_rows_of_all_tiers_mixed_equal_a_plain_computation(spark: SparkSession, mixed: Mixed) -> None:
    frame = _load(spark, mixed)

    assert spark_rows(frame) == mixed.rows
    keyed = _load(spark, mixed, where="key = 'key-3'")
    assert spark_rows(keyed) == [row for row in mixed.rows if row["key"] == b"key-3"]


_CONDITIONS: list[tuple[str, Callable[[Row], bool]]] = [
    ("offset >= 3000 AND offset < 3300", lambda row: 3000 <= row["offset"] < 3300),
    ("partition = 1 AND offset IN (0, 3000)", lambda row: (row["partition"], row["offset"]) in ((1, 0), (1, 3000))),
    (f"timestamp > timestamp_millis({TIME + 4_000_000})", lambda row: row["timestamp"] > TIME + 4_000_000),
    ("key = 'key-5'", lambda row: row["key"] == b"key-5"),
    ("key IS NULL AND tag = 'tag-4-é'", lambda row: row["key"] is None and row["tag"] == "tag-4-é"),
    ("tag LIKE 'tag-2%'", lambda row: (row["tag"] or "").startswith("tag-2")),
    (f"topic = '{TOPIC}' AND offset < 5", lambda row: row["offset"] < 5),
]


@pytest.mark.parametrize(("where", "test"), _CONDITIONS, ids=[each[0] for each in _CONDITIONS])
def test_where_shows_what_a_filter_of_sparks_shows(
    spark: SparkSession, shared: Mixed, where: str, test: Callable[[Row], bool]
) -> None:
    expected = [row for row in shared.rows if test(row)]

    assert spark_rows(_load(spark, shared, where=where)) == expected
    assert spark_rows(_load(spark, shared).where(where)) == expected


def test_where_and_columns_together(spark: SparkSession, shared: Mixed) -> None:
    """The column that is compared need not be among those that are shown."""
    place = {name: text for name, text in shared.options.items() if name != "topic"}

    frame = read(spark, TOPIC, where="tag = 'tag-2-é' AND offset < 3300", columns="value,offset", **place)
    listed = read(spark, TopicName.parse(TOPIC), where="offset < 3", columns=["value", "offset"], **place)

    assert (listed.columns, listed.count()) == (frame.columns, len([row for row in shared.rows if row["offset"] < 3]))
    assert frame.columns == ["value", "offset"]
    wanted = [row for row in shared.rows if row["tag"] == "tag-2-é" and row["offset"] < 3300]
    found = Counter((None if row.value is None else bytes(row.value), row.offset) for row in frame.collect())
    assert found == Counter((row["value"], row["offset"]) for row in wanted)


def test_where_leaves_out_what_need_not_be_read(spark: SparkSession, shared: Mixed) -> None:
    """Tasks are planned for the tier that may have such rows alone."""
    place = {name: text for name, text in shared.options.items() if name != "topic"}

    assert read(spark, TOPIC, minPartitions="4", **place).rdd.getNumPartitions() == 4
    assert read(spark, TOPIC, where="offset = 3000", minPartitions="4", **place).rdd.getNumPartitions() == 2
    assert read(spark, TOPIC, where="offset IS NULL", **place).count() == 0


def test_a_where_that_cannot_be_applied_is_refused(spark: SparkSession, shared: Mixed) -> None:
    place = {name: text for name, text in shared.options.items() if name != "topic"}
    wrong = "offset = 1 OR offset = 2"

    with pytest.raises(Invalid, match="OR stands where AND should"):
        read(spark, TOPIC, where=wrong, **place)
    with pytest.raises(PySparkException, match="OR stands where AND should"):
        _load(spark, shared, where=wrong)
    with pytest.raises(PySparkException, match="OR stands where AND should"):
        spark.readStream.format("forebay").options(**shared.options, where=wrong).load()


def test_any_other_filter_is_sparks_own(spark: SparkSession, shared: Mixed) -> None:
    frame = _load(spark, shared, where="offset > 3000").where("length(value) = 5 AND NOT tag <=> 'tag-2-é'")

    wanted = [row for row in shared.rows if row["offset"] > 3000 and len(row["value"] or b"") == 5]
    assert spark_rows(frame) == [row for row in wanted if row["tag"] != "tag-2-é"]


@pytest.mark.parametrize(
    ("version", "option", "takes"),
    [
        ("4.3.0", "true", False),
        ("4.3.7", "true", False),
        ("3.5.1", "true", False),
        ("unknown", "true", False),
        ("4.4.0", "false", False),
        ("4.4.0", "true", True),
        ("5.0.0.dev1", "true", True),
    ],
)
def test_filters_are_taken_only_from_a_spark_that_is_new_and_was_seen_to_keep_plans_apart(
    shared: Mixed, version: str, option: str, takes: object
) -> None:
    options = ReadOptions.parse({**shared.options, "where": "partition = 1", "pushFilters": option})

    reader = reader_for(options, Loaded.now(options), ("offset",), version)

    assert isinstance(reader, PushedReader) == takes
    asked: list[Filter] = [LessThan(("offset",), 3), LessThan(("value",), b"3")]
    assert list(reader.pushFilters(asked)) == (asked[1:] if takes else asked)
    read = [batch for split in reader.partitions() for batch in reader.read(split)]
    stop = 3 if takes else max(row["offset"] for row in shared.rows) + 1
    wanted = [row["offset"] for row in shared.rows if row["partition"] == 1 and row["offset"] < stop]
    assert [offset for batch in read for offset in batch.column(0).to_pylist()] == wanted
    assert len(pickle.dumps(reader)) < 200, "it goes to every task: what was planned stays behind"


def test_every_option_together(spark: SparkSession, shared: Mixed) -> None:
    moment = TIME + 1001 * 3000
    ends = json.dumps({TOPIC: {"0": 5000, "1": -1}})

    frame = _load(
        spark,
        shared,
        columns="offset,partition,timestamp",
        startingTimestamp=str(moment),
        endingOffsets=ends,
        minPartitions="3",
        failOnDataLoss="false",
    )

    assert frame.rdd.getNumPartitions() == 3
    first = {
        partition: min(
            row["offset"] for row in shared.rows if (row["partition"], row["timestamp"] >= moment) == (partition, True)
        )
        for partition in (0, 1)
    }
    expected = {
        (row["offset"], row["partition"])
        for row in shared.rows
        if row["offset"] >= first[row["partition"]] and (row["partition"] == 1 or row["offset"] < 5000)
    }
    assert {(row.offset, row.partition) for row in frame.collect()} == expected


def test_several_topics_are_one_frame(spark: SparkSession, shared: Mixed) -> None:
    other = Filled(shared.log, "shop/returns")
    other.many(50)
    options = {name: text for name, text in shared.options.items() if name != "topic"}

    frame = spark.read.format("forebay").options(topicPattern="shop/.*", **options).load()

    counts = {row["topic"]: row["count"] for row in frame.groupBy("topic").count().collect()}
    assert counts == {TOPIC: len(shared.rows), "shop/returns": 50}
    assert frame.where("topic = 'shop/returns'").count() == 50
    chosen = spark.read.format("forebay").options(topicPattern="shop/.*", where="topic LIKE 'shop/r%'", **options)
    assert chosen.load().count() == 50


def test_history_alone_needs_no_directory(spark: SparkSession, tmp_path: Path) -> None:
    mixed = Mixed(directories.shared_fs(tmp_path))
    mixed.filled.many(100)
    mixed.export()
    mixed.filled.many(10)

    reader = spark.read.format("forebay").option("store", f"file://{tmp_path}/store").option("topic", TOPIC)

    assert reader.option("metadata", f"sqlite://{tmp_path}/shared.sqlite").load().count() == 100
    mixed.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store.options.secret_access_key": "hush"}, "a secret, secret_access_key, as plain text"),
        ({"store.options.secret_access_key": "${NOT_SET}"}, r"variable NOT_SET, .*spark.executorEnv.NOT_SET"),
        ({"startingOffset": "earliest"}, "did you mean startingOffsets"),
        ({"maxOffsetsPerTrigger": "5"}, '"maxOffsetsPerTrigger" is for spark.readStream'),
        ({"broker": "http://here"}, '"path" and option "broker" contradict each other'),
        ({"wal.sync_intervals": "5"}, "did you mean wal.sync_interval_ms"),
        ({"startingTimestamp": "1", "startingOffsets": "earliest"}, "contradict each other"),
        ({"topicPattern": "shop/.*"}, "topic and topicPattern are given"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_named(spark: SparkSession, shared: Mixed, options: dict[str, str], message: str) -> None:
    with pytest.raises(PySparkException, match=message) as caught:
        _load(spark, shared, **options).count()

    assert "hush" not in str(caught.value)
