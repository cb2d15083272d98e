"""What callers may have under way over HTTP: every route counts, answers count until they are taken."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from forebay.broker.routes import Route
from forebay.broker.table import ROUTES
from forebay.service.quotas import QuotaCounts
from tests.broker.test_rights import right_request
from tests.support.brokers import RunningBroker, running_broker, server_settings

SECONDS = 60.0
MIB = 1024 * 1024
RECORDS = "/v1/topics/shop/orders/records"
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
