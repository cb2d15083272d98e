"""Spark beyond one process: a standalone cluster that reads history from S3 and writes there, and Spark Connect."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from tests.blobs import servers
from tests.blobs.servers import Server
from tests.moves import rig
from tests.spark.cluster.connect import connect_server
from tests.spark.cluster.driver import Orders
from tests.spark.cluster.standalone import cluster
from tests.spark.mixed import ENVIRONMENT, Mixed, settings_file
from tests.spark.topics import Row

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "seaweed").mkdir()
    with servers.seaweed(tmp_path / "seaweed") as server:
        yield server


def _seen(path: Path) -> list[Any]:
    """The rows that the driver has told."""
    return [[*row[:5], json.loads(row[5] or "[]"), row[6]] for row in json.loads(path.read_text())]


def _told(row: Row) -> list[Any]:
    """A row as the driver tells it."""
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
    mixed = Mixed(rig.object_store(tmp_path, s3.endpoint, "cluster"))
    mixed.every_tier()
    mixed.export()
    copies = [mixed.log.create_topic(name, partitions=2) for name in ("shop/loaded", "shop/streamed")]
    place = {"settings": settings_file(mixed.land)}
    with cluster(tmp_path, plain) as master:
        Orders(
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


def test_spark_connect_reads_batches_and_streams(tmp_path: Path) -> None:
    mixed = Mixed(rig.shared_fs(tmp_path))
    mixed.every_tier()

    with connect_server(tmp_path, os.environ) as address:
        Orders(
            master=address,
            read=mixed.options,
            seen=str(tmp_path / "seen.json"),
            checkpoint=str(tmp_path / "checkpoint"),
            streamed_files=str(tmp_path / "streamed"),
        ).run(os.environ)

    assert _seen(tmp_path / "seen.json") == [_told(row) for row in mixed.rows]
    mixed.close()
