"""The cases, each a function from a plan to results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.cases import (
    append,
    churn,
    consume,
    dispatch,
    durable,
    engines,
    events,
    export,
    history,
    http,
    latency,
    lookup,
    many,
    memory,
    move,
    read,
    recovery,
    scale,
    segments,
    spark,
    subscriptions,
    topics,
    watch,
)
from bench.plan import Plan
from bench.results import Result

CASES: dict[str, Callable[[Plan], Iterator[Result]]] = {
    "append": append.run,
    "durable": durable.run,
    "latency": latency.run,
    "many": many.run,
    "recovery": recovery.run,
    "read": read.run,
    "history": history.run,
    "export": export.run,
    "move": move.run,
    "scale": scale.run,
    "segments": segments.run,
    "memory": memory.run,
    "churn": churn.run,
    "engines": engines.run,
    "lookup": lookup.run,
    "spark": spark.run,
    "watch": watch.run,
    "http": http.run,
    "consume": consume.run,
    "events": events.run,
    "subscriptions": subscriptions.run,
    "topics": topics.run,
    "dispatch": dispatch.run,
}
