"""Followers of one topic in an event loop: what they cost its writer, when they get a record, what they cost idle.

The reference is the way of version 0.1: a waker, a thread's read per page and two looks a second for each follower.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import numpy as np

import forebay
from bench import payload, stores
from bench.plan import Contender, Figures, Plan
from bench.results import Limit, Result, at_most, result
from forebay.aio import AsyncStream
from forebay.format.frame.batch import Batch
from forebay.live import Feeds, WatchedTopic, Watcher

THREADS = 4
ALONE_SHARE = 4
LOOK_SECONDS = 0.5
PATIENCE = 60.0

Follow: TypeAlias = Callable[[forebay.Topic, int], Coroutine[Any, Any, list[AsyncIterator[forebay.Record]]]]
"""Begins so many followers of a topic at its end, in the running loop."""


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    counts = plan.sizes.watchers
    contenders: dict[str, Contender | None] = {}
    for count in counts:
        contenders[f"shared {count}"] = _watched(plan, count, _shared)
        # Of the way before, fewer: with many followers a record takes it longer than the pause between two.
        contenders[f"each alone {count}"] = _watched(plan, count, _each_alone, share=ALONE_SHARE)
    found = plan.compare(contenders)
    one = found[f"shared {counts[0]}"]
    for count in counts:
        ours, alone = found[f"shared {count}"], found[f"each alone {count}"]
        limits = [at_most(1.5, "one follower")] if count == counts[-1] else []
        for metric, said in (("append p99", "p99"), ("append cpu", "cpu time of its thread, p50")):
            peers = {"each alone": alone[metric], "one follower": one[metric]}
            yield result("watch", f"append, {count:,} followers, {said}", "µs", ours[metric], peers, limits)
        delivered: list[Limit] = [at_most(60)] if count == counts[-1] else []
        peers = {"each alone": alone["delivery p99"]}
        yield result("watch", f"delivery, {count:,} followers, p99", "ms", ours["delivery p99"], peers, delivered)
    memory = plan.compare({"forebay": _watched(plan, 1, _shared, durability="memory")})["forebay"]
    yield result("watch", "delivery, class memory, p99", "ms", memory["delivery p99"], {}, [at_most(5)])
    idle = plan.compare({"shared": _idle(plan, _shared), "each alone": _idle(plan, _each_alone)})
    name, share = f"{plan.sizes.idle_watchers:,} idle followers", "share of a core"
    peers = {"each alone": idle["each alone"][share]}
    yield result("watch", name, share, idle["shared"][share], peers, [at_most(0.02)])


def _watched(plan: Plan, count: int, follow: Follow, *, durability: str = "disk", share: int = 1) -> Contender:
    """A thread appends at a steady pace while `count` followers take each record: `1 / share` of the appends."""
    appends, step = max(1, plan.sizes.watched_appends // share), plan.sizes.watched_step_seconds

    def contender() -> Figures:
        with stores.opened_ours(plan.fresh(), durability) as topic:
            topic.append(b"first")
            sent = [0.0] * (appends + 1)
            taken, cpu = np.zeros(appends), np.zeros(appends)
            with _loop() as run_in_loop:
                tasks = run_in_loop(_begun(topic, count, follow, sent)).result(PATIENCE)
                for number in range(1, appends + 1):
                    due = time.perf_counter() + step
                    began = time.thread_time()
                    sent[number] = time.perf_counter()
                    topic.append(b"record")
                    taken[number - 1] = time.perf_counter() - sent[number]
                    cpu[number - 1] = time.thread_time() - began
                    time.sleep(max(0.0, due - time.perf_counter()))
                late = np.concatenate(run_in_loop(_all(tasks)).result(PATIENCE))
            payload.check_count("records delivered", appends * count, len(late))
        return {
            "append cpu": float(np.percentile(cpu, 50)) * 1e6,
            "append p99": float(np.percentile(taken, 99)) * 1e6,
            "delivery p99": float(np.percentile(late, 99)) * 1e3,
        }

    return contender


def _idle(plan: Plan, follow: Follow) -> Contender:
    """What followers cost that get nothing."""

    def contender() -> Figures:
        with stores.opened_ours(plan.fresh(), "disk") as topic:
            topic.append(b"first")
            with _loop() as run_in_loop:
                tasks = run_in_loop(_begun(topic, plan.sizes.idle_watchers, follow, [])).result(PATIENCE)
                begun, cpu = time.perf_counter(), time.process_time()
                time.sleep(plan.sizes.idle_seconds)
                share = (time.process_time() - cpu) / (time.perf_counter() - begun)
                run_in_loop(_ended(tasks)).result(PATIENCE)
        return {"share of a core": share}

    return contender


@contextlib.contextmanager
def _loop() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """An event loop in a thread of its own; what is given runs coroutines there."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _begun(
    topic: forebay.Topic, count: int, follow: Follow, sent: list[float]
) -> list[asyncio.Task[list[float]]]:
    streams = await follow(topic, count)
    tasks = [asyncio.create_task(_taken(stream, sent)) for stream in streams]
    await asyncio.sleep(0.2)
    return tasks


async def _taken(stream: AsyncIterator[forebay.Record], sent: list[float]) -> list[float]:
    """How late each record came."""
    late = []
    async with contextlib.aclosing(stream):  # type: ignore[type-var]
        async for record in stream:
            late.append(time.perf_counter() - sent[record.offset])
            if record.offset == len(sent) - 1:
                break
    return late


async def _ended(tasks: list[asyncio.Task[list[float]]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _all(tasks: list[asyncio.Task[list[float]]]) -> list[list[float]]:
    return list(await asyncio.gather(*tasks))


async def _shared(topic: forebay.Topic, count: int) -> list[AsyncIterator[forebay.Record]]:
    """Our way."""
    threads, loop = ThreadPoolExecutor(THREADS), asyncio.get_running_loop()
    feeds = Feeds(partial(loop.run_in_executor, threads))
    watched = [WatchedTopic(topic, topic.following, Batch.records) for _ in range(count)]
    streams = [AsyncStream(Watcher(feeds, [one]), topic.check_open) for one in watched]
    for stream in streams:
        await stream.__aenter__()
    return list(streams)


async def _each_alone(topic: forebay.Topic, count: int) -> list[AsyncIterator[forebay.Record]]:
    """The way before."""
    threads, loop = ThreadPoolExecutor(THREADS), asyncio.get_running_loop()
    return [_alone(topic, threads, await loop.run_in_executor(threads, topic.following)) for _ in range(count)]


async def _alone(topic: forebay.Topic, threads: ThreadPoolExecutor, following: Any) -> AsyncIterator[forebay.Record]:
    loop, heard, is_rung = asyncio.get_running_loop(), asyncio.Event(), False

    def ring() -> None:
        nonlocal is_rung
        if not is_rung:
            is_rung = True
            loop.call_soon_threadsafe(heard.set)

    following.listen(ring)
    try:
        while True:
            is_rung = False
            heard.clear()
            page = await loop.run_in_executor(threads, lambda: list(following.next_page() or ()))
            for record in page:
                yield record
            if not page:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(heard.wait(), LOOK_SECONDS)
    finally:
        following.leave(ring)
