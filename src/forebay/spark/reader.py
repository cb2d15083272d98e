"""A batch read inside Spark: what was loaded, the filters that came with the query, and its tasks.

Spark makes a reader where it plans, asks it for its tasks there, and sends it to every one of them: what only the
planning needs stays behind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from types import FrameType
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from forebay.spark.filters import NO_FILTERS, pushed
from forebay.spark.options import ReadOptions
from forebay.spark.planning import Range
from forebay.spark.scan import read_split
from forebay.spark.snapshot import Snapshot, fix, load, load_or_look, plan

logger = logging.getLogger(__name__)

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The moment that a DataFrame shows: what there was, and the offsets of it that were asked for."""

    snapshot: Snapshot
    ranges: tuple[Range, ...]

    @classmethod
    def now(cls, options: ReadOptions) -> Loaded:
        """This moment."""
        return cls(*load(options))

    @classmethod
    def of(cls, snapshot: Snapshot, options: ReadOptions) -> Loaded:
        """The moment of an earlier look. Raises `Invalid` for offsets that the topics did not have then."""
        return cls(snapshot, fix(snapshot, options))


def loaded_or_seen(options: ReadOptions) -> Loaded | Snapshot:
    """This moment, for Spark's question for the columns, which does not say whether a batch or a stream asks.

    Only the look where the topics do not have the offsets asked for: a batch fails by it in `Loaded.of`. A stream with
    a checkpoint goes on from there: since it began, the offsets of its options may have been deleted, and partitions
    and topics that they do not name may have been added.
    """
    snapshot, ranges = load_or_look(options)
    return snapshot if ranges is None else Loaded(snapshot, ranges)


class ForebayReader(DataSourceReader):
    """One planned read. Pickled to the executors without what was planned: a split says all that a task needs."""

    def __init__(self, options: ReadOptions, loaded: Loaded, columns: tuple[str, ...]) -> None:
        self._options = options
        self._loaded = loaded
        self._columns = columns
        self._filters = NO_FILTERS

    def partitions(self) -> list[InputPartition]:
        """One for each task."""
        splits = plan(
            self._loaded.snapshot,
            self._loaded.ranges,
            columns=self._columns,
            filters=self._filters,
            partitions_min=self._options.partitions_min,
            fail_on_data_loss=self._options.fail_on_data_loss,
        )
        return [InputPartition(split) for split in splits]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of a task; where there is nothing to read, Spark makes one task without a split."""
        return iter(()) if partition.value is None else read_split(partition.value)

    def __getstate__(self) -> dict[str, Any]:
        return {}


class FilteringReader(ForebayReader):
    """The same for a query with filters. Spark refuses a reader that takes filters where it is not to push any."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take the filters that are applied here; the others are given back."""
        self._filters, left = pushed(filters)
        return left


def reader_for(
    caller: FrameType | None, options: ReadOptions, loaded: Loaded, columns: tuple[str, ...]
) -> ForebayReader:
    """The reader that Spark's planning, which is the caller, can use."""
    if caller is not None and PurePath(caller.f_code.co_filename).stem == "data_source_pushdown_filters":
        return FilteringReader(options, loaded, columns)
    if caller is not None and caller.f_locals.get("enable_pushdown") is False:
        _log_pushdown()
    return ForebayReader(options, loaded, columns)


@cache
def _log_pushdown() -> None:
    logger.warning(
        "filters run in Spark, after all rows have reached it: set %s to true, as forebay.spark.session() does",
        PUSHDOWN,
    )
