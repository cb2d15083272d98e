"""Arrow IPC streams of others: measured before they are read, checked before they are used.

A reader of Arrow trusts what it reads: it decompresses buffers to the size that they claim, and entries of a
dictionary, of a run or of a view may repeat the same bytes without end. So the messages are walked first, by the few
fields of their heads that say how large they become; then the arrays are validated in full; then entries that repeat
are counted. What the columns may be, `format.columns.arrow` says, with the name and type of the column.

    stream  := message* end             end := 0xFFFFFFFF, 0 i32
    message := 0xFFFFFFFF, size i32, head (a flatbuffer, padded), body
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import Invalid, TooLarge, Unsupported
from forebay.format.columns.rows import KEYS, ColumnBytes, PaddedBuffers
from forebay.records import TIMESTAMP_MAX
from forebay.wire.limits import BodyLimits

MESSAGES_MAX: Final = 10_000
_SCHEMA_BYTES_MAX: Final = 4096
"""A larger schema is read each time: what is remembered stays small."""
_SCHEMA, _DICTIONARY, _RECORDS = 1, 2, 3
_CONTINUES: Final = 0xFFFFFFFF
_PREFIX: Final = struct.Struct("<Ii")
_END: Final = _PREFIX.pack(_CONTINUES, 0)
_I32: Final = struct.Struct("<i").unpack_from
_U32: Final = struct.Struct("<I").unpack_from
_U16: Final = struct.Struct("<H").unpack_from
_I64: Final = struct.Struct("<q").unpack_from
_BUFFER: Final = struct.Struct("<qq")
_HEADER_BYTES: Final = 8
"""What a header takes beside its name and value."""
_PLAIN: Final = frozenset(
    kind.id for kind in (pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.int64(), pa.timestamp("ms"))
)


_MILLISECONDS: Final = (pa.int64(), pa.timestamp("ms"), pa.timestamp("ms", "UTC"))
_PLAIN_TYPES: Final = {"value": (pa.binary(),), "key": (pa.binary(),), "timestamp": _MILLISECONDS}
"""Columns whose buffers are those that are stored, by name."""


class StreamSize(NamedTuple):
    """What a stream becomes when it is read."""

    rows: int
    bytes: int
    batches: int


def read_batch(body: bytes, limits: BodyLimits) -> pa.RecordBatch:
    """All rows of a stream as one batch, validated."""
    batches = [batch for batch, _ in read_stream(body, limits)]
    try:
        if len(batches) == 1:
            return batches[0]
        table = pa.Table.from_batches([_undictionaried(batch) for batch in batches]).combine_chunks()
        found: list[pa.RecordBatch] = table.to_batches()
    except pa.ArrowException as error:
        raise Invalid(f"the batches of the Arrow stream do not go together: {error}") from error
    return found[0] if found else batches[0]


def read_stream(body: bytes, limits: BodyLimits) -> list[tuple[pa.RecordBatch, Mapping[bytes, bytes] | None]]:
    """The batches of a stream, at least one, with the metadata of each; `Invalid` for a stream that is not sound."""
    size = measure(body)
    limits.check_records(size.rows)
    limits.check_bytes(size.bytes)
    found: list[tuple[pa.RecordBatch, Mapping[bytes, bytes] | None]] = []
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(body))
        schema = reader.schema
        _check_names(list(schema))
        for _ in range(size.batches):
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            batch.validate(full=True)
            found.append((batch, metadata))
    except (pa.ArrowException, OSError, ValueError, NotImplementedError, StopIteration) as error:
        raise Invalid(f"the body is not a sound Arrow IPC stream: {error}") from error
    _check_repeats([batch for batch, _ in found], limits)
    return found or [(pa.RecordBatch.from_pylist([], schema), None)]


def _check_names(fields: Sequence[pa.Field]) -> None:
    """Read every name once: one that is no text raises here, and not wherever it is used."""
    for field in fields:
        assert field.name is not None
        _check_names([field.type.field(place) for place in range(field.type.num_fields)])


def write_stream(batches: Sequence[tuple[pa.RecordBatch, Mapping[str, str] | None]], schema: pa.Schema) -> bytes:
    """Batches of one schema as a stream, each with its metadata."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch, metadata in batches:
            writer.write_batch(batch, custom_metadata=metadata)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


# Plain streams


def read_plain(body: bytes, limits: BodyLimits, timestamp: int) -> ColumnBytes | None:
    """The columns of a stream as they are stored, straight from its buffers; `timestamp` (ms) for those without one.

    `None` for a stream of any other kind than the commonest one: a single batch of values, keys and milliseconds, none
    of them null and nothing compressed. And `None` for one that is not sound: `read_batch` says what is wrong with it.
    """
    try:
        schema_end = _PREFIX.size + _PREFIX.unpack_from(body)[1]
        if not _PREFIX.size < schema_end <= _SCHEMA_BYTES_MAX:
            return None
        names = _plain_schema(body[:schema_end])
        found = None if names is None else _plain_batch(body, schema_end)
        if names is None or found is None:
            return None
        limits.check_records(found.rows)
        limits.check_bytes(sum([length for _, length in found.buffers]))
        return _plain_columns(found, names, timestamp)
    except (struct.error, IndexError, ValueError):
        return None


class _PlainBatch(NamedTuple):
    """The only batch of a stream: nothing in it is null or compressed."""

    content: memoryview
    rows: int
    columns: int
    buffers: list[tuple[int, int]]
    """Where each begins in the content, and its length."""


@lru_cache(maxsize=256)
def _plain_schema(message: bytes) -> tuple[str, ...] | None:
    """The names of the columns that a schema message describes, if all of them are plain."""
    head = message[_PREFIX.size :]
    table = _U32(head, 0)[0]
    header = _field(head, table, 2)
    endianness = _field(head, header + _U32(head, header)[0], 0)
    if endianness and _U16(head, endianness)[0]:
        return None
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(message))
    except (pa.ArrowException, OSError, ValueError):
        return None
    names = tuple(schema.names)
    are_plain = all(field.type in _PLAIN_TYPES.get(field.name, ()) for field in schema)
    return names if are_plain and "value" in names and len(set(names)) == len(names) else None


def _plain_batch(body: bytes, position: int) -> _PlainBatch | None:
    """The batch whose message is at `position`, if the stream ends behind it."""
    mark, length = _PREFIX.unpack_from(body, position)
    start = position + _PREFIX.size + length
    if mark != _CONTINUES or length <= 0:
        return None
    head = body[position + _PREFIX.size : start]
    table = _U32(head, 0)[0]
    kind, header, size = (_field(head, table, slot) for slot in (1, 2, 3))
    end = start + _I64(head, size)[0]
    if head[kind] != _RECORDS or not start <= end <= len(body) or body[end:] not in (b"", _END):
        return None
    batch = header + _U32(head, header)[0]
    rows = _I64(head, _field(head, batch, 0))[0]
    nodes = _pairs(head, batch, 1)
    if rows <= 0 or nodes != [(rows, 0)] * len(nodes) or _field(head, batch, 3) or _field(head, batch, 4):
        return None
    buffers = _pairs(head, batch, 2)
    if any(at < 0 or length < 0 or at + length > end - start for at, length in buffers):
        return None
    return _PlainBatch(memoryview(body)[start:end], rows, len(nodes), buffers)


def _pairs(head: bytes, table: int, slot: int) -> list[tuple[int, int]]:
    """A vector of pairs of numbers."""
    at = _field(head, table, slot)
    vector = at + _U32(head, at)[0]
    count = _U32(head, vector)[0]
    return list(_BUFFER.iter_unpack(head[vector + 4 : vector + 4 + _BUFFER.size * count]))


def _plain_columns(found: _PlainBatch, names: tuple[str, ...], timestamp: int) -> ColumnBytes | None:
    """The columns in the order in which they are stored; `None` if the buffers are not those of these columns."""
    content, rows, columns, buffers = found
    if columns != len(names) or len(buffers) != 3 * columns - ("timestamp" in names):
        return None
    stamps = np.full(rows, timestamp, "<i8")
    binary: dict[str, tuple[npt.NDArray[np.int32], memoryview]] = {}
    rest = iter(buffers)
    for name in names:
        (_, bitmap_bytes), (at, size) = next(rest), next(rest)
        if bitmap_bytes:
            return None
        if name == "timestamp":
            stamps = np.frombuffer(content[at : at + size], "<i8", rows)
            continue
        offsets = np.frombuffer(content[at : at + size], "<i4", rows + 1)
        at, size = next(rest)
        first, last = int(offsets[0]), int(offsets[-1])
        if not 0 <= first <= last <= size or (offsets[1:] < offsets[:-1]).any():
            return None
        binary[name] = (offsets - offsets[0] if first else offsets, content[at + first : at + last])
    low, high = (int(stamps.min()), int(stamps.max())) if "timestamp" in names else (timestamp, timestamp)
    if not -TIMESTAMP_MAX <= low <= high <= TIMESTAMP_MAX:
        return None
    out = PaddedBuffers()
    out.add_array(stamps)
    for name in ("value", "key"):
        if name in binary:
            out.add_array(binary[name][0])
            out.add(binary[name][1])
    return ColumnBytes(KEYS if "key" in binary else 0, rows, out.parts, out.size, low, high)


# Measuring


def measure(body: bytes) -> StreamSize:
    """How many rows and bytes the stream has once it is read; nothing of it is read for that."""
    position = rows = size = batches = 0
    for _ in range(MESSAGES_MAX):
        if len(body) - position < _PREFIX.size:
            if position == len(body) and position:
                # Some writers end a stream by closing it.
                return StreamSize(rows, size, batches)
            raise Invalid(f"the Arrow stream is cut short at byte {len(body)}")
        mark, length = _PREFIX.unpack_from(body, position)
        if mark != _CONTINUES:
            raise Invalid(
                f"no Arrow IPC stream at byte {position}: send the stream format of Arrow 0.15 or later, not a file"
            )
        position += _PREFIX.size
        if length == 0:
            if position != len(body):
                raise Invalid(f"{len(body) - position} bytes follow the end of the Arrow stream")
            return StreamSize(rows, size, batches)
        try:
            message = _Message(body, position, length)
        except (struct.error, IndexError) as error:
            raise Invalid(f"the Arrow stream has a damaged message at byte {position}") from error
        rows += message.rows
        size += message.size
        batches += message.is_batch
        position = message.end
    raise TooLarge(f"the Arrow stream has more than {MESSAGES_MAX} messages: send fewer, larger batches")


class _Message:
    """What the head of one message says."""

    def __init__(self, body: bytes, position: int, length: int) -> None:
        start = position + length
        if length < 0 or start > len(body):
            raise Invalid(f"the Arrow stream is cut short at byte {len(body)}")
        head = body[position:start]
        table = _U32(head, 0)[0]
        kind_at, header_at, length_at = (_field(head, table, slot) for slot in (1, 2, 3))
        kind = head[kind_at] if kind_at else 0
        body_bytes = _I64(head, length_at)[0] if length_at else 0
        self.end = start + body_bytes
        if body_bytes < 0 or self.end > len(body):
            raise Invalid(f"the Arrow stream is cut short at byte {len(body)}")
        self.rows = self.size = 0
        self.is_batch = kind == _RECORDS
        if kind not in (_SCHEMA, _DICTIONARY, _RECORDS):
            raise Unsupported("the Arrow stream holds tensors: send record batches")
        if kind == _SCHEMA:
            return
        records = header_at + _U32(head, header_at)[0]
        if kind == _DICTIONARY:
            inner = _field(head, records, 1)
            records = inner + _U32(head, inner)[0]
        else:
            rows_at = _field(head, records, 0)
            self.rows = _I64(head, rows_at)[0] if rows_at else 0
        if self.rows < 0:
            raise Invalid(f"the Arrow stream has a batch of {self.rows} rows")
        self.size = _buffers_size(head, records, memoryview(body)[start : self.end])


def _buffers_size(head: bytes, records: int, content: memoryview) -> int:
    """The bytes of all buffers of a batch, decompressed."""
    at = _field(head, records, 2)
    if not at:
        return 0
    vector = at + _U32(head, at)[0]
    count = _U32(head, vector)[0]
    is_compressed = bool(_field(head, records, 3))
    size = 0
    for offset, length in _BUFFER.iter_unpack(head[vector + 4 : vector + 4 + 16 * count]):
        if offset < 0 or length < 0 or offset + length > len(content):
            raise Invalid("the Arrow stream has a buffer outside its message")
        size += length
        if is_compressed and length:
            claimed = _I64(content, offset)[0]
            if claimed < -1:
                raise Invalid(f"the Arrow stream has a buffer of {claimed} bytes")
            size += max(0, claimed)
    return size


def _field(head: bytes, table: int, slot: int) -> int:
    """Where a field of a flatbuffer's table stands; 0 if it is not there."""
    offsets = table - _I32(head, table)[0]
    place = 4 + 2 * slot
    if offsets < 0 or place + 2 > _U16(head, offsets)[0]:
        return 0
    found: int = _U16(head, offsets + place)[0]
    return table + found if found else 0


# Entries that repeat


def _check_repeats(batches: Sequence[pa.RecordBatch], limits: BodyLimits) -> None:
    """`TooLarge` if columns that name the same bytes many times would take more than the limit once stored."""
    size = 0
    for batch in batches:
        if all(kind.id in _PLAIN for kind in batch.schema.types):
            # Every entry has bytes of its own, which `measure` has counted.
            continue
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            size += _stored_bytes(name, array)
            limits.check_bytes(size)


def _stored_bytes(name: str, array: pa.Array) -> int:
    """About how many bytes the entries of a column take once each stands for itself."""
    types = pa.types
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if isinstance(array, pa.DictionaryArray | pa.RunEndEncodedArray):
        return _repeated_bytes(name, array)
    if types.is_binary_view(kind) or types.is_string_view(kind):
        return _view_lengths(array, len(array))
    if types.is_struct(kind):
        return sum(_stored_bytes(name, array.field(place)) for place in range(kind.num_fields))
    if types.is_nested(kind):
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_map(kind):
            pairs = array.keys if types.is_map(kind) else array.values
            extra = _stored_bytes(name, array.items) if types.is_map(kind) else 0
            return _HEADER_BYTES * len(pairs) + _stored_bytes(name, pairs) + extra
        raise Invalid(f"column {name!r} is {kind}, which is not taken")
    return int(array.nbytes)


def _repeated_bytes(name: str, array: pa.Array) -> int:
    """The same for entries that stand once and are named many times."""
    if isinstance(array, pa.DictionaryArray):
        entries, times = array.dictionary, np.bincount(_indices(array), minlength=len(array.dictionary))
    else:
        ends = np.asarray(array.run_ends.to_numpy(zero_copy_only=False), dtype=np.int64)
        entries, times = array.values, np.diff(np.minimum(ends, len(array)), prepend=0)
    if pa.types.is_nested(entries.type) or isinstance(entries, pa.DictionaryArray | pa.RunEndEncodedArray):
        raise Invalid(f"column {name!r} is {array.type}, which is not taken")
    lengths = _lengths(entries)
    return int(np.dot(lengths, times[: len(lengths)].astype(np.int64)))


def _indices(array: pa.DictionaryArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.asarray(pc.drop_null(array.indices).to_numpy(zero_copy_only=False), dtype=np.int64)


def _lengths(array: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The bytes of each entry."""
    kind = array.type
    if pa.types.is_binary_view(kind) or pa.types.is_string_view(kind):
        return _views(array, len(array)).astype(np.int64)
    if (
        pa.types.is_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_large_string(kind)
    ):
        return np.asarray(pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False), dtype=np.int64)
    return np.full(len(array), max(1, kind.bit_width // 8) if not pa.types.is_null(kind) else 0, dtype=np.int64)


def _view_lengths(array: pa.Array, count: int) -> int:
    return int(_views(array, count).sum(dtype=np.int64))


def _views(array: pa.Array, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The lengths of views: the first of the four words of each."""
    views = array.buffers()[1]
    if views is None or not count:
        return np.zeros(count, dtype=np.int32)
    lengths = np.frombuffer(views, "<i4", count=4 * (array.offset + count))[4 * array.offset :: 4]
    if array.null_count:
        lengths = np.where(np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=bool), lengths, 0)
    return lengths


def _undictionaried(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch without dictionaries, which differ from batch to batch."""
    columns = [array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array for array in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
