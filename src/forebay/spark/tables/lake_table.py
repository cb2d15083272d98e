"""An Iceberg table as a target, with a second one for bad rows. Their catalog is that of the settings.

Every commit writes the offsets it brings into the properties of its snapshot, and how far the table is into its own,
in one step that is refused if another writer changed the table since it was looked at. The side table goes first: each
of the two knows how far it is, so that a run killed between them is finished by the next without a row twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from forebay.clock import SystemClock
from forebay.errors import Conflict, Invalid, Unavailable
from forebay.metadata.leases import Lease
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import look_up_table, open_catalog
from forebay.spark.tables.targets import Marks, TableBatch, files_of
from forebay.spark.tables.upkeep import expire, own_folder, properties_of, remove_strays
from forebay.spark.values.decoding import BAD_SCHEMA

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table


ATTEMPTS: Final = 5
FOLDER: Final = "data/lake"
TOPIC: Final = "forebay.topic"
TOPIC_ID: Final = "forebay.topic-id"
OFFSETS: Final = "forebay.offsets"
"""Of a snapshot: the offsets it brought, `{"0":[100,200]}`."""
NEXT: Final = "forebay.next-offsets"
"""Of the table: the first offsets it does not have."""


class TableTarget:
    """Two tables of one catalog: `namespace.name` and `namespace.name_bad`."""

    def __init__(self, location: Location, name: str, schema: pa.Schema) -> None:
        if not all(name.rpartition(".")):
            raise Invalid(f"{name!r} names no table: write NAMESPACE.NAME, such as shop.orders")
        self.name = name
        self._location = location
        self._opened: Catalog | None = None
        self._settings = location.settings()
        self._clock = SystemClock()
        self._schema = schema
        self._tables: dict[bool, Table] = {}

    def recover(self) -> None:
        """Make the tables if they are missing, take new columns in, expire old snapshots, and remove files that no
        snapshot names, once they are too old to be of a run that may still commit them.
        """
        self.close()
        self._opened = open_catalog(self._location)
        self._catalog.create_namespace_if_not_exists(self.name.rpartition(".")[0])
        for bad, name, schema in ((False, self.name, self._schema), (True, f"{self.name}_bad", BAD_SCHEMA)):
            table = self._catalog.create_table_if_not_exists(name, schema)
            self._fit(table, name, schema)
            self._tables[bad] = self._catalog.load_table(name)
            self._tidy(self._tables[bad])

    def _tidy(self, table: Table) -> None:
        now_ms = self._clock.now_ms()
        expire(table, self._settings.table, now_ms)
        grace_s = self._settings.table.orphan_grace_s
        remove_strays(table, own_folder(table, FOLDER), grace_s=grace_s, now_ms=now_ms)

    def marks(self) -> Marks:
        good, bad = (self._marks_of(self._known(is_bad)) for is_bad in (False, True))
        return Marks(topic_id=good[0] or bad[0], good=good[1], bad=bad[1])

    def _known(self, is_bad: bool) -> Table | None:  # noqa: FBT001 - which of the two
        """The table as last seen; before `recover` it may be missing."""
        if is_bad in self._tables:
            return self._tables[is_bad]
        return look_up_table(self._location, f"{self.name}_bad" if is_bad else self.name)

    @property
    def _catalog(self) -> Catalog:
        assert self._opened is not None, "recover comes first: before it, nothing is made"
        return self._opened

    def folders(self) -> tuple[str, str]:
        good, bad = (own_folder(self._tables[is_bad], FOLDER) for is_bad in (False, True))
        return good, bad

    def commit(self, batch: TableBatch, lease: Lease) -> None:
        for is_bad in (True, False):
            self.commit_table(is_bad, batch, lease)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def commit_table(self, is_bad: bool, batch: TableBatch, lease: Lease) -> None:  # noqa: FBT001 - which of the two
        """On return the table has its part of the batch, once; `Conflict` if another brought something meanwhile."""
        from pyiceberg.exceptions import CommitFailedException

        known = self._marks_of(self._tables[is_bad])[1]
        for _ in range(ATTEMPTS):
            table = self._catalog.load_table(self._tables[is_bad].name())
            if self._marks_of(table)[1] != known:
                raise Conflict(f"{self.name} was changed by another job meanwhile: run it again")
            if all(known.get(partition, -1) >= end for partition, (_, end) in batch.offsets.items()):
                return  # by a run that was killed behind it
            lease.check()
            try:
                _append(table, batch, known, [written.path for written in files_of(batch, bad=is_bad)])
            except CommitFailedException:
                continue  # another job changed the table: if not its marks, this one may follow
            self._tables[is_bad] = self._catalog.load_table(table.name())
            return
        raise Unavailable(f"{self.name} was changed {ATTEMPTS} times by others while it was committed to; run it again")

    def _marks_of(self, table: Table | None) -> tuple[str, dict[int, int]]:
        properties = table.properties if table is not None else {}
        found = msgspec.json.decode(properties.get(NEXT, "{}"), type=dict[int, int], strict=False)
        return properties.get(TOPIC_ID, ""), found

    def _fit(self, table: Table, name: str, schema: pa.Schema) -> None:
        """Columns that are new are added; those that changed are refused."""
        try:
            with table.update_schema() as update:
                update.union_by_name(schema)
        except Exception as error:
            raise Invalid(
                f"the table {name} has other columns than the schema ({error}): give the schema it was made with, to "
                "which columns may be added, or name another table"
            ) from error


def _append(table: Table, batch: TableBatch, before: Mapping[int, int], files: list[str]) -> None:
    """Add the files, the offsets they bring and how far the table is then, in one commit."""
    offsets = {str(p): (max(start, before.get(p, start)), end) for p, (start, end) in batch.offsets.items()}
    snapshot = {TOPIC: batch.topic, TOPIC_ID: batch.topic_id, OFFSETS: _json(offsets)}
    ends = {str(partition): end for partition, end in batch.ends(before).items()}
    # Else PyIceberg would try again behind whatever another has committed, and rows could be there twice.
    table.metadata.properties["commit.retry.num-retries"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with table.transaction() as transaction:
            marks = {TOPIC: batch.topic, TOPIC_ID: batch.topic_id, NEXT: _json(ends)}
            transaction.set_properties({**marks, **properties_of(table)})
            if files:
                # Their names are random: none is in the table, and no manifest is read to see that.
                transaction.add_files(files, snapshot, check_duplicate_files=False)
            else:
                with transaction.update_snapshot(snapshot).fast_append():
                    pass


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
