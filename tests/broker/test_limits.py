"""What callers may have under way over HTTP: every route counts, answers count until they are taken."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.broker import app, plans
from forebay.broker.app import Broker
from forebay.broker.routes import Route
from forebay.broker.table import ROUTES
from forebay.service.quotas import QuotaCounts
from tests.broker.test_rights import right_request
from tests.support.brokers import RunningBroker, running_broker, server_settings

SECONDS = 60.0
MIB = 1024 * 1024
TOPIC = "/v1/topics/shop/orders"
RECORDS = f"{TOPIC}/records"
FRAMES = "application/vnd.forebay.frames"
ALWAYS = {"get_metrics"}
"""Answered although limits are reached: an operator looks there for them."""


def counts(broker: RunningBroker) -> QuotaCounts:
    """What is under way, asked in the event loop of the broker."""
    found: list[QuotaCounts] = []
    done = threading.Event()

    def look() -> None:
        found.append(broker.process.broker.quota_counts())
        done.set()

    broker.loop.call_soon_threadsafe(look)
    assert done.wait(SECONDS)
    return found[0]


def wait_for(broker: RunningBroker, is_so: Callable[[QuotaCounts], bool]) -> QuotaCounts:
    """What is under way, as soon as it is so."""
    while not is_so(found := counts(broker)):
        pass
    return found


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a broker whose only request and only stream are taken."""
    settings = server_settings(requests_per_principal_max=1, streams_per_principal_max=1)
    path = tmp_path_factory.mktemp("full") / "data"
    with running_broker(path, settings) as broker, broker.client() as client:
        assert client.put("/v1/topics/shop/orders").status_code == 201
        with client.stream("GET", "/v1/watch", params={"topic": "shop/orders"}):
            waiting = threading.Thread(target=lambda: client.get(RECORDS, params={"wait_ms": 60_000}))
            waiting.start()
            wait_for(broker, lambda found: found.requests == 1)
            yield client
            broker.stop()
            waiting.join(SECONDS)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_that_asks_for_a_right_counts(full: httpx.Client, route: Route) -> None:
    with full.stream(**right_request(route)) as answer:
        if route.scopes and route.name not in ALWAYS:
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            limit = "server.streams_per_principal_max" if route.is_stream else "server.requests_per_principal_max"
            assert limit in answer.read().decode()
        else:
            assert answer.status_code == 200


@contextmanager
def held_elsewhere(broker: RunningBroker, size: int) -> Iterator[None]:
    """Another caller has so many bytes under way."""
    done = threading.Event()

    def change(call: Callable[[], object]) -> None:
        done.clear()
        broker.loop.call_soon_threadsafe(call)
        broker.loop.call_soon_threadsafe(done.set)
        assert done.wait(SECONDS)

    admission = broker.process.broker.service.quotas.request("another")
    change(admission.__enter__)
    change(lambda: admission.hold(size, is_done=True))
    try:
        yield
    finally:
        change(lambda: admission.__exit__(None, None, None))


@contextmanager
def slow_reader(broker: RunningBroker, path: str) -> Iterator[socket.socket]:
    """A client that asks and does not take the answer yet."""
    url = httpx.URL(broker.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(SECONDS)
        connection.connect((url.host, url.port or 0))
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\naccept: {FRAMES}\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode())
        yield connection


@pytest.fixture
def large(tmp_path: Path) -> Iterator[RunningBroker]:
    """A broker with a topic of five records of 4 MiB, and room for answers of 24 MiB."""
    settings = server_settings(bytes_in_flight_per_principal_max=24 * MIB)
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        assert client.put("/v1/topics/shop/orders").status_code == 201
        for _ in range(5):
            raw = {"content": bytes(4 * MIB), "headers": {"content-type": "application/octet-stream"}}
            assert client.post(RECORDS, **raw).status_code == 200  # type: ignore[arg-type]
        yield broker


def test_an_answer_counts_until_its_client_has_taken_it(large: RunningBroker) -> None:
    with slow_reader(large, f"{RECORDS}?bytes_max={9 * MIB}") as connection:
        held = wait_for(large, lambda found: found.bytes >= 8 * MIB)
        assert held.requests == 1
        taken = 0
        while piece := connection.recv(MIB):
            taken += len(piece)
        assert taken > 8 * MIB
    wait_for(large, lambda found: found.requests == found.bytes == 0)


def test_an_answer_whose_client_goes_counts_no_more(large: RunningBroker) -> None:
    with slow_reader(large, f"{RECORDS}?bytes_max={9 * MIB}"):
        wait_for(large, lambda found: found.bytes >= 8 * MIB)
    wait_for(large, lambda found: found.requests == found.bytes == 0)


def test_where_answers_take_much_memory_others_are_smaller_and_then_refused(large: RunningBroker) -> None:
    with contextlib.ExitStack() as held, large.client() as client:
        client.headers["accept"] = FRAMES
        asked = {"bytes_max": 64 * MIB}
        assert len(client.get(RECORDS, params=asked).content) > 8 * MIB
        held.enter_context(slow_reader(large, f"{RECORDS}?bytes_max={9 * MIB}"))
        wait_for(large, lambda found: found.bytes >= 8 * MIB)
        smaller = client.get(RECORDS, params=asked)
        assert smaller.status_code == 200
        assert len(smaller.content) < 8 * MIB
        for number in range(3):
            held.enter_context(slow_reader(large, f"{RECORDS}?bytes_max={4 * MIB}"))
            wait_for(large, lambda found, number=number: found.bytes >= (12 + 4 * number) * MIB)  # type: ignore[misc]
        refused = client.get(RECORDS, params=asked)
        assert refused.status_code == 429
        assert refused.json()["error"]["detail"]["limit"] == "server.bytes_in_flight_per_principal_max"
        # What fits the buffer of a connection is answered all the same, and a change that was made is not taken back.
        assert client.get("/v1/topics/shop/orders").status_code == 200
        assert client.post("/v1/topics/shop/orders/flush").status_code == 204
    wait_for(large, lambda found: found.requests == found.bytes == 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The answers that threads have made."""
    found: list[object] = []
    compute = Broker.compute

    async def note(broker: Broker, call: Callable[[], Any]) -> Any:
        found.append(call)
        return await compute(broker, call)

    monkeypatch.setattr(Broker, "compute", note)
    return found


@pytest.mark.parametrize("address", ["/v1/topics?prefix=shop/", "/v1/status", "/v1/groups", f"{TOPIC}/plan"])
def test_a_long_answer_counts_before_it_is_made(
    tmp_path: Path, made: list[object], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """It once counted when it was made: however many were made at once had room in no limit."""
    monkeypatch.setattr(app, "LOOP_ITEMS_MAX", 1)
    monkeypatch.setattr(app, "ITEM_BYTES", MIB)
    monkeypatch.setattr(plans, "PIECE_BYTES", MIB)
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        for name in ("orders", "visits"):
            assert client.put(f"/v1/topics/shop/{name}").status_code == 201
            assert client.post(f"/v1/topics/shop/{name}/records", json=[{"value": "v"}]).status_code == 200
            commit = {"topic": "shop/orders", "partition": 0, "offset": 0}
            assert client.post(f"/v1/groups/{name}/commit", json=commit).status_code == 200
        made.clear()
        with held_elsewhere(broker, broker.process.broker.settings.bytes_in_flight_max - 1000):
            refused = client.get(address)
            assert refused.status_code == 429, refused.text
            assert refused.json()["error"]["detail"]["limit"] == "server.bytes_in_flight_max"
            assert made == []
        assert client.get(address).status_code == 200
        assert len(made) == 1
        wait_for(broker, lambda found: found.requests == found.bytes == 0)


@pytest.mark.slow
def test_records_that_are_looked_at_have_a_size_that_there_is_room_for(tmp_path: Path) -> None:
    """A page of dead letters, or of records that are not done, once had as many bytes as a thousand records have."""
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        assert client.put(TOPIC).status_code == 201
        subscription = f"{TOPIC}/subscriptions/billing"
        options = {"start": "earliest", "deliveries_max": 1, "on_spent": "dead_letter"}
        assert client.put(subscription, json=options).status_code == 200
        for _ in range(6):
            raw = {"content": b"x" * 400_000, "headers": {"content-type": "application/octet-stream"}}
            assert client.post(RECORDS, **raw).status_code == 200  # type: ignore[arg-type]

        peeked = client.get(f"{subscription}/peek", params={"records_max": 100}).json()["records"]

        assert [each["offset"] for each in peeked] == [0, 1]
        letters = _spent(client, subscription, 6)
        found: list[int] = []
        while page := client.get(letters, params={"after_offset": found[-1]} if found else {}).json()["letters"]:
            assert len(page) <= 2
            found += [each["offset"] for each in page]
        assert found == list(range(6))
        with held_elsewhere(broker, broker.process.broker.settings.bytes_in_flight_max - 1000):
            assert client.get(letters).status_code == 429
            assert client.get(f"{subscription}/peek").status_code == 429
        with held_elsewhere(broker, broker.process.broker.settings.bytes_in_flight_max - 1_500_000):
            fitting = client.get(letters)
            assert fitting.status_code == 200, fitting.text
            assert len(fitting.json()["letters"]) == 1


def test_a_pull_takes_what_there_is_room_for(tmp_path: Path) -> None:
    """It took what it asked for, found no room, and was refused however often it was repeated."""
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        assert client.put(TOPIC).status_code == 201
        subscription = f"{TOPIC}/subscriptions/billing"
        assert client.put(subscription, json={"start": "earliest"}).status_code == 200
        assert client.post(RECORDS, json=[{"value": "v" * 20_000}] * 50).status_code == 200
        consumer = f"{subscription}/consumers/one"
        assert client.put(consumer).status_code == 200
        with held_elsewhere(broker, broker.process.broker.settings.bytes_in_flight_max - 300_000):
            answer = client.post(f"{consumer}/pull", json={"max": 1000})

            assert answer.status_code == 200, answer.text
            found = [each["record"]["offset"] for each in answer.json()["records"]]
            assert found == list(range(7))
        rest = client.post(f"{consumer}/pull", json={"max": 1000}).json()["records"]
        assert [(each["record"]["offset"], each["attempt"]) for each in rest] == [(at, 1) for at in range(7, 50)]


def _spent(client: httpx.Client, subscription: str, count: int) -> str:
    """The address of the dead letters, once so many records were refused and have gone there."""
    consumer = f"{subscription}/consumers/one"
    assert client.put(consumer).status_code == 200
    refused = 0
    while refused < count:
        records = client.post(f"{consumer}/pull", json={"max": 100}).json()["records"]
        offsets = {"0": [each["record"]["offset"] for each in records]}
        assert client.post(f"{consumer}/nack", json={"offsets": offsets}).status_code == 200
        refused += len(records)
    assert client.delete(consumer).status_code == 204
    topic = client.get(subscription).json()["dead_letter_topic"]
    return f"/v1/topics/{topic}/deadletters"
