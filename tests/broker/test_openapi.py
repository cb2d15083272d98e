"""The OpenAPI document and its page say what the table of routes has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema_rs import Draft202012Validator  # what schemathesis checks schemas with

from forebay.broker.openapi import document
from forebay.broker.routes import Route, Router
from forebay.broker.table import ROUTES
from tests.support.tools import tool

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_generated_from_the_table() -> None:
    assert (ROOT / "docs" / "http.md").read_text(encoding="utf-8") == tool("http_docs").page(), "run tools/http_docs.py"


def test_every_route_is_documented_once_with_its_parameters() -> None:
    found = document(ROUTES, version="1")
    operations = [operation for methods in found["paths"].values() for operation in methods.values()]
    assert sorted(operation["operationId"] for operation in operations) == sorted(route.name for route in ROUTES)
    for route in ROUTES:
        operation = found["paths"][route.path][route.method.lower()]
        assert operation["summary"]
        named = {parameter["name"] for parameter in operation["parameters"]}
        fields = [field.encode_name for field in msgspec.structs.fields(route.query)]
        assert named == {*route.labels, *fields, *(header.name for header in route.headers)}
        assert bool(operation.get("security")) == bool(route.scopes)


def test_headers_that_routes_go_by_are_documented() -> None:
    """Where no parameter says the same: generated clients set only what the document names."""
    headers = {route.name: {header.name for header in route.headers} for route in ROUTES}
    assert headers["append_records"] == {"Idempotency-Key", "Forebay-Topic-Id"}
    about_topics = {route.name for route in ROUTES if "{topic}" in route.path}
    assert {name for name, named in headers.items() if "Forebay-Topic-Id" in named} == about_topics


def test_every_schema_of_the_document_is_one() -> None:
    found = document(ROUTES, version="1")
    schemas: dict[str, Any] = found["components"]["schemas"]
    for name in schemas:
        Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_the_router_finds_every_route_and_no_other(route: Route) -> None:
    router = Router(ROUTES)
    path = route.path.format(
        namespace="shop",
        topic="orders",
        group="billing",
        load="one",
        backfill="one",
        router="one",
        subscription="s",
        consumer="c",
    ).encode()
    found = router.find(route.method, path)
    assert not isinstance(found, frozenset)
    assert found.route is route
    assert isinstance(router.find("TRACE", path), frozenset)
    is_shown = not isinstance(router.find("HEAD", path), frozenset)
    assert is_shown == any(each.path == route.path and each.method == "GET" and not each.is_stream for each in ROUTES)
    assert router.find(route.method, path + b"/more/and/more/yet") == frozenset()


def test_a_route_that_stands_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="stands twice"):
        Router([*ROUTES, ROUTES[0]])


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Every object of the document that may be a schema."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _schemas(each)
    elif isinstance(value, list):
        for each in value:
            yield from _schemas(each)


def test_the_document_has_what_generators_of_clients_ask_for() -> None:
    """They refuse schemas that are no objects, and take an address and an open route from the document alone."""
    found = document(ROUTES, version="1")

    for schema in _schemas(found):
        if schema.get("type") == "array":
            assert isinstance(schema["items"], dict), schema
        if "prefixItems" in schema:
            assert schema["maxItems"] == len(schema["prefixItems"])
    assert found["servers"] == [{"url": "/"}]
    for route in ROUTES:
        security = found["paths"][route.path][route.method.lower()]["security"]
        assert bool(security) == bool(route.scopes), route.name
