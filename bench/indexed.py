"""Everyone who keeps records that can be found by key, tag and time, behind one small surface; and those records."""

# ruff: noqa: PLC0415 - a peer that is not installed is named as missing

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import forebay
from bench import payload
from forebay.settings import GIB

BEGUN_MS = 1_700_000_000_000
RECORDS_PER_MS = 10
VALUES_MAX = 1_000_000
"""Values come again after so many; keys and offsets tell the records apart."""
SPREAD = 7_919
"""Prime to every number of keys used: neighbours in the log are none by key."""


class Rows(NamedTuple):
    """Records one after the other, as columns; the first has the offset `first`."""

    first: int
    keys: list[bytes]
    tags: list[str]
    times: list[int]
    values: list[bytes]


@dataclass(frozen=True)
class Stream:
    """`count` records: which key, tag, time and value each has, and so what every look-up must find."""

    count: int
    keys: int
    tags: int

    def key(self, offset: int) -> bytes:
        return b"key-%09d" % (offset * SPREAD % self.keys)

    def tag(self, offset: int) -> str:
        return f"tag-{offset % self.tags}"

    def time(self, offset: int) -> int:
        return BEGUN_MS + offset // RECORDS_PER_MS

    def value(self, offset: int) -> bytes:
        window = payload.values(min(self.count, VALUES_MAX))
        return window[offset % len(window)]

    def rows(self, first: int, stop: int) -> Rows:
        """The records of `[first, stop)`."""
        offsets = range(first, stop)
        return Rows(
            first,
            [self.key(offset) for offset in offsets],
            [self.tag(offset) for offset in offsets],
            [self.time(offset) for offset in offsets],
            [self.value(offset) for offset in offsets],
        )

    def newest(self, offset: int) -> int:
        """The last record with the key of this one."""
        return offset % self.keys + (self.count - 1 - offset % self.keys) // self.keys * self.keys

    def with_key(self, offset: int) -> range:
        """All records with the key of this one."""
        return range(offset % self.keys, self.count, self.keys)

    def with_tag(self, offset: int) -> range:
        """All records with the tag of this one."""
        return range(offset % self.tags, self.count, self.tags)

    def first_at(self, offset: int) -> int:
        """The first record of the same millisecond."""
        return offset // RECORDS_PER_MS * RECORDS_PER_MS


class IndexedStore(Protocol):
    """Records in order, found by offset, key, tag and time."""

    def append_many(self, rows: Rows) -> None:
        """Append the records together."""

    def append(self, offset: int, key: bytes, tag: str, time: int, value: bytes) -> None:
        """Append one record, which gets this offset."""

    def values(self) -> Iterator[bytes]:
        """The values of everything, in order."""

    def at(self, offset: int) -> bytes | None:
        """The value of one record."""

    def newest(self, key: bytes) -> tuple[int, bytes] | None:
        """Offset and value of the last record with this key."""

    def tagged(self, tag: str) -> Sequence[bytes]:
        """The values of all records with this tag, in order."""

    def at_time(self, time: int) -> int | None:
        """The offset of the first record at or after the time."""

    def delete(self, key: bytes) -> int:
        """Delete all records with this key; how many there were."""

    def close(self) -> None: ...


class Forebay:
    """Ours, on one of its engines."""

    def __init__(self, path: Path, engine: str) -> None:
        self.log = forebay.open(str(path / "data"), {"memory": {"bytes_max": 4 * GIB}})
        durability = "ephemeral" if engine == "memory" else "disk"
        self.topic = self.log.create_topic("bench/t", engine=engine, durability=durability)

    def append_many(self, rows: Rows) -> None:
        self.topic.append_many(rows.values, keys=rows.keys, tags=rows.tags, timestamps=rows.times)

    def append(self, offset: int, key: bytes, tag: str, time: int, value: bytes) -> None:
        self.topic.append(value, key=key, tag=tag, timestamp=time)

    def values(self) -> Iterator[bytes]:
        return (record.value or b"" for record in self.topic.read())

    def at(self, offset: int) -> bytes | None:
        return next((record.value for record in self.topic.read(offset, stop=offset + 1)), None)

    def newest(self, key: bytes) -> tuple[int, bytes] | None:
        return next(((record.offset, record.value or b"") for record in self.topic.read_by_key(key)), None)

    def tagged(self, tag: str) -> Sequence[bytes]:
        return [record.value or b"" for record in self.topic.read_by_tag(tag)]

    def at_time(self, time: int) -> int | None:
        return self.topic.offset_at_time(time)

    def delete(self, key: bytes) -> int:
        return self.topic.delete_by_key(key)

    def close(self) -> None:
        self.log.close()


_NUMBER = struct.Struct(">Q").pack
_HEAD = struct.Struct(">QHH")
_LAST = b"\xff" * 8


class RocksDb:
    """RocksDB with indexes kept by hand: one write batch for records and index entries."""

    def __init__(self, path: Path) -> None:
        import rocksdict

        self._rocks = rocksdict
        self._db: Any = rocksdict.Rdict(str(path / "rocks"), rocksdict.Options(raw_mode=True))

    def append_many(self, rows: Rows) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        columns = zip(rows.keys, rows.tags, rows.times, rows.values, strict=True)
        for offset, (key, tag, time, value) in enumerate(columns, rows.first):
            self._put(batch, offset, key, tag.encode(), time, value)
        self._db.write(batch)

    def append(self, offset: int, key: bytes, tag: str, time: int, value: bytes) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        self._put(batch, offset, key, tag.encode(), time, value)
        self._db.write(batch)

    def _put(self, batch: Any, offset: int, key: bytes, tag: bytes, time: int, value: bytes) -> None:
        batch.put(b"r" + _NUMBER(offset), _HEAD.pack(time, len(key), len(tag)) + key + tag + value)
        for entry in _entries(offset, key, tag, time):
            batch.put(entry, b"")

    def values(self) -> Iterator[bytes]:
        for key, packed in self._db.items(from_key=b"r"):
            if key[:1] != b"r":
                break
            yield _unpacked(packed)[3]

    def at(self, offset: int) -> bytes | None:
        packed = self._db.get(b"r" + _NUMBER(offset))
        return None if packed is None else _unpacked(packed)[3]

    def newest(self, key: bytes) -> tuple[int, bytes] | None:
        prefix = b"k" + key + b"\0"
        cursor = self._db.iter()
        cursor.seek_for_prev(prefix + _LAST)
        if not cursor.valid() or not cursor.key().startswith(prefix):
            return None
        place = cursor.key()[-8:]
        return int.from_bytes(place, "big"), _unpacked(self._db[b"r" + place])[3]

    def tagged(self, tag: str) -> Sequence[bytes]:
        places = self._places(b"t" + tag.encode() + b"\0")
        return [_unpacked(self._db[b"r" + place])[3] for place in places]

    def at_time(self, time: int) -> int | None:
        cursor = self._db.iter()
        cursor.seek(b"m" + _NUMBER(time))
        if not cursor.valid() or cursor.key()[:1] != b"m":
            return None
        return int.from_bytes(cursor.key()[-8:], "big")

    def delete(self, key: bytes) -> int:
        batch = self._rocks.WriteBatch(raw_mode=True)
        places = self._places(b"k" + key + b"\0")
        for place in places:
            time, _, tag, _ = _unpacked(self._db[b"r" + place])
            batch.delete(b"r" + place)
            for entry in _entries(int.from_bytes(place, "big"), key, tag, time):
                batch.delete(entry)
        self._db.write(batch)
        return len(places)

    def _places(self, prefix: bytes) -> list[bytes]:
        found = []
        cursor = self._db.iter()
        cursor.seek(prefix)
        while cursor.valid() and (entry := cursor.key()).startswith(prefix):
            found.append(entry[-8:])
            cursor.next()
        return found

    def close(self) -> None:
        self._db.close()


def _entries(offset: int, key: bytes, tag: bytes, time: int) -> tuple[bytes, bytes, bytes]:
    place = _NUMBER(offset)
    return b"k" + key + b"\0" + place, b"t" + tag + b"\0" + place, b"m" + _NUMBER(time) + place


def _unpacked(packed: bytes) -> tuple[int, bytes, bytes, bytes]:
    time, key_size, tag_size = _HEAD.unpack_from(packed)
    tag_at = _HEAD.size + key_size
    value_at = tag_at + tag_size
    return time, packed[_HEAD.size : tag_at], packed[tag_at:value_at], packed[value_at:]


class Sqlite:
    """A table with an index on key, tag and time each."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path / "sqlite.db", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute("CREATE TABLE log (offset INTEGER PRIMARY KEY, key BLOB, tag TEXT, time INTEGER, value BLOB)")
        for column in ("key", "tag", "time"):
            self._db.execute(f"CREATE INDEX by_{column} ON log ({column})")

    def append_many(self, rows: Rows) -> None:
        offsets = range(rows.first, rows.first + len(rows.values))
        columns = zip(offsets, rows.keys, rows.tags, rows.times, rows.values, strict=True)
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO log VALUES (?, ?, ?, ?, ?)", columns)
        self._db.execute("COMMIT")

    def append(self, offset: int, key: bytes, tag: str, time: int, value: bytes) -> None:
        self._db.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?)", (offset, key, tag, time, value))

    def values(self) -> Iterator[bytes]:
        for (value,) in self._db.execute("SELECT value FROM log ORDER BY offset"):
            yield value

    def at(self, offset: int) -> bytes | None:
        found = self._db.execute("SELECT value FROM log WHERE offset = ?", (offset,)).fetchone()
        return None if found is None else found[0]

    def newest(self, key: bytes) -> tuple[int, bytes] | None:
        wanted = "SELECT offset, value FROM log WHERE key = ? ORDER BY offset DESC LIMIT 1"
        found: tuple[int, bytes] | None = self._db.execute(wanted, (key,)).fetchone()
        return found

    def tagged(self, tag: str) -> Sequence[bytes]:
        return [value for (value,) in self._db.execute("SELECT value FROM log WHERE tag = ? ORDER BY offset", (tag,))]

    def at_time(self, time: int) -> int | None:
        wanted = "SELECT offset FROM log WHERE time >= ? ORDER BY time, offset LIMIT 1"
        found = self._db.execute(wanted, (time,)).fetchone()
        return None if found is None else int(found[0])

    def delete(self, key: bytes) -> int:
        return self._db.execute("DELETE FROM log WHERE key = ?", (key,)).rowcount

    def close(self) -> None:
        self._db.close()
