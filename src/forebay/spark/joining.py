"""Records in fewer and larger batches: each one costs Spark a fixed price. Knows batches and Arrow alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa

from forebay.format.batch import Batch, batch_of, merge

ROWS_ENOUGH: Final = 2048
"""Smaller ones are put together."""


def coalesced(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same records in fewer batches: consecutive small ones become one."""
    small: list[Batch] = []
    rows = 0
    for batch in batches:
        if small and (batch.count >= ROWS_ENOUGH or batch.base != small[-1].end or rows >= ROWS_ENOUGH):
            yield _together(small)
            small, rows = [], 0
        if batch.count >= ROWS_ENOUGH:
            yield batch
        else:
            small.append(batch)
            rows += batch.count
    if small:
        yield _together(small)


def _together(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return batch_of(merge(batches), base=first.base, epoch=first.epoch, appended_at=first.appended_at)


def joined(batches: Iterable[pa.RecordBatch | None]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer record batches: small ones that follow each other become one."""
    small: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if batch is None:
            continue
        if small and (batch.num_rows >= ROWS_ENOUGH or rows >= ROWS_ENOUGH):
            yield pa.concat_batches(small)
            small, rows = [], 0
        if batch.num_rows >= ROWS_ENOUGH:
            yield batch
        else:
            small.append(batch)
            rows += batch.num_rows
    if small:
        yield pa.concat_batches(small)
