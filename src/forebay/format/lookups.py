"""What an index needs so that records are found by key and tag and counted by bytes, gathered frame by frame.

Knows batches and the sections of an index, no disk. Nothing is done per record but in arrays.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from forebay.format.batch import Batch
from forebay.format.hashing import Hashes, hash_column
from forebay.format.index import SectionKind, encode_sizes
from forebay.format.layout import Strip
from forebay.format.postings import RECORDS_MAX, Records, encode_postings


class LookupSections:
    """The postings and sizes of a segment in the making: `add` every data frame in order, then `sections`."""

    def __init__(self, start: int) -> None:
        """`start` is the first offset of the segment, as its header has it."""
        self._start = start
        self._end = start
        self._keys: list[tuple[Hashes, Records]] = []
        self._tags: list[tuple[Hashes, Records]] = []
        self._sizes: list[int] = []

    def add(self, batch: Batch) -> None:
        """Take in the records of the next data frame."""
        assert batch.base >= self._end, "frames come in order"
        self._end = batch.end
        self._sizes.append(int(batch.sizes().sum()))
        if self._end - self._start > RECORDS_MAX:
            return
        for strip, found in ((batch.key_strip(), self._keys), (batch.tag_strip(), self._tags)):
            if strip is not None:
                found.append(_posted(strip, batch.base - self._start))

    def sections(self) -> list[tuple[SectionKind, bytes]]:
        """The sections for `encode_index`. Without postings where a record lies 2**32 offsets behind the start."""
        found = [(SectionKind.SIZES, encode_sizes(accumulate(self._sizes)))]
        if self._end - self._start <= RECORDS_MAX:
            found.append((SectionKind.KEY_POSTINGS, _encoded(self._keys)))
            found.append((SectionKind.TAG_POSTINGS, _encoded(self._tags)))
        return found


def _posted(strip: Strip, first: int) -> tuple[Hashes, Records]:
    """Hash and record of each entry that is there; the first of all has the record number `first`."""
    hashes = hash_column(strip.filling, strip.offsets)
    records = np.arange(first, first + len(hashes), dtype=np.uint32)
    if strip.present is None:
        return hashes, records
    return hashes[strip.present], records[strip.present]


def _encoded(parts: list[tuple[Hashes, Records]]) -> bytes:
    hashes = np.concatenate([np.empty(0, dtype=np.uint64), *[hashes for hashes, _ in parts]])
    records = np.concatenate([np.empty(0, dtype=np.uint32), *[records for _, records in parts]])
    return encode_postings(hashes, records)
