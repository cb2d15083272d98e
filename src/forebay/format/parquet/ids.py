"""Ids of columns in Parquet files: an Iceberg table knows its columns by numbers, and a file names them.

Pure. Where a column lies inside another it is named by the way to it: `headers.element.key`, `sizes.value`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa

FIELD_ID: Final = b"PARQUET:field_id"
"""Where Arrow keeps the id of a column, and what its Parquet writer goes by."""


def with_ids(schema: pa.Schema, ids: Mapping[str, int]) -> pa.Schema:
    """The same columns with these ids, also those inside of others. `KeyError` names one that has none."""
    return pa.schema([_with_id(field, field.name, ids) for field in schema], schema.metadata)


def ids_of(schema: pa.Schema) -> dict[str, int]:
    """The ids of all columns that have one."""
    return {
        path: int(field.metadata[FIELD_ID])
        for path, field in _walked(schema)
        if field.metadata is not None and FIELD_ID in field.metadata
    }


def _with_id(field: pa.Field, path: str, ids: Mapping[str, int]) -> pa.Field:
    inside = [_with_id(child, child_path, ids) for child_path, child in _inside(field.type, path)]
    metadata = {**(field.metadata or {}), FIELD_ID: str(ids[path]).encode()}
    return pa.field(field.name, _of(field.type, inside), field.nullable, metadata)


def _of(kind: pa.DataType, inside: list[pa.Field]) -> pa.DataType:
    """The type with these columns inside."""
    if pa.types.is_map(kind):
        return pa.map_(*inside, keys_sorted=kind.keys_sorted)
    if pa.types.is_large_list(kind):
        return pa.large_list(*inside)
    if pa.types.is_list(kind):
        return pa.list_(*inside)
    return pa.struct(inside) if pa.types.is_struct(kind) else kind


def _inside(kind: pa.DataType, path: str) -> Iterator[tuple[str, pa.Field]]:
    """The columns inside of a type, each with the way to it."""
    if pa.types.is_map(kind):
        yield from ((f"{path}.key", kind.key_field), (f"{path}.value", kind.item_field))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield f"{path}.element", kind.value_field
    elif pa.types.is_struct(kind):
        yield from ((f"{path}.{field.name}", field) for field in kind)


def _walked(schema: pa.Schema) -> Iterator[tuple[str, pa.Field]]:
    waiting = [(field.name, field) for field in schema]
    while waiting:
        path, field = waiting.pop()
        yield path, field
        waiting += _inside(field.type, path)
