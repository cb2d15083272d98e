"""A topic that is deleted, and perhaps created again, under the handles of clients: they end, as embedded ones do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import forebay
import forebay.aio
from forebay import EARLIEST, LATEST, UnknownTopic
from forebay.broker.exchange import Request
from forebay.client import RemoteConsumer, RemoteLog, RemoteReader, RemoteSubscription, RemoteTopic
from forebay.records import DeliveredRecord, Record
from forebay.service.service import AppendRecords, Service, TopicCache
from tests.support.brokers import RunningBroker, running_broker
from tests.support.gates import HeldStep, StepGate
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow

TOPIC = "shop/orders"
WAS_DELETED = pytest.mark.parametrize("again", [False, True], ids=["deleted", "created again"])


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with running_broker(tmp_path / "log") as running:
        yield running


@pytest.fixture
def log(broker: RunningBroker) -> Iterator[RemoteLog]:
    with forebay.connect(broker.url, timeout_s=PATIENCE) as connected:
        yield connected


def delete(broker: RunningBroker, *, again: bool) -> None:
    """As another caller of the broker does it."""
    with broker.client() as other:
        assert other.delete(f"/v1/topics/{TOPIC}").status_code == 204
        if again:
            assert other.put(f"/v1/topics/{TOPIC}", json={"partitions": 2}).status_code == 201


def nothing_in(broker: RunningBroker) -> bool:
    """Whether the new topic has neither a record nor a place of a reader or subscription."""
    new = broker.log().topic(TOPIC)
    return not list(new.read()) and not new.subscriptions() and new.reader("r").offset() is None


def calls(
    topic: RemoteTopic,
    reader: RemoteReader,
    first: Record,
    subscription: RemoteSubscription,
    consumer: RemoteConsumer,
    held: list[DeliveredRecord],
) -> dict[str, Callable[[], Any]]:
    """What callers do by things that they were given before."""
    return {
        "append": lambda: topic.append(b"1"),
        "append by key": lambda: topic.append(b"1", key=b"k"),
        "append_many": lambda: topic.append_many([b"1", b"2"]),
        "append_nowait": lambda: topic.append_nowait(b"1").result(PATIENCE),
        "append_many_nowait": lambda: topic.append_many_nowait([b"1"]).result(PATIENCE),
        "a producer of the caller": lambda: topic.append(b"1", producer=7, sequence=0),
        "read": lambda: list(topic.read()),
        "page": lambda: topic.page(0, 0),
        "read_by_key": lambda: list(topic.read_by_key(b"k")),
        "follow": lambda: next(iter(topic.follow(EARLIEST))),
        "offsets": topic.offsets,
        "resolve": lambda: topic.resolve(LATEST),
        "last_sequence": lambda: topic.last_sequence(7),
        "delete_before": lambda: topic.delete_before(1),
        "delete_by_key": lambda: topic.delete_by_key(b"k"),
        "flush": topic.flush,
        "reader.ack": lambda: reader.ack(first),
        "reader.offset": reader.offset,
        "reader.note": reader.note,
        "reader.reset": lambda: reader.reset(EARLIEST),
        "reader.forget": reader.forget,
        "reader.read": lambda: list(reader.read()),
        "subscribe": lambda: topic.subscribe("other"),
        "subscription": lambda: topic.subscription("s"),
        "subscriptions": topic.subscriptions,
        "subscription.lag": subscription.lag,
        "subscription.seek": lambda: subscription.seek(EARLIEST),
        "subscription.peek": subscription.peek,
        "consumer.take": lambda: consumer.take(1),
        "consumer.ack": lambda: consumer.ack(*held),
        "dead_letters": lambda: topic.dead_letters().letters(),
    }


def told(call: Callable[[], object]) -> type[BaseException] | None:
    """The kind of error that a call raises."""
    try:
        call()
    except forebay.ForebayError as error:
        return type(error)
    return None


@WAS_DELETED
def test_every_call_by_an_old_handle_is_refused(broker: RunningBroker, log: RemoteLog, again: bool) -> None:  # noqa: FBT001
    topic = log.create_topic(TOPIC, partitions=2)
    for number in range(4):
        topic.append(b"%d" % number, partition=number % 2, key=b"k")
    reader = topic.reader("r")
    first = next(iter(reader.read()))
    reader.ack(first)
    subscription = topic.subscribe("s", start=EARLIEST)
    consumer = subscription.consumer("c")
    held = consumer.take(4)
    producer = topic.producer(linger_ms=0)
    delete(broker, again=again)

    found = {name: told(call) for name, call in calls(topic, reader, first, subscription, consumer, held).items()}
    assert found == dict.fromkeys(found, UnknownTopic)
    with pytest.raises(UnknownTopic):
        producer.append_nowait(b"1").result(PATIENCE)
    if again:
        assert nothing_in(broker)
        # By name there is a topic.
        assert log.topic(TOPIC).append(b"new", partition=0) == 0
        assert log.group("g").commit(TOPIC, 1) == 1


@WAS_DELETED
def test_a_stream_that_waits_for_records_ends_with_its_topic(
    broker: RunningBroker,
    log: RemoteLog,
    again: bool,  # noqa: FBT001
) -> None:
    topic = log.create_topic(TOPIC)
    topic.append(b"old")
    streams = [iter(topic.follow(EARLIEST)), iter(topic.reader("r").follow())]
    assert [next(stream).value for stream in streams] == [b"old", b"old"]

    with ThreadPoolExecutor(len(streams)) as threads:
        ends = [threads.submit(next, stream) for stream in streams]
        delete(broker, again=again)
        if again:
            broker.log().topic(TOPIC).append_many([b"new"] * 5)
        for end in ends:
            with pytest.raises(UnknownTopic):
                end.result(PATIENCE)


def test_a_handle_of_asyncio_ends_with_its_topic(broker: RunningBroker) -> None:
    async def run() -> None:
        async with forebay.aio.connect(broker.url) as log:
            topic = await log.create_topic(TOPIC)
            await topic.append(b"old")
            stream = topic.follow(EARLIEST)
            assert (await anext(stream)).value == b"old"
            await asyncio.to_thread(delete, broker, again=True)
            for call in (
                lambda: topic.append(b"1"),
                lambda: topic.append_many([b"1"]),
                topic.offsets,
                lambda: topic.reader("r").ack_up_to(1),
                lambda: topic.subscribe("s"),
                lambda: anext(stream),
            ):
                with pytest.raises(UnknownTopic):
                    await asyncio.wait_for(call(), PATIENCE)

    asyncio.run(run())
    assert nothing_in(broker)


STEPS = [
    HeldStep(owner, name, when)
    for owner, name in [(Request, "body"), (Service, "append"), (TopicCache, "get"), (AppendRecords, "queue")]
    for when in ("before", "after")
    if (name, when) not in (("append", "after"), ("queue", "after"))  # it is done by then
]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_an_append_that_waits_inside_the_broker_while_its_topic_is_created_again_goes_nowhere(
    broker: RunningBroker, log: RemoteLog, step: HeldStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = StepGate()
    topic = log.create_topic(TOPIC)
    topic.append(b"old")
    step.guard(monkeypatch, gate)
    gate.armed.set()
    with ThreadPoolExecutor(1) as threads:
        append = threads.submit(topic.append, b"late")
        try:
            assert gate.reached.wait(PATIENCE)
            in_process = broker.log()
            in_process.delete_topic(TOPIC)
            in_process.create_topic(TOPIC)
        finally:
            gate.released.set()
        with pytest.raises(UnknownTopic):
            append.result(PATIENCE)
    assert nothing_in(broker)


def test_a_request_without_an_id_goes_by_the_name(broker: RunningBroker, log: RemoteLog) -> None:
    old = log.create_topic(TOPIC).spec.topic_id
    delete(broker, again=True)
    with broker.client() as http:

        def post(**headers: str) -> httpx.Response:
            return http.post(f"/v1/topics/{TOPIC}/records", json=[{"value": "x"}], headers=headers)

        assert post().status_code == 200
        refused = post(**{"Forebay-Topic-Id": old})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_topic")
        assert "was deleted" in refused.json()["error"]["message"]
        assert post(**{"Forebay-Topic-Id": "x"}).status_code == 400
        several = http.get(f"/v1/watch?topic={TOPIC}&topic=other", headers={"Forebay-Topic-Id": old})
        assert several.status_code == 400


def test_callers_of_an_old_topic_do_not_hold_up_those_of_the_new(broker: RunningBroker, log: RemoteLog) -> None:
    old = log.create_topic(TOPIC)
    delete(broker, again=True)
    new, stop = log.topic(TOPIC), threading.Event()

    def go_on() -> int:
        count = 0
        while not stop.is_set():
            with pytest.raises(UnknownTopic):
                old.append(b"old")
            count += 1
        return count

    with ThreadPoolExecutor(1) as threads:
        going = threads.submit(go_on)
        offsets = [new.append(b"%d" % number, partition=0) for number in range(50)]
        stop.set()
        refused = going.result(PATIENCE)
    assert refused
    assert offsets == list(range(50))
