"""Columns byte by byte; whichever encoder is taken, the bytes are the same."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Invalid
from forebay.format.columns import rows as column_format
from forebay.format.columns.arrow import encode_large
from forebay.format.columns.rows import (
    COLUMN_BYTES_MAX,
    ROWS_SMALL,
    Column,
    ColumnBytes,
    Columns,
    PaddedBuffers,
    Row,
    encode_columns,
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
