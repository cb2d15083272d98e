"""HTTP for benchmarks: a broker or a bare sink as a process of its own, and a client that costs little.

The client writes bytes that were made beforehand and finds the end of each answer, no more: what it costs beside the
server is measured, and stated with the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from bench import payload
from bench.load import Server
from forebay.broker.guard import Guard, GuardedProtocol
from forebay.broker.serve import bound_socket, serve, url_of
from forebay.settings import Settings

HOST = "127.0.0.1"
PATIENCE = 60.0
CONNECTIONS_MAX = 2_000
"""Of one address and principal: all clients of a case are one."""
OK = b"HTTP/1.1 200"
SINK_ANSWER = b'{"ranges":[{"partition":0,"first":0,"count":1000}]}'


# The server


@contextlib.contextmanager
def served(kind: str, path: Path) -> Iterator[Server]:
    """A `broker` over the directory, or a `sink`, in a process of its own; ended in order with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.web", kind, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise payload.Wrong(f"the server ended: {process.communicate()[1][-2000:]}")
        yield Server(int(line), process.pid)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def main(kind: str, path: str) -> None:
    """The process of a server: its port is its first line."""
    limits = {"connections_per_address_max": CONNECTIONS_MAX, "streams_per_principal_max": CONNECTIONS_MAX}
    settings = Settings.load(None, {"server": {"port": 0, **limits}}, environment={})
    if kind == "broker":
        serve(path, settings, on_bound=_say_port)
    else:
        _serve_sink(settings)


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
    while not (await connection.ask(ready)).startswith(OK):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
