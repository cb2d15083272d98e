"""Spark through a broker: batch, stream, bulk load, table and pipeline, in one session, with faults in between."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import forebay
import forebay.spark
from forebay.clock import SystemClock
from forebay.service.tokens import Tokens
from forebay.spark.pipelines.file.document import Flawed
from tests.spark.mixed import TOPIC
from tests.spark.pipelines.files import pipeline_of, running_of
from tests.spark.served import Restarted, ServedMixed
from tests.spark.topics import SETTINGS, spark_rows
from tests.support.brokers import running_broker, server_settings
from tests.support.environments import directories
from tests.support.waiting import until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(params=["local", "shared_fs"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServedMixed]:
    mixed = ServedMixed(directories.local(tmp_path) if request.param == "local" else directories.shared_fs(tmp_path))
    yield mixed
    mixed.close()


def values(mixed: ServedMixed) -> list[str]:
    """What the topic holds, as its owner reads it."""
    return sorted((record.value or b"").decode() for record in mixed.filled.topic.read())


def test_batch_and_table_show_every_tier_while_it_is_compacted(spark: SparkSession, mixed: ServedMixed) -> None:
    mixed.every_tier()
    frame = spark.read.format("forebay").options(**mixed.by_broker).load()
    rows = mixed.rows
    assert spark_rows(frame) == rows

    mixed.export()
    mixed.compact()
    mixed.filled.many(20)

    assert spark_rows(frame) == rows, "the moment of its load"
    assert spark_rows(forebay.spark.table(spark, TOPIC, broker=mixed.broker.url)) == mixed.rows
    chosen = forebay.spark.read(spark, TOPIC, broker=mixed.broker.url, where="key = 'key-4'", columns="key,offset")
    assert chosen.count() == len([row for row in mixed.rows if row["key"] == b"key-4"])


def test_a_data_frame_comes_in_whole_and_repeats_of_a_batch_once(spark: SparkSession, mixed: ServedMixed) -> None:
    frame = spark.range(3000).selectExpr("cast(id as string) as value", "cast(id % 7 as string) as key").repartition(3)

    frame.write.format("forebay").options(**mixed.by_broker).mode("append").save()

    assert values(mixed) == sorted(str(number) for number in range(3000))
    for _ in range(2):
        batch = {"queryId": "0-a", "batchId": "4"}
        frame.limit(10).write.format("forebay").options(**mixed.by_broker, **batch).mode("append").save()
    assert len(values(mixed)) == 3010
    assert spark_rows(spark.read.format("forebay").options(**mixed.by_broker).load())


def test_a_stream_goes_on_while_its_broker_is_killed_and_its_topic_compacted(
    spark: SparkSession, tmp_path: Path
) -> None:
    broker = Restarted(tmp_path / "data")
    with broker.log() as log:
        log.create_topic(TOPIC, partitions=2)
        log.create_topic("shop/copies", partitions=2)
    where = {"broker": broker.command.url}
    stream = spark.readStream.format("forebay").options(**where, topic=TOPIC, startingOffsets="earliest").load()
    query = (
        stream.drop("topic", "offset")
        .writeStream.format("forebay")
        .options(**where, topic="shop/copies", checkpointLocation=str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        for number in range(3):
            with broker.log() as log:
                log.topic(TOPIC).append_many([b"%d" % (number * 100 + row) for row in range(100)])
            if number == 1:
                with broker.command.client() as client:
                    assert client.post(f"/v1/topics/{TOPIC}/export").status_code == 200
            broker.kill()
        query.processAllAvailable()
        until(lambda: len(_copied(broker)) >= 300)
    finally:
        query.stop()

    assert _copied(broker) == sorted(b"%d" % number for number in range(300))
    with broker.command:
        broker.command.end(signal.SIGTERM)


def _copied(broker: Restarted) -> list[bytes]:
    with broker.log() as log:
        return sorted(record.value or b"" for record in log.topic("shop/copies").read())


def test_a_pipeline_takes_a_broker_as_its_location(spark: SparkSession, mixed: ServedMixed, tmp_path: Path) -> None:
    mixed.filled.many(40, 0)
    mixed.log.create_topic("shop/counts")
    text = PIPELINE.format(url=mixed.broker.url)

    running_of(pipeline_of(tmp_path, text)).run(spark)

    (record,) = mixed.log.topic("shop/counts").read()
    assert record.value == b'{"rows":40}'
    with pytest.raises(Flawed, match="there is no topic shop/nothing in the broker at"):
        running_of(pipeline_of(tmp_path, text.replace("topic: shop/counts", "topic: shop/nothing")))
    with pytest.raises(Flawed, match='"path" and option "broker" contradict each other'):
        running_of(pipeline_of(tmp_path, text.replace("location:\n", "location:\n  path: data\n")))


PIPELINE = """\
name: counted
mode: batch
location:
  broker: {url}
sources:
  - name: orders
    topic: shop/orders
    format: raw
steps:
  - name: counts
    sql: SELECT count(*) AS rows FROM orders
sinks:
  - name: out
    from: counts
    topic: shop/counts
"""


def test_no_plan_and_no_log_line_of_spark_has_the_token(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with forebay.open(tmp_path / "data", SETTINGS) as log:
        log.create_topic(TOPIC).append_many([b"1", b"2"])
        tokens = Tokens(log.metadata, server_settings().metadata.prefix, SystemClock())
        secret = tokens.create("spark", scopes=["read", "write"], prefixes=["shop/"]).secret.reveal()
    (tmp_path / "token").write_text(secret)
    with running_broker(tmp_path / "data", server_settings(access="tokens")) as broker:
        where = {"broker": broker.url, "tokenFile": str(tmp_path / "token"), "topic": TOPIC}
        frame = spark.read.format("forebay").options(**where).load()
        frame.select("value").write.format("forebay").options(**where).mode("append").save()
        assert spark.read.format("forebay").options(**where).load().count() == 4
        frame.explain(extended=True)
        (tmp_path / "token").write_text("fbt_wrong")
        with pytest.raises(PySparkException) as refused:
            frame.count()

    seen = "".join((*capfd.readouterr(), str(refused.value)))
    assert "Physical Plan" in seen
    assert "Unauthenticated" in seen
    assert secret not in seen and "fbt_wrong" not in seen
