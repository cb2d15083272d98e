"""How a table of an open format is changed: one rule for all formats, and for all jobs and pipelines that change one.

A commit adds and removes files, and records in the same step how far the table has a topic or a query. It is tried on
the table as it was looked at. If another writer was faster, the table is looked at again: the commit is repeated only
if what it rests on is as it was, so that rows never come twice. Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from forebay.decoders import decoder
from forebay.errors import Conflict, Unavailable
from forebay.settings import TableSettings

ATTEMPTS: Final = 5
TOPIC: Final = "forebay.topic"
TOPIC_ID: Final = "forebay.topic-id"
WHERE: Final = "forebay.where"
"""Of a table that is filled from a topic: the condition that its records meet, if not all are brought."""
OFFSETS: Final = "forebay.offsets"
"""Of a commit: the offsets of each partition that it brought, or shows, as `{"0": [[start, stop], …]}`."""

Ranges = dict[int, list[tuple[int, int]]]
"""Offsets `[start, stop)` by partition."""


class QueryBatch(NamedTuple):
    """One batch of a streaming query."""

    query_id: str
    number: int


@dataclass(frozen=True, kw_only=True)
class TopicOffsets:
    """Which offsets of a topic a commit is about."""

    topic: str
    topic_id: str
    ranges: Ranges
    ends: Mapping[int, int] | None = None
    """The first offsets that the table does not have from then on; `None` where it keeps no such place."""

    def as_properties(self) -> dict[str, str]:
        """What a commit says of itself."""
        return {TOPIC: self.topic, TOPIC_ID: self.topic_id, OFFSETS: encode_ranges(self.ranges)}


@dataclass(frozen=True, kw_only=True)
class TableChange:
    """What one commit does: all of it, or nothing."""

    added: Sequence[str] = ()
    """Addresses of Parquet files that are not in the table yet: our names are unique, so that no format need look."""
    removed: frozenset[str] = frozenset()
    """Addresses of files that the table shall not name any more. The files themselves stay."""
    replace: bool = False
    """Whether what is added takes the place of all rows."""
    offsets: TopicOffsets | None = None
    batch: QueryBatch | None = None


class Overtaken(Exception):
    """Another writer committed since the table was looked at; nothing was changed."""


class FormatTable(Protocol):
    """A table of one open format, by its name. `close` it. Used by one thread at a time.

    What it answers is what the last `look` or the last commit has seen.
    """

    name: str

    def look(self) -> bool:
        """Look at the table as it is now; whether there is one. Nothing is made."""

    def make(self, schema: pa.Schema, properties: Mapping[str, str], *, new: bool = False) -> None:
        """Look at the table, and make it with these columns and properties if there is none.

        With `new` a table that is there is a `Conflict`, and the first commit makes it: until then there is none, and
        of two that make it at once, one is refused.
        """

    def fit(self, schema: pa.Schema) -> None:
        """Add columns that are new. `Invalid` names the table, the column and both types if one changed."""

    def check(self, schema: pa.Schema) -> pa.Schema:
        """The columns as files are to have them; `Invalid` if the table has other columns or other types."""

    def file_schema(self, schema: pa.Schema) -> pa.Schema:
        """These columns, each with the id that the table has for it, where the format has such ids.

        `Invalid` if the table has no such column.
        """

    def version(self) -> object:
        """What differs after every change of the rows."""

    def where(self) -> str:
        """The condition that the records meet which it is filled with, empty if it takes all."""

    def topic_id(self) -> str:
        """The topic it was filled from, empty if it was not filled from one."""

    def next_offsets(self) -> dict[int, int]:
        """The first offsets of its topic that it does not have."""

    def last_batch(self, query_id: str) -> int:
        """The last batch of a query that it has, -1 before the first."""

    def commits(self) -> Iterator[Ranges]:
        """The offsets that each commit brought or showed, newest first, as far back as the table knows."""

    def files(self) -> dict[str, Any]:
        """The files of its rows by their addresses, each with what the format knows of it."""

    def named_files(self, settings: TableSettings, now_ms: int) -> Iterator[str]:
        """The address of every file that a version names which is still kept."""

    def lists_removed(self) -> bool:
        """Whether its newest version still describes files that it names no more, with bounds of their columns."""

    def folder(self, name: str) -> str:
        """The address of a folder that is this table's alone, for files to be added."""

    def attempt(self, change: TableChange) -> None:
        """Commit to the table as it was looked at. `Overtaken` if it is another by now."""

    def give_up(self, folder: str) -> None:
        """Before a first commit that is to make the table: remove the files that only this run can have written."""

    def expire(self, settings: TableSettings, now_ms: int, *, at_least: int = 1) -> int:
        """Give up old versions as the settings say, at least so many at once; how many."""

    def remove_strays(self, folder: str, settings: TableSettings, now_ms: int) -> int:
        """Remove files of the folder that no kept version names, once they are older than the grace; how many."""

    def close(self) -> None:
        """Give back what is held."""


def commit(
    table: FormatTable,
    change: TableChange,
    *,
    basis: Callable[[], object],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Commit the change. On return it is in the table, once, and the table is looked at.

    `basis` is what the change rests on, asked of the table: `Conflict` if another writer changed that meanwhile.
    `check` is called at the last moment before each attempt: that of a lease, for example.
    """
    known = basis()
    for _ in range(ATTEMPTS):
        _check_topic(table, change)
        check()
        try:
            table.attempt(change)
        except Overtaken as error:
            if not table.look() or basis() != known:
                raise Conflict(f"{table.name} was changed by another job meanwhile: run it again ({error})") from error
            if change.added and table.files().keys() >= set(change.added):
                return  # it was this very commit: its answer was lost, and a repeat of it was refused
        else:
            return
    raise Unavailable(f"{table.name} was changed {ATTEMPTS} times by others while it was committed to; run it again")


def already_there(name: str) -> Conflict:
    """Why a table that must be new is not made."""
    return Conflict(
        f"the table {name} is there already, and nothing was added to it: append to it, overwrite it, or name another"
    )


def _check_topic(table: FormatTable, change: TableChange) -> None:
    """A table that keeps its place in a topic has one topic."""
    offsets = change.offsets
    if offsets is not None and offsets.ends is not None and table.topic_id() not in ("", offsets.topic_id):
        raise Conflict(
            f"{table.name} is filled from another topic, of the id {table.topic_id()}: bring {offsets.topic} into "
            "another table"
        )


def encode_ranges(ranges: Mapping[int, Sequence[tuple[int, int]]]) -> str:
    """Ranges as a commit records them."""
    return msgspec.json.encode({str(partition): found for partition, found in sorted(ranges.items())}).decode()


def decode_ranges(text: str) -> Ranges:
    """Ranges as a commit recorded them; those of lake were once one range of each partition, `[start, stop]`."""
    found = decoder(dict[int, list[int | tuple[int, int]]], strict=False).decode(text)
    ranges: Ranges = {}
    for partition, stored in found.items():
        pairs = [pair for pair in stored if isinstance(pair, tuple)]
        ranges[partition] = pairs if len(pairs) == len(stored) else [(stored[0], stored[1])]  # type: ignore[list-item]
    return ranges
