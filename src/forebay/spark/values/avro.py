"""Avro: the columns of a schema, and values decoded into them, each one datum or an error of its own.

Knows Arrow and an Avro library; knows nothing of Spark.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from forebay.errors import Invalid, Unsupported
from forebay.settings.sources import FILE_BYTES_MAX
from forebay.spark.values.schema import TableColumn


class AvroValues:
    """Decodes the values of one schema. `kind` is the struct that its records become."""

    def __init__(self, schema: Mapping[str, Any], kind: pa.StructType) -> None:
        try:
            import fastavro
        except ImportError as error:
            raise Unsupported(f'Avro values need fastavro ({error}): pip install "forebay[lake]"') from error
        self._schema = fastavro.parse_schema(dict(schema))
        self._kind = kind

    def decode(self, values: pa.Array) -> tuple[pa.StructArray, pa.StringArray]:
        """The records, and for each value that is none the reason instead; a value that is null has neither."""
        records: list[dict[str, Any] | None] = []
        errors: list[str | None] = []
        for value in values.to_pylist():
            record, error = self._decoded(value) if value is not None else (None, None)
            records.append(record)
            errors.append(error)
        made = self._placed(records, errors, 0, len(records))
        return made if made is not None else pa.array(records, self._kind), pa.array(errors, pa.string())

    def _decoded(self, value: bytes) -> tuple[dict[str, Any] | None, str | None]:
        import fastavro

        stream = io.BytesIO(value)
        try:
            record = fastavro.schemaless_reader(stream, self._schema, None)
        except Exception as error:  # noqa: BLE001 - the library raises whatever the bytes lead it to
            return None, f"not Avro of this schema: {type(error).__name__} {error}".strip()
        left = len(value) - stream.tell()
        if left:
            return None, f"not Avro of this schema: {left} bytes are left behind the record"
        assert isinstance(record, dict), "the schema is one of a record"
        return record, None

    def _placed(
        self, records: list[dict[str, Any] | None], errors: list[str | None], start: int, stop: int
    ) -> pa.StructArray | None:
        """The records `[start, stop)` as columns; `None` if some have no place there: each gets its error instead.

        All are tried together, then each half of those that fail: a batch of good records is one array.
        """
        try:
            return pa.array(records[start:stop], self._kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            if stop - start == 1:
                records[start], errors[start] = None, f"has no place in its column: {error}"
                return None
        middle = (start + stop) // 2
        self._placed(records, errors, start, middle)
        self._placed(records, errors, middle, stop)
        return None


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
