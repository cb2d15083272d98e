"""Frames byte by byte, every verdict on them, and scans that read many alike."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import Corrupt
from forebay.format.frame.encoding import close_frame, encode_frame, runs_of
from forebay.format.frame.head import FrameHead, Kind, Verdict, read_frame
from forebay.format.frame.scan import scan_frames
from forebay.records import Bytes, Run
from tests.format.samples import FRAME_MAX, ONE_ROW, PLAIN_ROW, ROW, SALT, SALT_CRC, frame_of, head_of

_U32 = 2**32 - 1
_U64 = 2**64 - 1


def _frame(body: bytes, base: int = 7) -> bytes:
    """A frame around any body, with a crc that holds."""
    return close_frame(SALT_CRC, base, body)


def _body(version: int = 1, kind: int = 0, codec: int = 0, columns: int = 0, count: int = 0) -> bytes:
    return struct.pack("<BBBBIIIQq", version, kind, codec, columns, count, 1, 0, 0, 0)


def test_one_record_is_exactly_these_bytes() -> None:
    body = (
        bytes([1, 0, 0, 0])
        + (1).to_bytes(4, "little")
        + (3).to_bytes(4, "little")
        + (0).to_bytes(4, "little")
        + (5).to_bytes(8, "little")
        + (1_700_000_000_123).to_bytes(8, "little")
        + (1_700_000_000_000).to_bytes(8, "little")
        + (0).to_bytes(4, "little")
        + (4).to_bytes(4, "little")
        + b"paid\0\0\0\0"
    )
    first = (7).to_bytes(8, "little") + len(body).to_bytes(4, "little")
    crc = zlib.crc32(body, zlib.crc32(first, zlib.crc32(SALT)))

    assert frame_of(ONE_ROW) == first + crc.to_bytes(4, "little") + body


def test_runs_stand_between_head_and_payload_padded() -> None:
    runs = (Run(2, 9, 4), Run(1, 0, 0))

    frame = encode_frame(
        salt_crc=SALT_CRC,
        base=1,
        kind=0,
        codec=0,
        columns=0,
        count=3,
        epoch=1,
        durable=0,
        appended_at=0,
        runs=runs,
        payload=[b"payload.", memoryview(b"and more")],
    )

    section = struct.pack("<IQQIQQ", 2, 9, 4, 1, 0, 0)
    assert frame[48:] == section + b"payload.and more"
    assert len(section) == 40
    assert runs_of(frame, 0, head_of(frame)) == list(runs)


def test_bounds_of_every_field_survive() -> None:
    frame = encode_frame(
        salt_crc=SALT_CRC,
        base=_U64,
        kind=0x7F,
        codec=1,
        columns=127,
        count=_U32,
        epoch=_U32,
        durable=_U64,
        appended_at=-(2**63),
        runs=[Run(_U32, _U64, _U64)],
        payload=[],
    )

    head = head_of(frame)

    assert head == FrameHead(_U64, 72, 0x7F, 1, 127, _U32, _U32, 1, _U64, -(2**63))
    assert runs_of(frame, 0, head) == [Run(_U32, _U64, _U64)]


@pytest.mark.parametrize("length", [0, 8, 24, 33, 36, 2**32 - 8])
def test_length_out_of_bounds_is_damage_before_anything_is_read(length: int) -> None:
    header = struct.pack("<QII", 7, length, 0)

    assert read_frame(header, 0, SALT_CRC, FRAME_MAX) is Verdict.DAMAGED
    assert read_frame(header + bytes(100), 0, SALT_CRC, FRAME_MAX) is Verdict.DAMAGED


def test_frame_may_be_as_long_as_the_limit_and_no_longer() -> None:
    frame = _frame(_body() + bytes(968))

    assert isinstance(read_frame(frame, 0, SALT_CRC, 1000), FrameHead)
    assert read_frame(frame, 0, SALT_CRC, 992) is Verdict.DAMAGED


def test_end_of_the_buffer_inside_a_frame_is_torn() -> None:
    frame = frame_of(ONE_ROW)

    assert {read_frame(frame[:n], 0, SALT_CRC, FRAME_MAX) for n in range(len(frame))} == {Verdict.TORN}
    assert read_frame(frame, len(frame), SALT_CRC, FRAME_MAX) is Verdict.TORN


def test_frame_of_another_salt_is_damage() -> None:
    assert read_frame(frame_of(ONE_ROW), 0, SALT_CRC ^ 1, FRAME_MAX) is Verdict.DAMAGED


def test_160_zero_bytes_are_no_record() -> None:
    assert read_frame(bytes(160), 0, SALT_CRC, FRAME_MAX) is Verdict.DAMAGED
    assert scan_frames(bytes(160), 0, SALT_CRC, FRAME_MAX).heads == []


@pytest.mark.parametrize(
    "body",
    [
        _body(version=2),
        _body(version=0),
        _body(codec=2),
        _body(codec=3),
        _body(kind=0x80),
        _body(kind=0x81),
        _body(kind=0x85),
        _body(kind=0xFF),
    ],
)
def test_what_only_a_newer_version_knows_is_newer_and_not_damage(body: bytes) -> None:
    assert read_frame(_frame(body), 0, SALT_CRC, FRAME_MAX) is Verdict.NEWER


@pytest.mark.parametrize("kind", [*Kind, 0x42])
def test_known_kinds_and_unknown_ones_that_may_be_skipped_are_whole(kind: int) -> None:
    assert head_of(_frame(_body(kind=kind))).kind == kind


def test_runs_that_do_not_fit_or_add_up_are_corrupt() -> None:
    too_many = struct.pack("<BBBBIIIQq", 1, 0, 0, 0, 1, 1, 1000, 0, 0)
    wrong_sum = struct.pack("<BBBBIIIQq", 1, 0, 0, 0, 3, 1, 1, 0, 0) + struct.pack("<IQQ", 2, 9, 4) + bytes(4)

    for body in (too_many, wrong_sum):
        frame = _frame(body)
        with pytest.raises(Corrupt):
            runs_of(frame, 0, head_of(frame))


def _one_by_one(buffer: Bytes, start: int) -> tuple[list[FrameHead], list[int], int, Verdict]:
    heads: list[FrameHead] = []
    positions: list[int] = []
    position = start
    while position < len(buffer):
        head = read_frame(buffer, position, SALT_CRC, FRAME_MAX)
        if isinstance(head, Verdict):
            return heads, positions, position, head
        heads.append(head)
        positions.append(position)
        position += head.length
    return heads, positions, position, Verdict.WHOLE


def _scanned(buffer: Bytes, start: int) -> tuple[list[FrameHead], list[int], int, Verdict]:
    scan = scan_frames(buffer, start, SALT_CRC, FRAME_MAX)
    return scan.heads, scan.positions, scan.stop, scan.verdict


_SHAPES = st.lists(st.tuples(ROW | PLAIN_ROW, st.integers(1, 150)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(shapes=_SHAPES, flip=st.none() | st.tuples(st.floats(0, 1), st.integers(1, 255)), cut=st.integers(0, 200))
def test_scan_of_many_equals_reading_one_by_one(
    shapes: list[tuple[tuple[bytes | None, bytes | None, str | None, tuple[()], int], int]],
    flip: tuple[float, int] | None,
    cut: int,
) -> None:
    frames = [frame_of([row], base=i) for row, times in shapes for i in range(times)]
    buffer = bytearray(64) + b"".join(frames)
    del buffer[max(64, len(buffer) - cut) :]
    if flip is not None and len(buffer) > 64:
        buffer[64 + int(flip[0] * (len(buffer) - 65))] ^= flip[1]

    expected = _one_by_one(buffer, 64)

    assert _scanned(bytes(buffer), 64) == expected
    assert _scanned(memoryview(buffer), 64) == expected


def test_scan_stops_before_a_frame_of_a_newer_version() -> None:
    frames = [frame_of(ONE_ROW, base=i) for i in range(100)]

    for place in (3, 99):
        changed = [*frames[:place], _frame(_body(version=2) + bytes(24)), *frames[place + 1 :]]
        scan = scan_frames(b"".join(changed), 0, SALT_CRC, FRAME_MAX)

        assert (len(scan.heads), scan.stop, scan.verdict) == (place, place * len(frames[0]), Verdict.NEWER)


@pytest.mark.parametrize("kind", range(256))
def test_kinds_are_known_to_a_scan_of_many_frames_as_they_are_one_by_one(kind: int) -> None:
    frames = [_frame(_body(kind=kind if i == 90 else Kind.MARK)) for i in range(100)]

    found = _scanned(b"".join(frames), 0)

    assert found == _one_by_one(b"".join(frames), 0)
    assert found[3] is (Verdict.WHOLE if kind < 128 or kind in list(Kind) else Verdict.NEWER)


@pytest.mark.parametrize("frames", [3, 300])
def test_table_has_the_fields_of_the_heads(frames: int) -> None:
    buffer = b"".join(frame_of(ONE_ROW, base=i) for i in range(frames))

    scan = scan_frames(buffer, 0, SALT_CRC, FRAME_MAX)

    rows = list(zip(*[field.tolist() for field in scan.table], strict=True))
    assert rows == [(position, *head) for position, head in zip(scan.positions, scan.heads, strict=True)]
    assert len(rows) == frames


def test_empty_buffer_is_a_whole_scan_of_nothing() -> None:
    assert _scanned(b"", 0) == ([], [], 0, Verdict.WHOLE)
    assert len(scan_frames(b"", 0, SALT_CRC, FRAME_MAX).table.base) == 0
