"""Routers: rules that move records from topics to a topic, each once, whatever crashes. Knows no server."""

from forebay.routers.awaiting import AsyncRouters
from forebay.routers.routers import Routers
from forebay.routers.rules import RouterCircle
from forebay.routing import HeaderMatch, OnRefused, RouterRule, RouterSource, RouterSpec, RouterState, RouterStatus

__all__ = [
    "AsyncRouters",
    "HeaderMatch",
    "OnRefused",
    "RouterCircle",
    "RouterRule",
    "RouterSource",
    "RouterSpec",
    "RouterState",
    "RouterStatus",
    "Routers",
]
