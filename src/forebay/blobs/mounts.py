"""What a mounted file system really does: links, renames, directory syncs, locks. Tried, not guessed from its name.

Network mounts differ: NFS has all of it, SMB often has no hard links, some have no locks or no directory sync.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator

from forebay.blobs.seam import Capabilities
from forebay.disk import Disk, write_all
from forebay.errors import Unsupported


def probe_directory(disk: Disk, directory: str, store: str, token: str) -> Capabilities:
    """Try everything in `directory`, which exists; `Unsupported` if objects could not be kept safely there."""
    names = [posixpath.join(directory, f"{token}.probe{number}") for number in range(4)]
    try:
        _try_link(disk, names, store)
        _try_rename(disk, names, store)
        _try_sync(disk, directory, store)
        return Capabilities(store=store, exclusive_create=True, notes=tuple(_try_lock(disk, names[3])))
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                disk.unlink(name)


def _try_link(disk: Disk, names: list[str], store: str) -> None:
    _make(disk, names[0], b"first")
    _make(disk, names[1], b"second")
    try:
        disk.link(names[0], names[2])
    except OSError as error:
        raise Unsupported(
            f"{store}: this file system makes no hard links ({error.strerror or error}), so two writers could not be "
            "distinguished: take a local one, NFS, or an object store"
        ) from error
    with contextlib.suppress(FileExistsError):
        disk.link(names[1], names[2])
        raise Unsupported(f"{store}: a second writer was let to create the same name: take another file system")


def _try_rename(disk: Disk, names: list[str], store: str) -> None:
    disk.rename(names[1], names[2])
    if _content(disk, names[2]) != b"second":
        raise Unsupported(f"{store}: a rename did not replace its target as a whole: take another file system")


def _try_sync(disk: Disk, directory: str, store: str) -> None:
    try:
        disk.sync_directory(directory)
    except OSError as error:
        raise Unsupported(
            f"{store}: this file system cannot sync a directory ({error.strerror or error}), so a stored object could "
            "lose its name: take a local one, NFS, or an object store"
        ) from error


def _try_lock(disk: Disk, name: str) -> Iterator[str]:
    """Objects need no locks; the log does, if it is kept there as well."""
    try:
        first = disk.lock(name)
    except OSError as error:
        yield f"no file locks here ({error.strerror or error}): keep the log and its metadata elsewhere"
        return
    second = disk.lock(name)
    if first is None or second is not None:
        yield "file locks do not exclude each other here: keep the log and its metadata elsewhere"
    for lock in (first, second):
        if lock is not None:
            lock.release()


def _make(disk: Disk, path: str, data: bytes) -> None:
    file = disk.create(path)
    try:
        write_all(file, data, 0)
    finally:
        file.close()


def _content(disk: Disk, path: str) -> bytes:
    file = disk.open(path)
    try:
        return file.read_at(16, 0)
    finally:
        file.close()
