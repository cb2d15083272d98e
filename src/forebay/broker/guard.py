"""Keeps hostile and slow clients from using up the server: limits that hold before any handler runs.

The parser below accepts headers and addresses of any size, and waits for ever. So each connection counts what it has
received of a request's head, and the guard looks at all connections once a second: one that is too slow is closed. The
answers of the guard have the shape of all other errors.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from forebay.broker.exchange import CHUNKS
from forebay.settings import ServerSettings
from forebay.wire.errors import encode_refusal

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often the guard looks for connections that are too slow."""
LINGER_SECONDS: Final = 2.0
"""So long a connection is read on after an answer that came before the end of the request: closed at once, the client
would lose the answer with the connection."""
PIPELINE_MAX: Final = 32
"""So many requests wait on one connection for the answer to an earlier one; more are not read until then."""
PIECE_BYTES: Final = 1024
"""So much is parsed at once of what may hold several requests: those in it may wait beyond the limit."""
_VERSION: Final = b"HTTP/1."
"""Each request that another one can follow has it in its head."""


@dataclass(frozen=True, slots=True)
class GuardRefusal:
    """Why a request is answered before any handler sees it."""

    status: int
    code: str
    message: str


TOO_MANY: Final = GuardRefusal(
    503, "too_many_connections", "too many connections are open: close some, or try again later"
)
TOO_MANY_HERE: Final = GuardRefusal(
    429, "too_many_connections", "too many connections from this address: use one for many requests"
)
BAD: Final = GuardRefusal(400, "bad_request", "this is not HTTP as RFC 9112 describes it")


_GONE: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class _Refused(Exception):
    """Ends the parsing of what a client has sent."""


@dataclass(slots=True)
class Guard:
    """What the connections of one server may use, and what they use. For one event loop."""

    settings: ServerSettings
    refused: Counter[str] = field(default_factory=Counter)
    """How often, by the code of the refusal."""
    _connections: dict[GuardedProtocol, str | None] = field(default_factory=dict)
    """With the address of each client."""
    _by_address: Counter[str] = field(default_factory=Counter)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    def enter(self, connection: GuardedProtocol, address: str | None) -> GuardRefusal | None:
        """Count a new connection; why it has to go, if it has. One that was counted when it was accepted may stay."""
        if connection in self._connections:
            return None
        self._connections[connection] = address
        if address is not None:
            self._by_address[address] += 1
        if len(self._connections) > self.settings.connections_max:
            return TOO_MANY
        if address is not None and self._by_address[address] > self.settings.connections_per_address_max:
            return TOO_MANY_HERE
        return None

    def leave(self, connection: GuardedProtocol) -> None:
        """The connection is over. Harmless when repeated."""
        address = self._connections.pop(connection, None)
        if address is not None:
            self._by_address[address] -= 1
            if self._by_address[address] <= 0:
                del self._by_address[address]

    async def run(self) -> None:
        """Close connections that are too slow, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.check_pace(asyncio.get_running_loop().time())

    def check_pace(self, now: float) -> None:
        """Close connections that are too slow by this time of the loop."""
        for connection in list(self._connections):
            connection.check_pace(now)


class _LingeringTransport(asyncio.Transport):
    """The connection as the class below uses it: closed while a request comes in, it is read on for a while."""

    def __init__(self, inner: asyncio.Transport, protocol: GuardedProtocol) -> None:
        super().__init__()
        self._inner = inner
        self._protocol = protocol
        self._is_lingering = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._inner.write(data)

    def close(self) -> None:
        if self._inner.is_closing() or self._is_lingering:
            return
        if not self._protocol.is_receiving:
            self._inner.close()
            return
        self._is_lingering = True
        if self._inner.can_write_eof():
            self._inner.write_eof()
        self._protocol.flow.resume_reading()
        self._protocol.loop.call_later(LINGER_SECONDS, self._inner.close)

    def abort(self) -> None:
        self._inner.abort()

    def is_closing(self) -> bool:
        return self._is_lingering or self._inner.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        if not self._inner.is_closing():
            self._inner.resume_reading()


class AnswerChunks:
    """Ready chunks of an answer that goes on, written to its connection as they are. For one event loop.

    What is sent in pieces goes through the server's `send`, which makes a chunk of each piece for each connection.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def has_room(self) -> bool:
        """Whether the answer has begun and goes on, and its client takes what is sent."""
        cycle = self._cycle
        return (
            cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
            and cycle.chunked_encoding is True
        )

    def write(self, chunk: bytes) -> None:
        """Send a chunk, of `encode_chunk`; only while there is room."""
        self._cycle.transport.write(chunk)


def encode_chunk(piece: bytes) -> bytes:
    """A piece of an answer, as HTTP/1.1 sends it where the length of the whole is not known."""
    return b"%x\r\n%s\r\n" % (len(piece), piece)


class GuardedProtocol(HttpToolsProtocol):
    """One connection of a client. For one event loop."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        guard: Guard,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._guard = guard
        self._answering: tuple[RequestResponseCycle, asyncio.Task[None]] | None = None
        """The request that was answered last, or is: an earlier one than `cycle` where the client has sent several. And
        the task that does it."""
        self._is_refused = False
        self._refusal = BAD
        self._head_bytes = self._raw_bytes = 0
        """Of the request that is being received: in headers that have ended, and as received of a head, or of a body
        since its last piece."""
        self._is_head = False
        """Whether the head of a request has begun and not ended."""
        self._is_body = False
        """Whether the body of a request has begun and not ended."""
        self._unread = b""
        """What was received and is parsed when fewer requests wait."""
        self._is_fed = False
        """Whether what was received last had a piece of a body in it."""
        self._began: float | None = None
        """When the request that is being received began; `None` between requests."""
        self._stalled: float | None = None
        """Since when the client does not take what is sent."""
        self._closing: float | None = None
        """Since when the connection has been seen closing: it does so once the client has taken what is left."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, unless there are too many."""
        super().connection_made(_LingeringTransport(transport, self))
        self._began = self.loop.time()
        refusal = self._guard.enter(self, self.client[0] if self.client else None)
        if refusal is not None:
            self._refuse(refusal)

    @property
    def is_receiving(self) -> bool:
        """Whether the body of a request has begun and not ended."""
        return self._is_body

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and end the handlers that answer it."""
        self._guard.leave(self)
        super().connection_lost(exc)
        self._unread = b""
        if self._answering is not None:
            cycle, task = self._answering
            # The class below marks only the newest request that it has read.
            cycle.disconnected = True
            cycle.message_event.set()
            task.cancel()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        # As the class below does it. Here the task is kept: a client that goes before its first step ends it, too.
        task = self.loop.create_task(self._answer_request(cycle, app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        self._answering = (cycle, task)

    async def _answer_request(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Run the application. One that is cancelled before it has answered leaves an open connection to be closed.

        That is all there is to it: the client has gone, or the server ends and waits no longer. It is no error, and no
        answer could say what was done.
        """
        cycle.scope["extensions"] = {CHUNKS: {CHUNKS: partial(AnswerChunks, cycle)}}
        try:
            await app(cycle.scope, cycle.receive, cycle.send)
        except Exception:
            logger.exception("a request failed outside of its handler: its connection is closed")
        finally:
            if not cycle.response_complete:
                self.transport.close()
            cycle.on_response = _nothing

    def data_received(self, data: bytes) -> None:
        """Parse what came, within the limits; of many requests only so many that few wait."""
        if self._unread:
            self._unread += data
            return
        if len(self.pipeline) < PIPELINE_MAX and data.count(_VERSION) <= 1:
            self._parse(data)
            return
        at = 0
        while at < len(data) and len(self.pipeline) < PIPELINE_MAX:
            self._parse(data[at : at + PIECE_BYTES])
            at += PIECE_BYTES
        self._unread = data[at:]
        if self._unread:
            self.flow.pause_reading()

    def on_response_complete(self) -> None:
        """A request is answered: the next one is begun, and those that were not parsed yet take its place."""
        super().on_response_complete()
        if self._began is not None:
            # It had to wait until now to be read on: that was not its client's doing.
            self._began = self.loop.time()
        unread, self._unread = self._unread, b""
        if unread:
            self.data_received(unread)

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_refused or self.transport.is_closing():
            return
        was_body, self._is_fed = self._is_body, False
        if self._began is None:
            self._began = self.loop.time()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Not offered: the request was parsed, and is answered as any other.
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal)
            return
        if (self._is_body and was_body and not self._is_fed) or (self._is_head and not was_body):
            # Of a head that has not ended, or of what follows a body: what the parser keeps of it is seen nowhere else.
            self._raw_bytes += len(data)
            if self._raw_bytes > self._guard.settings.header_bytes_max:
                self._refuse(self._head_refusal())

    def on_message_begin(self) -> None:
        """See the parser."""
        self._is_head = True
        self._head_bytes = self._raw_bytes = 0
        if self._began is None:
            self._began = self.loop.time()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """See the parser."""
        super().on_url(url)
        limit = self._guard.settings.url_bytes_max
        if len(self.url) > limit:
            message = f"the address has more than {limit} bytes (server.url_bytes_max)"
            self._stop(GuardRefusal(414, "url_too_long", message))

    def on_header(self, name: bytes, value: bytes) -> None:
        """See the parser."""
        self._head_bytes += len(name) + len(value)
        settings = self._guard.settings
        if self._head_bytes > settings.header_bytes_max or len(self.headers) >= settings.headers_max:
            self._stop(self._head_refusal())
        if not self._is_body:
            # What follows a body of chunks is no part of the head: it may have passed a proxy unseen.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See the parser."""
        # It may refuse: then there is no request whose body has begun, and an earlier one may still be answered.
        super().on_headers_complete()
        self._is_head = False
        self._is_body = True
        self._raw_bytes = 0

    def on_body(self, body: bytes) -> None:
        """See the parser."""
        self._is_fed = True
        self._raw_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See the parser."""
        self._began = None
        self._is_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client does not take what is sent, for now."""
        self._stalled = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client takes what is sent again."""
        self._stalled = None
        super().resume_writing()

    def check_pace(self, now: float) -> None:
        """Close the connection if its request, or its reading of an answer, takes too long."""
        settings = self._guard.settings
        if self._closing is None and self.transport.is_closing():
            self._closing = now
        if self.pipeline and self._is_client_gone():
            self.transport.abort()
            return
        since = self._closing if self._stalled is None else self._stalled
        if since is not None and now - since > settings.stall_timeout_ms / 1000:
            self._guard.refused["stalled"] += 1
            self.transport.abort()
        elif self._began is not None and not self._is_refused and not self.pipeline:
            limit = settings.request_timeout_ms
            if now - self._began > limit / 1000:
                message = f"the request took longer than {limit} ms to arrive (server.request_timeout_ms)"
                self._refuse(GuardRefusal(408, "too_slow", message))

    def _is_client_gone(self) -> bool:
        """Whether the client has closed its side, asked of the system.

        The class below reads nothing while a request waits behind another one, and so does not see the end.
        """
        looked = select.poll()
        looked.register(self.transport.get_extra_info("socket").fileno(), _GONE)
        return bool(looked.poll(0))

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser below refuses on its own."""
        self._refuse(BAD)

    def _head_refusal(self) -> GuardRefusal:
        settings = self._guard.settings
        return GuardRefusal(
            431,
            "headers_too_large",
            f"the head of the request has more than {settings.header_bytes_max} bytes (server.header_bytes_max) "
            f"or {settings.headers_max} headers (server.headers_max)",
        )

    def _stop(self, refusal: GuardRefusal) -> None:
        self._refusal = refusal
        raise _Refused

    def _refuse(self, refusal: GuardRefusal) -> None:
        """Answer, and close. Where an earlier request is not answered yet, only close: its client must not take this
        for its answer.
        """
        self._is_refused = True
        self._guard.refused[refusal.code] += 1
        cycle = self.cycle
        is_free = cycle is None or cycle.response_complete
        if is_free or (self._is_body and not self.pipeline and not cycle.response_started):
            self._answer(refusal)
        if not is_free:
            # What its handler still sends goes nowhere, and it sees that the client has gone.
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _answer(self, refusal: GuardRefusal) -> None:
        body = encode_refusal(refusal.code, refusal.message)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        if not self.transport.is_closing():
            self.transport.write(STATUS_LINE[refusal.status] + head + body)


def _nothing() -> None:
    """For a request whose answer is complete: it refers to its connection no more."""
