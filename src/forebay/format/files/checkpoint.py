"""The checkpoint: a summary of a shard's files that saves time at opening. Knows no disk.

    checkpoint := magic "FBYC", version u16, 0 u16, length u32, crc u32, JSON of `length` bytes

The crc is over the 12 bytes before it and the JSON.

Everything in it is derived: losing it costs time, never a fact.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from forebay.decoders import decoder
from forebay.format.checksum import crc32
from forebay.format.frame.head import Verdict
from forebay.records import Bytes

VERSION: Final = 1

_HEAD: Final = struct.Struct("<4sHHII")
_MAGIC: Final = b"FBYC"
assert _HEAD.size == 16


class CheckpointFile(msgspec.Struct, frozen=True, array_like=True):
    """A segment file by what its name says, and the end of its records as far as that was known."""

    start: int
    epoch: int
    end: int


class CleanFile(msgspec.Struct, frozen=True, kw_only=True):
    """The newest segment file at a clean stop: what a walk over all of it would find. Bytes are base64."""

    start: int
    epoch: int
    salt: bytes
    """As in its header: another file of the same name has another."""
    mark: bytes
    """The frame that says so, which is the last of the file."""
    end: int
    """Its records lie below."""
    frames: int
    """How many frames have records."""
    control: bytes
    """Frames as in the file: a state that restates everything with its window, the gaps, the deletes and floors."""
    offsets: tuple[int, ...]
    positions: tuple[int, ...]
    """Some frames with records, in order: first offset, and byte of the file."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The files in order; `clean_position` is the byte behind the mark of a clean stop in the newest file.

    `last` describes that file. It may be missing, and readers that do not know it pass over it.
    """

    files: tuple[CheckpointFile, ...]
    durable: int
    rotated_at: int
    clean: bool = False
    clean_position: int = 0
    last: CleanFile | msgspec.UnsetType = msgspec.UNSET


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = decoder(Checkpoint)


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The whole checkpoint file."""
    body = _ENCODER.encode(checkpoint)
    head = _HEAD.pack(_MAGIC, VERSION, 0, len(body), 0)
    return _HEAD.pack(_MAGIC, VERSION, 0, len(body), crc32(body, crc32(head[:12]))) + body


def decode_checkpoint(buffer: Bytes) -> Checkpoint | Verdict:
    """The summary, or why it cannot be used."""
    whole = bytes(buffer)
    if len(whole) < _HEAD.size or not any(whole):
        return Verdict.TORN
    magic, version, flags, length, crc = _HEAD.unpack_from(whole)
    body = whole[_HEAD.size :]
    if magic == _MAGIC and len(body) < length:
        return Verdict.TORN
    if magic != _MAGIC or len(body) != length or crc32(body, crc32(whole[:12])) != crc:
        return Verdict.DAMAGED
    if version != VERSION or flags:
        return Verdict.NEWER
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError:
        return Verdict.DAMAGED
