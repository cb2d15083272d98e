"""The machine's disk. Knows paths and system calls, nothing of what the bytes mean."""

from __future__ import annotations

import errno
import os
import sys

from forebay.disk import machine
from forebay.disk.descriptors import Descriptors, SystemFile
from forebay.disk.forks import FORKS
from forebay.locks import Rank, RankedLock

if sys.platform != "win32":
    import fcntl

DESCRIPTORS_MAX = 128


class SystemDisk:
    """A `Disk` on the machine's file systems; safe for threads.

    At most `descriptors_max` files stay open, and no more than half of what the process may open. Where the process
    or the machine may open no more for now, a call gives descriptors back, waits and tries again.
    """

    def __init__(self, descriptors_max: int = DESCRIPTORS_MAX) -> None:
        machine.refuse_windows()
        self._descriptors = Descriptors(machine.descriptors_kept(descriptors_max))
        self._locks: dict[int, SystemLock] = {}
        self._filesystems: dict[int, int] = {}
        self._syncing = RankedLock(Rank.STORE, "disk.filesystem")
        self._boot = machine.boot()
        self._ended: str | None = None
        FORKS.enter(self)

    @property
    def descriptors_open(self) -> int:
        """How many files are open now, locks not counted."""
        return len(self._descriptors)

    def create(self, path: str) -> SystemFile:
        return self._writable(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)

    def open(self, path: str, *, writable: bool = False, scratch: bool = False) -> SystemFile:
        if writable:
            return self._writable(path, os.O_RDWR | os.O_CLOEXEC, scratch=scratch)
        self._refuse_if_ended(path)
        return self._descriptors.adopt(path, os.O_RDONLY | os.O_CLOEXEC)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def list_directory(self, path: str) -> list[str]:
        return sorted(self._descriptors.patiently(lambda: os.listdir(path)))

    def exists(self, path: str) -> bool:
        # Not os.path.exists: that one takes every error for "no".
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def sync_directory(self, path: str) -> None:
        fd = self._descriptors.patiently(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            machine.flush_directory(fd)
        finally:
            os.close(fd)

    def sync_filesystem(self, path: str) -> None:
        device = os.stat(path).st_dev
        # One at a time: of two at once the system reports a lost write to one, and each answers for all files.
        with self._syncing:
            self._sync_filesystem(path, device)
        self._descriptors.trim()

    def _sync_filesystem(self, path: str, device: int) -> None:
        dirty = self._descriptors.dirty_on(device)
        expecting: list[SystemFile] = []
        synced = False
        try:
            for file in dirty:
                expecting.append(file)
                file.expect_sync()
            try:
                is_reported = machine.flush_filesystem(self._filesystem(path, device))
            except BaseException as error:
                # Reported once, for whichever files it is: the next sync of each of these must not succeed.
                why = error if isinstance(error, OSError) else OSError(errno.EINTR, "a sync was interrupted")
                for file in {*dirty, *self._descriptors.dirty_on(device)}:
                    file.note_failed(why)
                raise
            if not is_reported:
                for file in dirty:
                    file.sync()
            for file in dirty:
                file.refuse_if_failed()
            synced = True
        finally:
            for file in expecting:
                file.end_sync(synced=synced)

    def lock(self, path: str) -> SystemLock | None:
        self._refuse_if_ended(path)
        while True:
            lock = self._descriptors.patiently(lambda: self._lock_file(path))
            fd = lock.fd
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _still_named(fd, path):
                    return lock
            except BlockingIOError:
                lock.close()
                return None
            except BaseException:
                lock.close()
                raise
            lock.close()

    def is_locked(self, path: str) -> bool:
        self._refuse_if_ended(path)
        return self._descriptors.patiently(lambda: self._is_locked(path))

    def _is_locked(self, path: str) -> bool:
        # Held by every fork too: a child must not inherit the shared lock, nor the descriptor.
        with FORKS.gate:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(fd)
        return False

    def modified_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def identity(self, path: str) -> str:
        return f"{self._boot}:{self._descriptors.patiently(lambda: machine.mount(path))}"

    def release_idle(self) -> None:
        """Give back every descriptor that is clean and not in use; the handles stay good."""
        self._descriptors.release_idle()

    def close(self) -> None:
        """Give back every descriptor and lock, and refuse to open more; harmless when repeated.

        A read under way is let finish. No thread may be syncing any more.
        """
        self._ended = self._ended or "this disk is closed"
        self._descriptors.close()
        for lock in list(self._locks.values()):
            lock.release()
        self._close_filesystems()

    def abandon(self) -> None:
        """Close every descriptor and lock with no other effect, and refuse to open more.

        For a forked child, where no other thread runs: the parent's locks stay the parent's.
        """
        self._ended = "this disk was abandoned after a fork: open another"
        self._syncing = RankedLock(Rank.STORE, "disk.filesystem")
        self._descriptors.abandon()
        while self._locks:
            self._locks.popitem()[1].close()
        self._close_filesystems()

    def _lock_file(self, path: str) -> SystemLock:
        with FORKS.gate:
            return SystemLock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), self._locks)

    def _writable(self, path: str, flags: int, *, scratch: bool = False) -> SystemFile:
        self._refuse_if_ended(path)
        file = self._descriptors.adopt(path, flags, scratch=scratch)
        if file.device not in self._filesystems:
            # Opened before the first write, because the system reports to a descriptor only later failures.
            self._filesystem(os.path.dirname(path) or ".", file.device)
        return file

    def _filesystem(self, path: str, device: int) -> int:
        fd = self._filesystems.get(device)
        if fd is None:
            opened = self._descriptors.patiently(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            fd = self._filesystems.setdefault(device, opened)
            if fd != opened:
                os.close(opened)
        return fd

    def _close_filesystems(self) -> None:
        while self._filesystems:
            os.close(self._filesystems.popitem()[1])

    def _refuse_if_ended(self, path: str) -> None:
        if self._ended is not None:
            raise OSError(errno.EBADF, self._ended, path)


class SystemLock:
    """A lock by `flock`, held by one descriptor."""

    def __init__(self, fd: int, registry: dict[int, SystemLock]) -> None:
        self.fd = fd
        self._registry = registry
        registry[fd] = self

    @property
    def identity(self) -> str:
        status = os.fstat(self.fd)
        return f"{machine.boot()}:{status.st_dev}:{status.st_ino}:{machine.generation(self.fd, status)}"

    def release(self) -> None:
        if self.fd >= 0:
            # Unlocked by word and not only by closing: a forked child may still share the descriptor.
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            self.close()

    def close(self) -> None:
        """Give the descriptor back without unlocking what a parent process may share."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._registry.pop(fd, None)
            os.close(fd)


def _still_named(fd: int, path: str) -> bool:
    """Whether the file we locked still has this name; if not, another process may lock the new one."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
