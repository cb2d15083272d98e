"""Subscriptions in this process beside consumer groups of Redis and work queues of NATS JetStream, behind loopback.

Consumers take records in batches and acknowledge each batch. Every record must reach one consumer, once. The peers have
no order by key; `key_shared` stands beside their groups all the same. Ours is a library: what a server between would
cost is in the case `http`.
"""

# ruff: noqa: PLC0415 - what is not installed is left out

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import forebay
from bench import payload, servers, stores
from bench.plan import Contender, Figures, Plan
from bench.results import Limit, Result, at_least, at_most, result

TAKEN = 100
"""Records that a consumer takes at once."""
KEYS = 256
PEER_PARTS = {"redis": 2, "nats": 20}
"""Of the records that are dispatched here, a slow peer gets one part in so many."""
ACK_TIMEOUT_MS = 1_000
GROUP = "workers"
PATIENCE = 120.0
CAREFUL_SECONDS = 2.0
"""So long after its start a subscription stores each delivery before it is made; figures are taken after it."""
STAMP = struct.Struct("<d")


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    contenders: dict[str, Contender | None] = {mode: _ours(plan, mode) for mode in ("shared", "key_shared")}
    for name, make in (("redis", _redis), ("nats", _nats)):
        contenders[name] = make(plan) if plan.servers and servers.available(name) else None
    found = plan.compare(contenders)
    for mode in ("shared", "key_shared"):
        for consumers in plan.sizes.consumers:
            metric = f"{consumers} consumers"
            peers = {name: found[name].get(metric) for name in ("redis", "nats")}
            limits: list[Limit] = [at_least(2, "redis"), at_least(5, "nats")]
            name = f"{mode}, {consumers} consumers, batches of {TAKEN}"
            yield result("dispatch", name, "records/s", found[mode][metric], peers, limits)
            peers = {peer: found[peer].get(f"{metric}, cpu") for peer in ("redis", "nats")}
            name = f"{mode}, {consumers} consumers, processor time of a record, client and server"
            yield result("dispatch", name, "µs", found[mode][f"{metric}, cpu"], peers)
        peers = {name: found[name].get("acks") for name in ("redis", "nats")}
        yield result("dispatch", f"{mode}, acknowledged", "records/s", found[mode]["acks"], peers)
    for metric in ("p50", "p99"):
        peers = {name: found[name].get(metric) for name in ("redis", "nats")}
        yield result("dispatch", f"append to consumer, {metric}", "ms", found["shared"][metric], peers)
    again = plan.compare({"forebay": _redelivered(plan)})["forebay"]
    name = "delivered again, of the ack time-out"
    yield result("dispatch", name, "×", again["again"], {}, [at_most(1.2)])


# Ours


def _ours(plan: Plan, mode: str) -> Contender:
    count = plan.sizes.dispatched

    def contender() -> Figures:
        figures: Figures = {}
        with stores.opened_ours(plan.fresh(), "disk") as topic:
            keys = [b"%d" % (number % KEYS) for number in range(payload.BATCH)]
            for values in payload.batches(payload.values(count)):
                topic.append_many(values, keys=keys[: len(values)])
            for consumers in plan.sizes.consumers:
                options: Any = {"mode": mode, "window_records_max": 100_000}
                subscription = topic.subscribe(f"{GROUP}-{consumers}", start=forebay.EARLIEST, **options)
                takers = [_taker(subscription) for _ in range(consumers)]
                done = sum(take() for take in takers)
                time.sleep(CAREFUL_SECONDS)
                figures |= _raced(takers, count - done)
            figures["acks"] = _acked(topic.subscribe("acks", start=forebay.EARLIEST, mode=mode), count)
            figures |= _latencies(topic, plan.sizes.dispatch_events)
        return figures

    return contender


def _taker(subscription: forebay.Subscription) -> Callable[[], int]:
    """Takes a batch and acknowledges it; how many records it had."""
    consumer = subscription.consumer(unacked_max=TAKEN)

    def take() -> int:
        taken = consumer.take(TAKEN, wait_s=0.2)
        return consumer.ack(*taken)

    return take


def _raced(takers: Sequence[Callable[[], int]], count: int) -> Figures:
    """What these consumers, each in a thread, have done of `count` in a second, and what a record cost."""
    done = [0] * len(takers)
    over = threading.Event()

    def consume(number: int) -> None:
        while not over.is_set():
            done[number] += takers[number]()
            if sum(done) >= count:
                over.set()

    threads = [threading.Thread(target=consume, args=[number]) for number in range(len(takers))]
    begun, cpu = time.perf_counter(), _cpu()
    for thread in threads:
        thread.start()
    if not over.wait(PATIENCE):
        over.set()
    took = time.perf_counter() - begun
    for thread in threads:
        thread.join()
    payload.check_count("what consumers have done", count, sum(done))
    return _rates(len(takers), count, took, _cpu() - cpu)


def _rates(consumers: int, count: int, took: float, cpu: float) -> Figures:
    return {f"{consumers} consumers": count / took, f"{consumers} consumers, cpu": cpu / count * 1e6}


def _cpu() -> float:
    """Seconds of processor time of this process and of the servers that it has started."""
    ticks = 0
    # Those of the first thread, which starts servers: other threads come and go.
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _acked(subscription: forebay.Subscription, count: int) -> float:
    """Acknowledgements a second, in batches, of records that were taken before."""
    consumer = subscription.consumer(unacked_max=1_000)
    seconds, acked = 0.0, consumer.ack(*consumer.take(1, wait_s=5))
    time.sleep(CAREFUL_SECONDS)
    while acked < count:
        taken = consumer.take(1_000, wait_s=5)
        begun = time.perf_counter()
        for first in range(0, len(taken), TAKEN):
            acked += consumer.ack(*taken[first : first + TAKEN])
        seconds += time.perf_counter() - begun
        if not taken:
            break
    payload.check_count("what was acknowledged", count, acked)
    return count / seconds


def _latencies(topic: forebay.Topic, events: int) -> Figures:
    """From before an append until a consumer that waits has the record, one at a time."""
    subscription = topic.subscribe("late", mode="shared")
    consumer = subscription.consumer()

    def take() -> bytes:
        [taken] = consumer.take(1, wait_s=PATIENCE)
        consumer.ack(taken)
        return taken.record.value or b""

    return _timed(events, topic.append, take)


def _timed(events: int, send: Callable[[bytes], object], take: Callable[[], bytes]) -> Figures:
    late: list[float] = []

    def consume() -> None:
        for _ in range(events):
            [sent] = STAMP.unpack(take()[: STAMP.size])
            late.append(time.perf_counter() - sent)

    waiting = threading.Thread(target=consume)
    waiting.start()
    for number in range(events):
        while len(late) < number:
            time.sleep(0.0005)
        time.sleep(0.002)
        send(STAMP.pack(time.perf_counter()) + bytes(payload.VALUE_BYTES - STAMP.size))
    waiting.join(PATIENCE)
    return _percentiles(late, events)


def _percentiles(late: Sequence[float], events: int) -> Figures:
    payload.check_count("what was delivered", events, len(late))
    return {"p50": float(np.percentile(late, 50)) * 1e3, "p99": float(np.percentile(late, 99)) * 1e3}


def _redelivered(plan: Plan) -> Contender:
    """How long a record waits that its consumer never acknowledges, as a share of the time-out."""

    def contender() -> Figures:
        with stores.opened_ours(plan.fresh(), "disk") as topic:
            subscription = topic.subscribe("late", mode="shared", ack_timeout_ms=ACK_TIMEOUT_MS, backoff_min_ms=0)
            with subscription.consumer("stuck") as stuck, subscription.consumer("next") as other:
                topic.append(b"one")
                [taken] = stuck.take(1, wait_s=PATIENCE)
                begun = time.perf_counter()
                [again] = other.take(1, wait_s=PATIENCE)
                took = time.perf_counter() - begun
                payload.check_count("the attempts", taken.attempt + 1, again.attempt)
                other.ack(again)
        return {"again": took * 1000 / ACK_TIMEOUT_MS}

    return contender


# Peers


def _redis(plan: Plan) -> Contender:
    """A consumer group of a stream, its consumers with a connection each."""
    count = max(TAKEN, plan.sizes.dispatched // PEER_PARTS["redis"])

    def contender() -> Figures:
        import redis

        figures: Figures = {}
        with servers.redis_server(plan.fresh(), durable=False) as port:
            stream = servers.RedisStream(port)
            for values in payload.batches(payload.values(count)):
                stream.write(values)
            client: Any = redis.Redis(host=servers.HOST, port=port)

            def taker(group: str, name: str) -> Callable[[], int]:
                own: Any = redis.Redis(host=servers.HOST, port=port)

                def take() -> int:
                    answer = own.xreadgroup(group, name, {"t": ">"}, count=TAKEN, block=200)
                    return sum(own.xack("t", group, *[entry for entry, _ in found]) for _, found in answer)

                return take

            for consumers in plan.sizes.consumers:
                group = f"{GROUP}-{consumers}"
                client.xgroup_create("t", group, id="0")
                takers = [taker(group, str(number)) for number in range(consumers)]
                figures |= _raced(takers, count)
            figures["acks"] = _redis_acks(client, count)
            figures |= _redis_latencies(client, plan.sizes.dispatch_events)
            client.close()
            stream.close()
        return figures

    return contender


def _redis_acks(client: Any, count: int) -> float:
    client.xgroup_create("t", "acks", id="0")
    seconds, acked = 0.0, 0
    while answer := client.xreadgroup("acks", "one", {"t": ">"}, count=1_000):
        entries = [entry for entry, _ in answer[0][1]]
        begun = time.perf_counter()
        for first in range(0, len(entries), TAKEN):
            acked += client.xack("t", "acks", *entries[first : first + TAKEN])
        seconds += time.perf_counter() - begun
    payload.check_count("what redis acknowledged", count, acked)
    return count / seconds


def _redis_latencies(client: Any, events: int) -> Figures:
    client.xgroup_create("t", "late", id="$")

    def take() -> bytes:
        [[_, [[entry, fields]]]] = client.xreadgroup("late", "one", {"t": ">"}, count=1, block=int(PATIENCE * 1000))
        client.xack("t", "late", entry)
        value: bytes = fields[b"v"]
        return value

    return _timed(events, lambda value: client.xadd("t", {"v": value}), take)


def _nats(plan: Plan) -> Contender:
    """A durable pull consumer of a stream, fetched by tasks of one loop."""
    count = max(TAKEN, plan.sizes.dispatched // PEER_PARTS["nats"])

    def contender() -> Figures:
        with servers.nats_server(plan.fresh(), durable=False) as port:
            return asyncio.run(_nats_figures(plan, port, count))

    return contender


async def _nats_figures(plan: Plan, port: int, count: int) -> Figures:
    import nats

    figures: Figures = {}
    client = await nats.connect(f"nats://{servers.HOST}:{port}")
    stream = client.jetstream()
    await stream.add_stream(name="t", subjects=["t"])
    for values in payload.batches(payload.values(count)):
        await asyncio.gather(*[stream.publish("t", value) for value in values])
    for consumers in plan.sizes.consumers:
        figures |= await _nats_raced(stream, f"{GROUP}-{consumers}", consumers, count)
    figures["acks"] = await _nats_acks(client, stream, count)
    figures |= await _nats_latencies(stream, plan.sizes.dispatch_events)
    await client.close()
    return figures


async def _nats_raced(stream: Any, name: str, consumers: int, count: int) -> Figures:
    done = 0
    subscriptions = [await stream.pull_subscribe("t", durable=name) for _ in range(consumers)]
    begun, cpu = time.perf_counter(), _cpu()

    async def consume(subscription: Any) -> None:
        nonlocal done
        while done < count:
            try:
                for message in await subscription.fetch(TAKEN, timeout=0.2):
                    await message.ack()
                    done += 1
            except TimeoutError:
                continue

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*[consume(each) for each in subscriptions])
    took = time.perf_counter() - begun
    payload.check_count("what consumers of nats have done", count, done)
    return _rates(consumers, count, took, _cpu() - cpu)


async def _nats_acks(client: Any, stream: Any, count: int) -> float:
    subscription = await stream.pull_subscribe("t", durable="acks")
    seconds, acked = 0.0, 0
    while acked < count:
        messages = await subscription.fetch(min(1_000, count - acked), timeout=5)
        begun = time.perf_counter()
        for message in messages:
            await message.ack()
        await client.flush()
        seconds += time.perf_counter() - begun
        acked += len(messages)
    return count / seconds


async def _nats_latencies(stream: Any, events: int) -> Figures:
    import nats.js.api

    config = nats.js.api.ConsumerConfig(deliver_policy=nats.js.api.DeliverPolicy.NEW)
    subscription = await stream.pull_subscribe("t", durable="late", config=config)
    late: list[float] = []
    for _ in range(events):
        fetching = asyncio.create_task(subscription.fetch(1, timeout=PATIENCE))
        await asyncio.sleep(0.002)
        await stream.publish("t", STAMP.pack(time.perf_counter()) + bytes(payload.VALUE_BYTES - STAMP.size))
        [message] = await fetching
        late.append(time.perf_counter() - STAMP.unpack(message.data[: STAMP.size])[0])
        await message.ack()
    return _percentiles(late, events)
