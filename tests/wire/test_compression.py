"""Compressed bodies: whole ones come out as they went in, bombs cost no more than the limit."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Invalid, TooLarge, Unsupported
from forebay.wire.compression import ENCODINGS, compress_body, decompress_body

LIMIT = 1024 * 1024
BLOCK = 128 * 1024


@given(st.binary(max_size=5000), st.sampled_from(ENCODINGS), st.integers(1, 300))
def test_what_was_compressed_comes_out(content: bytes, encoding: str, times: int) -> None:
    body = content * times

    assert decompress_body(compress_body(body, encoding), encoding, len(body)) == body


@pytest.mark.parametrize("encoding", [None, "", "identity", " Identity "])
def test_without_an_encoding_the_body_is_limited_all_the_same(encoding: str | None) -> None:
    assert decompress_body(b"abc", encoding, 3) == b"abc"
    with pytest.raises(TooLarge):
        decompress_body(b"abcd", encoding, 3)


def test_other_writers_are_read() -> None:
    unsized = zstandard.ZstdCompressor(level=19, write_content_size=False, write_checksum=False)
    streamed = zlib.compressobj(9, zlib.DEFLATED, 31)

    assert decompress_body(gzip.compress(b"x" * 9999), "x-gzip", LIMIT) == b"x" * 9999
    assert decompress_body(streamed.compress(b"a") + streamed.flush(), "GZIP", LIMIT) == b"a"
    assert decompress_body(unsized.compress(b"y" * 300_000), "zstd", LIMIT) == b"y" * 300_000
    assert decompress_body(zstandard.compress(b""), "zstd", LIMIT) == b""


def _rle_bomb(blocks: int) -> bytes:
    """A zstd frame without a content size, of blocks that repeat one byte."""
    head = b"\x28\xb5\x2f\xfd\x00\x58"
    block = (BLOCK << 3 | 1 << 1).to_bytes(3, "little") + b"x"
    last = (1 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"x"
    return head + block * blocks + last


def _bombs() -> list[tuple[str, bytes]]:
    deflater = zlib.compressobj(9, zlib.DEFLATED, 31)
    chunk = bytes(LIMIT)
    gzipped = b"".join(deflater.compress(chunk) for _ in range(100)) + deflater.flush()
    return [("gzip", gzipped), ("zstd", zstandard.compress(bytes(100 * LIMIT))), ("zstd", _rle_bomb(2_000))]


@pytest.mark.parametrize(("encoding", "bomb"), _bombs(), ids=["gzip", "zstd", "zstd without a size"])
def test_a_bomb_costs_no_more_than_the_limit(encoding: str, bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge) as refused:
            decompress_body(bomb, encoding, LIMIT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert refused.value.limit == LIMIT
    assert peak < 3 * LIMIT


def test_blocks_that_repeat_a_byte_are_read_up_to_the_limit() -> None:
    assert decompress_body(_rle_bomb(3), "zstd", LIMIT) == b"x" * (3 * BLOCK + 1)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_body_cut_anywhere_is_refused(encoding: str) -> None:
    whole = compress_body(bytes(range(256)) * 8, encoding)

    for end in range(len(whole)):
        with pytest.raises(Invalid):
            decompress_body(whole[:end], encoding, LIMIT)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("trailing", [b"x", b"\0" * 100, None])
def test_what_follows_the_end_is_refused(encoding: str, trailing: bytes | None) -> None:
    whole = compress_body(b"abc", encoding)

    with pytest.raises(Invalid, match="follow the end"):
        decompress_body(whole + (whole if trailing is None else trailing), encoding, LIMIT)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(noise=st.binary(max_size=200), cut=st.integers(0, 60))
def test_damage_is_invalid_and_nothing_else(encoding: str, noise: bytes, cut: int) -> None:
    whole = compress_body(b"some text that is long enough " * 10, encoding)

    for body in (noise, whole[:cut] + noise):
        try:
            decompress_body(body, encoding, 10_000)
        except Invalid:
            continue


def test_a_zstd_body_with_a_huge_window_is_refused() -> None:
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    )
    maker = compressor.compressobj()
    body = maker.compress(b"abc") + maker.flush()

    with pytest.raises(Invalid, match="window"):
        decompress_body(body, "zstd", LIMIT)


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, zstd", "gzip,gzip", "\u017fnappy"])
def test_other_encodings_are_not_offered(encoding: str) -> None:
    with pytest.raises(Unsupported):
        decompress_body(b"abc", encoding, LIMIT)
    with pytest.raises(Unsupported):
        compress_body(b"abc", encoding)
