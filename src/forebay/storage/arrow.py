"""A record batch cut into the rows of each partition, by column and without an object per row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.partitioning import Partitioner
from forebay.storage.checks import checked_column

if TYPE_CHECKING:
    import pyarrow as pa


class Piece(NamedTuple):
    """The rows of one partition, in order."""

    partition: int
    batch: pa.RecordBatch
    rows: npt.NDArray[np.int64]


def pieces_of(batch: pa.RecordBatch, partitioner: Partitioner, partition: int | None, producer: int) -> list[Piece]:
    """The batch by partition; one piece, uncopied, where all rows go together."""
    keys = None
    if partition is None and partitioner.partitions > 1 and "key" in batch.schema.names:
        keys = checked_column("key", batch.column("key").to_pylist(), None)
    chosen = partitioner.choose_many(keys, batch.num_rows, partition=partition, producer=producer)
    if isinstance(chosen, int):
        return [Piece(chosen, batch, np.arange(batch.num_rows))]
    order = np.argsort(chosen, kind="stable")
    numbers, firsts = np.unique(chosen[order], return_index=True)
    return [
        Piece(int(number), batch.take(rows), rows)
        for number, rows in zip(numbers, np.split(order, firsts[1:]), strict=True)
    ]
