"""How a request finds a member of etcd that answers: endpoints, fail-over, time-outs, login.

What is safe to repeat is asked of one member after the other; what is not is repeated only if it certainly was
not done. The only module that speaks HTTP. Knows nothing of keys, leases or watches.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

import httpx
import msgspec

from forebay.clock import Clock
from forebay.decoders import decoder
from forebay.disk.forks import FORKS, ForkGuard
from forebay.errors import Closed, Indeterminate, Invalid, Unavailable
from forebay.locks import Rank, RankedLock
from forebay.metadata.etcd.refusals import AnswerLost, LoginNeeded, NotDone, Refused, failure_of
from forebay.metadata.etcd.wire import Request, Token

CONNECTIONS_MAX = 256
_ROUNDS_MAX = 100
_PAUSE_S = 0.025
_PAUSE_S_MAX = 0.4
_CONNECT_S_MAX = 2.0
_LOGINS_MAX = 2
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_HEADERS = {
    "Content-Type": "application/json",
    # A member cut off from the majority then says so at once instead of letting the request time out.
    "Grpc-Metadata-hasleader": "true",
}
_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")


class Gateway:
    """Requests to one etcd by any of its members. Safe for threads."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        clock: Clock,
        request_timeout_s: float,
        tls: ssl.SSLContext | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> None:
        self.endpoints = tuple(endpoint.rstrip("/") for endpoint in endpoints)
        if not self.endpoints:
            raise Invalid("etcd has no endpoints: name its members in metadata.endpoints")
        self.timeout_s = request_timeout_s
        self.guard = ForkGuard()
        self._clock = clock
        self._login = None if user is None else _Login(user, password or "")
        self._present = 0
        self._ended: str | None = None
        self._closing = threading.Event()
        # Proxies of the environment are for the web, not for the heart of a cluster.
        self._client = httpx.Client(
            verify=tls or ssl.create_default_context(),
            trust_env=False,
            headers=_HEADERS,
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=16),
        )
        FORKS.enter(self)

    def call(
        self,
        path: str,
        request: Request,
        kind: type[_Reply],
        *,
        repeatable: bool,
        timeout_s: float | None = None,
    ) -> _Reply:
        """The reply of the first member that gives one.

        `Unavailable` means that nothing was done, or only what is `repeatable`; `Indeterminate` that the
        request was sent and its outcome is not known; `Refused` that etcd will not do it.
        """
        body = msgspec.json.encode(request)
        limit_s = timeout_s or self.timeout_s
        give_up_at = self._clock.monotonic() + limit_s
        paused_s = 0.0
        failures: dict[str, str] = {}
        for attempt, endpoint in self._in_turn():
            try:
                # One member that hangs may not use up the time of all.
                answer = self._answer(endpoint, path, body, limit_s / 2 if repeatable else limit_s)
                return _decoded(answer, kind)
            except (NotDone, AnswerLost) as error:
                self._leave(endpoint)
                failures[endpoint] = str(error)
                if isinstance(error, AnswerLost) and not repeatable:
                    raise _indeterminate(endpoint, error) from error
            if (attempt + 1) % len(self.endpoints) == 0:
                # Pauses are counted beside the clock, so that a clock turned by hand ends the call as well.
                if paused_s >= limit_s or self._clock.monotonic() >= give_up_at:
                    break
                paused_s += self.pause(attempt // len(self.endpoints))
        raise _unavailable(failures)

    def ask(self, path: str, request: Request, kind: type[_Reply], *, timeout_s: float | None = None) -> _Reply:
        """As `call`, for what may be repeated and where a refusal is an error."""
        try:
            return self.call(path, request, kind, repeatable=True, timeout_s=timeout_s)
        except Refused as error:
            raise error.as_error() from error

    @contextlib.contextmanager
    def stream(self, path: str, request: Request, idle_s: float) -> Iterator[ReplyStream]:
        """The lines of a reply that does not end by itself, from the member that answered last.

        Silence for `idle_s` ends the lines. `Unavailable` means that another member may be asked.
        """
        self.refuse_if_ended()
        endpoint = self.endpoints[self._present]
        timeout = httpx.Timeout(self.timeout_s, connect=min(self.timeout_s, _CONNECT_S_MAX), read=idle_s)
        body = msgspec.json.encode(request)
        try:
            headers = self._authorization(endpoint)
            with self._client.stream("POST", endpoint + path, content=body, headers=headers, timeout=timeout) as reply:
                if reply.status_code != 200:
                    raise failure_of(reply.status_code, reply.read())
                yield ReplyStream(reply)
        except (httpx.HTTPError, NotDone, AnswerLost, LoginNeeded) as error:
            self._leave(endpoint)
            self._forget_token(error)
            raise Unavailable(f"the stream from {endpoint} has ended ({_words(error)}): try another member") from error
        except Refused as error:
            raise error.as_error() from error

    def version(self) -> str | None:
        """What the present member says of itself, if anything."""
        try:
            answer = self._client.get(f"{self.endpoints[self._present]}/version", timeout=self.timeout_s)
            return str(decoder(dict[str, str]).decode(answer.content).get("etcdserver"))
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            _log.info("etcd does not say its version: %s", error)
            return None

    def pause(self, round_number: int) -> float:
        """Let a moment pass, longer with each round; a closing store ends it. Gives its length."""
        seconds: float = min(_PAUSE_S * 2**round_number, _PAUSE_S_MAX)
        self._closing.wait(seconds)
        return seconds

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def refuse_if_ended(self) -> None:
        if self._ended is not None:
            raise Closed(f"this metadata store is {self._ended}")

    def end(self) -> None:
        """Refuse new calls and let those that pause go."""
        self._ended = self._ended or "closed: open another"
        self._closing.set()

    def close(self) -> None:
        """Give the connections back, without a word to etcd."""
        self.end()
        self._client.close()

    def abandon(self) -> None:
        self._ended = self._ended or "left behind: open another in this process"

    def _in_turn(self) -> Iterator[tuple[int, str]]:
        """Every endpoint in its turn, the one that answered last first."""
        first = self._present
        for attempt in range(_ROUNDS_MAX * len(self.endpoints)):
            self.refuse_if_ended()
            yield attempt, self.endpoints[(first + attempt) % len(self.endpoints)]

    def _leave(self, endpoint: str) -> None:
        """Ask another member first from now on."""
        if self.endpoints[self._present] == endpoint:
            self._present = (self._present + 1) % len(self.endpoints)

    def _answer(self, endpoint: str, path: str, body: bytes, timeout_s: float) -> bytes:
        for _ in range(_LOGINS_MAX):
            headers = self._authorization(endpoint)
            try:
                return self._post(endpoint + path, body, headers, timeout_s)
            except LoginNeeded as error:
                self._forget_token(error, headers)
                reason = str(error)
        raise NotDone(reason)

    def _post(self, url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> bytes:
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S_MAX))
        try:
            response = self._client.post(url, content=body, headers=headers, timeout=timeout)
        except _NEVER_SENT as error:
            raise NotDone(_words(error)) from error
        except httpx.HTTPError as error:
            raise AnswerLost(_words(error)) from error
        except RuntimeError as error:
            # httpx says so of a client that was closed; nothing is sent then.
            self.refuse_if_ended()
            raise NotDone(str(error)) from error
        if response.status_code != 200:
            raise failure_of(response.status_code, response.content)
        return response.content

    def _authorization(self, endpoint: str) -> dict[str, str]:
        login = self._login
        if login is None:
            return {}
        with login.lock:
            if login.token is None:
                login.token = self._log_in(endpoint, login)
            return {"Authorization": login.token}

    def _log_in(self, endpoint: str, login: _Login) -> str:
        body = msgspec.json.encode({"name": login.user, "password": login.password})
        try:
            return _decoded(self._post(f"{endpoint}/v3/auth/authenticate", body, {}, self.timeout_s), Token).token
        except (AnswerLost, LoginNeeded) as error:
            # A lost login changed nothing, and the request itself has not been sent yet.
            raise NotDone(f"login: {error}") from error
        except Refused as error:
            raise Invalid(
                f'etcd refuses user {login.user!r} ("{error.message}"): check metadata.user and metadata.password'
            ) from error

    def _forget_token(self, error: Exception, headers: dict[str, str] | None = None) -> None:
        login = self._login
        if login is not None and isinstance(error, LoginNeeded):
            with login.lock:
                if headers is None or headers.get("Authorization") == login.token:
                    login.token = None


class _Login:
    """Who we are for etcd. The password is kept to log in again; it is never shown."""

    def __init__(self, user: str, password: str) -> None:
        self.user = user
        self.password = password
        self.lock = RankedLock(Rank.STORE, "metadata.login")
        self.token: str | None = None


class ReplyStream:
    """One reply as it comes in, line by line."""

    def __init__(self, reply: httpx.Response) -> None:
        self._reply = reply
        self._socket = reply.extensions["network_stream"].get_extra_info("socket")

    def lines(self) -> Iterator[bytes]:
        """Each line once it is whole; silence ends them, and so does the end of the reply."""
        parts: list[bytes] = []
        with contextlib.suppress(httpx.ReadTimeout):
            for piece in self._reply.iter_bytes():
                end, *lines = piece.split(b"\n")
                parts.append(end)
                for line in lines:
                    yield b"".join(parts)
                    parts = [line]

    def interrupt(self) -> None:
        """End it, from another thread: who waits for the next line finds the end instead."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _decoded(answer: bytes, kind: type[_Reply]) -> _Reply:
    try:
        return decoder(kind, strict=False).decode(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise AnswerLost(f"an answer that is not understood: {answer[:100]!r}") from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _indeterminate(endpoint: str, error: AnswerLost) -> Indeterminate:
    return Indeterminate(
        f"{endpoint} was asked, but its answer is lost ({error}): read to find out whether it was done"
    )


def _unavailable(failures: dict[str, str]) -> Unavailable:
    tried = ", ".join(f"{endpoint} ({reason})" for endpoint, reason in failures.items())
    return Unavailable(
        f"etcd does not answer: {tried}; nothing was done: check metadata.endpoints and that a majority of the "
        "members is up, then try again"
    )
