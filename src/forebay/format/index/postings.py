"""Postings: which records of a segment have a key or a tag with a given hash. A section of an index; knows no disk.

    postings := fence block*
    fence    := entries u32, entries per block u32 (1024), blocks u32, crc u32, first*
    first    := hash u64, record u32, crc u32 of the block               of the first entry of each block
    block    := [hash u64 per entry] record u32 per entry, zero padded to 8

One entry per record that has a key (a tag), sorted by hash, then by record; a record is its offset
minus the segment's start. The crc of the fence is over its first 12 bytes and all that follows it.
All blocks but the last have 1,024 entries. Where the next block begins with the same hash, all
entries of a block have it, and the block leaves hashes out. So the fence alone says where each block
lies, and to find a hash takes the fence and one or two blocks, whatever the size of the section.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.errors import Corrupt
from forebay.format.checksum import crc32
from forebay.format.index.hashing import Hashes
from forebay.format.index.sections import ReadAt, Section

Records: TypeAlias = npt.NDArray[np.uint32]
"""Offsets counted from the start of a segment, rising."""

BLOCK_ENTRIES: Final = 1024
RECORDS_MAX: Final = 2**32
_READ_BLOCKS_MAX: Final = 64
"""No more blocks than this are read at once."""
_HEAD: Final = struct.Struct("<III")
_CRC: Final = struct.Struct("<I")
_FIRST: Final = np.dtype([("hash", "<u8"), ("record", "<u4"), ("crc", "<u4")])
_HEAD_BYTES: Final = _HEAD.size + _CRC.size
assert (_HEAD_BYTES, _FIRST.itemsize) == (16, 16)


def encode_postings(hashes: Hashes, records: Records) -> bytes:
    """The section of these entries; records rise."""
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order].astype("<u8", copy=False)
    records = records[order].astype("<u4", copy=False)
    firsts = np.zeros(-(-len(hashes) // BLOCK_ENTRIES), dtype=_FIRST)
    firsts["hash"] = hashes[::BLOCK_ENTRIES]
    firsts["record"] = records[::BLOCK_ENTRIES]
    alike = _alike(firsts)
    blocks = []
    for number in range(len(firsts)):
        part = slice(number * BLOCK_ENTRIES, (number + 1) * BLOCK_ENTRIES)
        block = (b"" if alike[number] else hashes[part].tobytes()) + records[part].tobytes()
        block += bytes(-len(block) & 7)
        firsts["crc"][number] = crc32(block)
        blocks.append(block)
    head = _HEAD.pack(len(hashes), BLOCK_ENTRIES, len(firsts))
    table = firsts.tobytes()
    return b"".join([head, _CRC.pack(crc32(table, crc32(head))), table, *blocks])


def _alike(firsts: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which blocks have entries of one hash only, as the next block shows."""
    found = np.zeros(len(firsts), dtype=np.bool_)
    found[:-1] = firsts["hash"][1:] == firsts["hash"][:-1]
    return found


class Postings:
    """The postings of one section, read where needed. The fence is read at once and kept: 16 bytes per 1,024 entries.

    Damage is `Corrupt`, whichever part it is found in; it says that it is in the index of `name`.
    """

    def __init__(self, read: ReadAt, section: Section, name: str = "a segment") -> None:
        self._name = name
        self._read = read
        self._section = section
        fence = memoryview(read(section.position, min(section.length, _fence_bytes_max(section.length))))
        if len(fence) < _HEAD_BYTES:
            raise self._damage("its fence is too short")
        self.entries, per_block, blocks = _HEAD.unpack_from(fence)
        table = fence[_HEAD_BYTES : _HEAD_BYTES + blocks * _FIRST.itemsize]
        if _CRC.unpack_from(fence, _HEAD.size)[0] != crc32(table, crc32(fence[: _HEAD.size])):
            raise self._damage("the crc of its fence does not hold")
        if per_block != BLOCK_ENTRIES or blocks != -(-self.entries // BLOCK_ENTRIES) or len(table) != 16 * blocks:
            raise self._damage(f"its fence does not fit {self.entries} entries")
        self._firsts = np.frombuffer(table, _FIRST)
        self._alike = _alike(self._firsts)
        self._places = self._block_places()

    def _block_places(self) -> list[int]:
        """Where each block begins in the section, and where the last one ends."""
        counts = np.full(len(self._firsts), BLOCK_ENTRIES, dtype=np.int64)
        counts[-1:] = self.entries - BLOCK_ENTRIES * (len(counts) - 1)
        sizes = (counts * np.where(self._alike, 4, 12) + 7) & ~7
        places = np.concatenate([[0], np.cumsum(sizes)]) + _HEAD_BYTES + len(counts) * _FIRST.itemsize
        if int(places[-1]) != self._section.length:
            raise self._damage(f"its blocks end at byte {int(places[-1])} of {self._section.length}")
        return list(map(int, places))

    def find(self, wanted: int, first: int = 0) -> Iterator[Records]:
        """The records from `first` on with this hash, in order, in one or more pieces; none is empty."""
        left, right = self._blocks_of(wanted)
        rising = self._firsts["record"][left:right]
        at = max(0, left - 1 + int(np.searchsorted(rising, first, side="right")))
        for part in self._parts(range(at, right), wanted):
            found = part[int(np.searchsorted(part, first)) :]
            if len(found):
                yield found

    def find_backwards(self, wanted: int) -> Iterator[Records]:
        """All records with this hash, the newest piece first; inside each piece they rise."""
        left, right = self._blocks_of(wanted)
        yield from self._parts(range(right - 1, max(0, left - 1) - 1, -1), wanted)

    def _blocks_of(self, wanted: int) -> tuple[int, int]:
        """The range of blocks that begin with the hash; the one before may end with it."""
        hashes = self._firsts["hash"]
        left, right = (int(np.searchsorted(hashes, np.uint64(wanted), side)) for side in ("left", "right"))
        return left, right

    def _parts(self, numbers: range, wanted: int) -> Iterator[Records]:
        """What the blocks with these numbers have of the hash. One is read first, then twice as many each time."""
        step = 1
        while numbers:
            chosen, numbers = numbers[:step], numbers[step:]
            step = min(2 * step, _READ_BLOCKS_MAX)
            low, high = min(chosen), max(chosen) + 1
            origin = self._places[low]
            read = memoryview(self._read(self._section.position + origin, self._places[high] - origin))
            for number in chosen:
                block = read[self._places[number] - origin : self._places[number + 1] - origin]
                found = self._records(number, block, wanted)
                if len(found):
                    yield found

    def _records(self, number: int, block: memoryview, wanted: int) -> Records:
        """The records in a block that have the hash."""
        if len(block) != self._places[number + 1] - self._places[number] or crc32(block) != self._firsts["crc"][number]:
            raise self._damage(f"block {number} does not hold")
        count = min(BLOCK_ENTRIES, self.entries - number * BLOCK_ENTRIES)
        if self._alike[number]:
            return np.frombuffer(block, "<u4", count)
        hashes = np.frombuffer(block, "<u8", count)
        low, high = (int(np.searchsorted(hashes, np.uint64(wanted), side)) for side in ("left", "right"))
        return np.frombuffer(block, "<u4", high - low, 8 * count + 4 * low)

    def _damage(self, why: str) -> Corrupt:
        return Corrupt(f'the index of {self._name}: section {self._section.kind}: {why}; run "forebay repair"')


def _fence_bytes_max(length: int) -> int:
    """No fence of a section of this length is longer: each block but the last takes 4 bytes per entry and more."""
    return _HEAD_BYTES + _FIRST.itemsize * (1 + length // (4 * BLOCK_ENTRIES + _FIRST.itemsize))
