"""The live file: how far other processes may read, 64 bytes rewritten at each commit. Knows no disk.

    live := magic "FBL", version digit, epoch u32, file epoch u32, flags u32, file start u64, position u64,
            durable u64, end u64, sequence u64, 0 u32, crc u32 of the 60 bytes before

Flag 1 says that a write or sync of the file has failed: what it holds above `durable` the disk may never have got,
though every process still reads it.

Never synced: after a power loss it means nothing. A reader that meets a crc that does not hold has read
between two writes and reads again.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from forebay.format.checksum import crc32
from forebay.format.frame.head import Verdict
from forebay.records import Bytes

LIVE_BYTES: Final = 64

_LIVE: Final = struct.Struct("<4sIIIQQQQQI")
_CRC: Final = struct.Struct("<I")
_MAGIC: Final = b"FBL1"
_DOUBTFUL: Final = 1
_PACK: Final = _LIVE.pack
assert _LIVE.size + _CRC.size == LIVE_BYTES


class Live(NamedTuple):
    """What the owner has published: the frames of one file below `position`, records below `end`."""

    epoch: int
    file_epoch: int
    file_start: int
    position: int
    durable: int
    end: int
    sequence: int
    doubtful: bool = False


def encode_live(
    epoch: int,
    file_epoch: int,
    file_start: int,
    position: int,
    durable: int,
    end: int,
    sequence: int,
    doubtful: bool = False,  # noqa: FBT001, FBT002 - the fields of `Live`, in their order
) -> bytes:
    """The 64 bytes; arguments as the fields of `Live`."""
    flags = _DOUBTFUL if doubtful else 0
    head = _PACK(_MAGIC, epoch, file_epoch, flags, file_start, position, durable, end, sequence, 0)
    return head + crc32(head).to_bytes(4, "little")


def decode_live(buffer: Bytes) -> Live | Verdict:
    """What was published last, or why it is not known."""
    whole = bytes(buffer[:LIVE_BYTES])
    if len(whole) < LIVE_BYTES or not any(whole):
        return Verdict.TORN
    magic, epoch, file_epoch, flags, file_start, position, durable, end, sequence, _ = _LIVE.unpack_from(whole)
    if magic[:3] != _MAGIC[:3] or _CRC.unpack_from(whole, _LIVE.size)[0] != crc32(whole[: _LIVE.size]):
        return Verdict.DAMAGED
    if magic != _MAGIC or flags & ~_DOUBTFUL:
        return Verdict.NEWER
    return Live(epoch, file_epoch, file_start, position, durable, end, sequence, doubtful=bool(flags))
