"""The tables of the metadata file, and what makes a file one of ours.

`entries` is the present; `history` holds the newest changes for watches, `value` being NULL where a key
was deleted; `sessions` the sessions that have not been found dead; `state` the one revision counter.
"""

from __future__ import annotations

import sqlite3

from forebay.errors import Corrupt, UnsupportedFormat

APPLICATION_ID = 0x46424159
"""`FBAY`, in the header of the file."""
VERSION = 1

_TABLES = (
    "CREATE TABLE entries (key TEXT NOT NULL PRIMARY KEY, value BLOB NOT NULL,"
    " create_revision INTEGER NOT NULL, mod_revision INTEGER NOT NULL, session TEXT)",
    "CREATE INDEX entries_by_session ON entries (session) WHERE session IS NOT NULL",
    "CREATE TABLE sessions (id TEXT NOT NULL PRIMARY KEY)",
    "CREATE TABLE history (revision INTEGER NOT NULL, ordinal INTEGER NOT NULL, key TEXT NOT NULL, value BLOB,"
    " create_revision INTEGER, session TEXT, PRIMARY KEY (revision, ordinal))",
    "CREATE TABLE state (id INTEGER PRIMARY KEY CHECK (id = 1), revision INTEGER NOT NULL,"
    " compacted INTEGER NOT NULL, history_changes INTEGER NOT NULL, history_bytes INTEGER NOT NULL)",
    "INSERT INTO state VALUES (1, 0, 0, 0, 0)",
)


def is_ours(connection: sqlite3.Connection, path: str) -> bool:
    """Whether the file holds our tables; `False` for an empty one. Raises for any other file, and for a later version.

    To be asked within a transaction.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application == APPLICATION_ID and version > VERSION:
        raise UnsupportedFormat(
            f"{path} has metadata schema {version}, this Forebay reads up to {VERSION}: it is whole, upgrade Forebay"
        )
    if application == APPLICATION_ID and version == VERSION:
        return True
    tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
    if application or version or tables:
        raise Corrupt(
            f"{path} is an SQLite database but not a metadata database of Forebay "
            f"(application id {application:#x}, version {version}): name another path, or restore a backup"
        )
    return False


def create(connection: sqlite3.Connection) -> None:
    """Make the tables, within the transaction under way; the ids go in last but become visible with the rest."""
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
