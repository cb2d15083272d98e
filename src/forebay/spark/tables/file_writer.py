"""Parquet files that tasks write for a table: under names of their own, so that an attempt that was given up or goes
on unseen never touches the file of another. Only what a task reports is ever committed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.blobs import DirectoryStore
from forebay.clock import Clock, SystemClock
from forebay.disk import SystemDisk
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import files_io
from forebay.spark.values.decoding import Decoding

FILE_BYTES: Final = 128 * 1024 * 1024
"""A file of about this size is closed, and another begun."""
ROWS_PER_GROUP: Final = 250_000
FILE: Final = "file://"

REPORT: Final = "bad boolean, path string, records bigint, bytes bigint"
_REPORT_SCHEMA: Final = pa.schema(
    [("bad", pa.bool_()), ("path", pa.string()), ("records", pa.int64()), ("bytes", pa.int64())]
)


class Written(NamedTuple):
    """A finished file: whose it is, where it lies below its table, and what is in it."""

    bad: bool
    path: str
    records: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Outlet:
    """Where tasks write. Plain: it travels to them."""

    location: Location
    good: str
    """Address of the folder for rows of the table."""
    bad: str
    """The same for its side table."""
    good_from: tuple[tuple[int, int], ...]
    """The first offset of each partition that the table does not have yet."""
    bad_from: tuple[tuple[int, int], ...]
    good_schema: pa.Schema
    """The columns as files of the table have them: with ids, if the format has such."""
    bad_schema: pa.Schema

    def written(self, decoding: Decoding, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What a task does: part the rows, write both kinds, and report the files."""
        good = _Files(self.location, self.good, self.good_schema, bad=False)
        bad = _Files(self.location, self.bad, self.bad_schema, bad=True)
        for batch in batches:
            parted = decoding.part(batch)
            good.add(_from(parted.good, "_partition", "_offset", self.good_from))
            bad.add(_from(parted.bad, "partition", "offset", self.bad_from))
        rows = [found._asdict() for files in (good, bad) for found in files.close()]
        yield pa.RecordBatch.from_pylist(rows, schema=_REPORT_SCHEMA)


def write_rows(
    location: Location, folder: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """What a task does whose rows are all of one table: write them into the folder, and report the files."""
    files = _Files(location, folder, schema, bad=False)
    for batch in batches:
        files.add(batch.cast(schema))
    yield pa.RecordBatch.from_pylist([found._asdict() for found in files.close()], schema=_REPORT_SCHEMA)


def _from(batch: pa.RecordBatch, partition: str, offset: str, starts: tuple[tuple[int, int], ...]) -> pa.RecordBatch:
    """The rows that the table does not have yet."""
    if not batch.num_rows:
        return batch
    wanted = pa.repeat(False, batch.num_rows)
    for number, start in starts:
        here = pc.and_(pc.equal(batch.column(partition), number), pc.greater_equal(batch.column(offset), start))
        wanted = pc.or_(wanted, here)
    return batch.filter(wanted)


class _Sink(io.RawIOBase):
    """Takes what a Parquet writer writes, until it is fetched."""

    def __init__(self) -> None:
        self.position = 0
        self._chunks: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, chunk: object) -> int:
        content = bytes(memoryview(chunk))  # type: ignore[arg-type]
        self._chunks.append(content)
        self.position += len(content)
        return len(content)

    def tell(self) -> int:
        return self.position

    def fetched(self) -> bytes:
        content = b"".join(self._chunks)
        self._chunks.clear()
        return content


class _Files:
    """The files of one task for one table, one after the other."""

    def __init__(self, location: Location, folder: str, schema: pa.Schema, *, bad: bool) -> None:
        self._location = location
        self._folder = folder
        self._schema = schema
        self._bad = bad
        self._clock: Clock = SystemClock()
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._finished: list[Written] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Rows to be written; nothing is durable yet."""
        if batch.num_rows:
            self._waiting.append(batch)
            self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= FILE_BYTES:
            self._write()

    def close(self) -> list[Written]:
        """On return everything is durable; the files."""
        self._write()
        return self._finished

    def _write(self) -> None:
        if not self._waiting:
            return
        rows = sum(batch.num_rows for batch in self._waiting)
        name = f"{self._clock.random_bytes(16).hex()}.parquet"
        size = _store(self._location, self._folder, name, self._chunks(self._waiting))
        self._finished.append(Written(self._bad, f"{self._folder}/{name}", rows, size))
        self._waiting, self._waiting_bytes = [], 0

    def _chunks(self, batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
        sink = _Sink()
        with pq.ParquetWriter(sink, self._schema, compression="zstd", write_page_index=True) as writer:
            for batch in batches:
                writer.write_batch(batch, ROWS_PER_GROUP)
                yield sink.fetched()
        yield sink.fetched()


def _store(location: Location, folder: str, name: str, chunks: Iterable[bytes]) -> int:
    """Put a file into a folder; on return it is durable. Its size."""
    if folder.startswith(FILE):
        with contextlib.closing(SystemDisk()) as disk:
            store = DirectoryStore(folder.removeprefix(FILE), disk=disk, clock=SystemClock()).open()
            return store.upload(name, chunks).size
    size = 0
    with files_io(location, folder).new_output(f"{folder}/{name}").create() as file:
        for chunk in chunks:
            file.write(chunk)
            size += len(chunk)
    return size
