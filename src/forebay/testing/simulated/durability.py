"""What of a trace was durable, and what was merely written: the model behind every crash state.

Pure; reads a trace and nothing else. We assume the worst that a journalling file system allows:

- Bytes are durable after a sync of their file, names after a sync of their directory. A synced file
  whose name was not synced is gone. (ext4 often keeps it; nothing may rest on that.)
- Unsynced changes of names are independent of one another, across directories and within one, but a
  rename moves its file: it has happened or it has not. When only the directory it went to was
  synced, the old name may still be there too.
- Bytes whose sync failed stay in doubt even if a later sync of the file succeeds: the system has
  reported the failure and marked the pages clean.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from forebay.testing.simulated import trace
from forebay.testing.simulated.trace import ROOT, Image, Operation, TracedWrite, Truncate

ByteOperation: TypeAlias = TracedWrite | Truncate
Names: TypeAlias = dict[int, dict[str, int]]


class WriteStanding(enum.Enum):
    """How far a change of bytes has come."""

    PENDING = enum.auto()
    DOUBTFUL = enum.auto()
    DURABLE = enum.auto()


class ByteChange(NamedTuple):
    operation: ByteOperation
    standing: WriteStanding


class FileLedger:
    """One file: its durable bytes, and the changes since, of which some may be durable behind a doubtful one."""

    def __init__(self, durable: bytes) -> None:
        self.durable = durable
        self.changes: list[ByteChange] = []

    def change(self, operation: ByteOperation) -> None:
        self.changes.append(ByteChange(operation, WriteStanding.PENDING))

    def sync(self) -> None:
        self._turn(WriteStanding.DURABLE)
        while self.changes and self.changes[0].standing is WriteStanding.DURABLE:
            self._apply_durable()

    def fail_sync(self) -> None:
        self._turn(WriteStanding.DOUBTFUL)

    def discard(self) -> None:
        self.changes = [change for change in self.changes if change.standing is not WriteStanding.DOUBTFUL]

    def live(self) -> bytes:
        """What a process reads."""
        return replay(self.durable, (change.operation for change in self.changes)) if self.changes else self.durable

    def _turn(self, standing: WriteStanding) -> None:
        self.changes = [
            ByteChange(change.operation, standing) if change.standing is WriteStanding.PENDING else change
            for change in self.changes
        ]

    def _apply_durable(self) -> None:
        operations = [change.operation for change in self.changes]
        count = next((i for i, change in enumerate(self.changes) if change.standing is not WriteStanding.DURABLE), None)
        self.durable = replay(self.durable, operations[:count])
        self.changes = [] if count is None else self.changes[count:]


class NameEntry(NamedTuple):
    """A name in a directory and what it leads to from then on; `None`: nothing."""

    directory: int
    name: str
    inode: int | None


class NameChange:
    """One unsynced change of names: all its entries take effect, or none.

    `source` is the entry that a rename took away; `requires` the change that had put the file there.
    """

    __slots__ = ("entries", "requires", "source")

    def __init__(
        self, *entries: NameEntry, source: NameEntry | None = None, requires: NameChange | None = None
    ) -> None:
        self.entries = list(entries)
        self.source = source
        self.requires = requires

    def required(self) -> NameChange | None:
        """What must have happened too, unless it is durable by now."""
        if self.requires is None or self.source is None:
            return None
        return self.requires if self.requires.names(self.source.directory, self.source.name) else None

    def names(self, directory: int, name: str) -> bool:
        return any(entry.directory == directory and entry.name == name for entry in self.entries)


class DiskState:
    """The state of a whole disk while its trace is replayed, operation by operation."""

    def __init__(self, start: Image) -> None:
        self.files = {inode: FileLedger(content) for inode, content in start.files.items()}
        self.durable: Names = {inode: dict(names) for inode, names in start.directories.items()}
        self.live: Names = {inode: dict(names) for inode, names in start.directories.items()}
        self.pending: list[NameChange] = []
        self.next_inode = max([ROOT, *self.files, *self.live]) + 1

    def apply(self, operation: Operation) -> None:
        """Take one step of the trace."""
        match operation:
            case TracedWrite() | Truncate():
                self.files[operation.inode].change(operation)
            case trace.Sync(inode):
                self.files[inode].sync()
            case trace.SyncFailed(inode):
                self.files[inode].fail_sync()
            case trace.Discard(inode):
                self.files[inode].discard()
            case trace.Create(inode, directory, name):
                self.files[inode] = FileLedger(b"")
                self._add(inode, directory, name)
            case trace.MakeDirectory(inode, directory, name):
                self.durable[inode], self.live[inode] = {}, {}
                self._add(inode, directory, name)
            case trace.Link(inode, directory, name):
                self._add(inode, directory, name)
            case trace.Unlink(directory, name) | trace.RemoveDirectory(directory, name):
                del self.live[directory][name]
                self.pending.append(NameChange(NameEntry(directory, name, None)))
            case trace.Rename():
                self._rename(operation)
            case trace.SyncDirectory(directory):
                self._sync_directory(directory)
            case trace.SyncFilesystem():
                self._sync_everything()
            case trace.Note():
                pass

    def names_after(self, happened: Iterable[NameChange]) -> Names:
        """All directories, if of the pending changes exactly these had happened, in their order."""
        directories = dict(self.durable)
        own: set[int] = set()
        for change in happened:
            for entry in change.entries:
                if entry.directory not in own:
                    own.add(entry.directory)
                    directories[entry.directory] = dict(directories[entry.directory])
                if entry.inode is None:
                    directories[entry.directory].pop(entry.name, None)
                else:
                    directories[entry.directory][entry.name] = entry.inode
        return directories

    def _add(self, inode: int, directory: int, name: str) -> None:
        self.next_inode = max(self.next_inode, inode + 1)
        self.live[directory][name] = inode
        self.pending.append(NameChange(NameEntry(directory, name, inode)))

    def _rename(self, rename: trace.Rename) -> None:
        source = NameEntry(rename.source_directory, rename.source_name, None)
        target = NameEntry(rename.directory, rename.name, rename.inode)
        del self.live[source.directory][source.name]
        self.live[target.directory][target.name] = rename.inode
        placed = (change for change in reversed(self.pending) if change.names(source.directory, source.name))
        self.pending.append(NameChange(source, target, source=source, requires=next(placed, None)))

    def _sync_directory(self, directory: int) -> None:
        for position, change in enumerate(self.pending):
            if change.source is not None and change.source.directory == directory:
                self._make_durable(position)
        self.durable[directory] = dict(self.live[directory])
        for change in self.pending:
            change.entries = [entry for entry in change.entries if entry.directory != directory]
        self.pending = [change for change in self.pending if change.entries]

    def _make_durable(self, position: int) -> None:
        """A rename out of a synced directory is durable where it went, too: no journal loses the file between."""
        for entry in self.pending[position].entries:
            if entry.inode is not None:
                self.durable[entry.directory] = {**self.durable[entry.directory], entry.name: entry.inode}
                for earlier in self.pending[: position + 1]:
                    earlier.entries = [kept for kept in earlier.entries if kept[:2] != entry[:2]]

    def _sync_everything(self) -> None:
        for ledger in self.files.values():
            ledger.sync()
        self.durable = {inode: dict(names) for inode, names in self.live.items()}
        self.pending = []


def replay(content: bytes, operations: Iterable[ByteOperation]) -> bytes:
    """The bytes after these changes."""
    changed = bytearray(content)
    for operation in operations:
        if isinstance(operation, TracedWrite):
            position = operation.position
            if position > len(changed):
                changed.extend(bytes(position - len(changed)))
            changed[position : position + len(operation.data)] = operation.data
        elif operation.size < len(changed):
            del changed[operation.size :]
        else:
            changed.extend(bytes(operation.size - len(changed)))
    return bytes(changed)


def reachable(names: Names) -> Iterator[tuple[str, int]]:
    """Every path below the root and what it leads to, in order; a directory before what it holds."""
    waiting, seen = [("", ROOT)], {ROOT}
    while waiting:
        path, directory = waiting.pop()
        for name in sorted(names[directory]):
            inode = names[directory][name]
            yield f"{path}/{name}", inode
            if inode in names and inode not in seen:
                seen.add(inode)
                waiting.append((f"{path}/{name}", inode))
