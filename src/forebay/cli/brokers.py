"""A broker that a command asks in place of a data directory: its topics, and calls about the broker itself."""

from __future__ import annotations

import os
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

import msgspec

from forebay.errors import Unavailable, Unsupported

try:
    from forebay.client import connect
    from forebay.client.loops import LoopThread
    from forebay.client.topics import decoded, topic_path
    from forebay.client.transport import TIMEOUT_S, HttpCall, HttpTransport
except ImportError as missing:
    raise Unsupported(
        f'asking a broker needs packages that are not here ({missing.name}): pip install "forebay[client]"'
    ) from missing
from forebay.clock import SystemClock
from forebay.topics import TopicName
from forebay.wire.bodies import MediaType
from forebay.wire.messages import Health

if TYPE_CHECKING:
    from forebay.client import RemoteLog

T = TypeVar("T", bound=msgspec.Struct)

TOKEN_VARIABLE: Final = "FOREBAY_TOKEN"
AUTHORITY_VARIABLE: Final = "FOREBAY_CA_FILE"
WORK_SECONDS: Final = 3 * 86_400.0
"""How long a command waits for what may take a broker hours: it has a third of it for one attempt."""
REACH_SECONDS: Final = 3.0
"""How long a command looks for its broker, before it says that there is none."""


def connected(url: str) -> RemoteLog:
    """The topics of the broker at `url`; `Unavailable` soon if none answers there.

    Later calls are repeated for longer: a broker that starts again is waited for.
    """
    check_reached(url)
    token = f"${{{TOKEN_VARIABLE}}}" if os.environ.get(TOKEN_VARIABLE) else None
    return connect(url, token=token, verify=_authority())


def asked_to(url: str, name: str, verb: str, message: msgspec.Struct | None, kind: type[T]) -> T:
    """What the broker answers when it has done something with a topic that may take long. Harmless when repeated."""
    path = f"{topic_path(TopicName.parse(name))}/{verb}"
    content = b"" if message is None else msgspec.json.encode(message)
    with BrokerCalls.reached(url, timeout_s=WORK_SECONDS) as calls:
        return calls.ask(HttpCall(method="POST", path=path, content=content, media=MediaType.JSON), kind)


class BrokerCalls:
    """Calls that the client library has no method for: how a broker fares, and what its operator asks it to do."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        token = os.environ.get(TOKEN_VARIABLE) or None
        self._transport = HttpTransport(url, token=token, verify=_authority(), timeout_s=timeout_s, clock=SystemClock())
        self._loop = LoopThread("forebay-calls", self._transport.close)

    @classmethod
    def reached(cls, url: str, *, timeout_s: float = TIMEOUT_S) -> BrokerCalls:
        """Calls to a broker that has answered; `Unavailable` soon if none does."""
        check_reached(url)
        return cls(url, timeout_s=timeout_s)

    def ask(self, call: HttpCall, kind: type[T]) -> T:
        """What the broker answers; raises the error that it answers with."""
        return self._loop.call(partial(self._transport.call, call, partial(decoded, kind)))

    def close(self) -> None:
        """Close the connections. Harmless when repeated."""
        self._loop.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_reached(url: str) -> None:
    """`Unavailable` soon if no broker answers at `url`."""
    with BrokerCalls(url, timeout_s=REACH_SECONDS) as calls:
        try:
            calls.ask(HttpCall(method="GET", path="/v1/health"), Health)
        except Unavailable as error:
            raise error.restated(f'{error}; see that "forebay serve" runs there, or name another by --url') from error


def _authority() -> bool | str:
    """The file of a certificate authority to check the broker by, or `True` for those of the system."""
    return os.environ.get(AUTHORITY_VARIABLE) or True
