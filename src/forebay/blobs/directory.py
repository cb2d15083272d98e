"""Sealed segments in a directory, on a local or a shared file system.

A new object is written under a temporary name, synced, and only then given its key, so a key always leads to
whole bytes. The etag is a hash of the size and of samples of the content (all of it, if small): it survives
a copy of the directory, and segments differ in their first bytes, where their salt is. On NFS before version
4.1 an answer may get lost and the repeated link be answered "exists": one that compares by content is not deceived.
Knows the disk's Protocols; knows nothing of what the objects mean.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import posixpath
from collections.abc import Iterable, Iterator, Sequence

from forebay.blobs.ahead import in_order, spans
from forebay.blobs.mounts import probe_directory
from forebay.blobs.seam import (
    AHEAD,
    CHUNK_BYTES,
    BlobChanged,
    BlobMissing,
    Capabilities,
    Denied,
    Put,
    Stat,
    check_key,
    check_prefix,
    check_range,
    is_key,
)
from forebay.clock import Clock
from forebay.disk import Disk, File, make_directories, write_all
from forebay.errors import Closed, ForebayError, Indeterminate, Invalid, Unavailable
from forebay.records import Bytes

UPLOADS = ".uploads"
SAMPLE_BYTES = 4096
WRITE_BYTES = 1024 * 1024
NAMES_TRIED_MAX = 1000
FOLDERS_MAX = 10_000
"""So many folders are known to last; with one more all of them are looked at again."""


class DirectoryStore:
    """A `BlobStore` below `root`, which `open` or `probe` create if missing, and nothing else does."""

    def __init__(self, root: str, *, disk: Disk, clock: Clock) -> None:
        self.name = f"directory {root}"
        self._root = root.rstrip("/") or "/"
        self._uploads = posixpath.join(self._root, UPLOADS)
        self._disk = disk
        self._clock = clock
        self._durable: set[str] = set()
        """Folders whose names are known to last."""
        self._closed = False

    def open(self) -> DirectoryStore:
        """Make the directory; returns itself."""
        with self._named("make the directory"):
            try:
                self._make_durable(self._uploads)
            except (FileExistsError, NotADirectoryError):
                raise Invalid(f"{self.name}: a file is in its place or above it: name another directory") from None
        return self

    def is_begun(self) -> bool:
        """Whether anything of a store is here. An empty directory may be the place of a mount that is away."""
        self._alive()
        with self._named("look at the directory"):
            return self._disk.exists(self._uploads) or bool(self._keys_in(""))

    def put_if_absent(self, key: str, data: Bytes) -> Put:
        path = self._path(key)
        temporary = self._written(key, [data])
        self._make_parent(path, temporary)
        try:
            # Commit point: the link fails if the key is taken, so one of all writers gets it, with whole bytes.
            self._disk.link(temporary, path)
            created = True
        except FileExistsError:
            created = False
        except OSError as error:
            raise self._undecided(key, error) from error
        finally:
            self._forget(temporary)
        # Also for the loser: the winner may not have come so far yet, and we are about to say that it is there.
        self._sync_folder_of(path, key)
        stat = self.stat(key)
        if stat is None:
            raise Unavailable(f"{self.name}: {key} was there and was deleted meanwhile; try again")
        return Put(created, stat)

    def upload(self, key: str, source: Iterable[Bytes]) -> Stat:
        path = self._path(key)
        temporary = self._written(key, source)
        self._make_parent(path, temporary)
        try:
            # Commit point: the key leads to the new bytes as a whole; what it held before had the same content.
            self._disk.rename(temporary, path)
        except OSError as error:
            self._forget(temporary)
            raise self._undecided(key, error) from error
        self._sync_folder_of(path, key)
        stat = self.stat(key)
        if stat is None:
            raise Unavailable(f"{self.name}: {key} was deleted while it was being stored; try again")
        return stat

    def get_range(self, key: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        check_range(start, stop)
        with self._opened(key, etag) as file:
            return _read(file, start, stop)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None) -> list[bytes]:
        for start, stop in ranges:
            check_range(start, stop)
        with self._opened(key, etag) as file:
            return [_read(file, start, stop) for start, stop in ranges]

    def read(
        self,
        key: str,
        start: int,
        stop: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        ahead: int = AHEAD,  # unused: the system reads ahead by itself
        etag: str | None = None,
    ) -> Iterator[bytes]:
        check_range(start, stop)
        pieces = spans(start, stop, chunk_bytes)
        with self._opened(key, etag) as file:
            yield from in_order(lambda first, end: _read(file, first, end), pieces)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        folder = check_prefix(prefix)
        waiting = [folder] if folder else [*(self._keys_in("") or ())]
        while waiting:
            key = waiting.pop()
            keys = self._keys_in(key)
            if keys is not None:
                waiting.extend(reversed(keys))
            elif key != folder and (stat := self.stat(key)) is not None:
                yield stat

    def stat(self, key: str) -> Stat | None:
        try:
            with self._opened(key, None) as file:
                size = file.size()
                etag = _etag(file, size)
                try:
                    modified_ms = self._disk.modified_ms(file.path)
                except FileNotFoundError:
                    return None
                return Stat(key, size, etag, None, modified_ms)
        except BlobMissing:
            return None

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._named(f"delete {key}"):
            try:
                self._disk.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            except OSError:
                if self._names(key) is not None:
                    return
                raise
            self._disk.sync_directory(posixpath.dirname(path))

    def probe(self, *, seconds_max: float | None = None) -> Capabilities:
        self._alive()
        self.open()
        with self._named("probe the file system"):
            return probe_directory(self._disk, self._uploads, self.name, self._clock.random_bytes(8).hex())

    def abort_stale_uploads(self, older_than_s: float) -> int:
        self._alive()
        before_ms = self._clock.now_ms() - int(older_than_s * 1000)
        cleared = 0
        with self._named("clear away uploads"):
            try:
                names = self._disk.list_directory(self._uploads)
            except FileNotFoundError:
                return 0
            for name in names:
                path = posixpath.join(self._uploads, name)
                with contextlib.suppress(FileNotFoundError):
                    if self._disk.modified_ms(path) < before_ms:
                        self._disk.unlink(path)
                        cleared += 1
        return cleared

    def unfinished(self) -> Sequence[tuple[str, int]]:
        """The files that uploads which are under way, or that a crash cut short, have written: path and when (ms)."""
        self._alive()
        found = []
        with self._named("list uploads"):
            names = self._disk.list_directory(self._uploads) if self._disk.exists(self._uploads) else []
            for name in names:
                path = posixpath.join(self._uploads, name)
                with contextlib.suppress(FileNotFoundError):
                    found.append((path, self._disk.modified_ms(path)))
        return found

    def close(self) -> None:
        self._closed = True

    def _written(self, key: str, source: Iterable[Bytes]) -> str:
        """The bytes of `source`, durable under a temporary name; nothing of them stays if that fails.

        What the source raises passes as it is: it is no failure of this store.
        """
        storing = f"store {key}"
        with self._named(storing):
            if self._uploads not in self._durable:
                if not self.is_begun():
                    raise Unavailable(f"{self.name} is no store: mount it, or correct the settings that name it")
                self._make_durable(self._uploads)
            file = self._temporary()
        path = file.path
        try:
            try:
                position = 0
                for piece in source:
                    with self._named(storing):
                        position += _write(file, piece, position)
                with self._named(storing):
                    # Durable before it has its key: else the key could lead to an empty or half-written object.
                    file.sync()
            finally:
                file.close()
        except BaseException:
            self._forget(path)
            raise
        return path

    def _temporary(self) -> File:
        """A new file to write to. A name may be taken by a leftover, if chance is made to repeat itself."""
        for _ in range(NAMES_TRIED_MAX):
            with contextlib.suppress(FileExistsError):
                return self._disk.create(posixpath.join(self._uploads, f"{self._clock.random_bytes(16).hex()}.tmp"))
        raise OSError(errno.EEXIST, f"no temporary name was free in {NAMES_TRIED_MAX} tries", self._uploads)

    def _make_parent(self, path: str, temporary: str) -> None:
        parent = posixpath.dirname(path)
        if parent in self._durable:
            return
        try:
            with self._named(f"make {parent}"):
                self._make_durable(parent)
        except ForebayError:
            self._forget(temporary)
            raise

    def _make_durable(self, folder: str) -> None:
        """Make the folder and see that its name lasts: one that exists may be the work of a process just killed."""
        steps = [folder]
        while steps[-1] != self._root and posixpath.dirname(steps[-1]) != steps[-1]:
            steps.append(posixpath.dirname(steps[-1]))
        for step in reversed(steps):
            if step not in self._durable:
                make_directories(self._disk, step)
        if len(self._durable) >= FOLDERS_MAX:
            # Shards come and go: those in use are made known again by their next objects.
            self._durable.clear()
        self._durable.update(steps)

    def _sync_folder_of(self, path: str, key: str) -> None:
        try:
            self._disk.sync_directory(posixpath.dirname(path))
        except OSError as error:
            raise self._undecided(key, error) from error

    def _undecided(self, key: str, error: OSError) -> Indeterminate | Unavailable:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError):
            self._durable.clear()
            return Unavailable(f"{self.name}: the folder of {key} was removed meanwhile ({reason}): try again")
        return Indeterminate(
            f"{self.name}: {key} may or may not be stored ({reason}): compare what is there by content"
        )

    def _forget(self, temporary: str) -> None:
        # What stays is cleared away by `abort_stale_uploads`.
        with contextlib.suppress(OSError):
            self._disk.unlink(temporary)

    def _names(self, key: str) -> Sequence[str] | None:
        """What the folder holds; `None` if it is none."""
        self._alive()
        with self._named(f"list {key or 'everything'}"):
            try:
                return self._disk.list_directory(posixpath.join(self._root, key))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _keys_in(self, folder: str) -> Sequence[str] | None:
        """What may be keys, or lead to some; `None` if it is no folder. Files of others are none of ours.

        There may be some: NFS keeps a file that is deleted while it is read as `.nfs…` beside it.
        """
        names = self._names(folder)
        if names is None:
            return None
        keys = (f"{folder}/{name}" if folder else name for name in names)
        return [key for key in keys if is_key(key)]

    @contextlib.contextmanager
    def _opened(self, key: str, etag: str | None) -> Iterator[File]:
        path = self._path(key)
        with self._named(f"read {key}"):
            try:
                file = self._disk.open(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise BlobMissing(f"{self.name} has no object {key}") from None
            try:
                if etag is not None and (found := _etag(file, file.size())) != etag:
                    raise BlobChanged(f"{self.name}: {key} is not the object it was (etag {found}, expected {etag})")
                yield file
            except OSError as error:
                # Only of a file that was open: a whole mount may have become stale, too.
                if error.errno != errno.ESTALE:
                    raise
                raise BlobChanged(f"{self.name}: cannot read {key}: the file was replaced meanwhile") from error
            finally:
                file.close()

    @contextlib.contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Errors of the disk as errors of ours; those of others pass."""
        try:
            yield
        except ForebayError:
            raise
        except PermissionError as error:
            raise Denied(
                f"{self.name}: may not {doing}: {error.strerror}; look at the rights of the directory"
            ) from error
        except OSError as error:
            raise Unavailable(f"{self.name}: cannot {doing}: {error.strerror or error}") from error

    def _path(self, key: str) -> str:
        self._alive()
        return posixpath.join(self._root, check_key(key))

    def _alive(self) -> None:
        if self._closed:
            raise Closed(f"{self.name} was closed: open another")


def _write(file: File, piece: Bytes, position: int) -> int:
    view = memoryview(piece).cast("B")
    for start in range(0, len(view), WRITE_BYTES):
        write_all(file, view[start : start + WRITE_BYTES], position + start)
    return len(view)


def _read(file: File, start: int, stop: int) -> bytes:
    return file.read_at(stop - start, start) if stop > start else b""


def _etag(file: File, size: int) -> str:
    """A name for the content: of all of it if it is small, else of its beginning, middle and end."""
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=12)
    if size <= 3 * SAMPLE_BYTES:
        digest.update(file.read_at(size, 0))
    else:
        for position in (0, size // 2, size - SAMPLE_BYTES):
            digest.update(file.read_at(SAMPLE_BYTES, position))
    return digest.hexdigest()
