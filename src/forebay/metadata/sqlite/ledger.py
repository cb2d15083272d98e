"""Entries, revisions and history, as statements within one transaction of the file.

Knows the tables and nothing of locks, threads or processes. Each `apply` that changes anything is one
revision; `save` must come last.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence

from forebay.errors import Corrupt
from forebay.metadata.seam import (
    HISTORY_BYTES_MAX,
    HISTORY_CHANGES_MAX,
    Absent,
    Change,
    Compacted,
    Delete,
    Entry,
    Exists,
    Operation,
    Put,
    RevisionIs,
    ValueIs,
    prefix_end,
)

_ENTRY = "SELECT key, value, create_revision, mod_revision, session FROM entries"


def entry_of(connection: sqlite3.Connection, key: str) -> Entry | None:
    """The entry of that key."""
    row = connection.execute(f"{_ENTRY} WHERE key = ?", (key,)).fetchone()
    return None if row is None else _entry(row)


def entries_under(
    connection: sqlite3.Connection,
    prefix: str,
    start_after: str | None,
    limit: int | None,
    ended: Collection[str],
) -> list[Entry]:
    """The entries under a prefix, sorted, without those of the sessions that have ended."""
    clause, parameters = _span(prefix)
    if start_after is not None:
        clause, parameters = f"{clause} AND key > ?", [*parameters, start_after]
    if ended:
        marks = ", ".join("?" * len(ended))
        clause, parameters = f"{clause} AND (session IS NULL OR session NOT IN ({marks}))", [*parameters, *ended]
    statement = f"{_ENTRY} WHERE {clause} ORDER BY key LIMIT ?"
    return [_entry(row) for row in connection.execute(statement, [*parameters, -1 if limit is None else limit])]


def changes_since(connection: sqlite3.Connection, prefix: str, start: int) -> tuple[int, list[Change]]:
    """The store's revision and the changes under a prefix from revision `start` on."""
    revision, compacted, _, _ = _state(connection)
    if start <= compacted:
        raise Compacted.before(start, compacted)
    clause, parameters = _span(prefix)
    rows = connection.execute(
        "SELECT revision, key, value, create_revision, session FROM history"
        f" WHERE revision >= ? AND {clause} ORDER BY revision, ordinal",
        [start, *parameters],
    )
    return revision, [_change(*row) for row in rows]


def revision_of(connection: sqlite3.Connection) -> int:
    """The store's revision."""
    return _state(connection)[0]


def sessions_of(connection: sqlite3.Connection) -> set[str]:
    """The sessions that no process has found dead."""
    return {row[0] for row in connection.execute("SELECT id FROM sessions")}


class Ledger:
    """The changes of one write transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.revision, self._compacted, self._changes, self._bytes = _state(connection)
        self._saved = self.revision

    def entry(self, key: str) -> Entry | None:
        return entry_of(self._connection, key)

    def holds(self, compare: Absent | Exists | RevisionIs | ValueIs) -> bool:
        entry = self.entry(compare.key)
        if isinstance(compare, Absent):
            return entry is None
        if isinstance(compare, Exists):
            return entry is not None
        if isinstance(compare, RevisionIs):
            return compare.mod_revision == (0 if entry is None else entry.mod_revision)
        return entry is not None and entry.value == compare.value

    def apply(self, operations: Iterable[Operation]) -> None:
        """Do these operations, as the next revision if they change anything."""
        changes: list[Change] = []
        for operation in operations:
            if isinstance(operation, Put):
                changes.append(self._put(operation))
            elif isinstance(operation, Delete):
                changes += self._delete("key = ?", [operation.key])
            else:
                changes += self._delete(*_span(operation.prefix))
        if changes:
            self.revision += 1
            self._remember(changes)

    def has_session(self, session: str) -> bool:
        return self._connection.execute("SELECT 1 FROM sessions WHERE id = ?", (session,)).fetchone() is not None

    def begin_session(self, session: str) -> None:
        self._connection.execute("INSERT INTO sessions VALUES (?)", (session,))

    def end_session(self, session: str) -> None:
        """Forget the session and delete its keys, as a revision of its own if there are any."""
        self._connection.execute("DELETE FROM sessions WHERE id = ?", (session,))
        owned = self._connection.execute(
            "SELECT key FROM entries WHERE session = ? ORDER BY key", (session,)
        ).fetchall()
        self.apply([Delete(key) for (key,) in owned])

    def save(self) -> None:
        """Write the counters down, and drop the oldest history if there is too much."""
        if self.revision == self._saved:
            return
        if self._changes > HISTORY_CHANGES_MAX or self._bytes > HISTORY_BYTES_MAX:
            self._compact()
        self._connection.execute(
            "UPDATE state SET revision = ?, compacted = ?, history_changes = ?, history_bytes = ?",
            (self.revision, self._compacted, self._changes, self._bytes),
        )

    def _put(self, put: Put) -> Change:
        revision = self.revision + 1
        self._connection.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET"
            " value = excluded.value, mod_revision = excluded.mod_revision, session = excluded.session",
            (put.key, put.value, revision, revision, put.session),
        )
        return Change(revision=revision, key=put.key, entry=self.entry(put.key))

    def _delete(self, clause: str, parameters: Sequence[str]) -> list[Change]:
        keys = self._connection.execute(f"SELECT key FROM entries WHERE {clause} ORDER BY key", parameters).fetchall()
        if keys:
            self._connection.execute(f"DELETE FROM entries WHERE {clause}", parameters)
        return [Change(revision=self.revision + 1, key=key, entry=None) for (key,) in keys]

    def _remember(self, changes: Sequence[Change]) -> None:
        self._connection.executemany(
            "INSERT INTO history VALUES (?, ?, ?, ?, ?, ?)",
            [(self.revision, ordinal, change.key, *_stored(change.entry)) for ordinal, change in enumerate(changes)],
        )
        self._changes += len(changes)
        self._bytes += sum(len(change.key) + (len(change.entry.value) if change.entry else 0) for change in changes)

    def _compact(self) -> None:
        """Drop the oldest changes, in whole revisions, until a quarter of the room is free again."""
        oldest = self._connection.execute(
            "SELECT revision, COUNT(*), SUM(LENGTH(key) + COALESCE(LENGTH(value), 0)) FROM history"
            " GROUP BY revision ORDER BY revision"
        ).fetchall()
        for revision, count, size in oldest:
            if self._changes <= HISTORY_CHANGES_MAX * 3 // 4 and self._bytes <= HISTORY_BYTES_MAX * 3 // 4:
                break
            self._changes, self._bytes, self._compacted = self._changes - count, self._bytes - size, revision
        self._connection.execute("DELETE FROM history WHERE revision <= ?", (self._compacted,))


def _span(prefix: str) -> tuple[str, list[str]]:
    """The condition that a key starts with `prefix`, by order and not by LIKE, which knows % and _."""
    end = prefix_end(prefix)
    return ("key >= ?", [prefix]) if end is None else ("key >= ? AND key < ?", [prefix, end])


def _state(connection: sqlite3.Connection) -> tuple[int, int, int, int]:
    row = connection.execute("SELECT revision, compacted, history_changes, history_bytes FROM state").fetchone()
    if row is None:
        raise Corrupt("the metadata database has lost its revision counter: restore a backup")
    revision, compacted, changes, size = row
    return revision, compacted, changes, size


def _entry(row: tuple[str, bytes, int, int, str | None]) -> Entry:
    key, value, create_revision, mod_revision, session = row
    return Entry(key=key, value=value, create_revision=create_revision, mod_revision=mod_revision, session=session)


def _change(revision: int, key: str, value: bytes | None, create_revision: int, session: str | None) -> Change:
    if value is None:
        return Change(revision=revision, key=key, entry=None)
    return Change(revision=revision, key=key, entry=_entry((key, value, create_revision, revision, session)))


def _stored(entry: Entry | None) -> tuple[bytes | None, int | None, str | None]:
    return (None, None, None) if entry is None else (entry.value, entry.create_revision, entry.session)
