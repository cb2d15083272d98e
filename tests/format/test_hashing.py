"""The hash of keys and tags: the published algorithm, one by one and by column alike."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.format.index import hashing
from forebay.format.index.hashing import LONG, hash_bytes, hash_column, hash_text

_ENTRIES = st.lists(st.binary(max_size=40) | st.sampled_from([b"", bytes(LONG), bytes(LONG + 1)]), max_size=120)


def _murmur_64a(entry: bytes) -> int:
    """MurmurHash64A as it was published, statement by statement, with seed 0."""
    mask, multiplier, shift = 2**64 - 1, 0xC6A4A7935BD1E995, 47
    state = 0 ^ (len(entry) * multiplier & mask)
    whole = len(entry) // 8 * 8
    for place in range(0, whole, 8):
        word = int.from_bytes(entry[place : place + 8], "little")
        word = word * multiplier & mask
        word ^= word >> shift
        word = word * multiplier & mask
        state ^= word
        state = state * multiplier & mask
    for place in range(len(entry) - whole - 1, -1, -1):
        state ^= entry[whole + place] << 8 * place
    if len(entry) != whole:
        state = state * multiplier & mask
    state ^= state >> shift
    state = state * multiplier & mask
    return state ^ state >> shift


def _column(entries: list[bytes]) -> tuple[bytes, npt.NDArray[np.int32]]:
    return b"".join(entries), np.cumsum([0, *map(len, entries)], dtype=np.int32)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (b"", 0),
        (b"a", 0x071717D2D36B6B11),
        (b"customer-0000042", 0x4C2BD94B1F9DE8D5),
        (b"\xff" * 8, 0x3A8E59C4E2C576DD),
        (bytes(LONG), 0x90C7F3F4153162F0),
        (bytes(LONG + 1), 0x158BE05AC8184776),
    ],
)
def test_hash_is_exactly_this_number(entry: bytes, expected: int) -> None:
    assert hash_bytes(entry) == expected


@given(st.binary(max_size=100))
def test_hash_is_murmur_64a(entry: bytes) -> None:
    assert hash_bytes(entry) == _murmur_64a(entry)


def test_long_entries_are_shortened_by_blake2b_first() -> None:
    entry = b"0123456789abcdef" * (LONG // 16)

    assert hash_bytes(entry) == _murmur_64a(entry)
    assert hash_bytes(entry + b"x") == _murmur_64a(hashlib.blake2b(entry + b"x", digest_size=16).digest())


def test_hash_of_a_tag_is_that_of_its_utf8() -> None:
    assert hash_text("\u00e9") == hash_bytes(b"\xc3\xa9")
    assert hash_text("a") != hash_text("a/b")


@given(_ENTRIES)
def test_column_has_the_hashes_of_its_entries(entries: list[bytes]) -> None:
    assert hash_column(*_column(entries)).tolist() == list(map(hash_bytes, entries))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 36, LONG, LONG + 1])
def test_column_of_one_length_has_the_hashes_of_its_entries(size: int) -> None:
    entries = [bytes([row % 251]) * size for row in range(200)]

    assert hash_column(*_column(entries)).tolist() == list(map(hash_bytes, entries))


def test_column_of_many_lengths_has_the_hashes_of_its_entries() -> None:
    entries = [bytes((row * place + row) % 256 for place in range(row * 7 % 61)) for row in range(500)]
    entries[100] = b"long" * LONG

    assert hash_column(*_column(entries)).tolist() == list(map(hash_bytes, entries))


def test_part_of_a_column_is_hashed_where_it_lies() -> None:
    entries = [b"%d" % row for row in range(300)]
    filling, offsets = _column(entries)

    assert hash_column(memoryview(filling), offsets[100:201]).tolist() == list(map(hash_bytes, entries[100:200]))


@pytest.mark.parametrize("sizes", [(16,), (5, 16, 0, 40, LONG)])
def test_no_entry_of_a_large_column_is_hashed_on_its_own(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    def refuse(entry: bytes) -> int:
        raise AssertionError(f"{len(entry)} bytes were hashed alone")

    entries = [bytes(sizes[row % len(sizes)]) for row in range(40_000)]
    monkeypatch.setattr(hashing, "hash_bytes", refuse)

    assert len(set(hash_column(*_column(entries)).tolist())) == len(sizes)


def test_hashes_of_numbered_keys_do_not_meet() -> None:
    entries = [b"customer-%08d" % row for row in range(200_000)]

    assert len(np.unique(hash_column(*_column(entries)))) == len(entries)
