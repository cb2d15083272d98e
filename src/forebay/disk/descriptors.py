"""Many file handles, few open descriptors: each handle gives its own back while idle and clean.

Knows descriptors and the handles that own them, nothing of directories. A handle with unsynced
writes keeps its descriptor, because the system reports a failed write-back to that one alone.

How a call beside an eviction stays safe without a lock: a call first *pins* the handle and then
reads `_fd`; an eviction first hides `_fd` and then looks for pins. Whichever comes second sees the
other, so no descriptor is closed (and its number given to another file) under a running call.
Pins are a list because `append` and `pop` are each one step of the interpreter.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict

from forebay.disk import machine
from forebay.records import Bytes


class SystemFile:
    """A `File` of the machine. Made by `Descriptors.adopt` only."""

    __slots__ = ("_closed", "_descriptors", "_dirty", "_fd", "_flags", "_identity", "_pins", "_used", "device", "path")

    def __init__(self, path: str, flags: int, fd: int, descriptors: Descriptors) -> None:
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
        self._dirty = False
        self._used = False
        self._closed = False

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
            self._dirty = True
            pins.pop()
            if self._closed:
                self._descriptors.finish_closing(self)

    def truncate(self, size: int) -> None:
        self._pins.append(None)
        try:
            os.ftruncate(self._descriptor(), size)
        finally:
            self._dirty = True
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
        if self._descriptors.overfull():
            self._descriptors.trim()

    def expect_sync(self) -> None:
        """Before the whole file system is synced: from here on only later writes make this handle dirty."""
        self._pins.append(None)
        self._dirty = False

    def end_sync(self, *, synced: bool) -> None:
        """After it: a handle whose bytes may not have arrived is dirty again."""
        if not synced:
            self._dirty = True
        self._unpin()

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


class Descriptors:
    """The open descriptors of one disk: at most `limit`, apart from those of handles that are dirty or in use.

    The victim is the one that has not been used since the last look (second chance, close to least recently used).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[SystemFile, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def overfull(self) -> bool:
        """Whether more are open than there should be at rest."""
        return len(self._open) > self.limit

    def adopt(self, path: str, flags: int) -> SystemFile:
        """Open `path` with these flags for a new handle."""
        with self._lock:
            self._make_room(self.limit - 1)
            fd = os.open(path, flags, 0o666)
            try:
                # A later reopening must neither create nor insist on creating.
                file = SystemFile(path, flags & ~(os.O_CREAT | os.O_EXCL), fd, self)
            except BaseException:
                os.close(fd)
                raise
            self._open[file] = None
            return file

    def reopen(self, file: SystemFile) -> int:
        """A descriptor for a pinned handle that has none; `ESTALE` if its name leads to another file by now."""
        with self._lock:
            if file._closed:
                raise OSError(errno.EBADF, "this handle is closed", file.path)
            if file._fd >= 0:
                return file._fd
            self._make_room(self.limit - 1)
            fd = os.open(file.path, file._flags)
            try:
                status = os.fstat(fd)
                if (status.st_dev, status.st_ino, machine.generation(fd, status)) != file._identity:
                    raise OSError(errno.ESTALE, "the name now belongs to another file", file.path)
            except BaseException:
                os.close(fd)
                raise
            self._open[file] = None
            file._fd = fd
            return fd

    def finish_closing(self, file: SystemFile) -> None:
        """Close the descriptor of a closed handle, unless a call still uses it: then that call's end does."""
        with self._lock:
            fd, file._fd = file._fd, -1
            if fd < 0:
                return
            if file._pins:
                file._fd = fd
                return
            del self._open[file]
            os.close(fd)

    def trim(self) -> None:
        """Give back what is above the limit."""
        with self._lock:
            self._make_room(self.limit)

    def release_idle(self) -> None:
        """Give back every descriptor that is clean and not in use."""
        with self._lock:
            for file in list(self._open):
                self._evict(file)

    def dirty_on(self, device: int) -> list[SystemFile]:
        """The handles on one file system with unsynced writes."""
        with self._lock:
            return [file for file in self._open if file._dirty and file.device == device]

    def close(self) -> None:
        """Close every handle; one in use gives its descriptor back when that call ends."""
        with self._lock:
            files = list(self._open)
        for file in files:
            file.close()

    def abandon(self) -> None:
        """Close everything without taking the lock: in a forked child, whoever held it does not exist."""
        self._lock = threading.Lock()
        while self._open:
            file, _ = self._open.popitem()
            file._closed = True
            fd, file._fd = file._fd, -1
            if fd >= 0:
                os.close(fd)

    def _make_room(self, target: int) -> None:
        """Evict until `target` are open, looking at each handle twice at most: once used, once not."""
        looks = 2 * min(len(self._open), self.limit)
        while len(self._open) > target and looks > 0:
            looks -= 1
            file = next(iter(self._open))
            self._open.move_to_end(file)
            if file._used:
                file._used = False
            else:
                self._evict(file)

    def _evict(self, file: SystemFile) -> None:
        fd, file._fd = file._fd, -1
        if file._pins or file._dirty:
            file._fd = fd
            return
        del self._open[file]
        os.close(fd)


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
