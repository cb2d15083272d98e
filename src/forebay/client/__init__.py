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

import os
from pathlib import PurePath

from forebay.arguments import checked_seconds
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
from forebay.client.loops import LoopThread
from forebay.client.producers import AsyncRemoteProducer
from forebay.client.routers import AsyncRemoteRouters, RemoteRouters
from forebay.client.streams import AsyncRemoteStream
from forebay.client.subscriptions import (
    AsyncRemoteConsumer,
    AsyncRemoteSubscription,
    RemoteConsumer,
    RemoteSubscription,
)
from forebay.client.transport import TIMEOUT_S, HttpTransport
from forebay.clock import SystemClock
from forebay.settings.sources import expand_text

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


def connect(
    url: str,
    *,
    token: str | None = None,
    verify: bool | str | PurePath = True,
    timeout_s: float = TIMEOUT_S,
) -> RemoteLog:
    """The log of the broker at `url`; see `forebay.connect`."""
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
    clock = SystemClock()
    secret = None if token is None else expand_text(token, "token", os.environ)
    transport = HttpTransport(
        url, token=secret, verify=verify, timeout_s=checked_seconds("timeout_s", timeout_s), clock=clock
    )
    return AsyncRemoteLog(transport, clock)
