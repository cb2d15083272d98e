"""A sealed segment, read through its index, from wherever its bytes lie: a local file or an object in a store.

Every frame is checked before a record of it is shown; one that does not check is a damaged range. Knows
frames, indexes and pages; knows nothing of disks, stores or catalogs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.errors import Corrupt
from forebay.format.checksum import salted
from forebay.format.control.offsets import OffsetSet
from forebay.format.files.segment import HEADER_BYTES, decode_header
from forebay.format.frame.batch import Batch, decode
from forebay.format.frame.head import Verdict, read_frame
from forebay.format.index import sections as index_format
from forebay.format.index.hashing import Places
from forebay.format.index.lookups import HeldPostings
from forebay.format.index.postings import Postings
from forebay.format.index.sections import SectionKind
from forebay.pages import Page
from forebay.records import Bytes, Gap, Reason

FRAME_BYTES_LIMIT = 64 * 1024 * 1024
"""No version writes a larger body; the setting `wal.frame_bytes_max` only bounds what is written now."""
INDEX_BYTES_WHOLE = 32 * 1024
"""An index up to here is read at once."""
INDEX_BYTES_FRONT = 8 * 1024
"""Read of a longer one in any case: most often its frames and gaps, which stand first."""
SCAN_BYTES = 4 * 1024 * 1024
READ_BYTES = 1024 * 1024
"""Of frames asked for at once: less than a block that is read ahead, so that few frames lie in two."""


class ByteSource(Protocol):
    """The bytes of one segment."""

    def read_at(self, length: int, position: int) -> Bytes:
        """Up to `length` bytes from `position`; fewer only at the end."""

    def close(self) -> None:
        """Give back what is held."""


class IndexSource(ByteSource, Protocol):
    """The bytes of one index."""

    def read_at(self, length: int, position: int) -> bytes:
        """The same, as bytes of their own."""

    def size(self) -> int:
        """How many there are."""


class SealedIndex(NamedTuple):
    """The decoded index of a sealed segment, at the offsets where the segment was put."""

    footer: index_format.Footer
    entries: index_format.FrameEntries
    gaps: list[Gap]

    def moved(self, shift: int) -> SealedIndex:
        """The index of the same segment `shift` offsets further on."""
        footer = msgspec.structs.replace(self.footer, start=self.footer.start + shift, end=self.footer.end + shift)
        entries = self.entries.copy()
        entries["offset"] += shift
        gaps = [Gap(gap.start + shift, gap.stop + shift, gap.reason) for gap in self.gaps]
        return SealedIndex(footer, entries, gaps)


UNREADABLE = (Reason.HISTORY, Reason.DAMAGED)
"""Gaps of one copy in which there may be records all the same, that another copy has or that are damaged."""

Sections: TypeAlias = dict[int, index_format.Section]
"""The sections of an index by kind."""
_NONE: Final[Mapping[SectionKind, Any]] = MappingProxyType({})
"""What most segments hold: one for all of them."""


class SealedSegment(ABC):
    """An immutable segment `[start, end)`. Its index is read when first needed and may be forgotten again.

    `shift` is how far behind the offsets in its bytes it was put; 0 for what was born in the log. One that has not
    been read yet is small: a process may list many for each of thousands of shards.
    """

    __slots__ = (
        "_index",
        "_postings",
        "_postings_source",
        "_salt_crc",
        "_shift",
        "_source",
        "_unscanned",
        "end",
        "start",
    )

    def __init__(self, start: int, end: int, *, shift: int = 0) -> None:
        self.start = start
        self.end = end
        self._shift = shift
        self._source: ByteSource | None = None
        self._salt_crc: int | None = None
        self._index: tuple[SealedIndex, Sections] | None = None
        self._postings: Mapping[SectionKind, Postings | HeldPostings] = _NONE
        self._unscanned: Mapping[SectionKind, list[Gap]] = _NONE
        """Damage that was met where the segment had to be read for its postings."""
        self._postings_source: IndexSource | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """How messages call it."""

    @abstractmethod
    def _open_source(self) -> ByteSource:
        """Its bytes, for a caller that reads on."""

    @abstractmethod
    def _open_index(self) -> IndexSource:
        """The bytes of its index."""

    def _open_spot(self) -> ByteSource:
        """Its bytes, for a caller that wants one frame."""
        return self._opened()

    @property
    def leading_gap(self) -> Gap | None:
        """The gap before the first offset of this segment."""
        return next((gap for gap in self.index().gaps if gap.stop == self.start), None)

    @property
    def previous_end(self) -> int:
        """Where the segment before this one must end."""
        gap = self.leading_gap
        return gap.start if gap is not None else self.start

    def index(self) -> SealedIndex:
        """The frames and gaps of the segment; `Corrupt` if the index does not check or is of other offsets."""
        return self._known()[0]

    def _known(self) -> tuple[SealedIndex, Sections]:
        known = self._index
        if known is None:
            with closing(self._open_index()) as source:
                found, sections = read_index(source, self.name)
            if self._shift:
                found = found.moved(self._shift)
            if found.footer.start > self.start or found.footer.end < self.end:
                raise Corrupt(
                    f"the index of {self.name} is of [{found.footer.start}, {found.footer.end}), "
                    f'which does not cover [{self.start}, {self.end}): run "forebay verify"'
                )
            known = self._index = found, sections
        return known

    def read_one(self, offset: int) -> Page:
        """The frame or gap that covers `offset`, from there on; no other byte is read for it."""
        return self.read(offset, 1, opened=self._open_spot)

    def read(self, offset: int, bytes_max: int, *, opened: Callable[[], ByteSource] | None = None) -> Page:
        """Frames from the one that covers `offset`, at least one, up to about `bytes_max`.

        `opened` gives the bytes, if not the source that reads ahead.
        """
        _, entries, gaps = self.index()
        first = index_format.find_offset(entries, offset)
        gathered = Gathered(offset, bytes_max, self._shift)
        if first >= len(entries) or int(entries["offset"][first]) > offset:
            gathered.add_gap(self._gap_at(gaps, offset))
            return gathered.page()
        stop = _frames_within(entries, first, bytes_max)
        try:
            source = (opened or self._opened)()
            salt_crc = self._salted(source)
            while first < stop and not gathered.is_full:
                wanted = entries[first : min(stop, _frames_within(entries, first, READ_BYTES))]
                begin, last = int(wanted["position"][0]), wanted[-1]
                buffer = source.read_at(int(last["position"] + last["length"]) - begin, begin)
                self._take(gathered, wanted, buffer, salt_crc)
                first += len(wanted)
        except Corrupt:
            # Behind what was gathered the next read begins, and meets it.
            if gathered.next == offset:
                gathered.add_gap(Gap(offset, self.end, Reason.DAMAGED))
        return gathered.page()

    def _take(self, gathered: Gathered, wanted: index_format.FrameEntries, buffer: Bytes, salt_crc: int) -> None:
        """Add adjoining frames, which the buffer begins with."""
        positions = wanted["position"] - wanted["position"][0]
        gaps = self.index().gaps
        for base, count, position in zip(
            *(row.tolist() for row in (wanted["offset"], wanted["count"], positions)), strict=True
        ):
            if gathered.is_full:
                return
            if base > gathered.next:
                gathered.add_gap(self._gap_at(gaps, gathered.next))
            gathered.known_frame(base, count, buffer, position, salt_crc)

    def offset_at_time(self, timestamp: int) -> int | None:
        """The offset of the first record at or after the time; `None` if there is none.

        Where that record lies in a damaged frame, the frame's first offset: a reader there meets the damage.
        """
        entries = self.index().entries
        place = index_format.find_time(entries, timestamp)
        if place is None:
            return None
        first = int(entries["offset"][place])
        page = self.read(first, 1)
        return first_at_time(page.batches, timestamp) if page.batches else first

    def damage_at(self, offset: int) -> Gap | None:
        """The damaged range that covers `offset`, of those that the index names: no times are known of it."""
        named = (gap for gap in self.index().gaps if gap.reason is Reason.DAMAGED)
        return next((gap for gap in named if gap.start <= offset < gap.stop), None)

    def held(self, start: int, stop: int) -> OffsetSet:
        """The offsets of `[start, stop)` that have a record here."""
        found = OffsetSet.of_range(max(start, self.start), min(stop, self.end))
        for gap in self.index().gaps:
            found -= OffsetSet.of_range(gap.start, gap.stop)
        return found

    def totals(self) -> npt.NDArray[np.int64] | None:
        """What all records up to the end of each frame count for; `None` where the index does not say."""
        section = self._known()[1].get(SectionKind.SIZES)
        if section is None:
            return None
        with closing(self._open_index()) as source:
            return index_format.decode_sizes(source.read_at(section.length, section.position), section).astype(np.int64)

    def find(self, kind: SectionKind, wanted: int, start: int = 0) -> Iterator[Places]:
        """The offsets from `start` on of records that may have the key or tag with this hash, in rising pieces.

        Without postings in the index the whole segment is read for them, once.
        """
        found, origin = self._found(kind)
        for records in found.find(wanted, max(start, self.start) - origin):
            yield from self._own(records.astype(np.int64) + origin)

    def unsearched(self, kind: SectionKind) -> list[Gap]:
        """The damaged ranges in which `find` cannot see: those the index names, and what a scan for postings met."""
        self._found(kind)
        named = [gap for gap in self.index().gaps if gap.reason in UNREADABLE]
        return sorted({*named, *self._unscanned.get(kind, ())})

    def find_backwards(self, kind: SectionKind, wanted: int) -> Iterator[Places]:
        """All of them, the newest piece first; inside each piece they rise."""
        found, origin = self._found(kind)
        for records in found.find_backwards(wanted):
            yield from self._own(records.astype(np.int64) + origin)

    def _own(self, offsets: Places) -> Iterator[Places]:
        """Those inside the segment: an index may name more."""
        low, high = np.searchsorted(offsets, [self.start, self.end])
        if high > low:
            yield offsets[low:high]

    def _found(self, kind: SectionKind) -> tuple[Postings | HeldPostings, int]:
        """The postings of this kind, and the offset that they count from."""
        index, sections = self._known()
        found = self._postings.get(kind)
        if found is None:
            section = sections.get(kind)
            found = self._scanned(kind) if section is None else Postings(self._read_postings, section, self.name)
            self._postings = {**self._postings, kind: found}
        return found, index.footer.start

    def _scanned(self, kind: SectionKind) -> HeldPostings:
        found = HeldPostings(kind, self.index().footer.start)
        missed: list[Gap] = []
        offset = self.start
        while offset < self.end:
            page = self.read(offset, SCAN_BYTES)
            for batch in page.batches:
                found.add(batch)
            missed += [gap for gap in page.events if gap.reason is Reason.DAMAGED]
            offset = page.next
        self._unscanned = {**self._unscanned, kind: missed}
        return found

    def _read_postings(self, position: int, length: int) -> bytes:
        source = self._postings_source
        if source is None:
            source = self._postings_source = self._open_index()
        return source.read_at(length, position)

    def close(self) -> None:
        """Give memory and descriptors back; the next read takes them again."""
        self._index, self._salt_crc, self._postings = None, None, _NONE
        held, self._postings_source = self._postings_source, None
        if held is not None:
            held.close()
        self.rest()

    def rest(self) -> None:
        """Give back the bytes of the segment that are held; what is known of its index stays."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _opened(self) -> ByteSource:
        source = self._source
        if source is None:
            source = self._source = self._open_source()
        return source

    def _salted(self, source: ByteSource) -> int:
        if self._salt_crc is None:
            self._salt_crc = salt_crc_of(source, self.name)
        return self._salt_crc

    def _gap_at(self, gaps: list[Gap], offset: int) -> Gap:
        for gap in gaps:
            if gap.start <= offset < gap.stop:
                return gap
        raise Corrupt(f'{self.name} has no record and names no gap at offset {offset}: run "forebay verify"')


class StoredSegment(SealedSegment):
    """A sealed segment whose bytes come from `source` and `index`, and from `spot` for one frame."""

    def __init__(
        self,
        name: str,
        start: int,
        end: int,
        *,
        source: Callable[[], ByteSource],
        index: Callable[[], IndexSource],
        spot: Callable[[], ByteSource] | None = None,
        shift: int = 0,
    ) -> None:
        super().__init__(start, end, shift=shift)
        self._name = name
        self._sources = source, index, spot

    @property
    def name(self) -> str:
        """See `SealedSegment`."""
        return self._name

    def _open_source(self) -> ByteSource:
        return self._sources[0]()

    def _open_index(self) -> IndexSource:
        return self._sources[1]()

    def _open_spot(self) -> ByteSource:
        spot = self._sources[2]
        return super()._open_spot() if spot is None else spot()


def read_index(source: IndexSource, name: str) -> tuple[SealedIndex, Sections]:
    """Frames, gaps and the table of an index, checked, and little else of its bytes; `Corrupt` if they do not hold."""
    size = source.size()
    front = source.read_at(size if size <= INDEX_BYTES_WHOLE else INDEX_BYTES_FRONT, 0)

    def read(position: int, length: int) -> bytes:
        if position + length <= len(front):
            return front[position : position + length]
        return source.read_at(length, position)

    try:
        found = index_format.read_sections(read, size)
        if isinstance(found, Verdict):
            raise Corrupt(f"it is {found.value}")
        footer, listed = found
        index_format.check_header(front[: index_format.HEADER_BYTES], footer)
        sections = {section.kind: section for section in listed}
        frames, gap_list = (sections.get(kind) for kind in (SectionKind.FRAMES, SectionKind.GAPS))
        if frames is None:
            raise Corrupt("it names no frames")
        entries = index_format.decode_frames(read(frames.position, frames.length), frames)
        gaps = (
            index_format.decode_gaps(read(gap_list.position, gap_list.length), gap_list) if gap_list is not None else []
        )
    except Corrupt as error:
        raise Corrupt(f'the index of {name}: {error}; run "forebay repair"') from error
    return SealedIndex(footer, entries, gaps), sections


def decoded_index(content: bytes, name: str) -> SealedIndex:
    """An index file, checked against its own checksums; `Corrupt` if it does not hold."""
    try:
        decoded = index_format.decode_index(content)
    except Corrupt as error:
        raise Corrupt(f'the index of {name}: {error}; run "forebay repair"') from error
    if isinstance(decoded, Verdict):
        raise Corrupt(f'the index of {name} is {decoded.value}: run "forebay repair"')
    return SealedIndex(*decoded)


def salt_crc_of(source: ByteSource, name: str) -> int:
    """What every checksum in this segment starts from."""
    header = decode_header(source.read_at(HEADER_BYTES, 0))
    if isinstance(header, Verdict):
        raise Corrupt(f'{name} has a {header.value} header: run "forebay verify"')
    return salted(header.salt)


def first_at_time(batches: Iterable[Batch], timestamp: int) -> int | None:
    """The offset of the first record at or after the time."""
    for batch in batches:
        matches = batch.timestamps() >= timestamp
        place = int(np.argmax(matches))
        if matches[place]:
            return batch.base + place
    return None


def _frames_within(entries: index_format.FrameEntries, first: int, bytes_max: int) -> int:
    """The end of the run of frames from `first` that fits; at least one."""
    room = int(entries["position"][first]) + bytes_max
    ends = entries["position"][first:] + entries["length"][first:]
    return first + max(1, int(np.searchsorted(ends, room, side="right")))


class Gathered:
    """A page in the making: everything from `offset` on, until about `bytes_max` are there.

    Frames that an index names are moved by `shift`.
    """

    def __init__(self, offset: int, bytes_max: int, shift: int = 0) -> None:
        self.next = offset
        self.left = bytes_max
        self._shift = shift
        self._batches: list[Batch] = []
        self._gaps: list[Gap] = []

    @property
    def is_empty(self) -> bool:
        """Whether no record is there yet."""
        return not self._batches

    @property
    def is_full(self) -> bool:
        """Whether the page has as many bytes as it may have: compressed frames count with what they hold."""
        return self.left <= 0 and not self.is_empty

    def add(self, batch: Batch, length: int) -> None:
        """Add the records of a frame of `length` bytes, as far as they lie ahead."""
        if batch.base > self.next:
            # Between two whole frames there is no byte for these offsets: only stepping over damage leaves that.
            self.add_gap(Gap(self.next, batch.base, Reason.DAMAGED))
        self.left -= max(length, batch.unpacked_bytes)
        self._batches.append(batch.slice(self.next, batch.end) if batch.base < self.next else batch)
        self.next = batch.end

    def known_frame(self, first: int, count: int, buffer: Bytes, position: int, salt_crc: int) -> None:
        """Add the frame that an index names; one that is not whole is a gap."""
        head = read_frame(buffer, position, salt_crc, FRAME_BYTES_LIMIT)
        # The checksum is over the base as it was written, so that is what the head must say.
        if isinstance(head, Verdict) or head.base != first - self._shift or head.count != count:
            self.add_gap(Gap(first, first + count, Reason.DAMAGED))
        else:
            self.add(decode(buffer, position, head).moved(self._shift), head.length)

    def add_gap(self, gap: Gap) -> None:
        """Add a gap, as far as it lies ahead."""
        if gap.stop > self.next:
            self._gaps.append(gap._replace(start=self.next))
            self.next = gap.stop

    def page(self) -> Page:
        """What has been gathered."""
        return Page(self._batches, self._gaps, self.next)
