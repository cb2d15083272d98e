"""Record batches in and out: same rows, no copies on the way out, clear refusals on the way in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Corrupt, Invalid
from forebay.format.columns.arrow import ARROW_SCHEMA, HEADER_TYPE, encode_stored
from forebay.format.columns.rows import ColumnBytes, Row, encode_rows
from forebay.format.frame.batch import Batch, batch_of, encode_arrow
from forebay.records import TIMESTAMP_MAX
from tests.format.samples import FULL_ROWS, ONE_ROW, ROWS, whole

_NOW = 1_700_000_000_500
_HEADERS = pa.list_(HEADER_TYPE)


def _allowed(row: Row) -> Row:
    """The row with a tag and a time that a caller may bring."""
    return (*row[:2], row[2] or None, row[3], max(-TIMESTAMP_MAX, min(row[4], TIMESTAMP_MAX)))


NEW_ROWS = ROWS.map(lambda rows: [_allowed(row) for row in rows])


def _batch(rows: list[Row], base: int = 7) -> Batch:
    return batch_of(encode_rows(rows), base=base, epoch=1, appended_at=0)


def _arrow(rows: list[Row]) -> pa.RecordBatch:
    values, keys, tags, headers, stamps = zip(*rows, strict=True)
    pairs = [[{"key": name, "value": entry} for name, entry in row] for row in headers]
    return pa.record_batch(
        [
            pa.array(values, pa.binary()),
            pa.array(keys, pa.binary()),
            pa.array(tags, pa.string()),
            pa.array(pairs, _HEADERS),
            pa.array(stamps, pa.int64()),
        ],
        names=["value", "key", "tag", "headers", "timestamp"],
    )


def _one_column(**columns: pa.Array) -> pa.RecordBatch:
    return pa.record_batch(list(columns.values()), names=list(columns))


def _same(found: ColumnBytes, rows: list[Row]) -> bool:
    expected = encode_rows(rows)
    return whole(found) == whole(expected) and found._replace(parts=[]) == expected._replace(parts=[])


@given(NEW_ROWS)
def test_record_batch_is_encoded_like_its_rows(rows: list[Row]) -> None:
    assert _same(encode_arrow(_arrow(rows), _NOW), rows)


@given(ROWS)
def test_stored_records_are_encoded_whatever_they_hold(rows: list[Row]) -> None:
    assert _same(encode_stored(_arrow(rows)), rows)


@given(NEW_ROWS, st.integers(0, 40), st.integers(1, 40))
def test_slice_of_a_record_batch_is_encoded_like_its_rows(rows: list[Row], first: int, length: int) -> None:
    first %= len(rows)

    found = encode_arrow(_arrow(rows).slice(first, length), _NOW)

    assert _same(found, rows[first : first + length])


@given(ROWS)
def test_record_batch_of_a_batch_has_its_rows(rows: list[Row]) -> None:
    table = _batch(rows).to_arrow(3)

    table.validate(full=True)
    assert table.schema == ARROW_SCHEMA
    assert table.column("offset").to_pylist() == list(range(7, 7 + len(rows)))
    assert table.column("partition").to_pylist() == [3] * len(rows)
    assert table.column("timestamp").cast(pa.int64()).to_pylist() == [row[4] for row in rows]
    for name, place in (("value", 0), ("key", 1), ("tag", 2)):
        assert table.column(name).to_pylist() == [row[place] for row in rows]
    assert _headers(table) == [row[3] for row in rows]


@given(NEW_ROWS)
def test_what_was_read_can_be_appended_again(rows: list[Row]) -> None:
    assert _same(encode_arrow(_batch(rows).to_arrow(3), _NOW), rows)


@given(ROWS, st.integers(0, 40), st.integers(1, 40))
def test_record_batch_of_a_slice_has_its_rows(rows: list[Row], first: int, length: int) -> None:
    first %= len(rows)
    wanted = rows[first : first + length]

    table = _batch(rows).slice(7 + first, 7 + first + length).to_arrow(0)

    table.validate(full=True)
    assert table.column("offset").to_pylist() == list(range(7 + first, 7 + first + len(wanted)))
    assert table.column("value").to_pylist() == [row[0] for row in wanted]
    assert table.column("tag").to_pylist() == [row[2] for row in wanted]
    assert _headers(table) == [row[3] for row in wanted]


@given(ROWS, st.lists(st.sampled_from(ARROW_SCHEMA.names), unique=True, min_size=1))
def test_narrowed_record_batch_has_the_named_columns_in_that_order(rows: list[Row], names: list[str]) -> None:
    whole_table = _batch(rows).to_arrow(3)

    table = _batch(rows).to_arrow(3, names)

    table.validate(full=True)
    assert table.schema.names == names
    assert table.equals(whole_table.select(names))


def _headers(table: pa.RecordBatch) -> list[Any]:
    return [tuple((pair["key"], pair["value"]) for pair in row) for row in table.column("headers").to_pylist()]


def test_columns_are_not_copied_on_the_way_out() -> None:
    columns = encode_rows(FULL_ROWS * 40)
    stored = whole(columns)
    batch = batch_of(columns._replace(parts=[stored]), base=0, epoch=1, appended_at=0)
    start = np.frombuffer(stored, np.uint8).ctypes.data

    table = batch.to_arrow(0)

    for name in ("value", "key", "tag", "timestamp"):
        place = table.column(name).buffers()[-1].address
        assert start <= place < start + len(stored), name
    names = table.column("headers").values.field(0)
    assert start <= names.buffers()[-1].address < start + len(stored)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 16_384, 16_385])
def test_absent_columns_of_any_length_are_nulls_and_empty_lists(count: int) -> None:
    rows: list[Row] = [(b"", None, None, (), 0)] * count

    table = _batch(rows).to_arrow(0)

    table.validate(full=True)
    assert table.column("key").null_count == table.column("tag").null_count == count
    assert table.column("headers").to_pylist() == [[]] * count


@pytest.mark.parametrize(
    "values",
    [
        pa.array([b"a", None, b"ccc"], pa.large_binary()),
        pa.array(["a", None, "ccc"], pa.string()),
        pa.array(["a", None, "ccc"], pa.large_string()),
        pa.array(["a", None, "ccc"], pa.string_view()),
        pa.array([b"a", None, b"ccc"], pa.binary_view()),
        pa.array(["a", None, "ccc"]).dictionary_encode(),
        pa.array([b"a", None, b"ccc"]).dictionary_encode(),
    ],
    ids=lambda array: str(array.type),
)
def test_wide_and_encoded_types_of_values_are_taken(values: pa.Array) -> None:
    rows: list[Row] = [(b"a", b"k", None, (), _NOW), (None, b"k", None, (), _NOW), (b"ccc", b"k", None, (), _NOW)]

    found = encode_arrow(_one_column(value=values, key=pa.array(["k"] * 3)), _NOW)

    assert _same(found, rows)


def test_run_end_encoded_and_fixed_size_values_are_taken() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([b"xx", b"yy"]))
    fixed = pa.array([b"xx", b"xx", b"yy"], pa.binary(2))
    rows: list[Row] = [(value, None, None, (), _NOW) for value in (b"xx", b"xx", b"yy")]

    assert _same(encode_arrow(_one_column(value=runs), _NOW), rows)
    assert _same(encode_arrow(_one_column(value=fixed), _NOW), rows)


def test_bytes_hidden_behind_a_null_are_not_stored() -> None:
    shown = pa.array([b"aa", b"secret", b"cc"], pa.binary())
    hiding = pa.Array.from_buffers(pa.binary(), 3, [pa.py_buffer(b"\x05"), *shown.buffers()[1:]])
    assert hiding.to_pylist() == [b"aa", None, b"cc"]

    found = encode_arrow(_one_column(value=hiding, tag=hiding.cast(pa.string())), _NOW)

    assert _same(found, [(b"aa", None, "aa", (), _NOW), (None, None, None, (), _NOW), (b"cc", None, "cc", (), _NOW)])
    assert b"secret" not in whole(found)


@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        (pa.array([1500, None], pa.int64()), [1500, _NOW]),
        (pa.array([1500, 7], pa.int32()), [1500, 7]),
        (pa.array([1, None], pa.timestamp("s")), [1000, _NOW]),
        (pa.array([1500, -1], pa.timestamp("ms", "Europe/Zurich")), [1500, -1]),
        (pa.array([1500, -1], pa.timestamp("us")), [1, -1]),
        (pa.array([1_999_999, None], pa.timestamp("ns", "UTC")), [1, _NOW]),
        (pa.nulls(2), [_NOW, _NOW]),
    ],
)
def test_times_become_milliseconds(stamps: pa.Array, expected: list[int]) -> None:
    found = encode_arrow(_one_column(value=pa.array([b"", b""]), timestamp=stamps), _NOW)

    assert _same(found, [(b"", None, None, (), stamp) for stamp in expected])


@pytest.mark.parametrize(
    "headers",
    [
        pa.array([[("n", b"v"), ("m", None)], None], pa.map_(pa.string(), pa.binary())),
        pa.array([[{"key": "n", "value": b"v"}, {"key": "m", "value": None}], None], pa.large_list(HEADER_TYPE)),
        pa.array([[{"value": "v", "key": "n"}, {"value": None, "key": "m"}], []]),
    ],
    ids=lambda array: str(array.type),
)
def test_other_shapes_of_headers_are_taken(headers: pa.Array) -> None:
    found = encode_arrow(_one_column(value=pa.array([b"", b""]), headers=headers), _NOW)

    assert _same(found, [(b"", None, None, (("n", b"v"), ("m", None)), _NOW), (b"", None, None, (), _NOW)])


_VALUE = pa.array([b"v"])
_HIDING = pa.Array.from_buffers(pa.string(), 2, [pa.py_buffer(b"\x02"), *pa.array(["ab", ""]).buffers()[1:]])
"""A null with bytes behind it, and an empty text."""


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (_one_column(key=_VALUE), "no column 'value', only 'key'"),
        (pa.record_batch([], names=[]), "no column 'value'"),
        (_one_column(value=pa.array([], pa.binary())), "no rows"),
        (_one_column(value=_VALUE, colour=_VALUE), "unknown column 'colour'"),
        (pa.record_batch([_VALUE, _VALUE], names=["value", "value"]), "used twice"),
        (_one_column(value=pa.array([1])), "'value' is int64"),
        (_one_column(value=_VALUE, key=pa.array([1.5])), "'key' is double"),
        (_one_column(value=_VALUE, tag=_VALUE), "'tag' is binary"),
        (_one_column(value=_VALUE, timestamp=pa.array(["now"])), "'timestamp' is string"),
        (_one_column(value=_VALUE, timestamp=pa.array([2**63], pa.uint64())), "cannot be stored"),
        (_one_column(value=_VALUE, timestamp=pa.array([2**60], pa.timestamp("s"))), "cannot be stored"),
        (_one_column(value=_VALUE, headers=pa.array(["h"])), "'headers' is string"),
        (_one_column(value=_VALUE, headers=pa.array([["h"]])), "'headers' is list"),
        (_one_column(value=_VALUE, headers=pa.array([[{"name": "h"}]])), "'headers' is list"),
        (_one_column(value=_VALUE, headers=pa.array([[{"key": None, "value": b""}]])), "'headers.key'|no name"),
        (_one_column(value=_VALUE, headers=pa.array([[{"key": 5, "value": b""}]])), "'headers.key' is int64"),
        (_one_column(value=_VALUE, tag=pa.array([""])), "a tag has 0 bytes; allowed: 1 to 1024, or null"),
        (_one_column(value=_VALUE, tag=pa.array(["", "é" * 513])[1:]), "a tag has 1026 bytes"),
        (_one_column(value=pa.array([b"v"] * 2), tag=_HIDING), "a tag has 0 bytes"),
        (_one_column(value=_VALUE, headers=pa.array([[{"key": "k", "value": b""}] * 1001])), "has 1001 headers"),
        (_one_column(value=_VALUE, timestamp=pa.array([2**62 + 1])), "a timestamp is 4611686018427387905"),
        (_one_column(value=_VALUE, timestamp=pa.array([-(2**63)])), "a timestamp is -9223372036854775808"),
    ],
)
def test_batch_that_cannot_be_stored_is_refused_by_name(batch: pa.RecordBatch, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        encode_arrow(batch, _NOW)


def test_text_that_is_not_utf8_is_refused() -> None:
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())

    for column in ("tag", "value"):
        with pytest.raises(Invalid, match="cannot be stored"):
            encode_arrow(_one_column(**{"value": _VALUE, column: broken}), _NOW)


def test_stored_text_that_is_not_utf8_is_corrupt() -> None:
    rows: list[Row] = [(b"", None, "abc", (("abc", None),), 0)]
    for place in (-1, 0):
        stored = whole(encode_rows(rows))
        at = stored.rindex(b"abc") if place else stored.index(b"abc")
        broken = stored[:at] + b"\xff" + stored[at + 1 :]
        batch = batch_of(encode_rows(rows)._replace(parts=[broken]), base=0, epoch=1, appended_at=0)

        with pytest.raises(Corrupt, match="utf8"):
            batch.records(0)
        with pytest.raises(Corrupt, match="utf8"):
            batch.to_arrow(0)


def test_one_row_frame_reaches_arrow() -> None:
    assert _batch(ONE_ROW).to_arrow(0).column("value").to_pylist() == [b"paid"]
