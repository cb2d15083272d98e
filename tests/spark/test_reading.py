"""Reading in Spark over all tiers and modes: its rows equal a plain computation, and filters are seen to be pushed."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from forebay.spark.options import ReadOptions
from forebay.spark.reader import PUSHDOWN, ForebayReader, Loaded, reader_for
from tests.history.test_servers_killed import Bucket
from tests.moves import rig
from tests.spark.mixed import TOPIC, Mixed, folder_of
from tests.spark.topics import TIME, Filled, Row, spark_rows

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
        land = rig.object_store(tmp_path, endpoint, folder_of(tmp_path))
    else:
        land = rig.local(tmp_path) if request.param == "local" else rig.shared_fs(tmp_path)
    mixed = Mixed(land)
    mixed.every_tier()
    yield mixed
    mixed.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    mixed = Mixed(rig.shared_fs(tmp_path_factory.mktemp("shared")))
    mixed.every_tier()
    yield mixed
    mixed.close()


def _load(spark: SparkSession, mixed: Mixed, **options: str) -> DataFrame:
    return spark.read.format("forebay").options(**{**mixed.options, **options}).load()


def test_rows_of_all_tiers_mixed_equal_a_plain_computation(spark: SparkSession, mixed: Mixed) -> None:
    frame = _load(spark, mixed)

    assert spark_rows(frame) == mixed.rows
    keyed = frame.where("key = cast('key-3' as binary)")
    assert spark_rows(keyed) == [row for row in mixed.rows if row["key"] == b"key-3"]


_FILTERS: list[tuple[str, str, Callable[[Row], bool]]] = [
    ("offset >= 3000 AND offset < 3300", "offset", lambda row: 3000 <= row["offset"] < 3300),
    (
        "partition = 1 AND offset IN (0, 3000)",
        "partition",
        lambda row: (row["partition"], row["offset"]) in ((1, 0), (1, 3000)),
    ),
    (f"timestamp > timestamp_millis({TIME + 4_000_000})", "timestamp", lambda row: row["timestamp"] > TIME + 4_000_000),
    ("key = cast('key-5' as binary)", "key", lambda row: row["key"] == b"key-5"),
    ("key IS NULL AND tag = 'tag-4-é'", "tag", lambda row: row["key"] is None and row["tag"] == "tag-4-é"),
    ("tag LIKE 'tag-2%'", "tag", lambda row: (row["tag"] or "").startswith("tag-2")),
    (f"topic = '{TOPIC}' AND offset < 5", "topic", lambda row: row["offset"] < 5),
]


@pytest.mark.parametrize(("where", "column", "test"), _FILTERS, ids=[each[0] for each in _FILTERS])
def test_filters_are_pushed_and_change_no_result(
    spark: SparkSession,
    shared: Mixed,
    capsys: pytest.CaptureFixture[str],
    where: str,
    column: str,
    test: Callable[[Row], bool],
) -> None:
    frame = _load(spark, shared).where(where)

    frame.explain("formatted")

    told = capsys.readouterr().out
    pushed = told.partition("PushedFilters: ")[2].partition("\n")[0]
    assert column in pushed
    assert ") Filter" not in told
    assert spark_rows(frame) == [row for row in shared.rows if test(row)]


def test_filters_that_are_not_pushed_are_applied_by_spark(
    spark: SparkSession, shared: Mixed, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = _load(spark, shared).where("offset > 3000 AND length(value) = 5 AND NOT tag <=> 'tag-2-é'")

    frame.explain("formatted")

    assert "Filter" in capsys.readouterr().out
    wanted = [row for row in shared.rows if row["offset"] > 3000 and len(row["value"] or b"") == 5]
    assert spark_rows(frame) == [row for row in wanted if row["tag"] != "tag-2-é"]


def test_without_push_down_spark_applies_the_filters(spark: SparkSession, shared: Mixed) -> None:
    spark.conf.set(PUSHDOWN, "false")
    try:
        assert _load(spark, shared).where("offset < 3").count() == 6
    finally:
        spark.conf.set(PUSHDOWN, "true")


def test_without_push_down_it_is_said_how_to_enable_it(shared: Mixed, caplog: pytest.LogCaptureFixture) -> None:
    """As Spark's planning calls it, which has the setting at hand."""
    options = ReadOptions.parse(shared.options)
    enable_pushdown = False

    reader = reader_for(inspect.currentframe(), options, Loaded.now(options), ("value",))

    assert enable_pushdown is False
    assert len(pickle.dumps(reader)) < 200, "it goes to every task: what was planned stays behind"
    assert type(reader) is ForebayReader
    assert f"set {PUSHDOWN} to true" in caplog.text


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


def test_history_alone_needs_no_directory(spark: SparkSession, tmp_path: Path) -> None:
    mixed = Mixed(rig.shared_fs(tmp_path))
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
        ({"broker": "http://here"}, "comes with the broker"),
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
