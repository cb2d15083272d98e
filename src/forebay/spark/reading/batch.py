"""A batch read inside Spark: what was loaded, the conditions that its rows must meet, and its tasks.

Spark makes a reader where it plans, asks it for its tasks there, and sends it to every one of them: what only the
planning needs stays behind, and its modules are imported there alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
from pyspark.sql.datasource import DataSourceReader, InputPartition

from forebay.spark.reading.filters import pushed
from forebay.spark.reading.task import read_split

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

    from forebay.spark.reading.options import ReadOptions
    from forebay.spark.reading.snapshot import Range, Snapshot


@dataclass(frozen=True, slots=True)
class Loaded:
    """The moment that a DataFrame shows: what there was, and the offsets of it that were asked for."""

    snapshot: Snapshot
    ranges: tuple[Range, ...]

    @classmethod
    def now(cls, options: ReadOptions) -> Loaded:
        """This moment."""
        from forebay.spark.reading.view import load

        return cls(*load(options))

    @classmethod
    def of(cls, snapshot: Snapshot, options: ReadOptions) -> Loaded:
        """The moment of an earlier look. Raises `Invalid` for offsets that the topics did not have then."""
        from forebay.spark.reading.view import fix

        return cls(snapshot, fix(snapshot, options))


def loaded_or_seen(options: ReadOptions) -> Loaded | Snapshot:
    """This moment, for Spark's question for the columns, which does not say whether a batch or a stream asks.

    Only the look where the topics do not have the offsets asked for: a batch fails by it in `Loaded.of`. A stream with
    a checkpoint goes on from there: since it began, the offsets of its options may have been deleted, and partitions
    and topics that they do not name may have been added.
    """
    from forebay.spark.reading.view import load_or_look

    snapshot, ranges = load_or_look(options)
    return snapshot if ranges is None else Loaded(snapshot, ranges)


class ForebayReader(DataSourceReader):
    """One planned read. Pickled to the executors without what was planned: a split says all that a task needs.

    Takes no filters from Spark: all of them come back, and the plan does not depend on them, so it does no harm that
    Spark shares it between the scans of one DataFrame. A reader that has no `pushFilters` of its own works whether
    Spark's push-down is on or off.
    """

    def __init__(self, options: ReadOptions, loaded: Loaded, columns: tuple[str, ...]) -> None:
        self._options = options
        self._loaded = loaded
        self._columns = columns
        self._filters = options.where

    def partitions(self) -> list[InputPartition]:
        """One for each task."""
        from forebay.spark.reading.plan import plan

        splits = plan(
            self._loaded.snapshot,
            self._loaded.ranges,
            columns=self._columns,
            filters=self._filters,
            partitions_min=self._options.partitions_min,
            fail_on_data_loss=self._options.fail_on_data_loss,
        )
        return [InputPartition(split) for split in splits]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The records of a task; where there is nothing to read, Spark makes one without a split or a partition."""
        return iter(()) if partition is None or partition.value is None else read_split(partition.value)

    def __getstate__(self) -> dict[str, Any]:
        return {}


class PushedReader(ForebayReader):
    """The same for a Spark that keeps the plans of its scans apart: a query's filters narrow what is planned."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take the filters that are applied here; the others are given back."""
        taken, left = pushed(filters)
        self._filters = self._options.where.also(taken)
        return left


def reader_for(
    options: ReadOptions, loaded: Loaded, columns: tuple[str, ...], version: str = pyspark.__version__
) -> ForebayReader:
    """A reader that takes Spark's filters only if the session was seen to keep plans apart and is new enough for it."""
    from forebay.spark.reading.pushing import is_old

    kind = PushedReader if options.push_filters and not is_old(version) else ForebayReader
    return kind(options, loaded, columns)
