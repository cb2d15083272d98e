"""Appends over HTTP to a broker in a process of its own, beside Redis and NATS driven as leanly and as durably.

Everybody gets bytes that were made beforehand, over as many connections, for as long, after a warm-up; the same loop
finds the end of each answer. `disk` stands beside servers that sync every second, `fsync` beside servers that sync
before they answer. The usual Python clients and redis-benchmark are shown beside the lean ones. A bare ASGI sink on the
same server takes the same bodies and answers without reading them.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import uvloop

import forebay
from bench import payload, raw, servers, web
from bench.load import Server, load, repeated
from bench.plan import Contender, Figures, Plan
from bench.results import Limit, Result, at_least, result
from forebay import aio
from forebay.client import AsyncRemoteTopic
from forebay.wire import bodies
from forebay.wire.bodies import MediaType
from forebay.wire.items import RecordColumns

BATCHES = (1, 100, 1_000)
CLASSES = ("disk", "fsync")
NATS_SYNCED_MAX = 20_000
"""Records on their way at once, above which NATS with a sync for each would take minutes to answer."""


class Size(NamedTuple):
    """Records in a request, and connections."""

    batch: int
    connections: int

    def __str__(self) -> str:
        return f"{self.batch:,}, {self.connections} connections"


class Shape(NamedTuple):
    """How records are sent."""

    form: str
    size: Size

    def __str__(self) -> str:
        return f"{self.form} × {self.size}"


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    contenders: dict[str, Contender | None] = {name: _ours(plan, name) for name in CLASSES}
    contenders["sink"] = _ours(plan, None)
    for name, durability in itertools.product(raw.PEERS, CLASSES):
        is_there = plan.servers and servers.available(name)
        contenders[f"{name} {durability}"] = _peer(plan, name, durability) if is_there else None
    found = plan.compare(contenders)
    aimed = Shape("arrow", Size(BATCHES[-1], plan.sizes.http_connections[1]))
    for durability, shape in itertools.product(CLASSES, shapes(plan)):
        yield from _results(found, durability, shape, is_aimed=(durability, shape) == ("disk", aimed))

    tasks = plan.sizes.http_connections[-1]
    client = plan.compare({"forebay": _client(plan, tasks)})["forebay"]
    yield result("http", f"records per sync, one aio client, {tasks} tasks", "records", client["per sync"])
    for metric, name, unit in METRICS:
        yield result("http", f"{name}, fsync, one aio client, {tasks} tasks", unit, client[f"client {metric}"])


def _results(found: dict[str, Figures], durability: str, shape: Shape, *, is_aimed: bool) -> Iterator[Result]:
    ours, said = found[durability], f"{durability}, {shape}"
    redis, nats = found[f"redis {durability}"], found[f"nats {durability}"]
    for metric, name, unit in METRICS:
        size = f"{shape.size} {metric}"
        peers: dict[str, float | None] = {
            "sink": found["sink"][f"{shape} {metric}"],
            "redis": redis.get(size),
            "nats": nats.get(size),
        }
        if shape.size == Size(BATCHES[-1], 1):
            peers |= {"redis-py": redis.get(f"usual {metric}"), "nats-py": nats.get(f"usual {metric}")}
        if shape.size.batch == 1:
            peers["redis-benchmark"] = redis.get(f"benchmark {shape.size.connections} {metric}")
        limits: list[Limit] = [at_least(600_000), at_least(0.5, "sink")] if is_aimed and metric == "rate" else []
        yield result("http", f"{name}, {said}", unit, ours[f"{shape} {metric}"], peers, limits)


METRICS = (
    ("rate", "produce", "records/s"),
    ("server", "processor time of the server for a record", "µs"),
    ("client", "processor time of the client for a record", "µs"),
)


def shapes(plan: Plan) -> list[Shape]:
    """Every form and batch with some connections; one record and the largest body with few and many."""
    few, some, many = plan.sizes.http_connections
    found = [Shape(form, Size(batch, some)) for form in ("json", "ndjson", "arrow") for batch in BATCHES]
    ends = (("json", BATCHES[0]), ("arrow", BATCHES[1]), ("arrow", BATCHES[-1]))
    return found + [Shape(form, Size(batch, count)) for count in (few, many) for form, batch in ends]


def texts(count: int) -> Sequence[bytes]:
    """Records of 100 bytes that JSON can carry as text."""
    return [value.hex().encode() for value in payload.values(count, payload.VALUE_BYTES // 2)]


def request_of(form: str, values: Sequence[bytes], topic: str) -> bytes:
    """The request that appends the values."""
    if form == "arrow":
        media, body = MediaType.ARROW, bodies.encode_arrow([pa.record_batch({"value": pa.array([*values])})])
    else:
        columns, is_lines = RecordColumns([*values]), form == "ndjson"
        media = MediaType.NDJSON if is_lines else MediaType.JSON
        body = bodies.encode_ndjson(columns) if is_lines else bodies.encode_json(columns)
    return web.request_bytes("POST", f"/v1/topics/bench/{topic}/records", body, content_type=str(media))


async def create(connection: web.Connection, topic: str, durability: str) -> None:
    """Create a topic."""
    body = b'{"durability": "%s"}' % durability.encode()
    await connection.body(web.request_bytes("PUT", f"/v1/topics/bench/{topic}", body))


def _ours(plan: Plan, durability: str | None) -> Contender:
    """Requests of every shape, each into a topic of its own; to a sink without a durability."""

    async def produce(server: Server) -> tuple[Figures, list[int]]:
        figures: Figures = {}
        answered = []
        async with web.connected(server.port, plan.sizes.http_connections[-1]) as connections:
            if durability is not None:
                await web.until_ready(connections[0])
            for number, shape in enumerate(shapes(plan)):
                if durability is not None:
                    await create(connections[0], f"t{number}", durability)
                request = request_of(shape.form, texts(shape.size.batch), f"t{number}")
                asks = [partial(one.ask, request) for one in connections[: shape.size.connections]]
                warm = await load(server, asks, web.OK, plan.sizes.warm_seconds)
                took = await load(server, asks, web.OK, plan.sizes.http_seconds)
                answered.append(warm.done + took.done)
                figures |= took.figures(str(shape), shape.size.batch)
        return figures, answered

    def contender() -> Figures:
        path = plan.fresh()
        with web.served("sink" if durability is None else "broker", path) as server:
            figures, answered = uvloop.run(produce(server))
        if durability is not None:
            _check(plan, path, answered)
        return figures

    return contender


def _client(plan: Plan, tasks: int) -> Contender:
    """Tasks of one client of ours that each wait for their append: how many records share a sync."""

    async def produce(server: Server) -> Figures:
        async with web.connected(server.port, 1) as (connection,):
            await web.until_ready(connection)
            metrics = partial(connection.body, web.request_bytes("GET", "/metrics"))
            async with aio.connect(f"http://{web.HOST}:{server.port}") as log:
                topic = await log.create_topic("bench/t", durability="fsync")
                asks = [partial(_appended, topic, texts(1)[0])] * tasks
                warm = await load(server, asks, web.OK, plan.sizes.warm_seconds)
                before = _syncs(await metrics())
                took = await load(server, asks, web.OK, plan.sizes.http_seconds)
                syncs = _syncs(await metrics()) - before
                payload.check_count("what the topic has", warm.done + took.done, (await topic.offsets()).next)
        return took.figures("client") | {"per sync": took.done / syncs}

    def contender() -> Figures:
        with web.served("broker", plan.fresh()) as server:
            return asyncio.run(produce(server))

    return contender


async def _appended(topic: AsyncRemoteTopic, value: bytes) -> bytes:
    await topic.append(value)
    return web.OK


def _syncs(metrics: bytes) -> float:
    """All syncs of log files; a topic may have a line of its own, with fewer."""
    found = re.findall(rb"^forebay_wal_fsync_latency_seconds_count(?:\{[^}]*\})? (\S+)", metrics, re.MULTILINE)
    if not found:
        raise payload.Wrong("the broker does not say how many syncs it has made")
    return max(map(float, found))


def _check(plan: Plan, path: Path, answered: Sequence[int]) -> None:
    """Every topic holds the records of every request that was answered, and no others."""
    with forebay.open(path) as log:
        for number, (shape, requests) in enumerate(zip(shapes(plan), answered, strict=True)):
            found = (record.value or b"" for record in log.topic(f"bench/t{number}").read())
            payload.check_repeated(str(shape), texts(shape.size.batch), requests, found)


def _peer(plan: Plan, name: str, durability: str) -> Contender:
    """Requests of every size, each into a stream of its own; then the usual client, and the server's own tool."""
    durable = durability == "fsync"
    serve, usual = servers.SERVERS[name]

    async def produce(server: Server) -> Figures:
        figures: Figures = {}
        peer = raw.PEERS[name]
        async with raw.connected(peer, server, plan.sizes.http_connections[-1]) as connections:
            for number, size in enumerate(dict.fromkeys(shape.size for shape in shapes(plan))):
                if name == "nats" and durable and size.batch * size.connections > NATS_SYNCED_MAX:
                    continue
                stream, values = f"s{number}", texts(size.batch)
                await peer.make(connections[0], stream)
                asks = [
                    partial(one.ask, *peer.append(values, stream, place))
                    for place, one in enumerate(connections[: size.connections])
                ]
                warm = await load(server, asks, peer.begins, plan.sizes.warm_seconds)
                took = await load(server, asks, peer.begins, plan.sizes.http_seconds)
                figures |= took.figures(str(size), size.batch)
                await raw.check(peer, connections[0], stream, values, warm.done + took.done)
        return figures

    def contender() -> Figures:
        with serve(plan.fresh(), durable=durable) as server:
            figures = uvloop.run(produce(server))
            figures |= _usual(plan, server, usual)
            if name == "redis":
                figures |= _benchmarked(plan, server)
        return figures

    return contender


def _usual(plan: Plan, server: Server, client: type) -> Figures:
    """Batches of 1000 by the usual client, one after the other."""
    stream, values = client(server.port), texts(BATCHES[-1])

    def step() -> int:
        stream.write(values)
        return len(values)

    try:
        warm = repeated(server, step, plan.sizes.warm_seconds)
        took = repeated(server, step, plan.sizes.http_seconds)
        found = itertools.chain.from_iterable(stream.pages("usual", raw.PAGE))
        payload.check_repeated(client.__name__, values, (warm.done + took.done) // len(values), found)
    finally:
        stream.close()
    return took.figures("usual")


def _benchmarked(plan: Plan, server: Server) -> Figures:
    figures: Figures = {}
    if servers.program("redis-benchmark") is not None:
        for count in plan.sizes.http_connections:
            took = servers.redis_benchmark(server, count, payload.VALUE_BYTES, plan.sizes.http_seconds)
            figures |= took.figures(f"benchmark {count}")
    return figures
