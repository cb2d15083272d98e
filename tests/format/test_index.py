"""Index files: exact bytes, look-ups, and refusals."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Corrupt
from forebay.format.frame.head import Verdict
from forebay.format.index.sections import (
    FOOTER_BYTES,
    HEADER_BYTES,
    SECTION_BYTES,
    Footer,
    FrameEntries,
    Section,
    SectionKind,
    decode_footer,
    decode_frames,
    decode_gaps,
    decode_index,
    decode_table,
    encode_footer,
    encode_index,
    find_offset,
    find_time,
    frame_entries,
    table_bytes,
)
from tests.format.samples import ENTRY_ROWS, FOOTER, GAP

_INDEX = encode_index(FOOTER, frame_entries(ENTRY_ROWS), [GAP])


def _footer(index: bytes) -> Footer:
    footer = decode_footer(index)
    assert isinstance(footer, Footer)
    return footer


def test_index_is_exactly_these_bytes() -> None:
    frames = struct.pack(
        "<QQIIqqqQQIIqqqQQIIqqq",
        *(42, 64, 168, 1, 10, 20, 20),
        *(43, 232, 4096, 100, 5, 15, 20),
        *(150, 4328, 88, 3, 30, 40, 40),
    )
    gaps = struct.pack("<QQII", 30, 42, 1, 0)
    header = struct.pack("<4sHHI", b"FBYI", 1, 0, 2)
    table = struct.pack(
        "<IIQQIIIIQQII",
        *(1, 0, 80, len(frames), zlib.crc32(frames), 0),
        *(2, 0, 80 + len(frames), len(gaps), zlib.crc32(gaps), 0),
    )

    assert _INDEX[:-FOOTER_BYTES] == header + zlib.crc32(header).to_bytes(4, "little") + table + frames + gaps
    footer = _footer(_INDEX)
    assert (footer.table_position, footer.sections, footer.index_bytes) == (16, 2, len(_INDEX))
    assert (HEADER_BYTES, SECTION_BYTES, FOOTER_BYTES) == (16, 32, 128)


def test_index_is_read_from_the_back_piece_by_piece() -> None:
    footer = _footer(_INDEX[-FOOTER_BYTES:])
    table = decode_table(_INDEX[footer.table_position :][: table_bytes(footer)], footer)
    frames, gaps = (_INDEX[section.position : section.position + section.length] for section in table)

    assert [section.kind for section in table] == [SectionKind.FRAMES, SectionKind.GAPS]
    assert decode_frames(frames, table[0]).tolist() == frame_entries(ENTRY_ROWS).tolist()
    assert decode_gaps(gaps, table[1]) == [GAP]


def test_footer_bounds_survive() -> None:
    footer = Footer(
        epoch=2**32 - 1,
        epoch_max=2**32 - 1,
        start=2**64 - 1,
        end=2**64 - 1,
        frames=2**32 - 1,
        records=2**64 - 1,
        time_min=-(2**63),
        time_max=2**63 - 1,
        appended_max=-(2**63),
        segment_bytes=2**64 - 1,
        segment_crc=2**32 - 1,
        content_hash=b"\xff" * 16,
        table_position=2**64 - 1,
        table_crc=2**32 - 1,
        sections=2**32 - 1,
        index_bytes=2**64 - 1,
    )

    assert decode_footer(encode_footer(footer)) == footer


def test_sections_of_unknown_kinds_are_skipped() -> None:
    body = b"a later section"
    table = struct.pack("<IIQQII", 99, 0, 48, len(body), zlib.crc32(body), 0)
    header = struct.pack("<4sHHI", b"FBYI", 1, 0, 1)
    footer = Footer(
        epoch=1,
        epoch_max=1,
        start=0,
        end=0,
        frames=0,
        records=0,
        time_min=0,
        time_max=0,
        appended_max=0,
        segment_bytes=0,
        segment_crc=0,
        content_hash=bytes(16),
        table_position=16,
        table_crc=zlib.crc32(table),
        sections=1,
        index_bytes=48 + len(body) + FOOTER_BYTES,
    )
    index = header + zlib.crc32(header).to_bytes(4, "little") + table + body + encode_footer(footer)

    found = decode_index(index)

    assert not isinstance(found, Verdict)
    assert (found[0], found[1].tolist(), found[2]) == (footer, [], [])


@pytest.mark.parametrize(
    ("ending", "verdict"),
    [
        (b"", Verdict.TORN),
        (bytes(FOOTER_BYTES), Verdict.TORN),
        (_INDEX[-FOOTER_BYTES + 1 :], Verdict.TORN),
        (b"\1" * FOOTER_BYTES, Verdict.DAMAGED),
    ],
)
def test_what_is_no_footer_gets_its_verdict(ending: bytes, verdict: Verdict) -> None:
    assert decode_footer(ending) is verdict


def test_footer_of_a_newer_version_is_newer() -> None:
    for place, number in ((4, 2), (6, 1)):
        packed = bytearray(_INDEX[-FOOTER_BYTES:-4])
        packed[place] = number
        assert decode_footer(bytes(packed) + zlib.crc32(packed).to_bytes(4, "little")) is Verdict.NEWER


def test_table_that_names_bytes_behind_the_end_is_corrupt() -> None:
    footer = _footer(_INDEX)
    table = struct.pack("<IIQQII", 1, 0, 2**60, 48, 0, 0)
    lying = Footer(
        **{name: getattr(footer, name) for name in footer.__struct_fields__}
        | {"sections": 1, "table_crc": zlib.crc32(table)}
    )

    with pytest.raises(Corrupt, match="behind its end"):
        decode_table(table, lying)


def test_section_of_a_broken_size_is_corrupt() -> None:
    body = bytes(47)

    with pytest.raises(Corrupt):
        decode_frames(body, Section(1, 0, 0, 47, zlib.crc32(body)))
    with pytest.raises(Corrupt):
        decode_gaps(body, Section(2, 0, 0, 47, zlib.crc32(body)))


def _entries(counts: list[int], gap: int, times: list[int]) -> FrameEntries:
    rows, offset = [], 100
    for count, time in zip(counts, times, strict=False):
        rows.append((offset, 0, 88, count, time - 5, time))
        offset += count + gap
    return frame_entries(rows)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 3), st.integers(90, 200))
def test_offset_is_found_where_it_is_covered_or_else_behind(counts: list[int], gap: int, offset: int) -> None:
    entries = _entries(counts, gap, [0] * len(counts))

    place = find_offset(entries, offset)

    ends = [int(row["offset"]) + int(row["count"]) for row in entries]
    assert place == next((i for i, end in enumerate(ends) if offset < end), len(ends))


@given(st.lists(st.integers(-50, 50), max_size=15), st.integers(-60, 60))
def test_time_is_found_exactly_also_out_of_order(times: list[int], wanted: int) -> None:
    entries = _entries([1] * len(times), 0, times)

    assert find_time(entries, wanted) == next((i for i, time in enumerate(times) if time >= wanted), None)
