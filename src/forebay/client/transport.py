"""One broker over HTTP: requests that are repeated until they have an answer, or their time is up.

A request may be lost on its way, and so may its answer. So every request of this client may be repeated: reads are
asked by offset, appends carry a producer and a sequence, and the rest comes to the same when it is done twice. What the
broker refuses for now (503, 429) is tried again after the time that it names. What it refuses for good is raised at
once. If the broker has no such address, it is older than this client, and the error says so. For one event loop; knows
neither topics nor records.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Final, NoReturn, Protocol, TypeVar

import httpx

from forebay.clock import Clock
from forebay.disk.forks import ForkGuard
from forebay.errors import (
    Closed,
    Conflict,
    ForebayError,
    Full,
    Indeterminate,
    Invalid,
    Moved,
    Unavailable,
    UnknownTopic,
    Unsupported,
)
from forebay.wire.errors import decode_error
from forebay.wire.messages import TOPIC_ID_HEADER

T = TypeVar("T")

TIMEOUT_S: Final = 60.0
"""How long a call is tried, if its caller does not say."""
CONNECT_TIMEOUT_S: Final = 10.0
ATTEMPTS_MIN: Final = 3
"""So often a call can be tried although each answer is late: one attempt waits for a part of the whole time."""
STREAM_SILENCE_S: Final = 60.0
"""A stream without a sign of life for so long is lost: brokers send one every 15 s by default."""
PAUSE_S: Final = 0.01
PAUSE_MAX_S: Final = 2.0
CONNECTIONS_MAX: Final = 100
STATUS_ERROR: Final = 400
_NOT_OFFERED: Final = (404, 405)
"""With the code of an address, or of a method at one, that the broker does not have."""
_UNREACHED: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
"""Failures before a byte of the request was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """One request, as often as it has to be sent."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""
    media: str | None = None
    accept: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def changes(self) -> bool:
        """Whether it matters if the broker did it."""
        return self.method != "GET"

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class RefusedCall(Exception):
    """The broker has answered with an error, and says when to try again if that may help."""

    def __init__(self, error: ForebayError, retry_after_s: int | None) -> None:
        super().__init__(error, retry_after_s)
        self.error = error
        self.retry_after_s = retry_after_s


class Transport(Protocol):
    """Requests to one broker: any, or those that mean one topic."""

    @property
    def timeout_s(self) -> float:
        """How long a call is tried."""

    def check_open(self) -> None:
        """`Closed` after `close`, and in a forked child."""

    async def call(self, call: HttpCall, decode: Callable[[bytes], T], attempts: CallAttempts | None = None) -> T:
        """What `decode` makes of the answer; see `HttpTransport.call`."""

    def stream(self, call: HttpCall) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The pieces of an answer without an end; see `HttpTransport.stream`."""

    def attempts(self, call: HttpCall, timeout_s: float | None = None) -> CallAttempts:
        """Counts the attempts at a call."""


class TopicTransport:
    """Requests that mean one topic: each names its id, so that the broker refuses it for a later one of that name.

    A broker that is older than this client does not look at the id.
    """

    def __init__(self, any_topic: HttpTransport, topic_id: str) -> None:
        self.any_topic = any_topic
        """For requests about other topics."""
        self._headers = {TOPIC_ID_HEADER: topic_id}

    @property
    def timeout_s(self) -> float:
        """See `Transport`."""
        return self.any_topic.timeout_s

    def check_open(self) -> None:
        """See `Transport`."""
        self.any_topic.check_open()

    async def call(self, call: HttpCall, decode: Callable[[bytes], T], attempts: CallAttempts | None = None) -> T:
        """See `Transport`."""
        return await self.any_topic.call(self._meant(call), decode, attempts)

    def stream(self, call: HttpCall) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """See `Transport`."""
        return self.any_topic.stream(self._meant(call))

    def attempts(self, call: HttpCall, timeout_s: float | None = None) -> CallAttempts:
        """See `Transport`."""
        return self.any_topic.attempts(call, timeout_s)

    def _meant(self, call: HttpCall) -> HttpCall:
        return replace(call, headers={**call.headers, **self._headers})


class HttpTransport:
    """Requests to one broker. Shows its token to that broker alone: not in messages, `repr`, logs or pickles."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        verify: bool | str | PurePath,
        timeout_s: float,
        clock: Clock,
    ) -> None:
        self.url = _checked_url(url)
        self._clock = clock
        self._guard = ForkGuard()
        self.timeout_s = timeout_s
        """How long a call is tried."""
        attempt_s = timeout_s / ATTEMPTS_MIN
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={} if token is None else {"authorization": f"Bearer {_checked_token(token)}"},
            verify=_trust(self.url, verify),
            timeout=httpx.Timeout(attempt_s, connect=min(CONNECT_TIMEOUT_S, attempt_s)),
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX),
            trust_env=False,
        )
        self._is_closed = False

    def __reduce__(self) -> NoReturn:
        raise TypeError("a connection to a broker is not pickled: connect again where it is needed")

    def __repr__(self) -> str:
        return f"HttpTransport({self.url!r})"

    def check_open(self) -> None:
        """`Closed` after `close`, and in a forked child: it shares its sockets with the parent."""
        self._guard.check(f"this log of {self.url}")
        if self._is_closed:
            raise Closed(f"this log of {self.url} is closed")

    async def call(self, call: HttpCall, decode: Callable[[bytes], T], attempts: CallAttempts | None = None) -> T:
        """What `decode` makes of the answer, which may raise `Unavailable` if that was damaged on its way.

        When the time is up: `Indeterminate` for a change that an attempt may have made, else `Unavailable`. So too a
        change that is refused after an attempt that may have made it; the refusal is the cause of that error.
        """
        attempts = attempts or self.attempts(call)
        while True:
            try:
                return decode(await self._answer(call))
            except (ForebayError, RefusedCall) as error:
                await asyncio.sleep(attempts.pause_after(error))
            except asyncio.CancelledError:
                # The log is closed under the call, which was on its way.
                if not self._is_closed or not call.changes:
                    raise
                raise Indeterminate(f"{call}: this log of {self.url} was closed before the broker answered") from None

    async def _answer(self, call: HttpCall) -> bytes:
        """The body of one answer; raises what it carries, or why there is none."""
        self.check_open()
        try:
            answer = await self._client.send(self._request(call))
        except httpx.HTTPError as error:
            raise _lost(call, self.url, error) from error
        self._raise_for(call, answer, answer.content)
        return answer.content

    def _raise_for(self, call: HttpCall, answer: httpx.Response, content: bytes) -> None:
        if answer.status_code < STATUS_ERROR:
            return
        error = decode_error(answer.status_code, content)
        if answer.status_code in _NOT_OFFERED and isinstance(error, Unsupported):
            error = error.restated(
                f"the broker at {self.url} does not offer {call}: it is older than this client (GET /v1/health shows "
                "its version); upgrade the broker, or use a client of its version"
            )
        after = answer.headers.get("retry-after", "")
        raise RefusedCall(error, int(after) if after.isdecimal() else None)

    @asynccontextmanager
    async def stream(self, call: HttpCall) -> AsyncIterator[AsyncIterator[bytes]]:
        """The pieces of an answer without an end. One attempt: for `RefusedCall` and `Unavailable` see `attempts`."""
        self.check_open()
        request = self._request(call)
        request.extensions["timeout"] = httpx.Timeout(STREAM_SILENCE_S, connect=CONNECT_TIMEOUT_S).as_dict()
        try:
            answer = await self._client.send(request, stream=True)
            try:
                if answer.status_code >= STATUS_ERROR:
                    self._raise_for(call, answer, await answer.aread())
                yield self._pieces(call, answer)
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            raise _lost(call, self.url, error) from error

    async def _pieces(self, call: HttpCall, answer: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        except httpx.HTTPError as error:
            raise _lost(call, self.url, error) from error

    def attempts(self, call: HttpCall, timeout_s: float | None = None) -> CallAttempts:
        """Counts the attempts at a call, for callers who make them, or ask what came of them."""
        return CallAttempts(call, self.url, self.timeout_s if timeout_s is None else timeout_s, self._clock)

    def _request(self, call: HttpCall) -> httpx.Request:
        headers = {"accept": call.accept, "accept-encoding": "identity", **call.headers}
        if call.media is not None:
            headers["content-type"] = call.media
        return self._client.build_request(
            call.method, call.path, params=call.query or None, content=call.content or None, headers=headers
        )

    async def close(self) -> None:
        """Close the connections; calls under way fail. Harmless when repeated."""
        self._is_closed = True
        await self._client.aclose()


class CallAttempts:
    """The attempts at one call: whether to try again, and when."""

    def __init__(self, call: HttpCall, url: str, timeout_s: float, clock: Clock) -> None:
        self._call = call
        self._url = url
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline = clock.monotonic() + timeout_s
        self._failed = 0
        self._in_doubt: ForebayError | None = None
        """Why it is not known what an attempt has done."""
        self._is_lost = False
        """Whether an attempt had no answer that says of each partition what it has done there."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether an attempt may have done what it was to do without an answer that says so."""
        return self._in_doubt is not None

    def pause_after(self, failure: ForebayError | RefusedCall) -> float:
        """How many seconds to wait before the next attempt; raises if there is none."""
        error, after_s = (failure.error, failure.retry_after_s) if isinstance(failure, RefusedCall) else (failure, None)
        if isinstance(error, Indeterminate):
            self._in_doubt = error
            outcome = error.append_outcome
            self._is_lost |= outcome is None or any(
                isinstance(each, Indeterminate) for each in outcome.failures.values()
            )
        if not _is_for_now(error, is_answer=isinstance(failure, RefusedCall)):
            self._refuse(error)
        self._failed += 1
        pause = max(self._pause(), after_s or 0)
        if self._clock.monotonic() + pause >= self._deadline:
            self._give_up(error)
        return pause

    def _refuse(self, error: ForebayError) -> NoReturn:
        outcome = error.append_outcome
        # A producer that is not known any more says nothing of what an attempt with it has done.
        is_said = outcome is not None and not any(isinstance(each, Conflict) for each in outcome.failures.values())
        is_clear = isinstance(error, UnknownTopic) or is_said
        if self._in_doubt is None or not self._call.changes or is_clear:
            raise error
        refused = Indeterminate(
            f"{self._call} at {self._url}: an attempt may have done it ({self._in_doubt}), and the next one was "
            f"refused: {error}",
            topic=error.topic,
            partition=error.partition,
        )
        raise self._with_outcome(refused, error) from error

    def _give_up(self, error: ForebayError) -> NoReturn:
        tried = f"{self._call} at {self._url} was tried {self._failed} times in {self._timeout_s:g} s"
        if self._in_doubt is not None and self._call.changes:
            unknown = Indeterminate(
                f"{tried}, and may have been done: {self._in_doubt}; read to find out", topic=error.topic
            )
            raise self._with_outcome(unknown, error) from error
        if isinstance(error, Unavailable):
            raise error.restated(f"{tried}: {error}") from error
        raise Unavailable(f"{tried}: {error}", topic=error.topic, partition=error.partition) from error

    def _with_outcome(self, end: Indeterminate, last: ForebayError) -> Indeterminate:
        """The error with which the call ends, with what the last answer says of each partition of an append."""
        outcome = last.append_outcome
        if outcome is None:
            return end
        failures = {number: self._judged(failure) for number, failure in outcome.failures.items()}
        return end.with_outcome(outcome._replace(failures=failures))

    def _judged(self, failure: ForebayError) -> ForebayError:
        """Why the records of a partition are not there, or may be: what is said of a repeat may leave that open."""
        is_open = isinstance(failure, Conflict) or _is_for_now(failure, is_answer=True)
        if not self._is_lost or not is_open:
            return failure
        return Indeterminate(
            f"{self._call} at {self._url}: an attempt may have done it in partition {failure.partition}, and the last "
            f"one did not: {failure}",
            topic=failure.topic,
            partition=failure.partition,
        )

    def _pause(self) -> float:
        """Twice as long after each attempt, by chance up to half of it less: clients do not come back all at once."""
        longest = min(PAUSE_MAX_S, PAUSE_S * (1 << min(self._failed - 1, 10)))
        return longest * (0.5 + self._clock.random_bytes(1)[0] / 512)


def _is_for_now(error: ForebayError, *, is_answer: bool) -> bool:
    """Whether the same call may succeed a little later."""
    if isinstance(error, Moved | Full):
        return False
    if error.append_outcome is not None:
        # A repeat adds what is missing and nothing else: it may help where one of the partitions may take it later.
        return any(_is_for_now(failure, is_answer=is_answer) for failure in error.append_outcome.failures.values())
    # A broker that ends may be followed by another one. A log that was closed here stays closed.
    return isinstance(error, Unavailable | Indeterminate) or (is_answer and isinstance(error, Closed))


def _lost(call: HttpCall, url: str, error: httpx.HTTPError) -> ForebayError:
    why = str(error) or type(error).__name__
    if isinstance(error, _UNREACHED):
        return Unavailable(f"the broker at {url} cannot be reached: {why}")
    if call.changes:
        return Indeterminate(f"{call}: the broker at {url} gave no whole answer: {why}")
    return Unavailable(f"{call}: the broker at {url} gave no whole answer: {why}")


def _checked_url(url: str) -> str:
    try:
        found = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise Invalid(f"url is {url!r:.80}: {error}; give http://HOST:PORT or https://HOST:PORT") from error
    if found.userinfo:
        raise Invalid("the url has a user or a password in it: give a token by token=")
    if found.scheme not in ("http", "https") or not found.host or found.query or found.fragment:
        raise Invalid(f"url is {url!r:.80}; give http://HOST:PORT or https://HOST:PORT")
    return str(found).rstrip("/")


def _checked_token(token: str) -> str:
    # What a header cannot carry would be shown by the error of the library below.
    if not isinstance(token, str) or not token or not all("!" <= character <= "~" for character in token):
        raise Invalid("the token is empty, or has characters that a header cannot carry")
    return token


def _trust(url: str, verify: bool | str | PurePath) -> bool | ssl.SSLContext:  # noqa: FBT001 - as the caller gave it
    """Which certificates are believed. Without TLS there are none to check, and loading the usual ones takes 40 ms."""
    if not isinstance(verify, bool):
        return _authority(verify)
    return verify and not url.startswith("http://")


def _authority(file: str | PurePath) -> ssl.SSLContext:
    """Checks certificates by those in the file (PEM) of a certificate authority."""
    try:
        return ssl.create_default_context(cafile=str(file))
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"the certificates in {file} cannot be read: {error}") from error
