"""What a topic is brought into, and how a commit is made there: all files of a range of offsets, or none, and once.

A target itself knows up to which offset it has each partition; that is written by the very step that commits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import pyarrow as pa

from forebay.errors import Conflict
from forebay.spark.reading.filters import NO_FILTERS, Filters
from forebay.spark.reading.where import parse_where
from forebay.spark.tables.file_writer import Written


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """How far a target has a topic: the next offset of each partition, of its rows and of its bad rows."""

    topic_id: str = ""
    """Empty if it has nothing yet."""
    good: dict[int, int] = msgspec.field(default_factory=dict)
    bad: dict[int, int] = msgspec.field(default_factory=dict)
    where: str | None = ""
    """The condition that its records meet, empty if it takes all; `None` while there is no target yet."""

    def check(self, name: str, topic_id: str, target: str, where: str) -> None:
        """`Conflict` if the target was filled from another topic of the name, or is for other records of it."""
        if self.where is not None and conditions_of(self.where) != conditions_of(where):
            raise Conflict(
                f"{target} takes {_records(self.where)}, not {_records(where)}, and does not go back for others: give "
                "the condition that it was made with, or bring the topic into another table"
            )
        if self.topic_id not in ("", topic_id):
            raise Conflict(
                f"{target} was filled from another topic of the name {name}, which was deleted since "
                f"(id {self.topic_id}, now {topic_id}): bring this one into another table"
            )

    def start(self, partition: int) -> int | None:
        """The first offset that is missing somewhere; `None` if nothing was brought yet."""
        starts = [found.get(partition) for found in (self.good, self.bad)]
        return None if None in starts else min(start for start in starts if start is not None)


def conditions_of(where: str) -> Filters:
    """What a record must meet; nothing if the condition is empty."""
    return parse_where(where) if where else NO_FILTERS


def _records(where: str) -> str:
    return f"the records where {where}" if where else "all records"


class TableBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one commit brings: offsets `[start, end)` of each partition, and the files with their rows."""

    topic: str
    topic_id: str
    offsets: dict[int, tuple[int, int]]
    files: tuple[Written, ...]

    def ends(self, before: Mapping[int, int]) -> dict[int, int]:
        """The next offsets once it is committed."""
        ends = {partition: max(end, before.get(partition, 0)) for partition, (_, end) in self.offsets.items()}
        return {**before, **ends}


class CommitRight(Protocol):
    """What a run asks at the last moment before it commits: a lease of the metadata store, or `Unleased`."""

    def check(self) -> None:
        """`Fenced` if another run may be at work by now."""


class Unleased:
    """In the place of a lease where no metadata store is reached, as through a broker.

    Two runs may be at work then, and waste some: of two commits of the same offsets a target takes one.
    """

    def check(self) -> None:
        """Nothing: the commit finds out."""


class Target(Protocol):
    """A table with its side table. Two runs may use it at once: a commit is refused if another was faster."""

    name: str

    def recover(self) -> None:
        """Finish what an earlier run committed and did not finish; remove what it left."""

    def marks(self) -> Marks:
        """How far it has the topic."""

    def folders(self) -> tuple[str, str]:
        """Where tasks put files, for rows and for bad rows, as addresses."""

    def file_schema(self, schema: pa.Schema, *, bad: bool) -> pa.Schema:
        """The columns as files of rows, or of bad rows, are to have them: with ids, where it has such."""

    def commit(self, batch: TableBatch, lease: CommitRight) -> None:
        """On return all of the batch is there; if it raises, run again to find out."""

    def close(self) -> None:
        """Give back what is held."""


def files_of(batch: TableBatch, *, bad: bool) -> Sequence[Written]:
    """The files for one of the two tables."""
    return [written for written in batch.files if written.bad is bad]
