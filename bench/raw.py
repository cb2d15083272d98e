"""Redis and NATS over bare sockets: commands made beforehand, and answers of which only the end is looked for.

As lean as the bytes that the broker of Forebay is sent, so that neither side is measured through a slow client. The end
of an answer is found by counting its lines: records in these cases are text without line ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from bench import payload
from bench.load import Server

HOST = "127.0.0.1"
ENTRY_LINES = 8
"""Lines of an entry of a stream with one field, as Redis sends it: five lengths, its id, the field and the value."""
PING = b"PING\r\n"
NATS_HELLO = b'CONNECT {"verbose":false,"pedantic":false,"lang":"raw","version":"1","protocol":1}\r\n'

Lines = int | Callable[[bytes], int | None]
"""How many lines an answer has; or what finds it from the beginning of the answer, once that is long enough."""


class LineConnection(asyncio.Protocol):
    """A connection with one request at a time, whose answer is a number of lines. For one event loop."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._received: list[bytes] = []
        self._seen = 0
        self._lines: Lines = 0
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
        self._seen += data.count(b"\n")
        lines = self._lines
        if not isinstance(lines, int):
            found = lines(b"".join(self._received))
            if found is None:
                return
            lines = self._lines = found
        if self._seen >= lines and self._answer is not None:
            whole, answer = b"".join(self._received), self._answer
            self._received, self._seen, self._answer = [], 0, None
            answer.set_result(whole)

    def ask(self, request: bytes, lines: Lines) -> asyncio.Future[bytes]:
        """Send a request; its answer."""
        self._lines = lines
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def send(self, request: bytes) -> None:
        """Send what is not answered."""
        self._transport.write(request)

    def close(self) -> None:
        """End it."""
        self._transport.close()


class NatsConnection(LineConnection):
    """One of NATS, which asks now and then whether its client is alive."""

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if PING in data:
            self.send(b"PONG\r\n")
            data = data.replace(PING, b"")
        if data:
            super().data_received(data)


@contextlib.asynccontextmanager
async def connected(peer: type[Redis] | type[Nats], server: Server, count: int) -> Any:
    """So many connections of a peer, ready to be asked."""
    loop = asyncio.get_running_loop()
    found = [(await loop.create_connection(peer.connection, HOST, server.port))[1] for _ in range(count)]
    await peer.joined(found)
    try:
        yield found
    finally:
        for connection in found:
            connection.close()


# Redis


def command(*words: bytes | str | int) -> bytes:
    """A command as Redis takes it."""
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


class Redis:
    """What is asked of Redis, by way of its streams: an append of each record is a command of a pipeline."""

    connection: type[LineConnection] = LineConnection
    begins = b"$"

    @staticmethod
    async def joined(connections: Sequence[LineConnection]) -> None:
        """Nothing has to be said first."""

    @staticmethod
    async def make(connection: LineConnection, stream: str) -> None:
        """A stream is there with its first record."""

    @staticmethod
    def append(values: Sequence[bytes], stream: str, number: int) -> tuple[bytes, int]:
        """The request that appends the values, for the connection of that number; the lines of its answer."""
        return b"".join(command("XADD", stream, "*", "v", value) for value in values), 2 * len(values)

    @staticmethod
    async def pages(connection: LineConnection, stream: str, count: int, page: int) -> list[bytes]:
        """All records of a stream, as answers of so many each."""
        found, last = [], b"-"
        for _ in range(0, count, page):
            request = command("XRANGE", stream, last, "+", "COUNT", page)
            found.append(await connection.ask(request, _range_lines))
            # The id of the last entry: what follows it are six lines and the end of the last one.
            last = b"(" + found[-1].rsplit(b"\r\n", ENTRY_LINES - 1)[1]
        return found

    @staticmethod
    def values(page: bytes) -> list[bytes]:
        """The values of an answer: each the last line of its entry."""
        return page.split(b"\r\n")[ENTRY_LINES::ENTRY_LINES]

    @staticmethod
    async def held(connection: LineConnection, stream: str) -> int:
        """How many records a stream has."""
        return int((await connection.ask(command("XLEN", stream), 1))[1:])


def _range_lines(head: bytes) -> int | None:
    first, end, _ = head.partition(b"\r\n")
    return 1 + ENTRY_LINES * int(first[1:]) if end else None


# NATS


class Nats:
    """What is asked of NATS, by way of JetStream: each record is published, and acknowledged to an inbox."""

    connection: type[LineConnection] = NatsConnection
    begins = b"MSG"

    @staticmethod
    async def joined(connections: Sequence[LineConnection]) -> None:
        """Greet the server on each connection, and let it have an inbox of its own."""
        for number, connection in enumerate(connections):
            # Two lines: what the server says of itself, and its answer to the ping.
            await connection.ask(NATS_HELLO + b"SUB inbox.%d 1\r\nPING\r\n" % number, 2)

    @staticmethod
    async def make(connection: LineConnection, stream: str) -> None:
        """A stream on disk."""
        config = {"name": stream, "subjects": [stream], "storage": "file", "retention": "limits", "max_age": 0}
        answer = await connection.ask(_asked(f"$JS.API.STREAM.CREATE.{stream}", json.dumps(config).encode()), 2)
        if b'"error"' in answer:
            raise payload.Wrong(f"nats made no stream: {answer!r}")

    @staticmethod
    def append(values: Sequence[bytes], stream: str, number: int) -> tuple[bytes, int]:
        """The request that publishes the values, for the connection of that number; the lines of its answer."""
        return b"".join(_asked(stream, value, number) for value in values), 2 * len(values)

    @staticmethod
    async def pages(connection: LineConnection, stream: str, count: int, page: int) -> list[bytes]:
        """All records of a stream, as answers of so many each, by a consumer that acknowledges nothing."""
        config = {"ack_policy": "none", "deliver_policy": "all", "inactive_threshold": 10**10}
        made = json.dumps({"stream_name": stream, "config": config}).encode()
        answer = await connection.ask(_asked(f"$JS.API.CONSUMER.CREATE.{stream}", made), 2)
        consumer = json.loads(answer.split(b"\r\n")[1])["name"]
        following = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        found = []
        for first in range(0, count, page):
            wanted = min(page, count - first)
            found.append(await connection.ask(_asked(following, b'{"batch":%d}' % wanted), 2 * wanted))
        return found

    @staticmethod
    def values(page: bytes) -> list[bytes]:
        """The values of an answer: each follows the line of its message."""
        return page.split(b"\r\n")[1::2]

    @staticmethod
    async def held(connection: LineConnection, stream: str) -> int:
        """How many records a stream has."""
        answer = await connection.ask(_asked(f"$JS.API.STREAM.INFO.{stream}", b""), 2)
        return int(json.loads(answer.split(b"\r\n")[1])["state"]["messages"])


def _asked(subject: str, body: bytes, number: int = 0) -> bytes:
    return b"PUB %s inbox.%d %d\r\n%s\r\n" % (subject.encode(), number, len(body), body)


PEERS: dict[str, type[Redis] | type[Nats]] = {"redis": Redis, "nats": Nats}


async def check(
    peer: type[Redis] | type[Nats], connection: LineConnection, stream: str, batch: Sequence[bytes], times: int
) -> None:
    """A stream holds the batch so many times, and nothing else."""
    count = len(batch) * times
    payload.check_count(stream, count, await peer.held(connection, stream))
    found = itertools.chain.from_iterable(
        peer.values(page) for page in await peer.pages(connection, stream, count, PAGE)
    )
    payload.check_each(stream, batch, times, found)


PAGE = 10_000
"""Records that are asked for at once where all are read."""
