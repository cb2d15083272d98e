"""Checksums of the format room: CRC-32 for damage, BLAKE2b for naming content.

Pure. CRC-32/IEEE is what the standard library computes; zlib-ng gives the same number sooner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from forebay.records import Bytes

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # the same polynomial, several times slower
    from zlib import crc32

CONTENT_HASH_BYTES: Final = 16
SALT_BYTES: Final = 16

__all__ = ["CONTENT_HASH_BYTES", "SALT_BYTES", "ContentHash", "content_hash", "crc32", "salted", "shifted_crcs"]


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


def shifted_crcs(crcs: npt.NDArray[np.uint32], lengths: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Each crc moved on by a number of bytes, a multiple of 8: crc32(a + b) = shifted(crc32(a), len(b)) ^ crc32(b).

    Moving on is linear, so it is done bit by bit of the length, all crcs at once.
    """
    found = crcs.copy()
    eights = lengths >> np.uint64(3)
    columns = np.array([crc32(bytes(8), 1 << bit) ^ crc32(bytes(8)) for bit in range(32)], dtype=np.uint32)
    while eights.any():
        chosen = np.flatnonzero(eights & np.uint64(1))
        found[chosen] = _moved(found[chosen], columns)
        columns = _moved(columns, columns)
        eights = eights >> np.uint64(1)
    return found


def _moved(crcs: npt.NDArray[np.uint32], columns: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The linear map with these columns, applied to each crc by four tables of a byte each."""
    found = np.zeros(len(crcs), dtype=np.uint32)
    for byte in range(4):
        table = np.zeros(1, dtype=np.uint32)
        for column in columns[8 * byte : 8 * byte + 8]:
            table = np.concatenate([table, table ^ column])
        found ^= table[(crcs >> np.uint32(8 * byte)) & np.uint32(0xFF)]
    return found
