"""The metadata store in one SQLite file: what the seam promises, for the processes of one machine.

Every transaction is one `BEGIN IMMEDIATE … COMMIT` in WAL mode with synchronous=FULL: durable when it
returns, and never beside another. Files and locks go through the disk, apart from SQLite's own.
A dead session is found by its free lock: within the transaction that asks for it or touches its keys,
before a read returns one of its keys, and now and then by a process that watches.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from forebay.clock import Clock
from forebay.disk import Disk, Lock
from forebay.errors import Closed, ForebayError, Invalid, Unavailable
from forebay.metadata.seam import (
    Compare,
    DeleteRange,
    Entry,
    Operation,
    Outcome,
    Put,
    SessionEnded,
    check_key,
    check_limit,
    check_prefix,
    check_transaction,
    check_ttl,
)
from forebay.metadata.sqlite import ledger
from forebay.metadata.sqlite.database import Database, is_full
from forebay.metadata.sqlite.ledger import Ledger
from forebay.metadata.sqlite.reserve import Reserve
from forebay.metadata.sqlite.sessions import SessionLocks, SqliteSession
from forebay.metadata.sqlite.watch import CommitCounter, SqliteWatch

T = TypeVar("T")
BUSY_TIMEOUT_MS = 5_000
_REAP_INTERVAL_S = 0.5


class SqliteMetadata:
    """A `MetadataStore` in the file `path`, whose directory must exist.

    With `read_only`, for second processes while the owner writes: everything that changes is `Unsupported`.
    """

    def __init__(
        self,
        path: str,
        *,
        disk: Disk,
        clock: Clock,
        busy_timeout_ms: int = BUSY_TIMEOUT_MS,
        read_only: bool = False,
    ) -> None:
        if path == ":memory:" or not path:
            raise Invalid(f"{path!r} is not a file: use MemoryMetadata to keep nothing")
        if path.startswith("//"):
            path = f"/{path.lstrip('/')}"
        self._clock = clock
        self._locks = SessionLocks(disk, posixpath.join(posixpath.dirname(path), "sessions"))
        self._database = Database(path, clock=clock, busy_timeout_ms=busy_timeout_ms, read_only=read_only)
        self._reserve = Reserve(path, disk, clock)
        self._commits = CommitCounter()
        self._own: dict[str, SqliteSession] = {}
        self._reaped_at = clock.monotonic()
        try:
            self._with_room(lambda: self._open(disk, path))
        except BaseException:
            self._database.close()
            raise

    def get(self, key: str) -> Entry | None:
        check_key(key)
        with self._database.reading() as connection:
            entry = ledger.entry_of(connection, key)
        if entry is None or entry.session is None or not self._ended_among({entry.session}):
            return entry
        if self._database.read_only:
            return None
        return self.get(key)

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        check_prefix(prefix)
        check_limit(limit)
        ended: set[str] = set()
        while True:
            with self._database.reading() as connection:
                entries = ledger.entries_under(connection, prefix, start_after, limit, ended)
            found = self._ended_among({entry.session for entry in entries if entry.session is not None})
            if not found:
                return entries
            ended |= found

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        check_transaction(compares, operations)
        return self._with_room(lambda: self._transaction(compares, operations))

    def _transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        with self._turn() as turn:
            turn.end_dead_owners(compare.key for compare in compares if not isinstance(compare, SessionEnded))
            turn.end_dead_owners(operation.key for operation in operations if not isinstance(operation, DeleteRange))
            succeeded = all(turn.holds(compare) for compare in compares)
            if succeeded:
                turn.refuse_ended(operation.session for operation in operations if isinstance(operation, Put))
                turn.ledger.apply(operations)
        return Outcome(succeeded=succeeded, revision=turn.ledger.revision)

    def watch(self, prefix: str, from_revision: int | None = None) -> SqliteWatch:
        check_prefix(prefix)
        start = self.revision() + 1 if from_revision is None else from_revision
        return SqliteWatch(self._database, self._commits, self._clock, self._reap_sometimes, prefix, start)

    def session(self, ttl_s: float) -> SqliteSession:
        """As the seam says; the lock shows a death at once, so `ttl_s` is not needed here."""
        check_ttl(ttl_s)
        return self._with_room(self._session)

    def _session(self) -> SqliteSession:
        name = self._clock.random_bytes(16).hex()
        lock: Lock | None = None
        try:
            with self._turn() as turn:
                # Within the turn, so that no process that sweeps strays is just trying this lock.
                lock = self._locks.hold(name)
                if lock is None:
                    raise Unavailable(f"session {name} is held by another process: try again")
                turn.ledger.begin_session(name)
        except BaseException:
            # If the row lasts after all, its free lock says that the session is dead.
            if lock is not None:
                lock.release()
            raise
        session = SqliteSession(name, lock, self, self._database)
        self._own[name] = session
        return session

    def session_alive(self, session: str) -> bool:
        with self._database.reading() as connection:
            known = session in ledger.sessions_of(connection)
        return known and not self._ended_among({session})

    def end_session(self, session: str) -> None:
        # A lock of the operating system: it is over with its process.
        return

    def revision(self) -> int:
        with self._database.reading() as connection:
            return ledger.revision_of(connection)

    def damage(self) -> list[str]:
        """What SQLite's own check finds wrong with the file; empty if nothing. Reads all of it."""
        return self._database.damage()

    def close(self) -> None:
        failures: list[ForebayError] = []
        for session in () if self._database.ended else tuple(self._own.values()):
            try:
                session.close()
            except ForebayError as error:
                failures.append(error)
        if not self._database.ended:
            self._database.close()
            self._commits.announce()
        if failures:
            raise failures[0]

    def abandon(self) -> None:
        """As the seam says; the disk's own `abandon` gives back the descriptors of the session locks."""
        self._database.abandon()

    def close_session(self, session: str, lock: Lock) -> None:
        """Called by a session of this store: end it for everyone."""
        self._own.pop(session, None)
        try:
            with self._turn() as turn:
                turn.ledger.end_session(session)
        except BaseException:
            # Its lock is free from now on, so the process that meets it next ends it.
            lock.release()
            raise
        self._locks.remove(session, lock)

    def _open(self, disk: Disk, path: str) -> None:
        try:
            if self._database.read_only and not disk.exists(path):
                raise Unavailable(
                    f"there is no metadata database {path}: check the path, give the settings that say where its "
                    "topics are (metadata), or start its owner first"
                )
            if self._database.open():
                # SQLite syncs its log and the log's name, but not the name of a new database.
                disk.sync_directory(posixpath.dirname(path) or ".")
            if not self._database.read_only and self._locks.files():
                with self._turn() as turn:
                    self._locks.sweep(turn.ledger.has_session)
            if not self._database.read_only:
                self._reserve.keep()
        except OSError as error:
            raise Unavailable(f"cannot open {path}: {error.strerror or error}") from error

    def _with_room(self, work: Callable[[], T]) -> T:
        """What `work` gives; where the disk is full, the reserve is given up for it, and it is done again."""
        try:
            return work()
        except (Unavailable, OSError) as error:
            if self._database.read_only or not is_full(error) or not self._reserve.give_up():
                raise
        return work()

    def _ended_among(self, sessions: set[str]) -> set[str]:
        """Which of these sessions have ended. Where this store may write, their keys are gone on return.

        A look at the locks comes first: while every process lives, no write transaction keeps another waiting.
        """
        free = {session for session in sessions - self._own.keys() if self._locks.is_free(session)}
        if not free or self._database.read_only:
            return free
        with self._turn() as turn:
            return {session for session in sorted(free) if turn.ended(session)}

    def _reap_sometimes(self) -> None:
        """End the sessions whose processes have died, unless that was done a moment ago."""
        now = self._clock.monotonic()
        if self._database.read_only or now - self._reaped_at < _REAP_INTERVAL_S:
            return
        self._reaped_at = now
        self._reserve.keep()
        with self._database.reading() as connection:
            sessions = ledger.sessions_of(connection)
        self._ended_among(sessions)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[_Turn]:
        """The only write transaction at this moment; the lock files of sessions it found dead go with its commit."""
        seized: dict[str, Lock] = {}
        try:
            with self._database.writing() as connection:
                turn = _Turn(Ledger(connection), self._locks, self._own.keys(), seized)
                yield turn
                turn.ledger.save()
            while seized:
                self._locks.remove(*seized.popitem())
        finally:
            while seized:
                seized.popitem()[1].release()
            self._commits.announce()


class _Turn:
    """One write transaction, with the means to find dead sessions in it."""

    def __init__(self, entries: Ledger, locks: SessionLocks, own: Iterable[str], seized: dict[str, Lock]) -> None:
        self.ledger = entries
        self._locks = locks
        self._own = set(own)
        self._seized = seized

    def holds(self, compare: Compare) -> bool:
        if isinstance(compare, SessionEnded):
            return self.ended(compare.session)
        return self.ledger.holds(compare)

    def ended(self, session: str) -> bool:
        """Whether a session has ended; one found dead is ended here, as a revision of its own."""
        if not self.ledger.has_session(session):
            return True
        lock = None if session in self._own else self._locks.hold(session)
        if lock is None:
            return False
        self._seized[session] = lock
        self.ledger.end_session(session)
        return True

    def end_dead_owners(self, keys: Iterable[str]) -> None:
        """End the dead sessions that own these keys: their keys vanish before they are compared or replaced."""
        for key in keys:
            entry = self.ledger.entry(key)
            if entry is not None and entry.session is not None:
                self.ended(entry.session)

    def refuse_ended(self, sessions: Iterable[str | None]) -> None:
        for session in {session for session in sessions if session is not None}:
            if self.ended(session):
                raise Closed(f"session {session} has ended: it can own no keys")
