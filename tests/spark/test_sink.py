"""The sink of streaming queries: every row once, whatever is killed and however often it is started again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import forebay
from forebay.errors import Conflict, Unsupported
from forebay.loads.prepare import Sink
from forebay.partitioning import partition_of_key
from forebay.spark.writing import writers
from forebay.spark.writing.delivery import TaskResult
from forebay.spark.writing.writers import QUERY_ID, WrittenBatch
from tests.ledger import Ledger
from tests.spark.killed_sink import STEPS, TOPIC, run
from tests.spark.topics import SETTINGS
from tests.support.soak import SOAK

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]  # a busy machine starts Spark in a minute

BATCHES: Final = 3
ROWS: Final = 500
KILLS: Final = [("offered", "nobody"), ("committed", "this process")]
EVERY_KILL: Final = [
    (step, owner)
    for step in STEPS
    for owner in ("nobody", "this process")
    if (step, owner) != ("attached", "this process")
]
"""Where this process owns the topic, it attaches and commits: no driver dies in between."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        log.create_topic(TOPIC, partitions=3)
    (tmp_path / "in").mkdir()
    for batch in range(BATCHES):
        _come_in(tmp_path, batch)
    return tmp_path


def _come_in(directory: Path, batch: int) -> None:
    """Rows for one more micro-batch."""
    numbers = pa.array(range(batch * ROWS, (batch + 1) * ROWS), pa.int64())
    pq.write_table(pa.table({"number": numbers}), directory / "in" / f"{batch}.parquet")


def _values(log: forebay.Storage) -> list[int]:
    records = list(log.topic(TOPIC).read())
    for record in records:
        assert record.partition == partition_of_key(record.key or b"", 3)
    return sorted(int(record.value or b"") for record in records)


def test_every_row_is_written_once_and_a_query_goes_on_where_it_was(spark: SparkSession, directory: Path) -> None:
    run(spark, directory, "forebay", 2)
    run(spark, directory, "forebay", 3)
    _come_in(directory, BATCHES)
    with forebay.open(str(directory / "data"), SETTINGS) as log:
        run(spark, directory, "forebay", 1)

        assert _values(log) == list(range((BATCHES + 1) * ROWS))


@pytest.mark.parametrize(("step", "owner"), EVERY_KILL if SOAK else KILLS)
def test_a_query_killed_at_any_step_of_its_sink_gives_every_row_once(
    spark: SparkSession, directory: Path, step: str, owner: str, ledger: Ledger
) -> None:
    """The batch is repeated by another driver in other tasks; rows are compared, not counted."""
    with contextlib.ExitStack() as held:
        if owner == "this process":
            held.enter_context(forebay.open(str(directory / "data"), SETTINGS))
        child = subprocess.run(
            [sys.executable, "-m", "tests.spark.killed_sink", step, str(directory)],
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # whichever caller dies takes its group along
            check=False,
        )
        assert child.returncode == -signal.SIGKILL
        run(spark, directory, "forebay", 3)

    with forebay.open(str(directory / "data"), SETTINGS) as log:
        found = _values(log)
    is_whole = found == list(range(BATCHES * ROWS))
    ledger.count("kills", figure="driver of a stream", step=step, owner=owner)
    ledger.violation("kills", n=int(not is_whole), figure="driver of a stream", step=step, owner=owner)
    assert is_whole, f"{len(found)} rows, {len(set(found))} of them different, of {BATCHES * ROWS}"


def test_a_result_that_is_replaced_as_a_whole_is_refused(spark: SparkSession, directory: Path) -> None:
    files = spark.readStream.schema("number long").parquet(f"{directory}/in")
    counted = files.groupBy("number").count().selectExpr("cast(count AS string) AS value")
    writer = counted.writeStream.format("forebay").options(path=f"{directory}/data", topic=TOPIC)

    with pytest.raises(PySparkException, match=r'outputMode\("complete"\) is not offered: a topic only grows'):
        writer.option("checkpointLocation", f"{directory}/c").outputMode("complete").start().processAllAvailable()


def test_without_the_ids_that_spark_shows_its_tasks_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untold:
        def getLocalProperty(self, name: str) -> str | None:  # noqa: N802 - Spark's name
            return "query" if name == QUERY_ID else None

    monkeypatch.setattr("forebay.spark.writing.writers.TaskContext.get", Untold)

    with pytest.raises(Unsupported, match="has not given its task the local property streaming.sql.batchId"):
        writers.sink_of_task()


def test_tasks_that_do_not_agree_on_their_batch_are_refused() -> None:
    def told(batch: int, load_id: str) -> WrittenBatch:
        result = TaskResult(load_id=load_id, number=0, staged=())
        return WrittenBatch(result, Sink(query_id="q", batch_id=batch), mock.sentinel.target)

    assert writers.agreed([told(3, "a"), told(3, "a")], 3)[1].batch_id == 3
    for messages in ([told(3, "a"), told(4, "a")], [told(3, "a"), told(3, "b")], [told(2, "a")], []):
        with pytest.raises(Conflict, match="nothing of it is brought in"):
            writers.agreed(messages, 3)
