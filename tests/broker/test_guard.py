"""The guard: requests of any size, shape and pace are answered or cut off before a handler spends memory on them."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forebay.broker.guard import PIECE_BYTES, PIPELINE_MAX, Guard, GuardedProtocol
from forebay.settings import ServerSettings
from tests.support.waiting import async_until, until

SECONDS = 30.0
MUCH = b"a" * 20_000_000
HOOKS = (
    "_start_asgi_task",
    "connection_lost",
    "connection_made",
    "data_received",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "on_url",
    "pause_writing",
    "resume_writing",
    "send_400_response",
)
"""What the guard overrides of the connections of the library below."""
PLAIN = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Echo:
    """Says how long a body was. `/never` waits until it is cancelled, `/much` answers much."""

    def __init__(self) -> None:
        self.calls = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.cancelled = threading.Event()
        self.entered = threading.Event()
        self.much = 32 << 20
        """Bytes of the answer of `/much`: more than the buffers of both ends hold."""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.calls += 1
        self.headers += scope["headers"]
        try:
            if scope["path"] == "/never":
                self.entered.set()
                await asyncio.Event().wait()
            if scope["path"] == "/much":
                await self._send_much(send)
                return
            size = 0
            while True:
                event = await receive()
                if event["type"] == "http.disconnect":
                    return
                size += len(event["body"])
                if not event["more_body"]:
                    break
            body = b"%d" % size
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]}
            )
            await send({"type": "http.response.body", "body": body})
        except asyncio.CancelledError:
            self.cancelled.set()

    async def _send_much(self, send: Any) -> None:
        self.entered.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(32):
            await send({"type": "http.response.body", "body": b"x" * (self.much // 32), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Guarded:
    """A server behind a guard."""

    def __init__(self, port: int, guard: Guard, app: Echo, loop: asyncio.AbstractEventLoop) -> None:
        self.port = port
        self.guard = guard
        self.app = app
        self.loop = loop

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)

    def ask(self, *pieces: bytes) -> tuple[int, dict[str, Any] | bytes]:
        """Send these bytes on a connection of their own; the status and the body of the first answer."""
        with self.connect() as connection:
            try:
                for piece in pieces:
                    connection.sendall(piece)
            except OSError:
                pass  # refused before all was sent
            return read_answer(connection)

    def in_loop(self, call: Any) -> Any:
        """Call it in the event loop of the server; what it returns."""

        async def run() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(SECONDS)


def read_answer(connection: socket.socket) -> tuple[int, dict[str, Any] | bytes]:
    got = b""
    while b"\r\n\r\n" not in got:
        piece = connection.recv(65536)
        if not piece:
            return 0, b""
        got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    status = int(lines[0].split()[1])
    return status, json.loads(body) if headers.get("content-type") == "application/json" else body


@contextmanager
def guarded(**settings: Any) -> Iterator[Guarded]:
    """A server with these limits."""
    app = Echo()
    started: list[Guarded] = []
    ready = threading.Event()

    async def run() -> None:
        guard = Guard(ServerSettings(**settings))
        config = uvicorn.Config(
            app,
            http=partial(GuardedProtocol, guard=guard),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            port=0,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        await async_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        started.append(Guarded(port, guard, app, asyncio.get_running_loop()))
        started[0].stop = partial(setattr, server, "should_exit", True)  # type: ignore[attr-defined]
        ready.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="guarded")
    thread.start()
    try:
        assert ready.wait(SECONDS)
        yield started[0]
    finally:
        started[0].stop()  # type: ignore[attr-defined]
        thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_plain_request_is_answered_and_the_connection_kept() -> None:
    with guarded() as server, server.connect() as connection:
        for size in (0, 5, 0):
            connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
            assert read_answer(connection) == (200, b"%d" % size)
        assert server.app.calls == 3


@pytest.mark.parametrize(
    ("pieces", "status", "code"),
    [
        pytest.param((b"GET /" + MUCH + b" HTTP/1.1\r\n\r\n",), 414, "url_too_long", id="a URL of 20 MB"),
        pytest.param(
            (b"GET / HTTP/1.1\r\nx: " + MUCH + b"\r\n\r\n",), 431, "headers_too_large", id="a header of 20 MB"
        ),
        pytest.param(
            (b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: 1\r\n" % n for n in range(500)) + b"\r\n",),
            431,
            "headers_too_large",
            id="500 headers",
        ),
        pytest.param(
            (b"GET / HTTP/1.1\r\n", *[b"x%d: %s\r\n" % (n, b"a" * 900) for n in range(90)], b"\r\n"),
            431,
            "headers_too_large",
            id="headers of 80 KB in small pieces",
        ),
        pytest.param((b"\x16\x03\x01\x02\x00\x01\x00" * 50,), 400, "bad_request", id="TLS on a plain port"),
        pytest.param((b"NONSENSE\r\n\r\n",), 400, "bad_request", id="not HTTP"),
        pytest.param(
            (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",), 400, "bad_request", id="a negative length"
        ),
        pytest.param(
            (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",),
            400,
            "bad_request",
            id="two lengths",
        ),
    ],
)
def test_what_is_too_large_or_no_http_is_refused_before_it_is_served(
    pieces: tuple[bytes, ...], status: int, code: str
) -> None:
    with guarded() as server:
        found, body = server.ask(*pieces)
        assert found == status
        assert isinstance(body, dict)
        assert body["error"]["code"] == code
        assert body["error"]["message"]
        assert server.app.calls == 0
        assert server.in_loop(lambda: server.guard.refused[code]) == 1
        assert server.ask(PLAIN) == (200, b"0")


def test_a_head_within_the_limit_may_come_in_pieces_beside_bodies_of_any_size() -> None:
    with guarded(header_bytes_max=32 * 1024) as server, server.connect() as connection:
        for _ in range(3):
            head = b"POST / HTTP/1.1\r\ncontent-length: 300000\r\nx: " + b"a" * 30_000 + b"\r\n\r\n"
            for begin in range(0, len(head), 10_000):
                connection.sendall(head[begin : begin + 10_000])
                server.in_loop(lambda: None)
            connection.sendall(b"b" * 300_000)
            assert read_answer(connection) == (200, b"300000")


def test_a_request_that_trickles_in_is_cut_off() -> None:
    with guarded(request_timeout_ms=1000) as server:
        for begun in (b"", b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc"):
            with server.connect() as connection:
                connection.sendall(begun)
                now = server.in_loop(server.loop.time)
                server.in_loop(partial(server.guard.check_pace, now + 0.5))
                server.in_loop(partial(server.guard.check_pace, now + 2.0))
                status, body = read_answer(connection)
                assert status == 408
                assert isinstance(body, dict)
                assert body["error"]["code"] == "too_slow"
                assert connection.recv(1) == b""


def test_an_idle_connection_between_requests_is_not_too_slow() -> None:
    with guarded(request_timeout_ms=1000) as server, server.connect() as connection:
        connection.sendall(PLAIN)
        assert read_answer(connection) == (200, b"0")
        now = server.in_loop(server.loop.time)
        server.in_loop(partial(server.guard.check_pace, now + 10))
        connection.sendall(PLAIN)
        assert read_answer(connection) == (200, b"0")


def test_more_connections_than_allowed_are_refused_and_others_go_on() -> None:
    with guarded(connections_max=3, connections_per_address_max=2) as server:
        first, second = server.connect(), server.connect()
        with first, second:
            for connection in (first, second):
                connection.sendall(PLAIN)
                assert read_answer(connection)[0] == 200
            status, body = server.ask(PLAIN)
            assert status == 429
            assert isinstance(body, dict)
            assert body["error"]["code"] == "too_many_connections"
            first.sendall(PLAIN)
            assert read_answer(first)[0] == 200
        while server.in_loop(lambda: server.guard.connections):
            pass
        assert server.ask(PLAIN) == (200, b"0")


def test_requests_sent_without_waiting_are_all_answered_in_order() -> None:
    """More than 32 of them were cut off, and the answers of those that were done were lost."""
    bodies = [b"x" * (number * 7 % 3_000) for number in range(500)]
    sent = b"".join(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(b), b) for b in bodies)
    with guarded() as server, server.connect() as connection:
        sender = threading.Thread(target=connection.sendall, args=(sent,))
        sender.start()
        answers = connection.makefile("rb")
        sizes = []
        for _ in bodies:
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
            while (line := answers.readline().lower()) != b"\r\n":
                if line.startswith(b"content-length"):
                    size = int(line.split(b":")[1])
            sizes.append(int(answers.read(size)))
        sender.join(SECONDS)
        assert sizes == [len(body) for body in bodies]
        assert server.app.calls == len(bodies)


@pytest.mark.parametrize(
    "head", [PLAIN, b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"]
)
def test_requests_that_wait_for_an_answer_are_read_no_further(head: bytes, protocols: list[GuardedProtocol]) -> None:
    with guarded() as server, server.connect() as connection:
        connection.sendall(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n" + head * 2_000)
        assert server.app.entered.wait(SECONDS)
        (protocol,) = protocols
        until(lambda: server.in_loop(lambda: len(protocol.pipeline)) >= PIPELINE_MAX)
        assert server.in_loop(lambda: len(protocol.pipeline)) < 2 * PIPELINE_MAX + PIECE_BYTES // len(head)
        # However long the first request takes, the client is not why the others have not come.
        server.in_loop(lambda: server.guard.check_pace(server.loop.time() + 1_000))
        assert not server.guard.refused
        assert server.app.calls == 1


def test_what_answers_is_cancelled_when_its_client_goes() -> None:
    with guarded() as server:
        with server.connect() as connection:
            connection.sendall(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n")
            assert server.app.entered.wait(SECONDS)
        assert server.app.cancelled.wait(SECONDS)


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    with guarded(stall_timeout_ms=1000) as server, server.connect() as connection:
        connection.sendall(b"GET /much HTTP/1.1\r\nhost: x\r\n\r\n")
        assert server.app.entered.wait(SECONDS)
        while not server.app.cancelled.is_set():
            # Until the buffers of both ends are full, each piece that goes out is a sign of life.
            server.in_loop(lambda: server.guard.check_pace(server.loop.time() + 2))
        got = 0
        with pytest.raises(ConnectionResetError):
            while piece := connection.recv(1 << 20):
                got += len(piece)
            raise ConnectionResetError
        assert got < server.app.much


def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    with guarded(stall_timeout_ms=60_000) as server, server.connect() as connection:
        connection.sendall(b"GET /much HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        got = 0
        while piece := connection.recv(1 << 20):
            server.in_loop(lambda: server.guard.check_pace(server.loop.time() + 2))
            got += len(piece)
        assert got > server.app.much


def test_a_closed_connection_whose_client_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[asyncio.Transport] = []
    connection_made = GuardedProtocol.connection_made

    def note(protocol: GuardedProtocol, transport: asyncio.Transport) -> None:
        made.append(transport)
        connection_made(protocol, transport)

    monkeypatch.setattr(GuardedProtocol, "connection_made", note)
    with guarded(stall_timeout_ms=1000) as server, server.connect() as connection:
        connection.sendall(PLAIN)
        assert read_answer(connection)[0] == 200
        (transport,) = made

        def fill() -> None:
            # Less than would pause the writer: what is left in the buffer alone keeps the connection.
            while transport.get_write_buffer_size() == 0:
                transport.write(b"x" * 1000)

        server.in_loop(fill)
        connection.sendall(b"this is not HTTP\r\n\r\n")
        while not server.in_loop(transport.is_closing):
            pass
        now = server.in_loop(server.loop.time)
        for later in (0.0, 0.5):
            server.in_loop(partial(server.guard.check_pace, now + later))
            assert server.in_loop(lambda: server.guard.connections) == 1
        server.in_loop(partial(server.guard.check_pace, now + 2.0))
        assert server.in_loop(lambda: server.guard.refused["stalled"]) == 1
        while server.in_loop(lambda: server.guard.connections):
            pass


def test_what_follows_the_chunks_of_a_body_is_limited_and_never_part_of_the_head() -> None:
    chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
    with guarded() as server, server.connect() as connection:
        connection.sendall(chunked + b"0\r\nauthorization: Bearer x\r\n\r\n")
        assert read_answer(connection) == (200, b"3")
        assert (b"authorization", b"Bearer x") not in server.app.headers
        status, body = server.ask(chunked, b"0\r\nx: " + MUCH)
        assert status == 431
        assert isinstance(body, dict)
        assert body["error"]["code"] == "headers_too_large"
        status, body = server.ask(chunked, b"1;x=" + MUCH)
        assert status == 431


def test_a_request_that_cannot_be_read_is_not_the_answer_to_the_one_before_it() -> None:
    with guarded() as server, server.connect() as connection:
        connection.sendall(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n")
        assert server.app.entered.wait(SECONDS)
        connection.sendall(b"GET http://x HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536) == b""


@pytest.fixture
def protocols(monkeypatch: pytest.MonkeyPatch) -> list[GuardedProtocol]:
    """The connections that were made."""
    made: list[GuardedProtocol] = []
    connection_made = GuardedProtocol.connection_made

    def note(protocol: GuardedProtocol, transport: asyncio.Transport) -> None:
        made.append(protocol)
        connection_made(protocol, transport)

    monkeypatch.setattr(GuardedProtocol, "connection_made", note)
    return made


def test_a_connection_that_is_lost_before_the_first_of_its_requests_is_answered_is_no_failure(
    protocols: list[GuardedProtocol], caplog: pytest.LogCaptureFixture
) -> None:
    """The HTTP library below wrote an error of its own for it, since it only marks the newest request."""
    with guarded() as server:
        with server.connect() as connection:
            connection.sendall(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n" + PLAIN * 2)
            assert server.app.entered.wait(SECONDS)
            server.in_loop(protocols[0].transport.abort)
            assert server.app.cancelled.wait(SECONDS)
        while server.in_loop(lambda: server.guard.connections):
            pass
    assert server.app.calls == 1
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.slow
def test_what_is_cancelled_at_the_end_of_a_server_gets_no_answer_and_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with guarded() as server:
        connection = server.connect()
        connection.sendall(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n")
        assert server.app.entered.wait(SECONDS)
    with connection:
        assert connection.recv(1) == b""
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == ["Cancel 1 running task(s), timeout graceful shutdown exceeded"]


def test_a_request_whose_client_goes_before_it_is_begun_is_not_served(protocols: list[GuardedProtocol]) -> None:
    with guarded() as server, server.connect() as connection:
        connection.sendall(PLAIN)
        assert read_answer(connection)[0] == 200
        (protocol,) = protocols

        def ask_and_go() -> None:
            protocol.data_received(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n")
            protocol.connection_lost(None)

        server.in_loop(ask_and_go)
        for _ in range(3):
            server.in_loop(lambda: None)
        assert server.app.calls == 1


def test_a_client_that_has_sent_several_requests_and_goes_is_noticed_while_the_first_is_answered() -> None:
    """The class below reads nothing while requests wait, and saw the end only after the answer."""
    with guarded() as server:

        def look() -> object:
            return server.in_loop(lambda: server.guard.check_pace(server.loop.time()))

        with server.connect() as connection:
            connection.sendall(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n" + PLAIN * 2)
            assert server.app.entered.wait(SECONDS)
            look()
            assert not server.app.cancelled.is_set(), "it is still there"
        until(lambda: look() or server.app.cancelled.is_set())
        assert server.app.calls == 1


@pytest.mark.parametrize("name", HOOKS)
def test_the_library_below_has_what_the_guard_overrides(name: str) -> None:
    """In older versions some were missing: the guard's were never called, and handlers outlived their clients."""
    assert name in vars(GuardedProtocol)
    assert callable(vars(HttpToolsProtocol)[name])


def test_all_that_the_guard_overrides_is_known() -> None:
    own = {name for name in vars(GuardedProtocol) if not name.startswith("__")}

    assert {name for name in own if hasattr(HttpToolsProtocol, name)} == set(HOOKS)
    for caller in ("on_headers_complete", "on_response_complete"):
        assert "_start_asgi_task(" in inspect.getsource(vars(HttpToolsProtocol)[caller]), "requests begin by it alone"
