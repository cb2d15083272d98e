"""A file system in memory: inodes, names and bytes, as a running process sees them.

Knows paths and their rules; knows nothing of durability, faults or processes. Every change returns
the operation that a trace keeps. Bytes of an image are shared until the first write to them.
"""

from __future__ import annotations

import errno
from collections import Counter

from forebay.records import Bytes
from forebay.testing.simulated import trace
from forebay.testing.simulated.clock import STARTED_MS
from forebay.testing.simulated.trace import ROOT, Image


class Content:
    """The bytes of one file; immutable ones are shared with an image and copied at the first change."""

    __slots__ = ("data", "inode", "modified_ms")

    def __init__(self, inode: int, data: bytes | bytearray) -> None:
        self.inode = inode
        self.data = data
        self.modified_ms = STARTED_MS

    def read(self, length: int, position: int) -> bytes:
        with memoryview(self.data) as view:
            return bytes(view[position : position + length])

    def write(self, data: bytes, position: int) -> None:
        mine = self._own()
        if position > len(mine):
            mine.extend(bytes(position - len(mine)))
        mine[position : position + len(data)] = data

    def truncate(self, size: int) -> None:
        mine = self._own()
        if size < len(mine):
            del mine[size:]
        else:
            mine.extend(bytes(size - len(mine)))

    def _own(self) -> bytearray:
        if isinstance(self.data, bytes):
            self.data = bytearray(self.data)
        return self.data


class Volume:
    """The tree of names and the files behind it."""

    def __init__(self, image: Image, *, next_inode: int, free: int) -> None:
        self.files = {inode: Content(inode, data) for inode, data in image.files.items()}
        self.directories = {inode: dict(entries) for inode, entries in image.directories.items()}
        self.next_inode = next_inode
        self.free = free
        self._links = Counter(inode for names in self.directories.values() for inode in names.values())

    def image(self) -> Image:
        """What a process would see now, as bytes that no longer change."""
        files = {inode: bytes(content.data) for inode, content in self.files.items()}
        return Image(files=files, directories={inode: dict(names) for inode, names in self.directories.items()})

    def find(self, path: str) -> int:
        """The inode that `path` leads to."""
        inode = ROOT
        for name in _parts(path):
            entries = self.directories.get(inode)
            if entries is None:
                raise NotADirectoryError(errno.ENOTDIR, "a part of the path is not a directory", path)
            if name not in entries:
                raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
            inode = entries[name]
        return inode

    def find_file(self, path: str) -> Content:
        inode = self.find(path)
        if inode in self.directories:
            raise IsADirectoryError(errno.EISDIR, "is a directory, not a file", path)
        return self.files[inode]

    def find_directory(self, path: str) -> int:
        inode = self.find(path)
        if inode not in self.directories:
            raise NotADirectoryError(errno.ENOTDIR, "is a file, not a directory", path)
        return inode

    def exists(self, path: str) -> bool:
        try:
            self.find(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def create(self, path: str) -> trace.Create:
        directory, name = self._free_place(path)
        inode = self._new_inode()
        self.files[inode] = Content(inode, b"")
        self._name(inode, directory, name)
        return trace.Create(inode, directory, name)

    def write(self, content: Content, data: Bytes, position: int, limit: int | None) -> trace.TracedWrite:
        """Take up to `limit` bytes, and no more than there is room for."""
        if position < 0:
            raise OSError(errno.EINVAL, "a position cannot be negative")
        taken = bytes(data)[:limit]
        size = len(content.data)
        room = max(0, size - position) + self.free
        if len(taken) > room:
            if room == 0:
                raise OSError(errno.ENOSPC, "no space left on the simulated disk")
            taken = taken[:room]
        if taken:
            content.write(taken, position)
        self.free -= max(0, position + len(taken) - size) if taken else 0
        return trace.TracedWrite(content.inode, position, taken)

    def truncate(self, content: Content, size: int) -> trace.Truncate:
        if size < 0:
            raise OSError(errno.EINVAL, "a size cannot be negative")
        if size < len(content.data):
            self.free += len(content.data) - size
        content.truncate(size)
        return trace.Truncate(content.inode, size)

    def rename(self, source: str, target: str) -> trace.Rename | None:
        """`None` if both are names of one file already, which the system leaves as it is."""
        source_directory, source_name = self._place(source)
        directory, name = self._place(target)
        inode = self.find(source)
        replaced = self.directories[directory].get(name)
        _check_depth(source, target)
        if replaced == inode:
            return None
        self._check_rename(inode, replaced, source, target)
        del self.directories[source_directory][source_name]
        self.directories[directory][name] = inode
        self._drop(replaced)
        return trace.Rename(inode, source_directory, source_name, directory, name)

    def link(self, source: str, target: str) -> trace.Link:
        inode = self.find(source)
        directory, name = self._free_place(target)
        if inode in self.directories:
            raise PermissionError(errno.EPERM, "a directory has one name", source)
        self._name(inode, directory, name)
        return trace.Link(inode, directory, name)

    def unlink(self, path: str) -> trace.Unlink:
        inode = self.find_file(path).inode
        directory, name = self._place(path)
        del self.directories[directory][name]
        self._drop(inode)
        return trace.Unlink(directory, name)

    def make_directory(self, path: str) -> trace.MakeDirectory | None:
        """`None` if it is there already."""
        if self.exists(path) and self.find(path) in self.directories:
            return None
        directory, name = self._free_place(path)
        inode = self._new_inode()
        self.directories[inode] = {}
        self.directories[directory][name] = inode
        return trace.MakeDirectory(inode, directory, name)

    def remove_directory(self, path: str) -> trace.RemoveDirectory:
        inode = self.find_directory(path)
        directory, name = self._place(path)
        if self.directories[inode]:
            raise OSError(errno.ENOTEMPTY, "the directory is not empty", path)
        del self.directories[inode]
        del self.directories[directory][name]
        return trace.RemoveDirectory(directory, name)

    def _place(self, path: str) -> tuple[int, str]:
        """The directory that holds, or would hold, the last name of `path`."""
        parts = _parts(path)
        if not parts:
            raise OSError(errno.EBUSY, "the root cannot be changed", path)
        return self.find_directory("/".join(parts[:-1])), parts[-1]

    def _free_place(self, path: str) -> tuple[int, str]:
        if not _parts(path):
            raise FileExistsError(errno.EEXIST, "the name is taken", path)
        directory, name = self._place(path)
        if name in self.directories[directory]:
            raise FileExistsError(errno.EEXIST, "the name is taken", path)
        return directory, name

    def _check_rename(self, inode: int, replaced: int | None, source: str, target: str) -> None:
        if inode not in self.directories:
            if replaced in self.directories:
                raise IsADirectoryError(errno.EISDIR, "a file cannot replace a directory", source, None, target)
            return
        if replaced is not None and replaced not in self.directories:
            raise NotADirectoryError(errno.ENOTDIR, "a directory cannot replace a file", source, None, target)
        if replaced is not None and self.directories[replaced]:
            raise OSError(errno.ENOTEMPTY, "the directory is not empty", source, None, target)

    def _drop(self, inode: int | None) -> None:
        """One name less: a file that has lost its last one is gone, but open handles keep the bytes they hold."""
        if inode is None:
            return
        if inode in self.directories:
            del self.directories[inode]
            return
        self._links[inode] -= 1
        if not self._links[inode]:
            self.free += len(self.files.pop(inode).data)

    def _name(self, inode: int, directory: int, name: str) -> None:
        self.directories[directory][name] = inode
        self._links[inode] += 1

    def _new_inode(self) -> int:
        self.next_inode += 1
        return self.next_inode - 1


def _check_depth(source: str, target: str) -> None:
    """Neither may lie inside the other."""
    sources, targets = _parts(source), _parts(target)
    if len(targets) > len(sources) and targets[: len(sources)] == sources:
        raise OSError(errno.EINVAL, "a directory cannot move into itself", source, None, target)
    if len(sources) > len(targets) and sources[: len(targets)] == targets:
        raise OSError(errno.ENOTEMPTY, "the directory is not empty", source, None, target)


def _parts(path: str) -> list[str]:
    """The names of a path. It may be relative: the simulated process works in the root."""
    parts = [part for part in path.split("/") if part and part != "."]
    if ".." in parts:
        raise OSError(errno.EINVAL, "the simulated disk does not climb", path)
    return parts
