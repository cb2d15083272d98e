"""The sections that an index gains: keys, tags and sizes of all records, by frame and in order."""

from __future__ import annotations

import struct
import zlib
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.appends.queue import record_bytes
from forebay.errors import Corrupt
from forebay.format.columns.rows import Row, encode_rows
from forebay.format.frame.batch import batch_of
from forebay.format.frame.head import Verdict
from forebay.format.index.hashing import hash_bytes, hash_text
from forebay.format.index.lookups import LookupSections
from forebay.format.index.postings import Postings
from forebay.format.index.sections import (
    FOOTER_BYTES,
    Section,
    SectionKind,
    check_section,
    decode_index,
    decode_sizes,
    encode_index,
    encode_sizes,
    frame_entries,
    read_sections,
)
from tests.format.samples import ENTRY_ROWS, FOOTER, GAP, ROWS, batches_of_rows, section_bytes
from tests.ledger import Ledger

_START = 42
_GROUPS = st.lists(ROWS, max_size=4)


def _index(groups: list[list[Row]]) -> bytes:
    gathered = LookupSections(_START)
    for batch in batches_of_rows(groups, _START):
        gathered.add(batch)
    return encode_index(FOOTER, frame_entries(ENTRY_ROWS), [GAP], gathered.sections())


def _postings(index: bytes, kind: SectionKind) -> Postings:
    section, _ = section_bytes(index)[kind]
    return Postings(lambda position, length: index[position : position + length], section)


@given(_GROUPS)
def test_every_key_and_tag_is_found_and_no_null(groups: list[list[Row]]) -> None:
    index = _index(groups)
    rows = [row for group in groups for row in group]

    for kind, texts in (
        (SectionKind.KEY_POSTINGS, [key for _, key, _, _, _ in rows]),
        (SectionKind.TAG_POSTINGS, [None if tag is None else tag.encode() for _, _, tag, _, _ in rows]),
    ):
        postings = _postings(index, kind)
        assert postings.entries == sum(text is not None for text in texts)
        for wanted in {text for text in texts if text is not None}:
            (found,) = postings.find(hash_bytes(wanted))
            assert found.tolist() == [record for record, text in enumerate(texts) if text == wanted]


def test_record_is_counted_from_the_start_of_the_segment_also_behind_a_gap() -> None:
    gathered = LookupSections(_START)
    for first in (50, 1000):
        (batch,) = batches_of_rows([[(b"v", b"k", "t", (), 1)] * 2], first)
        gathered.add(batch.slice(first + 1, first + 2))
    index = encode_index(FOOTER, frame_entries([]), [], gathered.sections())

    assert [part.tolist() for part in _postings(index, SectionKind.KEY_POSTINGS).find(hash_bytes(b"k"))] == [[9, 959]]
    assert [part.tolist() for part in _postings(index, SectionKind.TAG_POSTINGS).find(hash_text("t"))] == [[9, 959]]


def test_segment_with_a_record_too_far_behind_its_start_has_sizes_only() -> None:
    for last, kinds in ((2**32 - 1, {1, 2, 6, 3, 4}), (2**32, {1, 2, 6})):
        gathered = LookupSections(7)
        for first in (7, 7 + last):
            gathered.add(batch_of(encode_rows([(b"v", b"k", None, (), 1)]), base=first, epoch=1, appended_at=0))
        index = encode_index(FOOTER, frame_entries([]), [GAP], gathered.sections())

        assert section_bytes(index).keys() == kinds
        if SectionKind.KEY_POSTINGS in kinds:
            (found,) = _postings(index, SectionKind.KEY_POSTINGS).find(hash_bytes(b"k"))
            assert found.tolist() == [0, last]


@given(_GROUPS)
def test_sizes_are_the_running_total_of_what_an_append_counts(groups: list[list[Row]]) -> None:
    section, packed = section_bytes(_index(groups))[SectionKind.SIZES]
    totals = accumulate(sum(record_bytes(*row[:4]) for row in group) for group in groups)

    assert decode_sizes(packed, section).tolist() == list(totals)


@given(ROWS, st.integers(0, 39), st.integers(1, 40))
def test_size_of_a_record_is_what_an_append_counts(rows: list[Row], first: int, count: int) -> None:
    (batch,) = batches_of_rows([rows], 0)
    first = min(first, len(rows) - 1)

    part = batch.slice(first, first + count)

    assert part.sizes().tolist() == [record_bytes(*row[:4]) for row in rows[first : first + count]]


def test_sizes_are_exactly_these_bytes_and_refused_when_damaged() -> None:
    packed = encode_sizes([5, 2**40])
    section = Section(SectionKind.SIZES, 0, 0, 16, zlib.crc32(packed))

    assert packed == struct.pack("<QQ", 5, 2**40)
    for wrong in (packed[:8], packed + bytes(8), packed[:-1] + b"\1"):
        with pytest.raises(Corrupt, match="section 6"):
            decode_sizes(wrong, section)
    with pytest.raises(Corrupt):
        decode_sizes(packed[:12], Section(SectionKind.SIZES, 0, 0, 12, zlib.crc32(packed[:12])))


def test_sections_may_be_skipped_and_an_index_without_them_still_reads() -> None:
    plain = encode_index(FOOTER, frame_entries(ENTRY_ROWS), [GAP])
    grown = _index([[(b"v", b"k", "t", (), 1)]])

    before, after = decode_index(plain), decode_index(grown)

    assert not isinstance(before, Verdict) and not isinstance(after, Verdict)
    assert (before[1].tolist(), before[2]) == (after[1].tolist(), after[2])
    assert list(section_bytes(plain)) == [SectionKind.FRAMES, SectionKind.GAPS]
    assert list(section_bytes(grown)) == [SectionKind.FRAMES, SectionKind.GAPS, 6, 3, 4]
    assert {section.flags for section, _ in section_bytes(grown).values()} == {0}


def test_each_section_is_under_the_crc_of_the_table_too() -> None:
    for section, packed in section_bytes(_index([[(b"v", b"k", "t", (), 1)]])).values():
        check_section(packed, section)
        with pytest.raises(Corrupt):
            check_section(packed[:-1] + bytes([packed[-1] ^ 1]), section)


def test_sections_are_found_by_two_reads_and_refused_for_another_size() -> None:
    index = _index([[(b"v", b"k", "t", (), 1)]])
    reads = []

    def read(position: int, length: int) -> bytes:
        reads.append((position, length))
        return index[position : position + length]

    read_sections(read, len(index))

    assert reads == [(len(index) - FOOTER_BYTES, FOOTER_BYTES), (16, 5 * 32)]
    assert read_sections(lambda _, length: bytes(length), 9000) is Verdict.TORN
    with pytest.raises(Corrupt, match="does not fit its footer"):
        read_sections(lambda _, length: index[-length:], len(index) + 8)


def test_index_bytes_per_record_stay_small(ledger: Ledger) -> None:
    rows: list[Row] = [(b"v" * 100, b"customer-%07d" % row, f"tag-{row % 10}", (), row) for row in range(50_000)]
    packed = section_bytes(_index([rows[first : first + 5000] for first in range(0, len(rows), 5000)]))

    sizes = {kind: len(packed[kind][1]) / len(rows) for kind in (3, 4, 6)}

    for kind, size in sizes.items():
        ledger.count("index bytes per 1,000 records", n=round(size * 1000), section=SectionKind(kind).name.lower())
    assert sizes[3] < 12.1 and sizes[4] < 6 and sizes[6] < 0.01
