"""Columns by way of Arrow: record batches in, and frames out as record batches. Knows no frames and no disk.

The layout is that of `rows`; Arrow's own buffers already have it, so nothing is rebuilt unless an
array is sliced, of a wide type, or hides bytes behind a null. Imported only where it is used:
loading Arrow costs more than small batches ever gain from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import Corrupt, Invalid
from forebay.format.columns import layout
from forebay.format.columns import rows as column_format
from forebay.format.columns.layout import ColumnSpan, Layout, Strip
from forebay.format.columns.rows import ColumnBytes, PaddedBuffers
from forebay.records import HEADERS_MAX, TAG_BYTES_MAX, TIMESTAMP_MAX

HEADER_TYPE: Final = pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])
ARROW_SCHEMA: Final = pa.schema(
    [
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", "UTC"), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("tag", pa.string()),
        pa.field("headers", pa.list_(pa.field("item", HEADER_TYPE, nullable=False)), nullable=False),
    ]
)
_BINARY: Final = pa.binary()
_STRING: Final = pa.string()
_TIMESTAMP: Final = ARROW_SCHEMA.field("timestamp").type
_HEADERS: Final = ARROW_SCHEMA.field("headers").type
_ASSIGNED: Final = frozenset({"offset", "topic"})
"""Columns a reader gets and the log assigns: accepted and not stored."""
_KNOWN: Final = frozenset({"value", "key", "tag", "headers", "timestamp", "partition"}) | _ASSIGNED
_UNIT_NS: Final = {"us": 1_000, "ns": 1_000_000}


def _add(out: PaddedBuffers, array: pa.Array, *, are_new_tags: bool = False) -> bool:
    """Add one binary or utf8 array in canonical form; say whether it holds a null."""
    count = len(array)
    nulls = array.null_count
    offsets = _offsets(array, count)
    if nulls:
        valid = _valid(array)
        if (offsets[1:] - offsets[:-1])[~valid].any():
            array = pc.fill_null(array, pa.scalar(b"" if pa.types.is_binary(array.type) else "", array.type))
            offsets = _offsets(array, count)
        out.add_array(np.packbits(valid, bitorder="little"))
    if are_new_tags:
        _check_tags(offsets, nulls)
    first, last = int(offsets[0]), int(offsets[-1])
    out.add_array(offsets - offsets[0] if first else offsets)
    filling = array.buffers()[2]
    out.add(memoryview(filling).cast("B")[first:last] if filling is not None and last > first else b"")
    return bool(nulls)


def _valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=bool)


def _offsets(array: pa.Array, count: int) -> npt.NDArray[np.int32]:
    return np.frombuffer(array.buffers()[1], "<i4", count=count + 1, offset=array.offset * 4)


def encode_arrow(batch: pa.RecordBatch, timestamp: int) -> ColumnBytes:
    """The columns of a record batch, found by name; `timestamp` (ms) is for records that bring none.

    Raises `Invalid` for a batch without rows or a value column, an unknown column, a wrong type, and for a tag, a
    number of headers or a time that no record may have.
    """
    names = batch.schema.names
    unknown = sorted(set(names) - _KNOWN)
    if unknown or len(set(names)) != len(names):
        wrong = f"unknown column {unknown[0]!r}" if unknown else "a column name is used twice"
        raise Invalid(f"{wrong}: a batch has value and optionally key, tag, headers, timestamp, partition")
    if "value" not in names:
        raise Invalid(f"the batch has no column 'value', only {', '.join(map(repr, names)) or 'none at all'}")
    if not batch.num_rows:
        raise Invalid("the batch has no rows")
    return _encoded(batch, timestamp, is_new=True)


def encode_stored(batch: pa.RecordBatch) -> ColumnBytes:
    """The columns of records that are in the log already, whatever limits they were appended by."""
    return _encoded(batch, 0, is_new=False)


def _encoded(batch: pa.RecordBatch, timestamp: int, *, is_new: bool) -> ColumnBytes:
    try:
        return _encode_batch(batch, timestamp, is_new=is_new)
    except pa.ArrowException as error:
        raise Invalid(f"the batch cannot be stored: {error}") from error


def partition_column(batch: pa.RecordBatch) -> npt.NDArray[np.int64] | None:
    """The partition that each row of a record batch names, -1 for one that names none; `None` if none does.

    Raises `Invalid` for a column that does not hold the numbers of partitions.
    """
    place = batch.schema.get_field_index("partition")
    if place < 0:
        return None
    array = _plain(batch.column(place))
    if array.null_count == len(array):
        return None
    if not pa.types.is_integer(array.type):
        raise Invalid(f"column 'partition' is {array.type}, it must be a whole number")
    try:
        numbers: npt.NDArray[np.int64] = array.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise Invalid(f"the partitions of the batch are not those of a topic: {error}") from error
    if int(np.count_nonzero(numbers < 0)) > array.null_count:
        raise Invalid(f"a partition is {int(numbers.min())}; they are counted from 0")
    return numbers


def key_strip(batch: pa.RecordBatch) -> Strip | None:
    """The keys of a record batch as arrays; `None` if no record has one.

    Raises `Invalid` for a type that `encode_arrow` does not store.
    """
    place = batch.schema.get_field_index("key")
    if place < 0:
        return None
    try:
        array = _cast("key", batch.column(place), _BINARY)
    except pa.ArrowException as error:
        raise Invalid(f"the keys of the batch cannot be stored: {error}") from error
    count = len(array)
    if array.null_count == count:
        return None
    offsets = _offsets(array, count)
    first, last = int(offsets[0]), int(offsets[-1])
    filling = array.buffers()[2]
    inside = memoryview(filling).cast("B")[first:last] if filling is not None else memoryview(b"")
    return Strip(inside, offsets - first if first else offsets, _valid(array) if array.null_count else None)


def _encode_batch(batch: pa.RecordBatch, timestamp: int, *, is_new: bool) -> ColumnBytes:
    """The columns; of new records, which a caller brings, those that keep the limits of every record."""
    found: dict[str, pa.Array] = dict(zip(batch.schema.names, batch.columns, strict=True))
    stamps = _timestamps(found.get("timestamp"), batch.num_rows, timestamp)
    out = PaddedBuffers()
    out.add_array(stamps)
    flags = column_format.VALUE_NULLS if _add(out, _cast("value", found["value"], pa.binary())) else 0
    for name, kind, flag, null_flag in (
        ("key", pa.binary(), column_format.KEYS, column_format.KEY_NULLS),
        ("tag", pa.string(), column_format.TAGS, column_format.TAG_NULLS),
    ):
        array = found.get(name)
        if array is not None:
            array = _cast(name, array, kind)
            if array.null_count < len(array):
                has_nulls = _add(out, array, are_new_tags=is_new and name == "tag")
                flags |= flag | (null_flag if has_nulls else 0)
    if "headers" in found:
        flags |= _add_header_lists(out, found["headers"], HEADERS_MAX if is_new else None)
    first, last = int(stamps.min()), int(stamps.max())
    if is_new and not -TIMESTAMP_MAX <= first <= last <= TIMESTAMP_MAX:
        wrong = first if first < -TIMESTAMP_MAX else last
        raise Invalid(f"a timestamp is {wrong}; allowed: ±{TIMESTAMP_MAX} milliseconds")
    return ColumnBytes(flags, len(stamps), out.parts, out.size, first, last)


def _check_tags(offsets: npt.NDArray[np.int32], nulls: int) -> None:
    """`Invalid` for a tag that no record may have, by the offsets of all; those that are null have no bytes."""
    sizes = offsets[1:] - offsets[:-1]
    empty, longest = len(sizes) - np.count_nonzero(sizes) - nulls, int(sizes.max())
    if empty or longest > TAG_BYTES_MAX:
        wrong = 0 if empty else longest
        raise Invalid(f"a tag has {wrong} bytes; allowed: 1 to {TAG_BYTES_MAX}, or null for none")


def _plain(array: pa.Array) -> pa.Array:
    """The array without dictionary, run-end or extension around its entries."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if isinstance(array, pa.DictionaryArray):
        return array.dictionary_decode()
    if isinstance(array, pa.RunEndEncodedArray):
        return pc.run_end_decode(array)
    return array


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def _cast(name: str, array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The array as plain binary or utf8; text may become bytes, never the other way round."""
    array = _plain(array)
    found = array.type
    fits = _is_text(found) or pa.types.is_null(found) or (pa.types.is_binary(kind) and _is_bytes(found))
    if not fits:
        raise Invalid(f"column {name!r} is {found}, it must be {kind}")
    if _is_text(found) or not pa.types.is_binary(kind):
        array.validate(full=True)
    return array if found == kind else array.cast(kind)


def _timestamps(array: pa.Array | None, count: int, default: int) -> npt.NDArray[np.int64]:
    """Milliseconds per record; finer units are rounded down, times without a zone are UTC."""
    if array is None:
        return np.full(count, default, dtype="<i8")
    array = _plain(array)
    kind = array.type
    divisor = 1
    if pa.types.is_timestamp(kind):
        if kind.unit == "s":
            array = array.cast(pa.timestamp("ms", kind.tz))
        divisor = _UNIT_NS.get(kind.unit, 1)
    elif not pa.types.is_integer(kind) and not pa.types.is_null(kind):
        raise Invalid(f"column 'timestamp' is {kind}, it must be int64 milliseconds or a timestamp")
    numbers = array.cast(pa.int64())
    if divisor > 1:
        stamps = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False) // divisor
        if numbers.null_count:
            stamps[numbers.is_null().to_numpy(zero_copy_only=False)] = default
    else:
        stamps = pc.fill_null(numbers, default).to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(stamps, dtype="<i8")


def _add_header_lists(out: PaddedBuffers, array: pa.Array, count_max: int | None) -> int:
    """Add the headers column, or nothing if no record has a header; `Invalid` if one has more than `count_max`."""
    array = _plain(array)
    kind = array.type
    if pa.types.is_null(kind):
        return 0
    types = pa.types
    if types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
    elif not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        raise Invalid(f"column 'headers' is {kind}, it must be a list of struct<key, value>")
    pairs = array.flatten()
    if not types.is_struct(pairs.type) or {field.name for field in pairs.type} != {"key", "value"}:
        raise Invalid(f"column 'headers' is {kind}, it must be a list of struct<key, value>")
    if not len(pairs):
        return 0
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    if count_max is not None and lengths.max() > count_max:
        raise Invalid(f"a record has {lengths.max()} headers; allowed: {count_max}")
    return _add_pairs(out, pairs, lengths)


def _add_pairs(out: PaddedBuffers, pairs: pa.StructArray, lengths: npt.NDArray[Any]) -> int:
    fields = dict(zip((field.name for field in pairs.type), pairs.flatten(), strict=True))
    names = _cast("headers.key", fields["key"], pa.string())
    if names.null_count:
        raise Invalid("a header has no name")
    lists = np.zeros(len(lengths) + 1, dtype="<i4")
    np.cumsum(lengths, out=lists[1:])
    out.add_array(lists)
    _add(out, names)
    values = _cast("headers.value", fields["value"], pa.binary())
    return column_format.HEADERS | (column_format.HEADER_NULLS if _add(out, values) else 0)


def record_batch(
    found: Layout, base: int, count: int, first: int, partition: int, names: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Rows `[first, first + count)` with `ARROW_SCHEMA`, or those columns of it; what is there is not copied."""
    chosen = tuple(ARROW_SCHEMA.names if names is None else names)
    whole = pa.py_buffer(found.buffer)
    columns = [_column(name, whole, found, base, count, first, partition) for name in chosen]
    return pa.RecordBatch.from_arrays(columns, schema=_schema(chosen))


@lru_cache(maxsize=64)
def _schema(names: tuple[str, ...]) -> pa.Schema:
    return pa.schema([ARROW_SCHEMA.field(name) for name in names])


def _numbers(kind: pa.DataType, numbers: np.ndarray[Any, Any]) -> pa.Array:
    # Not by pa.array, which imports pandas if there is one: half a second for each worker of Spark.
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def _column(name: str, whole: pa.Buffer, found: Layout, base: int, count: int, first: int, partition: int) -> pa.Array:
    match name:
        case "partition":
            return _numbers(pa.int32(), np.full(count, partition, dtype=np.int32))
        case "offset":
            return _numbers(pa.int64(), np.arange(base, base + count, dtype=np.int64))
        case "timestamp":
            stamps = whole.slice(found.start, 8 * found.rows)
            return pa.Array.from_buffers(_TIMESTAMP, count, [None, stamps], 0, first)
        case "headers":
            return _header_view(whole, found, first, count)
        case "tag":
            return _view(whole, found.tag, found.rows, first, count, _STRING)
        case _:
            return _view(whole, found.key if name == "key" else found.value, found.rows, first, count, _BINARY)


def _view(
    whole: pa.Buffer, span: ColumnSpan | None, entries: int, first: int, count: int, kind: pa.DataType
) -> pa.Array:
    """A column of bytes or text as an array over the frame's own buffer."""
    if span is None:
        return _absent(count, kind)
    bits = None if span.bits < 0 else whole.slice(span.bits, (entries + 7) // 8)
    offsets = whole.slice(span.offsets, 4 * (entries + 1))
    buffers = [bits, offsets, whole.slice(span.filling, span.size)]
    array = pa.Array.from_buffers(kind, count, buffers, 0 if bits is None else -1, first)
    if kind is _STRING:
        _check_text(array)
    return array


def _check_text(array: pa.Array) -> None:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise Corrupt(f"a column of text is not utf8: {error}") from error


def _absent(count: int, kind: pa.DataType) -> pa.Array:
    """Nulls of a kind, cut from one array where that is long enough."""
    return _NULLS[kind][:count] if count <= _NULLS_LONG else pa.nulls(count, kind)


def _header_view(whole: pa.Buffer, found: Layout, first: int, count: int) -> pa.Array:
    if found.names is None:
        if count <= _NULLS_LONG:
            return _NO_HEADERS[:count]
        return _lists(pa.py_buffer(bytes(4 * count + 4)), count, 0, _NO_PAIRS)
    rows = layout.offsets_at(found.buffer, found.lists, 0, found.rows)
    total = int(rows[-1])
    names = _view(whole, found.names, total, 0, total, _STRING)
    values = _view(whole, found.header_values, total, 0, total, _BINARY)
    pairs = pa.Array.from_buffers(HEADER_TYPE, total, [None], 0, 0, [names, values])
    return _lists(whole.slice(found.lists, 4 * (found.rows + 1)), count, first, pairs)


def _lists(offsets: pa.Buffer, count: int, first: int, pairs: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(_HEADERS, count, [None, offsets], 0, first, [pairs])


_NULLS_LONG: Final = 16_384
_NULLS: Final = {kind: pa.nulls(_NULLS_LONG, kind) for kind in (_BINARY, _STRING)}
_NO_PAIRS: Final = pa.nulls(0, HEADER_TYPE)
_NO_HEADERS: Final = _lists(pa.py_buffer(bytes(4 * _NULLS_LONG + 4)), _NULLS_LONG, 0, _NO_PAIRS)
