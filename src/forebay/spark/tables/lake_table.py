"""A table of an open format as a target, with a second one for bad rows.

Every commit records the offsets it brings, and how far the table has the topic from then on. The side table goes
first: each of the two knows how far it is, so that a run killed between them is finished by the next without a row
twice. Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa

from forebay.clock import SystemClock
from forebay.spark.place.location import Location
from forebay.spark.tables.commit import WHERE, FormatTable, TableChange, TopicOffsets, commit
from forebay.spark.tables.formats import open_format
from forebay.spark.tables.targets import CommitRight, Marks, TableBatch, files_of
from forebay.spark.values.decoding import BAD_SCHEMA

FOLDER: Final = "data/lake"


class TableTarget:
    """Two tables: `namespace.name` and `namespace.name_bad`; those of Delta may also be named by their addresses."""

    def __init__(
        self, location: Location, name: str, schema: pa.Schema, *, table_format: str = "iceberg", where: str = ""
    ) -> None:
        """A table that is made here keeps `where`, the condition that its records meet."""
        self.name = name
        self._properties = {WHERE: where} if where else {}
        self._settings = location.settings().table
        self._clock = SystemClock()
        self._schemas = {False: schema, True: BAD_SCHEMA}
        self._is_recovered = False
        self._tables: dict[bool, FormatTable] = {
            False: open_format(table_format, location, name),
            True: open_format(table_format, location, f"{name.rstrip('/')}_bad"),
        }

    def recover(self) -> None:
        """Make the tables if they are missing, take new columns in, expire old snapshots, and remove files that no
        snapshot names, once they are too old to be of a run that may still commit them.
        """
        for bad, table in self._tables.items():
            table.make(self._schemas[bad], self._properties)
            table.fit(self._schemas[bad])
            table.look()
            now_ms = self._clock.now_ms()
            table.expire(self._settings, now_ms)
            table.remove_strays(table.folder(FOLDER), self._settings, now_ms)
        self._is_recovered = True

    def marks(self) -> Marks:
        good, bad = self._tables[False], self._tables[True]
        is_there = self._is_recovered
        if not is_there:  # nothing is made: it may be missing
            is_there = good.look()
            bad.look()
        return Marks(
            topic_id=good.topic_id() or bad.topic_id(),
            good=good.next_offsets(),
            bad=bad.next_offsets(),
            where=good.where() if is_there else None,
        )

    def folders(self) -> tuple[str, str]:
        return self._tables[False].folder(FOLDER), self._tables[True].folder(FOLDER)

    def file_schema(self, schema: pa.Schema, *, bad: bool) -> pa.Schema:
        return self._tables[bad].file_schema(schema)

    def commit(self, batch: TableBatch, lease: CommitRight) -> None:
        for is_bad in (True, False):
            self.commit_table(is_bad, batch, lease)

    def close(self) -> None:
        for table in self._tables.values():
            table.close()

    def commit_table(self, is_bad: bool, batch: TableBatch, lease: CommitRight) -> None:  # noqa: FBT001 - which of the two
        """On return the table has its part of the batch, once; `Conflict` if another brought something meanwhile."""
        table = self._tables[is_bad]
        known = table.next_offsets()
        if all(known.get(partition, -1) >= end for partition, (_, end) in batch.offsets.items()):
            return  # by a run that was killed behind it
        brought = {p: [(max(start, known.get(p, start)), end)] for p, (start, end) in batch.offsets.items()}
        offsets = TopicOffsets(topic=batch.topic, topic_id=batch.topic_id, ranges=brought, ends=batch.ends(known))
        files = [written.path for written in files_of(batch, bad=is_bad)]
        commit(table, TableChange(added=files, offsets=offsets), basis=_marks_of(table), check=lease.check)


def _marks_of(table: FormatTable) -> Callable[[], object]:
    return lambda: (table.topic_id(), table.next_offsets())
