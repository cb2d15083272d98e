"""Schemas and queries understood without Spark: columns and their types, the views that a query reads."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.errors import Invalid
from forebay.spark.pipelines.file.queries import Unread, understood
from forebay.spark.values.avro import columns_of_avro
from forebay.spark.values.schema import Malformed, columns_of


def test_a_schema_of_every_kind_of_type() -> None:
    text = """
        id STRING COMMENT 'the, name',  -- not "this, one"
        `odd ``name` decimal(10, 2), plain DECIMAL,
        inner: struct<a: int, b array<map<string, varchar(3)>>>
    """

    assert columns_of(text) == (
        ("id", "string"),
        ("odd `name", "decimal(10,2)"),
        ("plain", "decimal"),
        ("inner", "struct<a:int,b:array<map<string,varchar(3)>>>"),
    )


def test_types_are_named_as_spark_shows_them_and_any_word_may_name_a_column() -> None:
    text = (
        "from long, select: integer, `a b` byte, array real, order struct<group: short, to: dec(3)>, at timestamp_ntz"
    )

    assert columns_of(text) == (
        ("from", "bigint"),
        ("select", "int"),
        ("a b", "tinyint"),
        ("array", "float"),
        ("order", "struct<group:smallint,to:decimal(3)>"),
        ("at", "timestamp_ntz"),
    )


@pytest.mark.parametrize(
    ("text", "place", "why"),
    [
        ("", (1, 1), "the name of a column"),
        ("a", (1, 2), "a type such as STRING"),
        ("a int,", (1, 7), "the name of a column"),
        ("a int b int", (1, 7), "'b' does not belong here: is a comma missing"),
        ("a strng", (1, 3), "did you mean STRING"),
        ("a qqq", (1, 3), "the types are"),
        ("a int,\n  A string", (2, 3), "column A is there twice"),
        ("a varchar", (1, 1), r"VARCHAR\(20\)"),
        ("a varchar(x)", (1, 1), "x is not a number"),
        ("a decimal(1,2,3)", (1, 1), r"write it as DECIMAL\(10, 2\)"),
        ("b int,\na map<int>", (2, 1), "write it as MAP<STRING, INT>"),
        ("a array<int", (1, 12), "> belongs here"),
        ("a array<intt>", (1, 9), "did you mean INT"),
        ("a struct<b: int, c: map<int, strng>>", (1, 30), "did you mean STRING"),
        ("a int primary key", (1, 1), "PRIMARY KEY does not go here"),
        ("a interval", (1, 3), "interval is not a type"),
        ("a int comment 'never ends", (1, 26), "has no end"),
        ("a struct<b int", (1, 15), "a comma or > belongs here"),
        ("a int not null", (1, 1), "filter it in a step"),
        ("a int comment no", (1, 15), "'no' does not belong here"),
        ("a int; b int", (1, 6), "';' does not belong"),
    ],
)
def test_what_is_no_schema_is_reported_with_its_place(text: str, place: tuple[int, int], why: str) -> None:
    with pytest.raises(Malformed, match=why) as failure:
        columns_of(text)

    assert (failure.value.line, failure.value.column) == place


def _record(*types: Any) -> dict[str, Any]:
    fields = [{"name": f"f{number}", "type": kind} for number, kind in enumerate(types)]
    return {"type": "record", "name": "r", "fields": fields}


def test_an_avro_schema_of_every_kind_of_type() -> None:
    colour = {"type": "enum", "name": "colour", "symbols": ["red"]}
    inner = {"type": "record", "name": "inner", "namespace": "n", "fields": [{"name": "a", "type": "int"}]}
    schema = _record(
        *("boolean", "int", "long", "float", "double", "bytes", "string", ["null", "long"]),
        *({"type": "int", "logicalType": "date"}, {"type": "long", "logicalType": "timestamp-millis"}),
        *({"type": "long", "logicalType": "local-timestamp-micros"}, {"type": "long", "logicalType": "unheard-of"}),
        {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        *({"type": "fixed", "name": "hash", "size": 16}, colour, "colour"),
        *({"type": "array", "items": inner}, {"type": "map", "values": "n.inner"}, {"type": "string"}),
    )

    assert [kind for _, kind in columns_of_avro(schema)] == [
        *("boolean", "int", "bigint", "float", "double", "binary", "string", "bigint"),
        *("date", "timestamp", "timestamp_ntz", "bigint", "decimal(9,2)", "binary", "string", "string"),
        *("array<struct<a:int>>", "map<string,struct<a:int>>", "string"),
    ]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (_record("r"), "f0 holds r, which it is itself in"),
        (_record(["int", "string"]), "f0 is a union of several types"),
        (_record("colour"), "f0 has the unknown type 'colour'"),
        (_record(7), "f0 has no type"),
        (_record({"type": "long", "logicalType": "time-micros"}), "f0 is a time-micros"),
        (_record({"type": "record", "name": "x", "fields": []}), "f0 has no fields"),
        ({"type": "record", "name": "r", "fields": [{"name": "a"}]}, "no name or no type"),
        (_record(_record("int") | {"fields": [{"name": "a", "type": "r"}]}), "f0.a holds r, which it is itself in"),
    ],
)
def test_what_has_no_place_in_a_column_is_reported_by_its_field(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(Invalid, match=why):
        columns_of_avro(schema)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("SELECT * FROM a", "a"),
        ("FROM a SELECT x", "a"),
        ("SELECT * FROM a, b AS c, `d e` WHERE x IN (SELECT y FROM f)", "a b d e f"),
        ("WITH t AS (SELECT 1 FROM z), `u` (n) AS (SELECT 2) SELECT * FROM t JOIN u JOIN v USING (k)", "z v"),
        ("SELECT extract(YEAR FROM at), trim(BOTH FROM x), substring(a FROM 2) FROM a", "a"),
        ("SELECT x IS DISTINCT FROM y FROM c LEFT JOIN d USING (k)", "c d"),
        ("SELECT * FROM range(10)", ""),
        ("SELECT * FROM parquet.`/x/y` JOIN catalog.space.t", ""),
        ("SELECT * FROM (SELECT * FROM q) AS s, r", "q r"),
        ("SELECT * FROM (a JOIN b ON a.x = b.y)", "a b"),
        ("SELECT window(at, '1 minute'), sum(x) FROM a GROUP BY window(at, '1 minute'), y ORDER BY z, w", "a"),
        ("SELECT * FROM a LATERAL VIEW explode(x) t AS y, z", "a"),
        ("SELECT 'from b', \"from c\" FROM a -- FROM d\n/* FROM e */", "a"),
        ("SELECT * FROM a WHERE f(x, y) AND EXISTS (FROM b)", "a b"),
        ("WITH a AS (SELECT * FROM a), c AS (SELECT * FROM a JOIN c) SELECT * FROM a JOIN c", "a c"),
        ("WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r) SELECT * FROM r", ""),
        ("SELECT /*+ BROADCAST(q) */ * FROM a q JOIN b", "a b"),
        ("SELECT session_window(at, '1 minute') FROM a GROUP BY session_window(at, '1 minute')", "a"),
        ("FROM a |> WHERE x > 1 |> JOIN b USING (k)", "a b"),
        ("SELECT sum(x) OVER w FROM a WINDOW w AS (PARTITION BY y)", "a"),
        ("SELECT 1", ""),
        ("SELECT * FROM", ""),
        ("", ""),
    ],
)
def test_the_views_that_a_query_reads(query: str, names: str) -> None:
    assert " ".join(reference.name for reference in understood(query).references) == names


@pytest.mark.parametrize(
    ("query", "unread"),
    [
        ("SELECT * FROM a WHERE", Unread("something is missing", 1, 17)),
        ("SELECT * FROM a", None),
        ("SELECT *\n  FRM a b", Unread("Invalid expression / Unexpected token", 2, 7)),
        ("SELECT *\n  FROM", Unread("Expected table name", 2, 3)),
        ("SELECT 'x FROM a", Unread("a text or a name in quotes has no end", 1, 1)),
        ("DROP TABLE a", Unread("this is not a SELECT", 1, 1)),
    ],
)
def test_a_query_that_is_not_understood_says_where(query: str, unread: Unread | None) -> None:
    assert understood(query).unread == unread


def test_a_view_is_found_where_it_stands() -> None:
    assert understood("SELECT *\n  FROM a\n  JOIN b").references == (("a", 2, 8), ("b", 3, 8))
