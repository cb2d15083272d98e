"""The option `where`: each condition is parsed to what Spark means by it, and what cannot be applied is quoted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from forebay.errors import Invalid
from forebay.spark.reading.filters import Condition
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.where import parse_where

_NOON = 1_794_744_000_000_000
assert datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=_NOON) == datetime(2026, 11, 15, 12, tzinfo=UTC)


_CASES: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("offset = 10", [("offset", "=", 10)]),
    ("OFFSET == 10", [("offset", "=", 10)]),
    ("`offset` <=> 10", [("offset", "=", 10)]),
    ("offset<10", [("offset", "<", 10)]),
    ("offset <= 10", [("offset", "<=", 10)]),
    ("offset > -1", [("offset", ">", -1)]),
    ("offset >= - 9223372036854775808", [("offset", ">=", -(2**63))]),
    ("offset BETWEEN 3 AND 5 AND partition = 1", [("offset", ">=", 3), ("offset", "<=", 5), ("partition", "=", 1)]),
    ("partition in (0,\n2)", [("partition", "in", (0, 2))]),
    ("tag IN (NULL, 'eu', NULL)", [("tag", "in", ("eu",))]),
    ("tag IN (NULL)", [("tag", "in", ())]),
    ("tag IS NULL", [("tag", "is null", None)]),
    ("tag <=> null", [("tag", "is null", None)]),
    ("key is not null", [("key", "is not null", None)]),
    ("key = X'6B31'", [("key", "=", b"k1")]),
    ("key = x'6b31'", [("key", "=", b"k1")]),
    ("key = X''", [("key", "=", b"")]),
    ("key >= 'é1'", [("key", ">=", "é1".encode())]),
    ("tag = 'it''s'", [("tag", "=", "it's")]),
    (r"tag = 'a\'b\\c\n'", [("tag", "=", "a'b\\c\n")]),
    (r"tag = 'a\%b'", [("tag", "=", r"a\%b")]),
    ("tag LIKE 'eu-%'", [("tag", "starts with", "eu-")]),
    (r"tag LIKE 'eu\_1\%\\\\%'", [("tag", "starts with", "eu_1%\\")]),
    ("topic LIKE '%'", [("topic", "starts with", "")]),
    ("timestamp >= '2026-11-15T12:00:00Z'", [("timestamp", ">=", _NOON)]),
    ("timestamp > TIMESTAMP '2026-11-15 13:00:00.000001+01:00'", [("timestamp", ">", _NOON + 1)]),
    ("timestamp < timestamp '1969-12-31T23:59:59.9-18:00'", [("timestamp", "<", 18 * 3_600_000_000 - 100_000)]),
    ("timestamp = timestamp_millis(1794744000000)", [("timestamp", "=", _NOON)]),
    ("timestamp IN (TIMESTAMP_MICROS(-7), NULL)", [("timestamp", "in", (-7,))]),
    ("((offset > 1) AND (((tag = ')'))))", [("offset", ">", 1), ("tag", "=", ")")]),
    ("tag = 'a AND b' AND key = 'OR'", [("tag", "=", "a AND b"), ("key", "=", b"OR")]),
]


@pytest.mark.parametrize(("text", "conditions"), _CASES, ids=[each[0] for each in _CASES])
def test_conditions_are_parsed(text: str, conditions: list[tuple[Any, ...]]) -> None:
    assert list(parse_where(text).conditions) == [Condition(*each) for each in conditions]


def _rows() -> pa.Table:
    """Values at, just below and just above those that the conditions name, and nulls."""
    offsets = [-(2**63), -1, 0, 3, 4, 5, 6, 9, 10, 11, 2**63 - 1, None]
    tags = [
        None,
        "",
        "eu",
        "EU",
        "eu-",
        "eu-1",
        "eu_1%\\",
        "eu_1%\\x",
        "eux1%\\",
        "it's",
        "a'b\\c\n",
        "a\\%b",
        "é",
        ")",
    ]
    keys = [None, b"", b"k1", b"k1\0", b"k2", b"\xff", "é1".encode(), "é0".encode(), b"OR"]
    early = 18 * 3_600_000_000 - 100_000
    stamps = [None, -8, -7, -6, 0, early - 1, early, early + 1, _NOON - 1, _NOON, _NOON + 1, _NOON + 2]
    count = 120
    several: dict[str, tuple[list[Any], pa.DataType]]
    several = {"offset": (offsets, pa.int64()), "partition": ([0, 1, 2, None], pa.int32()), "tag": (tags, pa.string())}
    several |= {"topic": (["a", "", None], pa.string()), "key": (keys, pa.binary())}
    several |= {"timestamp": (stamps, pa.timestamp("us", "UTC"))}
    columns = {name: pa.array((values * count)[:count], kind) for name, (values, kind) in several.items()}
    return pa.table({"id": list(range(count)), **columns})


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_conditions_mean_what_spark_means_by_the_same_words(spark: SparkSession) -> None:
    rows = _rows()
    texts = [text for text, _ in _CASES]
    texts += ["tag = 'a AND b'", "key < X'FF'", "tag > 'eu-'", "offset IN (3, NULL, 9)"]

    found = spark.createDataFrame(rows).selectExpr(
        *(f"sort_array(collect_list(CASE WHEN {text} THEN id END))" for text in texts)
    )

    (row,) = found.collect()
    for text, passed in zip(texts, row, strict=True):
        mask = reduce(pc.and_, (_mask(each, rows) for each in parse_where(text).conditions))
        assert rows.column("id").filter(mask).to_pylist() == passed, text


def _mask(condition: Condition, rows: pa.Table) -> pa.Array:
    column = rows.column(condition.column).combine_chunks()
    return condition.mask(column.cast(pa.int64()) if condition.column == "timestamp" else column)


@pytest.mark.parametrize(
    ("text", "part", "why"),
    [
        ("", "", "a condition begins with the name of a column"),
        ("offset", "offset", "the end stands where a comparison should"),
        ("offset =", "offset =", "offset is compared with a whole number"),
        ("offset > 1 AND", "", "a condition begins with"),
        ("offset > 1 tag = 'a'", "offset > 1 tag", "tag stands where AND should"),
        ("offset = 1 OR offset = 2", "offset = 1 OR", "OR stands where AND should"),
        ("tag = 'a' AND offset <> 5", "offset <> 5", "<> stands where a comparison should"),
        ("offset != 5", "offset != 5", "!= stands where a comparison should"),
        ("NOT offset = 5", "NOT offset", "begins with the name of a column"),
        ("offset NOT IN (5)", "offset NOT IN", "NOT stands where a comparison should"),
        ("tag NOT LIKE 'a%'", "tag NOT LIKE", "NOT stands where"),
        ("5 < offset", "5 <", "begins with the name of a column"),
        ("offset + 1 = 5", "+ 1 = 5", "it is not understood"),
        ("length(key) = 5", "length(", "length is no column to compare"),
        ("t.offset = 5", ".offset = 5", "it is not understood"),
        ("value = X'00'", "value =", "value is not compared where the records lie"),
        ("headers IS NULL", "headers IS", "headers is not compared"),
        ("offset = NULL", "offset = NULL", "= NULL is true of no row; write IS NULL"),
        ("offset = '5'", "offset = '5'", "offset is compared with a whole number"),
        ("offset = 5.0", "offset = 5.0", "a whole number"),
        ("offset = 5L", "offset = 5L", "a whole number"),
        ("offset = 9223372036854775808", "offset = 9223372036854775808", "does not fit into a bigint"),
        ("offset = 1" + "0" * 5000, "offset = 1", "does not fit into a bigint"),
        ("offset IN ()", "offset IN ()", "a whole number"),
        ("offset IN (1, 2", "offset IN (1, 2", "the end stands where , should"),
        ("offset IN (SELECT 1)", "offset IN (SELECT 1", "a whole number"),
        ("offset BETWEEN 1, 2", "offset BETWEEN 1,", ", stands where AND should"),
        ("offset IS 5", "offset IS 5", "5 stands where NULL should"),
        ("(offset = 5", "offset = 5", "a bracket is not closed"),
        ("offset = 5)", "offset = 5)", ") stands where AND should"),
        ("tag = eu", "tag = eu", "tag is compared with a text"),
        ('tag = "eu"', '"eu"', "texts stand in single quotes"),
        ("tag = 'eu", "'eu", "texts stand in single quotes"),
        ("tag = 'e' 'u'", "tag = 'e' 'u'", "'u' stands where AND should"),
        (r"tag = 'a\qb'", r"tag = 'a\qb'", r"\q is no escape"),
        (r"tag = '\u0041'", r"tag = '\u0041'", r"\u is no escape"),
        ("tag LIKE '%eu'", "tag LIKE '%eu'", "LIKE takes a start and one % at the end"),
        ("tag LIKE 'eu'", "tag LIKE 'eu'", "LIKE takes a start"),
        ("tag LIKE 'e_u%'", "tag LIKE 'e_u%'", "LIKE takes a start"),
        (r"tag LIKE 'eu\%'", r"tag LIKE 'eu\%'", "LIKE takes a start"),
        ("key LIKE 'k%'", "key LIKE 'k%'", "LIKE is for topic and tag"),
        ("key = 5", "key = 5", "key is compared with bytes"),
        ("key = X'6B3'", "key = X'6B3'", "pairs of hexadecimal digits"),
        ("key = cast('1' AS binary)", "key = cast(", "key is compared with bytes"),
        ("timestamp > 5", "timestamp > 5", "timestamp is compared with a time and its zone"),
        ("timestamp > '2026-11-15'", "timestamp > '2026-11-15'", "a time and its zone"),
        ("timestamp > '2026-11-15T12:00:00'", "timestamp > '2026-11-15T12:00:00'", "a time and its zone"),
        ("timestamp > '2026-11-15T12:00Z'", "timestamp > '2026-11-15T12:00Z'", "a time and its zone"),
        ("timestamp > '2026-11-15T12:00:00.1234567Z'", "12:00:00.1234567Z'", "a time and its zone"),
        ("timestamp > '2026-02-30T12:00:00Z'", "timestamp > '2026-02-30T12:00:00Z'", "there is no such time"),
        ("timestamp > timestamp_millis(9223372036854775807)", "timestamp_millis(9223372036854775807)", "no place in"),
        ("timestamp > current_timestamp()", "timestamp > current_timestamp(", "a time and its zone"),
        ("offset = 1; DROP TABLE t", "; DROP TABLE t", "it is not understood"),
        ("offset = 1 -- AND more", "offset = 1 -", "- stands where AND should"),
    ],
    ids=lambda value: value[:40],
)
def test_what_cannot_be_applied_is_quoted_with_what_to_do(text: str, part: str, why: str) -> None:
    with pytest.raises(Invalid) as caught:
        ReadOptions.parse({"path": "/data", "topic": "shop/orders", "where": text})

    message = str(caught.value)
    assert message.startswith('option "where" cannot be applied at "')
    quoted, _, reason = message.partition('": ')
    assert part in quoted and why in reason
    assert len(quoted) < 300
    assert "filter the DataFrame that was loaded" in message


def test_a_stream_takes_the_same_conditions() -> None:
    options = {"path": "/data", "topic": "a", "where": "offset > 1 AND tag = 'eu'"}

    assert ReadOptions.parse(options, streaming=True).where == ReadOptions.parse(options).where
