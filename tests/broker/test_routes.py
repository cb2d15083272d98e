"""The router: every route of the table is found by its path, and the right one where two fit."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from forebay.broker.exchange import HttpAnswer, Request, path_parts
from forebay.broker.routes import FoundRoute, Route, Router
from forebay.broker.table import ROUTES
from tests.support.brokers import running_broker


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


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with running_broker(tmp_path_factory.mktemp("data")) as broker, broker.client() as client:
        yield client


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_a_parameter_that_a_route_does_not_have_is_refused_by_its_name(client: httpx.Client, route: Route) -> None:
    """Before anything is done, whichever handler: a caller who misspells one must not get the default unawares."""
    path = re.sub(r"\{(\w+)\}", r"the-\1", route.path)
    known = [field.encode_name for field in msgspec.structs.fields(route.query)]
    wrong = f"{known[0]}s" if known else "nonsense"

    answer = client.request(route.method, path, params={wrong: "1"})

    assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
    error = answer.json()["error"]
    assert error["code"] == "invalid"
    assert f"'{wrong}' is no parameter" in error["message"]
    assert not known or f"did you mean {known[0]}?" in error["message"]
    assert f"parameters: {', '.join(known) or 'none'}" in error["message"]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_parameter_that_is_documented_is_known(client: httpx.Client, route: Route) -> None:
    described = client.get("/v1/openapi.json").json()["paths"][route.path][route.method.lower()]
    documented = {one["name"] for one in described.get("parameters", []) if one["in"] == "query"}

    assert documented == {field.encode_name for field in msgspec.structs.fields(route.query)}
