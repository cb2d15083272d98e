"""A table of a catalog as a sink: tasks write files, and one commit makes them part of the table.

The commit of a streaming query's batch also notes the batch in the table's properties, and is refused if another writer
changed the table meanwhile: a batch that is done again finds its note, and adds nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from forebay.clock import SystemClock
from forebay.errors import Conflict, Invalid
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import find_table, open_catalog
from forebay.spark.tables.file_writer import REPORT, write_rows
from forebay.spark.tables.upkeep import expire, own_folder, properties_of, remove_strays

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyiceberg.types import IcebergType, NestedField
    from pyspark.sql import DataFrame


logger = logging.getLogger(__name__)

FOLDER: Final = "data/pipelines"
"""Where its files are written, below its location."""
EXPIRED_AT_LEAST: Final = 50
"""Snapshots are expired together: that is a commit too, and a stream makes many."""
BATCH: Final = "forebay.query."
"""Of the table, with the id of a query behind it: its last batch."""


class QueryBatch(NamedTuple):
    """One batch of a streaming query."""

    query_id: str
    number: int


class OpenTable:
    """A table by its name, `NAMESPACE.NAME`. Holds a connection to its catalog: `close` it. One call at a time."""

    def __init__(self, location: Location, name: str) -> None:
        self.location = location
        self.name = name
        self._catalog: Catalog = open_catalog(location)
        self._clock = SystemClock()

    def put(self, rows: DataFrame, *, batch: QueryBatch | None = None, overwrite: bool = False) -> None:
        """Add the rows, all at once, or put them in the place of what is there. A batch is added only once."""
        schema = schema_of(rows)
        table = self.table_for(schema)
        if batch is not None and int(table.properties.get(f"{BATCH}{batch.query_id}", "-1")) >= batch.number:
            return
        folder = own_folder(table, FOLDER)
        reports = rows.mapInArrow(_task(self.location, folder, schema), REPORT).collect()
        self.commit(table, [row.path for row in reports], batch, overwrite=overwrite)
        try:
            expire(table, self.location.settings().table, self._clock.now_ms(), at_least=EXPIRED_AT_LEAST)
        except Exception as error:  # noqa: BLE001 - the rows are in: a caller that gets a failure adds them once more
            logger.warning("%s: old snapshots are left to the next run: %s", self.name, error)

    def tidy(self) -> None:
        """Expire old snapshots, and remove files that killed runs left or that only such snapshots named."""
        table, settings, now_ms = find_table(self._catalog, self.name), self.location.settings(), self._clock.now_ms()
        if table is not None:
            expire(table, settings.table, now_ms)
            grace_s = settings.table.orphan_grace_s
            remove_strays(table, own_folder(table, FOLDER), grace_s=grace_s, now_ms=now_ms)

    def close(self) -> None:
        """Give the connection to the catalog back."""
        self._catalog.close()

    def table_for(self, schema: pa.Schema) -> Table:
        self._catalog.create_namespace_if_not_exists(self.name.rpartition(".")[0])
        table = self._catalog.create_table_if_not_exists(self.name, schema)
        known = {field.name: field.field_type for field in table.schema().fields}
        missing = [field.name for field in schema if field.name not in known]
        if missing or len(known) != len(schema):
            raise Invalid(
                f"the table {self.name} has the columns {', '.join(known)}, the rows have {', '.join(schema.names)}: "
                "name another table, or make them equal"
            )
        for field in schema:
            self._check_type(table, field)
        return table

    def _check_type(self, table: Table, field: pa.Field) -> None:
        """`Invalid` if the table has the column as a type that the rows' type does not fit into."""
        from pyiceberg.io.pyarrow import pyarrow_to_schema

        known, version = table.schema(), table.metadata.format_version
        theirs = known.find_field(field.name)
        try:
            ours = pyarrow_to_schema(pa.schema([field]), known.name_mapping, format_version=version).fields[0]
        except ValueError:  # a field inside of it is not in the table
            ours = None
        if ours is None or not _fits(ours, theirs):
            raise Invalid(
                f"column {field.name} of the table {self.name} is {_shown(theirs)}, and the rows have "
                f"{field.type if ours is None else _shown(ours)}: cast it, or name another table"
            )

    def commit(self, table: Table, files: list[str], batch: QueryBatch | None, *, overwrite: bool) -> None:
        from pyiceberg.exceptions import CommitFailedException
        from pyiceberg.expressions import AlwaysTrue

        # Else PyIceberg would try again behind whatever another has committed.
        table.metadata.properties["commit.retry.num-retries"] = "0"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with table.transaction() as transaction:
                    if overwrite:
                        transaction.delete(AlwaysTrue())
                    if files:
                        # Their names are random: none is in the table, and no manifest is read to see that.
                        transaction.add_files(files, check_duplicate_files=False)
                    noted = {f"{BATCH}{batch.query_id}": str(batch.number)} if batch is not None else {}
                    transaction.set_properties({**properties_of(table), **noted})
        except CommitFailedException as error:
            raise Conflict(f"{self.name} was changed by another meanwhile: run it again ({error})") from error


def schema_of(rows: DataFrame) -> pa.Schema:
    """The columns as the files will have them; `Invalid` names one that a table cannot have."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(rows.schema, timezone="UTC")
    except PySparkException as error:
        raise Invalid(f"a table cannot have these columns: {error}") from error


def _fits(ours: NestedField, theirs: NestedField) -> bool:
    """Whether a table takes files with such a column."""
    return (ours.required or theirs.optional) and _type_fits(ours.field_type, theirs.field_type)


def _type_fits(ours: IcebergType, theirs: IcebergType) -> bool:
    from pyiceberg.exceptions import ResolveError
    from pyiceberg.schema import promote
    from pyiceberg.types import ListType, MapType, StructType

    if ours == theirs:
        return True
    if isinstance(ours, StructType) and isinstance(theirs, StructType):
        there = {field.field_id: field for field in ours.fields}
        return all(
            _fits(there[field.field_id], field) if field.field_id in there else field.optional
            for field in theirs.fields
        )
    if isinstance(ours, ListType) and isinstance(theirs, ListType):
        return _fits(ours.element_field, theirs.element_field)
    if isinstance(ours, MapType) and isinstance(theirs, MapType):
        return _fits(ours.key_field, theirs.key_field) and _fits(ours.value_field, theirs.value_field)
    try:
        promote(ours, theirs)
    except ResolveError:
        return False
    return True


def _shown(column: NestedField) -> str:
    return f"{column.field_type}{' not null' if column.required else ''}"


def _task(
    location: Location, folder: str, schema: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    return partial(write_rows, location, folder, schema)
