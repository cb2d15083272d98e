"""What happened to a simulated disk, in order: operations on inodes and names, and what the test noted between.

Pure values. Knows nothing of crashes; `durability` reads a trace and says what was durable when.
Inode numbers are never reused, so an operation means the same whenever it is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

ROOT = 1


class Create(NamedTuple):
    """A new, empty file."""

    inode: int
    directory: int
    name: str


class TracedWrite(NamedTuple):
    """Bytes that a `write_at` took."""

    inode: int
    position: int
    data: bytes


class Truncate(NamedTuple):
    inode: int
    size: int


class Sync(NamedTuple):
    inode: int


class SyncFailed(NamedTuple):
    """The system reported the failure and forgot it: what was unsynced stays in doubt, whatever is synced later."""

    inode: int


class Discard(NamedTuple):
    """The system dropped the pages whose sync had failed: those bytes are gone, for readers too."""

    inode: int


class Rename(NamedTuple):
    inode: int
    source_directory: int
    source_name: str
    directory: int
    name: str


class Link(NamedTuple):
    inode: int
    directory: int
    name: str


class Unlink(NamedTuple):
    directory: int
    name: str


class MakeDirectory(NamedTuple):
    inode: int
    directory: int
    name: str


class RemoveDirectory(NamedTuple):
    directory: int
    name: str


class SyncDirectory(NamedTuple):
    directory: int


class SyncFilesystem(NamedTuple):
    pass


class Note(NamedTuple):
    """Something the test wants to remember at this point, such as an acknowledgement."""

    kind: str
    payload: object


Operation: TypeAlias = (
    Create
    | TracedWrite
    | Truncate
    | Sync
    | SyncFailed
    | Discard
    | Rename
    | Link
    | Unlink
    | MakeDirectory
    | RemoveDirectory
    | SyncDirectory
    | SyncFilesystem
    | Note
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Names and bytes at rest. Its dictionaries are shared between disks and never changed."""

    files: dict[int, bytes]
    directories: dict[int, dict[str, int]]


@dataclass(slots=True, kw_only=True)
class Trace:
    """Everything since `start`. It only grows, so a prefix means the same for ever.

    `begins` is where the present life of the process began: 0, or after a kill the length of the life before.
    `boot` names the present boot of the machine.
    """

    start: Image
    operations: list[Operation] = field(default_factory=list)
    earlier_notes: tuple[Note, ...] = ()
    begins: int = 0
    boot: str = "boot-1"

    def __len__(self) -> int:
        return len(self.operations)

    def notes(self, at: int | None = None) -> tuple[Note, ...]:
        """What was noted before operation `at` (default: until now), earlier lives included."""
        return self.earlier_notes + tuple(step for step in self.operations[:at] if isinstance(step, Note))

    def prefixes(self) -> range:
        """Every length at which the present life may have been cut short."""
        return range(self.begins, len(self.operations) + 1)
