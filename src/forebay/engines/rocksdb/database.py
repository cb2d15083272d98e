"""The one database of a data directory: opened once, when it is first needed. The only module that knows rocksdict.

Errors of RocksDB come out as ours. Views must end before the database can: `close` waits for them.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from forebay.disk import Disk, make_directories
from forebay.disk.forks import FORKS
from forebay.errors import Closed, Corrupt, ForebayError, Indeterminate, Unavailable, Unsupported, UnsupportedFormat
from forebay.locks import Rank, RankedCondition

logger = logging.getLogger(__name__)

FAMILY = "records"
FORMAT = b"1"
CLOSE_SECONDS = 60.0

_FORMAT_KEY = b"format"


def check_installed() -> None:
    """`Unsupported` if the package that this engine needs is not there."""
    if find_spec("rocksdict") is None:
        raise Unsupported('engine "rocksdb" needs the package rocksdict: install "forebay[rocksdb]", or use "segment"')


class RocksBatch:
    """What is to be written at once, all of it or nothing. For one `write`."""

    def __init__(self, rocks: Any, family: Any) -> None:
        self.rocks = rocks
        # Named each time: the batch has a default, but removing a range does not go by it.
        self._family = family

    def put(self, key: bytes, value: bytes) -> None:
        """Set a value."""
        self.rocks.put(key, value, self._family)

    def delete(self, key: bytes) -> None:
        """Remove a key, if it is there."""
        self.rocks.delete(key, self._family)

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Remove every key of `[begin, end)`."""
        self.rocks.delete_range(begin, end, self._family)


class View:
    """The database as it is now, whatever is written meanwhile. For one thread; ends with its `with` block."""

    def __init__(self, opened: Callable[[], Any], ended: Callable[[], None]) -> None:
        self._opened = opened
        self._ended = ended
        self._rows: Any = None

    def __enter__(self) -> View:
        self._rows = self._opened()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Dropped here, for a traceback may keep this object: an open one would keep the database open.
        self._rows = None
        self._ended()

    def rows(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of `[start, stop)`, in order. Not to be mixed with other calls before its end."""
        rows = self._rows
        try:
            rows.seek(start)
            while rows.valid():
                key = rows.key()
                if key >= stop:
                    return
                yield key, rows.value()
                rows.next()
            rows.status()
        except ForebayError:
            raise
        except Exception as error:
            raise translated(error) from error

    def keys(self, start: bytes, stop: bytes, most: int) -> list[bytes]:
        """The first keys of `[start, stop)`."""
        found: list[bytes] = []
        rows = self._rows
        try:
            rows.seek(start)
            while len(found) < most and rows.valid():
                key = rows.key()
                if key >= stop:
                    return found
                found.append(key)
                rows.next()
            rows.status()
        except Exception as error:
            raise translated(error) from error
        return found

    def last(self, start: bytes, at: bytes) -> tuple[bytes, bytes] | None:
        """The last row of `[start, at]`."""
        try:
            self._rows.seek_for_prev(at)
            if not self._rows.valid():
                self._rows.status()
                return None
            key = self._rows.key()
            return (key, self._rows.value()) if key >= start else None
        except Exception as error:
            raise translated(error) from error


class RocksDatabase:
    """A database below `path`. Safe for concurrent use.

    One that is `read_only` may be opened beside its owner, and shows for ever what was there at its opening. All that
    changes then is the date of one file, which rocksdict writes with the bytes that it has.
    """

    def __init__(self, path: str, disk: Disk, *, read_only: bool = False) -> None:
        self.path = path
        self.disk = disk
        self.read_only = read_only
        self._lock = RankedCondition(Rank.STORE, "rocksdb.database")
        self._rocks: Any = None
        self._family: Any = None
        self._handle: Any = None
        self._synced: Any = None
        self._views = 0
        self._ended: str | None = None
        FORKS.enter(self)

    @property
    def is_made(self) -> bool:
        """Whether there is such a database: else nothing is in it."""
        return self._rocks is not None or self.disk.exists(f"{self.path}/CURRENT")

    def open(self) -> None:
        """Open the files, or make them; nothing happens if they are open. Every use does so by itself."""
        if self._rocks is not None:
            return
        with self._lock:
            self._check_open()
            if self._rocks is None:
                self._open_files()

    def batch(self) -> RocksBatch:
        """An empty batch."""
        self.open()
        from rocksdict import WriteBatch  # noqa: PLC0415 - an optional package

        return RocksBatch(WriteBatch(raw_mode=True), self._handle)

    def write(self, batch: RocksBatch, *, sync: bool) -> None:
        """On return all of it is written, and with `sync` durable, with everything before; else `Indeterminate`."""
        try:
            self._rocks.write(batch.rocks, self._synced if sync else None)
        except Exception as error:
            found = translated(error)
            raise found if isinstance(found, Closed) else Indeterminate(*found.args) from error

    def sync(self) -> None:
        """On return everything written before is durable."""
        self.open()
        try:
            self._rocks.flush_wal(sync=True)
        except Exception as error:
            raise translated(error) from error

    def get(self, key: bytes) -> bytes | None:
        """The value of a key."""
        self.open()
        try:
            value: bytes | None = self._family.get(key)
        except Exception as error:
            raise translated(error) from error
        return value

    def view(self) -> View:
        """A view to be used in a `with` statement."""
        return View(self._begin_view, self._end_view)

    def compact(self, start: bytes, stop: bytes) -> None:
        """Give the room of what was removed from a range back."""
        try:
            self._family.compact_range(start, stop)
        except Exception as error:
            raise translated(error) from error

    def purge(self, start: bytes, stop: bytes) -> None:
        """On return no data file of the database holds what was removed from this range, unless a view needs it.

        Rewrites all of the range. What the log of writes held of it is gone as well.
        """
        self.open()
        from rocksdict import BottommostLevelCompaction, CompactOptions  # noqa: PLC0415 - an optional package

        options = CompactOptions()
        options.set_bottommost_level_compaction(BottommostLevelCompaction.force())
        try:
            # Both: the log of writes stays for as long as one family has something in it that is nowhere else.
            self._rocks.flush(True)
            self._family.flush(True)
            self._family.compact_range(start, stop, options)
        except Exception as error:
            raise translated(error) from error

    def close(self) -> None:
        """Close the files, once no reader is left. Harmless when repeated."""
        with self._lock:
            self._ended = self._ended or "is closed"
            if not self._lock.wait_for(lambda: self._views == 0, CLOSE_SECONDS):
                logger.warning(
                    "%s: %d readers have not ended; the files stay open until they do", self.path, self._views
                )
            rocks, family = self._rocks, self._family
            self._rocks = self._family = self._handle = None
        if rocks is not None:
            family.close()
            rocks.close()

    def abandon(self) -> None:
        """In a forked child: RocksDB's threads are not there, and to end it would wait for them for ever."""
        if self._rocks is not None:
            _end_without_handlers()
        for held in (self._rocks, self._family, self._handle):
            # One reference more than there is, so that even the interpreter's end does not end it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        self._rocks = self._family = self._handle = None

    def _begin_view(self) -> Any:
        self.open()
        with self._lock:
            self._check_open()
            rows = self._family.iter()
            self._views += 1
            return rows

    def _end_view(self) -> None:
        with self._lock:
            self._views -= 1
            if self._ended is not None:
                self._lock.notify_all()

    def _open_files(self) -> None:
        check_installed()
        from rocksdict import AccessType, DBRecoveryMode, Options, Rdict, WriteOptions  # noqa: PLC0415 - optional

        options = Options(raw_mode=True)
        if not self.read_only:
            make_directories(self.disk, self.path)
            options.create_if_missing(True)
            options.create_missing_column_families(True)
        # A gap inside what was synced is damage: refused, never cut.
        options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
        options.set_keep_log_file_num(4)
        rocks = family = None
        try:
            access = AccessType.read_only(False) if self.read_only else AccessType.read_write()
            families = {FAMILY: Options(raw_mode=True)}
            rocks = Rdict(self.path, options, column_families=families, access_type=access)
            self._check_format(rocks)
            family = rocks.get_column_family(FAMILY)
            handle = rocks.get_column_family_handle(FAMILY)
            synced = WriteOptions()
            synced.sync = True
        except BaseException as error:
            # Else this process keeps the database's lock, and no later open gets it.
            for opened in (family, rocks):
                if opened is not None:
                    opened.close()
            if isinstance(error, ForebayError) or not isinstance(error, Exception):
                raise
            raise translated(error) from error
        self._family, self._handle, self._synced, self._rocks = family, handle, synced, rocks

    def _check_format(self, rocks: Any) -> None:
        """Name the format in a new database; `UnsupportedFormat` if this one has another."""
        found = rocks.get(_FORMAT_KEY)
        if found is None and not self.read_only:
            rocks.put(_FORMAT_KEY, FORMAT)
        elif found not in (None, FORMAT):
            raise UnsupportedFormat(f"{self.path} has format {found!r}, this version knows {FORMAT!r}: upgrade")

    def _check_open(self) -> None:
        if self._ended is not None:
            raise Closed(f"{self.path} {self._ended}")


def _end_without_handlers() -> None:
    """In a forked child: RocksDB's own exit handler would wait there for threads that only the parent has.

    One that is registered later runs earlier, and `_exit` as such a handler ends the process with its status.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def translated(error: Exception) -> ForebayError:
    """An error of RocksDB as one of ours."""
    text = str(error)
    if type(error).__name__ == "DbClosedError":
        return Closed(f"the database is closed ({text})")
    if "orruption" in text:
        return Corrupt(f"the database is damaged ({text}): restore a backup of the directory rocksdb")
    return Unavailable(f"the database cannot be used ({text}): see to the disk, then open the log again")
