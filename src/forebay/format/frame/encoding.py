"""Writes frames, the unit of writing and of checking in a segment file, and reads their runs. Knows no disk.

The grammar stands in `head`, which reads one frame; `scan` reads many, `resynchronisation` finds them
behind damage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from forebay.errors import Corrupt
from forebay.format.checksum import crc32
from forebay.format.frame.head import (
    BODY_HEAD,
    FIRST,
    FORMAT_VERSION,
    HEAD_SIZE,
    HEADER,
    HEADER_SIZE,
    RUN,
    FrameHead,
    payload_start,
)
from forebay.records import Bytes, Run

_JOIN_MAX: Final = 16_384
_ROOM: Final = bytes(HEADER_SIZE)
_PACK_HEAD: Final = BODY_HEAD.pack
_PACK_HEADER: Final = HEADER.pack
PACK_FIRST: Final = FIRST.pack


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
    head = _PACK_HEAD(FORMAT_VERSION, kind, codec, columns, count, epoch, len(runs), durable, appended_at)
    if len(payload) == 1 and not runs and len(payload[0]) < _JOIN_MAX:
        return close_frame(salt_crc, base, head + payload[0])
    parts: list[Bytes] = [head, encode_runs(runs), *payload] if runs else [head, *payload]
    length = sum(map(len, parts))
    assert length & 7 == 0, "the payload is not padded"
    crc = crc32(PACK_FIRST(base, length), salt_crc)
    for part in parts:
        crc = crc32(part, crc)
    return b"".join([_PACK_HEADER(base, length, crc), *parts])


def join_frame(salt_crc: int, base: int, body: Sequence[Bytes]) -> bytearray:
    """The frame of a body in many parts: copied once, summed by one call, and its header filled in after that."""
    frame = bytearray().join([_ROOM, *body])
    length = len(frame) - HEADER_SIZE
    assert length & 7 == 0, "the payload is not padded"
    crc = crc32(memoryview(frame)[HEADER_SIZE:], crc32(PACK_FIRST(base, length), salt_crc))
    HEADER.pack_into(frame, 0, base, length, crc)
    return frame


def close_frame(salt_crc: int, base: int, body: bytes) -> bytes:
    """The frame of a small body that is complete."""
    length = len(body)
    assert length & 7 == 0, "the payload is not padded"
    return _PACK_HEADER(base, length, crc32(body, crc32(PACK_FIRST(base, length), salt_crc))) + body
