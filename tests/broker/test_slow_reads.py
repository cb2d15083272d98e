"""Consumers over HTTP that come and go, and places that are moved, while a page is read for one of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

import forebay
from forebay import EARLIEST, ForebayError, Topic, aio
from tests.support.brokers import RunningBroker, running_broker
from tests.support.gates import HeldStep, StepGate
from tests.support.waiting import PATIENCE, async_until

pytestmark = pytest.mark.slow

TOPIC = "/v1/topics/shop/orders"
SUBSCRIPTION = f"{TOPIC}/subscriptions/billing"
COUNT = 50
ALL_AGAIN = [(offset, 2) for offset in range(COUNT)]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        assert client.put(TOPIC).status_code == 201
        append(client, COUNT)
        yield broker


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepGate]:
    """Inside each read of a page, all of which are made by threads."""
    found = StepGate()
    HeldStep(Topic, "batch_page", "after").guard(monkeypatch, found)
    monkeypatch.setattr(Topic, "batch_page_cached", lambda *_, **__: None)
    yield found
    found.released.set()


def append(client: httpx.Client, count: int) -> None:
    assert client.post(f"{TOPIC}/records", json=[{"value": "v"}] * count).status_code == 200


def pulled(answer: httpx.Response) -> list[tuple[int, int]]:
    """Offset and attempt of each record."""
    assert answer.status_code == 200, answer.text
    return [(each["record"]["offset"], each["attempt"]) for each in answer.json()["records"]]


def leave(client: httpx.Client) -> None:
    assert client.delete(f"{SUBSCRIPTION}/consumers/a").status_code == 204


def leave_and_seek(client: httpx.Client) -> None:
    leave(client)
    assert client.post(f"{SUBSCRIPTION}/seek", json={"to": "earliest"}).status_code == 200


@pytest.mark.parametrize(("end", "attempt"), [(leave, 2), (leave_and_seek, 1)])
def test_a_pull_whose_consumer_left_in_a_slow_read_costs_the_next_one_nothing(
    broker: RunningBroker, gate: StepGate, end: Callable[[httpx.Client], None], attempt: int
) -> None:
    with broker.client() as client:
        assert client.put(SUBSCRIPTION, json={"start": "earliest"}).status_code == 200
        assert client.put(f"{SUBSCRIPTION}/consumers/a", json={}).status_code == 200
        assert len(pulled(client.post(f"{SUBSCRIPTION}/consumers/a/pull", json={"max": COUNT}))) == COUNT
        append(client, 1)
        gate.armed.set()
        answers: list[httpx.Response] = []
        pulling = threading.Thread(
            target=lambda: answers.append(client.post(f"{SUBSCRIPTION}/consumers/a/pull", json={"wait_ms": 60_000}))
        )
        pulling.start()
        assert gate.reached.wait(PATIENCE)

        end(client)
        assert client.put(f"{SUBSCRIPTION}/consumers/b", json={}).status_code == 200
        gate.released.set()
        pulling.join(PATIENCE)

        assert answers[0].status_code != 200 or pulled(answers[0]) == []
        found = pulled(client.post(f"{SUBSCRIPTION}/consumers/b/pull", json={"max": 100, "wait_ms": 5_000}))
        assert found[:COUNT] == [(offset, attempt) for offset in range(COUNT)]


def test_a_client_that_closes_its_consumer_in_a_slow_read_loses_nothing(broker: RunningBroker, gate: StepGate) -> None:
    with forebay.connect(broker.url) as log, broker.client() as client:
        subscription = log.topic("shop/orders").subscribe("billing", start=EARLIEST)
        first = subscription.consumer("a").__enter__()
        assert len(first.take(COUNT)) == COUNT
        append(client, 1)
        gate.armed.set()

        def take() -> None:
            with suppress(ForebayError):
                first.take(wait_s=60)

        taking = threading.Thread(target=take)
        taking.start()
        assert gate.reached.wait(PATIENCE)
        first.close()
        with subscription.consumer("b") as second:
            gate.released.set()
            taking.join(PATIENCE)
            found = [(one.record.offset, one.attempt) for one in second.take(wait_s=5)]

    assert found[:COUNT] == ALL_AGAIN


def test_a_task_that_is_cancelled_in_a_slow_read_loses_nothing(broker: RunningBroker, gate: StepGate) -> None:
    async def run() -> list[tuple[int, int]]:
        async with aio.connect(broker.url) as log:
            topic = await log.topic("shop/orders")
            subscription = await topic.subscribe("billing", start=EARLIEST)
            first = await subscription.consumer("a").__aenter__()
            assert len(await first.take(COUNT)) == COUNT
            await topic.append(b"next")
            gate.armed.set()
            taking = asyncio.create_task(first.take(wait_s=60))
            await async_until(gate.reached.is_set)
            taking.cancel()
            await asyncio.wait((taking,))
            await first.close()
            async with subscription.consumer("b") as second:
                gate.released.set()
                return [(one.record.offset, one.attempt) for one in await second.take(wait_s=5)]

    assert asyncio.run(run())[:COUNT] == ALL_AGAIN
