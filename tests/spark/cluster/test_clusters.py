"""Spark beyond one process: a standalone cluster that reads history from S3 and writes there, and Spark Connect."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

import forebay
from tests.cli.rig import one_line
from tests.spark.cluster.connect import connect_server
from tests.spark.cluster.driver import DriverOrders
from tests.spark.cluster.standalone import cluster
from tests.spark.mixed import ENVIRONMENT, Mixed, settings_file
from tests.spark.topics import Row
from tests.support import servers
from tests.support.environments import directories
from tests.support.servers import Server

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("clusters"), pytest.mark.timeout(900)]


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "seaweed").mkdir()
    with servers.seaweed(tmp_path / "seaweed") as server:
        yield server


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one Spark Connect server for the tests of this file."""
    with connect_server(tmp_path_factory.mktemp("connect"), os.environ) as address:
        yield address


def _seen(path: Path) -> list[Any]:
    """The rows that the driver has reported."""
    return [[*row[:5], json.loads(row[5] or "[]"), row[6]] for row in json.loads(path.read_text())]


def _told(row: Row) -> list[Any]:
    """A row as the driver shows it."""
    headers = [
        {"key": key, **({} if value is None else {"value": base64.b64encode(value).decode()})}
        for key, value in row["headers"]
    ]
    key, value = (None if part is None else part.hex().upper() for part in (row["key"], row["value"]))
    return [row["partition"], row["offset"], key, value, row["tag"], headers, row["timestamp"]]


def _contents(topic: forebay.Topic) -> list[str]:
    """What a topic holds, whatever the offsets."""
    records = [record for partition in range(topic.partitions) for record in topic.read(partition=partition)]
    return sorted(
        repr((each.partition, each.key, each.value, each.tag, each.headers, each.timestamp)) for each in records
    )


def test_standalone_cluster_reads_history_from_s3_and_writes_it_back_twice(
    tmp_path: Path, s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch, bulk load and stream: executors see the store alone, with credentials of their own environment."""
    plain = dict(os.environ)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    mixed = Mixed(directories.object_store(tmp_path, s3.endpoint, "cluster"))
    mixed.every_tier()
    mixed.export()
    copies = [mixed.log.create_topic(name, partitions=2) for name in ("shop/loaded", "shop/streamed")]
    place = {"settings": settings_file(mixed.environment)}
    with cluster(tmp_path, plain) as master:
        DriverOrders(
            master=master,
            read={**place, "topic": mixed.topic, "minPartitions": "4"},
            seen=str(tmp_path / "seen.json"),
            checkpoint=str(tmp_path / "checkpoint"),
            loaded={**place, "topic": "shop/loaded"},
            streamed={**place, "topic": "shop/streamed"},
            settings={
                "spark.executor.memory": "512m",
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                **{f"spark.executorEnv.{name}": value for name, value in ENVIRONMENT.items()},
            },
        ).run(os.environ)
        assert all(list((tmp_path / f"work-{worker}").glob("app-*/*")) for worker in range(2)), "both have worked"

    assert _seen(tmp_path / "seen.json") == [_told(row) for row in mixed.rows]
    for copy in copies:
        assert _contents(copy) == _contents(mixed.filled.topic)
    mixed.close()


def test_spark_connect_reads_batches_and_streams(tmp_path: Path, connect: str) -> None:
    mixed = Mixed(directories.shared_fs(tmp_path))
    mixed.every_tier()

    DriverOrders(
        master=connect,
        read=mixed.options,
        seen=str(tmp_path / "seen.json"),
        checkpoint=str(tmp_path / "checkpoint"),
        streamed_files=str(tmp_path / "streamed"),
    ).run(os.environ)

    assert _seen(tmp_path / "seen.json") == [_told(row) for row in mixed.rows]
    mixed.close()


PIPELINE: Final = """\
name: large
sources:
  - {name: orders, topic: shop/orders, format: json, schema: id BIGINT}
steps:
  - {name: large, sql: "SELECT id, count(*) AS times FROM orders WHERE id >= 90 GROUP BY id"}
  - {name: odd, sql: SELECT id FROM orders WHERE id % 2 = 1}
"""
STREAM: Final = "mode: streaming\ntrigger: availableNow\ncheckpoint: state\n"


def _ran(command_lines: Sequence[Sequence[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of commands that one client of Spark Connect runs after each other."""
    child = [sys.executable, "-m", "tests.spark.cluster.commands", json.dumps(command_lines)]
    ended = subprocess.run(child, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-8000:]
    return [(code, out, err) for code, out, err in json.loads(ended.stdout)]


def _ids(topic: forebay.Topic) -> list[int]:
    """The ids in the values of a topic, in order."""
    return sorted(json.loads(record.value or b"")["id"] for record in topic.read())


def test_commands_run_on_a_spark_connect_server(tmp_path: Path, connect: str) -> None:
    """Jobs and pipelines by `--master sc://…`: Spark Connect has no Spark context, no JVM and no functions of ours."""
    environment = directories.shared_fs(tmp_path)
    with environment.open("data") as log:
        for name in ("shop/orders", "shop/large", "shop/odd", "shop/changed"):
            log.create_topic(name)
        for _ in range(4):
            log.topic("shop/orders").append_many([b'{"id": %d}' % number for number in range(100)])
            log.export_topic("shop/orders")
    for name, text in {
        "batch": "sinks: [{name: large, from: large, topic: shop/large}]\n",
        "stream": f"{STREAM}sinks: [{{name: odd, from: odd, topic: shop/odd}}]\n",
        "changes": f"{STREAM}sinks: [{{name: changed, from: large, topic: shop/changed, output: update}}]\n",
    }.items():
        (tmp_path / f"{name}.yml").write_text(PIPELINE + text)
    (tmp_path / "more.json").write_text('{"id": 100}\n')
    common = ("--data", str(tmp_path / "data"), "--settings", settings_file(environment), "--master", connect)
    backfill = ("history", "backfill", "shop/orders", "--from", str(tmp_path / "more.json"), "--format", "json")

    compacted, filled, profiled, batch, stream, changes = _ran(
        [
            (*words, *common)
            for words in (
                ("history", "compact", "shop/orders", "--older-than", "0"),
                backfill,
                ("history", "profile", "shop/orders"),
                ("pipeline", "run", str(tmp_path / "batch.yml")),
                ("pipeline", "run", str(tmp_path / "stream.yml")),
                ("pipeline", "run", str(tmp_path / "changes.yml")),
            )
        ]
    )

    assert compacted[0] == 0 and "compact: 1 rewrite" in compacted[1], compacted
    assert filled[0] == 0 and "backfill: 1 records brought into shop/orders" in filled[1], filled
    assert profiled[0] == 0 and "profile: 401 records of 1 topics counted" in profiled[1], profiled
    assert batch[0] == 0 and "large: 11 rows to shop/large" in batch[1], batch
    assert stream[0] == 0 and "odd: 200 rows to shop/odd, 1 batches" in stream[1], stream
    assert changes[0] == 2 and one_line(changes[2]), changes
    assert "sink changed has `output: update`, which Spark Connect (sc://) cannot run" in changes[2]
    with environment.open("data") as log:
        assert _ids(log.topic("shop/large")) == list(range(90, 101))
        assert _ids(log.topic("shop/odd")) == sorted([*range(1, 100, 2)] * 4)
