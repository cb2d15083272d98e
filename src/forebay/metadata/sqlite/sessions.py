"""Sessions as locks of the operating system: a process that dies loses them, without any help.

A session is a locked file `sessions/<id>.lock` beside the database, and a row in it. The lock is taken
before the row is written, so a row whose lock is free belongs to the dead. Good for one machine only.
A look whether a lock is free shares it for an instant, in which the lock of a dead session may seem taken to
a process that is about to end that session: that refuses and never permits, and the next attempt finds it free.
A session is ended by a process that holds its lock, within a write transaction.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable
from typing import Protocol

from forebay.disk import Disk, Lock
from forebay.errors import Unavailable

_SUFFIX = ".lock"
_STRAYS_MAX = 1_000
_log = logging.getLogger(__name__)


class SessionLocks:
    """The lock files beside one database."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory

    def hold(self, session: str) -> Lock | None:
        """The session's lock, or `None` if a process holds it."""
        try:
            self._disk.make_directory(self._directory)
            return self._disk.lock(self._path(session))
        except OSError as error:
            raise Unavailable(f"cannot lock {self._path(session)}: {error.strerror or error}; try again") from error

    def remove(self, session: str, lock: Lock) -> None:
        """Release the lock of a session that has ended for good, and remove its file."""
        try:
            # The name goes first: a process that locks this file in between sees that it has lost its name.
            self._disk.unlink(self._path(session))
        except OSError as error:
            _log.warning("session %s: cannot remove %s: %s", session, self._path(session), error)
        finally:
            lock.release()

    def is_free(self, session: str) -> bool:
        """Whether no process holds the session's lock; changes nothing."""
        try:
            return not self._disk.is_locked(self._path(session))
        except OSError as error:
            raise Unavailable(f"cannot look at {self._path(session)}: {error.strerror or error}; try again") from error

    def files(self) -> list[str]:
        """The sessions that have a lock file, whether alive, dead or forgotten."""
        try:
            names = self._disk.list_directory(self._directory)
        except FileNotFoundError:
            return []
        return [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]

    def sweep(self, is_known: Callable[[str], bool]) -> None:
        """Remove lock files that crashes left behind: free, and of no session in the database."""
        for session in self.files()[:_STRAYS_MAX]:
            lock = None if is_known(session) else self.hold(session)
            if lock is not None:
                self.remove(session, lock)

    def _path(self, session: str) -> str:
        return posixpath.join(self._directory, f"{session}{_SUFFIX}")


class SessionOwner(Protocol):
    """The store a session belongs to."""

    def close_session(self, session: str, lock: Lock) -> None: ...


class Life(Protocol):
    """What a session does not outlive."""

    ended: bool


class SqliteSession:
    """A session held by this process."""

    def __init__(self, session: str, lock: Lock, owner: SessionOwner, life: Life) -> None:
        self._id = session
        self._lock: Lock | None = lock
        self._owner = owner
        self._life = life

    @property
    def id(self) -> str:
        return self._id

    def alive(self) -> bool:
        return self._lock is not None and not self._life.ended

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None and not self._life.ended:
            self._owner.close_session(self._id, lock)
