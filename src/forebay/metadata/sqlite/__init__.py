"""The metadata store in one SQLite file, for all processes of one machine."""

from forebay.metadata.sqlite.store import SqliteMetadata

__all__ = ["SqliteMetadata"]
