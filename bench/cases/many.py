"""Many at once: producers of single records and of batches, topics written now and then, keyed rows, a stuck neighbour.

Each figure stands beside the way before, which is kept here: a batch held one of a few threads until it was durable,
and a record batch was split by its rows, one partition after the other.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import forebay
import forebay.aio
from bench import payload, stores
from bench.cases import durable
from bench.plan import Contender, Figures, Plan
from bench.results import Limit, Result, at_least, at_most, result
from forebay.partitioning import Partitioner
from forebay.testing.inside import inside

if TYPE_CHECKING:
    import pyarrow as pa

THREADS = 4
"""So many batches of asyncio were on their way at once, of all topics together."""
ROWS = 1_000
PARTITIONS = 4

Append = Callable[[forebay.aio.AsyncTopic, Sequence[bytes]], Awaitable[object]]


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    yield from _singles(plan)
    for each in plan.sizes.batched:
        yield from _batches(plan, each)
    yield from _arrow(plan)
    yield from _stuck(plan)
    for count in plan.sizes.written_topics:
        yield from _topics(plan, count)


# Single records of many tasks on one topic


def _singles(plan: Plan) -> Iterator[Result]:
    producers = plan.sizes.producers[-1]
    found = plan.compare(
        {
            "many": durable.produced(plan, durable.by_coroutines, producers),
            "one": durable.produced(plan, durable.by_threads, 1),
        }
    )
    name = f"single appends, fsync, in process, {producers} asyncio producers"
    peers = {"1 producer": found["one"]["rate"]}
    yield result("many", name, "records/s", found["many"]["rate"], peers, [at_least(40, "1 producer")])


# Batches of many tasks on one topic


def _batches(plan: Plan, each: int) -> Iterator[Result]:
    found = plan.compare(
        {"ours": _batched(plan, each, by_threads=False), "threads": _batched(plan, each, by_threads=True)}
    )
    name = f"{plan.sizes.tasks} tasks, batches of {each}, fsync"
    for metric, unit in (("records per sync", "records"), ("rate", "records/s")):
        limits: list[Limit] = [at_least(500)] if (metric, each) == ("records per sync", 10) else []
        peers = {f"{THREADS} threads": found["threads"][metric]}
        yield result("many", f"{name}, {metric}", unit, found["ours"][metric], peers, limits)


def _batched(plan: Plan, each: int, *, by_threads: bool) -> Contender:
    tasks, times = plan.sizes.tasks, plan.sizes.task_batches

    async def measured() -> Figures:
        records = payload.values(each)
        with _appending(by_threads=by_threads) as append:
            async with forebay.aio.open(plan.fresh() / "data") as log:
                topic = await log.create_topic("bench/t", durability="fsync")
                await topic.append(b"first")

                async def one() -> None:
                    for _ in range(times):
                        await append(topic, records)

                counters = inside(topic).wal().counters
                before, begun = counters.fsyncs, time.perf_counter()
                await asyncio.gather(*(one() for _ in range(tasks)))
                elapsed, syncs = time.perf_counter() - begun, counters.fsyncs - before
                count = tasks * times * each
                payload.check_count("forebay", count + 1, (await topic.offsets()).next)
        return {"records per sync": count / syncs, "rate": count / elapsed}

    return lambda: asyncio.run(measured())


@contextmanager
def _appending(*, by_threads: bool) -> Iterator[Append]:
    """How a task appends a batch: as it is, or by one of a few threads that waits for it."""
    if not by_threads:
        yield lambda topic, records: topic.append_many(records)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        yield lambda topic, records: asyncio.get_running_loop().run_in_executor(
            pool, inside(topic).topic.append_many, records
        )


# Many topics, each written now and then


def _topics(plan: Plan, count: int) -> Iterator[Result]:
    # One log for both ways: making so many topics takes longer than writing to them.
    path = plan.shared(f"{count} written topics", lambda path: None)
    with asyncio.Runner() as runner:
        log = runner.run(_opened(path / "data"))
        topics = runner.run(_made(log, count))
        rounds = max(1, round(plan.sizes.written_seconds))
        found = plan.compare(
            {
                "ours": lambda: runner.run(_written(topics, rounds, by_threads=False)),
                "threads": lambda: runner.run(_written(topics, rounds, by_threads=True)),
            }
        )
        runner.run(_checked(topics, 1 + 2 * rounds * plan.sizes.rounds))
        runner.run(log.close())
    for metric in ("p50", "p99"):
        peers = {f"{THREADS} threads": found["threads"][metric]}
        name = f"{count:,} topics written once a second, fsync, {metric}"
        yield result("many", name, "ms", found["ours"][metric], peers)


async def _opened(path: Path) -> forebay.aio.AsyncLog:
    return await forebay.aio.open(path)


async def _made(log: forebay.aio.AsyncLog, count: int) -> list[forebay.aio.AsyncTopic]:
    topics = [await log.create_topic(f"bench/t{number}", durability="fsync") for number in range(count)]
    await asyncio.gather(*(topic.append(b"first") for topic in topics))
    return topics


async def _written(topics: Sequence[forebay.aio.AsyncTopic], rounds: int, *, by_threads: bool) -> Figures:
    taken: list[float] = []
    with _appending(by_threads=by_threads) as append:

        async def one(topic: forebay.aio.AsyncTopic, due: float) -> None:
            await asyncio.sleep(due - time.perf_counter())
            await append(topic, [b"x" * payload.VALUE_BYTES])
            taken.append(time.perf_counter() - due)

        begun, count = time.perf_counter() + 0.1, len(topics)
        dues = [(topic, begun + turn + place / count) for turn in range(rounds) for place, topic in enumerate(topics)]
        await asyncio.gather(*(one(topic, due) for topic, due in dues))
    return _percentiles(taken)


async def _checked(topics: Sequence[forebay.aio.AsyncTopic], count: int) -> None:
    for topic in topics[:: max(1, len(topics) // 10)]:
        payload.check_count("forebay", count, (await topic.offsets()).next)


def _percentiles(taken: Sequence[float]) -> Figures:
    return {"p50": float(np.percentile(taken, 50)) * 1000, "p99": float(np.percentile(taken, 99)) * 1000}


# Keyed record batches


def _arrow(plan: Plan) -> Iterator[Result]:
    found = plan.compare({"ours": _keyed(plan, _by_column), "by rows": _keyed(plan, _by_rows)})
    name = f"append_arrow, {ROWS:,} keyed rows over {PARTITIONS} partitions, disk"
    peers = {"by rows": found["by rows"]["taken"]}
    yield result("many", name, "µs", found["ours"]["taken"], peers, [at_most(600)])


def _keyed(plan: Plan, append: Callable[[forebay.Topic, pa.RecordBatch], None]) -> Contender:
    def contender() -> Figures:
        batch = _keyed_batch()
        with forebay.open(plan.fresh() / "data", stores.FREE) as log:
            topic = log.create_topic("bench/t", partitions=PARTITIONS)
            append(topic, batch)
            taken = []
            for _ in range(plan.sizes.keyed_batches):
                begun = time.perf_counter()
                append(topic, batch)
                taken.append(time.perf_counter() - begun)
            count = sum(topic.offsets(partition).next for partition in range(PARTITIONS))
            payload.check_count("forebay", ROWS * (len(taken) + 1), count)
        return {"taken": float(np.median(taken)) * 1e6}

    return contender


def _keyed_batch() -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415 - loaded only where it is used

    keys = [b"key-%09d" % (number * 7_919 % 1_000_003) for number in range(ROWS)]
    return pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(payload.values(ROWS), pa.binary())})


def _by_column(topic: forebay.Topic, batch: pa.RecordBatch) -> None:
    topic.append_arrow(batch)


def _by_rows(topic: forebay.Topic, batch: pa.RecordBatch) -> None:
    chosen = Partitioner(PARTITIONS).choose_many(batch.column("key").to_pylist(), batch.num_rows)
    assert not isinstance(chosen, int)
    order = np.argsort(chosen, kind="stable")
    numbers, firsts = np.unique(chosen[order], return_index=True)
    for number, rows in zip(numbers, np.split(order, firsts[1:]), strict=True):
        topic.append_arrow(batch.take(rows), partition=int(number))


# A stuck shard beside another


def _stuck(plan: Plan) -> Iterator[Result]:
    found = plan.compare({"beside": _neighbour(plan, is_stuck=True), "alone": _neighbour(plan, is_stuck=False)})
    for metric in ("p50", "p99"):
        limits: list[Limit] = [at_most(1.5, "alone")] if metric == "p99" else []
        peers = {"alone": found["alone"][metric]}
        yield result(
            "many", f"append beside a stuck shard, fsync, {metric}", "ms", found["beside"][metric], peers, limits
        )


def _neighbour(plan: Plan, *, is_stuck: bool) -> Contender:
    async def measured() -> Figures:
        async with forebay.aio.open(plan.fresh() / "data") as log:
            stuck = await log.create_topic("bench/stuck", durability="fsync")
            other = await log.create_topic("bench/other", durability="fsync")
            for topic in (stuck, other):
                await topic.append(b"first")
            with _holding(stuck, plan.sizes.stuck_seconds) if is_stuck else nullcontext():
                waiting = asyncio.create_task(stuck.append_many([b"waits"]))
                taken = await _paced(partial(other.append_many, [b"v"]), plan.sizes.stuck_seconds)
            await waiting
            payload.check_count("forebay", len(taken) + 1, (await other.offsets()).next)
        return _percentiles(taken)

    return lambda: asyncio.run(measured())


async def _paced(append: Callable[[], Awaitable[object]], seconds: float) -> list[float]:
    """How long each append took, one after the other for so long, at least one."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        begun = time.perf_counter()
        await append()
        taken.append(time.perf_counter() - begun)
    return taken


@contextmanager
def _holding(topic: forebay.aio.AsyncTopic, seconds: float) -> Iterator[None]:
    """The log of the topic writes nothing inside, as on a disk that hangs; at the most for so long."""
    wal = inside(topic).wal()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with wal.committing:
            held.set()
            done.wait(seconds)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()
