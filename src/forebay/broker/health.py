"""Routes that say how the broker is, before it is ready too; and the description of all routes."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import msgspec

from forebay.broker.app import Broker, BrokerPhase
from forebay.broker.exchange import HttpAnswer, Request
from forebay.broker.openapi import document
from forebay.broker.routes import NoQuery, Route
from forebay.wire.messages import DegradedShard, Health, Ready


@cache
def _version() -> str:
    """Read from a file, so only once."""
    return version("forebay")


@cache
def _document(routes: tuple[Route, ...]) -> bytes:
    """Made once: callers without a token may ask for it."""
    return msgspec.json.encode(document(routes, version=_version()))


@cache
def _reference() -> bytes:
    """Read once: all clients that take it slowly share it in memory."""
    return files("forebay.broker").joinpath("reference.html").read_bytes()


async def get_ready(broker: Broker, request: Request) -> HttpAnswer:
    """200 once every route is served, else 503 with how far the recovery is."""
    request.query(NoQuery)
    if broker.phase is not BrokerPhase.READY:
        raise broker.not_ready()
    degraded = [
        DegradedShard(str(each.ref.spec.name), each.ref.partition, broker.public_message(each.error))
        for each in broker.degraded
    ]
    return HttpAnswer.of(Ready(ready=True, replay_progress=1.0, degraded=degraded))


async def get_health(broker: Broker, request: Request) -> HttpAnswer:
    """That the process lives."""
    request.query(NoQuery)
    status = broker.phase.value
    if broker.phase is BrokerPhase.READY:
        status = "degraded" if broker.is_degraded else "ok"
    return HttpAnswer.of(Health(status=status, version=_version(), uptime_s=round(broker.uptime_s, 3)))


async def get_openapi(broker: Broker, request: Request) -> HttpAnswer:
    """The OpenAPI document."""
    request.query(NoQuery)
    return HttpAnswer(200, _document(broker.routes))


async def get_reference(broker: Broker, request: Request) -> HttpAnswer:
    """The same for people, in a browser."""
    return HttpAnswer(
        200,
        _reference(),
        "text/html; charset=utf-8",
        (("content-security-policy", "default-src 'self' 'unsafe-inline'"),),
    )


ROUTES = (
    Route(
        method="GET", path="/v1/ready", name="get_ready", summary="Whether all routes are served",
        handler=get_ready, answer=Ready, before_ready=True, tag="broker", statuses=(503,),
    ),
    Route(
        method="GET", path="/v1/health", name="get_health", summary="That the broker lives",
        handler=get_health, answer=Health, before_ready=True, tag="broker",
    ),
    Route(
        method="GET", path="/v1/openapi.json", name="get_openapi", summary="This document",
        handler=get_openapi, answer=dict[str, Any], before_ready=True, tag="broker",
    ),
    Route(
        method="GET", path="/docs", name="get_reference", summary="This document, in a browser",
        handler=get_reference, answer_media=("text/html",), before_ready=True, tag="broker",
    ),
)  # fmt: skip
"""Of the broker itself."""
