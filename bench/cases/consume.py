"""A topic read from its beginning to its end over HTTP, beside a stream of Redis and of NATS with the same records.

One connection, pages of 10,000, again and again for as long. Two figures for everybody: to the bytes of the answers,
of which only the end is looked for, and to a list of values. The usual Python clients, which always decode, are shown
beside the second. What was read is compared afterwards, outside of what is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvloop

import forebay
from bench import payload, raw, servers, web
from bench.cases.http import METRICS, texts
from bench.load import Server, Watch, repeated
from bench.plan import Contender, Figures, Plan
from bench.raw import PAGE
from bench.results import Result, at_least, result
from forebay.wire import answers
from forebay.wire.bodies import MediaType
from forebay.wire.limits import BodyLimits

NO_LIMITS = BodyLimits(1 << 30, 1 << 30)
USUAL_PAGE = 1_000
DEPTHS = {"bytes": "to the bytes of answers", "values": "to values"}

Pages = Callable[[], Awaitable[list[bytes]]]
"""Reads everything; the answers."""
Decode = Callable[[bytes], list[bytes]]


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    contenders: dict[str, Contender | None] = {"forebay": _ours(plan)}
    for name in raw.PEERS:
        contenders[name] = _peer(plan, name) if plan.servers and servers.available(name) else None
    found = plan.compare(contenders)
    for form, depth, (metric, said, unit) in itertools.product(DECODERS, DEPTHS, METRICS):
        peers = {name: found[name].get(f"{depth} {metric}") for name in raw.PEERS}
        if depth == "values":
            peers |= {f"{name}-py": found[name].get(f"usual {metric}") for name in raw.PEERS}
        what = "consume" if metric == "rate" else said
        limits = [at_least(1e6)] if (form, depth, metric) == ("frames", "bytes", "rate") else []
        name = f"{what}, {form}, {DEPTHS[depth]}, 1 connection"
        yield result("consume", name, unit, found["forebay"][f"{form} {depth} {metric}"], peers, limits)


async def _read(server: Server, pages: Pages, decode: Decode | None, name: str, plan: Plan) -> Figures:
    """Read everything again and again for the time of the plan; what was read last is compared afterwards."""
    done, found, values = 0, await pages(), []
    watch = Watch(server)
    while watch.seconds() < plan.sizes.http_seconds:
        found = await pages()
        if decode is not None:
            values = [decode(page) for page in found]
        done += plan.sizes.http_records
    took = watch.read(done)
    if decode is not None:
        payload.check(name, list(texts(plan.sizes.http_records)), itertools.chain.from_iterable(values))
    elif not all(found):
        raise payload.Wrong(f"{name} was answered with nothing")
    return took.figures(name)


# Ours


def _ours(plan: Plan) -> Contender:
    count = plan.sizes.http_records

    async def consume(server: Server) -> Figures:
        figures: Figures = {}
        async with web.connected(server.port, 1) as (connection,):
            await web.until_ready(connection)
            for form, (media, decode) in DECODERS.items():
                asked = [_page_request(first, media) for first in range(0, count, PAGE)]

                async def pages(asked: list[bytes] = asked) -> list[bytes]:
                    return [await connection.body(one) for one in asked]

                for depth in DEPTHS:
                    decoding = decode if depth == "values" else None
                    figures |= await _read(server, pages, decoding, f"{form} {depth}", plan)
        return figures

    def contender() -> Figures:
        path = plan.fresh()
        with forebay.open(path) as log:
            topic = log.create_topic("bench/t", durability="disk")
            for batch in payload.batches(list(texts(count))):
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
    return [value or b"" for batch in page.batches for value in batch.values()]


DECODERS: dict[str, tuple[MediaType, Decode]] = {
    "json": (MediaType.JSON, _json_values),
    "ndjson": (MediaType.NDJSON, _line_values),
    "arrow": (MediaType.ARROW, _arrow_values),
    "frames": (MediaType.FRAMES, _frame_values),
}


# Peers


def _peer(plan: Plan, name: str) -> Contender:
    serve, usual = servers.SERVERS[name]
    peer, count = raw.PEERS[name], plan.sizes.http_records

    async def consume(server: Server) -> Figures:
        figures: Figures = {}
        async with raw.connected(peer, server, 1) as (connection,):
            await peer.make(connection, "t")
            for batch in payload.batches(texts(count)):
                await connection.ask(*peer.append(batch, "t", 0))
            for depth in DEPTHS:
                decoding = peer.values if depth == "values" else None
                figures |= await _read(server, lambda: peer.pages(connection, "t", count, PAGE), decoding, depth, plan)
        return figures

    def contender() -> Figures:
        with serve(plan.fresh(), durable=False) as server:
            figures = uvloop.run(consume(server))
            return figures | _usual(plan, server, usual(server.port))

    return contender


def _usual(plan: Plan, server: Server, stream: Any) -> Figures:
    """The same by the usual client, as far as it comes in that time."""
    found: list[list[bytes]] = []

    def values() -> Iterator[list[bytes]]:
        while True:
            found.clear()
            yield from stream.pages("t", USUAL_PAGE)

    following = values()

    def step() -> int:
        found.append(next(following))
        return len(found[-1])

    try:
        took = repeated(server, step, plan.sizes.http_seconds)
        read = list(itertools.chain.from_iterable(found))
        payload.check(stream.client, list(texts(plan.sizes.http_records))[: len(read)], read)
    finally:
        stream.close()
    return took.figures("usual")
