"""The route table: every request that the broker answers, once.

From it are made the router, the OpenAPI document, the table of rights (who may call what) and the labels of metrics. A
route says what it takes and gives, and which right it asks for; its handler does the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from forebay.broker.exchange import JSON, HttpAnswer, Request, Streamed, path_parts
from forebay.service.principals import AccessScope

if TYPE_CHECKING:
    from forebay.broker.app import Broker

Handler: TypeAlias = "Callable[[Broker, Request], Awaitable[HttpAnswer | Streamed]]"


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A query without parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method on one path."""

    method: str
    path: str
    """As OpenAPI writes it: `/v1/topics/{namespace}/{topic}`."""
    name: str
    """What metrics, logs and OpenAPI call it."""
    summary: str
    handler: Handler
    scopes: tuple[AccessScope, ...] = ()
    """The rights of which a caller needs one; none for what every client may see."""
    query: type[msgspec.Struct] = NoQuery
    body: Any = None
    """The type of a JSON body, or `None` if there is none or `body_media` says more."""
    body_media: Sequence[str] = ()
    """Media types of a body that is not only JSON."""
    answer: Any = None
    """The type of a JSON answer; `None` for an answer without a body."""
    answer_media: Sequence[str] = (JSON,)
    status: int = 200
    before_ready: bool = False
    """Whether it is answered while shards are still being recovered."""
    statuses: Sequence[int] = ()
    """Statuses of errors that this route answers with, beside those that every route may."""
    tag: str = ""
    """What OpenAPI lists it under."""
    is_audited: bool = False
    """Whether every call is logged: it changes what there is."""
    is_stream: bool = False
    """Whether its answer goes on until the client leaves."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the path's parts that differ from request to request."""
        return tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))


class FoundRoute(NamedTuple):
    """The route of a request, with the parts of the path that it names."""

    route: Route
    at: dict[str, str]


class Router:
    """Finds the route of a request by the parts of its path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._by_length: dict[int, list[tuple[tuple[str | None, ...], dict[str, Route]]]] = {}
        for route in routes:
            parts = tuple(None if part.startswith("{") else part for part in route.path.split("/")[1:])
            alike = self._by_length.setdefault(len(parts), [])
            methods = next((known for shape, known in alike if shape == parts), None)
            if methods is None:
                methods = {}
                alike.append((parts, methods))
            if route.method in methods:
                raise ValueError(f"{route.method} {route.path} stands twice in the route table")
            methods[route.method] = route
        for alike in self._by_length.values():
            # Where two shapes fit, the one with more fixed parts is meant.
            alike.sort(key=lambda shape: sum(part is None for part in shape[0]))

    def find(self, method: str, path: bytes) -> FoundRoute | frozenset[str]:
        """The route, or the methods that this path has; none if there is no such path."""
        parts = path_parts(path)
        if parts is None:
            return frozenset()
        allowed: set[str] = set()
        for shape, methods in self._by_length.get(len(parts), ()):
            if all(fixed is None or fixed == part for fixed, part in zip(shape, parts, strict=True)):
                route = methods.get(method)
                if method == "HEAD" and (shown := methods.get("GET")) is not None and not shown.is_stream:
                    route = shown
                if route is not None:
                    given = [part for fixed, part in zip(shape, parts, strict=True) if fixed is None]
                    return FoundRoute(route, dict(zip(route.labels, given, strict=True)))
                allowed |= methods.keys()
        return frozenset(allowed)
