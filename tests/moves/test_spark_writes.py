"""Writes from Spark into topics that live in a bucket and in etcd, without a data directory; without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.loads.prepare import Sink
from forebay.spark.writing.delivery import deliver
from forebay.spark.writing.options import Target, WriteOptions, look
from tests.history.test_servers_killed import Bucket
from tests.moves.conftest import WITH_SERVERS
from tests.spark.test_writing_delivery import VALUES, staged
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment
from tests.support.etcd import Cluster
from tests.support.servers import ACCESS_KEY, SECRET_KEY

pytestmark = list(WITH_SERVERS)


@pytest.fixture
def shared(tmp_path: Path, bucket: Bucket, etcd: Cluster, folder: str) -> Environment:
    return directories.in_etcd(
        directories.object_store(tmp_path, bucket.endpoint, folder), etcd.endpoints, f"/{folder}"
    )


@pytest.fixture
def target(shared: Environment, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setenv("BUCKET_KEY", ACCESS_KEY)
    monkeypatch.setenv("BUCKET_SECRET", SECRET_KEY)
    with shared.open("A") as log:
        log.create_topic(TOPIC, partitions=3).append(b"early", partition=0)
    settings = shared.settings
    options = {
        "store": f"s3://{settings.store.root}",
        "metadata": settings.metadata.endpoints[0].replace("http://", "etcd://") + settings.metadata.prefix,
        "store.options.endpoint": bucket.endpoint,
        "store.options.region": "us-east-1",
        "store.options.allow_http": "true",
        "store.options.access_key_id": "${BUCKET_KEY}",
        "store.options.secret_access_key": "${BUCKET_SECRET}",
        "metadata.lease_ttl_s": "5",
        "metadata.lease_margin_s": "1",
        "wal.free_bytes_min": "0",
        "topic": TOPIC,
    }
    return look(WriteOptions.parse(options))


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["nobody", "a directory elsewhere"])
def test_a_batch_is_brought_once_into_a_bucket(shared: Environment, target: Target, owner: str) -> None:
    sink = Sink(query_id="query", batch_id=0)
    log = shared.open("A") if owner != "nobody" else None
    if log is not None:
        for partition in range(3):
            log.topic(TOPIC).append(b"mine", partition=partition)
    for load_id in ("first", "replay"):
        deliver(target, load_id, staged(target, load_id), sink)
    if log is not None:
        log.close()

    with shared.open("B") as other:
        gaps: list[object] = []
        values = [r.value or b"" for r in other.topic(TOPIC).read(on_gap=lambda partition, gap: gaps.append(gap))]

    assert sorted(value for value in values if value != b"mine") == sorted([*VALUES, b"early"])
    assert gaps == []
