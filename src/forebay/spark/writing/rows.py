"""Rows that Spark hands over to be written: what their columns must be, and which partition each row goes to.

Whole columns at a time, never an object per row. Pure; knows Arrow, not Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import Invalid
from forebay.format.frame.batch import key_strip
from forebay.partitioning import Partitions, partitions_of_keys

TYPES: Final = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "tag": ("string",),
    "headers": ("array<struct<key:string,value:binary>>",),
    "timestamp": ("timestamp",),
    "partition": ("int",),
}
"""The columns that are written, and what Spark may call their types; only `value` must be there."""
_ASSIGNED: Final = {
    "topic": 'one write goes into one topic, that of the option "topic"',
    "offset": "the topic gives new offsets",
}


class Part(NamedTuple):
    """Rows of one partition, in the order they came."""

    partition: int
    rows: pa.RecordBatch


def check_columns(columns: Iterable[tuple[str, str]]) -> None:
    """`Invalid` unless rows with these columns, each with Spark's name of its type, can be written."""
    names = [name for name, _ in columns]
    for name, kind in columns:
        if name in _ASSIGNED:
            raise Invalid(f'there is a column "{name}", and {_ASSIGNED[name]}: leave it out with .drop("{name}")')
        if name not in TYPES:
            raise Invalid(f'a column "{name}" cannot be written: the columns are {", ".join(TYPES)}')
        if names.count(name) > 1:
            raise Invalid(f'there are two columns "{name}": leave one out')
        if kind not in TYPES[name]:
            raise Invalid(f'column "{name}" is {kind}: it must be {" or ".join(TYPES[name])}; cast it')
    if "value" not in names:
        raise Invalid(
            f'there is no column "value", only {", ".join(names) or "none at all"}: make one, as with '
            '.selectExpr("to_json(struct(*)) AS value")'
        )


def parts_of(rows: pa.RecordBatch, partitions: int, turn: int) -> Iterator[Part]:
    """The rows by partition: that of the column, else by key as every append does, else the one whose turn it is.

    `Invalid` for a partition that a topic of so many does not have.
    """
    chosen = _chosen(rows, partitions, turn)
    if isinstance(chosen, int):
        yield Part(chosen, rows)
        return
    order = np.argsort(chosen, kind="stable")
    numbers, firsts = np.unique(chosen[order], return_index=True)
    if len(numbers) == 1:
        yield Part(int(numbers[0]), rows)
        return
    for number, taken in zip(numbers, np.split(order, firsts[1:]), strict=True):
        yield Part(int(number), rows.take(pa.array(taken)))


def _chosen(rows: pa.RecordBatch, partitions: int, turn: int) -> int | Partitions:
    named = _named(rows, partitions)
    if named is not None and not np.ma.is_masked(named):
        return named.data
    by_key = _by_key(rows, partitions, turn)
    if named is None:
        return by_key
    return np.where(named.mask, by_key, named.data)


def _named(rows: pa.RecordBatch, partitions: int) -> np.ma.MaskedArray[tuple[int], np.dtype[np.int64]] | None:
    """The partitions that the rows ask for; those that ask for none are masked. `None` if no row does."""
    if "partition" not in rows.schema.names:
        return None
    column = rows.column("partition")
    if column.null_count == len(column):
        return None
    low, high = pc.min_max(column).values()
    if low.as_py() < 0 or high.as_py() >= partitions:
        wrong = low.as_py() if low.as_py() < 0 else high.as_py()
        raise Invalid(
            f'column "partition" holds {wrong}: the topic has 0 to {partitions - 1}; null leaves the choice to the '
            'key, and .drop("partition") does so for all rows'
        )
    numbers = pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return np.ma.MaskedArray(numbers, mask=column.is_null().to_numpy(zero_copy_only=False))


def _by_key(rows: pa.RecordBatch, partitions: int, turn: int) -> int | Partitions:
    keyless = turn % partitions
    keys = key_strip(rows) if partitions > 1 else None
    if keys is None:
        return keyless
    chosen = partitions_of_keys(keys.filling, keys.offsets, partitions)
    if keys.present is not None:
        chosen[~keys.present] = keyless
    return chosen
