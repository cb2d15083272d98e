"""The OpenAPI document of the broker, made from its route table: what is documented is what is served."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import cleandoc
from typing import Any, Final

import msgspec

from forebay.broker.exchange import JSON
from forebay.broker.routes import Route
from forebay.wire.errors import ERROR_TABLE, ErrorBody

COMMON_STATUSES: Final = (400, 401, 403, 413, 429, 500, 503)
"""What every route that asks for a right may answer with."""
_REFERENCE: Final = "#/components/schemas/{name}"
_PART: Final = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"}


def document(routes: Sequence[Route], *, version: str) -> dict[str, Any]:
    """The document, as plain values."""
    types: list[Any] = [ErrorBody]
    for route in routes:
        types += [kind for kind in (route.body, route.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    for component in components.values():
        # Docstrings, which have the indentation of their source before Python 3.13.
        if "description" in component:
            component["description"] = cleandoc(component["description"])
    by_type = dict(zip(map(id, types), schemas, strict=True))
    components = {name: _plain(component) for name, component in components.items()}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
        if route.method == "PUT":
            operation["responses"][str(route.status)]["links"] = _links(route, routes)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Forebay",
            "version": version,
            "description": "Durable event streams: topics over HTTP.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        # That which the document was read from.
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _plain(schema: Any) -> Any:
    """The schema in the words that generators of clients know: none where it says that nothing more may follow.

    A list of so many items, each of a type of its own, says by `maxItems` that there are no others.
    """
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _plain(each) for name, each in schema.items()}
    if found.get("type") == "array" and not found.get("items"):
        kinds: list[Any] = []
        for kind in found.get("prefixItems", ()):
            kinds += [] if kind in kinds else [kind]
        if "prefixItems" in found:
            found["maxItems"] = len(found["prefixItems"])
        # Without a type for any place there are items of any type.
        found["items"] = {"anyOf": kinds} if len(kinds) > 1 else kinds[0] if kinds else {}
    return found


def _operation(route: Route, schemas: dict[int, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": [*_path_parameters(route), *_query_parameters(route), *_header_parameters(route)],
        "responses": _responses(route, schemas),
    }
    scopes = [str(scope) for scope in route.scopes]
    # Of an open route: none at all.
    found["security"] = [{"token": scopes}] if route.needs_all_scopes else [{"token": [one]} for one in scopes]
    if route.body is not None or route.body_media:
        found["requestBody"] = {"required": True, "content": _request_content(route, schemas)}
    return found


def _request_content(route: Route, schemas: dict[int, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.body is not None:
        content[JSON] = {"schema": schemas[id(route.body)]}
    for media in route.body_media:
        content.setdefault(media, {"schema": _bytes_or_text(media)})
    return content


def _bytes_or_text(media: str) -> dict[str, str]:
    """The schema of a body that is no JSON: generated clients make bytes of what is binary, and text of the rest."""
    return {"type": "string"} if media.startswith("text/") else {"type": "string", "format": "binary"}


def _responses(route: Route, schemas: dict[int, Any]) -> dict[str, Any]:
    good: dict[str, Any] = {"description": route.summary}
    content = {media: {"schema": _bytes_or_text(media)} for media in route.answer_media}
    if route.answer is not None:
        content[JSON] = {"schema": schemas[id(route.answer)]}
    if route.answer is not None or route.answer_media != (JSON,):
        good["content"] = content
    responses = {str(route.status): good}
    if route.status_there is not None:
        responses[str(route.status_there)] = dict(good)
    wanted = {*COMMON_STATUSES, *route.statuses} if route.scopes else set(route.statuses)
    for status in sorted(wanted):
        codes = ", ".join(row.code for row in ERROR_TABLE if row.status == status)
        responses[str(status)] = {
            "description": codes or "refused",
            "content": {JSON: {"schema": schemas[id(ErrorBody)]}},
        }
    return responses


def _links(route: Route, routes: Sequence[Route]) -> dict[str, Any]:
    """What can be asked of that which a request has created: all that its address begins."""
    parameters = {label: f"$request.path.{label}" for label in route.labels}
    return {
        other.name: {"operationId": other.name, "parameters": parameters}
        for other in routes
        if other is not route and other.path.startswith(route.path)
    }


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [{"name": label, "in": "path", "required": True, "schema": _PART} for label in route.labels]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    _, components = msgspec.json.schema_components([route.query], ref_template="{name}")
    fields = components[route.query.__name__]
    return [
        {
            "name": name,
            "in": "query",
            "required": name in fields.get("required", ()),
            "schema": kind,
        }
        for name, kind in fields.get("properties", {}).items()
    ]


def _header_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": header.name,
            "in": "header",
            "required": False,
            "description": header.summary,
            "schema": {"type": "string", "minLength": 1, "maxLength": header.characters_max},
        }
        for header in route.headers
    ]
