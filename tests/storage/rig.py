"""What the tests of the embedded log share: quick settings, a watched disk, digests, waiting for a condition."""

from __future__ import annotations

import errno
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import RLock
from typing import TypeVar

from forebay.disk import File, Lock, SystemDisk
from forebay.records import Bytes, Record
from forebay.settings import Settings
from forebay.storage import Topic
from forebay.testing.inside import inside
from forebay.wal.log import Wal
from tests.support.waiting import PATIENCE

T = TypeVar("T")
QUICK: dict[str, dict[str, object]] = {
    "wal": {"sync_interval_ms": 20, "mark_interval_ms": 20, "flush_interval_ms": 5, "free_bytes_min": 0},
    "runtime": {"maintenance_interval_ms": 5},
}


def quick(**wal: object) -> Settings:
    """Settings whose timers run fast, changed by the given ones of the log."""
    return Settings.load(overrides={**QUICK, "wal": {**QUICK["wal"], **wal}})


def values(records: Iterable[Record]) -> list[bytes | None]:
    """The values alone."""
    return [record.value for record in records]


def in_thread(work: Callable[[], T]) -> T:
    """What `work` returns in another thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result(PATIENCE)


def is_free(lock: RLock) -> bool:
    """Whether no other thread holds the lock."""
    is_taken = lock.acquire(blocking=False)
    if is_taken:
        lock.release()
    return is_taken


def wal_of(topic: Topic, partition: int = 0) -> Wal:
    """The log below a partition, to look at."""
    return inside(topic).wal(partition)


def digest(root: Path, *, without: Sequence[str] = ()) -> dict[str, str]:
    """Every file below the directory and a hash of its bytes."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in without and "sessions" not in path.parts
    }


class WatchedDisk:
    """The machine's disk: every call is counted by kind, and `meet` may raise or wait before it happens."""

    def __init__(self, inner: SystemDisk | None = None) -> None:
        self.inner = inner or SystemDisk()
        self.calls: Counter[str] = Counter()
        self.meet: Callable[[str, str], None] = lambda kind, path: None
        self.free: int | None = None

    def create(self, path: str) -> File:
        self._met("create", path)
        return WatchedFile(self.inner.create(path), self)

    def open(self, path: str, *, writable: bool = False, scratch: bool = False) -> File:
        self._met("open", path)
        return WatchedFile(self.inner.open(path, writable=writable, scratch=scratch), self)

    def rename(self, source: str, target: str) -> None:
        self._met("rename", target)
        self.inner.rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._met("link", target)
        self.inner.link(source, target)

    def unlink(self, path: str) -> None:
        self._met("unlink", path)
        self.inner.unlink(path)

    def make_directory(self, path: str) -> None:
        self._met("make_directory", path)
        self.inner.make_directory(path)

    def remove_directory(self, path: str) -> None:
        self._met("remove_directory", path)
        self.inner.remove_directory(path)

    def list_directory(self, path: str) -> list[str]:
        self._met("list_directory", path)
        return self.inner.list_directory(path)

    def exists(self, path: str) -> bool:
        self._met("exists", path)
        return self.inner.exists(path)

    def sync_directory(self, path: str) -> None:
        self._met("sync_directory", path)
        self.inner.sync_directory(path)

    def sync_filesystem(self, path: str) -> None:
        self._met("sync_filesystem", path)
        self.inner.sync_filesystem(path)

    def lock(self, path: str) -> Lock | None:
        self._met("lock", path)
        return self.inner.lock(path)

    def is_locked(self, path: str) -> bool:
        self._met("is_locked", path)
        return self.inner.is_locked(path)

    def modified_ms(self, path: str) -> int:
        self._met("modified_ms", path)
        return self.inner.modified_ms(path)

    def free_bytes(self, path: str) -> int:
        self._met("free_bytes", path)
        return self.inner.free_bytes(path) if self.free is None else self.free

    def identity(self, path: str) -> str:
        self._met("identity", path)
        return self.inner.identity(path)

    def _met(self, kind: str, path: str) -> None:
        self.calls[kind] += 1
        self.meet(kind, path)


def no_indexes(kind: str, path: str) -> None:
    """For `WatchedDisk.meet`: there is no room for any index."""
    if kind in ("create", "rename") and ".idx" in path:
        raise OSError(errno.ENOSPC, "no room")


class WatchedFile:
    """A file of a `WatchedDisk`."""

    def __init__(self, inner: File, disk: WatchedDisk) -> None:
        self.path = inner.path
        self._inner = inner
        self._disk = disk

    def read_at(self, length: int, position: int) -> bytes:
        self._disk._met("read", self.path)
        return self._inner.read_at(length, position)

    def write_at(self, data: Bytes, position: int) -> int:
        self._disk._met("write", self.path)
        return self._inner.write_at(data, position)

    def truncate(self, size: int) -> None:
        self._disk._met("truncate", self.path)
        self._inner.truncate(size)

    def size(self) -> int:
        return self._inner.size()

    def sync(self) -> None:
        self._disk._met("sync", self.path)
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()
