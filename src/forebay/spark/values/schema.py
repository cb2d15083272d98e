"""Schemas as Spark writes them, `order_id STRING, amount DECIMAL(10, 2)`, understood without Spark.

sqlglot reads the text in Spark's dialect. It takes types and attributes of other databases too: those are refused here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from sqlglot import exp
    from sqlglot.tokenizer_core import Token

_TYPES: Final = {
    "BIGINT": "bigint",
    "BINARY": "binary",
    "BOOLEAN": "boolean",
    "CHAR": "char",
    "DATE": "date",
    "DECIMAL": "decimal",
    "DOUBLE": "double",
    "FLOAT": "float",
    "INT": "int",
    "SMALLINT": "smallint",
    "TEXT": "string",
    "TIMESTAMPLTZ": "timestamp_ltz",
    "TIMESTAMPNTZ": "timestamp_ntz",
    "TIMESTAMPTZ": "timestamp",
    "TINYINT": "tinyint",
    "VARCHAR": "varchar",
    "VARIANT": "variant",
    "ARRAY": "array",
    "MAP": "map",
    "STRUCT": "struct",
}
"""The types of Spark, by sqlglot's names for them."""
_INSIDE: Final = {
    "array": (1, 1, "ARRAY<INT>"),
    "char": (1, 1, "CHAR(20)"),
    "decimal": (0, 2, "DECIMAL(10, 2)"),
    "map": (2, 2, "MAP<STRING, INT>"),
    "varchar": (1, 1, "VARCHAR(20)"),
}
"""How many numbers or types a type has, at least and at most; the others have none."""
_OPEN: Final = "STRUCT<"


class TableColumn(NamedTuple):
    """A column and its type, in small letters, as Spark shows it."""

    name: str
    type: str


def quoted(name: str) -> str:
    """A name as Spark's DDL and its functions take it, also one with a dot, a space or a backtick in it."""
    return f"`{name.replace('`', '``')}`"


class Malformed(Exception):
    """The text is no schema."""

    def __init__(self, text: str, line: int, column: int) -> None:
        super().__init__(text)
        self.line, self.column = line, column


def columns_of(text: str) -> tuple[TableColumn, ...]:
    """The columns of a schema; `Malformed` says where it is none."""
    from sqlglot import exp
    from sqlglot.dialects.dialect import Dialect
    from sqlglot.errors import ParseError, TokenError

    # A schema is what stands between the brackets of a struct. The line keeps a comment at its end from the bracket.
    whole = f"{_OPEN}{text}\n>"
    spark = Dialect.get_or_raise("spark")
    try:
        tokens = spark.tokenize(whole)
    except TokenError as error:
        raise _malformed("a text or a name in quotes has no end", text, len(text.rstrip())) from error
    _sort_words(text, tokens[2:-1])
    try:
        found = spark.parser().parse_into(exp.DataType, tokens, whole)[0]
    except ParseError as error:
        raise _unread(text, error.errors[0]) from error
    assert isinstance(found, exp.DataType)
    return tuple(_fields(text, found))


def _sort_words(text: str, tokens: Sequence[Token]) -> None:
    """Make every word that names a column a plain name, also one like FROM, and refuse a type that Spark has not."""
    from sqlglot import TokenType

    inside, awaited = ["struct"], "the name of a column"
    for before, token in zip((None, *tokens), tokens, strict=False):
        if token.token_type is TokenType.SEMICOLON:
            raise _malformed("';' does not belong into a schema", text, token.start - len(_OPEN))
        if token.text in ("<", "("):
            holds_columns = before is not None and before.token_type is TokenType.STRUCT
            inside.append("struct" if holds_columns else "types" if token.text == "<" else "numbers")
        elif token.text in (">", ")"):
            inside.pop()
        if token.text in ("<", ","):
            awaited = {"struct": "the name of a column", "types": "a type such as STRING"}.get(inside[-1], "")
        elif awaited == "the name of a column":
            token.token_type = TokenType.IDENTIFIER if token.token_type is TokenType.IDENTIFIER else TokenType.VAR
            awaited = "a type such as STRING"
        elif awaited and token.text != ":":
            if token.token_type.name not in _TYPES:
                raise _malformed(_no_type(token.text), text, token.start - len(_OPEN))
            awaited = ""
        if not inside:
            break
    if awaited:
        raise _malformed(f"{awaited} belongs here", text, len(text.rstrip()))


def _fields(text: str, struct: exp.DataType) -> list[TableColumn]:
    """The columns of a struct; the schema itself is one too."""
    fields: dict[str, TableColumn] = {}
    for column in struct.expressions:
        at = column.this.meta["start"] - len(_OPEN)
        if column.name.lower() in fields:
            raise _malformed(f"column {column.name} is there twice", text, at)
        for attribute in column.constraints:
            _check_attribute(text, attribute, at)
        fields[column.name.lower()] = TableColumn(column.name, _type(text, column.kind, at))
    return list(fields.values())


def _check_attribute(text: str, attribute: exp.ColumnConstraint, at: int) -> None:
    from sqlglot import exp

    said = attribute.sql("spark")
    if isinstance(attribute.kind, exp.NotNullColumnConstraint):
        way_out = "a field that is missing is null; filter it in a step"
        raise _malformed(f"{said} does not go here: {way_out}", text, at)
    if not isinstance(attribute.kind, exp.CommentColumnConstraint):
        raise _malformed(f"{said} does not go here: a column has a name, a type and a COMMENT", text, at)


def _type(text: str, kind: exp.DataType, at: int) -> str:
    """A type as Spark shows it; `at` is where its column stands."""
    name = _TYPES[kind.this.name]
    if name == "struct":
        return f"struct<{','.join(f'{_shown(one.name)}:{one.type}' for one in _fields(text, kind))}>"
    least, most, example = _INSIDE.get(name, (0, 0, name.upper()))
    if not least <= len(kind.expressions) <= most:
        raise _malformed(f"{kind.sql('spark')} is not a type: write it as {example}", text, at)
    if name in ("array", "map"):
        return f"{name}<{','.join(_type(text, one, at) for one in kind.expressions)}>"
    numbers = [one.name for one in kind.expressions]
    for number in numbers:
        if not number.isdigit():
            raise _malformed(f"{number.lower()} is not a number: write {name.upper()} as {example}", text, at)
    return f"{name}({','.join(numbers)})" if numbers else name


def _shown(name: str) -> str:
    return name if name.isidentifier() else quoted(name)


def _no_type(word: str) -> str:
    near = difflib.get_close_matches(word.lower(), _TYPES.values(), n=1, cutoff=0.6)
    return f"{word} is not a type: " + (
        f"did you mean {near[0].upper()}?" if near else f"the types are {', '.join(_TYPES.values())}"
    )


def _unread(text: str, error: Mapping[str, Any]) -> Malformed:
    """What sqlglot does not take, with the word where it stopped."""
    word, line = str(error["highlight"]), int(error["line"])
    column = int(error["col"]) - len(word) + 1 - (len(_OPEN) if line == 1 else 0)
    if line > text.count("\n") + 1:
        return _malformed("a comma or > belongs here", text, len(text.rstrip()))
    return Malformed(f"{word!r} does not belong here: is a comma missing before it?", line, column)


def _malformed(why: str, text: str, position: int) -> Malformed:
    before = text[:position]
    return Malformed(why, before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1)
