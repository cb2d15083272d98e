"""Looks for bytes in every file below a directory: as they lie there, and in decoded frames, Parquet and Avro files."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.format.checksum import salted
from forebay.format.files.segment import HEADER_BYTES, SegmentHeader, decode_header
from forebay.wal.walk import DataFrames, walk


class _Held:
    """Bytes in memory, read as a file is."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read_at(self, length: int, position: int) -> bytes:
        return self._content[position : position + length]

    def close(self) -> None:
        """Nothing is held."""


def holders(needle: bytes, *roots: Path) -> set[Path]:
    """The files below these directories that hold the bytes, in whichever form."""
    files = (path for root in roots if root.exists() for path in root.rglob("*") if path.is_file())
    found = set()
    for path in files:
        # The background may just have removed it.
        with contextlib.suppress(FileNotFoundError):
            if holds(path.read_bytes(), needle):
                found.add(path)
    return found


def holds(content: bytes, needle: bytes) -> bool:
    """Whether the bytes stand in this content, in a record of it, or in a row of it."""
    return any(needle in form for form in (content, _records(content), _rows(content), _manifest(content)))


def _records(content: bytes) -> bytes:
    header = decode_header(content[:HEADER_BYTES])
    if not isinstance(header, SegmentHeader):
        return b""
    steps = walk(_Held(content), salted(header.salt), HEADER_BYTES, len(content), expected=header.start, end=2**62)
    batches = [batch for step in steps if isinstance(step, DataFrames) for batch, _ in step.batches()]
    return b"\0".join(repr(record).encode() for batch in batches for record in batch.to_arrow(0).to_pylist())


def _manifest(content: bytes) -> bytes:
    """What a manifest of Iceberg says, which has bounds of columns in it."""
    if content[:4] != b"Obj\x01":
        return b""
    import fastavro  # noqa: PLC0415 - only where there are tables

    return repr(list(fastavro.reader(io.BytesIO(content)))).encode()


def _rows(content: bytes) -> bytes:
    if content[:4] != b"PAR1":
        return b""
    with contextlib.suppress(pa.ArrowException):
        return repr(pq.read_table(pa.BufferReader(content)).to_pylist()).encode()
    return b""
