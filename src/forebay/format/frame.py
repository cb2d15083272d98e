"""Frames: the unit of writing and of checking in a segment file. Knows no columns and no disk.

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
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from forebay.errors import Corrupt
from forebay.format.checksum import crc32
from forebay.records import Bytes, Run

FORMAT_VERSION: Final = 1

HEADER: Final = struct.Struct("<QII")
BODY_HEAD: Final = struct.Struct("<BBBBIIIQq")
WHOLE_HEAD: Final = struct.Struct("<QIIBBBBIIIQq")
RUN: Final = struct.Struct("<IQQ")
_FIRST: Final = struct.Struct("<QI")
HEADER_SIZE: Final = 16
HEAD_SIZE: Final = 48
BODY_MIN: Final = 32
assert HEADER.size == HEADER_SIZE and BODY_HEAD.size == BODY_MIN
assert WHOLE_HEAD.size == HEAD_SIZE and RUN.size == 20

MUST_UNDERSTAND: Final = 0x80


class Kind(enum.IntEnum):
    """What a frame carries. `DELETE` and `FLOOR` are numbers kept for a later version."""

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


class Column(enum.IntFlag):
    """Which columns a data frame has, and which of them hold a null."""

    KEYS = 1
    TAGS = 2
    HEADERS = 4
    VALUE_NULLS = 8
    KEY_NULLS = 16
    TAG_NULLS = 32
    HEADER_NULLS = 64


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


_CODEC_MAX: Final = int(Codec.ZSTD)
_COLUMNS_MAX: Final = 127
_GAP: Final = int(Kind.GAP)
_UNPACK_WHOLE: Final = WHOLE_HEAD.unpack_from
_PACK_FIRST: Final = _FIRST.pack
_COPY_MAX: Final = 2048
"""Below this a copied slice is cheaper than a view of it."""


def read_frame(buffer: Bytes, position: int, salt_crc: int, frame_bytes_max: int) -> FrameHead | Verdict:
    """The frame at `position`, or why there is none; `frame_bytes_max` bounds its body.

    TORN says only that the buffer ends inside the frame: with more bytes it may turn out whole.
    """
    left = len(buffer) - position
    if left < HEAD_SIZE:
        return _short(buffer, position, left, frame_bytes_max)
    head = _UNPACK_WHOLE(buffer, position)
    base, length, crc, version, kind, codec, columns, count, epoch, run_count, durable, appended_at = head
    if length < BODY_MIN or length & 7 or length > frame_bytes_max:
        return Verdict.DAMAGED
    if left < length + 16:
        return Verdict.TORN
    start = position + 16
    view = buffer if length < _COPY_MAX else memoryview(buffer)
    if crc32(view[start : start + length], crc32(_PACK_FIRST(base, length), salt_crc)) != crc:
        return Verdict.DAMAGED
    if version != 1 or codec > _CODEC_MAX or columns > _COLUMNS_MAX or (kind > 127 and kind != _GAP):
        return Verdict.NEWER
    return FrameHead(base, length + 16, kind, codec, columns, count, epoch, run_count, durable, appended_at)


def _short(buffer: Bytes, position: int, left: int, frame_bytes_max: int) -> Verdict:
    """The verdict on fewer bytes than the smallest frame has."""
    if left >= HEADER_SIZE:
        length = HEADER.unpack_from(buffer, position)[1]
        if length < BODY_MIN or length & 7 or length > frame_bytes_max:
            return Verdict.DAMAGED
    return Verdict.TORN


class Scan(NamedTuple):
    """The whole frames from a place on, and what stopped the scan."""

    heads: list[FrameHead]
    positions: list[int]
    stop: int
    verdict: Verdict
    """WHOLE if the buffer ended exactly behind a frame."""


def scan_frames(buffer: Bytes, start: int, salt_crc: int, frame_bytes_max: int) -> Scan:
    """Every whole frame from `start` on, up to the first place that holds none."""
    heads: list[FrameHead] = []
    positions: list[int] = []
    position = start
    total = len(buffer)
    while position < total:
        head = read_frame(buffer, position, salt_crc, frame_bytes_max)
        if isinstance(head, Verdict):
            return Scan(heads, positions, position, head)
        heads.append(head)
        positions.append(position)
        position += head.length
    return Scan(heads, positions, position, Verdict.WHOLE)


def resync(
    buffer: Bytes, position: int, salt_crc: int, frame_bytes_max: int, expected: int, reserved_end: int
) -> int | None:
    """The next place after `position` where a frame with a base in `[expected, reserved_end]` checks.

    Only 8-byte boundaries of the buffer are tried. A frame of a newer version counts: it is no hole.
    """
    first = (position // 8 + 1) * 8
    words = np.frombuffer(buffer, "<u8", count=max(0, (len(buffer) - first) // 8), offset=min(first, len(buffer)))
    if len(words) < HEAD_SIZE // 8:
        return None
    bases = words[:-1]
    lengths = words[1:] & np.uint64(0xFFFFFFFF)
    room = np.arange(len(words) * 8 - 16, -1, -8, dtype=np.uint64)[: len(lengths)]
    likely = (bases >= np.uint64(expected)) & (bases <= np.uint64(reserved_end))
    likely &= (lengths >= np.uint64(BODY_MIN)) & (lengths <= np.uint64(frame_bytes_max))
    likely &= (lengths & np.uint64(7) == 0) & (lengths <= room)
    for candidate in (np.flatnonzero(likely) * 8 + first).tolist():
        head = read_frame(buffer, candidate, salt_crc, frame_bytes_max)
        if head is Verdict.NEWER or isinstance(head, FrameHead):
            return int(candidate)
    return None


def runs_size(run_count: int) -> int:
    """The bytes of a runs section, padding included."""
    return (run_count * RUN.size + 7) & ~7


def payload_start(position: int, head: FrameHead) -> int:
    """Where the payload of the frame at `position` begins."""
    return position + HEAD_SIZE + runs_size(head.run_count)


def runs_of(buffer: Bytes, position: int, head: FrameHead) -> list[Run]:
    """The appends of a frame, in order; none if no append in it had a producer."""
    if not head.run_count:
        return []
    start = position + HEAD_SIZE
    if payload_start(position, head) > position + head.length:
        raise Corrupt(f"frame at byte {position}: {head.run_count} runs do not fit in {head.length} bytes")
    section = memoryview(buffer)[start : start + head.run_count * RUN.size]
    runs = list(map(Run._make, RUN.iter_unpack(section)))
    if sum(run.count for run in runs) != head.count:
        raise Corrupt(f"frame at byte {position}: its runs do not add up to its {head.count} records")
    return runs


def encode_runs(runs: Sequence[Run]) -> bytes:
    """The runs section, padded."""
    section = b"".join([RUN.pack(*run) for run in runs])
    return section + bytes(-len(section) & 7)


def encode_frame(
    *,
    salt_crc: int,
    base: int,
    kind: int,
    codec: int,
    columns: int,
    count: int,
    epoch: int,
    durable: int,
    appended_at: int,
    runs: Sequence[Run],
    payload: Sequence[Bytes],
) -> bytes:
    """One frame. `payload` is in its final layout, a multiple of 8 bytes in all."""
    head = BODY_HEAD.pack(FORMAT_VERSION, kind, codec, columns, count, epoch, len(runs), durable, appended_at)
    parts: list[Bytes] = [head, encode_runs(runs), *payload] if runs else [head, *payload]
    length = sum(map(len, parts))
    assert length & 7 == 0, "the payload is not padded"
    crc = crc32(_PACK_FIRST(base, length), salt_crc)
    for part in parts:
        crc = crc32(part, crc)
    return b"".join([HEADER.pack(base, length, crc), *parts])
