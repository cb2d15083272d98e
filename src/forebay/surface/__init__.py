"""What every way of using Forebay offers, as Protocols: logs, topics, loads, readers, groups, subscriptions, routers.

`surface.Log`, `surface.TopicHandle`, … are for calls that return when they are done: `forebay.open` gives a `Log`.
The same for asyncio stands in `surface.awaiting`: `forebay.aio.open` gives an `awaiting.Log`. A program that is written
for these Protocols works with each implementation; `forebay.testing.contracts.surface` is the suite that each passes.

Operations of the process that owns the files (recovery, exports, moves, workers) are no part of it.
"""

from __future__ import annotations

from forebay.surface.blocking import (
    Ack,
    BatchAck,
    BulkLoads,
    Consumer,
    DeadLetters,
    Group,
    Log,
    Reader,
    Routers,
    Stream,
    SubscribableTopic,
    Subscription,
    TopicHandle,
)

__all__ = [
    "Ack",
    "BatchAck",
    "BulkLoads",
    "Consumer",
    "DeadLetters",
    "Group",
    "Log",
    "Reader",
    "Routers",
    "Stream",
    "SubscribableTopic",
    "Subscription",
    "TopicHandle",
]
