"""What an index needs so that records are found by key and tag and counted by bytes, gathered frame by frame.

Knows batches and the sections of an index, no disk. Nothing is done per record but in arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from forebay.format.columns.layout import Strip
from forebay.format.frame.batch import Batch
from forebay.format.index.hashing import Hashes, Places, hash_bytes, hash_column
from forebay.format.index.postings import RECORDS_MAX, Records, encode_postings
from forebay.format.index.sections import SectionKind, encode_sizes


class Sought(NamedTuple):
    """What a record must have: a key, or a tag as utf8."""

    kind: SectionKind
    entry: bytes
    hash: int

    @classmethod
    def of_key(cls, key: bytes) -> Sought:
        """Exactly this key."""
        return cls(SectionKind.KEY_POSTINGS, key, hash_bytes(key))

    @classmethod
    def of_tag(cls, tag: str) -> Sought:
        """Exactly this tag."""
        entry = tag.encode("utf-8", "surrogatepass")
        return cls(SectionKind.TAG_POSTINGS, entry, hash_bytes(entry))


class LookupSections:
    """The postings and sizes of a segment in the making: `add` every data frame in order, then `sections`."""

    def __init__(self, start: int) -> None:
        """`start` is the first offset of the segment, as its header has it."""
        self._start = start
        self._end = start
        self._keys: list[tuple[Hashes, Records]] = []
        self._tags: list[tuple[Hashes, Records]] = []
        self._sizes: list[int] = []

    def add(self, batch: Batch, *, each: bool = False) -> None:
        """Take in the records of the next data frame; with `each` every one of them was a frame of its own."""
        assert batch.base >= self._end, "frames come in order"
        self._end = batch.end
        sizes = batch.sizes()
        self._sizes += sizes.tolist() if each else [int(sizes.sum())]
        self._post(batch, np.arange(batch.base, batch.end, dtype=np.int64))

    def add_rows(self, batch: Batch, offsets: Places) -> None:
        """Take in the next row group: the records of a batch, which lie at these rising offsets."""
        assert offsets[0] >= self._end, "row groups come in order"
        self._end = int(offsets[-1]) + 1
        self._sizes.append(int(batch.sizes().sum()))
        self._post(batch, offsets)

    def _post(self, batch: Batch, offsets: Places) -> None:
        if self._end - self._start > RECORDS_MAX:
            return
        for strip, found in ((batch.key_strip(), self._keys), (batch.tag_strip(), self._tags)):
            if strip is not None:
                hashes, rows = _hashed(strip)
                found.append((hashes, (offsets[rows] - self._start).astype(np.uint32)))

    def sections(self) -> list[tuple[SectionKind, bytes]]:
        """The sections for `encode_index`. Without postings where a record lies 2**32 offsets behind the start."""
        found = [(SectionKind.SIZES, encode_sizes(accumulate(self._sizes)))]
        if self._end - self._start <= RECORDS_MAX:
            found.append((SectionKind.KEY_POSTINGS, _encoded(self._keys)))
            found.append((SectionKind.TAG_POSTINGS, _encoded(self._tags)))
        return found


class HeldPostings:
    """Postings of one kind in memory, for records that have none in an index. `add` them in order.

    Found as in `Postings`, by record numbers counted from `start`. One thread at a time.
    """

    def __init__(self, kind: SectionKind, start: int) -> None:
        self.end = start
        """Everything below has been added, or has no records."""
        self._kind = kind
        self._start = start
        self._coming: list[tuple[Hashes, Places]] = []
        self._sorted: list[tuple[Hashes, Places]] = []
        """In the order of records, each more than twice as long as the next."""

    def add(self, batch: Batch) -> None:
        """Take in the records that lie at or above `end`."""
        if batch.end <= self.end:
            return
        batch = batch.slice(self.end, batch.end)
        self.end = batch.end
        strip = batch.key_strip() if self._kind is SectionKind.KEY_POSTINGS else batch.tag_strip()
        if strip is not None:
            hashes, rows = _hashed(strip)
            self._coming.append((hashes, rows + (batch.base - self._start)))

    def find(self, wanted: int, first: int = 0) -> Iterator[Places]:
        """The records from `first` on with this hash, in order, in one or more pieces; none is empty."""
        for found in self._found(wanted):
            rest = found[int(np.searchsorted(found, first)) :]
            if len(rest):
                yield rest

    def find_backwards(self, wanted: int) -> Iterator[Places]:
        """All records with this hash, the newest piece first; inside each piece they rise."""
        yield from reversed(self._found(wanted))

    def _found(self, wanted: int) -> list[Places]:
        self._sort()
        found = []
        for hashes, records in self._sorted:
            low, high = (int(np.searchsorted(hashes, np.uint64(wanted), side)) for side in ("left", "right"))
            if high > low:
                found.append(records[low:high])
        return found

    def _sort(self) -> None:
        """Put what has come into order. A record is sorted again only when as many have come behind it."""
        if not self._coming:
            return
        coming, self._coming = self._coming, []
        hashes, records = (np.concatenate(column) for column in zip(*coming, strict=True))
        while self._sorted and len(self._sorted[-1][0]) <= 2 * len(hashes):
            earlier = self._sorted.pop()
            hashes, records = np.concatenate([earlier[0], hashes]), np.concatenate([earlier[1], records])
        order = np.argsort(hashes, kind="stable")
        self._sorted.append((hashes[order], records[order]))


def _hashed(strip: Strip) -> tuple[Hashes, Places]:
    """Hash and row of each entry that is there."""
    hashes = hash_column(strip.filling, strip.offsets)
    if strip.present is None:
        return hashes, np.arange(len(hashes))
    rows = np.flatnonzero(strip.present)
    return hashes[rows], rows


def _encoded(parts: list[tuple[Hashes, Records]]) -> bytes:
    hashes = np.concatenate([np.empty(0, dtype=np.uint64), *[hashes for hashes, _ in parts]])
    records = np.concatenate([np.empty(0, dtype=np.uint32), *[records for _, records in parts]])
    return encode_postings(hashes, records)
