"""Iceberg tables: the one module that commits to them.

A commit records which offsets it brought in the properties of its snapshot, and how far the table has a topic, or a
query, in those of the table, in the same step. Opening catalogs is the work of `catalog`, expiring that of `upkeep`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from forebay.clock import SystemClock
from forebay.decoders import decoder
from forebay.errors import Invalid
from forebay.format.parquet.ids import with_ids
from forebay.settings import TableSettings
from forebay.spark.place.location import Location
from forebay.spark.tables import upkeep
from forebay.spark.tables.catalog import find_table, look_up_table, open_catalog
from forebay.spark.tables.commit import (
    OFFSETS,
    TOPIC,
    TOPIC_ID,
    WHERE,
    Overtaken,
    Ranges,
    TableChange,
    already_there,
    decode_ranges,
)

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import CreateTableTransaction, Table, Transaction
    from pyiceberg.types import IcebergType, NestedField


NEXT: Final = "forebay.next-offsets"
"""Of the table: the first offsets it does not have."""
BATCH: Final = "forebay.query."
"""Of the table, with the id of a query behind it: its last batch."""
_NO_RETRY: Final = "commit.retry.num-retries"


class IcebergTable:
    """A `FormatTable` in the catalog of the settings. It keeps a connection to that once it changes the table."""

    def __init__(self, location: Location, name: str | tuple[str, str]) -> None:
        self.name = name if isinstance(name, str) else ".".join(name)
        if not all(self.name.rpartition(".")):
            raise Invalid(f"{name!r} names no table: write NAMESPACE.NAME, such as shop.orders")
        self._identifier = name
        self._location = location
        self._catalog: Catalog | None = None
        self._found: Table | None = None
        self._creation: CreateTableTransaction | None = None
        """What makes a new table, until it is committed."""

    def look(self) -> bool:
        if self._catalog is None:
            self._found = look_up_table(self._location, self._identifier)
        else:
            self._found = find_table(self._catalog, self._identifier)
        return self._found is not None

    def make(self, schema: pa.Schema, properties: Mapping[str, str], *, new: bool = False) -> None:
        catalog, name = self._connect(), self._identifier
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0] if isinstance(name, str) else name[:1])
        if not new:
            self._found = catalog.create_table_if_not_exists(name, schema, properties=dict(properties))
            return
        if self.look():
            raise already_there(self.name)
        from pyiceberg.exceptions import TableAlreadyExistsError

        try:
            self._creation = catalog.create_table_transaction(name, schema, properties=dict(properties))
        except TableAlreadyExistsError as error:
            raise already_there(self.name) from error
        self._found = self._creation._table  # as it will be: PyIceberg has no other name for it

    def _connect(self) -> Catalog:
        if self._catalog is None:
            self._catalog = open_catalog(self._location)
        return self._catalog

    @property
    def table(self) -> Table:
        """The table as PyIceberg has it."""
        assert self._found is not None, "look or make comes first"
        return self._found

    def _changeable(self) -> Table:
        """The table, with a connection to its catalog that lasts."""
        if self._catalog is None:
            self._connect()
            self.look()
        return self.table

    def close(self) -> None:
        catalog, self._catalog = self._catalog, None
        if catalog is not None:
            catalog.close()

    def fit(self, schema: pa.Schema) -> None:
        try:
            with self._changeable().update_schema() as update:
                update.union_by_name(schema)
        except Exception as error:
            known = {field.name for field in self.table.schema().fields}
            for field in schema:
                if field.name in known:
                    self._check_type(field)
            raise Invalid(
                f"the table {self.name} has other columns than the schema ({error}): give the schema it was made with, "
                "to which columns may be added, or name another table"
            ) from error

    def check(self, schema: pa.Schema) -> pa.Schema:
        known = {field.name: field.field_type for field in self.table.schema().fields}
        missing = [field.name for field in schema if field.name not in known]
        if missing or len(known) != len(schema):
            raise Invalid(
                f"the table {self.name} has the columns {', '.join(known)}, the rows have {', '.join(schema.names)}: "
                "name another table, or make them equal"
            )
        for field in schema:
            self._check_type(field)
        return self.file_schema(schema)

    def file_schema(self, schema: pa.Schema) -> pa.Schema:
        from pyiceberg.schema import index_by_name

        try:
            return with_ids(schema, index_by_name(self.table.schema()))
        except KeyError as error:
            raise Invalid(f"the table {self.name} has no column {error.args[0]}: name another table") from error

    def _check_type(self, field: pa.Field) -> None:
        """`Invalid` if the table has the column as a type that the rows' type does not fit into."""
        from pyiceberg.io.pyarrow import pyarrow_to_schema

        known, version = self.table.schema(), self.table.metadata.format_version
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

    def version(self) -> object:
        # With its id: another may have made, or made again, an empty one of the same name.
        return self.table.metadata.table_uuid, self.table.metadata.current_snapshot_id

    def where(self) -> str:
        return self.table.properties.get(WHERE, "") if self._found is not None else ""

    def topic_id(self) -> str:
        return self.table.properties.get(TOPIC_ID, "") if self._found is not None else ""

    def next_offsets(self) -> dict[int, int]:
        text = self.table.properties.get(NEXT, "{}") if self._found is not None else "{}"
        return decoder(dict[int, int], strict=False).decode(text)

    def last_batch(self, query_id: str) -> int:
        return int(self.table.properties.get(f"{BATCH}{query_id}", "-1"))

    def commits(self) -> Iterator[Ranges]:
        for snapshot in reversed(self.table.snapshots()):
            text = snapshot.summary[OFFSETS] if snapshot.summary is not None else None
            if text is not None:
                yield decode_ranges(text)

    def files(self) -> dict[str, DataFile]:
        if self._found is None:
            return {}
        return {task.file.file_path: task.file for task in self.table.scan().plan_files()}

    def named_files(self, settings: TableSettings, now_ms: int) -> Iterator[str]:
        del settings, now_ms  # `expire` has seen to them
        return upkeep.named_files(self.table)

    def lists_removed(self) -> bool:
        snapshot = self.table.current_snapshot()
        return snapshot is not None and any(
            manifest.deleted_files_count for manifest in snapshot.manifests(self.table.io)
        )

    def folder(self, name: str) -> str:
        return upkeep.own_folder(self.table, name)

    def give_up(self, folder: str) -> None:
        if self._creation is not None:  # the folder has the id of the table that was to be
            clock = SystemClock()
            upkeep.remove_unnamed(self.table.io, folder, tuple, grace_s=0, now_ms=clock.now_ms())

    def expire(self, settings: TableSettings, now_ms: int, *, at_least: int = 1) -> int:
        return upkeep.expire(self._changeable(), settings, now_ms, at_least=at_least)

    def remove_strays(self, folder: str, settings: TableSettings, now_ms: int) -> int:
        return upkeep.remove_strays(self._changeable(), folder, grace_s=settings.orphan_grace_s, now_ms=now_ms)

    def attempt(self, change: TableChange) -> None:
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError, ValidationException

        creation, self._creation = self._creation, None
        table = self._changeable()
        if creation is None:
            # Else PyIceberg would try again behind whatever another has committed, and rows could be there twice.
            table.metadata.properties[_NO_RETRY] = "0"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with creation or table.transaction() as transaction:
                    transaction.set_properties(self._properties(change))
                    self._put(transaction, change)
        except (CommitFailedException, TableAlreadyExistsError, ValidationException) as error:
            raise Overtaken(str(error)) from error
        if creation is not None:
            self.look()

    def _properties(self, change: TableChange) -> dict[str, str]:
        """What the table is to know after the change."""
        found = upkeep.properties_of(self.table)
        if change.offsets is not None:
            found |= {TOPIC: change.offsets.topic, TOPIC_ID: change.offsets.topic_id}
            if change.offsets.ends is not None:
                ends = {str(partition): end for partition, end in change.offsets.ends.items()}
                found[NEXT] = msgspec.json.encode(ends).decode()
        if change.batch is not None:
            found[f"{BATCH}{change.batch.query_id}"] = str(change.batch.number)
        return found

    def _put(self, transaction: Transaction, change: TableChange) -> None:
        from pyiceberg.expressions import AlwaysTrue

        said = change.offsets.as_properties() if change.offsets is not None else {}
        if change.replace:
            transaction.delete(AlwaysTrue())
        if change.removed:
            self._exchange(transaction, change, said)
        elif change.added:
            # Our names are unique: none is in the table, and no manifest is read to see that. It also sees to a mapping
            # of names, as `_exchange` does.
            transaction.add_files(list(change.added), said, check_duplicate_files=False)
        elif said:
            with transaction.update_snapshot(said).fast_append():
                pass

    def _exchange(self, transaction: Transaction, change: TableChange, said: dict[str, str]) -> None:
        """Remove files and add others, in one snapshot."""
        from pyiceberg.io.pyarrow import parquet_file_to_data_file
        from pyiceberg.table import TableProperties

        if transaction.table_metadata.name_mapping() is None:
            # Files of earlier versions have no ids for their columns: readers know those by their names.
            mapping = self.table.schema().name_mapping.model_dump_json()
            transaction.set_properties({TableProperties.DEFAULT_NAME_MAPPING: mapping})
        present = self.files()
        with transaction.update_snapshot(said).overwrite() as update:
            for address in sorted(change.removed):
                update.delete_data_file(present[address])
            for address in change.added:
                metadata = transaction.table_metadata
                update.append_data_file(parquet_file_to_data_file(self.table.io, metadata, address))


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
