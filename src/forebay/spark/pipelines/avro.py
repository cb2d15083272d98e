"""Avro schemas as columns of Spark, understood without Spark and without an Avro library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.errors import Invalid
from forebay.settings.sources import FILE_BYTES_MAX
from forebay.spark.pipelines.ddl import TableColumn

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


def columns_of_avro(schema: Mapping[str, Any]) -> tuple[TableColumn, ...]:
    """The columns that records of the schema have; `Invalid` names what has no place in Spark."""
    return tuple(_Reading().fields(schema, ()))


class _Reading:
    """One walk through a schema. A name may be used behind the place where it is defined."""

    def __init__(self) -> None:
        self._types: dict[str, str] = {}
        """The types that have names, as types of columns; empty while one is being read."""

    def fields(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> list[TableColumn]:
        """The fields of a record."""
        record, fields = ".".join(path) or schema.get("name"), schema.get("fields")
        if not isinstance(fields, list) or not fields:
            raise Invalid(f"the Avro record {record} has no fields")
        self._define(schema, "")
        columns = []
        for field in fields:
            if not isinstance(field, dict) or not isinstance(field.get("name"), str) or "type" not in field:
                raise Invalid(f"a field of the Avro record {record} has no name or no type")
            columns.append(TableColumn(field["name"], self._type(field["type"], (*path, field["name"]))))
        return columns

    def _type(self, schema: Any, path: tuple[str, ...]) -> str:
        where = ".".join(path)
        if isinstance(schema, list):
            rest = [one for one in schema if one != "null"]
            if len(rest) != 1:
                raise Invalid(f"the Avro field {where} is a union of several types, which has no place in a column")
            return self._type(rest[0], path)
        if isinstance(schema, str):
            found = _PLAIN.get(schema) or self._types.get(schema)
            if found == "":
                raise Invalid(f"the Avro field {where} holds {schema}, which it is itself in: no column can")
            if found is None:
                raise Invalid(f"the Avro field {where} has the unknown type {schema!r}")
            return found
        if not isinstance(schema, dict):
            raise Invalid(f"the Avro field {where} has no type")
        return self._complex(schema, path)

    def _complex(self, schema: dict[str, Any], path: tuple[str, ...]) -> str:
        kind, logical, where = schema.get("type"), schema.get("logicalType"), ".".join(path)
        if logical in _REFUSED:
            raise Invalid(
                f"the Avro field {where} is a {logical}, which has no place in a column: leave logicalType out"
            )
        if logical == "decimal" and kind in ("bytes", "fixed"):
            return self._define(schema, f"decimal({schema.get('precision')},{schema.get('scale', 0)})")
        if kind == "record":
            inner = self.fields(schema, path)
            return self._define(schema, f"struct<{','.join(f'{name}:{column}' for name, column in inner)}>")
        if kind in ("enum", "fixed"):
            return self._define(schema, "string" if kind == "enum" else "binary")
        if kind == "array":
            return f"array<{self._type(schema.get('items'), path)}>"
        if kind == "map":
            return f"map<string,{self._type(schema.get('values'), path)}>"
        return _LOGICAL.get((str(kind), str(logical))) or self._type(kind, path)

    def _define(self, schema: Mapping[str, Any], column: str) -> str:
        name, space = schema.get("name"), schema.get("namespace")
        if isinstance(name, str):
            self._types[name] = self._types[f"{space}.{name}"] = column
        return column
