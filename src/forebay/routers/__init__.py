"""Routers: rules that move records from topics to a topic, each once, whatever crashes. Knows no server."""

from forebay.routers.routers import Routers, RouterState, RouterStatus
from forebay.routers.rules import HeaderMatch, RouterRule, RouterSource, RouterSpec

__all__ = ["HeaderMatch", "RouterRule", "RouterSource", "RouterSpec", "RouterState", "RouterStatus", "Routers"]
