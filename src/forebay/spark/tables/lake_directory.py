"""A directory of Parquet files as a target: `data/` has the rows, `bad/` the bad ones, `_forebay/` the commits.

A commit is a numbered manifest that exactly one can create. Files wait in `_staged/`, where readers of Parquet do not
look, and get their place behind the commit; a run that is killed in between is finished by the next.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from forebay.blobs import DirectoryStore
from forebay.clock import SystemClock
from forebay.decoders import decoder
from forebay.disk import SystemDisk, make_directories
from forebay.errors import Conflict, Corrupt, Indeterminate, Unsupported
from forebay.spark.tables.file_writer import FILE
from forebay.spark.tables.targets import CommitRight, Marks, TableBatch, files_of
from forebay.spark.tables.upkeep import clear_uploads

DATA: Final = "data"
BAD: Final = "bad"
STAGED: Final = "_staged"
COMMITS: Final = "_forebay"


class TableCommit(msgspec.Struct, frozen=True, kw_only=True):
    """One commit: what it brought, and how far the directory has the topic from then on."""

    number: int
    batch: TableBatch
    marks: Marks
    committed_at: int


class DirectoryTarget:
    """Parquet files below a directory that driver and executors share."""

    def __init__(self, root: str, *, grace_s: int, where: str = "") -> None:
        """Files that no run has touched for `grace_s` are of runs that are over. Commits keep `where`, the condition
        that the records meet.
        """
        path = root.removeprefix(FILE)
        if "://" in path:
            raise Unsupported(f"{root} is no directory: Parquet files go to a directory, an object store takes a table")
        # Tasks run elsewhere: what the path is relative to is decided here.
        path = str(Path(path).absolute())
        self.name = path
        self._root = path
        self._grace_s = grace_s
        self._where = where
        self._disk = SystemDisk()
        self._clock = SystemClock()
        self._store = DirectoryStore(path, disk=self._disk, clock=self._clock)
        self._last: TableCommit | None = None
        self._placed = 0
        """The number of the last commit whose files are known to be in place."""

    def recover(self) -> None:
        """Bring committed files into place, then remove after their grace the others that wait, and old commits."""
        self._store.open()
        for folder in (DATA, BAD, STAGED, COMMITS):
            make_directories(self._disk, f"{self._root}/{folder}")
        self._last = self._newest()
        if self._last is not None:
            self.place_files(self._last)
        for folder in (self._root, f"{self._root}/{STAGED}"):
            clear_uploads(f"{FILE}{folder}", self._grace_s)
        self._remove_aged(STAGED, self._names(STAGED, ".parquet"))
        # Behind the files: a job that would commit for a second time what one of these brought finds its own gone.
        self._remove_aged(COMMITS, self._names(COMMITS, ".json")[:-1])

    def _names(self, folder: str, suffix: str) -> list[str]:
        path = f"{self._root}/{folder}"
        names = self._disk.list_directory(path) if self._disk.exists(path) else []
        return sorted(name for name in names if name.endswith(suffix))

    def _remove_aged(self, folder: str, names: Sequence[str]) -> None:
        until_ms = self._clock.now_ms() - self._grace_s * 1000
        for name in names:
            path = f"{self._root}/{folder}/{name}"
            if self._disk.modified_ms(path) <= until_ms:
                self._disk.unlink(path)

    def marks(self) -> Marks:
        self._last = self._newest()
        return self._last.marks if self._last is not None else Marks(where=None)

    def folders(self) -> tuple[str, str]:
        staged = f"{FILE}{self._root}/{STAGED}"
        return staged, staged

    def file_schema(self, schema: pa.Schema, *, bad: bool) -> pa.Schema:
        del bad  # files of a directory have no ids
        return schema

    def commit(self, batch: TableBatch, lease: CommitRight) -> None:
        before = self._last.marks if self._last is not None else Marks(where=self._where)
        number = self._last.number + 1 if self._last is not None else 1
        marks = Marks(
            topic_id=batch.topic_id, good=batch.ends(before.good), bad=batch.ends(before.bad), where=before.where
        )
        commit = TableCommit(number=number, batch=batch, marks=marks, committed_at=self._clock.now_ms())
        if self._last is not None and self._last.number != self._placed:
            # By one that had lost its lease, and may have been killed then: behind this commit no job looks for it.
            self.place_files(self._last)
        lease.check()
        gone = [written.path for written in batch.files if not self._disk.exists(written.path.removeprefix(FILE))]
        if gone:
            raise Conflict(f"{gone[0]} was removed before it was committed, {self._grace_s} s on: run it again")
        # Commit point: the job that creates this object has brought these offsets; no other can any more.
        if not self.create_once(f"{COMMITS}/{number:020d}.json", msgspec.json.encode(commit)):
            raise Conflict(f"{self.name}: commit {number} was made by another job meanwhile: run it again")
        self._last = commit
        self.place_files(commit)

    def close(self) -> None:
        self._store.close()
        self._disk.close()

    def create_once(self, key: str, content: bytes) -> bool:
        try:
            return bool(self._store.put_if_absent(key, content))
        except Indeterminate:
            stat = self._store.stat(key)
            return stat is not None and self._store.get_range(key, 0, stat.size) == content

    def _newest(self) -> TableCommit | None:
        folder = f"{self._root}/{COMMITS}"
        numbered = self._names(COMMITS, ".json")
        if not numbered:
            return None
        with contextlib.closing(self._disk.open(f"{folder}/{numbered[-1]}")) as file:
            content = file.read_at(file.size(), 0)
        try:
            return decoder(TableCommit).decode(content)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"{folder}/{numbered[-1]} is no commit ({error}): restore it from a backup") from error

    def place_files(self, commit: TableCommit) -> None:
        """On return the files of a commit are where readers look."""
        for folder, is_bad in ((DATA, False), (BAD, True)):
            for written in files_of(commit.batch, bad=is_bad):
                name = posixpath.basename(written.path)
                with contextlib.suppress(FileNotFoundError):
                    self._disk.rename(f"{self._root}/{STAGED}/{name}", f"{self._root}/{folder}/{name}")
            self._disk.sync_directory(f"{self._root}/{folder}")
        self._disk.sync_directory(f"{self._root}/{STAGED}")
        self._placed = commit.number
