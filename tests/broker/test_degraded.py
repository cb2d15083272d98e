"""A shard that cannot be opened: its own routes say why, all others are served, and it comes back by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.format.metadata.keys import state_key, topic_key
from forebay.metadata import Delete, Put
from tests.support.brokers import running_broker, server_settings
from tests.support.waiting import until


def test_routes_of_a_shard_that_cannot_be_opened_say_why_until_it_can(tmp_path: Path) -> None:
    settings = server_settings()
    key = state_key("shop", "orders", 1, prefix=settings.metadata.prefix)
    with forebay.open(tmp_path / "data", settings) as log:
        topic = log.create_topic("shop/orders", partitions=2)
        for partition in (0, 1):
            topic.append(b"first", partition=partition)
        entry = log.metadata.get(key)
        assert entry is not None
        log.metadata.transaction([], [Put(key, b"no state")])
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        records = "/v1/topics/shop/orders/records"
        ready = client.get("/v1/ready").json()
        assert [(each["topic"], each["partition"]) for each in ready["degraded"]] == [("shop/orders", 1)]
        assert client.get("/v1/health").json()["status"] == "degraded"
        for answer in (
            client.get(records, params={"partition": 1}),
            client.post(records, json=[{"value": "x"}], params={"partition": 1}),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (500, "corrupt")
            assert "a stored ShardState is not readable" in error["message"]
            assert "restore the metadata store from a backup" in error["message"]
        assert client.get(records, params={"partition": 0}).json()["records"][0]["value"] == "first"
        assert client.post(records, json=[{"value": "x"}], params={"partition": 0}).status_code == 200

        broker.metadata().transaction([], [Put(key, entry.value)])
        assert client.post(records, json=[{"value": "x"}], params={"partition": 1}).status_code == 200
        assert client.get("/v1/ready").json()["degraded"] == []
        assert client.get("/v1/health").json()["status"] == "ok"
        # It was opened, and is not degraded by being given up in order.
        broker.log().seal_topic("shop/orders")
        assert client.get("/v1/ready").json()["degraded"] == []


@pytest.mark.parametrize("by", ["the broker", "another process"])
def test_a_shard_of_a_deleted_topic_is_not_degraded_any_more(tmp_path: Path, by: str) -> None:
    settings = server_settings()
    key = state_key("shop", "orders", 0, prefix=settings.metadata.prefix)
    with forebay.open(tmp_path / "data", settings) as log:
        log.create_topic("shop/orders").append(b"first")
        entry = log.metadata.get(key)
        assert entry is not None
        log.metadata.transaction([], [Put(key, b"no state")])
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        assert client.get("/v1/health").json()["status"] == "degraded"
        assert "forebay_shards_degraded 1.0" in client.get("/metrics").text

        broker.metadata().transaction([], [Put(key, entry.value)])
        if by == "the broker":
            assert client.delete("/v1/topics/shop/orders").is_success
        else:
            broker.metadata().transaction([], [Delete(topic_key("shop", "orders", prefix=settings.metadata.prefix))])

        until(lambda: client.get("/v1/ready").json()["degraded"] == [])
        assert client.get("/v1/health").json()["status"] == "ok"
        assert "forebay_shards_degraded 0.0" in client.get("/metrics").text


def test_a_damaged_index_of_one_segment_is_named_and_all_else_is_shown(tmp_path: Path) -> None:
    """The status of every topic, and all metrics, once failed by it."""
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        for name in ("orders", "other"):
            assert client.put(f"/v1/topics/shop/{name}", json={"durability": "fsync"}).status_code == 201
            assert client.post(f"/v1/topics/shop/{name}/records", json=[{"value": "v"}]).status_code == 200
        assert client.post("/v1/topics/shop/orders/rotate").is_success
        until(lambda: bool(list((tmp_path / "data" / "shards").rglob("*.idx"))))
        [index] = (tmp_path / "data" / "shards").rglob("*.idx")

        def exports() -> dict[str, dict[str, Any]]:
            status = client.get("/v1/status")
            assert status.status_code == 200, status.text
            return {item["topic"]: item["export"] for item in status.json()["partitions"]}

        def is_seen() -> bool:
            """Damaged again at each look: the sealing that has just made the file may still be at it."""
            index.write_bytes(bytes(index.stat().st_size))
            return exports()["shop/orders"]["error"] is not None

        until(is_seen)
        found = exports()
        assert index.stem in found["shop/orders"]["error"]
        assert "forebay repair" in found["shop/orders"]["error"]
        assert found["shop/other"]["error"] is None
        assert client.get("/v1/topics/shop/orders/status").status_code == 200
        metrics = client.get("/metrics")
        assert metrics.status_code == 200
        assert "forebay_export_lag_bytes" in metrics.text
