"""A topic as one table: Spark's own scan of compacted history and the source behind it show what the topic shows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from forebay.errors import DataLoss, Invalid
from forebay.records import Gap, Reason
from forebay.spark import table
from forebay.spark.place.opening import opened
from forebay.spark.reading.options import Topics
from forebay.spark.reading.view import look
from forebay.spark.tables.as_frame import native_of
from forebay.topics import TopicName
from tests.compacting.directly import compacted, location_of
from tests.spark.mixed import TOPIC, Mixed, settings_file
from tests.spark.topics import Filled, in_order, rows_of, skip_offsets, spark_rows
from tests.support.environments.directories import Environment, local, shared_fs

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(params=["local", "shared_fs"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return local(tmp_path) if request.param == "local" else shared_fs(tmp_path)


def options_of(mixed: Mixed) -> dict[str, str]:
    return {name: text for name, text in mixed.options.items() if name != "topic"}


def natives(environment: Environment) -> list[tuple[int, int]]:
    """How far Spark reads each partition by itself, and in how many files."""
    location = location_of(environment)
    snapshot = look(location, Topics(names=(TopicName.parse(TOPIC),)))
    with opened(location) as found:
        made = [native_of(view, found, fail_on_data_loss=True) for view in snapshot.shards]
    return [(native.stop, len(native.files)) for native in made]


def test_a_table_shows_what_the_topic_shows_before_and_after_compaction(
    spark: SparkSession, environment: Environment
) -> None:
    mixed = Mixed(environment)
    mixed.every_tier()
    frame = table(spark, TOPIC, **options_of(mixed))
    before = natives(environment)
    assert all(stop < 3200 for stop, _ in before)
    assert spark_rows(frame) == mixed.rows

    compacted(environment, [TOPIC])
    assert all(stop >= 3200 and files for stop, files in natives(environment))
    frame = table(spark, TOPIC, **options_of(mixed))

    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "headers:array<struct<key:string,value:binary>>,tag:string>"
    )
    assert spark_rows(frame) == mixed.rows
    assert {row.topic for row in frame.select("topic").distinct().collect()} == {TOPIC}
    mixed.close()


@pytest.mark.slow
def test_a_table_lies_in_a_directory_of_any_name(spark: SparkSession, tmp_path: Path) -> None:
    """Its files are not taken for a pattern, which would find none, or those of another directory."""
    for root in (tmp_path / "abc", tmp_path / "a[b]{c,d}*?\\e"):
        root.mkdir()
        mixed = Mixed(local(root), partitions=1)
        for _ in range(2):
            mixed.filled.many(20)
            mixed.export()
        mixed.compact()
        mixed.filled.many(3)
        mixed.close()

    frame = table(spark, TOPIC, **options_of(mixed))

    assert natives(mixed.environment) == [(40, 1)]
    assert spark_rows(frame) == mixed.rows


def test_what_ends_after_the_compaction_is_left_out_of_the_files_too(spark: SparkSession, tmp_path: Path) -> None:
    mixed = Mixed(shared_fs(tmp_path))
    mixed.every_tier()
    compacted(mixed.environment, [TOPIC])
    mixed.delete(0, 100, 130)
    mixed.delete(1, 0, 5)
    mixed.filled.topic.delete_before(50, partition=1)
    gone = [row for row in mixed.rows if row["partition"] == 1 and row["offset"] < 50]

    frame = table(spark, TOPIC, **options_of(mixed))

    assert spark_rows(frame) == [row for row in mixed.rows if row not in gone]
    mixed.close()


def test_filters_and_columns_reach_sparks_own_scan(spark: SparkSession, tmp_path: Path) -> None:
    mixed = Mixed(shared_fs(tmp_path))
    mixed.every_tier()
    compacted(mixed.environment, [TOPIC])

    frame = table(spark, TOPIC, columns="offset,key", **options_of(mixed)).where("offset >= 2000 and offset < 3300")

    plan = str(frame._jdf.queryExecution().executedPlan().toString())
    assert "PushedFilters: [IsNotNull(offset), GreaterThanOrEqual(offset,2000)" in plan
    assert "value" not in plan
    found = Counter((row.offset, None if row.key is None else bytes(row.key)) for row in frame.collect())
    assert found == Counter((row["offset"], row["key"]) for row in mixed.rows if 2000 <= row["offset"] < 3300)
    mixed.close()


def test_where_reaches_both_parts_and_any_column(spark: SparkSession, tmp_path: Path) -> None:
    """The column that is compared need not be among those that are shown."""
    mixed = Mixed(shared_fs(tmp_path))
    mixed.every_tier()
    compacted(mixed.environment, [TOPIC])
    ends = [stop for stop, _ in natives(mixed.environment)]
    assert all(3000 < stop < 3400 for stop in ends)

    where = "key IN (X'6B65792D34', 'key-5') AND offset >= 3000 AND topic LIKE 'shop/%'"
    frame = table(spark, TOPIC, columns=["partition", "offset"], where=where, **options_of(mixed))

    plan = str(frame._jdf.queryExecution().executedPlan().toString())
    assert "GreaterThanOrEqual(offset,3000)" in plan
    found = sorted((row.partition, row.offset) for row in frame.collect())
    wanted = [row for row in mixed.rows if row["offset"] >= 3000 and row["key"] in (b"key-4", b"key-5")]
    assert found == [(row["partition"], row["offset"]) for row in wanted]
    assert {offset < ends[partition] for partition, offset in found} == {True, False}, "both parts have some"
    other = table(spark, TOPIC, where="topic = 'shop/other'", **options_of(mixed))
    assert other.count() == 0
    assert table(spark, TOPIC, where=None, columns=None, **options_of(mixed)).count() == len(mixed.rows)
    with pytest.raises(Invalid, match="OR stands where AND should"):
        table(spark, TOPIC, where="offset = 1 OR offset = 2", **options_of(mixed))
    mixed.close()


def test_a_loss_inside_compacted_history_is_named(spark: SparkSession, tmp_path: Path) -> None:
    environment = local(tmp_path)
    with environment.open("one") as log:
        filled = Filled(log, TOPIC)
        filled.many(100)
        filled.seal()
    skip_offsets(environment.root / "one", filled.topic.spec, Gap(100, 150, Reason.LOST))
    with environment.open("one") as log:
        filled.topic = log.topic(TOPIC)
        filled.rows += rows_of(filled.topic.read(150))
        filled.many(100)
        log.export_topic(TOPIC)
        filled.many(10)
    compacted(environment, [TOPIC])
    options = {"path": str(environment.root / "one"), "settings": settings_file(environment)}

    with pytest.raises(DataLoss, match=r"shop/orders\[0\]: offsets \[100, 150\)"):
        table(spark, TOPIC, **options)

    assert spark_rows(table(spark, TOPIC, failOnDataLoss="false", **options)) == in_order(filled.rows)


def test_offsets_are_chosen_by_where_alone(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="startingOffsets.*choose by where"):
        table(spark, TOPIC, path=str(tmp_path), startingOffsets="earliest")
