"""Write docs/http.md from the OpenAPI document, which is made from the route table: `python tools/http_docs.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.broker.openapi import document
from forebay.broker.routes import TOPIC_ID
from forebay.broker.table import ROUTES
from forebay.wire.errors import ERROR_TABLE

TARGET = Path(__file__).parent.parent / "docs" / "http.md"

HEAD = """\
# HTTP API

This page is generated from the route table of the broker; change the table, then run `python tools/http_docs.py`.
A broker serves the same as an OpenAPI document at `/v1/openapi.json`, and in a browser at `/docs`. How records look in
each media type: [wire](wire.md). How to run a broker: [`forebay serve`](cli.md#serve).

A caller shows its token as `Authorization: Bearer TOKEN`, where the server asks for one; each route says which scope it
needs. An answer carries `Forebay-Request-Id`: the `X-Request-Id` of the request, or one that was made for it.

A request about one topic may name the topic that it means as `Forebay-Topic-Id`, the `topic_id` of its definition. If
that topic was deleted, the answer is `unknown_topic`, also if there is another of its name by now. Without the header a
request goes by the name.

Clients in other languages can be generated from the document. Two generators are tried with every route of it:

```sh
# Python: the file says which media types are bytes; it lies beside this page.
openapi-python-client generate --url http://127.0.0.1:7878/v1/openapi.json --config openapi-python-client.yml
# TypeScript, for openapi-fetch: a field that has a default need not be given.
openapi-typescript http://127.0.0.1:7878/v1/openapi.json --default-non-nullable=false -o forebay.d.ts
```
"""

ERRORS = """
## Errors

Every error has one shape, and a code that programs may act on:

```json
{"error": {"code": "unknown_topic", "message": "there is no topic shop/orders", "detail": {"topic": "shop/orders"}}}
```

| code | status | raised by the client as | `Retry-After` |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    found = document(ROUTES, version="")
    parts = [HEAD]
    tag = ""
    for route in ROUTES:
        operation = found["paths"][route.path][route.method.lower()]
        if route.tag != tag:
            tag = route.tag
            parts.append(f"\n## {tag.capitalize()}\n")
        parts.append(section(route.method, route.path, operation))
    parts.append(ERRORS)
    parts += [
        f"| `{row.code}` | {row.status} | `{row.kind.__name__}` | {'yes' if row.retries else ''} |\n"
        for row in ERROR_TABLE
    ]
    parts.append("\n## Types\n")
    parts += [kind(name, schema) for name, schema in found["components"]["schemas"].items()]
    return "".join(parts)


def section(method: str, path: str, operation: dict[str, Any]) -> str:
    """One route."""
    lines = [f"\n### {method} {path}\n\n{operation['summary']}."]
    needs = [" and ".join(f"`{scope}`" for scope in need["token"]) for need in operation.get("security", ())]
    if needs:
        lines.append(f" Scope: {' or '.join(needs)}.")
    lines.append("\n")
    queries = [parameter for parameter in operation["parameters"] if parameter["in"] == "query"]
    if queries:
        lines.append("\n| parameter | type | default | meaning |\n|---|---|---|---|\n")
        lines += [parameter_row(parameter) for parameter in queries]
    headers = [parameter for parameter in operation["parameters"] if parameter["in"] == "header"]
    # That of every route about a topic is told at the top of the page.
    own = [header for header in headers if header["name"] != TOPIC_ID.name]
    lines += [f"\nHeader `{header['name']}`: {header['description']}.\n" for header in own]
    if "requestBody" in operation:
        lines.append(f"\nBody: {contents(operation['requestBody']['content'])}.\n")
    answers = {status: answer for status, answer in operation["responses"].items() if status.startswith("2")}
    for status, answer in answers.items():
        shown = contents(answer["content"]) if "content" in answer else "nothing"
        lines.append(f"\nAnswer {status}: {shown}.\n")
    return "".join(lines)


def parameter_row(parameter: dict[str, Any]) -> str:
    schema = parameter["schema"]
    default = "required" if parameter["required"] else shown_default(schema)
    return f"| `{parameter['name']}` | {shown_type(schema)} | {default} | {meaning(schema)} |\n"


def shown_default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    return "" if default in (None, "", []) else f"`{str(default).lower() if isinstance(default, bool) else default}`"


def meaning(schema: dict[str, Any]) -> str:
    inner = [each for each in schema.get("anyOf", ()) if "description" in each]
    return str(schema.get("description") or (inner[0]["description"] if inner else ""))


def contents(content: dict[str, Any]) -> str:
    """The media types of a body, with the type of JSON."""
    return ", ".join(
        f"`{media}`" + (f" {shown_type(each['schema'])}" if media == "application/json" else "")
        for media, each in content.items()
    )


def shown_type(schema: dict[str, Any]) -> str:
    """A type in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(shown_type(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        items = schema.get("items") or {}
        return f"list of {shown_type(items)}" if items else "list"
    return str(schema.get("type", "any"))


def kind(name: str, schema: dict[str, Any]) -> str:
    """One type of the API."""
    lines = [f"\n### {name}\n\n{schema.get('description', '').strip()}\n"]
    if "enum" in schema:
        return "".join([*lines, f"\nOne of {shown_type(schema)}.\n"])
    required = schema.get("required", ())
    lines.append("\n| field | type | default |\n|---|---|---|\n")
    lines += [
        f"| `{field}` | {shown_type(each)} | {'required' if field in required else shown_default(each)} |\n"
        for field, each in schema.get("properties", {}).items()
    ]
    return "".join(lines)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
