"""The router: every route of the table is found by its path, and the right one where two fit."""

from __future__ import annotations

import re

import pytest

from forebay.broker.exchange import HttpAnswer, Request, path_parts
from forebay.broker.routes import FoundRoute, Route, Router
from forebay.broker.table import ROUTES


async def _answer(broker: object, request: Request) -> HttpAnswer:
    raise AssertionError("a router only finds: it calls nothing")


def _route(method: str, path: str) -> Route:
    return Route(method=method, path=path, name=f"{method} {path}", summary="", handler=_answer)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_of_the_table_is_found_by_its_path(route: Route) -> None:
    path = re.sub(r"\{(\w+)\}", r"the-\1", route.path)

    found = Router(ROUTES).find(route.method, path.encode())

    assert isinstance(found, FoundRoute)
    assert (found.route, found.at) == (route, {label: f"the-{label}" for label in route.labels})


def test_the_route_with_more_fixed_parts_is_meant() -> None:
    router = Router([_route("GET", "/a/{x}"), _route("GET", "/a/b"), _route("PUT", "/a/{x}"), _route("GET", "/{x}/b")])

    def found(method: str, path: bytes) -> str:
        one = router.find(method, path)
        assert isinstance(one, FoundRoute)
        return one.route.path

    assert found("GET", b"/a/b") == "/a/b"
    assert found("GET", b"/a/c") == "/a/{x}"
    assert found("GET", b"/c/b") == "/{x}/b"
    assert found("PUT", b"/a/b") == "/a/{x}"
    assert found("HEAD", b"/a/b") == "/a/b"


def test_a_path_that_does_not_have_the_method_says_which_it_has() -> None:
    router = Router([_route("GET", "/a/{x}"), _route("PUT", "/a/{x}"), _route("POST", "/a/b")])

    assert router.find("DELETE", b"/a/b") == frozenset({"GET", "PUT", "POST"})
    assert router.find("DELETE", b"/a/c") == frozenset({"GET", "PUT"})
    assert router.find("GET", b"/b/c") == router.find("GET", b"/a") == router.find("GET", b"/a/b/c") == frozenset()


def test_one_method_on_one_path_stands_once_in_the_table() -> None:
    with pytest.raises(ValueError, match="stands twice"):
        Router([_route("GET", "/a/{x}"), _route("GET", "/a/{y}")])


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        (b"/a/b", ["a", "b"]),
        (b"/a%20b/c%C3%A9", ["a b", "cé"]),
        (b"/a//b", None),
        (b"/a/", None),
        (b"/a%2Fb/c", None),
        (b"/a%00/c", None),
        (b"/a\0/c", None),
        (b"/a/%FF", None),
        (b"/a/\xff", None),
    ],
)
def test_parts_of_a_path_are_decoded_each_by_itself(path: bytes, parts: list[str] | None) -> None:
    assert path_parts(path) == parts
