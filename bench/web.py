"""HTTP for benchmarks: a broker or a bare sink as a process of its own, and a client that costs little.

The client writes bytes that were made beforehand and finds the end of each answer, no more: what it costs beside the
server is measured, and stated with the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
import uvloop

from bench import payload
from forebay.broker.guard import Guard, GuardedProtocol
from forebay.broker.serve import bound_socket, serve, url_of
from forebay.settings import Settings

HOST = "127.0.0.1"
PATIENCE = 60.0
SINK_ANSWER = b'{"ranges":[{"partition":0,"first":0,"count":1000}]}'


# The server


class Served:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.port = int(self._line())

    def cpu(self) -> float:
        """Seconds of processor time that the server has used by now, all its threads together."""
        assert self._process.stdin is not None
        self._process.stdin.write("cpu\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise payload.Wrong(f"the server ended: {self._process.communicate()[1][-2000:]}")
        return line


@contextlib.contextmanager
def served(kind: str, path: Path) -> Iterator[Served]:
    """A `broker` over the directory, or a `sink`; ended in order with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.web", kind, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    try:
        yield Served(process)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def main(kind: str, path: str) -> None:
    """The process of a server: its port is its first line, its processor time the answer to each line it gets."""
    threading.Thread(target=_answer_cpu, daemon=True).start()
    settings = Settings.load(None, {"server": {"port": 0}}, environment={})
    if kind == "broker":
        serve(path, settings, on_bound=_say_port)
    else:
        _serve_sink(settings)


def _answer_cpu() -> None:
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


def _say_port(url: str) -> None:
    print(url.rpartition(":")[2], flush=True)


async def _sink(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Any]) -> None:
    """Take a body and answer as an append is answered: the least that a server of this kind does."""
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(SINK_ANSWER))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": SINK_ANSWER})


def _serve_sink(settings: Settings) -> None:
    protocol: Any = partial(GuardedProtocol, guard=Guard(settings.server))
    config = uvicorn.Config(_sink, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False)
    with bound_socket(settings.server) as bound, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        _say_port(url_of(bound, settings.server))
        runner.run(uvicorn.Server(config).serve(sockets=[bound]))


# The client


def request_bytes(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """One request, as it goes over the connection."""
    named = {"host": HOST, "content-length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


class Connection(asyncio.Protocol):
    """A connection with one request at a time. For one event loop."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._received: list[bytes] = []
        self._missing = 0
        """Bytes of an answer whose length is known; 0 while its head is not complete."""
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(payload.Wrong(f"the server closed a connection: {exc}"))

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._received.append(data)
        if self._missing:
            self._missing -= len(data)
        else:
            whole = b"".join(self._received)
            end = whole.find(b"\r\n\r\n")
            if end < 0:
                return
            length = whole.lower().index(b"content-length: ") + len(b"content-length: ")
            self._received = [whole]
            self._missing = end + 4 + int(whole[length : whole.index(b"\r\n", length)]) - len(whole)
        if self._missing == 0 and self._answer is not None:
            whole = b"".join(self._received)
            self._received = []
            self._answer.set_result(whole)

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        """Send a request; its answer, head and body."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    async def body(self, request: bytes) -> bytes:
        """Send a request; the body of its answer, which must say that it went well."""
        head, _, body = (await self.ask(request)).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 20"):
            raise payload.Wrong(f"{request[:100]!r} was answered with {head[:100]!r} {body[:500]!r}")
        return body

    def close(self) -> None:
        """End it."""
        self._transport.close()


@contextlib.asynccontextmanager
async def connected(port: int, count: int) -> Any:
    """So many connections."""
    loop = asyncio.get_running_loop()
    found = [(await loop.create_connection(Connection, HOST, port))[1] for _ in range(count)]
    try:
        yield found
    finally:
        for connection in found:
            connection.close()


async def until_ready(connection: Connection) -> None:
    """Return when the broker serves all routes."""
    ready = request_bytes("GET", "/v1/ready")
    while not (await connection.ask(ready)).startswith(b"HTTP/1.1 200"):
        pass


class Load(NamedTuple):
    """What was sent, and what it took."""

    requests: int
    seconds: float
    server_cpu: float
    client_cpu: float


async def load(server: Served, request: bytes, connections: Sequence[Connection], seconds: float) -> Load:
    """Send the same request over all connections, again when it is answered, for so long and at least once each."""
    loop, sent = asyncio.get_running_loop(), 0
    server_cpu, client_cpu, begun = server.cpu(), time.process_time(), loop.time()

    async def one(connection: Connection) -> None:
        nonlocal sent
        while True:
            sent += 1
            answer = await connection.ask(request)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise payload.Wrong(f"{request[:100]!r} was answered with {answer[:500]!r}")
            if loop.time() - begun >= seconds:
                return

    await asyncio.gather(*map(one, connections))
    taken = loop.time() - begun
    client_cpu = time.process_time() - client_cpu
    return Load(sent, taken, server.cpu() - server_cpu, client_cpu)


class Events(asyncio.Protocol):
    """A connection that follows a topic: when each event came. For one event loop."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.began = asyncio.get_running_loop().create_future()
        """Done when the answer has begun."""
        self.waiting: deque[asyncio.Future[float]] = deque()
        """One for each event that is to come, in their order."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if not self.began.done() and b"\nid: " in data:
            self.began.set_result(None)
        for _ in range(data.count(b"data: ")):
            self.waiting.popleft().set_result(time.perf_counter())


if __name__ == "__main__":
    main(*sys.argv[1:])
