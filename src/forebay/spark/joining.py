"""Records in fewer and larger batches: each one costs Spark a fixed price. Knows batches and Arrow alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import pyarrow as pa

from forebay.format.frame.batch import Batch, batch_of, merge

T = TypeVar("T")

ROWS_ENOUGH: Final = 2048
"""Smaller ones are put together."""


def coalesced(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same records in fewer batches: consecutive small ones become one."""
    return map(_together, _grouped(batches, lambda batch: batch.count, lambda before, batch: batch.base == before.end))


def _together(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return batch_of(merge(batches), base=first.base, epoch=first.epoch, appended_at=first.appended_at)


def joined(batches: Iterable[pa.RecordBatch | None]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer record batches: small ones that follow each other become one."""
    there = (batch for batch in batches if batch is not None)
    groups = _grouped(there, lambda batch: batch.num_rows, lambda before, batch: True)
    # One alone is handed on as it is: to put it together would copy it.
    return (group[0] if len(group) == 1 else pa.concat_batches(group) for group in groups)


def _grouped(
    batches: Iterable[T], rows_of: Callable[[T], int], goes_on: Callable[[T, T], bool]
) -> Iterator[Sequence[T]]:
    """Large batches alone, and small ones together as long as each goes on where the one before it ends."""
    small: list[T] = []
    rows = 0
    for batch in batches:
        count = rows_of(batch)
        if small and (count >= ROWS_ENOUGH or rows >= ROWS_ENOUGH or not goes_on(small[-1], batch)):
            yield small
            small, rows = [], 0
        if count >= ROWS_ENOUGH:
            yield [batch]
        else:
            small.append(batch)
            rows += count
    if small:
        yield small
