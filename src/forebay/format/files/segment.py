"""Segment files: their names and the 64 bytes they begin with. Knows no frames and no disk.

    header := magic "FBYS", version u8, flags u8, created u48 (ms since 1970), partition u32, epoch u32,
              topic id 16 bytes, salt 16 bytes, start u64, crc u32 of the 60 bytes before
    name   := start as 20 digits, "-", epoch as at least 8 digits, ".seg"

Every version keeps the magic and the crc where they are, so that a newer version is not taken for damage.
"""

from __future__ import annotations

import re
import struct
from typing import Final

import msgspec

from forebay.format.checksum import SALT_BYTES, crc32
from forebay.format.frame.head import Verdict
from forebay.records import Bytes
from forebay.topics import shard_id

HEADER_BYTES: Final = 64
SEGMENT_SUFFIX: Final = ".seg"
PARQUET_SUFFIX: Final = ".parquet"
COMPACTED: Final = "compacted/"
"""Where Parquet segments lie, below the other objects of their shard."""
INDEX_SUFFIX: Final = ".idx"
VERSION: Final = 1

_MAGIC: Final = b"FBYS"
_HEADER: Final = struct.Struct("<4sBBIHII16s16sQ")
_CRC: Final = struct.Struct("<I")
_NAME: Final = re.compile(r"([0-9]{20})-([0-9]{8,10})\.seg")
_FILE: Final = re.compile(r"[0-9]{20}-[0-9]{8,10}(\.seg|(-[0-9a-f]{16})?\.idx)")
_OBJECT: Final = re.compile(r"(compacted/|loads/[^/]+/)?[^/]+\.(seg|parquet|idx)")
assert _HEADER.size + _CRC.size == HEADER_BYTES


class SegmentHeader(msgspec.Struct, frozen=True):
    """Whose segment it is. `created` is in milliseconds; `salt` starts the crc of every frame in the file."""

    topic_id: str
    partition: int
    epoch: int
    start: int
    created: int
    salt: bytes

    @property
    def shard_id(self) -> str:
        """The name of the shard that the segment is of."""
        return shard_id(self.topic_id, self.partition)


def encode_header(header: SegmentHeader) -> bytes:
    """The first 64 bytes of a segment file."""
    topic_id = bytes.fromhex(header.topic_id)
    assert len(topic_id) == 16 and len(header.salt) == SALT_BYTES
    low, high = header.created & 0xFFFFFFFF, header.created >> 32
    head = _HEADER.pack(
        _MAGIC, VERSION, 0, low, high, header.partition, header.epoch, topic_id, header.salt, header.start
    )
    return head + _CRC.pack(crc32(head))


def decode_header(buffer: Bytes) -> SegmentHeader | Verdict:
    """The header in the first 64 bytes. TORN: too short, or zeros as a crash before the first sync leaves them."""
    head = bytes(buffer[:HEADER_BYTES])
    if len(head) < HEADER_BYTES or not any(head):
        return Verdict.TORN
    if head[:4] != _MAGIC or _CRC.unpack_from(head, _HEADER.size)[0] != crc32(head[: _HEADER.size]):
        return Verdict.DAMAGED
    _, version, flags, low, high, partition, epoch, topic_id, salt, start = _HEADER.unpack_from(head)
    if version != VERSION or flags:
        return Verdict.NEWER
    return SegmentHeader(topic_id.hex(), partition, epoch, start, high << 32 | low, salt)


def segment_name(start: int, epoch: int) -> str:
    """The name of the file whose first offset is `start`, created in `epoch`; names sort like offsets."""
    return f"{start:020d}-{epoch:08d}{SEGMENT_SUFFIX}"


def parse_segment_name(name: str) -> tuple[int, int] | None:
    """(start, epoch) of a segment file's name, `None` for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    start, epoch = int(match[1]), int(match[2])
    return (start, epoch) if segment_name(start, epoch) == name else None


def index_name(name: str) -> str:
    """The name of the index file of a sealed segment, or of one in Parquet."""
    assert is_segment(name)
    return name.removesuffix(SEGMENT_SUFFIX).removesuffix(PARQUET_SUFFIX) + INDEX_SUFFIX


def may_be_history(name: str, *, is_file: bool) -> bool:
    """Whether a segment of history or its index may have this name, below the name of its shard.

    `is_file` for the files of a data directory, where logs, marks and what recovery put aside lie beside them.
    """
    return (_FILE if is_file else _OBJECT).fullmatch(name) is not None


def is_segment(name: str) -> bool:
    """Whether a file or object of this name is a segment, which has an index beside it."""
    return name.endswith((SEGMENT_SUFFIX, PARQUET_SUFFIX))
