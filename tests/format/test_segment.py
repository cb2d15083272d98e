"""Segment headers and names."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.format.files.segment import (
    HEADER_BYTES,
    SegmentHeader,
    decode_header,
    encode_header,
    index_name,
    parse_segment_name,
    segment_name,
)
from forebay.format.frame.head import Verdict
from tests.format.samples import HEADER, SALT, TOPIC_ID


def test_header_is_exactly_these_64_bytes() -> None:
    created = (1_700_000_000_123).to_bytes(6, "little")
    head = (
        b"FBYS\x01\x00"
        + created
        + struct.pack("<II", 5, 3)
        + bytes.fromhex(TOPIC_ID)
        + SALT
        + (42).to_bytes(8, "little")
    )

    assert encode_header(HEADER) == head + zlib.crc32(head).to_bytes(4, "little")
    assert len(encode_header(HEADER)) == HEADER_BYTES == 64


@given(
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**48 - 1),
    st.binary(min_size=16, max_size=16),
)
def test_header_comes_back_as_it_was(
    topic_id: bytes, partition: int, epoch: int, start: int, created: int, salt: bytes
) -> None:
    header = SegmentHeader(topic_id.hex(), partition, epoch, start, created, salt)

    assert decode_header(encode_header(header) + b"more") == header
    assert decode_header(memoryview(encode_header(header))) == header


def _with_crc(head: bytes) -> bytes:
    return head + zlib.crc32(head).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("buffer", "verdict"),
    [
        (b"", Verdict.TORN),
        (bytes(63), Verdict.TORN),
        (bytes(4096), Verdict.TORN),
        (encode_header(HEADER)[:63], Verdict.TORN),
        (b"\1" * 64, Verdict.DAMAGED),
        (_with_crc(b"OTHR" + encode_header(HEADER)[4:60]), Verdict.DAMAGED),
        (_with_crc(b"FBYS\x02" + encode_header(HEADER)[5:60]), Verdict.NEWER),
        (_with_crc(b"FBYS\x01\x01" + encode_header(HEADER)[6:60]), Verdict.NEWER),
    ],
)
def test_what_is_no_header_gets_its_verdict(buffer: bytes, verdict: Verdict) -> None:
    assert decode_header(buffer) is verdict


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1))
def test_name_says_start_and_epoch(start: int, epoch: int) -> None:
    assert parse_segment_name(segment_name(start, epoch)) == (start, epoch)


def test_names_sort_like_offsets() -> None:
    starts = [0, 9, 10, 99, 2**40, 2**63 - 1]

    assert sorted(segment_name(start, 1) for start in reversed(starts)) == [segment_name(s, 1) for s in starts]


def test_names_are_padded() -> None:
    assert segment_name(42, 3) == "00000000000000000042-00000003.seg"
    assert index_name(segment_name(42, 3)) == "00000000000000000042-00000003.idx"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "checkpoint",
        "00000000000000000042-00000003.idx",
        "00000000000000000042-00000003.seg.tmp",
        "00000000000000000042-0000003.seg",
        "00000000000000000042-000000003.seg",
        "0000000000000000042-00000003.seg",
        "00000000000000000042-00000003.seg\n",
        "+0000000000000000042-00000003.seg",
        "\u0660" * 20 + "-00000003.seg",
    ],
)
def test_other_names_are_no_segments(name: str) -> None:
    assert parse_segment_name(name) is None
