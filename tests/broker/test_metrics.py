"""Metrics of a broker: every name that is promised, with numbers that follow what happened."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.meter import Metric
from forebay.progress import ProgressStore
from forebay.storage import lags
from tests.support.brokers import running_broker, server_settings

SEED_NAMES = [
    "forebay_wal_append_latency_seconds",
    "forebay_wal_fsync_latency_seconds",
    "forebay_wal_bytes_written_total",
    "forebay_wal_cache_bytes",
    "forebay_wal_rotations_total",
    "forebay_export_cycle_seconds",
    "forebay_export_bytes_total",
    "forebay_export_objects_total",
    "forebay_export_errors_total",
    "forebay_history_query_seconds",
    "forebay_history_bytes_read_total",
    "forebay_metadata_put_seconds",
    "forebay_metadata_descriptor_writes_total",
]


def samples(client: httpx.Client) -> dict[str, float]:
    """Every sample, by its name and labels."""
    answer = client.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def total(found: dict[str, float], name: str, *parts: str) -> float:
    return sum(
        value for key, value in found.items() if key.startswith(f"{name}[") and all(part in key for part in parts)
    )


def _lags(client: httpx.Client, name: str = "forebay_subscription_lag") -> dict[tuple[str, str], float]:
    """By topic and subscription, or reader."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples if family.name == name else ():
            labels = sample.labels
            found[labels.get("topic", ""), labels.get("subscription", labels.get("reader", ""))] = sample.value
    return found


def test_lags_are_known_after_a_restart_before_anyone_comes(tmp_path: Path) -> None:
    settings = server_settings(metrics=["shop/*"])
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        for topic in ("shop/orders", "shop/returns", "other/t"):
            client.put(f"/v1/topics/{topic}", json={"partitions": 2})
            for name in ("billing", "audit"):
                client.put(f"/v1/topics/{topic}/subscriptions/{name}", json={"start": "earliest"})
            for partition, count in ((0, 30), (1, 12)):
                client.post(
                    f"/v1/topics/{topic}/records", json=[{"value": "x"}] * count, params={"partition": partition}
                )
        worker = "/v1/topics/shop/orders/subscriptions/billing/consumers/one"
        client.put(worker)
        assert len(client.post(f"{worker}/pull", json={"max": 5, "wait_ms": 30_000}).json()["records"]) == 5
        held = client.post(f"{worker}/pull", json={"max": 5, "wait_ms": 30_000}).json()["records"][0]["record"]
        acked = {str(held["partition"]): [held["offset"]]}
        assert client.post(f"{worker}/ack", json={"offsets": acked}).status_code == 200
        client.delete(worker)
        commit = {"topic": "shop/orders", "partition": 0, "offset": 10}
        assert client.post("/v1/groups/loader/commit", json=commit).status_code == 200
        assert client.post("/v1/groups/loader/commit", json={**commit, "topic": "other/t"}).status_code == 200

    # A subscription of one topic is what a reader of another is called.
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        behind = _lags(client)
        readers = _lags(client, "forebay_reader_lag")
        found = samples(client)
    assert behind == {
        ("", ""): 84,
        ("shop/orders", "billing"): 41,
        ("shop/orders", "audit"): 42,
        ("shop/returns", "billing"): 42,
        ("shop/returns", "audit"): 42,
    }
    assert readers == {("", ""): 20, ("shop/orders", "loader"): 20}
    assert total(found, "forebay_lag_age_seconds") < 60
    assert 0 < total(found, "forebay_disk_free_bytes", "data") == total(found, "forebay_disk_free_bytes", "log")


def test_a_store_that_does_not_answer_holds_up_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at stored cursors hangs: the numbers stay as they were, and grow old."""
    settings = server_settings(metrics=["shop/*"])
    hangs, go_on, every = threading.Event(), threading.Event(), ProgressStore.every

    def hang(store: ProgressStore) -> Any:
        hangs.set()
        assert go_on.wait(60)
        return every(store)

    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        client.put("/v1/topics/shop/orders")
        client.put("/v1/topics/shop/orders/subscriptions/billing", json={"start": "earliest"})
        client.post("/v1/topics/shop/orders/records", json=[{"value": "x"}] * 3)
        assert _lags(client) == {("", ""): 0, ("shop/orders", "billing"): 3}
        monkeypatch.setattr(lags, "LOOK_S", 0.0)
        monkeypatch.setattr(ProgressStore, "every", hang)
        try:
            client.get("/metrics")
            assert hangs.wait(60)
            client.post("/v1/topics/shop/orders/records", json=[{"value": "x"}] * 3)
            assert _lags(client) == {("", ""): 0, ("shop/orders", "billing"): 6}
            assert total(samples(client), "forebay_lag_age_seconds") > 0
        finally:
            go_on.set()


def test_every_promised_name_is_there_and_follows_what_happens(tmp_path: Path) -> None:
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        client.put("/v1/topics/shop/orders", json={"durability": "fsync"})
        before = samples(client)
        for number in range(3):
            client.post("/v1/topics/shop/orders/records", json=[{"value": f"{number}"}] * 10)
        client.get("/v1/topics/shop/orders/records")
        client.get("/v1/topics/shop/nothing")
        after = samples(client)
        text = client.get("/metrics").text
    names = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    wanted = {name.removesuffix("_total") for name in (*SEED_NAMES, *(metric.value for metric in Metric))}
    assert wanted <= {name.removesuffix("_total") for name in names}
    assert total(after, "forebay_wal_records_total") - total(before, "forebay_wal_records_total") == 30
    assert total(after, "forebay_wal_fsync_latency_seconds_count") > total(
        before, "forebay_wal_fsync_latency_seconds_count"
    )
    assert total(after, "forebay_http_requests_total", "append_records", "'200'") == 3
    assert total(after, "forebay_http_requests_total", "get_topic", "'404'") == 1
    assert total(after, "forebay_http_request_seconds_count", "append_records") == 3
    assert total(after, "forebay_ready") == 1
    assert total(after, "forebay_http_requests_in_flight") == 1
    assert total(after, "forebay_http_connections") >= 1


def test_no_address_or_topic_of_a_client_becomes_a_label(tmp_path: Path) -> None:
    settings = server_settings()
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        for number in range(20):
            client.get(f"/unknown/{number}/secret")
            client.put(f"/v1/topics/private/t{number}")
            client.request(f"METHOD{number}", "/v1/topics")
        first = client.get("/metrics").text
        assert "secret" not in first
        assert "private" not in first
        assert "METHOD" not in first


def test_topics_that_are_named_have_numbers_of_their_own(tmp_path: Path) -> None:
    settings = server_settings(metrics=["shop/*"])
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        for name in ("shop/orders", "bank/orders"):
            client.put(f"/v1/topics/{name}")
            client.post(f"/v1/topics/{name}/records", json=[{"value": "a"}])
        found = samples(client)
    assert total(found, "forebay_wal_records_total", "'shop/orders'") == 1
    assert total(found, "forebay_wal_records_total", "'bank/orders'") == 0
    assert total(found, "forebay_wal_records_total") == 2


def test_refusals_are_counted_by_their_reason(tmp_path: Path) -> None:
    settings = server_settings(streams_max=1, streams_per_principal_max=1)
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        client.put("/v1/topics/shop/orders")
        with client.stream("GET", "/v1/watch", params={"topic": "shop/orders"}):
            assert client.get("/v1/watch", params={"topic": "shop/orders"}).status_code == 429
            assert client.get(f"/{'a' * 20_000}").status_code == 414
            found = samples(client)
    assert total(found, "forebay_http_refused_total", "streams_per_principal_max") == 1
    assert total(found, "forebay_http_refused_total", "url_too_long") == 1
    assert total(found, "forebay_live_streams") == 1
