"""Subscriptions in this process: consumers in threads take records in batches and acknowledge each batch.

Every record must reach one consumer, once. Servers stand beside the broker, in the case `subscriptions`.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import forebay
from bench import payload, stores
from bench.plan import Contender, Figures, Plan
from bench.results import Result, at_most, result

TAKEN = 100
"""Records that a consumer takes at once."""
KEYS = 256
ACK_TIMEOUT_MS = 1_000
GROUP = "workers"
PATIENCE = 120.0
CAREFUL_SECONDS = 2.0
"""So long after its start a subscription stores each delivery before it is made; figures are taken after it."""
STAMP = struct.Struct("<d")


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    found = plan.compare({mode: _ours(plan, mode) for mode in ("shared", "key_shared")})
    for mode in ("shared", "key_shared"):
        for consumers in plan.sizes.consumers:
            metric = f"{consumers} consumers"
            name = f"{mode}, {consumers} consumers, batches of {TAKEN}"
            yield result("dispatch", name, "records/s", found[mode][metric])
            name = f"{mode}, {consumers} consumers, processor time of a record"
            yield result("dispatch", name, "µs", found[mode][f"{metric}, cpu"])
        yield result("dispatch", f"{mode}, acknowledged", "records/s", found[mode]["acks"])
    for metric in ("p50", "p99"):
        yield result("dispatch", f"append to consumer, {metric}", "ms", found["shared"][metric])
    loop = plan.compare({"forebay": _looped(plan)})["forebay"]
    name = "each() and an ack for each record, processor time of a record"
    yield result(
        "dispatch",
        name,
        "µs",
        loop["each"],
        {"take(1000), ack(*all)": loop["take"]},
        [at_most(4, "take(1000), ack(*all)")],
    )
    again = plan.compare({"forebay": _redelivered(plan)})["forebay"]
    name = "delivered again, of the ack time-out"
    yield result("dispatch", name, "×", again["again"], {}, [at_most(1.2)])


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
    begun, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    if not over.wait(PATIENCE):
        over.set()
    took = time.perf_counter() - begun
    for thread in threads:
        thread.join()
    payload.check_count("what consumers have done", count, sum(done))
    return _rates(len(takers), count, took, time.process_time() - cpu)


def _rates(consumers: int, count: int, took: float, cpu: float) -> Figures:
    return {f"{consumers} consumers": count / took, f"{consumers} consumers, cpu": cpu / count * 1e6}


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


def _looped(plan: Plan) -> Contender:
    """What a record costs a consumer that loops over them, and one that takes and acknowledges many at once."""
    count = plan.sizes.dispatched

    def contender() -> Figures:
        figures: Figures = {}
        with stores.opened_ours(plan.fresh(), "disk") as topic:
            for values in payload.batches(payload.values(count)):
                topic.append_many(values)
            for name, consume in (("take", _by_take), ("each", _by_each)):
                with topic.subscribe(name, start=forebay.EARLIEST, mode="shared").consumer() as consumer:
                    done = consumer.ack(*consumer.take(1, wait_s=PATIENCE))
                    time.sleep(CAREFUL_SECONDS)
                    cpu = time.process_time()
                    done += consume(consumer, count - done)
                    figures[name] = (time.process_time() - cpu) / count * 1e6
                    payload.check_count(f"what a consumer has done by {name}", count, done)
        return figures

    return contender


def _by_take(consumer: forebay.Consumer, count: int) -> int:
    done = 0
    while done < count and (taken := consumer.take(1_000, wait_s=PATIENCE)):
        done += consumer.ack(*taken)
    return done


def _by_each(consumer: forebay.Consumer, count: int) -> int:
    done = 0
    for delivered in consumer.each(wait_s=PATIENCE):
        done += consumer.ack(delivered)
        if done == count:
            break
    return done


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
