"""Many streams of one topic: what they want alike is made once; a crowd costs no thread and leaves no descriptor.

Streams whose clients take nothing cost the others nothing: not their memory, and not their time.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest
import uvloop

from bench import web
from forebay.broker import watch
from tests.ledger import Ledger
from tests.support.brokers import BrokerCommand, RunningBroker, running_broker
from tests.support.measures import MachineUse, p99_ms, rise_per_minute
from tests.support.soak import SOAK

SECONDS: Final = 60.0
CROWD: Final = 1_000 if SOAK else 100
STALLED: Final = 100 if SOAK else 10
ALONE_SECONDS: Final = 15.0 if SOAK else 0.3
"""For how long records are delivered to the crowd by itself."""
BESIDE_SECONDS: Final = 60.0 if SOAK else 0.5
"""For how long they are while other clients take nothing."""
PACE_SECONDS: Final = 0.1
RISE_BYTES_MAX: Final = 1_000_000
"""What a process may grow in a minute."""
STALLED_BYTES_MAX: Final = 1_000_000
"""What a stream whose client takes nothing may cost: a page, and what its connection buffers."""
SHARED_BYTES_MAX: Final = 48_000_000
"""What may be kept for all of them: the newest pages, rendered, and what reading them has taken."""
READERS_MAX: Final = 8
"""Threads that read files for all clients together."""
PATH: Final = "/v1/topics/live/crowd"
NUMBERED: Final = re.compile(rb'"value":"(\d{8})')


class Stream:
    """One connection that follows the topic, without a thread or a decoder."""

    def __init__(self, broker: RunningBroker) -> None:
        at = urlsplit(broker.url)
        assert at.hostname is not None
        self.socket = socket.create_connection((at.hostname, at.port), timeout=SECONDS)
        self.socket.sendall(b"GET /v1/watch?topic=live/crowd HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        self._received = b""
        self.until(b"\nid: ")

    def until(self, mark: bytes) -> None:
        """Read until these bytes have come."""
        while mark not in self._received:
            piece = self.socket.recv(1 << 16)
            assert piece, f"the stream ended before {mark!r} came: {self._received[-500:]!r}"
            self._received += piece
        self._received = self._received.partition(mark)[2]


@contextmanager
def crowd(broker: RunningBroker, count: int) -> Iterator[list[Stream]]:
    with ExitStack() as held:
        streams = []
        for _ in range(count):
            streams.append(Stream(broker))
            held.enter_context(streams[-1].socket)
        yield streams


def append(client: httpx.Client, value: str) -> None:
    assert client.post(f"{PATH}/records", json=[{"value": value}]).status_code == 200


def test_a_page_and_the_place_behind_it_are_rendered_once_for_all_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []
    for name in ("items_of", "encode_event_id"):
        before = getattr(watch, name)

        def counted(*arguments: object, _name: str = name, _before: object = before) -> object:
            rendered.append(_name)
            return _before(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(watch, name, counted)
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        assert client.put(PATH, json={}).status_code == 201
        with crowd(broker, 20) as streams:
            rendered.clear()
            append(client, "first")
            for stream in streams:
                stream.until(b'"value":"first"')
                stream.until(b"\nid: ")

    assert sorted(rendered) == ["encode_event_id", "items_of"]


class Follower(asyncio.Protocol):
    """One connection that follows the topic and notes when each numbered record came. For one event loop."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._rest = b""
        self.began = asyncio.get_running_loop().create_future()
        """Done when the stream has begun."""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self.transport = transport
        self.transport.write(web.request_bytes("GET", "/v1/watch?topic=live/crowd"))

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        data = self._rest + data
        if not self.began.done() and b"\nid: " in data:
            self.began.set_result(None)
        end = 0
        for found in NUMBERED.finditer(data):
            self._deliveries.came(int(found[1]))
            end = found.end()
        self._rest = data[max(end, len(data) - 20) :]


class Deliveries:
    """One record after the other, each delivered to a whole crowd; how long that took. For one event loop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: web.Connection
        self._followers: list[Follower] = []
        self._sent_at = 0.0
        self._missing = 0
        self._all: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.number = 0
        """Of the next record."""
        self.late: list[float] = []
        """Seconds from the request of the writer to each follower."""

    @asynccontextmanager
    async def crowd(self, count: int) -> AsyncIterator[None]:
        """So many followers, until the block ends."""
        loop = asyncio.get_running_loop()
        try:
            for _ in range(count):
                _, follower = await loop.create_connection(lambda: Follower(self), web.HOST, self._port)
                self._followers.append(follower)
                await asyncio.wait_for(follower.began, SECONDS)
            # Now: a connection on which no request comes for long is closed.
            async with web.connected(self._port, 1) as (self._writer,):
                yield
        finally:
            for follower in self._followers:
                follower.transport.abort()

    def came(self, number: int) -> None:
        """A follower has got this record."""
        if number != self.number:
            self._all.set_exception(AssertionError(f"{number} came while {self.number} was delivered"))
            return
        self.late.append(asyncio.get_running_loop().time() - self._sent_at)
        self._missing -= 1
        if self._missing == 0:
            self._all.set_result(None)

    async def deliver(self) -> None:
        """Append one record; return when every follower has it."""
        loop = asyncio.get_running_loop()
        self._missing, self._all, self._sent_at = len(self._followers), loop.create_future(), loop.time()
        body = b'[{"value": "%08d%s"}]' % (self.number, b"x" * 1_000)
        await self._writer.body(web.request_bytes("POST", f"{PATH}/records", body))
        await asyncio.wait_for(self._all, SECONDS)
        self.number += 1

    async def run(self, seconds: float, pid: int) -> list[tuple[float, MachineUse]]:
        """Deliver at a steady pace for so long; what the broker used after each record."""
        loop = asyncio.get_running_loop()
        begun, seen = loop.time(), list[tuple[float, MachineUse]]()
        self.late.clear()
        while len(seen) < 3 or loop.time() - begun < seconds:
            due = loop.time() + PACE_SECONDS
            await self.deliver()
            seen.append((loop.time(), MachineUse.of(pid)))
            await asyncio.sleep(due - loop.time())
        return seen


@contextmanager
def stalled(port: int, count: int) -> Iterator[list[socket.socket]]:
    """So many clients that ask for all of the topic and take nothing of it."""
    with ExitStack() as held:
        found = []
        for _ in range(count):
            taking_nothing = held.enter_context(socket.socket())
            taking_nothing.settimeout(SECONDS)
            taking_nothing.connect((web.HOST, port))
            taking_nothing.sendall(web.request_bytes("GET", "/v1/watch?topic=live/crowd&start=earliest"))
            assert taking_nothing.recv(15) == b"HTTP/1.1 200 OK"
            found.append(taking_nothing)
        yield found


def numbers_of(late: socket.socket, last: int) -> list[int]:
    """The numbered records that a client gets which now takes all that waits for it."""
    received, mark = bytearray(), b'"value":"%08d' % last
    while received.find(mark, max(0, len(received) - (1 << 21))) < 0:
        piece = late.recv(1 << 20)
        assert piece, "the stream has ended"
        received += piece
    return [int(found[1]) for found in NUMBERED.finditer(received)]


class CrowdFigures:
    """What a crowd and stalled clients cost a broker."""

    def __init__(self, broker: BrokerCommand) -> None:
        port = urlsplit(broker.url).port
        assert port is not None
        self._port = port
        self._pid = broker.process.pid
        self.alone: list[tuple[float, MachineUse]] = []
        self.beside: list[tuple[float, MachineUse]] = []
        self.alone_ms = self.beside_ms = 0.0
        """p99 of a delivery to the crowd, by itself and beside stalled clients."""
        self.caught_up: list[int] = []
        """What a client got that was stalled and then took everything."""
        self.written = 0

    async def run(self) -> None:
        """Deliver to a crowd, by itself and then beside clients that take nothing."""
        async with AsyncExitStack() as held:
            deliveries = Deliveries(self._port)
            await held.enter_async_context(deliveries.crowd(CROWD))
            await deliveries.deliver()
            self.alone = await deliveries.run(ALONE_SECONDS, self._pid)
            self.alone_ms = p99_ms(deliveries.late)
            with stalled(self._port, STALLED) as sockets:
                self.beside = await deliveries.run(BESIDE_SECONDS, self._pid)
                self.beside_ms = p99_ms(deliveries.late)
                self.written = deliveries.number
                self.caught_up = await asyncio.to_thread(numbers_of, sockets[0], self.written - 1)


def until_alone(client: httpx.Client) -> None:
    """Return when the broker has seen that all streams are over."""
    while "forebay_live_streams 0.0" not in client.get("/metrics").text:
        pass


@pytest.mark.slow
def test_a_crowd_and_stalled_clients_cost_no_thread_no_time_and_no_more_memory_with_time(
    tmp_path: Path, ledger: Ledger
) -> None:
    limits = {"streams_per_principal_max": 2 * CROWD, "connections_per_address_max": 4 * CROWD}
    # Those that take nothing stay to the end.
    limits |= {"streams_max": 2 * CROWD, "stall_timeout_ms": 3_600_000}
    chosen = [word for name, value in limits.items() for word in ("--set", f"server.{name}={value}")]
    with BrokerCommand(tmp_path / "data", *chosen, is_verbose=False) as broker, broker.client() as client:
        assert client.put(PATH, json={}).status_code == 201
        for _ in range(80):
            append(client, "x" * 100_000)  # Fills what is kept of the end of a partition, and connections.
        before = MachineUse.of(broker.process.pid)
        figures = CrowdFigures(broker)
        uvloop.run(figures.run())
        until_alone(client)
        after = MachineUse.of(broker.process.pid)
    alone, beside = figures.alone[-1][1], figures.beside[-1][1]
    assert figures.caught_up == list(range(figures.written)), "a client that was stalled goes on where it was"
    assert figures.alone[0][1].threads == alone.threads
    # Those that read what memory does not hold any more have a few threads started for them, which stay for all others.
    assert beside.threads <= alone.threads + READERS_MAX < alone.threads + STALLED
    assert beside.descriptors == alone.descriptors + STALLED
    assert after.descriptors <= before.descriptors + 2  # A file that is written may be kept open.
    assert beside.resident_bytes - alone.resident_bytes < SHARED_BYTES_MAX + STALLED * STALLED_BYTES_MAX
    later = [(at, float(use.resident_bytes)) for at, use in figures.beside[len(figures.beside) // 3 :]]
    rise = rise_per_minute(later)
    if SOAK:
        assert rise < RISE_BYTES_MAX
        assert figures.beside_ms < 2 * figures.alone_ms
    for figure, value in (
        ("p99 of a delivery, µs", figures.alone_ms * 1e3),
        ("the same beside stalled ones, µs", figures.beside_ms * 1e3),
        ("growth in a minute, kB", rise / 1e3),
        ("memory of the stalled ones, kB", (beside.resident_bytes - alone.resident_bytes) / 1e3),
        ("threads", beside.threads),
    ):
        ledger.count(f"watchers: {figure}", n=round(value), watchers=f"{CROWD:,}", stalled=str(STALLED))
