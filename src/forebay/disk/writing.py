"""Steps on a disk that several rooms take in the same order. Knows the Protocols only."""

from __future__ import annotations

import contextlib
import errno
import posixpath

from forebay.disk.seam import Disk, File
from forebay.records import Bytes

TEMPORARY_SUFFIX = ".tmp"


def write_all(file: File, data: Bytes, position: int) -> None:
    """Write every byte at `position`, going on after short writes. A write that takes nothing is an `OSError`."""
    length = data.nbytes if isinstance(data, memoryview) else len(data)
    taken = file.write_at(data, position)
    if taken != length:
        write_rest(file, data, position, taken)


def write_rest(file: File, data: Bytes, position: int, taken: int) -> None:
    """Go on after a write at `position` that took so many bytes of `data`, fewer than all, as `write_all`."""
    rest = memoryview(data).cast("B")
    while True:
        if taken <= 0:
            raise OSError(errno.EIO, f"the disk took none of {len(rest)} bytes at {position}", file.path)
        rest = rest[taken:]
        position += taken
        if not rest:
            return
        taken = file.write_at(rest, position)


def replace_file(disk: Disk, path: str, data: Bytes) -> None:
    """Give the small file `path` new content: after a crash it holds the old bytes or the new, never a mix.

    When it returns, the new content is durable under its name. A leftover of an earlier attempt is replaced.
    """
    temporary = path + TEMPORARY_SUFFIX
    file = _create_afresh(disk, temporary)
    try:
        try:
            write_all(file, data, 0)
            # Durable before it has the name: else the name could lead to an empty or half-written file.
            file.sync()
        finally:
            file.close()
        # Commit point: from here on the name leads to the new bytes, or to the old ones until the next line holds.
        disk.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    disk.sync_directory(posixpath.dirname(path) or ".")


def make_directories(disk: Disk, path: str) -> None:
    """Create `path` and whatever is missing above it; when it returns, their names are durable."""
    missing = []
    while not disk.exists(path):
        missing.append(path)
        path = posixpath.dirname(path) or "."
    # The lowest that exists may be the work of a process killed before it could sync. One above it that
    # we may not read is not ours either.
    with contextlib.suppress(PermissionError):
        disk.sync_directory(posixpath.dirname(path) or ".")
    for made in reversed(missing):
        disk.make_directory(made)
        disk.sync_directory(posixpath.dirname(made) or ".")


def _create_afresh(disk: Disk, path: str) -> File:
    try:
        return disk.create(path)
    except FileExistsError:
        disk.unlink(path)
        return disk.create(path)
