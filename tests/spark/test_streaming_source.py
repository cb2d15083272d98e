"""Streams inside Spark: each row once, over all tiers, whatever the owner does meanwhile; errors are named."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import forebay
from forebay.clock import SystemClock
from forebay.settings import RetentionSettings
from tests.ledger import Ledger
from tests.spark.mixed import Mixed
from tests.spark.topics import SETTINGS, Filled, Row, in_order
from tests.support.environments import directories
from tests.support.environments.directories import shard_of
from tests.support.processes import hear, tell

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_SECONDS = 240
NOTHING_KEPT = RetentionSettings(time_s=0, bytes_max=0, grace_s=0)


class Collected:
    """A sink that keeps the rows of each micro-batch, and what a batch gives when it is run again."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Row]] = {}

    def __call__(self, frame: DataFrame, batch: int) -> None:
        rows = [row.asDict(recursive=True) for row in frame.collect()]
        for row in rows:
            row["headers"] = [(pair["key"], pair["value"]) for pair in row["headers"] or ()]
            row["timestamp"] = round(row["timestamp"].astimezone(UTC).timestamp() * 1000)
        self.batches[batch] = rows

    @property
    def rows(self) -> list[Row]:
        """All rows so far, with no topic named: the tests that use it read one."""
        return in_order([_without_topic(row) for rows in list(self.batches.values()) for row in rows])


def _without_topic(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "topic"}


class Pipe:
    """A query that can be run again and again from its checkpoint."""

    def __init__(self, spark: SparkSession, checkpoint: Path, options: dict[str, str]) -> None:
        self._spark = spark
        self._checkpoint = checkpoint
        self._options = {"startingOffsets": "earliest", **options}
        self.sink = Collected()

    def start(self, *, now: bool, **options: str) -> StreamingQuery:
        stream = self._spark.readStream.format("forebay").options(**{**self._options, **options}).load()
        writer = stream.writeStream.option("checkpointLocation", str(self._checkpoint)).foreachBatch(self.sink)
        return (writer.trigger(availableNow=True) if now else writer).start()

    def run(self, **options: str) -> StreamingQuery:
        """Until all that is there now has been read."""
        query = self.start(now=True, **options)
        try:
            assert query.awaitTermination(WAIT_SECONDS)
        finally:
            query.stop()
        return query


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def log(path: Path) -> Iterator[forebay.Storage]:
    with forebay.open(str(path), SETTINGS) as opened:
        yield opened


@pytest.fixture
def pipe(spark: SparkSession, tmp_path: Path, path: Path) -> Pipe:
    return Pipe(spark, tmp_path / "checkpoint", {"path": str(path), "topic": "shop/orders"})


def test_rows_of_every_tier_come_once_and_agree_with_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    """Between runs from one checkpoint the owner appends, deletes, exports, drops local copies and attaches a load."""
    mixed = Mixed(directories.shared_fs(tmp_path, retention=NOTHING_KEPT))
    pipe = Pipe(spark, tmp_path / "checkpoint", mixed.options)
    mixed.every_tier()
    before = pipe.run(maxOffsetsPerTrigger="7000")
    first = mixed.rows
    assert pipe.sink.rows == first
    assert len(before.recentProgress) >= 2
    ends = [mixed.filled.topic.offsets(partition).next for partition in range(2)]

    mixed.delete(0, 100, 200)  # read already: a stream does not take back
    for partition in range(2):
        mixed.filled.many(2000, partition)
    mixed.delete(0, ends[0] + 500, ends[0] + 600)  # not read yet
    mixed.export()
    assert sum(shard_of(mixed.filled.topic, partition).history.retain() for partition in range(2)) > 0
    mixed.load(250)
    for partition in range(2):
        mixed.filled.singles(20, partition)
    pipe.run()

    new = [row for row in mixed.rows if row["offset"] >= ends[row["partition"]]]
    assert len(new) == 4000 - 100 + 500 + 40
    assert pipe.sink.rows == in_order([*first, *new])
    batch = spark.read.format("forebay").options(**mixed.options).load()
    assert {(row.partition, row.offset) for row in batch.select("partition", "offset").collect()} == {
        (row["partition"], row["offset"]) for row in mixed.rows
    }
    mixed.close()


_WRITER = """
import sys
from pathlib import Path
from forebay.settings import ExportSettings, RetentionSettings, WalSettings
from tests.support.environments import directories
wal = WalSettings(free_bytes_min=0, rotate_bytes_max=16384, sync_interval_ms=20)
environment = directories.shared_fs(Path(sys.argv[1]), wal=wal, export=ExportSettings(interval_s=1, bytes_min=0),
                                    retention=RetentionSettings(check_interval_s=1, time_s=0, bytes_max=0, grace_s=0))
with environment.open("one") as log:
    topic = log.create_topic("shop/orders", partitions=2)
    print("ready", flush=True)
    number = 0
    for line in sys.stdin:
        for _ in range(200):
            topic.append(b"%d" % number, partition=number % 2)
            number += 1
        topic.append_many([b"%d" % n for n in range(number, number + 2000)], partition=number % 2)
        number += 2000
        print(number, flush=True)
"""


def test_rows_come_whole_while_another_process_appends_exports_and_drops(spark: SparkSession, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WRITER, str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as writer:
        assert hear(writer) == "ready"
        options = {"path": str(tmp_path / "one"), "topic": "shop/orders", "maxBytesPerTrigger": "100000"}
        options |= {"metadata": f"sqlite://{tmp_path}/shared.sqlite", "store": f"file://{tmp_path}/store"}
        pipe = Pipe(spark, tmp_path / "checkpoint", options)
        query = pipe.start(now=False)
        try:
            for _ in range(6):
                tell(writer)
                acknowledged = int(hear(writer))
            _wait(query, pipe, acknowledged)
        finally:
            query.stop()
            assert writer.stdin is not None
            writer.stdin.close()
            assert writer.wait(60) == 0

    rows = pipe.sink.rows
    assert sorted(int(row["value"]) for row in rows) == list(range(acknowledged))
    for partition in (0, 1):
        offsets = [row["offset"] for row in rows if row["partition"] == partition]
        assert offsets == list(range(len(offsets)))


def _wait(query: StreamingQuery, pipe: Pipe, count: int) -> None:
    """Until the query has so many rows; what fails it fails here."""
    pause = threading.Event()
    for _ in range(WAIT_SECONDS * 10):
        if len(pipe.sink.rows) >= count or not query.isActive:
            break
        pause.wait(0.1)
    problem = query.exception()
    if problem is not None:
        raise problem
    assert len(pipe.sink.rows) >= count


def test_limits_hold_for_each_batch_and_the_progress_shows_the_lag(pipe: Pipe, log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders", partitions=2)
    filled.many(900, 0)
    filled.many(100, 1)

    query = pipe.run(maxOffsetsPerTrigger="300")

    progress = [json.loads(each.json) for each in query.recentProgress if each.numInputRows]
    assert [each["numInputRows"] for each in progress] == [300, 300, 300, 100]
    first = _ends(progress[0]["sources"][0]["endOffset"])
    assert first == {"0": 270, "1": 30}
    assert _ends(progress[0]["sources"][0]["latestOffset"]) == {"0": 900, "1": 100}
    assert pipe.sink.rows == in_order(filled.rows)

    filled.many(5, 0)
    query = pipe.run(maxBytesPerTrigger="1")
    assert {each.numInputRows for each in query.recentProgress} == {1}
    assert pipe.sink.rows == in_order(filled.rows)


def _ends(offset: Any) -> dict[str, int]:
    stored = json.loads(offset) if isinstance(offset, str) else offset
    return {name: point["offset"] for name, point in stored["topics"]["shop/orders"]["partitions"].items()}


def test_query_without_a_start_begins_at_the_end_and_meets_what_is_new(
    spark: SparkSession, tmp_path: Path, path: Path, log: forebay.Storage
) -> None:
    filled = Filled(log, "shop/orders")
    filled.many(50)
    options = {"path": str(path), "topicPattern": "shop/.*", "startingOffsets": "latest"}
    pipe = Pipe(spark, tmp_path / "checkpoint", options)
    pipe.run()
    assert pipe.sink.rows == []

    log.alter_topic("shop/orders", partitions=2)
    filled.many(5, 0)
    filled.many(7, 1)
    other = Filled(log, "shop/returns")
    other.many(9)
    Filled(log, "house/other").many(3)
    pipe.run()

    found = [row for rows in pipe.sink.batches.values() for row in rows]
    assert in_order([_without_topic(row) for row in found if row["topic"] == "shop/orders"]) == in_order(
        filled.rows[50:]
    )
    assert in_order([_without_topic(row) for row in found if row["topic"] == "shop/returns"]) == other.rows
    assert len(found) == 5 + 7 + 9


def test_query_begun_at_offsets_goes_on_from_its_checkpoint_whatever_became_of_them(
    spark: SparkSession, tmp_path: Path, path: Path, log: forebay.Storage
) -> None:
    """A partition and a topic that the offsets do not name come, and what they name goes: the checkpoint counts."""
    filled = Filled(log, "shop/orders")
    filled.many(50)
    starts = json.dumps({"shop/orders": {"0": 20}})
    options = {"path": str(path), "topicPattern": "shop/.*", "startingOffsets": starts}
    pipe = Pipe(spark, tmp_path / "checkpoint", options)
    pipe.run()
    assert [row["offset"] for row in pipe.sink.rows] == list(range(20, 50))

    log.alter_topic("shop/orders", partitions=2)
    filled.topic.delete_before(50, partition=0)
    filled.many(5, 0)
    filled.many(7, 1)
    other = Filled(log, "shop/returns")
    other.many(9)
    pipe.run()

    found = [row for rows in pipe.sink.batches.values() for row in rows]
    orders = in_order([_without_topic(row) for row in found if row["topic"] == "shop/orders"])
    assert orders == in_order(filled.rows[20:])
    assert [_without_topic(row) for row in found if row["topic"] == "shop/returns"] == other.rows
    fresh = Pipe(spark, tmp_path / "another", options)
    with pytest.raises(PySparkException, match='Invalid: option "startingOffsets" leaves out partition 1'):
        fresh.run()
    with pytest.raises(PySparkException, match='Invalid: option "startingOffsets" leaves out partition 1'):
        spark.read.format("forebay").options(**options).load().count()


def test_start_by_time_and_columns_of_a_stream(pipe: Pipe, log: forebay.Storage, spark: SparkSession) -> None:
    filled = Filled(log, "shop/orders")
    filled.many(100)
    moment = filled.rows[60]["timestamp"]
    stream = spark.readStream.format("forebay").options(**{**pipe._options, "columns": "offset,value"})
    del pipe._options["startingOffsets"]

    pipe.run(startingTimestamp=str(moment))

    assert pipe.sink.rows == filled.rows[60:]
    assert stream.load().columns == ["offset", "value"]


def test_a_stream_with_a_condition_has_each_row_that_meets_it_once(pipe: Pipe, log: forebay.Storage) -> None:
    """A micro-batch in which no record meets the condition has no rows, and the query goes on behind it."""
    filled = Filled(log, "shop/orders")
    filled.many(100)
    where = "key = 'key-10' AND offset < 150"

    progress = pipe.run(where=where).lastProgress
    filled.many(100)
    pipe.run(where=where, maxOffsetsPerTrigger="10")

    meeting = [row for row in filled.rows if row["key"] == b"key-10" and row["offset"] < 150]
    assert pipe.sink.rows == meeting
    assert progress is not None
    assert progress["numInputRows"] == len([row for row in meeting if row["offset"] < 100]) > 0
    assert len(pipe.sink.batches) == 1 + 10, "a limit counts what lies between the offsets"
    assert not pipe.sink.batches[10]


def test_topic_created_again_fails_the_query_by_name(pipe: Pipe, log: forebay.Storage) -> None:
    Filled(log, "shop/orders").many(10)
    pipe.run()
    log.delete_topic("shop/orders")
    Filled(log, "shop/orders").many(50)

    with pytest.raises(PySparkException, match="Conflict: shop/orders was deleted and created again"):
        pipe.run(failOnDataLoss="false")


def test_evicted_before_it_was_read_fails_unless_asked_to_go_on(pipe: Pipe, log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders")
    filled.many(100)
    pipe.run(maxOffsetsPerTrigger="100")
    filled.many(3000)
    filled.seal()
    filled.many(10)
    log.alter_topic("shop/orders", cap_records=10, allow_loss=True)
    shard_of(filled.topic).evict(SystemClock().now_ms())
    earliest = filled.topic.offsets(0).earliest
    assert earliest > 100

    with pytest.raises(PySparkException, match=rf"DataLoss: shop/orders\[0\]: .* at offset 100,.* is {earliest}"):
        pipe.run()
    pipe.run(failOnDataLoss="false")

    assert pipe.sink.rows == [row for row in filled.rows if row["offset"] < 100 or row["offset"] >= earliest]


def test_what_is_wrong_with_a_stream_is_named(pipe: Pipe, log: forebay.Storage, ledger: Ledger) -> None:
    Filled(log, "shop/orders").many(10)
    for options, message in (
        ({"endingOffsets": "latest"}, 'Invalid: option "endingOffsets" is for spark.read: a stream has no end'),
        ({"maxOffsetsPerTrigger": "0"}, 'Invalid: option "maxOffsetsPerTrigger" is .0.: allowed are 1 to'),
        ({"topic": "shop/none"}, "UnknownTopic: .*shop/none"),
        ({"startingOffsets": '{"shop/orders": {"0": 99}}'}, r"Invalid: shop/orders\[0\]: startingOffsets is 99"),
    ):
        with pytest.raises(PySparkException, match=message):
            pipe.run(**options)
        ledger.count("streams refused by name")
    assert pipe.sink.rows == []
