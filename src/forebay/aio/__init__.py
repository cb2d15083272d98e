"""The same surface for asyncio: nothing here blocks the event loop.

Appends, single ones and batches, go through the queue and wait for their acknowledgement without a thread; what may
touch the disk in the caller's thread runs in a few threads of its own. A call that is cancelled has an open outcome:
an append that was queued may still become visible, once, as after `Indeterminate`. One event loop per log.

    async with forebay.aio.open("./data") as log:
        orders = await log.create_topic("shop/orders", durability="fsync")
        await orders.append(b"paid", key=b"42")
        async for record in orders.read():
            print(record.offset, record.value)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

from forebay.aio.deadletters import AsyncDeadLetters
from forebay.aio.groups import AsyncGroup
from forebay.aio.loads import AsyncLoads
from forebay.aio.log import AsyncLog
from forebay.aio.readers import AsyncReader
from forebay.aio.streams import AsyncStream
from forebay.aio.subscriptions import AsyncConsumer, AsyncSubscription
from forebay.aio.topic import AsyncTopic
from forebay.settings import Settings
from forebay.topics import ShardRef

if TYPE_CHECKING:
    from forebay.client import AsyncRemoteLog

__all__ = [
    "AsyncConsumer",
    "AsyncDeadLetters",
    "AsyncGroup",
    "AsyncLoads",
    "AsyncLog",
    "AsyncReader",
    "AsyncStream",
    "AsyncSubscription",
    "AsyncTopic",
    "connect",
    "open",
]


def open(
    path: str | PurePath | None,
    settings: Settings | Mapping[str, object] | None = None,
    *,
    read_only: bool = False,
    may_own: Callable[[ShardRef], bool] | None = None,
) -> AsyncLog:
    """A log to be opened by `async with` or `await`; see `forebay.open`. `may_own` is called in other threads."""
    if not isinstance(settings, Settings):
        settings = Settings.load(overrides=settings)
    return AsyncLog(path, settings, read_only=read_only, may_own=may_own)


def connect(
    url: str, *, token: str | None = None, verify: bool | str | PurePath = True, timeout_s: float = 60.0
) -> AsyncRemoteLog:
    """The log of the broker at `url`, for one event loop; see `forebay.connect`."""
    from forebay.client import connect_async  # noqa: PLC0415 - its libraries are an extra: [client]

    return connect_async(url, token=token, verify=verify, timeout_s=timeout_s)
