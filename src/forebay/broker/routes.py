"""The route table: every request that the broker answers, once.

From it are made the router, the OpenAPI document, the table of rights (who may call what) and the labels of metrics. A
route says what it takes and gives, and which right it asks for; its handler does the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec

from forebay.broker.exchange import JSON, HttpAnswer, Request, Streamed, path_parts
from forebay.service.principals import AccessScope
from forebay.wire.messages import TOPIC_ID_HEADER

if TYPE_CHECKING:
    from forebay.broker.app import Broker

Handler: TypeAlias = "Callable[[Broker, Request], Awaitable[HttpAnswer | Streamed]]"


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A query without parameters."""


class RequestHeader(NamedTuple):
    """A header of a request that a route goes by, beside those that every HTTP client knows."""

    name: str
    summary: str
    characters_max: int


TOPIC_ID: Final = RequestHeader(
    TOPIC_ID_HEADER.title(), "The id of the topic that is meant: another of its name is not", characters_max=32
)


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
    needs_all_scopes: bool = False
    """Whether a caller needs each of them: on the topic of the path, and on those that the request names."""
    query: type[msgspec.Struct] = NoQuery
    own_headers: tuple[RequestHeader, ...] = ()
    """The headers that this route goes by; see `headers`."""
    body: Any = None
    """The type of a JSON body, or `None` if there is none or `body_media` says more."""
    body_media: Sequence[str] = ()
    """Media types of a body that is not only JSON."""
    answer: Any = None
    """The type of a JSON answer; `None` for an answer without a body."""
    answer_media: Sequence[str] = (JSON,)
    status: int = 200
    status_there: int | None = None
    """The other status of success: what it is to make was there already."""
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
    def headers(self) -> tuple[RequestHeader, ...]:
        """The headers that it goes by: its own, and that of every route about one topic."""
        return (*self.own_headers, TOPIC_ID) if "topic" in self.labels else self.own_headers

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the path's parts that differ from request to request."""
        return tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))


class FoundRoute(NamedTuple):
    """The route of a request, with the parts of the path that it names."""

    route: Route
    at: dict[str, str]


class _Shape:
    """Paths of one length whose fixed parts stand at the same places."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.fixed = tuple(place for place, part in enumerate(parts) if not part.startswith("{"))
        self.fixed_of = _picker(self.fixed)
        self.named_of = _picker([place for place in range(len(parts)) if place not in self.fixed])
        self.methods: dict[tuple[str, ...], dict[str, tuple[Route, tuple[str, ...]]]] = {}
        """The routes by their fixed parts and their method, each with the names of the other parts."""


def _picker(places: Sequence[int]) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """A function that picks these parts of a path."""
    if not places:
        return lambda parts: ()
    # With two places `itemgetter` gives a tuple, with one it does not.
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


class Router:
    """Finds the route of a request by the parts of its path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._by_length: dict[int, list[_Shape]] = {}
        for route in routes:
            parts = route.path.split("/")[1:]
            shape = _Shape(parts)
            alike = self._by_length.setdefault(len(parts), [])
            shape = next((known for known in alike if known.fixed == shape.fixed), shape)
            if shape not in alike:
                alike.append(shape)
            methods = shape.methods.setdefault(tuple(shape.fixed_of(parts)), {})
            if route.method in methods:
                raise ValueError(f"{route.method} {route.path} stands twice in the route table")
            methods[route.method] = (route, route.labels)
        for alike in self._by_length.values():
            # Where two shapes fit, the one with more fixed parts is meant.
            alike.sort(key=lambda shape: -len(shape.fixed))

    def find(self, method: str, path: bytes) -> FoundRoute | frozenset[str]:
        """The route, or the methods that this path has; none if there is no such path."""
        parts = path_parts(path)
        if parts is None:
            return frozenset()
        allowed: set[str] = set()
        for shape in self._by_length.get(len(parts), ()):
            methods = shape.methods.get(tuple(shape.fixed_of(parts)))
            if methods is None:
                continue
            found = methods.get(method)
            if method == "HEAD" and "GET" in methods and not methods["GET"][0].is_stream:
                found = methods["GET"]
            if found is not None:
                route, labels = found
                return FoundRoute(route, dict(zip(labels, shape.named_of(parts), strict=True)))
            allowed |= methods.keys()
        return frozenset(allowed)
