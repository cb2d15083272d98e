"""Index files: where in a sealed segment each data frame lies. Knows no disk.

    index   := header table section* footer
    header  := magic "FBYI", version u16, 0 u16, sections u32, crc u32 of the 12 bytes before
    table   := (kind u32, flags u32, position u64, length u64, crc u32, 0 u32)*
    frames  := (first offset u64, position u64, length u32, count u32, time min i64, time max i64,
               running max time i64)*                                    data frames only
    gaps    := (start u64, stop u64, reason u32, 0 u32)*
    sizes   := (bytes of all records up to and with this frame u64)*     data frames, see `columns.sizes`
    key postings, tag postings := see `postings`
    chunks, parquet footer := see `parquet.rowgroups`; only where the segment is a Parquet file, whose row groups
               the frames are then: `count` is how many offsets lie from its first to its last row
    footer  := magic "FBYF", version u16, 0 u16, epoch u32, highest epoch u32, start u64, end u64,
               records u64, time min i64, time max i64, segment bytes u64, table position u64,
               index bytes u64, last appended_at i64, content hash 16 bytes, segment crc u32,
               table crc u32, frames u32, sections u32, 0 u32, crc u32 of the bytes before

Read from the back: the footer names the table, the table names the sections. A reader skips
sections whose kind it does not know; sizes and postings need not be there. Every byte is under a crc.
"""

from __future__ import annotations

import enum
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.errors import Corrupt
from forebay.format.checksum import CONTENT_HASH_BYTES, crc32
from forebay.format.control.frames import reason_of
from forebay.format.frame.head import Verdict
from forebay.records import Bytes, Gap

VERSION: Final = 1

_HEADER: Final = struct.Struct("<4sHHI")
_SECTION: Final = struct.Struct("<IIQQII")
_GAP: Final = struct.Struct("<QQII")
_FOOTER: Final = struct.Struct("<4sHHIIQQQqqQQQq16sIIIII")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
SECTION_BYTES: Final = _SECTION.size
FOOTER_BYTES: Final = _FOOTER.size + _CRC.size
assert (HEADER_BYTES, SECTION_BYTES, _GAP.size, FOOTER_BYTES) == (16, 32, 24, 128)

_MAGIC: Final = b"FBYI"
_FOOTER_MAGIC: Final = b"FBYF"

ENTRY: Final = np.dtype(
    [
        ("offset", "<i8"),
        ("position", "<i8"),
        ("length", "<u4"),
        ("count", "<u4"),
        ("time_min", "<i8"),
        ("time_max", "<i8"),
        ("time_running", "<i8"),
    ]
)
assert ENTRY.itemsize == 48

FrameEntries: TypeAlias = npt.NDArray[np.void]
"""One entry per data frame, in file order, with the fields of `ENTRY`."""
ReadAt: TypeAlias = Callable[[int, int], Bytes]
"""`read(position, length)` of an index file: so many bytes, or fewer at its end."""


class SectionKind(enum.IntEnum):
    """What a section holds. `CONTROLS` is a number kept for a later version."""

    FRAMES = 1
    GAPS = 2
    KEY_POSTINGS = 3
    TAG_POSTINGS = 4
    CONTROLS = 5
    SIZES = 6
    CHUNKS = 7
    PARQUET_FOOTER = 8


class Section(NamedTuple):
    """Where a section lies in the index file."""

    kind: int
    flags: int
    position: int
    length: int
    crc: int


class Footer(msgspec.Struct, frozen=True, kw_only=True):
    """What a sealed segment holds, as a whole. The fields that say where the table lies are set by `encode_index`."""

    epoch: int
    epoch_max: int
    start: int
    end: int
    frames: int
    records: int
    time_min: int
    time_max: int
    appended_max: int
    segment_bytes: int
    segment_crc: int
    content_hash: bytes
    table_position: int = 0
    table_crc: int = 0
    sections: int = 0
    index_bytes: int = 0


def frame_entries(rows: Iterable[tuple[int, int, int, int, int, int]]) -> FrameEntries:
    """Entries from (first offset, position, length, count, time min, time max) of each data frame, in order."""
    entries = np.array([(*row, 0) for row in rows], dtype=ENTRY)
    if len(entries):
        np.maximum.accumulate(entries["time_max"], out=entries["time_running"])
    return entries


def find_offset(entries: FrameEntries, offset: int) -> int:
    """Which entry covers the offset or else is the first behind it; `len(entries)` if all lie before."""
    place = bisect_right(entries["offset"], offset) - 1
    if place >= 0 and offset < int(entries["offset"][place]) + int(entries["count"][place]):
        return place
    return place + 1


def find_time(entries: FrameEntries, timestamp: int) -> int | None:
    """Which entry holds the first record at or after the time; `None` if all are earlier.

    The first frame whose own maximum reaches the time is the first whose running maximum does.
    """
    place = bisect_left(entries["time_running"], timestamp)
    return place if place < len(entries) else None


def encode_index(
    footer: Footer, entries: FrameEntries, gaps: Sequence[Gap], more: Iterable[tuple[SectionKind, bytes]] = ()
) -> bytes:
    """The whole index file; `more` are the sections for look-ups."""
    bodies: list[tuple[int, bytes]] = [(SectionKind.FRAMES, np.ascontiguousarray(entries, dtype=ENTRY).tobytes())]
    if gaps:
        packed = b"".join([_GAP.pack(gap.start, gap.stop, gap.reason, 0) for gap in gaps])
        bodies.append((SectionKind.GAPS, packed))
    bodies += more
    header = _HEADER.pack(_MAGIC, VERSION, 0, len(bodies))
    position = HEADER_BYTES + len(bodies) * SECTION_BYTES
    sections = []
    for kind, body in bodies:
        sections.append(_SECTION.pack(kind, 0, position, len(body), crc32(body), 0))
        position += len(body)
    table = b"".join(sections)
    ending = msgspec.structs.replace(
        footer,
        table_position=HEADER_BYTES,
        table_crc=crc32(table),
        sections=len(bodies),
        index_bytes=position + FOOTER_BYTES,
    )
    return b"".join([header, _CRC.pack(crc32(header)), table, *[body for _, body in bodies], encode_footer(ending)])


def encode_footer(footer: Footer) -> bytes:
    """The last bytes of an index file."""
    assert len(footer.content_hash) == CONTENT_HASH_BYTES
    packed = _FOOTER.pack(
        _FOOTER_MAGIC,
        VERSION,
        0,
        footer.epoch,
        footer.epoch_max,
        footer.start,
        footer.end,
        footer.records,
        footer.time_min,
        footer.time_max,
        footer.segment_bytes,
        footer.table_position,
        footer.index_bytes,
        footer.appended_max,
        footer.content_hash,
        footer.segment_crc,
        footer.table_crc,
        footer.frames,
        footer.sections,
        0,
    )
    return packed + _CRC.pack(crc32(packed))


def decode_footer(buffer: Bytes) -> Footer | Verdict:
    """The footer in the last bytes of an index file; `buffer` may hold more before them."""
    ending = bytes(buffer[-FOOTER_BYTES:])
    if len(ending) < FOOTER_BYTES or not any(ending):
        return Verdict.TORN
    packed = ending[: _FOOTER.size]
    if packed[:4] != _FOOTER_MAGIC or _CRC.unpack_from(ending, _FOOTER.size)[0] != crc32(packed):
        return Verdict.DAMAGED
    fields = _FOOTER.unpack(packed)
    if fields[1] != VERSION or fields[2]:
        return Verdict.NEWER
    return Footer(
        epoch=fields[3],
        epoch_max=fields[4],
        start=fields[5],
        end=fields[6],
        records=fields[7],
        time_min=fields[8],
        time_max=fields[9],
        segment_bytes=fields[10],
        table_position=fields[11],
        index_bytes=fields[12],
        appended_max=fields[13],
        content_hash=fields[14],
        segment_crc=fields[15],
        table_crc=fields[16],
        frames=fields[17],
        sections=fields[18],
    )


def table_bytes(footer: Footer) -> int:
    """The length of the section table at `footer.table_position`."""
    return footer.sections * SECTION_BYTES


def decode_table(buffer: Bytes, footer: Footer) -> list[Section]:
    """The sections named by the table, whose bytes `buffer` holds."""
    if len(buffer) != table_bytes(footer) or crc32(buffer) != footer.table_crc:
        raise Corrupt(f"the section table of an index is damaged: {len(buffer)} bytes, crc {crc32(buffer):08x}")
    sections = [Section(*fields[:5]) for fields in _SECTION.iter_unpack(buffer)]
    ending = footer.index_bytes - FOOTER_BYTES
    if any(section.position + section.length > ending for section in sections):
        raise Corrupt("the section table of an index names bytes behind its end")
    return sections


def read_sections(read: ReadAt, index_bytes: int) -> tuple[Footer, list[Section]] | Verdict:
    """The footer and the sections of an index file of so many bytes, of which no more than those two are read."""
    footer = decode_footer(read(max(0, index_bytes - FOOTER_BYTES), FOOTER_BYTES))
    if isinstance(footer, Verdict):
        return footer
    if footer.index_bytes != index_bytes:
        raise Corrupt(f"an index of {index_bytes} bytes does not fit its footer, which says {footer.index_bytes}")
    return footer, decode_table(read(footer.table_position, table_bytes(footer)), footer)


def check_header(buffer: Bytes, footer: Footer) -> None:
    """Raise `Corrupt` unless an index with this footer begins with these bytes."""
    header = _HEADER.pack(_MAGIC, VERSION, 0, footer.sections)
    if buffer != header + _CRC.pack(crc32(header)):
        raise Corrupt("the header of an index does not fit its footer")


def decode_frames(buffer: Bytes, section: Section) -> FrameEntries:
    """The frame entries, a view of the section's bytes."""
    _check(buffer, section, ENTRY.itemsize)
    return np.frombuffer(buffer, ENTRY)


def decode_gaps(buffer: Bytes, section: Section) -> list[Gap]:
    """The named gaps of the segment."""
    _check(buffer, section, _GAP.size)
    return [Gap(start, stop, reason_of(reason)) for start, stop, reason, _ in _GAP.iter_unpack(buffer)]


def encode_sizes(totals: Iterable[int]) -> bytes:
    """The sizes section: the running total of the bytes of records, per data frame."""
    return np.fromiter(totals, dtype="<u8").tobytes()


def decode_sizes(buffer: Bytes, section: Section) -> npt.NDArray[np.uint64]:
    """The running total of the bytes of records, per data frame; a view of the section's bytes."""
    _check(buffer, section, 8)
    return np.frombuffer(buffer, "<u8")


def check_section(buffer: Bytes, section: Section) -> None:
    """Raise `Corrupt` unless these are the bytes of the section, whatever its kind."""
    _check(buffer, section, 1)


def _check(buffer: Bytes, section: Section, entry_bytes: int) -> None:
    if len(buffer) != section.length or len(buffer) % entry_bytes or crc32(buffer) != section.crc:
        raise Corrupt(
            f"section {section.kind} of an index is damaged: {len(buffer)} of {section.length} bytes, "
            f"crc {crc32(buffer):08x} expected {section.crc:08x}"
        )


def decode_index(buffer: Bytes) -> tuple[Footer, FrameEntries, list[Gap]] | Verdict:
    """A whole index file held in memory; raises `Corrupt` where the footer is sound and the rest is not."""
    footer = decode_footer(buffer)
    if isinstance(footer, Verdict):
        return footer
    view = memoryview(buffer)
    if footer.index_bytes != len(buffer):
        raise Corrupt(f"an index of {len(buffer)} bytes does not fit its footer, which says {footer.index_bytes}")
    check_header(view[:HEADER_BYTES], footer)
    entries = np.empty(0, dtype=ENTRY)
    gaps: list[Gap] = []
    table = view[footer.table_position : footer.table_position + table_bytes(footer)]
    for section in decode_table(table, footer):
        body = view[section.position : section.position + section.length]
        if section.kind == SectionKind.FRAMES:
            entries = decode_frames(body, section)
        elif section.kind == SectionKind.GAPS:
            gaps = decode_gaps(body, section)
    return footer, entries, gaps
