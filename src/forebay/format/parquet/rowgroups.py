"""Row groups of a Parquet segment: out of bytes, checked, as tables and as batches. Knows no disk.

    chunks := (position u64, length u32, crc u32)* of every column chunk, in the order of row groups, then of columns
    parquet footer := the metadata of the Parquet file, as it stands before its last 8 bytes

Both are sections of the index of the segment. So every byte that a row comes from is under a checksum: the
metadata under that of its section, a column chunk, its page headers included, under that of its entry.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from forebay.errors import Corrupt
from forebay.format.checksum import ContentHash, crc32
from forebay.format.columns import arrow
from forebay.format.columns.layout import find
from forebay.format.columns.times import Appended, timed
from forebay.format.frame.batch import Batch
from forebay.format.index.hashing import Places
from forebay.format.index.lookups import LookupSections
from forebay.format.index.sections import Footer, FrameEntries, SectionKind, encode_index, frame_entries
from forebay.format.parquet.file import MAGIC, SCHEMA, ParquetFacts, facts_of
from forebay.records import Bytes

CHUNK: Final = np.dtype([("position", "<i8"), ("length", "<u4"), ("crc", "<u4")])
Chunks: TypeAlias = npt.NDArray[np.void]
"""By row group and column, with the fields of `CHUNK`."""
ReadAt: TypeAlias = Callable[[int, int], Bytes]
"""`read(length, position)` of a segment's bytes."""

_LENGTH_BYTES: Final = 4
_TAIL_BYTES: Final = _LENGTH_BYTES + len(MAGIC)
_METADATA_BYTES_MAX: Final = 256 * 1024 * 1024
_RECORD: Final = ("timestamp", "key", "value", "tag", "headers")


class RowGroup:
    """The rows of one row group, with all columns."""

    def __init__(self, table: pa.Table) -> None:
        """Raises `Corrupt` if the offsets do not rise."""
        self.offsets: Places = _numbers(table, "offset")
        self._epochs = _numbers(table, "epoch")
        self._appended = _milliseconds(table, "appended_at")
        if not len(self.offsets) or (np.diff(self.offsets) <= 0).any():
            raise Corrupt("the offsets of a row group do not rise")
        records = pa.Table.from_arrays([table.column(name).combine_chunks() for name in _RECORD], _RECORD)
        columns = timed(arrow.encode_stored(records.to_batches()[0]), self._times())
        self._layout = find(b"".join(columns.parts), 0, columns.size, columns.flags, columns.count)
        self.bytes = columns.size + 3 * self.offsets.nbytes
        self.whole = Batch(0, columns.count, 0, 0, self._layout)
        """All rows as if they were consecutive records from offset 0 on."""

    def batches(self, first: int, stop: int) -> list[Batch]:
        """The rows `[first, stop)`, consecutive offsets of one epoch together."""
        offsets, epochs = self.offsets[first:stop], self._epochs[first:stop]
        breaks = np.flatnonzero((np.diff(offsets) != 1) | (np.diff(epochs) != 0)) + 1
        edges = [first, *(breaks + first).tolist(), stop]
        return [
            Batch(
                int(self.offsets[row]),
                after - row,
                int(self._epochs[row]),
                int(self._appended[row:after].max()),
                self._layout,
                row,
            )
            for row, after in pairwise(edges)
        ]

    def _times(self) -> list[Appended]:
        edges = [0, *(np.flatnonzero(np.diff(self._appended)) + 1).tolist(), len(self._appended)]
        return [Appended(after - row, int(self._appended[row])) for row, after in pairwise(edges)]


class ParquetLayout:
    """Where the columns of a Parquet file lie, and what they must be."""

    def __init__(self, metadata: pq.FileMetaData, chunks: Chunks) -> None:
        self.metadata = metadata
        self._chunks = chunks
        self._names = [metadata.schema.column(leaf).path.partition(".")[0] for leaf in range(metadata.num_columns)]

    @property
    def columns(self) -> set[str]:
        """The names of all columns."""
        return set(self._names)

    def read(self, group: int, read: ReadAt, names: Sequence[str] = SCHEMA.names) -> pa.Table:
        """The named columns of a row group, in that order, every byte checked; no other column is read."""
        chosen = [leaf for leaf, name in enumerate(self._names) if name in names]
        held: dict[int, Bytes] = {}
        for first, last in _adjoining(chosen):
            row = self._chunks[group]
            origin = int(row["position"][first])
            stop = int(row["position"][last]) + int(row["length"][last])
            held[origin] = block = read(stop - origin, origin)
            for leaf in range(first, last + 1):
                position, length, crc = row[leaf].tolist()
                chunk = memoryview(block)[position - origin : position - origin + length]
                if len(chunk) != length or crc32(chunk) != crc:
                    raise Corrupt(f"column {self._names[leaf]} of row group {group} is damaged")
        return self._table(group, held, names)

    def _table(self, group: int, held: dict[int, Bytes], names: Sequence[str]) -> pa.Table:
        source = pa.PythonFile(_Held(held), mode="r")
        try:
            # Nothing ahead of what is asked for: other pieces of the file are not there.
            file = pq.ParquetFile(source, metadata=self.metadata, pre_buffer=False)
            found = file.read_row_group(group, list(names), use_threads=False)
            return found.select(list(names)).cast(pa.schema([SCHEMA.field(name) for name in names]))
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise Corrupt(f"row group {group} does not decode: {error}") from error


class _Held(io.RawIOBase):
    """A file of which only some pieces are there."""

    def __init__(self, pieces: dict[int, Bytes]) -> None:
        self._pieces = pieces
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        ends = [position + len(piece) for position, piece in self._pieces.items()]
        self._at = offset + (0, self._at, max(ends, default=0))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        for position, piece in self._pieces.items():
            if position <= self._at < position + len(piece):
                first = self._at - position
                found = piece[first:] if size < 0 else piece[first : first + size]
                self._at += len(found)
                return bytes(found)
        return b""


def _adjoining(leaves: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last of each run of columns that lie side by side."""
    found: list[tuple[int, int]] = []
    for leaf in leaves:
        if found and found[-1][1] + 1 == leaf:
            found[-1] = (found[-1][0], leaf)
        else:
            found.append((leaf, leaf))
    return found


def decode_layout(chunks: Bytes, footer: Bytes) -> ParquetLayout:
    """The layout out of the two sections of an index, whose checksums were compared."""
    metadata = _decoded_metadata(bytes(footer))
    table = np.frombuffer(chunks, CHUNK)
    if len(table) != metadata.num_row_groups * metadata.num_columns:
        raise Corrupt(f"an index lists {len(table)} column chunks for {metadata.num_row_groups} row groups")
    return ParquetLayout(metadata, table.reshape(metadata.num_row_groups, metadata.num_columns))


def _decoded_metadata(footer: bytes) -> pq.FileMetaData:
    tail = len(footer).to_bytes(_LENGTH_BYTES, "little") + MAGIC
    try:
        return pq.read_metadata(pa.BufferReader(MAGIC + footer + tail))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Corrupt(f"the metadata of a Parquet file does not decode: {error}") from error


class Walked(NamedTuple):
    """What all bytes of a Parquet segment say."""

    content: bytes
    """Of its index."""
    footer: Footer
    entries: FrameEntries
    facts: ParquetFacts
    digests: list[int]
    """Of the rows of each row group, see `rows_digest`."""


def walk(read: ReadAt, size: int, name: str) -> Walked:
    """Read a Parquet segment of `size` bytes from front to back, holding a row group at a time; work out its index.

    Raises `Corrupt` if it is none, or does not decode.
    """
    footer_bytes = _read_footer(read, size, name)
    metadata = _decoded_metadata(footer_bytes)
    facts = facts_of(metadata, name)
    walking = _Walking(read, metadata, facts)
    for group in range(metadata.num_row_groups):
        walking.take(group)
    return walking.done(size, footer_bytes)


def _read_footer(read: ReadAt, size: int, name: str) -> bytes:
    tail = read(_TAIL_BYTES, max(0, size - _TAIL_BYTES))
    length = int.from_bytes(tail[:_LENGTH_BYTES], "little")
    if tail[_LENGTH_BYTES:] != MAGIC or length > min(size - _TAIL_BYTES, _METADATA_BYTES_MAX):
        raise Corrupt(f"{name} does not end like a Parquet file")
    return bytes(read(length, size - _TAIL_BYTES - length))


class _Walking:
    """A walk under way."""

    def __init__(self, read: ReadAt, metadata: pq.FileMetaData, facts: ParquetFacts) -> None:
        self._read = read
        self._metadata = metadata
        self._facts = facts
        self._chunks: Chunks = np.zeros((metadata.num_row_groups, metadata.num_columns), CHUNK)
        self._lookups = LookupSections(facts.start)
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._digests: list[int] = []
        self._appended_max = 0
        self._records = 0
        self._at = 0
        self._crc = 0
        self._hash = ContentHash()

    def take(self, group: int) -> None:
        """Take in the next row group."""
        row = self._chunks[group]
        for leaf in range(self._metadata.num_columns):
            column = self._metadata.row_group(group).column(leaf)
            first = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
            row[leaf] = (first, column.total_compressed_size, 0)
        stop = int((row["position"] + row["length"]).max())
        origin, block = self._at, self._taken(stop)
        for leaf in range(len(row)):
            position, length, _ = row[leaf].tolist()
            row[leaf]["crc"] = crc32(block[position - origin : position - origin + length])
        table = ParquetLayout(self._metadata, self._chunks).read(
            group, lambda length, position: block[position - origin : position - origin + length]
        )
        self._note(table, int(row["position"].min()), stop)

    def _note(self, table: pa.Table, position: int, stop: int) -> None:
        rows, facts = RowGroup(table), self._facts
        first, last = int(rows.offsets[0]), int(rows.offsets[-1])
        if first < (self._rows[-1][0] + self._rows[-1][3] if self._rows else facts.start) or last >= facts.end:
            raise Corrupt(f"a row group holds offsets of [{first}, {last}], which do not belong there")
        times = rows.whole.timestamps()
        span = last - first + 1
        self._rows.append((first, position, stop - position, span, int(times.min()), int(times.max())))
        self._lookups.add_rows(rows.whole, rows.offsets)
        self._digests.append(rows_digest(table))
        self._records += len(rows.offsets)
        self._appended_max = max(self._appended_max, int(_milliseconds(table, "appended_at").max()))

    def _taken(self, stop: int) -> memoryview:
        block = self._read(stop - self._at, self._at)
        self._at += len(block)
        self._crc = crc32(block, self._crc)
        self._hash.update(block)
        return memoryview(block)

    def done(self, size: int, footer_bytes: bytes) -> Walked:
        """Everything, once all row groups were taken in."""
        self._taken(size)
        entries = frame_entries(self._rows)
        footer = Footer(
            epoch=self._facts.epoch,
            epoch_max=self._facts.epoch,
            start=self._facts.start,
            end=self._facts.end,
            frames=len(entries),
            records=self._records,
            time_min=int(entries["time_min"].min()) if len(entries) else 0,
            time_max=int(entries["time_max"].max()) if len(entries) else 0,
            appended_max=self._appended_max,
            segment_bytes=self._at,
            segment_crc=self._crc,
            content_hash=self._hash.digest(),
        )
        more = [
            *self._lookups.sections(),
            (SectionKind.CHUNKS, self._chunks.tobytes()),
            (SectionKind.PARQUET_FOOTER, footer_bytes),
        ]
        index = encode_index(footer, entries, self._facts.named_gaps(), more)
        return Walked(index, footer, entries, self._facts, self._digests)


def rows_digest(table: pa.Table) -> int:
    """A checksum over the rows of a table of `SCHEMA`: equal rows have equal ones, however they are stored."""
    records = pa.Table.from_arrays([table.column(name).combine_chunks() for name in _RECORD], _RECORD)
    crc = 0
    for part in arrow.encode_stored(records.to_batches()[0]).parts:
        crc = crc32(part, crc)
    for name in ("offset", "partition", "appended_at", "epoch", "producer", "sequence"):
        column = table.column(name).combine_chunks()
        crc = crc32(np.ascontiguousarray(column.is_valid().to_numpy(zero_copy_only=False)).tobytes(), crc)
        crc = crc32(_numbers(table, name).tobytes(), crc)
    return crc


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    """A column of numbers or times; 0 for a null."""
    found = table.column(name).combine_chunks().cast(pa.int64())
    return np.ascontiguousarray(found.fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)


def _milliseconds(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    return _numbers(table, name) // 1000
