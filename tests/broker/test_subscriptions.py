"""Subscriptions over HTTP: sessions of consumers, pulls that are repeated, streams, and who else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

import forebay
import forebay.broker.subscriptions
from forebay.clock import SystemClock
from forebay.errors import Throttled
from forebay.service.quotas import Quotas
from forebay.service.subscriptions import ConsumerSession, TakenRecords
from forebay.service.tokens import Tokens
from forebay.storage import Topic
from forebay.storage.subscriptions import SubscriptionDriver
from forebay.subscriptions.dispatch import Dispatch
from forebay.wire.events import EventDecoder, ServerEvent
from tests.support.brokers import START_SECONDS, RunningBroker, running_broker, server_settings
from tests.support.gates import HeldStep, StepGate
from tests.support.waiting import PATIENCE, until

TOPIC = "/v1/topics/shop/orders"
SUBSCRIPTION = f"{TOPIC}/subscriptions/billing"
LONG_MS = 60_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with running_broker(tmp_path / "data", server_settings(heartbeat_interval_ms=100)) as broker:
        yield broker


@pytest.fixture
def client(broker: RunningBroker) -> Iterator[httpx.Client]:
    with broker.client() as client:
        assert client.put(TOPIC).status_code == 201
        yield client


def append(client: httpx.Client, *values: str) -> None:
    assert client.post(f"{TOPIC}/records", json=[{"value": value} for value in values]).status_code == 200


def subscribe(client: httpx.Client, **options: Any) -> None:
    answer = client.put(SUBSCRIPTION, json={"start": "earliest", **options})
    assert answer.status_code == 200, answer.text


def attach(client: httpx.Client, consumer: str, **options: Any) -> str:
    """The address of a consumer that is attached."""
    answer = client.put(f"{SUBSCRIPTION}/consumers/{consumer}", json=options)
    assert answer.status_code == 200, answer.text
    return f"{SUBSCRIPTION}/consumers/{consumer}"


def pull(client: httpx.Client, consumer: str, **asked: Any) -> list[tuple[int, int]]:
    """Offset and attempt of each record of a pull."""
    answer = client.post(f"{consumer}/pull", json=asked)
    assert answer.status_code == 200, answer.text
    return [(each["record"]["offset"], each["attempt"]) for each in answer.json()["records"]]


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def until_it_waits(client: httpx.Client) -> None:
    """Return when a request is under way beside the look."""
    until(lambda: "forebay_http_requests_in_flight 2.0" in client.get("/metrics").text)


def events(answer: httpx.Response) -> Iterator[ServerEvent]:
    decoder = EventDecoder()
    for chunk in answer.iter_raw():
        yield from decoder.feed(chunk)


def test_a_consumer_that_is_gone_leaves_what_it_held_to_others(client: httpx.Client) -> None:
    append(client, "a", "b")
    subscribe(client, mode="shared", ack_timeout_ms=10 * LONG_MS)
    gone = attach(client, "gone", session_timeout_ms=200)
    assert pull(client, gone) == [(0, 1), (1, 1)]
    other = attach(client, "other")

    assert pull(client, other, wait_ms=LONG_MS) == [(0, 2), (1, 2)]

    assert client.get(f"{SUBSCRIPTION}/consumers").json() == {"consumers": ["other"]}
    assert code(client.post(f"{gone}/ack", json={"offsets": {"0": [0]}})) == (404, "unknown_consumer")
    assert pull(client, other, ack={"0": [0, 1]}) == []


@pytest.mark.slow
def test_requests_and_waiting_pulls_keep_a_session(client: httpx.Client) -> None:
    append(client, "a")
    subscribe(client)
    consumer = attach(client, "one", session_timeout_ms=1000)
    assert pull(client, consumer) == [(0, 1)]

    assert pull(client, consumer, wait_ms=2000) == []
    for _ in range(8):
        assert client.post(f"{consumer}/ack").json() == {"counted": 0}
        threading.Event().wait(0.25)

    assert client.post(f"{consumer}/ack", json={"offsets": {"0": [0]}}).json() == {"counted": 1}


def test_a_pull_that_is_repeated_brings_the_same_records_and_counts_no_delivery(client: httpx.Client) -> None:
    append(client, "a", "b", "c")
    subscribe(client)
    consumer = attach(client, "one")
    for _ in range(3):
        assert pull(client, consumer, max=2, sequence=7) == [(0, 1), (1, 1)]
    assert pull(client, consumer, ack={"0": [0, 1]}, sequence=8) == [(2, 1)]
    assert pull(client, consumer, ack={"0": [2]}, sequence=8) == []
    assert code(client.post(f"{consumer}/pull", json={"sequence": 7})) == (409, "conflict")
    assert client.get(f"{SUBSCRIPTION}/lag").json()["partitions"][0]["lag"] == 0


def test_a_repeated_pull_gives_back_its_own_answer_and_not_that_of_one_without_a_number(client: httpx.Client) -> None:
    append(client, "a", "b", "c")
    subscribe(client)
    consumer = attach(client, "one")
    assert pull(client, consumer, max=1, sequence=1) == [(0, 1)]
    assert pull(client, consumer, max=1) == [(1, 1)]

    assert pull(client, consumer, max=3, sequence=1) == [(2, 1)]


def test_a_pull_that_is_repeated_refuses_a_record_only_once(client: httpx.Client) -> None:
    append(client, "a")
    subscribe(client, deliveries_max=2)
    consumer = attach(client, "one")
    assert pull(client, consumer, sequence=1) == [(0, 1)]
    for _ in range(3):
        assert pull(client, consumer, nack={"0": [0]}, delay_ms=0, sequence=2) == [(0, 2)]
    assert client.post(f"{consumer}/ack", json={"offsets": {"0": [0]}}).json() == {"counted": 1}


def test_a_refusal_that_names_the_delivery_is_repeated_without_harm(client: httpx.Client) -> None:
    append(client, "a")
    subscribe(client, deliveries_max=2)
    consumer = attach(client, "one")
    assert pull(client, consumer) == [(0, 1)]
    refusal = {"offsets": {"0": [0]}, "attempts": {"0": [1]}, "delay_ms": 0}
    assert client.post(f"{consumer}/nack", json=refusal).json() == {"counted": 1}
    assert pull(client, consumer) == [(0, 2)]

    assert client.post(f"{consumer}/nack", json=refusal).json() == {"counted": 0}

    assert client.post(f"{consumer}/ack", json={"offsets": {"0": [0]}}).json() == {"counted": 1}


def test_a_pull_whose_caller_has_gone_takes_nothing(client: httpx.Client, broker: RunningBroker) -> None:
    """Its connection ends while it waits; what comes then goes to another consumer, for the first time."""
    subscribe(client, mode="shared", ack_timeout_ms=LONG_MS)
    gone, other = attach(client, "gone"), attach(client, "other")
    url, body = httpx.URL(broker.url), b'{"wait_ms": 60000}'
    with socket.create_connection((url.host, url.port or 0)) as connection:
        head = f"POST {gone}/pull HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until_it_waits(client)
    until(lambda: "forebay_http_requests_in_flight 1.0" in client.get("/metrics").text)

    append(client, "a")

    assert pull(client, other, wait_ms=LONG_MS) == [(0, 1)]


def gone_while_held(client: httpx.Client, broker: RunningBroker, request: str, gate: StepGate) -> None:
    """A client sends a request and goes away while the broker is held inside it."""
    url = httpx.URL(broker.url)
    gate.armed.set()
    with socket.socket() as connection:
        connection.connect((url.host, url.port or 0))
        connection.sendall(request.encode())
        assert gate.reached.wait(PATIENCE)
    try:
        until(lambda: client.get(f"{SUBSCRIPTION}/lag").json()["partitions"][0]["held"] == 0)
    finally:
        gate.released.set()


@pytest.mark.parametrize(("asked", "encode"), [("POST {}/pull", "_encode"), ("GET {}/stream", "_encode_events")])
def test_records_are_due_at_once_if_the_client_goes_while_its_answer_is_made(
    asked: str, encode: str, client: httpx.Client, broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = StepGate()
    HeldStep(forebay.broker.subscriptions, encode, "before").guard(monkeypatch, gate)
    append(client, "x" * 300_000)
    subscribe(client, mode="shared", ack_timeout_ms=10 * LONG_MS)
    gone, other = attach(client, "gone"), attach(client, "other")

    request = f"{asked.format(gone)} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
    gone_while_held(client, broker, request, gate)

    assert pull(client, other, wait_ms=LONG_MS) == [(0, 1)]


@pytest.mark.parametrize("asked", ["POST {}/pull", "GET {}/stream"])
def test_records_are_due_at_once_if_the_client_goes_as_they_come(
    asked: str, client: httpx.Client, broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is cancelled between the end of its pull and its next step."""
    whole, waiting, cancelled = ConsumerSession.pull, asyncio.wait, list[asyncio.Task[Any]]()

    async def pull_for(session: ConsumerSession, *arguments: Any, **options: Any) -> TakenRecords:
        taken = await whole(session, *arguments, **options)
        pulling = asyncio.current_task()
        assert pulling is not None
        if session.timeout_s == 7.0 and not cancelled:
            # Behind the callback by which the request goes on.
            pulling.add_done_callback(lambda _: cancel(pulling))
        return taken

    waiters = dict[asyncio.Task[Any], asyncio.Task[Any]]()

    async def wait(tasks: Any, **options: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        waiters.update(dict.fromkeys(tasks, task))
        return await waiting(tasks, **options)

    def cancel(pulling: asyncio.Task[Any]) -> None:
        cancelled.append(waiters[pulling])
        waiters[pulling].cancel()

    append(client, "a")
    subscribe(client, mode="shared", ack_timeout_ms=10 * LONG_MS)
    gone, other = attach(client, "gone", session_timeout_ms=7000), attach(client, "other")
    monkeypatch.setattr(ConsumerSession, "pull", pull_for)
    monkeypatch.setattr(asyncio, "wait", wait)
    url = httpx.URL(broker.url)
    with socket.socket() as connection:
        connection.connect((url.host, url.port or 0))
        connection.sendall(f"{asked.format(gone)} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode())
        until(lambda: bool(cancelled))

        assert pull(client, other, wait_ms=LONG_MS) == [(0, 1)]


def test_records_that_are_too_many_bytes_beside_those_of_others_are_not_delivered(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(client, "a", "b")
    subscribe(client, ack_timeout_ms=LONG_MS)
    consumer = attach(client, "one")
    recount = Quotas.recount

    def crowded(quotas: Quotas, principal: str, *, before: int, size: int, is_checked: bool) -> None:
        if is_checked:
            raise Throttled("others hold all of it")
        recount(quotas, principal, before=before, size=size, is_checked=is_checked)

    with monkeypatch.context() as patch:
        patch.setattr(Quotas, "recount", crowded)
        assert code(client.post(f"{consumer}/pull")) == (429, "throttled")

    assert pull(client, consumer) == [(0, 1), (1, 1)]


def test_a_consumer_whose_session_is_over_is_attached_again_at_once(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place in an exclusive subscription is free a moment after the session has ended: the call waits for that."""
    append(client, "a")
    subscribe(client)
    detach, is_leaving, may_leave = SubscriptionDriver.detach, threading.Event(), threading.Event()

    def slow(driver: SubscriptionDriver, consumer: int) -> None:
        is_leaving.set()
        assert may_leave.wait(START_SECONDS)
        detach(driver, consumer)

    monkeypatch.setattr(SubscriptionDriver, "detach", slow)
    assert pull(client, attach(client, "one", session_timeout_ms=100)) == [(0, 1)]
    assert is_leaving.wait(START_SECONDS)
    with ThreadPoolExecutor(2) as pool:
        again = [pool.submit(client.put, f"{SUBSCRIPTION}/consumers/one") for _ in range(2)]
        until(lambda: "forebay_http_requests_in_flight 3.0" in client.get("/metrics").text)
        assert not any(each.done() for each in again)
        may_leave.set()
        assert [each.result(START_SECONDS).status_code for each in again] == [200, 200]

    assert client.get(f"{SUBSCRIPTION}/consumers").json() == {"consumers": ["one"]}
    assert pull(client, f"{SUBSCRIPTION}/consumers/one") == [(0, 2)]


@pytest.mark.slow
def test_a_stream_keeps_the_session_of_its_consumer(client: httpx.Client) -> None:
    subscribe(client)
    consumer = attach(client, "one", session_timeout_ms=400)
    with client.stream("GET", f"{consumer}/stream") as answer:
        threading.Event().wait(1.5)
        append(client, "a")
        assert json.loads(next(events(answer)).text)["attempt"] == 1
        assert client.get(f"{SUBSCRIPTION}/consumers").json() == {"consumers": ["one"]}


def test_a_stream_sends_no_more_than_its_consumer_may_hold(client: httpx.Client) -> None:
    append(client, *(str(number) for number in range(5)))
    subscribe(client, ack_timeout_ms=LONG_MS)
    consumer = attach(client, "one", unacked_max=2)
    with client.stream("GET", f"{consumer}/stream") as answer:
        found = (json.loads(event.text)["record"]["offset"] for event in events(answer))
        assert list(islice(found, 2)) == [0, 1]
        assert client.get(f"{SUBSCRIPTION}/lag").json()["partitions"][0]["held"] == 2
        client.post(f"{consumer}/ack", json={"offsets": {"0": [0]}})
        assert next(found) == 2
        assert client.get(f"{SUBSCRIPTION}/lag").json()["partitions"][0]["held"] == 2


def test_lists_say_whether_there_is_more(client: httpx.Client) -> None:
    append(client, *(str(number) * 400_000 for number in range(4)))
    subscribe(client, deliveries_max=1, on_spent="dead_letter")
    peeked = client.get(f"{SUBSCRIPTION}/peek").json()
    assert (len(peeked["records"]), peeked["has_more"]) == (2, True)
    assert client.get(f"{SUBSCRIPTION}/peek", params={"records_max": 1}).json()["has_more"]
    consumer = attach(client, "one")
    while taken := pull(client, consumer):
        client.post(f"{consumer}/nack", json={"offsets": {"0": [offset for offset, _ in taken]}})
    dead = f"{TOPIC}.billing.dead_letters/deadletters"

    first = client.get(dead).json()
    after = {f"after_{name}": value for name, value in first["after"].items()}
    second = client.get(dead, params=after).json()

    assert [len(page["letters"]) for page in (first, second)] == [2, 2]
    assert (first["after"], second["after"]) == ({"partition": 0, "offset": 1}, None)
    assert client.get(dead, params={"records_max": 1}).json()["after"] == {"partition": 0, "offset": 0}


def test_a_definition_is_altered_by_a_patch(client: httpx.Client) -> None:
    subscribe(client, mode="shared")
    altered = client.patch(SUBSCRIPTION, json={"ack_timeout_ms": 77, "deliveries_max": 3})
    assert altered.status_code == 200, altered.text
    assert (altered.json()["ack_timeout_ms"], altered.json()["deliveries_max"]) == (77, 3)
    assert client.patch(SUBSCRIPTION, json={"deliveries_max": None}).json()["deliveries_max"] is None
    assert client.get(SUBSCRIPTION).json()["ack_timeout_ms"] == 77
    assert code(client.patch(SUBSCRIPTION, json={"mode": "shared"})) == (400, "invalid")
    assert code(client.patch(f"{SUBSCRIPTION}?id={'0' * 32}", json={})) == (409, "conflict")
    assert code(client.patch(f"{SUBSCRIPTION}-not", json={})) == (404, "unknown_subscription")


def test_a_later_pull_takes_the_place_of_one_that_waits(client: httpx.Client) -> None:
    subscribe(client)
    consumer = attach(client, "one")
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(client.post, f"{consumer}/pull", json={"wait_ms": LONG_MS, "sequence": 1})
        until_it_waits(client)
        later = pool.submit(pull, client, consumer, wait_ms=LONG_MS, sequence=1)
        # Long before its time is up.
        assert code(waiting.result(LONG_MS / 2000)) == (409, "conflict")
        append(client, "a")
        assert later.result(START_SECONDS) == [(0, 1)]


def test_a_consumer_belongs_to_the_caller_that_attached_it(tmp_path: Path) -> None:
    settings = server_settings(access="tokens")
    with forebay.open(tmp_path / "data") as log:
        tokens = Tokens(log.metadata, settings.metadata.prefix, SystemClock())
        secrets = {
            name: tokens.create(name, scopes=["read"], prefixes=["shop/"]).secret.reveal() for name in ("ann", "bob")
        }
        log.create_topic("shop/orders").append(b"a")
        log.create_topic("other/orders")
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as ann, broker.client() as bob:
        ann.headers["authorization"] = f"Bearer {secrets['ann']}"
        bob.headers["authorization"] = f"Bearer {secrets['bob']}"
        subscribe(ann, mode="shared")
        consumer = attach(ann, "one")
        assert code(bob.put(consumer)) == (409, "conflict")
        assert code(bob.post(f"{consumer}/pull")) == (404, "unknown_consumer")
        assert bob.delete(consumer).status_code == 204
        assert pull(ann, consumer) == [(0, 1)]
        assert code(ann.put("/v1/topics/other/orders/subscriptions/billing")) == (403, "forbidden")


def test_what_is_too_large_for_one_answer_comes_with_the_next(client: httpx.Client) -> None:
    append(client, *("x" * 1000 for _ in range(10)))
    subscribe(client)
    consumer = attach(client, "one")
    assert pull(client, consumer, bytes_max=3500) == [(0, 1), (1, 1), (2, 1)]
    assert pull(client, consumer, bytes_max=1) == [(3, 1)]
    assert len(pull(client, consumer)) == 6


def test_consumers_are_limited(tmp_path: Path) -> None:
    settings = server_settings(consumers_per_principal_max=2)
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        client.put(TOPIC)
        subscribe(client, mode="shared")
        first, _ = attach(client, "one"), attach(client, "two")
        answer = client.put(f"{SUBSCRIPTION}/consumers/three")
        assert code(answer) == (429, "throttled")
        assert "server.consumers_per_principal_max" in answer.text
        client.delete(first)
        attach(client, "three")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("", {"mode": "both"}),
        ("", {"start": "soon"}),
        ("", {"start": {"0": "latest", "-1": "latest"}}),
        ("", {"window_records_max": -1}),
        ("/consumers/one", {"unacked_max": 0}),
        ("/consumers/one", {"session_timeout_ms": 1}),
    ],
)
def test_wrong_definitions_are_refused(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    subscribe(client)
    assert code(client.put(SUBSCRIPTION + path, json=body)) == (400, "invalid")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("pull", {"ack": {"0": [-1]}}),
        ("pull", {"ack": {"x": [1]}}),
        ("pull", {"max": 0}),
        ("pull", {"nack": {"0": [2**70]}}),
        ("nack", {}),
        ("nack", {"offsets": {"0": [0]}, "delay_ms": -1}),
        ("nack", {"offsets": {"0": [0]}, "attempts": {"0": []}}),
        ("nack", {"offsets": {"0": [0]}, "attempts": {}}),
        ("ack", {"records": []}),
    ],
)
def test_wrong_answers_are_refused(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    append(client, "a")
    subscribe(client)
    consumer = attach(client, "one")
    assert pull(client, consumer) == [(0, 1)]
    assert code(client.post(f"{consumer}/{path}", json=body)) == (400, "invalid")
    assert client.post(f"{consumer}/ack", json={"offsets": {"0": [0], "99": [0, 2**60]}}).json() == {"counted": 1}


def test_a_topic_that_is_made_again_has_no_consumers(client: httpx.Client) -> None:
    append(client, "a")
    subscribe(client)
    consumer = attach(client, "one")
    assert pull(client, consumer) == [(0, 1)]

    client.delete(TOPIC)
    client.put(TOPIC)
    append(client, "other")

    assert code(client.post(f"{consumer}/pull")) == (404, "unknown_consumer")
    subscribe(client)
    assert pull(client, attach(client, "one")) == [(0, 1)]


@pytest.mark.slow
def test_a_stream_brings_records_as_they_come_and_calls_acknowledge_them(client: httpx.Client) -> None:
    append(client, "a", "b")
    subscribe(client, ack_timeout_ms=300)
    consumer = attach(client, "one", session_timeout_ms=500)
    with client.stream("GET", f"{consumer}/stream") as answer:
        found = (json.loads(event.text) for event in events(answer))
        first = [(each["record"]["value"], each["attempt"]) for each in islice(found, 2)]
        assert first == [("a", 1), ("b", 1)]
        assert client.post(f"{consumer}/ack", json={"offsets": {"0": [0]}}).json() == {"counted": 1}
        again = next(found)
        assert (again["record"]["value"], again["attempt"]) == ("b", 2)
        append(client, "c")
        while next(found)["record"]["value"] != "c":
            pass
    until(lambda: client.get(f"{SUBSCRIPTION}/consumers").json() == {"consumers": []})


def test_a_stream_says_why_it_ends(client: httpx.Client, broker: RunningBroker) -> None:
    subscribe(client)
    consumer = attach(client, "one")
    with client.stream("GET", f"{consumer}/stream") as answer:
        assert pull(client, consumer) == []
        last = list(events(answer))[-1]
        assert (last.event, json.loads(last.text)["error"]["code"]) == ("error", "conflict")
    with client.stream("GET", f"{consumer}/stream") as answer:
        assert client.delete(consumer).status_code == 204
        last = list(events(answer))[-1]
        assert (last.event, json.loads(last.text)["error"]["code"]) == ("error", "unknown_consumer")
    consumer = attach(client, "one")
    with client.stream("GET", f"{consumer}/stream") as answer:
        broker.stop()
        assert list(events(answer)) == []


@pytest.mark.slow
def test_a_stalled_stream_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not read: its records go to another consumer after their time, and its connection ends.

    What is made for it at once is no more than `outbox_bytes_max`, about, and waits until most of it is taken.
    """
    pull_records, streamed = ConsumerSession.pull, list[int]()

    async def seen(session: ConsumerSession, records_max: int, **options: Any) -> TakenRecords:
        found = await pull_records(session, records_max, **options)
        if session.timeout_s == 0.5:
            streamed.append(len(found.records))
        return found

    monkeypatch.setattr(ConsumerSession, "pull", seen)
    settings = server_settings(heartbeat_interval_ms=100, stall_timeout_ms=1000, outbox_bytes_max=65_536)
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        client.put(TOPIC)
        for _ in range(15):
            append(client, *("x" * 50_000 for _ in range(20)))
        subscribe(client, mode="shared", ack_timeout_ms=500)
        stalled = attach(client, "stalled", session_timeout_ms=500)
        url = httpx.URL(broker.url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((url.host, url.port or 0))
            connection.sendall(f"GET {stalled}/stream HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            until(lambda: client.get(f"{SUBSCRIPTION}/lag").json()["partitions"][0]["held"] > 0)
            working = attach(client, "working")
            done: set[int] = set()
            ack: list[int] = []
            while len(done) < 300:
                taken = pull(client, working, ack={"0": ack}, wait_ms=LONG_MS)
                ack = [offset for offset, _ in taken]
                done |= set(ack)
            until(lambda: client.get(f"{SUBSCRIPTION}/consumers").json() == {"consumers": ["working"]})
    assert max(streamed) == 1, "a second one would be too much"
    assert len(streamed) < 300, "it was not read on"


def test_a_broker_that_ends_in_order_stores_what_was_acknowledged(tmp_path: Path) -> None:
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        client.put(TOPIC)
        append(client, "a", "b", "c")
        subscribe(client)
        consumer = attach(client, "one")
        assert len(pull(client, consumer)) == 3
        assert client.post(f"{consumer}/ack", json={"offsets": {"0": [0, 2]}}).json() == {"counted": 2}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, f"{consumer}/pull", json={"wait_ms": LONG_MS})
            until_it_waits(client)
            broker.stop()
            assert waiting.result(START_SECONDS).json() == {"records": [], "acked": 0, "nacked": 0, "lost": 0}
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        assert code(client.post(f"{consumer}/pull")) == (404, "unknown_consumer")
        assert pull(client, attach(client, "one")) == [(1, 2)]


@pytest.mark.slow
def test_two_hundred_consumers_share_a_subscription(client: httpx.Client) -> None:
    """Each has a connection of its own and waits; all records are done once, none by two, and none is refused."""
    consumers, records = 200, 2000
    subscribe(client, mode="shared", ack_timeout_ms=LONG_MS)
    done: list[int] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        consumer = attach(crowd, f"c{number}")
        ack: list[int] = []
        while len(done) < records:
            taken = pull(crowd, consumer, ack={"0": ack}, max=5, wait_ms=5000)
            ack = [offset for offset, _ in taken]
            assert all(attempt == 1 for _, attempt in taken)
            with lock:
                done.extend(ack)
        crowd.post(f"{consumer}/ack", json={"offsets": {"0": ack}})

    many = httpx.Limits(max_connections=None)
    with (
        httpx.Client(base_url=client.base_url, timeout=START_SECONDS, limits=many) as crowd,
        ThreadPoolExecutor(consumers) as pool,
    ):
        working = [pool.submit(work, number) for number in range(consumers)]
        for first in range(0, records, 100):
            append(client, *(f"{first + number}" for number in range(100)))
        for each in working:
            each.result()
    assert sorted(done) == list(range(records))
    assert client.get(f"{SUBSCRIPTION}/lag").json()["partitions"][0]["lag"] == 0


@pytest.mark.slow
def test_lag_is_measured_without_consumers_too_and_by_topic_where_that_is_asked_for(tmp_path: Path) -> None:
    settings = server_settings(metrics=["shop/*"])
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:

        def measured(name: str) -> dict[str, float]:
            lines = (line.rpartition(" ") for line in client.get("/metrics").text.splitlines() if line[0] != "#")
            return {
                labels.partition("{")[2].removesuffix("}"): float(value)
                for labels, _, value in lines
                if labels.startswith(f"forebay_subscription_{name}{{")
            }

        client.put(TOPIC)
        append(client, "a", "b", "c")
        subscribe(client)
        consumer = attach(client, "one")
        assert len(pull(client, consumer)) == 3
        client.post(f"{consumer}/ack", json={"offsets": {"0": [0, 2]}})
        own, others = 'topic="shop/orders"', 'topic=""'
        billing, rest = f'subscription="billing",{own}', f'subscription="",{others}'
        until(lambda: measured("lag") == {billing: 1, rest: 0})
        client.delete(consumer)
        append(client, "d", "e")

        until(lambda: measured("lag") == {billing: 3, rest: 0})
        assert (measured("consumers")[own], measured("held")[own]) == (0, 0)
        assert measured("deliveries_total") == {own: 3, others: 0}
        assert client.post(f"{SUBSCRIPTION}/seek", json={"to": "4"}).status_code == 200
        until(lambda: measured("lag")[billing] == 1)
        assert client.delete(SUBSCRIPTION).status_code == 204
        until(lambda: measured("lag").get(billing, 0) == 0)


def test_metrics_follow_what_consumers_do(client: httpx.Client) -> None:
    def measured() -> dict[str, float]:
        lines = (line.split() for line in client.get("/metrics").text.splitlines() if line[0] != "#")
        return {
            name.removeprefix("forebay_subscription_"): float(value)
            for name, value in lines
            if "_subscription_" in name
        }

    append(client, "a", "b", "c")
    subscribe(client, deliveries_max=2, on_spent="dead_letter")
    before = measured()
    consumer = attach(client, "one")
    assert len(pull(client, consumer)) == 3
    held = measured()
    pull(client, consumer, ack={"0": [0]}, nack={"0": [1, 2]}, delay_ms=0)
    pull(client, consumer, ack={"0": [1]}, nack={"0": [2]}, delay_ms=0)
    after = measured()

    assert (before["consumers"], before["lag"], before["deliveries_total"]) == (0, 3, 0)
    assert (held["consumers"], held["lag"], held["held"], held["redeliveries_total"]) == (1, 3, 3, 0)
    assert (after["lag"], after["held"], after["spent"]) == (0, 0, 0)
    assert (after["deliveries_total"], after["redeliveries_total"], after["dead_letters_total"]) == (5, 2, 1)


def test_a_pull_reads_no_more_than_it_delivers(
    broker: RunningBroker, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that came again were all read, a thousand at a time, and those that did not fit were given back."""
    subscribe(client, mode="shared")
    for _ in range(12):
        append(client, "v" * 300_000)
    consumer = attach(client, "one")
    taken: list[int] = []
    while len(taken) < 12:
        taken += [offset for offset, _ in pull(client, consumer, max=1000)]
    assert client.post(f"{consumer}/nack", json={"offsets": {"0": taken}, "delay_ms": 0}).status_code == 200
    read: list[int] = []
    page = Topic.batch_page

    def note(topic: Topic, partition: int, offset: int, **limits: Any) -> Any:
        read.append(offset)
        return page(topic, partition, offset, **limits)

    monkeypatch.setattr(Topic, "batch_page", note)

    assert pull(client, consumer, max=1000, bytes_max=700_000) == [(0, 2), (1, 2)]
    assert len(read) <= 3, "one page has one of them"
    assert pull(client, consumer, max=1000, bytes_max=1) == [(2, 2)], "one at least"
    rest = [each for _ in range(3) for each in pull(client, consumer, max=1000, bytes_max=1_000_000)]
    assert rest == [(offset, 2) for offset in range(3, 12)], "each once, in order, and none counted as delivered before"


def test_a_pull_of_several_partitions_fits_into_its_bytes(client: httpx.Client) -> None:
    assert client.delete(TOPIC).status_code == 204
    assert client.put(TOPIC, json={"partitions": 3}).status_code == 201
    for partition in range(3):
        body = [{"value": "v" * 1000}] * 10
        assert client.post(f"{TOPIC}/records", params={"partition": partition}, json=body).status_code == 200
    subscribe(client, mode="shared")
    consumer = attach(client, "one")
    found: Counter[tuple[int, int]] = Counter()
    while found.total() < 30:
        records = client.post(f"{consumer}/pull", json={"max": 1000, "bytes_max": 2500}).json()["records"]
        assert 1 <= len(records) <= 2
        assert {each["attempt"] for each in records} == {1}
        found.update((each["record"]["partition"], each["record"]["offset"]) for each in records)
    assert set(found.values()) == {1}


@pytest.mark.slow
def test_a_long_list_of_acknowledgements_leaves_the_loop_to_others_in_between(
    broker: RunningBroker, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole list was worked off in one turn of the event loop, with the lock of the subscription held."""
    subscribe(client, mode="shared", window_records_max=20_000)
    lines = b'{"value": ""}\n' * 7_000
    ndjson = {"content-type": "application/x-ndjson"}
    assert client.post(f"{TOPIC}/records", content=lines, headers=ndjson).status_code == 200
    consumer = attach(client, "one", unacked_max=20_000)
    taken: list[int] = []
    while len(taken) < 7_000:
        taken += [offset for offset, _ in pull(client, consumer, max=1000)]
    sizes: list[int] = []
    turns: list[int] = []
    ack = Dispatch.ack

    def note(dispatch: Dispatch, number: int, done: Any) -> Any:
        sizes.append(sum(map(len, done.values())))
        broker.loop.call_soon(lambda: turns.append(len(sizes)))
        return ack(dispatch, number, done)

    monkeypatch.setattr(Dispatch, "ack", note)

    answer = client.post(f"{consumer}/ack", json={"offsets": {"0": taken, "7": [1]}})

    assert answer.json() == {"counted": 7_000}
    assert max(sizes) <= 1_000 and sum(sizes) == 7_001
    assert turns[:6] == [1, 2, 3, 4, 5, 6], "others had a turn behind each part"
    assert client.get(f"{SUBSCRIPTION}/lag").json()["partitions"][0]["cursor"] == 7_000
