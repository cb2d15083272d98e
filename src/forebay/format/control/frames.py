"""Control frames: what a shard's log says about itself between the records. Knows frames, no disk.

    state := reserved_end u64, previous_end u64, earliest u64, evict_floor u64, flags u32,
             identity length u32, identity utf8 padded to 8, entries u32, 0 u32, entry*
    entry := producer u64, sequence u64, appends u32, count u32, offset u64
    gap   := start u64, stop u64, reason u32, 0 u32
    mark  := flags u32, 0 u32
    delete := origin u64, count u64, bitmap length u32, 0 u32, bitmap padded to 8
    floor := earliest u64, evict_floor u64, reason u32, 0 u32

They follow a frame's head. A control frame has no records: its base is the next data offset and it
uses none up. State flags: 1 the idempotence window is restated here from nothing, 2 it continues in
the next state frame. Mark flag: 1 clean, nothing follows. A delete names `count` offsets as a roaring
bitmap (see `offsets`) counted from `origin`, a multiple of 2**20.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
from pyroaring import BitMap

from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.columns.rows import PADDING
from forebay.format.control.offsets import WINDOW, OffsetSet, decode_bitmap, encode_bitmap
from forebay.format.frame.encoding import encode_frame
from forebay.format.frame.head import BODY_MIN, FrameHead, Kind, payload_start
from forebay.records import OFFSET_MAX, Bytes, Gap, Reason

_STATE: Final = struct.Struct("<QQQQII")
_ENTRIES: Final = struct.Struct("<II")
_ENTRY: Final = struct.Struct("<QQIIQ")
_GAP: Final = struct.Struct("<QQII")
_MARK: Final = struct.Struct("<II")
_DELETE: Final = struct.Struct("<QQII")
_FLOOR: Final = struct.Struct("<QQII")
assert (_STATE.size, _ENTRY.size, _GAP.size, _DELETE.size, _FLOOR.size) == (40, 32, 24, 24, 24)

_RESTATED: Final = 1
_CONTINUES: Final = 2
_CLEAN: Final = 1
_ORIGIN_REACH: Final = 2**32
"""How far behind its origin a delete frame can name offsets."""
_JOINING_BYTES: Final = 64
"""No bitmap of a window takes more beyond its own size when joined to others: 4 bytes for each of 16 containers."""


class WindowEntry(NamedTuple):
    """Appends of one producer with rising sequences, `count` records each, whose offsets follow each other."""

    producer: int
    sequence: int
    appends: int
    count: int  # type: ignore[assignment]
    offset: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's local state. `identity` names the boot and mount under which bytes survive a killed process."""

    reserved_end: int
    previous_end: int
    earliest: int
    evict_floor: int
    identity: str
    window: tuple[WindowEntry, ...] = ()
    restated: bool = False
    continues: bool = False


class Floor(NamedTuple):
    """The watermarks of a shard. `reason` is why `evict_floor` last moved; `None` if it never did."""

    earliest: int
    evict_floor: int
    reason: Reason | None


NO_FLOOR: Final = Floor(0, 0, None)
"""The watermarks of a shard from which nothing was deleted or evicted."""


def higher(one: Floor, other: Floor) -> Floor:
    """Both watermarks where the further of the two has them; the reason goes with `evict_floor`."""
    top = other if other.evict_floor > one.evict_floor else one
    return Floor(max(one.earliest, other.earliest), top.evict_floor, top.reason)


def encode_state(
    state: State,
    *,
    frame_bytes_max: int,
    salt_crc: int,
    next_offset: int,
    epoch: int,
    durable: int,
    appended_at: int,
) -> list[bytes]:
    """The state as one frame, or as several where its window is too large for one."""
    identity = state.identity.encode()
    identity += PADDING[len(identity) & 7]
    room = (frame_bytes_max - BODY_MIN - _STATE.size - len(identity) - _ENTRIES.size) // _ENTRY.size
    assert room > 0, "frame_bytes_max leaves no room for a window entry"
    frames = []
    for first in range(0, max(1, len(state.window)), room):
        part = state.window[first : first + room]
        continues = state.continues or first + room < len(state.window)
        flags = (_RESTATED if state.restated and not first else 0) | (_CONTINUES if continues else 0)
        payload = _state_payload(state, identity, part, flags)
        frames.append(_control(Kind.STATE, payload, salt_crc, next_offset, epoch, durable, appended_at))
    return frames


def _state_payload(state: State, identity: bytes, window: tuple[WindowEntry, ...], flags: int) -> bytes:
    size = len(state.identity.encode())
    head = _STATE.pack(state.reserved_end, state.previous_end, state.earliest, state.evict_floor, flags, size)
    return b"".join([head, identity, _ENTRIES.pack(len(window), 0), *[_ENTRY.pack(*entry) for entry in window]])


def encode_gap(gap: Gap, *, salt_crc: int, next_offset: int, epoch: int, durable: int, appended_at: int) -> bytes:
    """A frame that says why `[gap.start, gap.stop)` holds no record."""
    payload = _GAP.pack(gap.start, gap.stop, gap.reason, 0)
    return _control(Kind.GAP, payload, salt_crc, next_offset, epoch, durable, appended_at)


def encode_mark(*, clean: bool, salt_crc: int, next_offset: int, epoch: int, durable: int, appended_at: int) -> bytes:
    """A frame whose head carries the durable mark; `clean` says that the log was closed here."""
    payload = _MARK.pack(_CLEAN if clean else 0, 0)
    return _control(Kind.MARK, payload, salt_crc, next_offset, epoch, durable, appended_at)


def encode_delete(
    deleted: OffsetSet,
    *,
    frame_bytes_max: int,
    salt_crc: int,
    next_offset: int,
    epoch: int,
    durable: int,
    appended_at: int,
) -> list[bytes]:
    """The deleted offsets as one frame, or as several that say the same together; none for an empty set."""
    room = (frame_bytes_max - BODY_MIN - _DELETE.size) & ~7
    frames = []
    for origin, bitmap, stored in _deleted_parts(deleted, room):
        head = _DELETE.pack(origin, len(bitmap), len(stored), 0)
        payload = head + stored + PADDING[len(stored) & 7]
        frames.append(_control(Kind.DELETE, payload, salt_crc, next_offset, epoch, durable, appended_at))
    return frames


def _deleted_parts(deleted: OffsetSet, room: int) -> Iterator[tuple[int, BitMap, bytes]]:
    """Origin, bitmap and stored bitmap of each frame, with as many windows in it as surely have room."""
    group: list[tuple[int, BitMap]] = []
    size = 0
    for start, bitmap in deleted.windows():
        for part, stored in _halved(bitmap, room):
            needed = len(stored) + _JOINING_BYTES
            if group and (size + needed > room or start + WINDOW - group[0][0] > _ORIGIN_REACH):
                yield _joined(group)
                group, size = [], 0
            group.append((start, part))
            size += needed
    if group:
        yield _joined(group)


def _joined(group: list[tuple[int, BitMap]]) -> tuple[int, BitMap, bytes]:
    origin = group[0][0]
    bitmap = BitMap().union(*[part.shift(start - origin) for start, part in group])
    return origin, bitmap, encode_bitmap(bitmap)


def _halved(bitmap: BitMap, room: int) -> list[tuple[BitMap, bytes]]:
    """The bitmap in pieces that have room, each with its stored form."""
    stored = encode_bitmap(bitmap)
    if len(stored) <= room:
        return [(bitmap, stored)]
    assert len(bitmap) > 1, "frame_bytes_max leaves no room for an offset"
    middle = len(bitmap) // 2
    return _halved(bitmap[:middle], room) + _halved(bitmap[middle:], room)


def encode_floor(floor: Floor, *, salt_crc: int, next_offset: int, epoch: int, durable: int, appended_at: int) -> bytes:
    """A frame that moves the watermarks of the shard."""
    payload = _FLOOR.pack(floor.earliest, floor.evict_floor, floor.reason or 0, 0)
    return _control(Kind.FLOOR, payload, salt_crc, next_offset, epoch, durable, appended_at)


def _control(
    kind: Kind, payload: bytes, salt_crc: int, next_offset: int, epoch: int, durable: int, appended_at: int
) -> bytes:
    return encode_frame(
        salt_crc=salt_crc,
        base=next_offset,
        kind=kind,
        codec=0,
        columns=0,
        count=0,
        epoch=epoch,
        durable=durable,
        appended_at=appended_at,
        runs=(),
        payload=(payload,),
    )


def decode_state(buffer: Bytes, position: int, head: FrameHead) -> State:
    """The state in the whole state frame at `position`."""
    assert head.kind == Kind.STATE
    body = _payload(buffer, position, head)
    if len(body) < _STATE.size:
        raise Corrupt(f"state frame at byte {position} is too short: {len(body)} bytes")
    reserved_end, previous_end, earliest, evict_floor, flags, size = _STATE.unpack_from(body)
    entries = _STATE.size + ((size + 7) & ~7) + _ENTRIES.size
    if entries > len(body):
        raise Corrupt(f"state frame at byte {position}: an identity of {size} bytes does not fit")
    count, _ = _ENTRIES.unpack_from(body, entries - _ENTRIES.size)
    if entries + count * _ENTRY.size != len(body):
        raise Corrupt(f"state frame at byte {position}: {count} window entries do not fit its length")
    return State(
        reserved_end=reserved_end,
        previous_end=previous_end,
        earliest=earliest,
        evict_floor=evict_floor,
        identity=_text(bytes(body[_STATE.size : _STATE.size + size]), position),
        window=tuple(map(WindowEntry._make, _ENTRY.iter_unpack(body[entries:]))),
        restated=bool(flags & _RESTATED),
        continues=bool(flags & _CONTINUES),
    )


def decode_gap(buffer: Bytes, position: int, head: FrameHead) -> Gap:
    """The gap named by the whole gap frame at `position`."""
    start, stop, reason, _ = _fields(_GAP, Kind.GAP, buffer, position, head)
    if start > stop:
        raise Corrupt(f"gap frame at byte {position} ends at {stop}, before its start {start}")
    return Gap(start, stop, reason_of(reason))


def _fields(layout: struct.Struct, kind: Kind, buffer: Bytes, position: int, head: FrameHead) -> tuple[int, ...]:
    """The numbers in the whole frame of this kind at `position`, whose body is no more than them."""
    assert head.kind == kind
    body = _payload(buffer, position, head)
    if len(body) != layout.size:
        raise Corrupt(f"{kind.name.lower()} frame at byte {position} has {len(body)} bytes, expected {layout.size}")
    return layout.unpack(body)


def reason_of(number: int) -> Reason:
    """The reason with this stored number."""
    try:
        return Reason(number)
    except ValueError:
        raise UnsupportedFormat(f"a gap has the reason {number}, known only to a newer version: upgrade") from None


def decode_mark(buffer: Bytes, position: int, head: FrameHead) -> bool:
    """Whether the whole mark frame at `position` says that the log was closed there."""
    flags, _ = _fields(_MARK, Kind.MARK, buffer, position, head)
    return bool(flags & _CLEAN)


def decode_delete(buffer: Bytes, position: int, head: FrameHead) -> OffsetSet:
    """The offsets that the whole delete frame at `position` says were deleted."""
    assert head.kind == Kind.DELETE
    body = _payload(buffer, position, head)
    if len(body) < _DELETE.size:
        raise Corrupt(f"delete frame at byte {position} is too short: {len(body)} bytes")
    origin, count, size, _ = _DELETE.unpack_from(body)
    if _DELETE.size + ((size + 7) & ~7) != len(body) or origin % WINDOW:
        raise Corrupt(f"delete frame at byte {position}: a bitmap of {size} bytes from {origin} on does not fit")
    bitmap = decode_bitmap(bytes(body[_DELETE.size : _DELETE.size + size]), count)
    if not bitmap or origin + bitmap.max() >= OFFSET_MAX:
        raise Corrupt(f"delete frame at byte {position} names no offset, or one that is too large")
    starts = range(bitmap.min() & -WINDOW, bitmap.max() + 1, WINDOW)
    parts = {start: bitmap & BitMap(range(start, min(start + WINDOW, _ORIGIN_REACH))) for start in starts}
    return OffsetSet({origin + start: part.shift(-start) for start, part in parts.items()})


def decode_floor(buffer: Bytes, position: int, head: FrameHead) -> Floor:
    """The watermarks set by the whole floor frame at `position`."""
    earliest, evict_floor, reason, _ = _fields(_FLOOR, Kind.FLOOR, buffer, position, head)
    if evict_floor > earliest:
        raise Corrupt(f"floor frame at byte {position}: {evict_floor} was evicted, but {earliest} is the first record")
    return Floor(earliest, evict_floor, reason_of(reason) if reason else None)


def _payload(buffer: Bytes, position: int, head: FrameHead) -> memoryview:
    return memoryview(buffer)[payload_start(position, head) : position + head.length]


def _text(text: bytes, position: int) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise Corrupt(f"state frame at byte {position}: its identity is not utf8: {error}") from error
