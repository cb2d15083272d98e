"""A producer sends many records together: in order in each partition, each once, and no more than it may hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import forebay
from forebay import aio
from forebay.client.producers import HELD_BYTES
from tests.support.brokers import RunningBroker, running_broker
from tests.support.proxies import cutting_proxy

LONG_MS = 3_600_000.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with running_broker(tmp_path_factory.mktemp("producers") / "data") as broker:
        yield broker


@pytest.mark.slow
def test_records_of_a_partition_are_in_the_order_in_which_they_were_given(broker: RunningBroker) -> None:
    async def produce() -> None:
        async with aio.connect(broker.url) as log:
            topic = await log.create_topic("shop/ordered", partitions=4)
            async with topic.producer(linger_ms=1, batch_records=7) as producer:
                acks = [
                    await producer.append_nowait(b"%d" % number, key=b"%d" % (number % 9), tag="t")
                    for number in range(300)
                ]
            offsets = [await ack for ack in acks]
            records = [record async for record in topic.read()]
            for partition in range(4):
                found = [int(record.value or b"") for record in records if record.partition == partition]
                assert found == sorted(found)
            assert sorted(int(record.value or b"") for record in records) == list(range(300))
            places = {record.value: record.offset for record in records}
            assert offsets == [places[b"%d" % number] for number in range(300)]

    asyncio.run(produce())


def test_records_are_sent_together_and_a_flush_does_not_linger(broker: RunningBroker) -> None:
    with forebay.connect(broker.url) as log:
        topic = log.create_topic("shop/together", partitions=2)
        producer = topic.producer(linger_ms=LONG_MS)
        acks = [producer.append_nowait(b"%d" % number) for number in range(50)]
        assert not any(ack.done for ack in acks)

        producer.flush()

        assert all(ack.done for ack in acks)
        # Without keys, records of one batch stay together.
        assert {record.partition for record in topic.read()} == {0}
        producer.close()
        producer.close()
        with pytest.raises(forebay.Closed):
            producer.append_nowait(b"late")


def test_a_full_batch_is_sent_at_once(broker: RunningBroker) -> None:
    with forebay.connect(broker.url) as log:
        producer = log.create_topic("shop/full").producer(linger_ms=LONG_MS, batch_records=3)
        acks = [producer.append_nowait(b"x") for _ in range(3)]

        assert [ack.result(60) for ack in acks] == [0, 1, 2]


def test_a_log_that_is_closed_has_sent_what_was_queued(broker: RunningBroker) -> None:
    with forebay.connect(broker.url) as log:
        topic = log.create_topic("shop/closed")
        acks = [topic.producer(linger_ms=LONG_MS).append_nowait(b"x"), topic.append_nowait(b"y")]

    assert sorted(ack.result(0) for ack in acks) == [0, 1]


def test_a_producer_that_holds_too_much_waits(broker: RunningBroker) -> None:
    async def produce() -> None:
        async with aio.connect(broker.url) as log:
            topic = await log.create_topic("shop/waits")
            producer = topic.producer(linger_ms=LONG_MS, in_flight_bytes=1_000)
            first = await producer.append_nowait(bytes(1_000))
            waiting = asyncio.ensure_future(producer.append_nowait(b"next"))
            done, _ = await asyncio.wait((waiting,), timeout=0.01)
            assert not done
            await producer.flush()
            second = await waiting
            await producer.close()
            assert [await first, await second] == [0, 1]
            assert [record.value async for record in topic.read()] == [bytes(1_000), b"next"]

    asyncio.run(produce())


@pytest.mark.slow
def test_batches_over_cut_connections_are_there_once_and_in_order(broker: RunningBroker) -> None:
    with cutting_proxy(broker.url) as proxy, forebay.connect(proxy.url) as log:
        topic = log.create_topic("shop/cut", partitions=3)
        acks = []
        with topic.producer(linger_ms=1, batch_records=5) as producer:
            for number in range(200):
                if number % 10 == 0:
                    proxy.cut_answer(number)
                acks.append(producer.append_nowait(b"%d" % number, key=b"%d" % (number % 5)))
        proxy.cut_answer(1 << 40)

        assert all(ack.result(60) >= 0 for ack in acks)
        records = list(topic.read())
        assert sorted(int(record.value or b"") for record in records) == list(range(200))
        for partition in range(3):
            found = [int(record.value or b"") for record in records if record.partition == partition]
            assert found == sorted(found)


@pytest.mark.parametrize(
    "wrong", [{"batch_records": 0}, {"batch_bytes": 0}, {"in_flight": 0}, {"in_flight_bytes": 0}, {"linger_ms": -1}]
)
def test_limits_that_are_none_are_refused(broker: RunningBroker, wrong: dict[str, int]) -> None:
    with forebay.connect(broker.url) as log:
        topic = log.create_topic("shop/limits", exist_ok=True)
        with pytest.raises(forebay.Invalid):
            topic.producer(**wrong)


def test_records_without_a_value_count_with_what_they_take_in_memory(broker: RunningBroker) -> None:
    """Half a million of them counted as 32 MiB, and took some gigabytes."""

    async def produce() -> None:
        async with aio.connect(broker.url) as log:
            topic = await log.create_topic("shop/empty")
            producer = topic.producer(linger_ms=LONG_MS, in_flight_bytes=10 * HELD_BYTES)
            acks = [await producer.append_nowait(None) for _ in range(10)]
            waiting = asyncio.ensure_future(producer.append_nowait(None))
            done, _ = await asyncio.wait((waiting,), timeout=0.01)
            assert not done
            await producer.flush()
            acks.append(await waiting)
            await producer.close()
            assert [await ack for ack in acks] == list(range(11))

    asyncio.run(produce())
