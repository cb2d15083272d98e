"""The columns that Spark sees: their names and types are those of Spark's Kafka source, and `tag`.

Knows Arrow, not Spark. Every record batch made here has exactly the schema it should: Spark checks the
first one of a task and trusts the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import Invalid
from forebay.format.frame.batch import Batch
from forebay.spark.reading.filters import Filters

SPARK_TYPES: Final = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "headers": "array<struct<key:string,value:binary>>",
    "tag": "string",
}
"""Names and types in the order Spark shows them."""

_HEADER: Final = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_ARROW_TYPES: Final = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "headers": pa.list_(pa.field("element", _HEADER)),
    "tag": pa.string(),
}
assert list(_ARROW_TYPES) == list(SPARK_TYPES)

_TIME_MAX: Final = (2**63 - 1) // 1000
_REPEATS: Final = 65_536
_NO_HEADERS: Final = pa.nulls(_REPEATS, _ARROW_TYPES["headers"])


@lru_cache(maxsize=64)
def arrow_schema(names: tuple[str, ...]) -> pa.Schema:
    """The schema of every record batch that has these columns."""
    return pa.schema([pa.field(name, _ARROW_TYPES[name]) for name in names])


def record_batch(batch: Batch, names: Sequence[str], *, topic: str, partition: int) -> pa.RecordBatch:
    """The records as Spark wants them; columns that are not named are not built."""
    stored = batch.to_arrow(partition, [name for name in names if name not in ("topic", "timestamp")])
    columns = [_column(name, batch, stored, topic) for name in names]
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(tuple(names)))


def stored_columns(names: Sequence[str], filters: Filters) -> list[str]:
    """What must be read of a Parquet segment to show these columns, and to filter by others."""
    asked = {*names, *(each.column for each in filters.by_row), "offset"} - {"topic", "partition"}
    return [name for name in SPARK_TYPES if name in asked]


def stored_batch(rows: pa.RecordBatch, names: Sequence[str], *, topic: str, partition: int) -> pa.RecordBatch:
    """Rows of a Parquet segment as Spark wants them."""
    columns = []
    for name in names:
        if name == "topic":
            columns.append(_repeated(topic, rows.num_rows))
        elif name == "partition":
            numbers = pa.py_buffer(np.full(rows.num_rows, partition, dtype=np.int32))
            columns.append(pa.Array.from_buffers(pa.int32(), rows.num_rows, [None, numbers]))
        elif name == "headers":
            columns.append(_headers(rows.column(name)))
        else:
            columns.append(rows.column(name))
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(tuple(names)))


def _column(name: str, batch: Batch, stored: pa.RecordBatch, topic: str) -> pa.Array:
    if name == "topic":
        return _repeated(topic, batch.count)
    if name == "timestamp":
        return _micros(batch, topic)
    column = stored.column(name)
    return _headers(column) if name == "headers" else column


def _micros(batch: Batch, topic: str) -> pa.Array:
    """The times of the records; by arrays, which takes a tenth of what a cast does."""
    stamps = batch.timestamps()
    if int(stamps.min()) < -_TIME_MAX or int(stamps.max()) > _TIME_MAX:
        raise Invalid(
            f"{topic}: a timestamp in offsets [{batch.base}, {batch.end}) has no place in Spark's type: "
            f"leave the column out with the option columns"
        )
    return pa.Array.from_buffers(_ARROW_TYPES["timestamp"], batch.count, [None, pa.py_buffer(stamps * 1000)], 0)


def _headers(column: pa.ListArray) -> pa.Array:
    """A record without headers has null there, as in Spark's Kafka source."""
    count, kind = len(column), _ARROW_TYPES["headers"]
    if column.offsets[0] == column.offsets[-1]:
        return _NO_HEADERS[:count] if count <= _REPEATS else pa.nulls(count, kind)
    filled = pc.greater(pc.list_value_length(column), 0)
    return pc.if_else(filled, column.cast(kind), pa.scalar(None, kind))


def _repeated(text: str, count: int) -> pa.Array:
    """A column of one text, cut from an array that is kept."""
    return _repeats(text)[:count] if count <= _REPEATS else _repeat(text, count)


@lru_cache(maxsize=16)
def _repeats(text: str) -> pa.Array:
    return _repeat(text, _REPEATS)


def _repeat(text: str, count: int) -> pa.Array:
    # By its buffers: pa.repeat makes a worker of Spark import pandas, which takes half a second.
    encoded = text.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(encoded))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(encoded * count)])
