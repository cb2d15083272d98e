"""The broker as an ASGI application: finds the route of a request, has its handler answer, counts and logs.

Runs in one event loop. Until the log is recovered it answers only what says how far it is; once it is to stop it takes
no new requests and ends those that wait.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager, suppress
from functools import lru_cache
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from forebay.broker.exchange import Disconnected, HttpAnswer, Receive, Request, Send, Streamed
from forebay.broker.guard import Guard
from forebay.broker.routes import FoundRoute, Route, Router
from forebay.broker.traffic import LoopLag, SeenRequest, Traffic
from forebay.catalog.entries import UnreadableValue
from forebay.clock import Clock
from forebay.errors import Closed, Forbidden, ForebayError, NotReady, Unauthenticated
from forebay.service.principals import AccessScope, Principal, may
from forebay.service.quotas import Admission, QuotaCounts
from forebay.service.service import Service
from forebay.settings import ServerSettings
from forebay.storage.recovery import FailedShard, Recovered
from forebay.topics import TopicName
from forebay.wire.errors import NO_METHOD, NO_ROUTE, SentError, encode_error, encode_refusal, public_message

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_CONTENT: Final = 204
NOTHING_COUNTED: Final = QuotaCounts(requests=0, bytes=0, streams=0, consumers=0, principals=0, admitted=0)
RECOVERING_MAX: Final = 0.9999
"""How far a recovery says to be at most: the whole means that the broker is ready."""
LOOP_ITEMS_MAX: Final = 100
"""Longer lists are made by a thread: ten thousand items take the loop 50 ms and more."""
ITEM_BYTES: Final = 300
"""About what an item of a list takes in its answer, for as long as that is not made."""
COMPUTING_THREADS: Final = 2
"""Threads that decode and encode: more of them would wait for the interpreter."""
BUFFERED_BYTES: Final = 64 * 1024
"""What the buffer of a connection takes at once. A larger answer counts until its client has taken it."""
PIECE_BYTES: Final = 1024 * 1024
"""What is sent of a larger answer at once."""
RIGHTS_SECONDS: Final = 0.25
"""How often the broker looks whether tokens have changed, for the sake of answers that last."""
DEGRADED_SECONDS: Final = 1.0
"""How often it looks whether the topics of shards that could not be opened still exist, while there are some."""


class BrokerPhase(enum.Enum):
    """What a broker is at."""

    STARTING = "starting"
    """It opens its log and recovers shards."""
    READY = "ready"
    ENDING = "ending"
    """It finishes what it has begun, and takes no new requests."""


class LastingAnswer:
    """An answer that goes on while its caller may have it: a stream, or a request that waits. For one event loop."""

    __slots__ = ("_end", "error", "principal", "scope", "topics")

    def __init__(
        self, principal: Principal, scope: AccessScope, topics: Sequence[TopicName], end: Callable[[], object]
    ) -> None:
        """`scope` is the right that it needs on the topics. `end` has it end soon, and may be called several times."""
        self.principal = principal
        self.scope = scope
        self.topics = topics
        self.error: ForebayError | None = None
        """Why the caller may not have it any more, if that has ended it."""
        self._end = end

    def end(self, error: ForebayError | None = None) -> None:
        """Have it end, in order if there is no error."""
        self.error = self.error or error
        self._end()


class Broker:
    """Answers requests. For one event loop."""

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        settings: ServerSettings,
        guard: Guard,
        clock: Clock,
        private: Sequence[str] = (),
    ) -> None:
        """`private` are texts that no answer may show, such as the path of the data directory."""
        self.phase = BrokerPhase.STARTING
        self.progress = 0.0
        """How far the recovery is, from 0 to 1."""
        self.unreadable: tuple[UnreadableValue, ...] = ()
        """Stored values that could not be read, as of the last look: at the start, and then each second."""
        self._failed: tuple[FailedShard, ...] = ()
        """Shards that could not be opened at the start, until one is found open or its topic deleted."""
        self.settings = settings
        self.clock = clock
        self.guard = guard
        self.lag = LoopLag(clock)
        self.traffic = Traffic(clock)
        self.routes = tuple(routes)
        self._began = clock.monotonic()
        self._computing = ThreadPoolExecutor(COMPUTING_THREADS, thread_name_prefix="forebay-broker-compute")
        self._service: Service | None = None
        self._lasting: set[LastingAnswer] = set()
        self._edition: object = None
        """Of the rights by which answers that last were looked through."""
        self._router = Router(routes)
        self._private = tuple(private)

    @property
    def uptime_s(self) -> float:
        """For how long the process has been serving."""
        return self.clock.monotonic() - self._began

    def public_message(self, error: BaseException | str) -> str:
        """What any caller may read of an error, or of what was noted of one."""
        return public_message(error, private=self._private)

    @property
    def degraded(self) -> tuple[FailedShard, ...]:
        """Shards that could not be opened, and were not found open since: one that was may be given up in order.

        Those of topics that were deleted are forgotten by `forget_deleted`, within a second.
        """
        service = self._service
        if service is not None:
            self._failed = tuple(failed for failed in self._failed if not service.is_open(failed.ref))
        return self._failed

    @property
    def is_degraded(self) -> bool:
        """Whether shards could not be opened or stored values not read, or calls are refused because many hang."""
        return bool(self.degraded or self.unreadable) or (self._service is not None and self._service.is_degraded)

    def quota_counts(self) -> QuotaCounts:
        """What callers have under way."""
        return NOTHING_COUNTED if self._service is None else self._service.quotas.counts()

    @property
    def service(self) -> Service:
        """What handlers call; `NotReady` until the log is recovered."""
        if self._service is None or self.phase is not BrokerPhase.READY:
            raise self.not_ready()
        return self._service

    async def compute(self, call: Callable[[], T]) -> T:
        """Run what only computes, and takes long, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._computing, call)

    async def list_answer(
        self, request: Request, items: Sequence[T], make: Callable[[Sequence[T]], msgspec.Struct]
    ) -> HttpAnswer:
        """The message that `make` gives for the items, as an answer. Where there are many it counts before it is made.

        A thread makes it then.
        """
        if len(items) <= LOOP_ITEMS_MAX:
            return HttpAnswer.of(make(items))
        request.admitted.hold(len(items) * ITEM_BYTES)
        return await self.compute(lambda: HttpAnswer.of(make(items)))

    def note_progress(self, done: float) -> None:
        """The recovery has come so far, from 0 to 1. It never goes back."""
        self.progress = max(self.progress, min(done, RECOVERING_MAX))

    def become_ready(self, service: Service, recovered: Recovered, unreadable: Sequence[UnreadableValue] = ()) -> None:
        """Serve all routes from now on, but for the shards and stored values that failed."""
        self._service, self._failed, self.progress = service, tuple(recovered.failed), 1.0
        self.unreadable = tuple(unreadable)
        if self.phase is BrokerPhase.STARTING:
            self.phase = BrokerPhase.READY

    @contextmanager
    def lasting(
        self, principal: Principal, scope: AccessScope, topics: Sequence[TopicName], end: Callable[[], object]
    ) -> Iterator[LastingAnswer]:
        """Have `end` called when the broker is to stop, or when the caller has this right on these topics no more.

        At once, if that is so already.
        """
        answer = LastingAnswer(principal, scope, topics, end)
        self._lasting.add(answer)
        try:
            # Tokens may have changed, and the broker may have begun to stop, since the request was let in.
            if self.phase is BrokerPhase.ENDING:
                answer.end()
            else:
                self._check_lasting(answer)
            yield answer
        finally:
            self._lasting.discard(answer)

    async def finish(self) -> None:
        """Have the sessions of callers end in order, before the log is closed. Once no request is left."""
        if self._service is not None:
            await self._service.subscriptions.close()

    async def watch_rights(self) -> None:
        """End the answers of callers that have lost their right to them, until cancelled."""
        while True:
            await asyncio.sleep(RIGHTS_SECONDS)
            self.check_rights()

    async def watch_degraded(self) -> None:
        """Forget shards that could not be opened once their topics are deleted, until cancelled.

        And see which stored values cannot be read.
        """
        while True:
            await asyncio.sleep(DEGRADED_SECONDS)
            await self.forget_deleted()
            await self.look_for_unreadable()

    async def look_for_unreadable(self) -> None:
        """Go by which of the stored values that could not be read still cannot be."""
        # While the metadata store does not answer, they stay listed.
        with suppress(ForebayError):
            if self._service is not None:
                self.unreadable = tuple(await self._service.unreadable_values())

    async def forget_deleted(self) -> None:
        """Forget shards that could not be opened and whose topics no longer exist, here or by another process."""
        service = self._service
        for name, spec in {failed.ref.spec.name: failed.ref.spec for failed in self._failed}.items():
            # While the metadata store does not answer, or a definition cannot be read, they stay listed.
            with suppress(ForebayError):
                if service is not None and not await service.is_defined(spec):
                    self._failed = tuple(one for one in self._failed if one.ref.spec.name != name)

    def check_rights(self) -> None:
        """End the answers whose callers have no valid token any more, or lost a right: once tokens have changed."""
        edition = None if self._service is None else self._service.rights_edition()
        if edition != self._edition:
            self._edition = edition
            for answer in list(self._lasting):
                self._check_lasting(answer)

    def _check_lasting(self, answer: LastingAnswer) -> None:
        assert self._service is not None, "an answer lasts once requests are served"
        try:
            self._service.check_still(answer.principal, answer.scope, answer.topics)
        except (Unauthenticated, Forbidden) as error:
            answer.end(error)

    def begin_ending(self) -> None:
        """Take no new requests, and end those that wait for records. Harmless when repeated."""
        self.phase = BrokerPhase.ENDING
        for answer in list(self._lasting):
            answer.end()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request. The task is cancelled when the client goes."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            with self.traffic.request(request) as seen, ExitStack() as held:
                await self._send(request, await self._answer(request, seen, held), send, seen)
        except (Disconnected, asyncio.CancelledError):
            # The client has gone, or the broker ends without waiting longer: there is nothing to answer.
            pass

    async def _answer(self, request: Request, seen: SeenRequest, held: ExitStack) -> HttpAnswer | Streamed:
        """What a handler says, counted as long as `held` lasts; every error becomes an answer of the one shape."""
        try:
            found = self._router.find(request.method, request.path)
            if not isinstance(found, FoundRoute):
                return _no_route(request, found)
            seen.route, request.at = found.route, found.at
            if not found.route.before_ready:
                _check_scopes(self.authenticated(request), found)
                request.admission = held.enter_context(self._admission(request, found.route))
            request.check_query(found.route.query)
            answer = await found.route.handler(self, request)
            if request.admission is not None and isinstance(answer, HttpAnswer):
                size = len(answer.body)
                request.admission.hold(size, is_done=found.route.method != "GET" or size <= BUFFERED_BYTES)
            return answer
        except ForebayError as error:
            seen.error = error
            return self._error_answer(error)
        except Disconnected:
            raise
        except Exception as error:
            logger.exception("%s failed", seen.name)
            return self._error_answer(error)

    def authenticated(self, request: Request) -> Principal:
        """Who calls, which the request carries from then on. The token is never part of an error or a log line."""
        service = self.service
        self._check_origin(request)
        value = request.header(b"authorization")
        if value is None:
            request.principal = service.anonymous()
        else:
            kind, _, secret = value.partition(" ")
            if kind.lower() != "bearer" or not secret:
                raise Unauthenticated('the header Authorization is not "Bearer TOKEN"')
            request.principal = service.authenticate(secret.strip())
        service.call_for(request.principal)
        return request.principal

    def _admission(self, request: Request, route: Route) -> Admission:
        """What counts for the caller while the request is under way."""
        quotas, name = self.service.quotas, request.principal.name
        return quotas.stream(name) if route.is_stream else quotas.request(name, request.length or 0)

    def _check_origin(self, request: Request) -> None:
        """`Forbidden` for what a page of another site has a browser send to this machine, where no token is asked for.

        Such a page can reach a loopback address by its number, or by a name of its own that leads there.
        """
        if self.settings.access != "loopback":
            return
        host, origin = request.header(b"host"), request.header(b"origin")
        if host is not None and not _is_loopback(f"//{host}"):
            raise Forbidden(f"this server is for this machine alone and is not called {host!a:.80}: use 127.0.0.1")
        if origin is not None and not _is_loopback(origin):
            raise Forbidden(f"pages of {origin!a:.80} may not use this server: set server.access, and use a token")

    def sent_error(self, error: BaseException) -> SentError:
        """The error as it is sent, without what no answer may show."""
        return encode_error(error, private=self._private)

    def _error_answer(self, error: BaseException) -> HttpAnswer:
        sent = self.sent_error(error)
        headers: tuple[tuple[str, str], ...] = ()
        if sent.retry_after_s is not None:
            headers = (("retry-after", str(sent.retry_after_s)),)
        if isinstance(error, Unauthenticated):
            headers = (*headers, ("www-authenticate", "Bearer"))
        return HttpAnswer(sent.status, sent.body, headers=headers)

    def not_ready(self) -> ForebayError:
        """Why most routes are not served now."""
        if self.phase is BrokerPhase.ENDING:
            return Closed("the broker is stopping: ask another one, or this one again when it has started")
        return NotReady(
            f"the broker recovers its shards, {self.progress:.0%} done: try again; GET /v1/ready says when it is ready",
            replay_progress=round(self.progress, 4),
        )

    async def _send(self, request: Request, answer: HttpAnswer | Streamed, send: Send, seen: SeenRequest) -> None:
        seen.status = answer.status
        headers = [(b"forebay-request-id", seen.id.encode())]
        headers += [(name.encode(), value.encode()) for name, value in answer.headers]
        if self.phase is BrokerPhase.ENDING or request.is_much_left:
            headers.append((b"connection", b"close"))
        if isinstance(answer, HttpAnswer):
            if answer.status != NO_CONTENT:
                headers.append((b"content-type", answer.media_type.encode()))
                headers.append((b"content-length", b"%d" % len(answer.body)))
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            if len(answer.body) > BUFFERED_BYTES:
                await _send_large(answer.body, send)
            else:
                await send({"type": "http.response.body", "body": answer.body})
            seen.sent += len(answer.body)
            return
        headers.append((b"content-type", answer.media_type.encode()))
        with answer.held:
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            writer = None if answer.begin is None else request.answer_writer()
            if answer.begin is not None and writer is not None:
                answer.begin(writer, seen)
            async with aclosing(answer.pieces) as pieces:
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    seen.sent += len(piece)
        await send({"type": "http.response.body", "body": b""})


async def _send_large(body: bytes, send: Send) -> None:
    """Send a body so that this returns when its client has taken it: so long it is in memory, and counts.

    Each step waits until most of the one before has been taken. A client that takes a step in time is not stalled.
    """
    pieces = memoryview(body)
    for begin in range(0, len(body), PIECE_BYTES):
        await send({"type": "http.response.body", "body": pieces[begin : begin + PIECE_BYTES], "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _check_scopes(who: Principal, found: FoundRoute) -> None:
    """`Forbidden` unless the caller has the rights of the route, as far as the address says on what.

    Before anything else of the request is looked at: a caller without a right learns nothing of the form. What a
    request names besides is looked at by its handler.
    """
    scopes, at = found.route.scopes, found.at
    topic = TopicName(at["namespace"], at["topic"]) if "topic" in at else None
    lacking = [scope for scope in scopes if not (scope in who.scopes if topic is None else may(who, scope, topic))]
    if lacking and (found.route.needs_all_scopes or len(lacking) == len(scopes)):
        where = "" if topic is None else f" on topic {topic}"
        raise Forbidden(
            f"{who.name} has no scope {lacking[0]}{where}: ask the operator for a token that has it",
            topic=topic,
            scope=str(lacking[0]),
        )


@lru_cache(1024)
def _is_loopback(address: str) -> bool:
    try:
        host = urlsplit(address).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _no_route(request: Request, methods: frozenset[str]) -> HttpAnswer:
    if not methods:
        return HttpAnswer(
            404, encode_refusal(NO_ROUTE, "there is no such address: GET /docs shows those that there are")
        )
    allowed = ", ".join(sorted(methods))
    message = f"{request.method:.20} is not offered here: use {allowed}"
    return HttpAnswer(405, encode_refusal(NO_METHOD, message), headers=(("allow", allowed),))
