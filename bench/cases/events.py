"""From an append to watchers of a topic: server-sent events of the broker, beside readers that wait at Redis and NATS.

One record at a time; the next is appended when every watcher has it. A watcher of Redis waits in `XREAD BLOCK` and asks
again from the entry it got; one of NATS subscribes to the subject of the stream, so that it is sent what is published
while it is there, and nothing of what was stored before. Every watcher has a connection, all in one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import uvloop

from bench import payload, raw, servers, web
from bench.cases.http import CLASSES, create, request_of, texts
from bench.load import Server, Watch
from bench.plan import Contender, Figures, Plan
from bench.results import Result, result

PAUSE_SECONDS = 0.001
METRICS = (
    ("p50", "append to event, p50", "ms"),
    ("p99", "append to event, p99", "ms"),
    ("server", "processor time of the server for a delivery", "µs"),
    ("client", "processor time of the client for a delivery", "µs"),
)


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    rooms = [("disk", count) for count in plan.sizes.http_watchers] + [("fsync", plan.sizes.http_watchers[0])]
    for durability, count in rooms:
        contenders: dict[str, Contender | None] = {"forebay": _ours(plan, durability, count)}
        for name in raw.PEERS:
            is_there = plan.servers and servers.available(name)
            contenders[name] = _peer(plan, name, durability, count) if is_there else None
        found = plan.compare(contenders)
        for metric, said, unit in METRICS:
            peers = {name: found[name].get(metric) for name in raw.PEERS}
            name = f"{said}, {durability}, {count:,} watchers"
            yield result("events", name, unit, found["forebay"][metric], peers)


class Deliveries:
    """When each watcher got the record that is under way. For one event loop."""

    def __init__(self, watchers: int) -> None:
        self._watchers = watchers
        self._late: list[float] = []
        self._begun = 0.0
        self._expected = 0
        self._all = asyncio.get_running_loop().create_future()

    def came(self, count: int) -> None:
        """A watcher got so many records just now."""
        self._late += [time.perf_counter() - self._begun] * count
        if len(self._late) == self._expected:
            self._all.set_result(None)

    async def timed(self, server: Server, append: Callable[[], Awaitable[object]], events: int) -> Figures:
        """Append one by one, and wait for all watchers each time."""
        watch = Watch(server)
        for _ in range(events):
            self._all = asyncio.get_running_loop().create_future()
            self._expected += self._watchers
            self._begun = time.perf_counter()
            await append()
            await asyncio.wait_for(self._all, web.PATIENCE)
            await asyncio.sleep(PAUSE_SECONDS)
        took = watch.read(self._expected).figures("delivery")
        payload.check_count("what was delivered", events * self._watchers, len(self._late))
        points = {name: float(np.percentile(self._late, point)) * 1e3 for name, point in (("p50", 50), ("p99", 99))}
        return points | {"server": took["delivery server"], "client": took["delivery client"]}


class Watcher(asyncio.Protocol):
    """A connection that waits for records. For one event loop."""

    def __init__(self, deliveries: Deliveries) -> None:
        self.deliveries = deliveries
        self.transport: Any = None
        self.began = asyncio.get_running_loop().create_future()
        """Done when it will be sent the next record."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self.transport = transport
        self.begin()

    def begin(self) -> None:
        """Ask to be sent what comes."""


class Events(Watcher):
    """One that follows a topic of the broker."""

    def begin(self) -> None:
        """As a watcher does."""
        self.transport.write(web.request_bytes("GET", "/v1/watch?topic=bench/t"))

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if not self.began.done() and b"\nid: " in data:
            self.began.set_result(None)
        if found := data.count(b"data: "):
            self.deliveries.came(found)


class RedisReader(Watcher):
    """One that waits in `XREAD`, and asks for what follows the entry that it got."""

    def begin(self) -> None:
        """From the first entry on, which is there."""
        self._received = b""
        self._ask(b"0")

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._received += data
        if self._received.count(b"\n") < 5 + raw.ENTRY_LINES:
            return
        last = self._received.rsplit(b"\r\n", raw.ENTRY_LINES - 1)[1]
        self._received = b""
        self._ask(last)
        if self.began.done():
            self.deliveries.came(1)
        else:
            self.began.set_result(None)

    def _ask(self, last: bytes) -> None:
        self.transport.write(raw.command("XREAD", "COUNT", 1, "BLOCK", 0, "STREAMS", "t", last))


class NatsSubscriber(Watcher):
    """One that is sent what is published under the subject."""

    def begin(self) -> None:
        """Subscribe, and see by the answer to a ping that it is done."""
        self.transport.write(raw.NATS_HELLO + b"SUB t 1\r\nPING\r\n")

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if raw.PING in data:
            self.transport.write(b"PONG\r\n")
        if not self.began.done() and b"PONG\r\n" in data:
            self.began.set_result(None)
        if found := data.count(b"MSG t "):
            self.deliveries.came(found)


async def _watched(
    server: Server, kind: type[Watcher], append: Callable[[], Awaitable[object]], count: int, plan: Plan
) -> Figures:
    loop = asyncio.get_running_loop()
    deliveries = Deliveries(count)
    watchers: list[Watcher] = []
    try:
        while len(watchers) < count:
            watchers.append((await loop.create_connection(lambda: kind(deliveries), web.HOST, server.port))[1])
        await asyncio.wait_for(asyncio.gather(*[one.began for one in watchers]), web.PATIENCE)
        # Each reader of Redis waits anew by then: it has got the entry that was there, and asked for the next.
        await asyncio.sleep(plan.sizes.warm_seconds)
        return await deliveries.timed(server, append, plan.sizes.http_events)
    finally:
        for one in watchers:
            one.transport.abort()


def _ours(plan: Plan, durability: str, count: int) -> Contender:
    async def deliver(server: Server) -> Figures:
        async with web.connected(server.port, 1) as (connection,):
            await web.until_ready(connection)
            await create(connection, "t", durability)
            request = request_of("json", texts(1), "t")
            return await _watched(server, Events, partial(connection.body, request), count, plan)

    def contender() -> Figures:
        with web.served("broker", plan.fresh()) as server:
            return uvloop.run(deliver(server))

    return contender


def _peer(plan: Plan, name: str, durability: str, count: int) -> Contender:
    peer, kind = raw.PEERS[name], {"redis": RedisReader, "nats": NatsSubscriber}[name]

    async def deliver(server: Server) -> Figures:
        async with raw.connected(peer, server, 1) as (connection,):
            await peer.make(connection, "t")
            request = peer.append(texts(1), "t", 0)
            await connection.ask(*request)
            return await _watched(server, kind, partial(connection.ask, *request), count, plan)

    def contender() -> Figures:
        with servers.SERVERS[name][0](plan.fresh(), durable=durability == CLASSES[-1]) as server:
            return uvloop.run(deliver(server))

    return contender
