"""Avro schemas as columns of Spark, understood without Spark and without an Avro library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.errors import Invalid
from forebay.settings.sources import FILE_BYTES_MAX
from forebay.spark.pipelines.ddl import Column

_PLAIN: Final = {
    "boolean": "boolean",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "bytes": "binary",
    "string": "string",
}
_LOGICAL: Final = {
    ("int", "date"): "date",
    ("long", "timestamp-millis"): "timestamp",
    ("long", "timestamp-micros"): "timestamp",
    ("long", "local-timestamp-millis"): "timestamp_ntz",
    ("long", "local-timestamp-micros"): "timestamp_ntz",
}
_REFUSED: Final = ("time-millis", "time-micros", "duration", "uuid")


def read_avro_schema(path: str) -> dict[str, Any]:
    """The schema in a file; `Invalid` if it holds no record."""
    try:
        with Path(path).open("rb") as file:
            schema = msgspec.json.decode(file.read(FILE_BYTES_MAX))
    except OSError as error:
        raise Invalid(f"cannot read the Avro schema {path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise Invalid(f"the Avro schema {path} is not JSON: {error}") from error
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise Invalid(f'the Avro schema {path} is not one of a record: write {{"type": "record", "fields": […]}}')
    return schema


def columns_of_avro(schema: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns that records of the schema have; `Invalid` names what has no place in Spark."""
    return tuple(_fields(schema, {}, ()))


def _fields(schema: Mapping[str, Any], named: dict[str, Any], path: tuple[str, ...]) -> list[Column]:
    fields = schema.get("fields")
    if not isinstance(fields, list) or not fields:
        raise Invalid(f"the Avro record {'.'.join(path) or schema.get('name')} has no fields")
    columns = []
    for field in fields:
        if not isinstance(field, dict) or not isinstance(field.get("name"), str) or "type" not in field:
            raise Invalid(f"a field of the Avro record {'.'.join(path) or schema.get('name')} has no name or no type")
        columns.append(Column(field["name"], _type(field["type"], named, (*path, field["name"]))))
    return columns


def _type(schema: Any, named: dict[str, Any], path: tuple[str, ...]) -> str:
    where = ".".join(path)
    if isinstance(schema, list):
        rest = [one for one in schema if one != "null"]
        if len(rest) != 1:
            raise Invalid(f"the Avro field {where} is a union of several types, which has no place in a column")
        return _type(rest[0], named, path)
    if isinstance(schema, str):
        if schema in _PLAIN:
            return _PLAIN[schema]
        if schema not in named:
            raise Invalid(f"the Avro field {where} has the unknown type {schema!r}")
        return _type(named[schema], {}, path)
    if not isinstance(schema, dict):
        raise Invalid(f"the Avro field {where} has no type")
    return _complex(schema, named, path)


def _complex(schema: dict[str, Any], named: dict[str, Any], path: tuple[str, ...]) -> str:
    kind, logical, where = schema.get("type"), schema.get("logicalType"), ".".join(path)
    if logical in _REFUSED:
        raise Invalid(f"the Avro field {where} is a {logical}, which has no place in a column: leave logicalType out")
    if logical == "decimal" and kind in ("bytes", "fixed"):
        return f"decimal({schema.get('precision')},{schema.get('scale', 0)})"
    if kind == "record":
        if schema in named.values() or any(schema is one for one in named.values()):
            raise Invalid(f"the Avro field {where} holds itself, which has no place in a column")
        inner = _fields(schema, {**named, **_name(schema)}, path)
        named.update(_name(schema))
        return f"struct<{','.join(f'{column.name}:{column.type}' for column in inner)}>"
    if kind in ("enum", "fixed"):
        named.update(_name(schema))
        return "string" if kind == "enum" else "binary"
    if kind == "array":
        return f"array<{_type(schema.get('items'), named, path)}>"
    if kind == "map":
        return f"map<string,{_type(schema.get('values'), named, path)}>"
    return _LOGICAL.get((str(kind), str(logical))) or _type(kind, named, path)


def _name(schema: Mapping[str, Any]) -> dict[str, Any]:
    name = schema.get("name")
    return {name: schema, f"{schema.get('namespace', '')}.{name}": schema} if isinstance(name, str) else {}
