"""Writing from Spark: the rows of a DataFrame are in the topic, all of them or none, whichever caller owns it."""

from __future__ import annotations

import contextlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import forebay
import forebay.spark
from forebay.format.metadata.descriptor import LoadStatus
from forebay.loads.book import LoadBook
from forebay.partitioning import partition_of_key
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.spark.topics import SETTINGS
from tests.support.environments.directories import metadata_of

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]  # a busy machine starts Spark in a minute

TOPIC = "shop/orders"
ROWS = 3_000
FULL = [
    "cast(id AS string) AS value",
    "CASE WHEN id % 3 > 0 THEN cast(concat('key-', id % 17) AS binary) END AS key",
    "CASE WHEN id % 2 = 0 THEN concat('tag-', id % 5) END AS tag",
    "if(id % 7 = 0, array(named_struct('key', 'n', 'value', cast(cast(id AS string) AS binary))), null) AS headers",
    "timestamp_millis(1700000000000 + id) AS timestamp",
    "CASE WHEN id % 5 = 0 THEN cast(id % 3 AS int) END AS partition",
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        log.create_topic(TOPIC, partitions=3, compression="zstd")
    return tmp_path / "data"


def write(frame: DataFrame, path: Path, mode: str = "append", **options: str) -> None:
    chosen = {"path": str(path), "topic": TOPIC, "wal.free_bytes_min": "0", **options}
    frame.write.format("forebay").options(**chosen).mode(mode).save()


def records(path: Path) -> list[forebay.Record]:
    with forebay.open(str(path), SETTINGS) as log:
        return list(log.topic(TOPIC).read())


def _expected(number: int) -> tuple[Any, ...]:
    key = b"key-%d" % (number % 17) if number % 3 else None
    tag = None if number % 2 else f"tag-{number % 5}"
    headers = (("n", b"%d" % number),) if number % 7 == 0 else ()
    return b"%d" % number, key, tag, headers, 1_700_000_000_000 + number


def _told(found: list[forebay.Record]) -> list[tuple[Any, ...]]:
    return sorted((r.value, r.key, r.tag, r.headers, r.timestamp) for r in found)


@pytest.mark.parametrize("owner", ["nobody", "this process"])
def test_rows_are_in_the_topic_as_they_were_in_the_frame(spark: SparkSession, path: Path, owner: str) -> None:
    """With an owner, which is this very process as in a notebook, and without one."""
    frame = spark.range(ROWS, numPartitions=3).selectExpr(*FULL)
    with contextlib.ExitStack() as held:
        if owner == "this process":
            held.enter_context(forebay.open(str(path), SETTINGS))
        write(frame, path)
    found = records(path)

    assert _told(found) == sorted(map(_expected, range(ROWS)))
    for record in found:
        number = int(record.value or b"")
        if number % 5 == 0:
            assert record.partition == number % 3
        elif record.key is not None:
            assert record.partition == partition_of_key(record.key, 3)
    for partition in range(3):
        numbers = [int(r.value or b"") for r in found if r.partition == partition]
        assert numbers == sorted(numbers), "Spark's partitions one after the other, each in its order"


def test_what_was_written_is_read_back_by_spark_and_written_again(spark: SparkSession, path: Path) -> None:
    write(spark.range(ROWS, numPartitions=2).selectExpr(*FULL), path)
    read = spark.read.format("forebay").option("path", str(path)).option("topic", TOPIC).load()
    assert read.select(f.sum(f.expr("cast(cast(value AS string) AS long)"))).first() == (sum(range(ROWS)),)

    write(read.drop("topic", "offset"), path)

    counted = Counter((r.value, r.key, r.tag, r.headers, r.timestamp, r.partition) for r in records(path))
    assert set(counted.values()) == {2}
    assert len(counted) == ROWS


def test_nulls_are_records_without_value_and_no_rows_are_no_load(spark: SparkSession, path: Path) -> None:
    write(spark.createDataFrame([(None, b"k"), (b"", b"k")], "value binary, key binary"), path)
    write(spark.range(0).selectExpr("cast(id AS string) AS value"), path)

    assert [(r.value, r.key) for r in records(path)] == [(None, b"k"), (b"", b"k")]


def test_a_task_that_fails_leaves_nothing(spark: SparkSession, path: Path) -> None:
    """Others have finished and staged their rows by then, all but one that may still be at it: it is swept later."""
    frame = spark.range(ROWS, numPartitions=5).selectExpr(
        f"CASE WHEN id = {ROWS - 1} THEN raise_error('a bad row') ELSE cast(id AS string) END AS value"
    )

    with pytest.raises(PySparkException, match="a bad row"):
        write(frame, path)

    assert records(path) == []
    assert len(list((path / "loads").rglob("*.seg"))) < spark.sparkContext.defaultParallelism
    write(spark.range(10).selectExpr("cast(id AS string) AS value"), path)
    assert len(records(path)) == 10


def test_a_load_that_is_not_attached_fails_the_write_and_leaves_nothing(spark: SparkSession, path: Path) -> None:
    frame = spark.range(10, numPartitions=1).selectExpr("cast(id AS string) AS value", "0 AS partition")
    with forebay.open(str(path), SETTINGS) as log:
        inside(log).workers.cleanup.take_over()  # an owner that does not look for loads
        with pytest.raises(PySparkException, match="was not attached within 1 s.*nothing was added"):
            write(frame, path, attachTimeout="1")
        loads = [e.key for e in metadata_of(log).range("/forebay/loads/")]
        status = LoadBook(metadata_of(log), "/forebay", ManualClock()).get(loads[0].rpartition("/")[2]).load.status
        assert status is LoadStatus.ABANDONED

    assert records(path) == []


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("'k' AS key", {}, 'Invalid: there is no column "value", only key'),
        ("'v' AS value, 3 AS partition", {}, 'Invalid: column "partition" holds 3: the topic has 0 to 2'),
        ("repeat('x', 67108864) AS value", {}, r"Invalid: a record of \d+ bytes is larger than \d+: leave it out"),
        ("'v' AS value", {"topic": "shop/other"}, r'UnknownTopic: there is no topic shop/other.*create_topic\("shop'),
        ("'v' AS value", {"mode": "overwrite"}, r'Unsupported: mode\("overwrite"\) is not offered'),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_written_is_named(
    spark: SparkSession, path: Path, columns: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(PySparkException, match=message):
        write(spark.range(1).selectExpr(*[columns] if "(" in columns else columns.split(", ")), path, **options)

    assert records(path) == []


def test_history_in_a_store_is_written_without_a_directory(spark: SparkSession, tmp_path: Path) -> None:
    shared = {
        "storage": {"mode": "shared_fs"},
        "store": {"root": f"{tmp_path}/store"},
        "metadata": {"path": f"{tmp_path}/topics.sqlite"},
    }
    with forebay.open(str(tmp_path / "data"), {**SETTINGS, **shared}) as log:
        log.create_topic(TOPIC, partitions=3).append(b"-1")
    options = {"store": f"file://{tmp_path}/store", "metadata": f"sqlite://{tmp_path}/topics.sqlite", "topic": TOPIC}
    frame = spark.range(100).selectExpr("cast(id AS string) AS value", "cast(id AS string) AS key")

    frame.write.format("forebay").options(**options).mode("append").save()

    with forebay.open(str(tmp_path / "data"), {**SETTINGS, **shared}) as log:
        log.topic(TOPIC).append(b"100")
        assert sorted(int(r.value or b"") for r in log.topic(TOPIC).read()) == list(range(-1, 101))
    assert list(Path(tmp_path / "store").rglob("*.seg"))


def test_a_frame_and_a_stream_are_written_from_threads_that_did_not_make_the_session(
    spark: SparkSession, path: Path, tmp_path: Path
) -> None:
    """Spark's own call finds no source there: it looks by the session of the thread, and these have none."""
    place = {"path": str(path), "wal.free_bytes_min": "0"}
    rows = tmp_path / "rows"
    spark.range(100, 120).selectExpr("cast(id AS string) AS value").write.text(str(rows))

    def batch(number: int) -> None:
        frame = spark.range(10 * number, 10 * number + 10).selectExpr("cast(id AS string) AS value")
        assert forebay.spark.write(frame, TOPIC, **place) is None

    def stream() -> None:
        frame = spark.readStream.schema("value STRING").text(str(rows))
        query = forebay.spark.write(frame, TOPIC, **place, checkpointLocation=str(tmp_path / "state"))
        assert query is not None
        query.processAllAvailable()
        query.stop()

    with ThreadPoolExecutor(3) as pool:
        for done in [*(pool.submit(batch, number) for number in range(2)), pool.submit(stream)]:
            done.result()

    expected = [*range(20), *range(100, 120)]
    assert sorted(int(record.value or b"") for record in records(path)) == expected
