"""Connections are cut while records are taken and acknowledged: each record comes once, in order, and none is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, Final

import pytest

import forebay
from forebay import aio
from forebay.client import RemoteLog, subscriptions
from tests.support.brokers import running_broker
from tests.support.proxies import CuttingProxy, cutting_proxy
from tests.support.soak import SOAK

BYTES: Final = 900
"""More than a pull or its answer has, with all headers."""
STEP: Final = 1 if SOAK else 41
NEVER: Final = 1 << 40


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CuttingProxy]:
    with (
        running_broker(tmp_path_factory.mktemp("cut") / "data") as broker,
        cutting_proxy(broker.url) as proxy,
    ):
        yield proxy


@pytest.fixture
def log(proxy: CuttingProxy) -> Iterator[RemoteLog]:
    with forebay.connect(proxy.url) as log:
        yield log


@pytest.mark.slow
@pytest.mark.parametrize("where", ["answer", "request"])
@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_records_that_are_taken_over_cut_connections_come_once_and_in_order(
    log: RemoteLog, proxy: CuttingProxy, where: str, mode: str
) -> None:
    """Two at a time: a pull whose answer was lost brings the same two, and counts as their first delivery."""
    topic = log.create_topic(f"cut/taken-{where}-{mode}")
    places = range(0, BYTES, STEP)
    topic.append_many([b"%d" % number for number in range(2 * len(places))])
    subscription = topic.subscribe("billing", mode=mode, start=forebay.EARLIEST)
    cut, before = (proxy.cut_answer if where == "answer" else proxy.cut_request), proxy.cuts
    found = []
    with subscription.consumer("one") as consumer:
        for place in places:
            cut(place)
            taken = consumer.take(2, wait_s=30.0)
            cut(NEVER)
            found += [(one.record.offset, one.attempt) for one in taken]
            assert consumer.ack(*taken) == 2

    assert proxy.cuts - before > len(places) // 4
    assert found == [(offset, 1) for offset in range(2 * len(places))]
    assert subscription.lag()[0].lag == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["answer", "request"])
def test_what_is_acknowledged_over_cut_connections_is_done(log: RemoteLog, proxy: CuttingProxy, where: str) -> None:
    """So are a consumer that comes and one that leaves: none stays behind, and none comes twice."""
    topic = log.create_topic(f"cut/acked-{where}")
    cut, places = (proxy.cut_answer if where == "answer" else proxy.cut_request), range(0, BYTES, 3 * STEP)
    for place in places:
        topic.append_many([b"a", b"b"])
        cut(place)
        subscription = topic.subscribe("billing", start=forebay.EARLIEST)
        cut(place)
        with subscription.consumer(f"at {place}") as consumer:
            cut(NEVER)
            assert subscription.consumers() == [f"at {place}"]
            first, second = consumer.take(wait_s=30.0)
            cut(place)
            consumer.ack(first)
            cut(place)
            consumer.nack(second, delay_ms=0)
            cut(NEVER)
            (again,) = consumer.take(wait_s=30.0)
            assert (again.record.offset, again.attempt) == (second.record.offset, 2)
            assert consumer.ack(again) == 1
            cut(place)
        cut(NEVER)
        assert subscription.consumers() == []
        (lag,) = subscription.lag()
        assert (lag.lag, lag.cursor) == (0, again.record.offset + 1)
    cut(0)
    subscription.delete()
    cut(NEVER)
    assert topic.subscriptions() == []


def test_a_take_that_is_cancelled_when_its_answer_has_come_is_repeated_by_the_next(
    proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its number: the records come again, as their first delivery."""
    called, lost = subscriptions.called, [True]

    async def cancelled(topic: Any, call: Any, decode: Any) -> Any:
        answer = await called(topic, call, decode)
        if call.path.endswith("/pull") and lost:
            lost.clear()
            raise asyncio.CancelledError
        return answer

    monkeypatch.setattr(subscriptions, "called", cancelled)

    async def take() -> list[tuple[int, int]]:
        async with aio.connect(proxy.url) as log:
            topic = await log.create_topic("cut/cancelled")
            await topic.append_many([b"a", b"b"])
            subscription = await topic.subscribe("billing", start=forebay.EARLIEST, ack_timeout_ms=600_000)
            async with subscription.consumer() as consumer:
                with pytest.raises(asyncio.CancelledError):
                    await consumer.take(wait_s=10.0)
                return [(one.record.offset, one.attempt) for one in await consumer.take(wait_s=1.0)]

    assert asyncio.run(take()) == [(0, 1), (1, 1)]


@pytest.mark.slow
def test_a_consumer_that_works_long_on_its_records_says_that_it_is_there(log: RemoteLog) -> None:
    topic = log.create_topic("cut/long")
    topic.append(b"a")
    subscription = topic.subscribe("billing", start=forebay.EARLIEST, ack_timeout_ms=600_000)
    with subscription.consumer("worker", session_timeout_ms=900) as consumer:
        taken = consumer.take(wait_s=10.0)
        threading.Event().wait(2.5)
        assert subscription.consumers() == ["worker"]
        assert consumer.ack(*taken) == 1
