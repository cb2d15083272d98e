"""`forebay serve` as operators run it: started, signalled, killed, started again."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import signal
import threading
from pathlib import Path

import httpx
import pytest

import forebay
from forebay.broker.serve import allow_descriptors
from forebay.settings import Settings
from tests.support.brokers import START_SECONDS, BrokerCommand, server_settings
from tests.support.soak import SOAK
from tests.support.waiting import async_until, until

pytestmark = pytest.mark.slow


def append(client: httpx.Client, *values: str) -> list[dict[str, int]]:
    answer = client.post("/v1/topics/shop/orders/records", json=[{"value": value} for value in values])
    assert answer.status_code == 200, answer.text
    ranges: list[dict[str, int]] = answer.json()["ranges"]
    return ranges


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_broker_in_order(tmp_path: Path, number: int) -> None:
    with BrokerCommand(tmp_path / "data") as broker:
        with broker.client() as client:
            assert client.put("/v1/topics/shop/orders", json={"durability": "memory"}).status_code == 201
            append(client, "a", "b")
        code, logged = broker.end(number)
    assert code == 0, logged
    assert "Traceback" not in logged
    lines = [json.loads(line) for line in logged.splitlines()]
    assert {line["level"] for line in lines} == {"info"}, logged
    (created,) = [line for line in lines if line.get("route") == "put_topic"]
    assert (created["topic"], created["status"], created["principal"]) == ("shop/orders", 201, "anonymous")
    assert created["request_id"]
    with forebay.open(tmp_path / "data") as log:
        topic = log.topic("shop/orders")
        assert [record.value for record in topic.read()] == [b"a", b"b"]
        assert "clean" in str(topic.recovery()).lower()


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    with BrokerCommand(tmp_path / "data") as broker:
        with broker.client() as client:
            assert client.put("/v1/topics/shop/orders", json={"durability": "fsync"}).status_code == 201
            for number in range(20):
                assert append(client, f"{number}") == [{"partition": 0, "first": number, "count": 1}]
        code, _ = broker.end(signal.SIGKILL)
        assert code == -signal.SIGKILL
    with BrokerCommand(tmp_path / "data") as broker, broker.client() as client:
        ready = client.get("/v1/ready").json()
        assert ready == {"ready": True, "replay_progress": 1.0, "degraded": []}
        page = client.get("/v1/topics/shop/orders/records").json()
        assert [record["value"] for record in page["records"] if "value" in record] == [f"{n}" for n in range(20)]


def test_a_stop_ends_what_waits_and_finishes_what_is_under_way(tmp_path: Path) -> None:
    with BrokerCommand(tmp_path / "data") as broker, broker.client() as client:
        assert client.put("/v1/topics/shop/orders", json={"durability": "fsync"}).status_code == 201
        append(client, "first")
        outcomes: list[int] = []

        def poll() -> None:
            answer = client.get("/v1/topics/shop/orders/records", params={"start": "1", "wait_ms": 60_000})
            outcomes.append(answer.status_code)

        def follow() -> None:
            with client.stream("GET", "/v1/watch", params={"topic": "shop/orders"}) as answer:
                for _ in answer.iter_raw():
                    pass
                outcomes.append(answer.status_code)

        threads = [threading.Thread(target=poll) for _ in range(10)] + [
            threading.Thread(target=follow) for _ in range(10)
        ]
        for thread in threads:
            thread.start()
        # The broker has read all twenty requests, and the one that asks.
        until(lambda: "forebay_http_requests_in_flight 21.0" in client.get("/metrics").text)
        code, logged = broker.end(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
    assert code == 0, logged
    assert set(outcomes) <= {200, 503}
    assert len(outcomes) == 20
    assert "Traceback" not in logged


class Crowd:
    """Clients of one broker at its end: streams, reads that wait, and appends. For one event loop."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=START_SECONDS, limits=httpx.Limits(max_connections=None))
        self.streaming = self.ended = 0
        self.polled: list[int] = []
        self.acked: set[str] = set()
        self.doubtful: set[str] = set()
        """Values that were sent and have no answer."""

    async def follow(self) -> None:
        """Read a stream to its end."""
        async with self._client.stream("GET", "/v1/watch", params={"topic": "shop/orders"}) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            self.streaming += 1
            async for _ in pieces:
                pass
        self.ended += 1

    async def poll(self) -> None:
        """Wait for a record that does not come."""
        try:
            answer = await self._client.get("/v1/topics/shop/quiet/records", params={"wait_ms": 60_000})
            self.polled.append(answer.status_code)
        except httpx.TransportError:
            self.polled.append(503)  # It came too late: the broker takes no connections any more.

    async def append(self, name: str) -> None:
        """Append one value after the other until the broker takes no more."""
        for number in itertools.count():
            value = f"{name}-{number}"
            try:
                answer = await self._client.post("/v1/topics/shop/orders/records", json=[{"value": value}])
            except httpx.TransportError:
                self.doubtful.add(value)
                return
            if answer.status_code != 200:
                assert answer.status_code == 503, answer.text
                return
            self.acked.add(value)

    async def see_the_end(self, broker: BrokerCommand) -> tuple[float, str]:
        """Run all clients, end the broker with SIGTERM among them; how long that took, and what it logged."""
        async with self._client, asyncio.TaskGroup() as clients:
            for number in range(50):
                clients.create_task(self.poll())
                clients.create_task(self.append(f"{number}"))
            for _ in range(100):
                clients.create_task(self.follow())
            await async_until(lambda: self.streaming >= 100 and len(self.acked) >= 100, START_SECONDS)
            began = asyncio.get_running_loop().time()
            code, logged = await asyncio.to_thread(broker.end, signal.SIGTERM)
            seconds = asyncio.get_running_loop().time() - began
        assert code == 0, logged
        return seconds, logged


def test_a_stop_with_much_under_way_is_quick_and_loses_nothing(tmp_path: Path) -> None:
    with BrokerCommand(tmp_path / "data") as broker:
        with broker.client() as client:
            assert client.put("/v1/topics/shop/orders", json={"durability": "fsync"}).status_code == 201
            assert client.put("/v1/topics/shop/quiet", json={}).status_code == 201
        crowd = Crowd(broker.url)
        seconds, logged = asyncio.run(crowd.see_the_end(broker))
    assert seconds < (5 if SOAK else 30)  # a shared machine may be busy
    assert crowd.ended == 100
    assert len(crowd.polled) == 50
    assert set(crowd.polled) <= {200, 503}
    assert "Traceback" not in logged
    with forebay.open(tmp_path / "data") as log:
        topic = log.topic("shop/orders")
        found = [record.value.decode() for record in topic.read() if record.value is not None]
        assert "clean" in str(topic.recovery()).lower()
    assert len(found) == len(set(found))
    assert crowd.acked <= set(found) <= crowd.acked | crowd.doubtful


def test_the_demo_has_a_topic_to_look_at(tmp_path: Path) -> None:
    with BrokerCommand(tmp_path / "data", "--demo") as broker, broker.client() as client:
        records = client.get("/v1/topics/demo/greetings/records").json()["records"]
        assert [record["value"] for record in records][:2] == ["hello", "bonjour"]
        assert "Forebay HTTP API" in client.get("/docs").text


def test_a_server_keeps_as_many_files_open_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(soft, 500)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        allow_descriptors(Settings.load(None, {"runtime": {"descriptors_max": 200}}, environment={}))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few

        allow_descriptors(server_settings())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_directory_in_use_is_a_clear_refusal(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "data"), BrokerCommand(tmp_path / "data") as broker:
        broker.process.communicate(timeout=60)
        errors = broker.logged()
        assert broker.process.returncode == 4
        assert "Traceback" not in errors
        assert "in use" in errors or "another process" in errors, errors


def test_a_port_that_is_taken_is_a_clear_refusal(tmp_path: Path) -> None:
    with BrokerCommand(tmp_path / "one") as broker:
        port = httpx.URL(broker.url).port
        with pytest.raises(AssertionError, match=f"cannot bind 127.0.0.1:{port}: .*server.port"):
            BrokerCommand(tmp_path / "two", "--set", f"server.port={port}")
