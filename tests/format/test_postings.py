"""Postings: exact bytes, the same answer as looking at every record, few bytes read, damage named."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Corrupt
from forebay.format.index.hashing import hash_bytes, hash_text
from forebay.format.index.postings import BLOCK_ENTRIES, Postings, encode_postings
from forebay.format.index.sections import Section
from tests.ledger import Ledger

_PREFIX = 1000
"""Where the section lies in the file that it is read from."""


class _File:
    """An index file around one section, and what was read of it."""

    def __init__(self, section: bytes) -> None:
        self._content = bytes(_PREFIX) + section + b"\xff" * 128
        self.section = Section(3, 0, _PREFIX, len(section), 0)
        self.reads: list[int] = []

    def read(self, position: int, length: int) -> bytes:
        assert position >= _PREFIX and position + length <= _PREFIX + self.section.length, "outside the section"
        self.reads.append(length)
        return self._content[position : position + length]

    def postings(self) -> Postings:
        return Postings(self.read, self.section)


def _section(entries: list[tuple[int, int]]) -> bytes:
    hashes, records = zip(*sorted(entries, key=lambda entry: entry[1]), strict=True) if entries else ((), ())
    return encode_postings(np.array(hashes, dtype=np.uint64), np.array(records, dtype=np.uint32))


def _joined(parts: Iterator[np.ndarray[tuple[int], np.dtype[np.uint32]]]) -> list[int]:
    return [record for part in parts for record in part.tolist()]


def _newest_first(parts: Iterator[np.ndarray[tuple[int], np.dtype[np.uint32]]]) -> list[int]:
    return [record for part in parts for record in part.tolist()[::-1]]


def test_postings_are_exactly_these_bytes() -> None:
    block = struct.pack("<QQQIIII", 5, 5, 2**64 - 1, 1, 3, 0, 0)
    head = struct.pack("<III", 3, 1024, 1)
    first = struct.pack("<QII", 5, 1, zlib.crc32(block))

    assert (
        _section([(2**64 - 1, 0), (5, 1), (5, 3)]) == head + struct.pack("<I", zlib.crc32(head + first)) + first + block
    )


def test_block_of_one_hash_leaves_it_out_where_the_next_begins_with_it() -> None:
    entries = [(7, record) for record in range(BLOCK_ENTRIES + 1)]
    alike = struct.pack("<1024I", *range(1024))
    last = struct.pack("<QII", 7, 1024, 0)
    firsts = struct.pack("<QIIQII", 7, 0, zlib.crc32(alike), 7, 1024, zlib.crc32(last))
    head = struct.pack("<III", 1025, 1024, 2)

    assert _section(entries) == head + struct.pack("<I", zlib.crc32(head + firsts)) + firsts + alike + last


def test_no_entry_is_a_fence_without_blocks() -> None:
    head = struct.pack("<III", 0, 1024, 0)
    file = _File(_section([]))

    assert _section([]) == head + struct.pack("<I", zlib.crc32(head))
    assert list(file.postings().find(0)) == list(file.postings().find_backwards(0)) == []


def _many(sizes: list[int], hashes: list[int]) -> list[tuple[int, int]]:
    """Entries with these hashes in turn, each as often as its size says."""
    each = [hashed for hashed, size in zip(hashes, sizes, strict=False) for _ in range(size)]
    order = np.random.Generator(np.random.PCG64(len(each))).permutation(len(each)) * 3
    return list(zip(each, order.tolist(), strict=True))


_SIZES = st.lists(st.sampled_from([0, 1, 2, 1023, 1024, 1025, 2048, 3000]), max_size=6)
_HASHES = [0, 1, 2, 2**63 - 1, 2**63, 2**64 - 1]


@given(_SIZES, st.sampled_from([*_HASHES, 3]), st.integers(-1, 12_000) | st.just(2**33))
def test_find_is_what_looking_at_every_record_gives(sizes: list[int], wanted: int, first: int) -> None:
    entries = _many(sizes, _HASHES)
    expected = sorted(record for hashed, record in entries if hashed == wanted)
    postings = _File(_section(entries)).postings()

    assert _joined(postings.find(wanted)) == expected
    assert _joined(postings.find(wanted, first)) == [record for record in expected if record >= first]
    assert _newest_first(postings.find_backwards(wanted)) == expected[::-1]
    assert postings.entries == len(entries)


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5), max_size=50), st.integers(0, 2**64 - 1))
def test_few_entries_are_all_found_and_no_other(hashes: list[int], other: int) -> None:
    entries = [(hashed, record) for record, hashed in enumerate(hashes)]
    postings = _File(_section(entries)).postings()

    for wanted in {*hashes, other}:
        assert _joined(postings.find(wanted)) == [record for hashed, record in entries if hashed == wanted]


def test_look_up_reads_the_fence_and_one_or_two_blocks(ledger: Ledger) -> None:
    keys = [b"customer-%07d" % row for row in range(100_000)]
    hashes = np.array([hash_bytes(key) for key in keys], dtype=np.uint64)
    file = _File(encode_postings(hashes, np.arange(len(keys), dtype=np.uint32)))
    postings = file.postings()
    fence = file.reads.pop()

    read = []
    for row in (
        *range(0, len(keys), 997),
        *np.argsort(hashes)[BLOCK_ENTRIES : 9 * BLOCK_ENTRIES : BLOCK_ENTRIES].tolist(),
    ):
        file.reads.clear()
        assert _joined(postings.find(hash_bytes(keys[row]))) == [row]
        read.append(sum(file.reads))
        assert len(file.reads) <= 2

    assert max(read) <= 2 * 12 * BLOCK_ENTRIES and fence < file.section.length / 200
    assert fence + max(read) < file.section.length / 30
    ledger.count("bytes of postings per 1,000 records", n=file.section.length * 1000 // len(keys), of="unique keys")


def test_many_records_of_a_tag_are_read_in_few_steps_and_from_where_it_is_asked(ledger: Ledger) -> None:
    rows = 300_000
    hashes = np.array([hash_text(f"tag-{number}") for number in range(10)], dtype=np.uint64)[np.arange(rows) % 10]
    file = _File(encode_postings(hashes, np.arange(rows, dtype=np.uint32)))
    postings = file.postings()
    file.reads.clear()

    assert _joined(postings.find(hash_text("tag-3"))) == list(range(3, rows, 10))
    assert len(file.reads) <= 6 and sum(file.reads) < file.section.length / 8
    file.reads.clear()
    assert next(postings.find(hash_text("tag-3"), 290_000)).tolist()[0] == 290_003
    assert len(file.reads) == 1 and file.reads[0] <= 12 * BLOCK_ENTRIES
    ledger.count("bytes of postings per 1,000 records", n=file.section.length * 1000 // rows, of="10 tags")


def test_search_from_the_first_record_of_a_block_reads_that_block_alone() -> None:
    file = _File(_section([(7, record) for record in range(4 * BLOCK_ENTRIES)]))
    postings = file.postings()
    file.reads.clear()

    assert next(postings.find(7, 2 * BLOCK_ENTRIES)).tolist() == list(range(2 * BLOCK_ENTRIES, 3 * BLOCK_ENTRIES))
    assert file.reads == [4 * BLOCK_ENTRIES]


_THREE_BLOCKS = _section(_many([3, 2500, 2], _HASHES))
"""The one in the middle has no hashes."""
_ANSWERS = {wanted: _joined(_File(_THREE_BLOCKS).postings().find(wanted)) for wanted in _HASHES[:3]}


def _is_refused(section: bytes) -> bool:
    """Whether damage is named; an answer that is given must be the intact one."""
    try:
        postings = _File(section).postings()
        for wanted, expected in _ANSWERS.items():
            assert _joined(postings.find(wanted)) == expected
    except Corrupt:
        return True
    return False


@pytest.mark.slow
def test_no_flipped_bit_of_postings_goes_unnoticed(ledger: Ledger) -> None:
    accepted = []
    places = range(0, len(_THREE_BLOCKS), 3)
    for place in places:
        damaged = bytearray(_THREE_BLOCKS)
        damaged[place] ^= 1 << place % 8
        if not _is_refused(bytes(damaged)):
            accepted.append(place)

    ledger.count("bit flips", n=len(places), artefact="postings of three blocks")
    assert accepted == []


def test_no_cut_of_postings_goes_unnoticed(ledger: Ledger) -> None:
    cuts = range(0, len(_THREE_BLOCKS), 7)

    ledger.count("cuts", n=len(cuts), artefact="postings of three blocks")
    assert [cut for cut in cuts if not _is_refused(_THREE_BLOCKS[:cut])] == []


def test_damage_of_one_block_leaves_the_others_readable() -> None:
    damaged = bytearray(_section([(record, record) for record in range(3 * BLOCK_ENTRIES)]))
    damaged[-1] ^= 1
    postings = _File(bytes(damaged)).postings()

    assert _joined(postings.find(5)) == [5]
    with pytest.raises(Corrupt, match="section 3: block 2"):
        list(postings.find(3 * BLOCK_ENTRIES - 1))


@pytest.mark.parametrize(
    "head", [(2**32 - 1, 1024, 0), (0, 1024, 1), (1, 1024, 2**32 - 1), (1, 512, 1), (1, 0, 1), (1025, 1024, 1)]
)
def test_fence_that_lies_is_corrupt(head: tuple[int, int, int]) -> None:
    packed = struct.pack("<III", *head)
    first = struct.pack("<QII", 1, 0, 0)
    for firsts in (b"", first):
        block = bytes((12 * head[0] + 7) & ~7) if head[0] < 2**16 else bytes(16)
        section = packed + struct.pack("<I", zlib.crc32(packed + firsts)) + firsts + block
        with pytest.raises(Corrupt):
            _File(section).postings()
