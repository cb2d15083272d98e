"""Many file handles, few open descriptors: each handle gives its own back while idle.

Knows descriptors and the handles that own them, nothing of directories.

The system reports a failed write-back to the descriptors that were open then, and once: a descriptor that is opened
later may never see it. So a handle with unsynced writes gives its descriptor back only after a sync through that
descriptor. The thread that needs room runs this sync, without the lock. If it fails, the descriptor stays open and
every later sync of the handle fails with the same error. A sync by the handle's owner waits for it, because the
system would report the error to only one of the two.

How a call beside an eviction stays safe without a lock: a call first *pins* the handle and then
reads `_fd`; an eviction first hides `_fd` and then looks for pins. Whichever comes second sees the
other, so no descriptor is closed (and its number given to another file) under a running call.
Pins are a list because `append` and `pop` are each one step of the interpreter. A sync for room uses
the same order: it first sets `_cleaning` and then looks for pins; the owner's sync pins and then looks.

Room is found in a number of steps that does not grow with the number of open files. A search that meets a handle with
unsynced writes *parks* it, and no later search looks at it; the sync that makes it clean puts it back. The search parks
first and then looks at `_dirty`; the sync clears `_dirty` first and then looks whether the handle is parked.

Waits here end by themselves: a thread keeps a pin for one system call only, and waits for nothing while it syncs for
room; a sync that waits for it does so for a limited time. So a thread that holds one file and asks for another cannot
block a second thread that does the same.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from forebay.disk import machine
from forebay.disk.seam import SyncFailedBefore
from forebay.locks import Rank, RankedLock
from forebay.records import Bytes

T = TypeVar("T")

CLEANING_WAIT_SECONDS = 60.0
"""How long a sync waits for a sync for room of the same file, whose thread may have been interrupted (Ctrl-C)."""
LOOKS_AT_USED_MAX = 32
"""How many handles that calls use just now a search for room passes by before it gives up."""
SHORTAGE = (errno.EMFILE, errno.ENFILE)
"""How the system says that the process, or the machine, may open no more files for now."""
SHORTAGE_WAIT_SECONDS = 0.01
SHORTAGE_WAITS_MAX = 1000
"""How often an opening waits for others to give a descriptor back where this disk has none to give: for 10 s."""


class SystemFile:
    """A `File` of the machine. Made by `Descriptors.adopt` only."""

    __slots__ = (
        "_cleaning",
        "_closed",
        "_descriptors",
        "_dirty",
        "_failed",
        "_fd",
        "_flags",
        "_identity",
        "_is_kept",
        "_is_nameless",
        "_is_parked",
        "_pins",
        "_used",
        "device",
        "path",
    )

    def __init__(self, path: str, flags: int, fd: int, descriptors: Descriptors, *, scratch: bool) -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "is a directory, not a file", path)
        self.path = path
        self.device = status.st_dev
        self._identity = (status.st_dev, status.st_ino, machine.generation(fd, status))
        self._flags = flags
        self._fd = fd
        self._descriptors = descriptors
        self._pins: list[None] = []
        self._is_kept = not scratch
        self._dirty = False
        self._used = False
        self._closed = False
        self._cleaning: threading.Event | None = None
        """Set when the sync for room that runs now has ended."""
        self._failed: OSError | None = None
        """Why a sync for room, or of the file system, failed: what was written before may never reach the disk."""
        self._is_nameless = False
        """Its name led elsewhere when it was to give its descriptor back: it could not be opened again."""
        self._is_parked = False
        """No search for room looks at it until it has been synced. Set under the lock of `Descriptors`."""

    def read_at(self, length: int, position: int) -> bytes:
        pins = self._pins
        pins.append(None)
        try:
            fd = self._fd
            if fd < 0:
                fd = self._descriptors.reopen(self)
            self._used = True
            data = os.pread(fd, length, position)
            if len(data) == length or not data:
                return data
            return _read_on(fd, data, length, position)
        finally:
            pins.pop()
            if self._closed:
                self._descriptors.finish_closing(self)

    def write_at(self, data: Bytes, position: int) -> int:
        pins = self._pins
        pins.append(None)
        try:
            fd = self._fd
            if fd < 0:
                fd = self._descriptors.reopen(self)
            self._used = True
            return os.pwrite(fd, data, position)
        finally:
            # After the write, while still pinned: a sync that ran beside it may have missed these bytes.
            self._dirty = self._is_kept
            pins.pop()
            if self._closed:
                self._descriptors.finish_closing(self)

    def truncate(self, size: int) -> None:
        self._pins.append(None)
        try:
            os.ftruncate(self._descriptor(), size)
        finally:
            self._dirty = self._is_kept
            self._unpin()

    def size(self) -> int:
        self._pins.append(None)
        try:
            return os.fstat(self._descriptor()).st_size
        finally:
            self._unpin()

    def sync(self) -> None:
        pins = self._pins
        pins.append(None)
        try:
            fd = self._fd
            if fd < 0:
                fd = self._descriptors.reopen(self)
            self._used = True
            if self._cleaning is not None:
                self._await_cleaning()
            if self._failed is not None:
                self.refuse_if_failed()
            # Before the call, so that a write beside it marks the file again.
            self._dirty = False
            try:
                machine.flush(fd)
            except BaseException:
                self._dirty = True
                raise
        finally:
            pins.pop()
            if self._closed:
                self._descriptors.finish_closing(self)
        if self._is_parked:
            self._descriptors.unpark(self)
        if self._descriptors.overfull():
            self._descriptors.trim()

    def expect_sync(self) -> None:
        """Before the whole file system is synced: from here on only later writes make this handle dirty."""
        self._pins.append(None)
        self._await_cleaning()
        self._dirty = False

    def note_failed(self, error: OSError) -> None:
        """A sync of the whole file system has failed, which may have lost bytes of this file."""
        self._failed, self._dirty = error, True

    def refuse_if_failed(self) -> None:
        """Raise the error of a sync that the owner did not ask for, at every call: later silence is no success."""
        failed = self._failed
        if failed is not None:
            before = f"an earlier sync of this file has failed: {failed.strerror}"
            raise SyncFailedBefore(failed.errno, before, self.path)

    def end_sync(self, *, synced: bool) -> None:
        """After it: a handle whose bytes may not have arrived is dirty again."""
        if not synced:
            self._dirty = True
        self._unpin()
        if synced and self._is_parked:
            self._descriptors.unpark(self)

    def close(self) -> None:
        self._closed = True
        self._descriptors.finish_closing(self)

    def _descriptor(self) -> int:
        self._used = True
        return self._fd if self._fd >= 0 else self._descriptors.reopen(self)

    def _unpin(self) -> None:
        self._pins.pop()
        if self._closed:
            self._descriptors.finish_closing(self)

    def _await_cleaning(self) -> None:
        """Return when no sync for room runs; `ETIMEDOUT` if one does not end.

        The caller has pinned the handle, so none begins afterwards.
        """
        cleaning = self._cleaning
        if cleaning is not None and not cleaning.wait(CLEANING_WAIT_SECONDS):
            waited = f"a sync begun to free its descriptor has not ended for {CLEANING_WAIT_SECONDS:.0f} s"
            raise OSError(errno.ETIMEDOUT, waited, self.path)

    def _begin_cleaning(self) -> Callable[[], None] | None:
        """The sync for room of this handle, which it is claimed for; `None` if it needs none or a call uses it.

        The caller holds the lock of `Descriptors`, and runs the sync after it has released it.
        """
        if not self._dirty or self._is_stuck() or self._cleaning is not None:
            return None
        cleaning = self._cleaning = threading.Event()
        if self._pins:
            self._cleaning = None
            cleaning.set()
            return None
        self._pins.append(None)
        # Read here: beside the lock an eviction that finds the pin may have hidden it for a moment.
        return partial(self._clean, self._fd, cleaning)

    def _is_stuck(self) -> bool:
        """Whether no sync for room can make it clean: one has failed, or its name leads elsewhere."""
        return self._is_nameless or self._failed is not None

    def _clean(self, fd: int, cleaning: threading.Event) -> None:
        """Sync for room, and note how it ended."""
        try:
            if not self._is_named():
                self._is_nameless = True
                return
            # Before the call, so that a write beside it marks the file again.
            self._dirty = False
            try:
                machine.flush(fd)
            except OSError as error:
                self._failed, self._dirty = error, True
            except BaseException:
                # Interrupted (Ctrl-C): whether the sync would have failed is now unknown.
                self._failed, self._dirty = OSError(errno.EINTR, "a sync was interrupted"), True
                raise
        finally:
            self._cleaning = None
            cleaning.set()
            self._unpin()
            self._descriptors.end_cleaning(self)

    def _is_named(self) -> bool:
        """Whether the name still leads to this file, so that it can be opened again."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity[:2]


class Descriptors:
    """The open descriptors of one disk: at most `limit`.

    Only descriptors that cannot be given back go beyond it: one per call that runs now, those of files whose sync
    failed, and those of files with unsynced writes that have lost their name.

    The victim is the one that has not been used since the last look (second chance, close to least recently used);
    where all are dirty, the one that was parked first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = RankedLock(Rank.DISK, "disk.descriptors")
        self._open: dict[SystemFile, None] = {}
        """All of them. Each is in one of the two below, or cannot be given back until its owner syncs or closes it."""
        self._candidates: OrderedDict[SystemFile, None] = OrderedDict()
        self._parked: OrderedDict[SystemFile, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def overfull(self) -> bool:
        """Whether more are open than there should be at rest."""
        return len(self._open) > self.limit

    def adopt(self, path: str, flags: int, *, scratch: bool = False) -> SystemFile:
        """Open `path` with these flags for a new handle; a `scratch` one gives its descriptor back unsynced."""
        return self.patiently(lambda: self._with_room(lambda: self._adopt(path, flags, scratch=scratch)))

    def reopen(self, file: SystemFile) -> int:
        """A descriptor for a pinned handle that has none; `ESTALE` if its name leads to another file by now."""
        return self.patiently(lambda: self._with_room(lambda: self._reopen(file)))

    def patiently(self, opening: Callable[[], T]) -> T:
        """Call what opens a file; where no more may be opened now, give descriptors back and call it again.

        The caller holds no lock of this disk. The shortage is raised if it lasts though this disk has none to give.
        """
        waits = 0
        while True:
            try:
                return opening()
            except OSError as error:
                if error.errno not in SHORTAGE or waits >= SHORTAGE_WAITS_MAX:
                    raise
            if not self._give_one_back():
                waits += 1
                threading.Event().wait(SHORTAGE_WAIT_SECONDS)

    def finish_closing(self, file: SystemFile) -> None:
        """Close the descriptor of a closed handle, unless a call still uses it: then that call's end does."""
        with self._lock:
            fd, file._fd = file._fd, -1
            if fd < 0:
                return
            if file._pins:
                file._fd = fd
                return
            self._forget(file)
            os.close(fd)

    def unpark(self, file: SystemFile) -> None:
        """A parked handle was synced: searches for room may look at it again."""
        with self._lock:
            if file._is_parked and not file._dirty:
                self._unpark(file)

    def end_cleaning(self, file: SystemFile) -> None:
        """A sync for room has ended: the handle is the next victim, or parked again if it was written to meanwhile."""
        with self._lock:
            if not file._is_parked:
                return
            if not file._dirty:
                self._unpark(file)
                file._used = False
                self._candidates.move_to_end(file, last=False)
            elif not file._is_stuck():
                self._parked[file] = None

    def trim(self) -> None:
        """Give back what is above the limit."""
        with self._lock:
            self._evict_clean(self.limit)

    def release_idle(self) -> None:
        """Give back every descriptor that is clean and not in use."""
        with self._lock:
            for file in list(self._open):
                self._evict(file)

    def dirty_on(self, device: int) -> list[SystemFile]:
        """The handles on one file system with unsynced writes, or with a sync for room that runs or failed.

        Not those that are closed and still in use: no thread asks for them any more.
        """
        with self._lock:
            return [
                file
                for file in self._open
                if file.device == device
                and not file._closed
                and (file._dirty or file._cleaning is not None or file._failed is not None)
            ]

    def close(self) -> None:
        """Close every handle; one in use gives its descriptor back when that call ends."""
        with self._lock:
            files = list(self._open)
        for file in files:
            file.close()

    def abandon(self) -> None:
        """Close everything without taking the lock: in a forked child, the thread that held it does not exist."""
        self._lock = RankedLock(Rank.DISK, "disk.descriptors")
        self._candidates.clear()
        self._parked.clear()
        while self._open:
            file, _ = self._open.popitem()
            file._closed = True
            fd, file._fd = file._fd, -1
            if fd >= 0:
                os.close(fd)

    def _with_room(self, opening: Callable[[], T]) -> T:
        """Call `opening` under the lock, with fewer than `limit` descriptors open. Syncs happen without the lock."""
        cleanings = 0
        while True:
            with self._lock:
                self._evict_clean(self.limit - 1)
                is_full = len(self._open) >= self.limit and cleanings < self.limit
                clean = self._begin_cleaning() if is_full else None
                if clean is None:
                    return opening()
            cleanings += 1
            clean()

    def _give_one_back(self) -> bool:
        """Close one descriptor, or make one clean that can be closed next; false if there is none."""
        with self._lock:
            before = len(self._open)
            self._evict_clean(before - 1)
            if len(self._open) < before:
                return True
            clean = self._begin_cleaning()
        if clean is not None:
            clean()
        return clean is not None

    def _adopt(self, path: str, flags: int, *, scratch: bool) -> SystemFile:
        fd = os.open(path, flags, 0o666)
        try:
            # A later reopening must neither create nor insist on creating.
            file = SystemFile(path, flags & ~(os.O_CREAT | os.O_EXCL), fd, self, scratch=scratch)
        except BaseException:
            os.close(fd)
            raise
        self._open[file] = self._candidates[file] = None
        return file

    def _reopen(self, file: SystemFile) -> int:
        if file._closed:
            raise OSError(errno.EBADF, "this handle is closed", file.path)
        if file._fd >= 0:
            return file._fd
        fd = os.open(file.path, file._flags)
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino, machine.generation(fd, status)) != file._identity:
                raise OSError(errno.ESTALE, "the name now belongs to another file", file.path)
        except BaseException:
            os.close(fd)
            raise
        self._open[file] = self._candidates[file] = None
        file._fd = fd
        return fd

    def _begin_cleaning(self) -> Callable[[], None] | None:
        """The sync of a parked handle that can give its descriptor back afterwards; `None` if there is none."""
        for _ in range(min(len(self._parked), LOOKS_AT_USED_MAX)):
            file = next(iter(self._parked))
            clean = file._begin_cleaning()
            if clean is not None or file._is_stuck():
                # The end of its cleaning puts it back; or, if it cannot be cleaned, a sync by its owner does.
                del self._parked[file]
            else:
                self._parked.move_to_end(file)
            if clean is not None:
                return clean
        return None

    def _evict_clean(self, target: int) -> None:
        """Evict until `target` are open, or until no candidate is left but those that calls use.

        Each look ends a use, parks a handle, evicts one, or meets one that a call has pinned; these are few, but while
        a file system is synced. So all searches together take about as many steps as there were uses.
        """
        pinned = 0
        while len(self._open) > target and self._candidates and pinned < LOOKS_AT_USED_MAX:
            file = next(iter(self._candidates))
            if file._used:
                file._used = False
                self._candidates.move_to_end(file)
            elif not self._evict(file) and not self._park(file):
                pinned += 1
                self._candidates.move_to_end(file)

    def _park(self, file: SystemFile) -> bool:
        """Keep a candidate from further searches until it is synced; false if it is not dirty."""
        file._is_parked = True
        if not file._dirty:
            file._is_parked = False
            return False
        del self._candidates[file]
        self._parked[file] = None
        return True

    def _unpark(self, file: SystemFile) -> None:
        file._is_parked = False
        self._parked.pop(file, None)
        self._candidates[file] = None

    def _evict(self, file: SystemFile) -> bool:
        """Close the descriptor of a handle that is clean and that no call uses; false if it is not so."""
        fd, file._fd = file._fd, -1
        if file._pins or file._dirty:
            file._fd = fd
            return False
        self._forget(file)
        os.close(fd)
        return True

    def _forget(self, file: SystemFile) -> None:
        """A handle has no descriptor any more."""
        del self._open[file]
        self._candidates.pop(file, None)
        self._parked.pop(file, None)
        file._is_parked = False


def _read_on(fd: int, data: bytes, length: int, position: int) -> bytes:
    """The rest after a short read, which may be the end of the file or merely the most one call gives."""
    parts, got = [data], len(data)
    while got < length:
        more = os.pread(fd, length - got, position + got)
        if not more:
            break
        parts.append(more)
        got += len(more)
    return b"".join(parts) if len(parts) > 1 else data
