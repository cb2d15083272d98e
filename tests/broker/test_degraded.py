"""A shard that cannot be opened: its own routes say why, all others are served, and it comes back by itself."""

from __future__ import annotations

from pathlib import Path

import forebay
from forebay.format.metadata.keys import state_key
from forebay.metadata import Put
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


def test_a_damaged_index_of_one_segment_is_named_and_all_else_is_shown(tmp_path: Path) -> None:
    """The status of every topic, and all metrics, once failed by it."""
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        for name in ("orders", "other"):
            assert client.put(f"/v1/topics/shop/{name}", json={"durability": "fsync"}).status_code == 201
            assert client.post(f"/v1/topics/shop/{name}/records", json=[{"value": "v"}]).status_code == 200
        assert client.post("/v1/topics/shop/orders/rotate").is_success
        until(lambda: bool(list((tmp_path / "data" / "shards").rglob("*.idx"))))
        [index] = (tmp_path / "data" / "shards").rglob("*.idx")
        index.write_bytes(bytes(index.stat().st_size))

        status = client.get("/v1/status")
        assert status.status_code == 200, status.text
        found = {item["topic"]: item["export"] for item in status.json()["partitions"]}
        assert index.stem in found["shop/orders"]["error"]
        assert "forebay repair" in found["shop/orders"]["error"]
        assert found["shop/other"]["error"] is None
        assert client.get("/v1/topics/shop/orders/status").status_code == 200
        metrics = client.get("/metrics")
        assert metrics.status_code == 200
        assert "forebay_export_lag_bytes" in metrics.text
