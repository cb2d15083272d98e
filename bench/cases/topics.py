"""One record after the other, each to the next of many topics: what a topic more costs, in process and over HTTP.

The cost of an append should not depend on how many topics take turns. In process LMDB stands beside it, with one
transaction for each record and the number of the topic in its key; over HTTP Redis, with as many streams.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import uvloop

import forebay
from bench import payload, raw, servers, stores, web
from bench.cases.http import METRICS, create, request_of, texts
from bench.load import Ask, Load, Server, load
from bench.plan import Contender, Figures, Plan
from bench.results import Limit, Result, at_most, result

SLACK = 1.2
"""What many topics may cost in proportion to the fewest."""


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    yield from _in_process(plan)
    yield from _over_http(plan)


# In process


def _in_process(plan: Plan) -> Iterator[Result]:
    counts = plan.sizes.appended_topics
    contenders: dict[str, Contender | None] = {}
    for count in counts:
        contenders[f"forebay {count}"] = _appended(plan, count)
        contenders[f"lmdb {count}"] = _put(plan, count) if plan.peers and stores.available("lmdb") else None
    found = plan.compare(contenders)
    least = found[f"forebay {counts[0]}"]
    for count, (metric, said) in itertools.product(counts, (("each", ""), ("cpu", ", processor time"))):
        fewest = {} if count == counts[0] else {f"{counts[0]:,} topics": least[metric]}
        limits: list[Limit] = [at_most(SLACK, name) for name in fewest]
        peers = {"lmdb": found[f"lmdb {count}"].get(metric), **fewest}
        name = f"append in turn over {count:,} topics, disk, in process{said}"
        yield result("topics", name, "µs", found[f"forebay {count}"][metric], peers, limits)


def _appended(plan: Plan, count: int) -> Contender:
    def make(path: Path) -> None:
        with forebay.open(path / "data") as log:
            for number in range(count):
                log.create_topic(f"bench/t{number}")

    path = plan.shared(f"{count} topics to take turns", make)

    def contender() -> Figures:
        with forebay.open(path / "data") as log:
            topics = [log.topic(f"bench/t{number}") for number in range(count)]
            before = [topic.offsets().next for topic in topics]
            figures, done = _timed(plan, [partial(topic.append, texts(1)[0]) for topic in topics])
            after = [topic.offsets().next for topic in topics]
            payload.check_count("topics in turn", done, sum(after) - sum(before))
            if max(grown := [b - a for a, b in zip(before, after, strict=True)]) - min(grown) > 1:
                raise payload.Wrong("the topics did not take turns")
        return figures

    return contender


def _put(plan: Plan, count: int) -> Contender:
    def contender() -> Figures:
        [value] = texts(1)
        with stores.opened(stores.Lmdb, plan.fresh(), durable=False) as store:
            offsets = itertools.count()

            def put(topic: int) -> None:
                store.put([(stores.KEY(topic) + stores.KEY(next(offsets)), value)], append=False)

            figures, done = _timed(plan, [partial(put, number) for number in range(count)])
            payload.check_count("lmdb", done, sum(1 for _ in store.values()))
        return figures

    return contender


def _timed(plan: Plan, appends: Sequence[Callable[[], object]]) -> tuple[Figures, int]:
    """Two turns to warm up, then turns for as long as the plan says, one at least; what an append took, how many."""
    for append in itertools.chain(appends, appends):
        append()
    turns, cpu, begun = 0, time.process_time(), time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < plan.sizes.turn_seconds or not turns:
        turns += 1
        for append in appends:
            append()
    done = turns * len(appends)
    figures = {"each": elapsed / done * 1e6, "cpu": (time.process_time() - cpu) / done * 1e6}
    return figures, done + 2 * len(appends)


# Over HTTP


def _over_http(plan: Plan) -> Iterator[Result]:
    counts, connections = plan.sizes.turn_topics, plan.sizes.http_connections[1]
    contenders: dict[str, Contender | None] = {}
    for count in counts:
        contenders[f"forebay {count}"] = _served(plan, count, connections)
        is_there = plan.servers and servers.available("redis")
        contenders[f"redis {count}"] = _redis(plan, count, connections) if is_there else None
    found = plan.compare(contenders)
    least = found[f"forebay {counts[0]}"]
    for count, (metric, said, unit) in itertools.product(counts, METRICS):
        fewest = {} if count == counts[0] else {f"{counts[0]:,} topics": least[f"turn {metric}"]}
        limits: list[Limit] = [at_most(SLACK, name) for name in fewest] if metric == "server" else []
        peers = {"redis": found[f"redis {count}"].get(f"turn {metric}"), **fewest}
        name = f"{said}, one by one in turn over {count:,} topics, disk, {connections} connections"
        yield result("topics", name, unit, found[f"forebay {count}"][f"turn {metric}"], peers, limits)


async def _loaded(plan: Plan, server: Server, asks: Sequence[Ask], begins: bytes, topics: int) -> tuple[Figures, int]:
    """A whole turn first, so that every topic is open, then for the time of the plan."""
    first: list[Load] = []
    while sum(one.done for one in first) < topics:
        first.append(await load(server, asks, begins, plan.sizes.warm_seconds))
    took = await load(server, asks, begins, plan.sizes.http_seconds)
    return took.figures("turn"), took.done + sum(one.done for one in first)


def _served(plan: Plan, count: int, connections: int) -> Contender:
    async def produce(server: Server) -> tuple[Figures, int]:
        async with web.connected(server.port, connections) as connected:
            await web.until_ready(connected[0])
            for number in range(count):
                await create(connected[0], f"t{number}", "disk")
            requests = itertools.cycle([request_of("json", texts(1), f"t{number}") for number in range(count)])
            asks = [lambda one=one: one.ask(next(requests)) for one in connected]
            return await _loaded(plan, server, asks, web.OK, count)

    def contender() -> Figures:
        path = plan.fresh()
        with web.served("broker", path) as server:
            figures, done = uvloop.run(produce(server))
        with forebay.open(path) as log:
            held = sum(log.topic(f"bench/t{number}").offsets().next for number in range(count))
            payload.check_count("topics in turn", done, held)
        return figures

    return contender


def _redis(plan: Plan, count: int, connections: int) -> Contender:
    async def produce(server: Server) -> Figures:
        async with raw.connected(raw.Redis, server, connections) as connected:
            requests = itertools.cycle([raw.Redis.append(texts(1), f"t{number}", 0) for number in range(count)])
            asks = [lambda one=one: one.ask(*next(requests)) for one in connected]
            figures, done = await _loaded(plan, server, asks, raw.Redis.begins, count)
            held = [await raw.Redis.held(connected[0], f"t{number}") for number in range(count)]
            payload.check_count("redis", done, sum(held))
        return figures

    def contender() -> Figures:
        with servers.redis_server(plan.fresh(), durable=False) as server:
            return uvloop.run(produce(server))

    return contender
