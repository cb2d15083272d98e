"""The seam itself: what every other room may ask of a disk, as Protocols.

Knows nothing of how it is done. `SystemDisk` does it with the machine's files, `SimulatedDisk`
(in `forebay.testing`) in memory, with crash states and faults; both pass one contract suite.
"""

from __future__ import annotations

from typing import Protocol

from forebay.records import Bytes


class File(Protocol):
    """An open file. Positions are absolute; there is no file pointer. Safe for concurrent calls."""

    path: str

    def read_at(self, length: int, position: int) -> bytes:
        """Up to `length` bytes from `position`; fewer only at the end of the file.

        Raises `OSError(ESTALE)` if the name now belongs to another file than the one first opened
        and the descriptor had been given back in between.
        """

    def write_at(self, data: Bytes, position: int) -> int:
        """Write at `position` and return how many bytes were taken, which may be fewer than given."""

    def truncate(self, size: int) -> None:
        """Cut or extend (with zeros) to `size`; not durable before `sync`."""

    def size(self) -> int:
        """The file's present size in bytes."""

    def sync(self) -> None:
        """When it returns, all bytes written before and the size are durable (fdatasync). The name is not."""

    def close(self) -> None:
        """Give the descriptor back; harmless when repeated."""


class SyncFailedBefore(OSError):
    """A file has failed an earlier sync: it will never count as synced. Says nothing of other files."""


class Lock(Protocol):
    """An exclusive lock of the operating system, released by `release` or the end of the process."""

    @property
    def identity(self) -> str:
        """Names this boot of the machine and the very file that is locked: no copy of it has the same name."""

    def release(self) -> None: ...


class Disk(Protocol):
    """Files and directories by path (str). Directory changes are durable after `sync_directory` of the parent."""

    def create(self, path: str) -> File:
        """A new, empty file open for reading and writing; `FileExistsError` if the name is taken."""

    def open(self, path: str, *, writable: bool = False, scratch: bool = False) -> File:
        """An existing file; `FileNotFoundError` if there is none.

        What is written to a `scratch` file is never synced: losing it, or an error of writing it out, loses no fact.
        """

    def rename(self, source: str, target: str) -> None:
        """Atomically give `source` the name `target`, replacing what had it."""

    def link(self, source: str, target: str) -> None:
        """A second name for the same file; `FileExistsError` if the name is taken."""

    def unlink(self, path: str) -> None: ...

    def make_directory(self, path: str) -> None:
        """Create one directory; fine if it exists."""

    def remove_directory(self, path: str) -> None:
        """Remove one empty directory."""

    def list_directory(self, path: str) -> list[str]:
        """Names in the directory, sorted; `FileNotFoundError` if there is none."""

    def exists(self, path: str) -> bool: ...

    def sync_directory(self, path: str) -> None:
        """When it returns, all names created, renamed or removed in this directory before are durable."""

    def sync_filesystem(self, path: str) -> None:
        """When it returns, everything written before on the file system that holds `path` is durable.

        `SyncFailedBefore` if only an earlier failure of some file is known: each of the others answers for itself.
        """

    def lock(self, path: str) -> Lock | None:
        """Take the exclusive lock of `path` (created if missing) without waiting; `None` if another holds it."""

    def is_locked(self, path: str) -> bool:
        """Whether a process holds the lock of `path`, seen without taking it or needing to write; not if it is missing.

        Those who ask at the same time do not see each other. For that instant `lock` may answer `None`.
        """

    def modified_ms(self, path: str) -> int:
        """When the file last changed, by the clock of the machine that keeps it, in milliseconds since 1970 UTC."""

    def free_bytes(self, path: str) -> int:
        """Bytes that may still be written on the file system that holds `path`."""

    def identity(self, path: str) -> str:
        """Names this boot of the machine and this mount: equal means the page cache has lived on since."""
