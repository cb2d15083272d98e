"""The hash by which records are found by key or tag: MurmurHash64A with seed 0. Knows bytes, no frames.

    hash  := MurmurHash64A(entry, seed 0) of up to 1,024 bytes
    hash  := MurmurHash64A(BLAKE2b-128(entry), seed 0) of more

It is stored, so it never changes. Different entries may share a hash: a look-up compares
the entry itself. One at a time in plain Python, many at once by column; both give the same numbers.
Long entries are shortened first, so that no column takes more than 128 steps.
"""

from __future__ import annotations

import hashlib
import struct
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.records import Bytes

Hashes: TypeAlias = npt.NDArray[np.uint64]
Places: TypeAlias = npt.NDArray[np.int64]

LONG: Final = 1024
"""Entries with more bytes than this are shortened."""
_SHORT_BYTES: Final = 16
_MULTIPLIER: Final = 0xC6A4A7935BD1E995
_SHIFT: Final = 47
_MASK: Final = 2**64 - 1
_ROWS_FEW: Final = 24
"""Fewer entries than this are hashed one by one: the array steps of a column cost about as much."""
_ROWS_AT_ONCE: Final = 16_384
"""So many hashes stay in the processor's own memory from step to step."""
_M: Final = np.uint64(_MULTIPLIER)
_R: Final = np.uint64(_SHIFT)


def hash_bytes(entry: Bytes) -> int:
    """The hash of one entry, from 0 to 2**64 - 1."""
    if len(entry) > LONG:
        entry = _shortened(entry)
    length = len(entry)
    state = length * _MULTIPLIER & _MASK
    for word in struct.unpack_from(f"<{length // 8}Q", entry):
        mixed = word * _MULTIPLIER & _MASK
        mixed = (mixed ^ mixed >> _SHIFT) * _MULTIPLIER & _MASK
        state = (state ^ mixed) * _MULTIPLIER & _MASK
    tail = length & 7
    if tail:
        state = (state ^ int.from_bytes(entry[length - tail :], "little")) * _MULTIPLIER & _MASK
    state = (state ^ state >> _SHIFT) * _MULTIPLIER & _MASK
    return state ^ state >> _SHIFT


def hash_text(entry: str) -> int:
    """The hash of a tag: that of its utf8."""
    return hash_bytes(entry.encode())


def hash_column(filling: Bytes, offsets: npt.NDArray[np.int32]) -> Hashes:
    """The hash of each `filling[offsets[i]:offsets[i + 1]]`, a column in Arrow's layout."""
    rows = len(offsets) - 1
    if rows < _ROWS_FEW:
        places = offsets.tolist()
        found = [hash_bytes(filling[start:stop]) for start, stop in pairwise(places)]
        return np.array(found, dtype=np.uint64)
    starts = offsets[:-1].astype(np.int64)
    lengths = offsets[1:] - starts
    # Seven bytes behind the end, so that a word may be loaded where only the tail of an entry is left.
    padded = b"".join([filling, bytes(7)])
    words: Hashes = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))
    hashes = np.empty(rows, dtype=np.uint64)
    for first in range(0, rows, _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        hashes[part] = _hash_rows(words, starts[part], lengths[part])
    for row in np.flatnonzero(lengths > LONG).tolist():
        start = int(starts[row])
        hashes[row] = hash_bytes(padded[start : start + int(lengths[row])])
    return hashes


def _hash_rows(words: Hashes, starts: Places, lengths: Places) -> Hashes:
    """The hashes of entries; those of long ones mean nothing."""
    size = int(lengths[0])
    if size <= LONG and (lengths == size).all():
        return _hash_alike(words, starts, size)
    lengths = np.where(lengths > LONG, 0, lengths)
    longest_first = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[longest_first], lengths[longest_first]
    state = lengths.astype(np.uint64) * _M
    counts = lengths >> 3
    for position in range(int(counts[0])):
        active = int(np.searchsorted(-counts, -position, side="left"))
        _mix(state[:active], words[starts[:active] + 8 * position])
    tails = lengths & 7
    # An entry without a tail loads the word at place 0, which is there and is not used.
    last = words[np.where(tails > 0, starts + lengths - tails, 0)]
    kept = (np.uint64(1) << (8 * tails).astype(np.uint64)) - np.uint64(1)
    np.copyto(state, (state ^ last & kept) * _M, where=tails > 0)
    hashes = np.empty(len(state), dtype=np.uint64)
    hashes[longest_first] = _finished(state)
    return hashes


def _hash_alike(words: Hashes, starts: Places, size: int) -> Hashes:
    """The hashes of entries of one length, which stand one behind the other."""
    state = np.full(len(starts), size * _MULTIPLIER & _MASK, dtype=np.uint64)
    first, step = int(starts[0]), max(1, size)
    stop = int(starts[-1]) + 1
    for position in range(size >> 3):
        _mix(state, words[first + 8 * position : stop + 8 * position : step])
    tail = size & 7
    if tail:
        place = size - tail
        state ^= words[first + place : stop + place : step] & np.uint64((1 << 8 * tail) - 1)
        state *= _M
    return _finished(state)


def _mix(state: Hashes, word: Hashes) -> None:
    mixed = word * _M
    mixed ^= mixed >> _R
    mixed *= _M
    state ^= mixed
    state *= _M


def _finished(state: Hashes) -> Hashes:
    state ^= state >> _R
    state *= _M
    state ^= state >> _R
    return state


def _shortened(entry: Bytes) -> bytes:
    return hashlib.blake2b(entry, digest_size=_SHORT_BYTES).digest()
