"""Frames behind damage are found, and nothing that only looks like one."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from forebay.format.checksum import salted
from forebay.format.frame.encoding import close_frame
from forebay.format.frame.head import FrameHead, Verdict, read_frame
from forebay.format.frame.resynchronisation import resync
from tests.format.samples import FRAME_MAX, ONE_ROW, SALT_CRC, frame_of

_FRAME = frame_of(ONE_ROW, base=50)


def _resync(buffer: bytes, position: int = 0, expected: int = 0, reserved_end: int = 1000) -> int | None:
    return resync(buffer, position, SALT_CRC, FRAME_MAX, expected, reserved_end)


def test_next_whole_frame_behind_damage_is_found() -> None:
    damaged = bytearray(_FRAME + _FRAME + _FRAME)
    damaged[20] ^= 1

    assert _resync(bytes(damaged)) == len(_FRAME)


def test_frame_at_the_position_itself_is_not_the_next() -> None:
    assert _resync(_FRAME + _FRAME) == len(_FRAME)
    assert _resync(_FRAME) is None


def test_offsets_outside_the_expected_range_are_not_frames_of_this_log() -> None:
    buffer = bytes(64) + _FRAME

    assert _resync(buffer, expected=50, reserved_end=50) == 64
    assert _resync(buffer, expected=51) is None
    assert _resync(buffer, reserved_end=49) is None


def test_only_8_byte_boundaries_count() -> None:
    assert [_resync(bytes(64 + shift) + _FRAME) for shift in range(9)] == [64, *[None] * 7, 72]


def test_frame_planted_in_a_value_under_another_salt_is_not_found() -> None:
    planted = frame_of(ONE_ROW, base=50, salt_crc=salted(b"another salt 16b"))
    value = bytes(-56 % 8) + planted * 3
    damaged = bytearray(frame_of([(value, None, None, (), 1)], base=49))
    damaged[17] ^= 1

    assert _resync(bytes(damaged)) is None
    assert _resync(bytes(damaged) + _FRAME) == len(damaged)


def test_frame_planted_under_the_same_salt_would_be_found() -> None:
    """The salt alone protects: this shows that the test above looks where the planted frame is."""
    damaged = bytearray(frame_of([(_FRAME, None, None, (), 1)], base=49))
    damaged[17] ^= 1

    assert _resync(bytes(damaged)) == 64


def test_frame_of_a_newer_version_is_found() -> None:
    newer = close_frame(SALT_CRC, 50, struct.pack("<BBBBIIIQq", 2, 0, 0, 0, 0, 0, 0, 0, 0))

    assert _resync(bytes(64) + newer) == 64


def test_frame_cut_at_the_end_is_not_found() -> None:
    assert _resync(bytes(64) + _FRAME[:-8]) is None


def test_crowd_of_false_headers_is_passed_in_one_reading() -> None:
    """Thousands of headers, each claiming a long body: checking each alone would read the bytes thousands of times."""
    size = 2 * 1024 * 1024
    crowd = struct.pack("<QII", 60, FRAME_MAX - 8, 0x12345678) * (size // 16)

    assert _resync(crowd + _FRAME + bytes(FRAME_MAX)) == len(crowd)
    assert _resync(crowd) is None


@given(
    st.lists(st.sampled_from([b"\0" * 8, _FRAME, struct.pack("<QII", 51, 64, 7), b"\xff" * 16]), max_size=40),
    st.booleans(),
)
def test_result_is_that_of_trying_every_boundary(pieces: list[bytes], crowded: bool) -> None:  # noqa: FBT001
    buffer = b"".join(pieces) + (struct.pack("<QII", 52, 800, 7) * 50 + bytes(1000) + _FRAME if crowded else b"")

    found = _resync(buffer)

    assert found == next((place for place in range(8, len(buffer), 8) if _is_frame(buffer, place)), None)


def _is_frame(buffer: bytes, place: int) -> bool:
    head = read_frame(buffer, place, SALT_CRC, FRAME_MAX)
    return head is Verdict.NEWER or isinstance(head, FrameHead)
