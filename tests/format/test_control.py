"""Control frames byte by byte, split where they are too large, refused where they contradict themselves."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.control.frames import (
    Floor,
    State,
    WindowEntry,
    decode_delete,
    decode_floor,
    decode_gap,
    decode_mark,
    decode_state,
    encode_delete,
    encode_floor,
    encode_gap,
    encode_mark,
    encode_state,
)
from forebay.format.control.offsets import WINDOW, OffsetSet
from forebay.format.frame.encoding import encode_frame
from forebay.format.frame.head import FrameHead, Kind
from forebay.records import Gap, Reason
from tests.format.samples import DELETED, FLOOR, FRAME_MAX, GAP, SALT_CRC, STAMP, STATE, head_of
from tests.ledger import Ledger

_U64 = st.integers(0, 2**64 - 1)
_U32 = st.integers(0, 2**32 - 1)
_ENTRY = st.builds(WindowEntry, _U64, _U64, _U32, _U32, _U64)
_STATE = st.builds(
    State,
    reserved_end=_U64,
    previous_end=_U64,
    earliest=_U64,
    evict_floor=_U64,
    identity=st.text(max_size=20),
    window=st.lists(_ENTRY, max_size=20).map(tuple),
    restated=st.booleans(),
    continues=st.booleans(),
)


def _control(kind: Kind, payload: bytes) -> bytes:
    return encode_frame(
        salt_crc=SALT_CRC,
        base=1,
        kind=kind,
        codec=0,
        columns=0,
        count=0,
        epoch=1,
        durable=0,
        appended_at=0,
        runs=(),
        payload=[payload],
    )


def test_state_is_exactly_these_bytes() -> None:
    frames = encode_state(STATE, frame_bytes_max=FRAME_MAX, **STAMP)

    payload = (
        struct.pack("<QQQQII", 65_578, 42, 7, 3, 1, 14)
        + b"boot-1/mount-2\0\0"
        + struct.pack("<II", 2, 0)
        + struct.pack("<QQIIQ", 9, 0, 1000, 2, 5)
        + struct.pack("<QQIIQ", 2**64 - 1, 2**64 - 1, 1, 1, 41)
    )
    assert [frame[48:] for frame in frames] == [payload]
    assert head_of(frames[0]) == FrameHead(42, 48 + len(payload), Kind.STATE, 0, 0, 0, 3, 0, 40, 1_700_000_000_123)


def test_gap_and_mark_are_exactly_these_bytes() -> None:
    assert encode_gap(GAP, **STAMP)[48:] == struct.pack("<QQII", 30, 42, 1, 0)
    assert encode_mark(clean=True, **STAMP)[48:] == struct.pack("<II", 1, 0)
    assert encode_mark(clean=False, **STAMP)[48:] == bytes(8)


def test_delete_and_floor_are_exactly_these_bytes() -> None:
    places = struct.pack("<HHHH", 3, 5, 7, 0xFFFF)[:6]
    bitmap = (
        bytes.fromhex("3b30 0200 04")
        + struct.pack("<HHHHHH", 0, 2, 15, 0, 16, 4999)
        + places
        + struct.pack("<H", 0xFFFF)
        + struct.pack("<HHH", 1, 0, 4999)
    )

    (delete,) = encode_delete(DELETED, frame_bytes_max=FRAME_MAX, **STAMP)

    assert delete[48:] == struct.pack("<QQII", 0, 5004, len(bitmap), 0) + bitmap + bytes(-len(bitmap) & 7)
    assert head_of(delete) == FrameHead(42, len(delete), 130, 0, 0, 0, 3, 0, 40, 1_700_000_000_123)
    assert encode_floor(FLOOR, **STAMP)[48:] == struct.pack("<QQII", 40, 30, 4, 0)
    assert encode_floor(Floor(40, 0, None), **STAMP)[48:] == struct.pack("<QQII", 40, 0, 0, 0)
    assert head_of(encode_floor(FLOOR, **STAMP)).kind == 131


@given(_STATE)
def test_state_comes_back_as_it_was(state: State) -> None:
    (frame,) = encode_state(state, frame_bytes_max=FRAME_MAX, **STAMP)

    assert decode_state(frame, 0, head_of(frame)) == state


@given(_STATE, st.integers(200, 600))
def test_window_too_large_for_a_frame_continues_in_the_next(state: State, frame_bytes_max: int) -> None:
    state = msgspec.structs.replace(state, restated=True, continues=False)

    frames = encode_state(state, frame_bytes_max=frame_bytes_max, **STAMP)
    found = [decode_state(frame, 0, head_of(frame)) for frame in frames]

    assert all(len(frame) - 16 <= frame_bytes_max for frame in frames)
    assert [part.restated for part in found] == [True] + [False] * (len(found) - 1)
    assert [part.continues for part in found] == [True] * (len(found) - 1) + [False]
    assert tuple(entry for part in found for entry in part.window) == state.window
    assert {part.reserved_end for part in found} == {state.reserved_end}


@given(st.sampled_from(Reason), st.integers(0, 2**63), st.integers(0, 2**63 - 1))
def test_gap_comes_back_as_it_was(reason: Reason, start: int, length: int) -> None:
    gap = Gap(start, start + length, reason)
    frame = encode_gap(gap, **STAMP)

    assert decode_gap(frame, 0, head_of(frame)) == gap


_DELETED = st.builds(
    lambda scattered, far, start, length: (
        OffsetSet.of(scattered) | OffsetSet.of(far) | OffsetSet.of_range(start, start + length)
    ),
    st.sets(st.integers(0, 3 * WINDOW), max_size=60),
    st.sets(st.integers(2**32 - 3, 2**32 + 3) | st.integers(2**62, 2**63 - 2), max_size=5),
    st.integers(0, 2 * WINDOW),
    st.integers(0, 2 * WINDOW),
)


@given(_DELETED, st.integers(100, 700) | st.just(FRAME_MAX))
def test_deletes_come_back_from_frames_that_keep_to_their_limit(deleted: OffsetSet, frame_bytes_max: int) -> None:
    frames = encode_delete(deleted, frame_bytes_max=frame_bytes_max, **STAMP)

    found = OffsetSet()
    for frame in frames:
        assert len(frame) - 16 <= frame_bytes_max
        found |= decode_delete(frame, 0, head_of(frame))
    assert found == deleted


@pytest.mark.parametrize("frame_bytes_max", [8 * 1024 * 1024, 20_000, 8_000, 104])
def test_dense_deletes_fit_frames_of_any_limit(frame_bytes_max: int, ledger: Ledger) -> None:
    deleted = OffsetSet.of(range(5, 2 * WINDOW if frame_bytes_max > 104 else 2_000, 2))

    frames = encode_delete(deleted, frame_bytes_max=frame_bytes_max, **STAMP)

    found = OffsetSet()
    for frame in frames:
        assert len(frame) - 16 <= frame_bytes_max
        found |= decode_delete(frame, 0, head_of(frame))
    assert found == deleted
    ledger.count("bytes of delete frames", n=sum(map(len, frames)), offsets=str(len(deleted)), frames=str(len(frames)))


@pytest.mark.slow
def test_delete_of_a_large_range_is_one_small_frame() -> None:
    (frame,) = encode_delete(OffsetSet.of_range(3, 200 * WINDOW), frame_bytes_max=FRAME_MAX, **STAMP)

    assert len(frame) < 64 * 1024
    assert len(decode_delete(frame, 0, head_of(frame))) == 200 * WINDOW - 3


def test_delete_of_nothing_is_no_frame() -> None:
    assert encode_delete(OffsetSet(), frame_bytes_max=FRAME_MAX, **STAMP) == []


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.none() | st.sampled_from(Reason))
def test_floor_comes_back_as_it_was(evict_floor: int, more: int, reason: Reason | None) -> None:
    floor = Floor(min(evict_floor + more, 2**64 - 1), evict_floor, reason)
    frame = encode_floor(floor, **STAMP)

    assert decode_floor(frame, 0, head_of(frame)) == floor


@pytest.mark.parametrize("clean", [True, False])
def test_mark_comes_back_as_it_was(*, clean: bool) -> None:
    frame = encode_mark(clean=clean, **STAMP)

    assert decode_mark(frame, 0, head_of(frame)) is clean


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        bytes(32),
        struct.pack("<QQQQII", 0, 0, 0, 0, 0, 0),
        struct.pack("<QQQQII", 0, 0, 0, 0, 0, 2**32 - 1) + bytes(64),
        struct.pack("<QQQQIIII", 0, 0, 0, 0, 0, 0, 1, 0),
        struct.pack("<QQQQIIII", 0, 0, 0, 0, 0, 0, 2**32 - 1, 0) + bytes(32),
        struct.pack("<QQQQIIII", 0, 0, 0, 0, 0, 0, 0, 0) + bytes(8),
        struct.pack("<QQQQII", 0, 0, 0, 0, 0, 1) + b"\xff" + bytes(7) + bytes(8),
    ],
)
def test_state_that_contradicts_its_length_is_corrupt(payload: bytes) -> None:
    frame = _control(Kind.STATE, payload)

    with pytest.raises(Corrupt):
        decode_state(frame, 0, head_of(frame))


def test_gap_and_mark_of_a_wrong_size_or_order_are_corrupt() -> None:
    for payload in (b"", bytes(16), bytes(32), struct.pack("<QQII", 2, 1, 1, 0)):
        frame = _control(Kind.GAP, payload)
        with pytest.raises(Corrupt):
            decode_gap(frame, 0, head_of(frame))
    for payload in (b"", bytes(16)):
        frame = _control(Kind.MARK, payload)
        with pytest.raises(Corrupt):
            decode_mark(frame, 0, head_of(frame))


_BITMAP = bytes.fromhex("3a300000 01000000 0000 0000 10000000 0500")
"""Of the number 5 alone."""


def test_the_hand_made_delete_is_read() -> None:
    frame = _control(Kind.DELETE, struct.pack("<QQII", WINDOW, 1, 18, 0) + _BITMAP + bytes(6))

    assert list(decode_delete(frame, 0, head_of(frame))) == [WINDOW + 5]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        bytes(16),
        bytes(24),
        struct.pack("<QQII", 0, 2, 18, 0) + _BITMAP + bytes(6),
        struct.pack("<QQII", 1, 1, 18, 0) + _BITMAP + bytes(6),
        struct.pack("<QQII", 0, 1, 18, 0) + _BITMAP + bytes(14),
        struct.pack("<QQII", 0, 1, 19, 0) + _BITMAP + bytes(6),
        struct.pack("<QQII", 0, 1, 2**32 - 1, 0) + _BITMAP + bytes(6),
        struct.pack("<QQII", 2**63, 1, 18, 0) + _BITMAP + bytes(6),
        struct.pack("<QQII", 0, 0, 8, 0) + bytes.fromhex("3a300000 00000000"),
    ],
)
def test_delete_that_contradicts_itself_is_corrupt(payload: bytes) -> None:
    frame = _control(Kind.DELETE, payload)

    with pytest.raises(Corrupt):
        decode_delete(frame, 0, head_of(frame))


def test_floor_of_a_wrong_size_or_order_is_corrupt_and_of_a_new_reason_unsupported() -> None:
    for payload in (b"", bytes(16), bytes(32), struct.pack("<QQII", 1, 2, 4, 0)):
        frame = _control(Kind.FLOOR, payload)
        with pytest.raises(Corrupt):
            decode_floor(frame, 0, head_of(frame))
    frame = _control(Kind.FLOOR, struct.pack("<QQII", 2, 1, 99, 0))
    with pytest.raises(UnsupportedFormat, match="upgrade"):
        decode_floor(frame, 0, head_of(frame))


def test_reason_of_a_newer_version_is_unsupported_and_not_corrupt() -> None:
    frame = _control(Kind.GAP, struct.pack("<QQII", 1, 2, 99, 0))

    with pytest.raises(UnsupportedFormat, match="upgrade"):
        decode_gap(frame, 0, head_of(frame))


_DECODE = {
    Kind.STATE: decode_state,
    Kind.GAP: decode_gap,
    Kind.MARK: decode_mark,
    Kind.DELETE: decode_delete,
    Kind.FLOOR: decode_floor,
}


@given(st.sampled_from(list(_DECODE)), st.integers(0, 20), st.binary(min_size=160, max_size=160))
def test_any_control_payload_is_read_or_refused(kind: Kind, eights: int, noise: bytes) -> None:
    frame = _control(kind, noise[: 8 * eights])

    try:
        _DECODE[kind](frame, 0, head_of(frame))
    except (Corrupt, UnsupportedFormat):
        return
