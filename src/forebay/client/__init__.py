"""Topics of a broker over HTTP, with the surface that the embedded log has.

    with forebay.connect("http://127.0.0.1:7878") as log:
        orders = log.create_topic("shop/orders", exist_ok=True)
        orders.append(b"paid", key=b"42")
        for record in orders.follow(forebay.EARLIEST):
            print(record.offset, record.value)

Calls are repeated until the broker has answered or their time is up; appends are stored once all the same (decision
0058). Knows what goes over the wire, and nothing of the server's side.
"""

from __future__ import annotations

import importlib as _importlib
import os
import typing as _typing
from pathlib import PurePath

from forebay.client.loops import LoopThread
from forebay.client.transport import TIMEOUT_S, HttpTransport
from forebay.clock import SystemClock
from forebay.settings.sources import expand_text

if _typing.TYPE_CHECKING:
    from forebay.client.appends import AsyncRemoteAck, AsyncRemoteBatchAck
    from forebay.client.awaiting import AsyncRemoteGroup, AsyncRemoteLog, AsyncRemoteReader, AsyncRemoteTopic
    from forebay.client.blocking import (
        RemoteAck,
        RemoteBatchAck,
        RemoteGroup,
        RemoteLoads,
        RemoteLog,
        RemoteProducer,
        RemoteReader,
        RemoteStream,
        RemoteTopic,
    )
    from forebay.client.deadletters import AsyncRemoteDeadLetters, RemoteDeadLetters
    from forebay.client.loads import AsyncRemoteLoads
    from forebay.client.producers import AsyncRemoteProducer
    from forebay.client.routers import AsyncRemoteRouters, RemoteRouters
    from forebay.client.streams import AsyncRemoteStream
    from forebay.client.subscriptions import (
        AsyncRemoteConsumer,
        AsyncRemoteSubscription,
        RemoteConsumer,
        RemoteSubscription,
    )

__all__ = [
    "AsyncRemoteAck",
    "AsyncRemoteBatchAck",
    "AsyncRemoteConsumer",
    "AsyncRemoteDeadLetters",
    "AsyncRemoteGroup",
    "AsyncRemoteLoads",
    "AsyncRemoteLog",
    "AsyncRemoteProducer",
    "AsyncRemoteReader",
    "AsyncRemoteRouters",
    "AsyncRemoteStream",
    "AsyncRemoteSubscription",
    "AsyncRemoteTopic",
    "RemoteAck",
    "RemoteBatchAck",
    "RemoteConsumer",
    "RemoteDeadLetters",
    "RemoteGroup",
    "RemoteLoads",
    "RemoteLog",
    "RemoteProducer",
    "RemoteReader",
    "RemoteRouters",
    "RemoteStream",
    "RemoteSubscription",
    "RemoteTopic",
    "connect",
    "connect_async",
]

_HOMES = {
    "forebay.client.appends": (
        "AsyncRemoteAck",
        "AsyncRemoteBatchAck",
    ),
    "forebay.client.awaiting": (
        "AsyncRemoteGroup",
        "AsyncRemoteLog",
        "AsyncRemoteReader",
        "AsyncRemoteTopic",
    ),
    "forebay.client.blocking": (
        "RemoteAck",
        "RemoteBatchAck",
        "RemoteGroup",
        "RemoteLoads",
        "RemoteLog",
        "RemoteProducer",
        "RemoteReader",
        "RemoteStream",
        "RemoteTopic",
    ),
    "forebay.client.deadletters": (
        "AsyncRemoteDeadLetters",
        "RemoteDeadLetters",
    ),
    "forebay.client.loads": ("AsyncRemoteLoads",),
    "forebay.client.producers": ("AsyncRemoteProducer",),
    "forebay.client.routers": (
        "AsyncRemoteRouters",
        "RemoteRouters",
    ),
    "forebay.client.streams": ("AsyncRemoteStream",),
    "forebay.client.subscriptions": (
        "AsyncRemoteConsumer",
        "AsyncRemoteSubscription",
        "RemoteConsumer",
        "RemoteSubscription",
    ),
}
"""Where the public names live, but for the functions below."""


if not _typing.TYPE_CHECKING:  # else a misspelt name would pass for one that is found here

    def __getattr__(name: str) -> object:
        """Load a module when its first name is asked for: a task of Spark needs the transport alone."""
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found: object = getattr(_importlib.import_module(home), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def connect(
    url: str,
    *,
    token: str | None = None,
    verify: bool | str | PurePath = True,
    timeout_s: float = TIMEOUT_S,
) -> RemoteLog:
    """The log of the broker at `url`; see `forebay.connect`."""
    from forebay.client.blocking import RemoteLog  # noqa: PLC0415 - loaded when first used, as __getattr__ says

    log = connect_async(url, token=token, verify=verify, timeout_s=timeout_s)
    return RemoteLog(log, LoopThread("forebay-client", log.disconnect))


def connect_async(
    url: str,
    *,
    token: str | None = None,
    verify: bool | str | PurePath = True,
    timeout_s: float = TIMEOUT_S,
) -> AsyncRemoteLog:
    """The same for asyncio; see `forebay.aio.connect`."""
    from forebay.arguments import checked_seconds  # noqa: PLC0415 - loaded when first used, as __getattr__ says
    from forebay.client.awaiting import AsyncRemoteLog  # noqa: PLC0415

    clock = SystemClock()
    secret = None if token is None else expand_text(token, "token", os.environ)
    transport = HttpTransport(
        url, token=secret, verify=verify, timeout_s=checked_seconds("timeout_s", timeout_s), clock=clock
    )
    return AsyncRemoteLog(transport, clock)
