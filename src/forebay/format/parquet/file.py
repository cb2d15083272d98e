"""Parquet segments: records of history by column, for long keeping and for other engines. Knows no disk.

    file := Parquet with the columns of `SCHEMA`, rows in rising order of offsets, row groups of about 64 MiB,
            zstd, statistics, page checksums and page index, bloom filters on offset, timestamp, key and tag
    metadata "forebay" := `ParquetFacts`, stored with `metadata.value`
    each column has its id of `FIELD_IDS`, as Iceberg wants it; files of earlier versions have none

An offset of the range that has no row and lies in no named gap was deleted, or superseded in a topic that is
compacted: readers step over it in silence. `producer` and `sequence` hold the bits of unsigned numbers; both
are null for a record of an append that had no producer.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.errors import Corrupt, Unsupported
from forebay.format.columns.arrow import HEADER_TYPE
from forebay.format.control.frames import WindowEntry, reason_of
from forebay.format.frame.batch import Batch
from forebay.format.metadata.value import decode_value, encode_value
from forebay.format.parquet.ids import with_ids
from forebay.records import Bytes, Gap, Run

GROUP_BYTES: Final = 64 * 1024 * 1024
"""Of the columns of a row group, before they are compressed; one record may be larger.

A reader of all records is quicker with large row groups, for Spark pays for each; a reader of one record is quicker
with small ones, for it decodes one. Writing, and reading back, holds a few times as much memory.
"""
GROUP_ROWS_MAX: Final = 1 << 20
TIME_MAX: Final = (2**63 - 1) // 1000
"""Parquet holds microseconds: records whose time (ms) lies further from 1970 stay in frames."""
MAGIC: Final = b"PAR1"
_FACTS: Final = b"forebay"
_ZSTD_LEVEL: Final = 1
"""Higher levels cost several times the time and save a few percent: values are most of a file, and say little twice."""
_BLOOM_FPP: Final = 0.05
_PAGE_BYTES: Final = 256 * 1024
_TIME: Final = pa.timestamp("us", "UTC")

SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", _TIME, nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("tag", pa.string()),
        pa.field("headers", pa.list_(pa.field("element", HEADER_TYPE, nullable=False)), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("appended_at", _TIME, nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("producer", pa.int64()),
        pa.field("sequence", pa.int64()),
    ]
)
FIELD_IDS: Final[Mapping[str, int]] = MappingProxyType(
    {name: number for number, name in enumerate(SCHEMA.names, 1)}
    | {"headers.element": 12, "headers.element.key": 13, "headers.element.value": 14}
)
"""By column: the numbers that a catalog of Iceberg gives them when it makes a table of `SCHEMA`. They never change."""
FILE_SCHEMA: Final = with_ids(SCHEMA, FIELD_IDS)
"""`SCHEMA` as files have it."""
_ENCODINGS: Final = {
    **dict.fromkeys(("offset", "timestamp", "appended_at", "sequence"), "DELTA_BINARY_PACKED"),
    # Lengths apart from bytes: a reader copies values by the page, and need not step from one to the next.
    "value": "DELTA_LENGTH_BYTE_ARRAY",
}
_DICTIONARIES: Final = ["tag", "headers.list.element.key", "partition", "epoch", "producer"]
_KEY_REPEATS_MIN: Final = 10
"""Records of a key, on average, from which on a dictionary of keys pays: who looks for one key reads it all."""
_BLOOMS: Final = ("offset", "timestamp", "key", "tag")


class ParquetFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a Parquet segment `[start, end)` says of itself beside its rows.

    `gaps` are gaps with a reason other than a delete. Where the newest of what it was made from was `born` in the
    log, `window` is the appends that were recognised as repeats at its end.
    """

    topic_id: str
    partition: int
    start: int
    end: int
    epoch: int
    born: bool = False
    gaps: tuple[tuple[int, int, int], ...] = ()
    window: tuple[WindowEntry, ...] = ()

    def named_gaps(self) -> list[Gap]:
        """The gaps that say why."""
        return [Gap(start, stop, reason_of(reason)) for start, stop, reason in self.gaps]


def rows_of(batch: Batch, partition: int, runs: Sequence[Run] = ()) -> pa.RecordBatch:
    """The records of one frame with `SCHEMA`; `runs` are its appends. Keys, values, tags, headers are not copied.

    Raises `Unsupported` for a time that Parquet cannot hold.
    """
    found = batch.to_arrow(partition)
    try:
        stamps = found.column("timestamp").cast(_TIME)
    except pa.ArrowInvalid as error:
        raise Unsupported(f"{batch} has a time that Parquet cannot hold: {error}") from error
    at = np.concatenate([np.full(part.records, part.at, np.int64) for part in batch.appended()])
    numbers = {
        "appended_at": pa.array(at * 1000, _TIME),
        "epoch": pa.array(np.full(batch.count, batch.epoch, np.int32)),
        "timestamp": stamps,
        "headers": found.column("headers").cast(SCHEMA.field("headers").type),
    }
    numbers["producer"], numbers["sequence"] = _appends(runs, batch.count)
    columns = [numbers[name] if name in numbers else found.column(name) for name in SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _appends(runs: Sequence[Run], count: int) -> tuple[pa.Array, pa.Array]:
    if not any(run.producer for run in runs):
        return pa.nulls(count, pa.int64()), pa.nulls(count, pa.int64())
    counts = [run.count for run in runs]
    assert sum(counts) == count, "the runs of a frame are those of all its records"
    producers = np.repeat(np.array([run.producer for run in runs], np.uint64), counts)
    sequences = np.repeat(np.array([run.sequence for run in runs], np.uint64), counts)
    none = producers == 0
    return pa.array(producers.view(np.int64), mask=none), pa.array(sequences.view(np.int64), mask=none)


class _Sink(io.RawIOBase):
    """Takes what the writer writes, until it is fetched."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._written = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    def write(self, part: Bytes) -> int:  # type: ignore[override]
        self._parts.append(bytes(part))
        self._written += len(self._parts[-1])
        return len(self._parts[-1])

    def taken(self) -> bytes:
        """All that was written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


def encode_parquet(groups: Iterable[pa.Table], facts: Callable[[], ParquetFacts]) -> Iterator[bytes]:
    """The bytes of a file with these row groups of `SCHEMA`, see `row_groups`; `facts` is asked at the end.

    Holds one row group at a time.
    """
    sink = _Sink()
    first, groups = _peeked(groups)
    writer = pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"),
        FILE_SCHEMA,
        compression="zstd",
        compression_level=_ZSTD_LEVEL,
        use_dictionary=[*_DICTIONARIES, *(["key"] if _repeats(first.column("key")) else [])],
        data_page_size=_PAGE_BYTES,
        column_encoding=_ENCODINGS,
        sorting_columns=[pq.SortingColumn(0)],
        write_page_index=True,
        write_page_checksum=True,
        bloom_filter_options={name: {"ndv": GROUP_ROWS_MAX, "fpp": _BLOOM_FPP} for name in _BLOOMS},
    )
    for group in groups:
        writer.write_table(group, row_group_size=group.num_rows)
        yield sink.taken()
    writer.add_key_value_metadata({_FACTS: encode_value(facts())})
    writer.close()
    yield sink.taken()


def _peeked(groups: Iterable[pa.Table]) -> tuple[pa.Table, Iterator[pa.Table]]:
    """The first of them, and all of them."""
    rest = iter(groups)
    first = next(rest, None)
    return (SCHEMA.empty_table(), rest) if first is None else (first, chain([first], rest))


def _repeats(keys: pa.ChunkedArray) -> bool:
    distinct: int = pc.count_distinct(keys).as_py()
    return distinct * _KEY_REPEATS_MIN <= len(keys)


def row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of about the size of a row group."""
    waiting: list[pa.Table] = []
    size = rows = 0
    for table in tables:
        for piece in _cut(table):
            if waiting and (size + piece.nbytes > GROUP_BYTES or rows + piece.num_rows > GROUP_ROWS_MAX):
                yield pa.concat_tables(waiting)
                waiting, size, rows = [], 0, 0
            waiting.append(piece)
            size += piece.nbytes
            rows += piece.num_rows
    if waiting:
        yield pa.concat_tables(waiting)


def _cut(table: pa.Table) -> Iterator[pa.Table]:
    """Pieces that each fit in a row group, unless one record does not."""
    pieces = max(-(-table.nbytes // GROUP_BYTES), -(-table.num_rows // GROUP_ROWS_MAX))
    if not table.num_rows:
        return
    if pieces <= 1 or table.num_rows == 1:
        yield table
        return
    rows = -(-table.num_rows // max(2, pieces))
    for first in range(0, table.num_rows, rows):
        yield from _cut(table.slice(first, rows))


def facts_of(metadata: pq.FileMetaData, name: str) -> ParquetFacts:
    """What the file says of itself; `Corrupt` if it is no Parquet segment."""
    stored = (metadata.metadata or {}).get(_FACTS)
    if stored is None:
        raise Corrupt(f"{name} is a Parquet file and no segment")
    return decode_value(stored, ParquetFacts)[0]
