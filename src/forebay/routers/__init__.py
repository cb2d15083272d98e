"""Routers: rules that move records from topics to a topic, each once, whatever crashes. Knows no server."""

from forebay.routers.routers import Routers
from forebay.routing import HeaderMatch, RouterRule, RouterSource, RouterSpec, RouterState, RouterStatus

__all__ = ["HeaderMatch", "RouterRule", "RouterSource", "RouterSpec", "RouterState", "RouterStatus", "Routers"]
