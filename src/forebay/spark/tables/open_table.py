"""A table of an open format as a sink: tasks write files, and one commit makes them part of the table.

The commit of a streaming query's batch also records the batch, and is refused if another writer brought one of this
query meanwhile: a batch that is done again finds itself recorded, and adds nothing. Knows no format.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from forebay.clock import SystemClock
from forebay.errors import Invalid
from forebay.spark.place.location import Location
from forebay.spark.tables.commit import QueryBatch, TableChange, commit
from forebay.spark.tables.file_writer import REPORT, write_rows
from forebay.spark.tables.formats import ICEBERG, open_format

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


__all__ = ["FOLDER", "OpenTable", "QueryBatch", "schema_of"]

logger = logging.getLogger(__name__)

FOLDER: Final = "data/pipelines"
"""Where its files are written, below its location."""
EXPIRED_AT_LEAST: Final = 50
"""Snapshots are expired together: that is a commit too, and a stream makes many."""


class OpenTable:
    """A table by its name, `NAMESPACE.NAME`; one of Delta may also be named by its address. One call at a time.

    It may hold a connection to a catalog: `close` it.
    """

    def __init__(self, location: Location, name: str, *, table_format: str = ICEBERG) -> None:
        self.location = location
        self.name = name
        self.table = open_format(table_format, location, name)
        self._settings = location.settings().table
        self._clock = SystemClock()

    def put(
        self, rows: DataFrame, *, batch: QueryBatch | None = None, overwrite: bool = False, new: bool = False
    ) -> None:
        """Add the rows, all at once, or put them in the place of what is there. A batch is added only once.

        With `new` the commit that brings them also makes the table, so that a run that fails leaves none: `Conflict`
        if it is there, also if another made it meanwhile.
        """
        schema = self.make(schema_of(rows), new=new)
        if batch is not None and self.table.last_batch(batch.query_id) >= batch.number:
            return
        folder = self.table.folder(FOLDER)
        try:
            reports = rows.mapInArrow(_task(self.location, folder, schema), REPORT).collect()
        except BaseException:
            if new:
                self._give_up(folder)
            raise
        self.commit([row.path for row in reports], batch, overwrite=overwrite, new=new)
        try:
            self.table.expire(self._settings, self._clock.now_ms(), at_least=EXPIRED_AT_LEAST)
        except Exception as error:  # noqa: BLE001 - the rows are in: a caller that gets a failure adds them once more
            logger.warning("%s: old snapshots are left to the next run: %s", self.name, error)

    def _give_up(self, folder: str) -> None:
        try:
            self.table.give_up(folder)
        except Exception as error:  # noqa: BLE001 - why the tasks failed is what the caller must see
            logger.warning("%s: files of a failed run are left in %s: %s", self.name, folder, error)

    def tidy(self) -> None:
        """Expire old snapshots, and remove files that killed runs left or that only such snapshots named."""
        if self.table.look():
            now_ms = self._clock.now_ms()
            self.table.expire(self._settings, now_ms)
            self.table.remove_strays(self.table.folder(FOLDER), self._settings, now_ms)

    def close(self) -> None:
        """Give back what is held."""
        self.table.close()

    def make(self, schema: pa.Schema, *, new: bool = False) -> pa.Schema:
        """Make the table if there is none, and the columns as its files have them; `Invalid` if they do not fit it.

        One that is to be `new` is made by `commit`.
        """
        self.table.make(schema, {}, new=new)
        return self.table.check(schema)

    def commit(self, files: list[str], batch: QueryBatch | None, *, overwrite: bool, new: bool = False) -> None:
        """Add files to the table as it was looked at."""

        def basis() -> object:
            known = self.table.last_batch(batch.query_id) if batch is not None else None
            # What is put in the place of all rows is put in the place of those that were seen; a new table is ours.
            return known, self.table.version() if overwrite or new else None

        commit(self.table, TableChange(added=files, replace=overwrite, batch=batch), basis=basis)


def schema_of(rows: DataFrame) -> pa.Schema:
    """The columns as the files will have them; `Invalid` names one that a table cannot have."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(rows.schema, timezone="UTC")
    except PySparkException as error:
        raise Invalid(f"a table cannot have these columns: {error}") from error


def _task(
    location: Location, folder: str, schema: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    return partial(write_rows, location, folder, schema)
