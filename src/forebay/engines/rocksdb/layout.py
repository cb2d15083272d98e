"""How a shard lies in the database: every key and every value. Pure, knows no database.

Every key begins with the topic id (16 bytes) and the partition (u32), so that a shard is one range of keys, and
goes on with a letter:

    b                          bounds: who wrote last, and how far offsets are reserved
    c                          counters: next offset, watermarks, totals; part of every write
    e offset                   an entry: records appended at once, or a range that has none, from that offset on
    k name offset              a live record with that key
    t name offset              a live record with that tag
    m level number             the newest time of a live record in a block of 64 ** (level + 1) offsets
    w producer sequence        an append of an idempotent producer

Numbers in keys are big-endian, so that keys are in the order of what they say. A name is its length in one byte
and itself, or, above 254 bytes, 255 and its hash: no name is the beginning of another. Entries cover
[earliest, next) without a gap; deleting makes one entry several.
"""

from __future__ import annotations

import enum
import struct
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.checksum import crc32
from forebay.format.columns.rows import ColumnBytes
from forebay.format.frame.batch import Batch, decode, encode_data_frame
from forebay.format.frame.head import FrameHead, read_frame
from forebay.records import Reason
from forebay.sealed import FRAME_BYTES_LIMIT

VERSION = 1
FANOUT_BITS = 6
NAME_BYTES_MAX = 254
HASH_BYTES = 32

_SHARD = struct.Struct(">16sI")
_OFFSET = struct.Struct(">Q")
_PAIR = struct.Struct(">QQ")
_BLOCK = struct.Struct(">BQ")
_TIME = struct.Struct(">q")
_BOUNDS = struct.Struct(">BIBQ")
_COUNTERS = struct.Struct(">BBQQQQQQ")
_APPEND = struct.Struct(">IQ")
_ENTRY = struct.Struct("<BBxxIQq")
ENTRY_HEAD = _ENTRY.size
"""A multiple of 8, so that columns behind it stay aligned."""


class Keys:
    """The keys of one shard."""

    def __init__(self, topic_id: str, partition: int) -> None:
        self.start = _SHARD.pack(bytes.fromhex(topic_id), partition)
        self.stop = _following(self.start)
        """Behind every key of the shard."""
        self.bounds = self.start + b"b"
        self.counters = self.start + b"c"
        self.salt_crc = crc32(self.start)
        """What the checksum of each entry begins from, so that none passes for another shard's."""
        self._entry = self.start + b"e"
        self._key = self.start + b"k"
        self._tag = self.start + b"t"
        self._block = self.start + b"m"
        self._window = self.start + b"w"

    def entry(self, offset: int) -> bytes:
        """The entry that begins at this offset."""
        return self._entry + _OFFSET.pack(offset)

    @property
    def entries(self) -> tuple[bytes, bytes]:
        """The range of all entries."""
        return self._entry, _following(self._entry)

    def of_key(self, key: bytes) -> bytes:
        """What the index entries of a key begin with; an offset follows."""
        return self._key + _name(key)

    def of_tag(self, tag: str) -> bytes:
        """What the index entries of a tag begin with; an offset follows."""
        return self._tag + _name(tag.encode())

    @property
    def lookups(self) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
        """The ranges of all index entries, of keys and of tags."""
        return (self._key, _following(self._key)), (self._tag, _following(self._tag))

    def block(self, level: int, number: int) -> bytes:
        """The newest time of a block of offsets."""
        return self._block + _BLOCK.pack(level, number)

    @property
    def blocks(self) -> tuple[bytes, bytes]:
        """The range of all blocks."""
        return self._block, _following(self._block)

    def appended(self, producer: int, sequence: int) -> bytes:
        """One append of an idempotent producer."""
        return self._window + _PAIR.pack(producer, sequence)

    @property
    def window(self) -> tuple[bytes, bytes]:
        """The range of all appends of idempotent producers."""
        return self._window, _following(self._window)


def _name(name: bytes) -> bytes:
    if len(name) <= NAME_BYTES_MAX:
        return bytes((len(name),)) + name
    return b"\xff" + blake2b(name, digest_size=HASH_BYTES).digest()


def _following(prefix: bytes) -> bytes:
    """The first key behind all that begin with `prefix`."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,))


def with_offset(prefix: bytes, offset: int) -> bytes:
    """An index entry."""
    return prefix + _OFFSET.pack(offset)


def offset_in(key: bytes) -> int:
    """The offset that an entry's or an index entry's key ends with."""
    return int.from_bytes(key[-8:], "big")


def appended_in(key: bytes) -> tuple[int, int]:
    """Producer and sequence of an append's key."""
    producer, sequence = _PAIR.unpack(key[-16:])
    return producer, sequence


def block_in(key: bytes) -> int:
    """The number in a block's key."""
    return int.from_bytes(key[-8:], "big")


def encode_time(newest: int) -> bytes:
    """The value of a block."""
    return _TIME.pack(newest)


def decode_time(value: bytes) -> int:
    """The newest time of a block."""
    return int.from_bytes(value, "big", signed=True)


def encode_appended(count: int, offset: int) -> bytes:
    """The value of an append: how many records, and the first offset."""
    return _APPEND.pack(count, offset)


def decode_appended(value: bytes) -> tuple[int, int]:
    """Count and first offset."""
    count, offset = _APPEND.unpack(value)
    return count, offset


class Bounds(NamedTuple):
    """Who wrote last. Epoch 0 means that the shard was made and never written."""

    epoch: int = 0
    clean: bool = False
    """It ended in order, and nothing was written since."""
    reserved_end: int = 0
    identity: str = ""
    """The boot and mount of the last owner."""

    def encode(self) -> bytes:
        return _BOUNDS.pack(VERSION, self.epoch, self.clean, self.reserved_end) + self.identity.encode()

    @classmethod
    def decode(cls, value: bytes) -> Bounds:
        _check_version(value)
        try:
            _, epoch, clean, reserved_end = _BOUNDS.unpack_from(value)
            return cls(epoch, bool(clean), reserved_end, value[_BOUNDS.size :].decode())
        except (struct.error, ValueError) as error:
            raise Corrupt(f"the bounds of a shard are damaged in the database ({error}): restore a backup") from error


class ShardCounters(NamedTuple):
    """Where a shard stands. `earliest` is at or above `evict_floor`; both only rise."""

    next: int = 0
    earliest: int = 0
    evict_floor: int = 0
    reason: Reason = Reason.CAP
    """Why `evict_floor` last moved."""
    live: int = 0
    total: int = 0
    """What all records up to `next` ever counted for."""
    below: int = 0
    """What those below `earliest` counted for."""

    def encode(self) -> bytes:
        following, earliest, floor, reason, *totals = self
        return _COUNTERS.pack(VERSION, reason, following, earliest, floor, *totals)

    @classmethod
    def decode(cls, value: bytes) -> ShardCounters:
        _check_version(value)
        try:
            _, reason, following, earliest, floor, *totals = _COUNTERS.unpack(value)
            return cls(following, earliest, floor, Reason(reason), *totals)
        except (struct.error, ValueError) as error:
            raise Corrupt(f"the counters of a shard are damaged in the database ({error}): restore a backup") from error


def _check_version(value: bytes) -> None:
    if not value or value[0] > VERSION:
        raise UnsupportedFormat(f"a shard in the database has version {value[:1]!r}, this one knows {VERSION}: upgrade")


class EntryKind(enum.IntEnum):
    """What an entry says of its offsets."""

    LIVE = 0
    DELETED = 1
    GAP = 2


class StoredEntry(NamedTuple):
    """Offsets `[base, end)`, all of one kind."""

    base: int
    end: int
    kind: EntryKind
    reason: int
    before: int
    """What all records below `base` ever counted for."""
    appended_at: int
    value: bytes

    def batch(self, salt_crc: int) -> Batch:
        """Its records, if they are live; `Corrupt` if the bytes are not what was written."""
        head = read_frame(self.value, ENTRY_HEAD, salt_crc, FRAME_BYTES_LIMIT)
        if not isinstance(head, FrameHead) or (head.base, head.count) != (self.base, self.end - self.base):
            raise Corrupt(f"the records from offset {self.base} on are damaged in the database: restore a backup")
        return decode(self.value, ENTRY_HEAD, head)

    def sizes(self, salt_crc: int) -> npt.NDArray[np.int64]:
        """What each of its records counts for, deleted or not."""
        if self.kind is EntryKind.LIVE:
            return self.batch(salt_crc).sizes()
        if self.kind is EntryKind.DELETED:
            return np.frombuffer(self.value, "<u4", offset=ENTRY_HEAD).astype(np.int64)
        return np.zeros(self.end - self.base, np.int64)


def decode_entry(base: int, value: bytes) -> StoredEntry:
    """The entry that begins at `base`."""
    try:
        kind, reason, count, before, appended_at = _ENTRY.unpack_from(value)
        is_gap = kind == EntryKind.GAP
        end = appended_at if is_gap else base + count
        if end <= base:
            raise ValueError(f"it ends at {end}")
        if is_gap:
            return StoredEntry(base, end, EntryKind.GAP, Reason(reason), before, 0, value)
        return StoredEntry(base, end, EntryKind(kind), reason, before, appended_at, value)
    except (struct.error, ValueError) as error:
        raise Corrupt(f"the entry at offset {base} is damaged in the database ({error}): restore a backup") from error


def encode_live(
    columns: ColumnBytes, salt_crc: int, *, base: int, epoch: int, appended_at: int, before: int, zstd_level: int | None
) -> bytes:
    """Records."""
    frame = encode_data_frame(
        salt_crc=salt_crc,
        base=base,
        epoch=epoch,
        durable=0,
        appended_at=appended_at,
        runs=(),
        columns=columns,
        zstd_level=zstd_level,
    )
    return _ENTRY.pack(EntryKind.LIVE, 0, columns.count, before, appended_at) + frame


def encode_deleted(sizes: npt.NDArray[np.int64], *, appended_at: int, before: int) -> bytes:
    """Records that were deleted: what they counted for, and nothing else of them."""
    return _ENTRY.pack(EntryKind.DELETED, 0, len(sizes), before, appended_at) + sizes.astype("<u4").tobytes()


def encode_gap(stop: int, reason: Reason, *, before: int) -> bytes:
    """Offsets that hold no record and never will."""
    return _ENTRY.pack(EntryKind.GAP, reason, 0, before, stop)
