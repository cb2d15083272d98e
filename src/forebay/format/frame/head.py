"""Heads: what a frame is, and whether the bytes at a place are one. Knows no columns and no disk.

    frame  := header body                     every frame starts on an 8-byte boundary
    header := base u64, body length u32, crc u32
    body   := head runs payload               a multiple of 8 bytes, zero padded, all under the crc
    head   := version u8, kind u8, codec u8, columns u8, count u32, epoch u32, run count u32,
              durable u64, appended_at i64
    runs   := (count u32, producer u64, sequence u64)*, zero padded to 8

Little-endian. crc = crc32(body, crc32(first 12 header bytes, crc32(salt))): it covers the offset
and the length, and a frame copied from a segment with another salt does not check.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from forebay.format.checksum import crc32
from forebay.records import Bytes

FORMAT_VERSION: Final = 1

HEADER: Final = struct.Struct("<QII")
BODY_HEAD: Final = struct.Struct("<BBBBIIIQq")
WHOLE_HEAD: Final = struct.Struct("<QIIBBBBIIIQq")
RUN: Final = struct.Struct("<IQQ")
FIRST: Final = struct.Struct("<QI")
HEADER_SIZE: Final = 16
HEAD_SIZE: Final = 48
BODY_MIN: Final = 32
assert HEADER.size == HEADER_SIZE and BODY_HEAD.size == BODY_MIN
assert WHOLE_HEAD.size == HEAD_SIZE and RUN.size == 20

MUST_UNDERSTAND: Final = 0x80


class Kind(enum.IntEnum):
    """What a frame carries."""

    DATA = 0
    STATE = 1
    DELETE = 2 | MUST_UNDERSTAND
    FLOOR = 3 | MUST_UNDERSTAND
    GAP = 4 | MUST_UNDERSTAND
    MARK = 5


class Codec(enum.IntEnum):
    """How the columns are compressed. `LZ4` and `SNAPPY` are reserved numbers."""

    NONE = 0
    ZSTD = 1
    LZ4 = 2
    SNAPPY = 3


class Verdict(enum.Enum):
    """What stands at a place in a file."""

    WHOLE = "whole"
    TORN = "torn"
    DAMAGED = "damaged"
    NEWER = "newer"


class FrameHead(NamedTuple):
    """The head of a whole frame; `length` counts the header too, so the next frame is at position + length."""

    base: int
    length: int
    kind: int
    codec: int
    columns: int
    count: int  # type: ignore[assignment]
    epoch: int
    run_count: int
    durable: int
    appended_at: int

    @property
    def end(self) -> int:
        """The offset after the last record; a control frame uses none up."""
        return self.base + self.count


CODEC_MAX: Final = int(Codec.ZSTD)
MUST_MIN: Final = int(Kind.DELETE)
MUST_MAX: Final = int(Kind.GAP)
"""Of the kinds that must be understood, this version knows those from `MUST_MIN` to here."""
_UNPACK_WHOLE: Final = WHOLE_HEAD.unpack_from
PACK_FIRST: Final = FIRST.pack
_NEW: Final = tuple.__new__
"""Half the cost of calling a named tuple's class, and heads come by the million."""
_COPY_MAX: Final = 2048
"""Below this a copied slice is cheaper than a view of it."""


def read_frame(buffer: Bytes, position: int, salt_crc: int, frame_bytes_max: int) -> FrameHead | Verdict:
    """The frame at `position`, or why there is none; `frame_bytes_max` bounds its body.

    TORN says only that the buffer ends inside the frame: with more bytes it may turn out whole.
    """
    left = len(buffer) - position
    if left < HEAD_SIZE:
        return judge_short(buffer, position, left, frame_bytes_max)
    head = _UNPACK_WHOLE(buffer, position)
    base, length, crc, version, kind, codec, columns, count, epoch, run_count, durable, appended_at = head
    if length < BODY_MIN or length & 7 or length > frame_bytes_max:
        return Verdict.DAMAGED
    if left < length + 16:
        return Verdict.TORN
    start = position + 16
    view = buffer if length < _COPY_MAX else memoryview(buffer)
    if crc32(view[start : start + length], crc32(PACK_FIRST(base, length), salt_crc)) != crc:
        return Verdict.DAMAGED
    if version != 1 or codec > CODEC_MAX or 127 < kind < MUST_MIN or kind > MUST_MAX:
        return Verdict.NEWER
    fields = (base, length + 16, kind, codec, columns, count, epoch, run_count, durable, appended_at)
    return _NEW(FrameHead, fields)


def judge_short(buffer: Bytes, position: int, left: int, frame_bytes_max: int) -> Verdict:
    """The verdict on `left` bytes, fewer than the smallest frame has."""
    if left >= HEADER_SIZE:
        length = HEADER.unpack_from(buffer, position)[1]
        if length < BODY_MIN or length & 7 or length > frame_bytes_max:
            return Verdict.DAMAGED
    return Verdict.TORN


def runs_size(run_count: int) -> int:
    """The bytes of a runs section, padding included."""
    return (run_count * RUN.size + 7) & ~7


def payload_start(position: int, head: FrameHead) -> int:
    """Where the payload of the frame at `position` begins."""
    return position + HEAD_SIZE + runs_size(head.run_count)
