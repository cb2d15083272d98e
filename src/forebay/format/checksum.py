"""Checksums of the format room: CRC-32 for damage, BLAKE2b for naming content.

Pure. CRC-32/IEEE is what the standard library computes; zlib-ng gives the same number sooner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from forebay.records import Bytes

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # the same polynomial, several times slower
    from zlib import crc32

CONTENT_HASH_BYTES: Final = 16
SALT_BYTES: Final = 16

__all__ = ["CONTENT_HASH_BYTES", "SALT_BYTES", "ContentHash", "content_hash", "crc32", "salted"]


def salted(salt: bytes) -> int:
    """The crc from which the frames of a segment with this salt are counted."""
    assert len(salt) == SALT_BYTES
    return crc32(salt)


class ContentHash:
    """The content hash of bytes that arrive in pieces."""

    __slots__ = ("_digest",)

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=CONTENT_HASH_BYTES)

    def update(self, part: Bytes) -> None:
        """Add the next piece."""
        self._digest.update(part)

    def digest(self) -> bytes:
        """The hash of all pieces so far."""
        return self._digest.digest()


def content_hash(parts: Iterable[Bytes]) -> bytes:
    """The 16-byte name of these bytes, however they are cut into parts."""
    whole = ContentHash()
    for part in parts:
        whole.update(part)
    return whole.digest()
