"""The checksums are the standard ones, however they are computed."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.format.checksum import ContentHash, content_hash, crc32, salted, shifted_crcs


@given(st.binary(max_size=3000), st.integers(0, 2**32 - 1))
def test_crc_is_that_of_the_standard_library(content: bytes, start: int) -> None:
    assert crc32(content, start) == zlib.crc32(content, start)
    assert crc32(memoryview(content), start) == zlib.crc32(content, start)


def test_crc_of_the_check_string_is_the_published_one() -> None:
    assert crc32(b"123456789") == 0xCBF43926
    assert salted(bytes(16)) == zlib.crc32(bytes(16))


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_content_hash_does_not_depend_on_how_the_bytes_are_cut(parts: list[bytes]) -> None:
    grown = ContentHash()
    for part in parts:
        grown.update(part)

    assert content_hash(parts) == grown.digest() == hashlib.blake2b(b"".join(parts), digest_size=16).digest()


@given(st.lists(st.tuples(st.binary(max_size=40), st.integers(0, 60)), min_size=1, max_size=8))
def test_shifted_crc_joins_the_crcs_of_two_pieces(pieces: list[tuple[bytes, int]]) -> None:
    second = [bytes(range(8)) * eights for _, eights in pieces]
    first = np.array([crc32(content) for content, _ in pieces], dtype=np.uint32)

    moved = shifted_crcs(first, np.array([len(content) for content in second], dtype=np.uint64))

    joined = [crc32(content + behind) for (content, _), behind in zip(pieces, second, strict=True)]
    assert [int(crc) ^ crc32(behind) for crc, behind in zip(moved, second, strict=True)] == joined
