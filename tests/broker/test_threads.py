"""The threads of a broker: reads that hang stop neither administration nor the reads of other callers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

import forebay
from forebay.aio.workers import READ
from forebay.clock import SystemClock
from forebay.service.principals import AccessScope
from forebay.service.tokens import Tokens
from forebay.storage import Topic
from tests.support.brokers import RunningBroker, running_broker, server_settings
from tests.support.waiting import PATIENCE, until

WAITING_MAX = 2
THREADS = READ.share + WAITING_MAX
CALLERS = ("one", "two")


class HangingReads:
    """Reads of the topic `shop/history` find nothing in memory, and hang until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.go_on = threading.Event()
        cached, read = Topic.batch_page_cached, Topic.batch_page

        def batch_page_cached(topic: Topic, *args: Any, **options: Any) -> Any:
            return None if topic.name == "shop/history" else cached(topic, *args, **options)

        def batch_page(topic: Topic, *args: Any, **options: Any) -> Any:
            if topic.name == "shop/history":
                self.begun += 1
                assert self.go_on.wait(PATIENCE)
            return read(topic, *args, **options)

        monkeypatch.setattr(Topic, "batch_page_cached", batch_page_cached)
        monkeypatch.setattr(Topic, "batch_page", batch_page)


class Served(NamedTuple):
    broker: RunningBroker
    secrets: dict[str, str]

    def client(self, caller: str) -> httpx.Client:
        client = self.broker.client()
        client.headers["authorization"] = f"Bearer {self.secrets[caller]}"
        return client


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    settings = server_settings(access="tokens", reads_waiting_per_principal_max=WAITING_MAX)
    with forebay.open(tmp_path / "data") as log:
        tokens = Tokens(log.metadata, settings.metadata.prefix, SystemClock())
        secrets = {
            name: tokens.create(name, scopes=tuple(AccessScope), prefixes=["*"]).secret.reveal() for name in CALLERS
        }
        for name in ("shop/history", "shop/orders"):
            log.create_topic(name).append(b"first")
    with running_broker(tmp_path / "data", settings) as broker:
        yield Served(broker, secrets)


def test_hanging_reads_of_one_caller_stop_neither_administration_nor_other_callers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = HangingReads(monkeypatch)
    with served.client("one") as one, served.client("two") as two, ThreadPoolExecutor(THREADS) as pool:
        try:
            address = "/v1/topics/shop/history/records"
            hanging: list[Future[httpx.Response]] = [pool.submit(one.get, address) for _ in range(THREADS)]
            until(lambda: reads.begun == READ.share, 60)
            traffic = served.broker.process.broker.traffic
            until(lambda: traffic.under_way == len(hanging), 60)
            answer = one.get(address)
            assert answer.status_code == 429, answer.text
            assert answer.json()["error"]["detail"]["limit"] == "server.reads_waiting_per_principal_max"
            assert answer.headers["retry-after"] == "1"
            for client in (one, two):
                assert client.put("/v1/topics/shop/new", json={"exist_ok": True}).is_success
                assert client.get("/v1/topics").status_code == 200
                assert client.get("/v1/status").status_code == 200
                assert client.post("/v1/topics/shop/orders/records", json=[{"value": "x"}]).status_code == 200
                found = client.get("/v1/topics/shop/orders/records", params={"start": 1})
                assert found.status_code == 200, "what was appended just now is in memory"
            reads.go_on.set()
            assert two.get(address).status_code == 200
            assert [each.result(PATIENCE).status_code for each in hanging] == [200] * len(hanging)
        finally:
            reads.go_on.set()


@pytest.mark.slow
def test_a_pull_that_may_wait_waits_for_its_turn_to_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    subscription = "/v1/topics/shop/history/subscriptions/billing"
    with served.client("one") as one, ThreadPoolExecutor(THREADS + 1) as pool:
        one.put(subscription, json={"start": "earliest"}).raise_for_status()
        one.put(f"{subscription}/consumers/c").raise_for_status()
        reads = HangingReads(monkeypatch)
        try:
            hanging = [pool.submit(one.get, "/v1/topics/shop/history/records") for _ in range(THREADS)]
            traffic = served.broker.process.broker.traffic
            until(lambda: traffic.under_way == len(hanging), 60)
            pull = f"{subscription}/consumers/c/pull"

            def is_refused() -> bool:
                """While a request is on its way to its turn there is room for one more, which then waits."""
                try:
                    refused = one.post(pull, json={"wait_ms": 0}, timeout=2)
                except httpx.ReadTimeout:
                    return False
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "throttled")
                return True

            until(lambda: reads.begun == READ.share, 60)
            until(is_refused, 60)
            waiting = pool.submit(one.post, pull, json={"wait_ms": 20_000})
            # One of those may have been refused, if a pull came before it.
            until(lambda: traffic.under_way == sum(not each.done() for each in hanging) + 1, 60)
            reads.go_on.set()
            found = waiting.result(PATIENCE)
            assert found.status_code == 200, found.text
            assert [each["record"]["offset"] for each in found.json()["records"]] == [0]
        finally:
            reads.go_on.set()


def test_a_read_of_another_caller_is_served_while_the_first_has_all_it_may(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = HangingReads(monkeypatch)
    with served.client("one") as one, served.client("two") as two, ThreadPoolExecutor(THREADS) as pool:
        try:
            address = "/v1/topics/shop/history/records"
            hanging = [pool.submit(one.get, address) for _ in range(READ.share)]
            until(lambda: reads.begun == READ.share, 60)
            # A look-up by tag reads files, too.
            assert two.get("/v1/topics/shop/orders/records", params={"tag": "x"}).status_code == 200
            reads.go_on.set()
            assert [each.result(PATIENCE).status_code for each in hanging] == [200] * READ.share
        finally:
            reads.go_on.set()
