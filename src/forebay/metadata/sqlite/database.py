"""The SQLite file itself: connections, transactions, and SQLite's errors in our words.

SQLite opens its own files (the database, `-wal`, `-shm`): the one exception to "only the disk touches
files". Knows nothing of keys or revisions. One connection reads and one writes, each behind a lock, so
that a read does not wait for another thread's sync. A connection must not be carried across a fork, not
even unused, because SQLite would believe in locks that the child does not have: all are closed before a
fork and opened again when needed.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Iterator
from urllib.parse import quote

from forebay.clock import Clock
from forebay.disk.forks import FORKS
from forebay.errors import Closed, Corrupt, ForebayError, Indeterminate, Unavailable, Unsupported
from forebay.locks import Rank, RankedLock
from forebay.metadata.sqlite import schema

_RETRY_INTERVAL_S = 0.005
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_ERROR})
_LOCKED = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_NEVER_COMMITTED = _LOCKED | {sqlite3.SQLITE_FULL}
"""Failures of a commit after which its last frame cannot be in the file."""


class _Link:
    """One connection, its lock, and how often it was opened."""

    def __init__(self) -> None:
        self.lock = RankedLock(Rank.STORE, "metadata.connection")
        self.connection: sqlite3.Connection | None = None
        self.generation = 0

    def drop(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


class Database:
    """Transactions on one file. Safe for threads; other processes may use the same file."""

    def __init__(self, path: str, *, clock: Clock, busy_timeout_ms: int, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._clock = clock
        self._busy_timeout_ms = busy_timeout_ms
        self._reader = _Link()
        self._writer = _Link()
        self._held: list[_Link] = []
        self._ended: str | None = None
        self.ended = False
        """An attribute of its own: sessions look at it at each append."""

    def open(self) -> bool:
        """When it returns, the file has our tables; `True` if they were made now."""
        with self._translated():
            created = False if self.read_only else self._open_writer()
        with self.reading() as connection:
            if not schema.is_ours(connection, self.path):
                raise Unavailable(f"{self.path} is empty: its owner has not finished creating it; try again")
        FORKS.enter(self)
        return created

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent state of the file, that of the newest commit."""
        with self._reader.lock, self._translated(self._reader):
            self._refuse_if_ended()
            if self._reader.connection is None:
                self._reader.connection = self._connect("mode=ro" if self.read_only else "mode=rw")
                self._reader.generation += 1
            connection = self._reader.connection
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                _roll_back(connection)

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The only write transaction at this moment, in any process. Leaving the block commits it.

        When it is left without an error the commit is durable. `Unavailable` means that nothing was done,
        `Indeterminate` that the commit itself failed in a way that leaves it open.
        """
        if self.read_only:
            raise Unsupported(f"{self.path} is opened read-only here: change it through the process that owns it")
        if not self._writer.lock.acquire(timeout=self._busy_timeout_ms / 1000):
            raise Unavailable(f"{self.path} is busy in this process since {self._busy_timeout_ms} ms: try again")
        try:
            with self._translated(self._writer):
                connection = self._begin()
                try:
                    yield connection
                except BaseException:
                    _roll_back(connection)
                    raise
            # Commit point: SQLite syncs its log before COMMIT returns (synchronous=FULL).
            with self._translated(self._writer, committing=True):
                connection.execute("COMMIT")
        finally:
            self._writer.lock.release()

    def data_version(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """A number that differs from the one of an earlier `reading` if anything was committed in between."""
        return self._reader.generation, int(connection.execute("PRAGMA data_version").fetchone()[0])

    def damage(self) -> list[str]:
        """What SQLite's own check finds wrong with the file; empty if nothing. Reads every page."""
        with self.reading() as connection:
            found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check")]
        return [] if found == ["ok"] else found

    def close(self) -> None:
        self._end("closed: open another")
        for link in (self._writer, self._reader):
            with link.lock:
                link.drop()

    def abandon(self) -> None:
        self._end("left behind by a fork: open another in this process")

    def _end(self, why: str) -> None:
        self._ended, self.ended = self._ended or why, True

    def rest(self) -> None:
        for link in (self._writer, self._reader):
            # Bounded: a fork out of a signal handler may interrupt the very thread that holds the lock.
            if link.lock.acquire(timeout=self._busy_timeout_ms / 1000 + 1):
                self._held.append(link)
                link.drop()

    def go_on(self) -> None:
        while self._held:
            self._held.pop().lock.release()

    def _begin(self) -> sqlite3.Connection:
        self._refuse_if_ended()
        if self._writer.connection is None:
            self._open_writer()
        connection = self._writer.connection
        assert connection is not None
        # Left over if an interrupt fell between BEGIN and the block.
        _roll_back(connection)
        connection.execute("BEGIN IMMEDIATE")
        return connection

    def _open_writer(self) -> bool:
        # The first opening may create the file; a later one that finds it gone must not begin a new history.
        mode = "mode=rwc" if self._writer.generation == 0 else "mode=rw"
        connection = self._connect(mode)
        try:
            # In one transaction: another process may be creating the tables between two looks at them.
            connection.execute("BEGIN")
            created = not schema.is_ours(connection, self.path)
            connection.execute("ROLLBACK")
            self._use_log(connection)
            if created:
                connection.execute("BEGIN IMMEDIATE")
                created = not schema.is_ours(connection, self.path)
                if created:
                    schema.create(connection)
                connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._writer.connection = connection
        self._writer.generation += 1
        return created

    def _use_log(self, connection: sqlite3.Connection) -> None:
        """Switch to WAL mode. SQLite does not wait by itself when another process is just doing the same."""
        for left in range(int(self._busy_timeout_ms / 1000 / _RETRY_INTERVAL_S), -1, -1):
            try:
                mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            except sqlite3.OperationalError as error:
                if left == 0 or error.sqlite_errorcode & 0xFF not in _LOCKED:
                    raise
                self._clock.sleep(_RETRY_INTERVAL_S)
                continue
            if mode != "wal":
                raise Unsupported(f"{self.path} lies where SQLite cannot share memory: put it on a local file system")
            return

    def _connect(self, mode: str) -> sqlite3.Connection:
        name = quote(self.path, errors="surrogateescape")
        connection = sqlite3.connect(
            f"file:{name}?{mode}",
            uri=True,
            timeout=self._busy_timeout_ms / 1000,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            # The last two matter on macOS, whose plain fsync leaves bytes in the drive's cache.
            for setting in ("synchronous = FULL", "fullfsync = 1", "checkpoint_fullfsync = 1"):
                connection.execute(f"PRAGMA {setting}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _refuse_if_ended(self) -> None:
        if self._ended is not None:
            raise Closed(f"metadata store {self.path} is {self._ended}")

    @contextlib.contextmanager
    def _translated(self, link: _Link | None = None, *, committing: bool = False) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.Error as error:
            if link is not None:
                link.drop()
            raise _error_of(self.path, error, committing=committing) from error


def is_full(error: Exception) -> bool:
    """Whether a call failed because the disk has no room."""
    found = error if isinstance(error, OSError) else error.__cause__
    if isinstance(found, sqlite3.Error):
        # Memory that processes share is a file, too; where that cannot grow, it is an error of input and output.
        code = getattr(found, "sqlite_errorcode", 0)
        return code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE
    return isinstance(found, OSError) and found.errno == errno.ENOSPC


def _error_of(path: str, error: sqlite3.Error, *, committing: bool) -> ForebayError:
    """What the caller should do about an error of SQLite."""
    # Without a code it comes from the Python module, which met text that is no text.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if committing and code not in _NEVER_COMMITTED:
        return Indeterminate(f"{path}: the commit failed ({error}) and may or may not last: read to find out")
    if code in _DAMAGED:
        return Corrupt(
            f"{path} is not a whole metadata database ({error}): keep a copy of it and of its -wal file, "
            f'then restore a backup or try "sqlite3 {path} .recover"'
        )
    if code in _LOCKED:
        return Unavailable(f"{path} is busy in another process ({error}): try again")
    return Unavailable(f"{path} cannot be used now ({error}): check that it exists, its permissions and the free space")


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        # A failed transaction may have been rolled back by SQLite already; what counts is that none is open.
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
