"""Everyone who keeps records in this process, behind one small surface."""

# ruff: noqa: PLC0415 - a peer that is not installed is named as missing

from __future__ import annotations

import contextlib
import importlib.util
import os
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import forebay

FREE = {"wal": {"rotate_bytes_max": 4 * 1024**3}}
"""Everything stays in the active file."""
FRAME_HEAD = 48


KEY = struct.Struct(">Q").pack


def keyed(values: Sequence[bytes], first: int) -> list[tuple[bytes, bytes]]:
    return [(KEY(first + row), value) for row, value in enumerate(values)]


class Store(Protocol):
    """A store of values in order."""

    def prepare(self, values: Sequence[bytes], first: int) -> Any:
        """The batch and where it begins; what a store makes of it (keys, rows) is part of what is timed."""

    def write(self, prepared: Any) -> None:
        """Write one batch, atomically where the store can; durable on return if the store was opened so."""

    def read(self) -> Iterable[object]:
        """Everything with its place, in order, by what the store itself iterates with: what reading is timed by."""

    def values(self) -> Iterator[bytes]:
        """Everything, in order: what is compared."""

    def close(self) -> None: ...


class Forebay:
    """Ours."""

    def __init__(self, path: Path, *, durable: bool, settings: dict[str, object] | None = None) -> None:
        self.log = forebay.open(str(path / "data"), settings)
        self.topic = self.log.create_topic("bench/t", durability="fsync" if durable else "disk", exist_ok=True)

    def prepare(self, values: Sequence[bytes], first: int) -> Any:
        return values

    def write(self, prepared: Any) -> None:
        self.topic.append_many(prepared)

    def read(self) -> Iterable[object]:
        return self.topic.read()

    def values(self) -> Iterator[bytes]:
        return (record.value or b"" for record in self.topic.read())

    def close(self) -> None:
        self.log.close()


class Lmdb:
    def __init__(self, path: Path, *, durable: bool) -> None:
        import lmdb

        self._env = lmdb.open(str(path / "lmdb"), map_size=8 * 1024**3, sync=durable, metasync=durable)

    def prepare(self, values: Sequence[bytes], first: int) -> Any:
        return values, first

    def write(self, prepared: Any) -> None:
        self.put(keyed(*prepared))

    def put(self, pairs: list[tuple[bytes, bytes]], *, append: bool = True) -> None:
        """Write pairs of key and value; keys that follow all others are appended."""
        with self._env.begin(write=True) as transaction:
            transaction.cursor().putmulti(pairs, append=append)

    def read(self) -> Iterable[object]:
        """Its bare cursor, which gives key and value; the transaction ends with it."""
        pairs: Iterable[object] = self._env.begin(buffers=False).cursor().iternext(keys=True, values=True)
        return pairs

    def values(self) -> Iterator[bytes]:
        with self._env.begin() as transaction:
            yield from transaction.cursor().iternext(keys=False)

    def close(self) -> None:
        self._env.close()


class LmdbKeyed(Lmdb):
    """LMDB given its keys beforehand, at no cost: the most it can do."""

    def prepare(self, values: Sequence[bytes], first: int) -> Any:
        return keyed(values, first)

    def write(self, prepared: Any) -> None:
        self.put(prepared)


class RocksDb:
    def __init__(self, path: Path, *, durable: bool) -> None:
        import rocksdict

        self._rocks = rocksdict
        self._db = rocksdict.Rdict(str(path / "rocks"), rocksdict.Options(raw_mode=True))
        self._options = rocksdict.WriteOptions()
        self._options.sync = durable

    def prepare(self, values: Sequence[bytes], first: int) -> Any:
        return values, first

    def write(self, prepared: Any) -> None:
        values, first = prepared
        batch = self._rocks.WriteBatch(raw_mode=True)
        put = batch.put
        for offset, value in enumerate(values, first):
            put(KEY(offset), value)
        self._db.write(batch, self._options)

    def read(self) -> Iterable[object]:
        found: Iterable[object] = self._db.items()
        return found

    def values(self) -> Iterator[bytes]:
        yield from self._db.values()

    def close(self) -> None:
        self._db.close()


class Sqlite:
    def __init__(self, path: Path, *, durable: bool) -> None:
        self._db = sqlite3.connect(path / "sqlite.db", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'OFF'}")
        self._db.execute("CREATE TABLE IF NOT EXISTS log (offset INTEGER PRIMARY KEY, value BLOB)")

    def prepare(self, values: Sequence[bytes], first: int) -> Any:
        return values, first

    def write(self, prepared: Any) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO log VALUES (?, ?)", enumerate(*prepared))
        self._db.execute("COMMIT")

    def read(self) -> Iterable[object]:
        return self._db.execute("SELECT offset, value FROM log ORDER BY offset")

    def values(self) -> Iterator[bytes]:
        for _, value in self._db.execute("SELECT offset, value FROM log ORDER BY offset"):
            yield value

    def close(self) -> None:
        self._db.close()


class BareFile:
    """A file and nothing else: as many bytes as our frames have, written at its end, synced if durable."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        self._fd = os.open(path / "bare", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._durable = durable
        self._position = 0
        self._shapes: list[tuple[int, list[int], int]] = []

    def prepare(self, values: Sequence[bytes], first: int) -> Any:
        """Room for a frame's head, times and offsets, then the values."""
        head = bytes(FRAME_HEAD + 8 * len(values) + (4 * len(values) + 11) // 8 * 8)
        body = b"".join(values)
        padding = bytes(-len(body) % 8)
        self._shapes.append((len(head), [len(value) for value in values], len(padding)))
        return head + body + padding

    def write(self, prepared: Any) -> None:
        self._position += os.pwrite(self._fd, prepared, self._position)
        if self._durable:
            os.fdatasync(self._fd)

    def values(self) -> Iterator[bytes]:
        place = 0
        for head, sizes, padding in self._shapes:
            place += head
            body = os.pread(self._fd, sum(sizes), place)
            at = 0
            for size in sizes:
                yield body[at : at + size]
                at += size
            place += at + padding

    def close(self) -> None:
        os.close(self._fd)


EMBEDDED: dict[str, type[Any]] = {"lmdb": Lmdb, "rocksdb": RocksDb, "sqlite": Sqlite}
_MODULES = {"lmdb": "lmdb", "rocksdb": "rocksdict", "sqlite": "sqlite3"}


def available(name: str) -> bool:
    """Whether the peer's package is installed."""
    return importlib.util.find_spec(_MODULES[name]) is not None


@contextlib.contextmanager
def opened(kind: type[Any], path: Path, *, durable: bool) -> Iterator[Any]:
    """A store, closed at the end."""
    store = kind(path, durable=durable)
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def opened_ours(path: Path, durability: str) -> Iterator[forebay.Topic]:
    """A topic of a durability class in a log of its own."""
    with forebay.open(str(path / "data")) as log:
        yield log.create_topic("bench/t", durability=durability)
