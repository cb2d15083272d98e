"""Compressed bodies: limited by what comes out, so that a small body which grows without end costs no more than that.

A body is one gzip member or one zstd frame, whole and with nothing behind it.
"""

from __future__ import annotations

import zlib
from typing import Final

import zstandard

from forebay.errors import Invalid, TooLarge, Unsupported

GZIP: Final = "gzip"
ZSTD: Final = "zstd"
ENCODINGS: Final = (GZIP, ZSTD)

WINDOW_BYTES_MAX: Final = 8 * 1024 * 1024
"""What a zstd body may ask its reader to remember: the limit for the web (RFC 9659)."""
_CHUNK_BYTES: Final = 256 * 1024
_GZIP_BITS: Final = 31
_DEFLATE_RATIO_MAX: Final = 1032
"""A byte of deflate becomes so many at most."""
_BLOCK_HEAD_BYTES: Final = 3
_RAW, _RLE, _COMPRESSED = range(3)


def decompress_body(body: bytes, encoding: str | None, bytes_max: int) -> bytes:
    """The body as it was before `Content-Encoding`; `TooLarge` if it has more than `bytes_max`, before more is made."""
    name = (encoding or "identity").strip().lower()
    if name == "identity":
        if len(body) > bytes_max:
            raise TooLarge(f"a body of {len(body)} bytes; the limit is {bytes_max}", limit=bytes_max)
        return body
    if name in (GZIP, "x-gzip"):
        return _gunzip(body, bytes_max)
    if name == ZSTD:
        return _unzstd(body, bytes_max)
    raise Unsupported(f"Content-Encoding is {name!r:.40}; offered: {', '.join(ENCODINGS)}, or none")


def inflated_bytes(body: bytes, encoding: str, bytes_max: int) -> int:
    """How many bytes come out of a compressed body at most, by what it says itself; `TooLarge` if that is too much.

    Nothing is decompressed: for a reader that counts them before they are there. `decompress_body` gives no more of a
    body than this.
    """
    name = encoding.strip().lower()
    if name in (GZIP, "x-gzip"):
        # One that is cut ends with any number: what it holds is seen when it is decompressed, up to this.
        size = min(_gzip_bytes(body), _DEFLATE_RATIO_MAX * len(body), bytes_max)
    elif name == ZSTD:
        size = _zstd_bytes(body, bytes_max)
    else:
        size = len(body)
    if size > bytes_max:
        raise _too_large(bytes_max)
    return size


def _gzip_bytes(body: bytes) -> int:
    """The last field of a gzip member: how many bytes it holds."""
    return int.from_bytes(body[-4:], "little")


def _zstd_bytes(body: bytes, bytes_max: int) -> int:
    """What a zstd frame says that it holds, or as much as is allowed where it does not say."""
    try:
        claimed: int = zstandard.get_frame_parameters(body).content_size
    except zstandard.ZstdError as error:
        raise Invalid(f"the body is not zstd, as Content-Encoding says: {error}") from error
    return bytes_max if claimed == zstandard.CONTENTSIZE_UNKNOWN else claimed


def compress_body(body: bytes, encoding: str) -> bytes:
    """The body as `Content-Encoding` says."""
    if encoding == GZIP:
        deflater = zlib.compressobj(level=1, wbits=_GZIP_BITS)
        return deflater.compress(body) + deflater.flush()
    if encoding == ZSTD:
        return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(body)
    raise Unsupported(f"Content-Encoding is {encoding!r:.40}; offered: {', '.join(ENCODINGS)}")


def _gunzip(body: bytes, bytes_max: int) -> bytes:
    inflater = zlib.decompressobj(wbits=_GZIP_BITS)
    claimed = _gzip_bytes(body)
    try:
        found = inflater.decompress(body, min(bytes_max, claimed) + 1)
    except zlib.error as error:
        raise Invalid(f"the body is not gzip, as Content-Encoding says: {error}") from error
    if len(found) > bytes_max:
        raise _too_large(bytes_max)
    if len(found) > claimed:
        raise Invalid(
            f"the gzip body of {len(body)} bytes holds more than it says: it is cut short, or bytes follow the end"
        )
    if not inflater.eof:
        raise Invalid(f"the gzip body of {len(body)} bytes is cut short")
    if inflater.unused_data:
        raise Invalid(f"{len(inflater.unused_data)} bytes follow the end of the gzip body")
    return found


def _unzstd(body: bytes, bytes_max: int) -> bytes:
    try:
        frame = zstandard.get_frame_parameters(body)
        if frame.window_size > WINDOW_BYTES_MAX or frame.dict_id:
            raise Invalid(f"the zstd body asks for a window of {frame.window_size} bytes, or a dictionary; use neither")
        if frame.content_size != zstandard.CONTENTSIZE_UNKNOWN and frame.content_size > bytes_max:
            raise _too_large(bytes_max)
        end = _end_of_frame(body, frame)
        if end > len(body):
            raise Invalid(f"the zstd body of {len(body)} bytes is cut short")
        if end < len(body):
            raise Invalid(f"{len(body) - end} bytes follow the end of the zstd body")
        return _read_frame(body, bytes_max)
    except zstandard.ZstdError as error:
        raise Invalid(f"the body is not zstd, as Content-Encoding says: {error}") from error


def _end_of_frame(body: bytes, frame: zstandard.FrameParameters) -> int:
    """Where the frame ends by its own blocks: the library does not say whether a frame was whole when it ran out."""
    position = zstandard.frame_header_size(body)
    is_last = False
    while not is_last:
        head = body[position : position + _BLOCK_HEAD_BYTES]
        if len(head) < _BLOCK_HEAD_BYTES:
            return len(body) + 1
        fields = int.from_bytes(head, "little")
        is_last, kind, size = bool(fields & 1), fields >> 1 & 3, fields >> 3
        if kind > _COMPRESSED:
            raise Invalid(f"the zstd body has a block of an unknown kind at byte {position}")
        position += _BLOCK_HEAD_BYTES + (1 if kind == _RLE else size)
    return position + (4 if frame.has_checksum else 0)


def _read_frame(body: bytes, bytes_max: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    with zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).stream_reader(body) as reader:
        while chunk := reader.read(min(_CHUNK_BYTES, bytes_max + 1)):
            size += len(chunk)
            if size > bytes_max:
                raise _too_large(bytes_max)
            chunks.append(chunk)
    return b"".join(chunks)


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge(f"the body has more than {bytes_max} bytes once it is decompressed: send less", limit=bytes_max)
