"""A data directory: whose it is, which version, and who has it open.

forebay.json       {"format": 1, "id": 32 hex digits}; its presence says that the directory is ours. With "shards",
                   that directory holds the shards instead of the one below, and a claim, shards.json, says for whom
lock               held by the one process that writes
metadata.sqlite    topics and shard states
shards/            one directory per shard
session.json       {"session", "lock"}: the session of the process that has, or had, the lock
loads/             segments that bulk loads put here, where no other store is shared
"""

from __future__ import annotations

import posixpath
import re
from contextlib import ExitStack
from pathlib import PurePath
from typing import NamedTuple

import msgspec

from forebay.clock import Clock
from forebay.decoders import decoder
from forebay.disk import Disk, Lock, make_directories, replace_file
from forebay.errors import Corrupt, Invalid, Unavailable, UnsupportedFormat

IN_MEMORY = ":memory:"
"""In the place of a path: a log in the memory of its process, without a directory."""
MARKER = "forebay.json"
LOCK = "lock"
METADATA = "metadata.sqlite"
SHARDS = "shards"
CLAIM = "shards.json"
CLAIMING = "shards.json.lock"
LOADS = "loads"
SESSION = "session.json"
FORMAT = 1
LOCK_ATTEMPTS = 20
LOCK_WAIT_SECONDS = 0.02
_SHARD = re.compile(r"[0-9a-f]+_[0-9]+")


class Marker(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the marker file says."""

    format: int
    id: str
    shards: str | None = None


class Claim(msgspec.Struct, frozen=True):
    """For which data directory a directory elsewhere holds the shards: what its marker says, and where it lay."""

    id: str
    directory: str


class LockedSession(msgspec.Struct, frozen=True):
    """The session that a process owned shards in, and the lock file that it held meanwhile: `Lock.identity`."""

    session: str
    lock: str


class NoDirectory(NamedTuple):
    """In place of a data directory, for a process that has none: nothing recorded leads here."""

    path: str = "/nonexistent"
    id: str = ""
    shards: str = "/nonexistent"
    loads: str = "/nonexistent"

    def metadata_at(self, configured: str | None) -> str:
        """Where the metadata store lies, if it is a file."""
        return posixpath.abspath(configured) if configured is not None else ""


class LogDirectory:
    """A directory of ours, locked by this process."""

    def __init__(self, path: str, marker: Marker, lock: Lock | None) -> None:
        self.path = path
        self.id = marker.id
        self.shards = marker.shards or f"{path}/{SHARDS}"
        """Where the directories of the shards lie."""
        self._lock = lock

    @property
    def loads(self) -> str:
        """Where bulk loads into this directory put their segments."""
        return f"{self.path}/{LOADS}"

    @property
    def metadata_path(self) -> str:
        return f"{self.path}/{METADATA}"

    def metadata_at(self, configured: str | None) -> str:
        """Where the metadata store lies: absolute, so that the process may change its working directory."""
        return posixpath.abspath(configured or self.metadata_path)

    @classmethod
    def take(cls, path: str | PurePath, disk: Disk, clock: Clock, shards: str | None = None) -> LogDirectory:
        """Open for writing: made if missing, refused if it is not a Forebay directory or another process has it.

        A directory that is made now keeps its shards in `shards`, if given; one that exists must agree.
        """
        path = checked_path(path)
        shards = checked_path(shards) if shards is not None else None
        try:
            make_directories(disk, path)
            names = disk.list_directory(path)
        except NotADirectoryError as error:
            raise Invalid(f"{path} is not a directory: name one for the data") from error
        except OSError as error:
            raise Unavailable(
                f"{path} cannot be used as a data directory: {error}; check the path and its permissions"
            ) from error
        if MARKER not in names:
            _refuse_foreign(path, set(names))
        try:
            lock = _locked(f"{path}/{LOCK}", disk, clock)
            try:
                marker = _marker(path, disk, clock, shards)
                if marker.shards is None:
                    make_directories(disk, f"{path}/{SHARDS}")
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise Unavailable(f"{path} cannot be written: {error}; check its permissions and the free space") from error
        return cls(path, marker, lock)

    @classmethod
    def look(cls, path: str | PurePath, disk: Disk) -> LogDirectory:
        """Open for reading beside the process that writes; changes nothing."""
        path = checked_path(path)
        try:
            if not disk.exists(f"{path}/{MARKER}"):
                raise Invalid(f"{path} is not a Forebay data directory: it has no {MARKER}; check the path")
            marker = read_marker(path, disk)
            if marker.shards is not None:
                _check_claim(path, marker.shards, marker.id, disk)
            return cls(path, marker, None)
        except OSError as error:
            raise Unavailable(f"{path} cannot be read: {error}; check the path and its permissions") from error

    def note_session(self, session: str, disk: Disk) -> None:
        """On return a later process that has the lock knows in which session this one owns shards."""
        assert self._lock is not None
        noted = LockedSession(session, self._lock.identity)
        replace_file(disk, f"{self.path}/{SESSION}", msgspec.json.encode(noted))

    def left_session(self, disk: Disk) -> str | None:
        """The session of the process that had this lock before, and has it no more; `None` if none is known.

        A copy of a directory, whose original may be in use, has another lock file, and so has a directory after a
        restart of the machine: of those nothing is said.
        """
        path = f"{self.path}/{SESSION}"
        if self._lock is None or not disk.exists(path):
            return None
        file = disk.open(path)
        try:
            noted = decoder(LockedSession).decode(file.read_at(4096, 0))
        except msgspec.MsgspecError:
            # Only a courtesy to the next process, which waits for the end of the session without it.
            return None
        finally:
            file.close()
        return noted.session if noted.lock == self._lock.identity else None

    def release(self) -> None:
        """Let another process have it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def checked_path(path: str | PurePath) -> str:
    """The path as the disk takes it: absolute, so that the process may change its working directory."""
    text = str(path) if isinstance(path, PurePath) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise Invalid(f"{path!r:.100} is not the path of a directory")
    return posixpath.abspath(text)


def _refuse_foreign(path: str, names: set[str]) -> None:
    if METADATA in names or SHARDS in names:
        raise Corrupt(f"{path} holds a log, but its {MARKER} is missing: restore that file from a backup")
    if names - {LOCK, f"{MARKER}.tmp"}:
        raise Invalid(f"{path} has files in it and is not a Forebay data directory: name an empty or a new one")


def refuse_lost_metadata(path: str, metadata_path: str, disk: Disk) -> None:
    """Shards without a metadata store: it was lost or is looked for elsewhere. A new one would hide every topic."""
    if not set(disk.list_directory(path)) - {CLAIM, CLAIMING}:
        return
    if not disk.exists(metadata_path) or _is_empty(metadata_path, disk):
        raise Corrupt(
            f"{path} holds shards, but its metadata store {metadata_path} is missing or empty: restore it from a "
            "backup, or correct metadata.path"
        )


def _is_empty(path: str, disk: Disk) -> bool:
    file = disk.open(path)
    try:
        return file.size() == 0
    finally:
        file.close()


def is_owned(path: str, disk: Disk) -> bool:
    """Whether a process has the directory open for writing. Those who ask do not take each other for one."""
    return disk.is_locked(f"{path}/{LOCK}")


def read_marker(path: str, disk: Disk) -> Marker:
    """What the marker says; refuses a newer format."""
    file = disk.open(f"{path}/{MARKER}")
    try:
        content = file.read_at(4096, 0)
    finally:
        file.close()
    try:
        marker = decoder(Marker).decode(content)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path}/{MARKER} is damaged ({error}): restore it from a backup") from error
    if marker.format > FORMAT:
        raise UnsupportedFormat(f"{path} has format {marker.format}, this version knows up to {FORMAT}: upgrade")
    return marker


def _marker(path: str, disk: Disk, clock: Clock, shards: str | None) -> Marker:
    if disk.exists(f"{path}/{MARKER}"):
        marker = read_marker(path, disk)
        if shards is not None and shards != (marker.shards or f"{path}/{SHARDS}"):
            raise Invalid(
                f"wal.dir is {shards}, but {path} was made with its log files in {marker.shards or SHARDS}: leave "
                "wal.dir out, or move the files there and say so in " + MARKER
            )
        if marker.shards is not None and not _check_claim(path, marker.shards, marker.id, disk):
            replace_file(disk, f"{marker.shards}/{CLAIM}", msgspec.json.encode(Claim(marker.id, path)))
        return marker
    if shards == f"{path}/{SHARDS}":
        shards = None  # where they lie anyway
    marker = Marker(FORMAT, clock.random_bytes(16).hex(), shards)
    if shards is None:
        replace_file(disk, f"{path}/{MARKER}", msgspec.json.encode(marker))
        return marker
    make_directories(disk, shards)
    # Held until the marker is there: of two new directories that name one place, the other finds whose it is.
    with ExitStack() as held:
        held.callback(_locked(f"{shards}/{CLAIMING}", disk, clock).release)
        held.callback(disk.unlink, f"{shards}/{CLAIMING}")
        _claim(path, shards, marker.id, disk)
        replace_file(disk, f"{path}/{MARKER}", msgspec.json.encode(marker))
    return marker


def _claim(path: str, shards: str, marker_id: str, disk: Disk) -> None:
    """Make `shards` the place of the shards of a new data directory; refuse it if it is another's."""
    claim = _read_claim(shards, disk)
    if claim is not None and claim.directory != path and disk.exists(f"{claim.directory}/{MARKER}"):
        raise Invalid(
            f"wal.dir {shards} holds the log files of {claim.directory}: give each data directory a wal.dir of its own"
        )
    if set(disk.list_directory(shards)) - {CLAIM, f"{CLAIM}.tmp", CLAIMING}:
        raise Invalid(f"wal.dir {shards} has files in it: name an empty or a new directory")
    # Before the marker: one that was cut short in between claims a place that was never used.
    replace_file(disk, f"{shards}/{CLAIM}", msgspec.json.encode(Claim(marker_id, path)))


def _check_claim(path: str, shards: str, marker_id: str, disk: Disk) -> bool:
    """Refuse an empty place, where everything in the log would seem to be lost, and one that is another's.

    False if the log files there say nothing, and are to become this directory's: they were moved there, or written
    before there were claims.
    """
    claim = _read_claim(shards, disk)
    if claim is not None and claim.id != marker_id:
        raise Invalid(f"wal.dir {shards} of {path} holds the log files of {claim.directory}: restore the right ones")
    if claim is None and not (disk.exists(shards) and any(map(_SHARD.fullmatch, disk.list_directory(shards)))):
        raise Unavailable(
            f"{path} keeps its log files in {shards}, and they are not there (no {CLAIM}): is that disk mounted? "
            "If they are lost, restore them from a backup; in the shared modes, use the topics in a new data directory"
        )
    return claim is not None


def _read_claim(shards: str, disk: Disk) -> Claim | None:
    path = f"{shards}/{CLAIM}"
    if not disk.exists(path):
        return None
    file = disk.open(path)
    try:
        return decoder(Claim).decode(file.read_at(8192, 0))
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} is damaged ({error}): restore it from a backup") from error
    finally:
        file.close()


def _locked(path: str, disk: Disk, clock: Clock) -> Lock:
    for _ in range(LOCK_ATTEMPTS):
        lock = disk.lock(path)
        if lock is not None:
            return lock
        # A reader that looks whether the directory is owned holds the lock for an instant.
        clock.sleep(LOCK_WAIT_SECONDS)
    raise Unavailable(
        f"{path.rpartition('/')[0]} is open for writing already, here or in another process: close it there, "
        "or open it read-only here"
    )
