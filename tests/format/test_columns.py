"""Columns byte by byte; whichever encoder is taken, the bytes are the same."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Invalid
from forebay.format.columns import rows as column_format
from forebay.format.columns.rows import (
    COLUMN_BYTES_MAX,
    ENTRY_JOIN_MAX,
    ROWS_SMALL,
    Column,
    ColumnBytes,
    Columns,
    PaddedBuffers,
    Row,
    encode_columns,
    encode_large,
    encode_rows,
    encode_small,
)
from tests.format.samples import FULL_ROWS, ROWS, whole


def _columns(rows: list[Row]) -> Columns:
    values, keys, tags, headers, timestamps = zip(*rows, strict=True)
    return Columns(values, timestamps, keys, tags, headers)


def _bare(columns: ColumnBytes) -> tuple[int, int, bytes, int, int, int]:
    return (
        columns.flags,
        columns.count,
        whole(columns),
        columns.size,
        columns.time_min,
        columns.time_max,
    )


def test_all_columns_are_exactly_these_bytes() -> None:
    expected = b"".join(
        [
            struct.pack("<3q", 1_700_000_000_000, -1, 1_700_000_000_002),
            bytes([0b101, 0, 0, 0, 0, 0, 0, 0]),
            struct.pack("<4i", 0, 4, 4, 4),
            b"paid\0\0\0\0",
            bytes([0b101, 0, 0, 0, 0, 0, 0, 0]),
            struct.pack("<4i", 0, 2, 2, 2),
            b"42\0\0\0\0\0\0",
            bytes([0b101, 0, 0, 0, 0, 0, 0, 0]),
            struct.pack("<4i", 0, 2, 2, 7),
            "eu\u00e9\u20ac".encode() + b"\0",
            struct.pack("<4i", 0, 2, 2, 3),
            struct.pack("<4i", 0, 5, 9, 14),
            b"tracenotetrace\0\0",
            bytes([0b101, 0, 0, 0, 0, 0, 0, 0]),
            struct.pack("<4i", 0, 2, 2, 2),
            b"\1\2\0\0\0\0\0\0",
        ]
    )

    encoded = encode_rows(FULL_ROWS)

    assert whole(encoded) == expected
    assert encoded.flags == 127
    assert (encoded.count, encoded.time_min, encoded.time_max) == (3, -1, 1_700_000_000_002)


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        ((b"v", None, None, (), 0), 0),
        ((None, None, None, (), 0), Column.VALUE_NULLS),
        ((b"v", b"", None, (), 0), Column.KEYS),
        ((b"v", None, "", (), 0), Column.TAGS),
        ((b"v", None, None, (("", None),), 0), Column.HEADERS | Column.HEADER_NULLS),
        ((b"v", None, None, (("n", b""),), 0), Column.HEADERS),
    ],
)
def test_columns_without_anything_are_left_out(row: Row, flags: int) -> None:
    assert encode_rows([row]).flags == flags


@given(ROWS)
def test_both_encoders_give_the_same_bytes(rows: list[Row]) -> None:
    columns = _columns(rows)

    small = _bare(encode_small(columns))

    assert _bare(encode_large(columns)) == small
    assert _bare(encode_rows(rows)) == small
    assert _bare(encode_columns(columns)) == small


def _built_by_arrow(columns: Columns) -> bytes:
    """The same bytes by Arrow's own builders, which large batches were encoded with before."""
    out = PaddedBuffers()
    out.add(struct.pack(f"<{len(columns.timestamps)}q", *columns.timestamps))

    def add(column: Sequence[object], kind: pa.DataType) -> None:
        validity, offsets, filling = pa.array(column, kind).buffers()
        if None in column:
            out.add(bytes(validity)[: (len(column) + 7) // 8])
        out.add(bytes(offsets)[: 4 * len(column) + 4])
        out.add(bytes(filling or b"")[: struct.unpack_from("<i", offsets, 4 * len(column))[0]])

    add(columns.values, pa.binary())
    for column, kind in ((columns.keys, pa.binary()), (columns.tags, pa.string())):
        if column is not None and any(entry is not None for entry in column):
            add(column, kind)
    if columns.headers is not None and any(columns.headers):
        rows = [row or () for row in columns.headers]
        out.add(struct.pack(f"<{len(rows) + 1}i", *accumulate(map(len, rows), initial=0)))
        add([name for row in rows for name, _ in row], pa.string())
        add([value for row in rows for _, value in row], pa.binary())
    return b"".join(out.parts)


@given(ROWS)
def test_arrow_builds_the_same_bytes(rows: list[Row]) -> None:
    columns = _columns(rows)

    assert whole(encode_large(columns)) == _built_by_arrow(columns)


@pytest.mark.parametrize("size", [0, 400, 600, 5_000])
def test_large_values_are_the_same_bytes_and_are_not_copied(size: int) -> None:
    values = [b"%04d" % number + bytes(size) for number in range(ROWS_SMALL + 5)]
    for some in (values, [None, *values[1:]], [b"", *values[1:]]):
        columns = Columns(some, list(range(len(some))), keys=[value and value[:4] for value in some])

        encoded = encode_columns(columns)

        assert whole(encoded) == _built_by_arrow(columns) == whole(encode_small(columns))
        assert any(part is some[1] for part in encoded.parts) == (size >= ENTRY_JOIN_MAX)


@given(ROWS, st.integers(1, 8))
def test_both_encoders_agree_where_the_choice_changes(rows: list[Row], times: int) -> None:
    many = (rows * ROWS_SMALL)[: ROWS_SMALL - 4 + times]
    columns = _columns(many)

    assert _bare(encode_columns(columns)) == _bare(encode_small(columns)) == _bare(encode_large(columns))


@given(ROWS)
def test_rows_of_one_are_encoded_like_columns_of_one(rows: list[Row]) -> None:
    for row in rows:
        assert _bare(encode_rows([row])) == _bare(encode_small(_columns([row])))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4095, 4096, 40_000])
def test_one_row_of_any_size_is_encoded_like_columns(size: int) -> None:
    for row in ((b"x" * size, None, None, (), 5), (b"x" * size, b"k" * size, "t", (("n", b"v"),), 5)):
        assert _bare(encode_rows([row])) == _bare(encode_small(_columns([row])))


@pytest.mark.parametrize("count", [1, 3, ROWS_SMALL + 1])
def test_absent_columns_and_columns_of_nulls_are_the_same(count: int) -> None:
    values, stamps = [b"v"] * count, list(range(count))

    bare = _bare(encode_columns(Columns(values, stamps)))

    assert _bare(encode_columns(Columns(values, stamps, [None] * count, [None] * count, [()] * count))) == bare
    assert _bare(encode_columns(Columns(values, np.array(stamps), None, None, [None] * count))) == bare


@pytest.mark.parametrize("count", [1, 5, ROWS_SMALL + 1])
def test_extreme_times_survive(count: int) -> None:
    stamps = [2**63 - 1, -(2**63)] * count

    encoded = encode_columns(Columns([b""] * len(stamps), stamps))

    assert (encoded.time_min, encoded.time_max) == (-(2**63), 2**63 - 1)
    assert whole(encoded)[: 8 * len(stamps)] == struct.pack(f"<{len(stamps)}q", *stamps)


def test_column_larger_than_its_offsets_can_say_is_refused() -> None:
    with pytest.raises(Invalid, match="append fewer records"):
        PaddedBuffers().add_joined([], COLUMN_BYTES_MAX + 1)


def test_flags_are_the_stored_numbers() -> None:
    assert [int(flag) for flag in Column] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert (column_format.HEADER_NULLS, column_format.TIMES) == (64, 128)
