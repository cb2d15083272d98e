"""The broker over HTTP, server and client as processes of this machine: produce, consume, and from append to event.

The reference is a bare ASGI sink on the same server: it takes the same bodies and answers without reading them. The
client shares the machine, so its processor time stands beside that of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import uvloop

import forebay
from bench import payload, servers, web
from bench.plan import Contender, Figures, Plan
from bench.results import Limit, Result, at_least, result
from forebay.wire import answers, bodies
from forebay.wire.bodies import MediaType
from forebay.wire.items import RecordColumns
from forebay.wire.limits import BodyLimits

BATCHES = (1, 100, 1_000)
CLASSES = ("disk", "fsync")
PAGE = 10_000
NO_LIMITS = BodyLimits(1 << 30, 1 << 30)
PEER_PARTS = {"redis": 10, "nats": 100}
"""Of the records that are consumed here, a slow peer writes and reads one part in so many."""


class Shape(NamedTuple):
    """How records are sent."""

    form: str
    batch: int
    connections: int

    def __str__(self) -> str:
        return f"{self.form} × {self.batch:,}, {self.connections} connections"


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    contenders: dict[str, Contender | None] = {name: _produced(plan, name) for name in CLASSES}
    contenders["sink"] = _produced(plan, None)
    for name in ("redis", "nats"):
        for durability in CLASSES:
            is_there = plan.servers and servers.available(name)
            contenders[f"{name} {durability}"] = _peer(plan, name, durability) if is_there else None
    found = plan.compare(contenders)
    aimed = Shape("arrow", BATCHES[-1], plan.sizes.http_connections[1])
    for durability in CLASSES:
        for shape in _shapes(plan):
            yield from _shape_results(found, durability, shape, is_aimed=(durability, shape) == ("disk", aimed))
    consumed = plan.compare({"forebay": _consumed(plan)})["forebay"]
    for form in ("json", "ndjson", "arrow", "frames"):
        limits = [at_least(1e6)] if form == "frames" else []
        peers = {name: found[f"{name} disk"].get("read") for name in ("redis", "nats")}
        yield result("http", f"consume, {form}, 1 connection", "records/s", consumed[form], peers, limits)
    late = plan.compare({name: _delivered(plan, name) for name in CLASSES})
    for durability in CLASSES:
        for metric, value in late[durability].items():
            yield result("http", f"append to event, {durability}, {metric}", "ms", value)


def _shape_results(found: dict[str, Figures], durability: str, shape: Shape, *, is_aimed: bool) -> Iterator[Result]:
    ours, sink = found[durability], found["sink"]
    peers: dict[str, float | None] = {"sink": sink[f"{shape} rate"]}
    if shape.batch == BATCHES[-1]:
        peers |= {name: found[f"{name} {durability}"].get("write") for name in ("redis", "nats")}
    limits: list[Limit] = [at_least(600_000), at_least(0.5, "sink")] if is_aimed else []
    yield result("http", f"produce {durability}, {shape}", "records/s", ours[f"{shape} rate"], peers, limits)
    for who in ("server", "client"):
        metric = f"{shape} {who}"
        name = f"processor time of the {who} for a request, {durability}, {shape}"
        yield result("http", name, "µs", ours[metric], {"sink": sink[metric]})


def _shapes(plan: Plan) -> list[Shape]:
    """Every form and batch with some connections; the two ends of them with few and many."""
    few, some, many = plan.sizes.http_connections
    shapes = [Shape(form, batch, some) for form in ("json", "ndjson", "arrow") for batch in BATCHES]
    ends = (("json", BATCHES[0]), ("arrow", BATCHES[1]), ("arrow", BATCHES[-1]))
    return shapes + [Shape(form, batch, count) for count in (few, many) for form, batch in ends]


def _texts(count: int) -> Sequence[bytes]:
    """Records of 100 bytes that JSON can carry as text."""
    return [value.hex().encode() for value in payload.values(count, payload.VALUE_BYTES // 2)]


def _request(shape: Shape, topic: str) -> bytes:
    values: list[bytes | None] = [*_texts(shape.batch)]
    if shape.form == "arrow":
        media, body = MediaType.ARROW, bodies.encode_arrow([pa.record_batch({"value": pa.array(values)})])
    else:
        columns = RecordColumns(values)
        is_lines = shape.form == "ndjson"
        media = MediaType.NDJSON if is_lines else MediaType.JSON
        body = bodies.encode_ndjson(columns) if is_lines else bodies.encode_json(columns)
    return web.request_bytes("POST", f"/v1/topics/bench/{topic}/records", body, content_type=str(media))


async def _create(connection: web.Connection, topic: str, durability: str) -> None:
    body = b'{"durability": "%s"}' % durability.encode()
    await connection.body(web.request_bytes("PUT", f"/v1/topics/bench/{topic}", body))


def _produced(plan: Plan, durability: str | None) -> Contender:
    """Requests of every shape, each into a topic of its own; to a sink without a durability."""

    async def produce(server: web.Served) -> tuple[Figures, list[tuple[Shape, int]]]:
        figures: Figures = {}
        acknowledged = []
        async with web.connected(server.port, plan.sizes.http_connections[-1]) as connections:
            if durability is not None:
                await web.until_ready(connections[0])
            for number, shape in enumerate(_shapes(plan)):
                if durability is not None:
                    await _create(connections[0], f"t{number}", durability)
                request = _request(shape, f"t{number}")
                await connections[0].body(request)
                took = await web.load(server, request, connections[: shape.connections], plan.sizes.http_seconds)
                acknowledged.append((shape, took.requests + 1))
                figures[f"{shape} rate"] = took.requests * shape.batch / took.seconds
                figures[f"{shape} server"] = took.server_cpu / took.requests * 1e6
                figures[f"{shape} client"] = took.client_cpu / took.requests * 1e6
        return figures, acknowledged

    def contender() -> Figures:
        path = plan.fresh()
        with web.served("sink" if durability is None else "broker", path) as server:
            figures, acknowledged = uvloop.run(produce(server))
        if durability is not None:
            _check(path, acknowledged)
        return figures

    return contender


def _check(path: Path, acknowledged: Sequence[tuple[Shape, int]]) -> None:
    """Every topic holds the records of every request that was answered, and no others."""
    with forebay.open(path) as log:
        for number, (shape, requests) in enumerate(acknowledged):
            expected = list(_texts(shape.batch))
            found = [record.value or b"" for record in log.topic(f"bench/t{number}").read()]
            payload.check_count(str(shape), requests * shape.batch, len(found))
            payload.check(str(shape), expected * requests, found)


def _consumed(plan: Plan) -> Contender:
    """A topic is read from its beginning to its end, page by page; the client decodes it when it is measured."""
    count = plan.sizes.http_records

    async def consume(server: web.Served) -> Figures:
        figures: Figures = {}
        async with web.connected(server.port, 1) as (connection,):
            await web.until_ready(connection)
            for form, (media, decode) in DECODERS.items():
                asked = [_page_request(first, media) for first in range(0, count, PAGE)]
                begun = time.perf_counter()
                pages = [await connection.body(one) for one in asked]
                figures[form] = count / (time.perf_counter() - begun)
                values = [value for page in pages for value in decode(page)]
                payload.check(form, list(_texts(count)), values)
        return figures

    def contender() -> Figures:
        path = plan.fresh()
        with forebay.open(path) as log:
            topic = log.create_topic("bench/t", durability="disk")
            for batch in payload.batches(list(_texts(count))):
                topic.append_many(batch)
        with web.served("broker", path) as server:
            return uvloop.run(consume(server))

    return contender


def _page_request(first: int, media: MediaType) -> bytes:
    query = f"start={first}&records_max={PAGE}&bytes_max={64 * PAGE * 4}"
    return web.request_bytes("GET", f"/v1/topics/bench/t/records?{query}", accept=str(media))


def _json_values(body: bytes) -> list[bytes]:
    return [record.value or b"" for record in answers.decode_page_json(body).records]


def _line_values(body: bytes) -> list[bytes]:
    marks = answers.PageMarks(0, 0, 0, 0)
    return [record.value or b"" for record in answers.decode_page_ndjson(body, marks).records]


def _arrow_values(body: bytes) -> list[bytes]:
    page = answers.decode_page_arrow(body, answers.PageMarks(0, 0, 0, 0), NO_LIMITS)
    return [value for batch in page.batches for value in batch.column("value").to_pylist()]


def _frame_values(body: bytes) -> list[bytes]:
    page = answers.decode_page_frames(body)
    return [record.value or b"" for batch in page.batches for record in batch.records(0)]


DECODERS: dict[str, tuple[MediaType, Callable[[bytes], list[bytes]]]] = {
    "json": (MediaType.JSON, _json_values),
    "ndjson": (MediaType.NDJSON, _line_values),
    "arrow": (MediaType.ARROW, _arrow_values),
    "frames": (MediaType.FRAMES, _frame_values),
}


def _delivered(plan: Plan, durability: str) -> Contender:
    """One record at a time at a steady pace; how long after its request was sent the event of it came."""

    async def deliver(server: web.Served) -> Figures:
        loop = asyncio.get_running_loop()
        late = []
        async with web.connected(server.port, 1) as (connection,):
            await web.until_ready(connection)
            await _create(connection, "t", durability)
            events: Any = (await loop.create_connection(web.Events, web.HOST, server.port))[1]
            events.transport.write(web.request_bytes("GET", "/v1/watch?topic=bench/t"))
            await asyncio.wait_for(events.began, web.PATIENCE)
            request = _request(Shape("json", 1, 1), "t")
            for _ in range(plan.sizes.http_events):
                came: asyncio.Future[float] = loop.create_future()
                events.waiting.append(came)
                begun = time.perf_counter()
                await connection.body(request)
                late.append(await asyncio.wait_for(came, web.PATIENCE) - begun)
                await asyncio.sleep(0.001)
            events.transport.abort()
        return {"p50": float(np.percentile(late, 50)) * 1e3, "p99": float(np.percentile(late, 99)) * 1e3}

    def contender() -> Figures:
        with web.served("broker", plan.fresh()) as server:
            return uvloop.run(deliver(server))

    return contender


def _peer(plan: Plan, name: str, durability: str) -> Contender:
    """Batches of 1000 by the client of another server, and all of it read back."""
    records = _texts(plan.sizes.http_records // PEER_PARTS[name])

    def contender() -> Figures:
        with servers.opened(name, plan.fresh(), durable=durability == "fsync") as stream:
            begun = time.perf_counter()
            for batch in payload.batches(records):
                stream.write(batch)
            written = time.perf_counter()
            payload.check(name, records, stream.values())
            read = time.perf_counter()
        return {"write": len(records) / (written - begun), "read": len(records) / (read - written)}

    return contender
