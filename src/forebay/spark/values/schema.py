"""Schemas as Spark writes them, `order_id STRING, amount DECIMAL(10, 2)`, understood without Spark."""

from __future__ import annotations

import difflib
import re
from typing import Final, NamedTuple, NoReturn

_TOKEN: Final = re.compile(
    r"\s+|--[^\n]*|(?P<quoted>`(?:[^`]|``)*`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<word>\w+)|(?P<sign>[<>(),:])"
)
_PLAIN: Final = (
    *("bigint", "binary", "boolean", "byte", "date", "double", "float", "int", "integer", "long", "real", "short"),
    *("smallint", "string", "timestamp", "timestamp_ltz", "timestamp_ntz", "tinyint", "variant"),
)
_SIZED: Final = {"char": (1, 1), "dec": (0, 2), "decimal": (0, 2), "numeric": (0, 2), "varchar": (1, 1)}
"""Types with numbers behind them, and how many."""
_NESTED: Final = ("array", "map", "struct")
_NAMES: Final = (*_PLAIN, *_SIZED, *_NESTED)


class TableColumn(NamedTuple):
    """A column and its type, in small letters."""

    name: str
    type: str


class Malformed(Exception):
    """The text is no schema."""

    def __init__(self, text: str, line: int, column: int) -> None:
        super().__init__(text)
        self.line, self.column = line, column


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


def columns_of(text: str) -> tuple[TableColumn, ...]:
    """The columns of a schema; `Malformed` says where it is none."""
    return _Parser(text).columns()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._tokenized())
        self._next = 0

    def columns(self) -> tuple[TableColumn, ...]:
        columns = self._fields(closed_by=None)
        seen: set[str] = set()
        for (name, _), position in columns:
            if name.lower() in seen:
                self._fail(f"column {name} is there twice", position)
            seen.add(name.lower())
        return tuple(column for column, _ in columns)

    def _fields(self, closed_by: str | None) -> list[tuple[TableColumn, int]]:
        fields = []
        while True:
            token = self._name()
            if self._peek(":"):
                self._next += 1
            kind = self._type()
            self._attributes()
            fields.append((TableColumn(token.text, kind), token.position))
            if self._peek(","):
                self._next += 1
            elif closed_by is None and self._next == len(self._tokens):
                return fields
            elif closed_by is not None and self._peek(closed_by):
                self._next += 1
                return fields
            else:
                self._fail_here(f"a comma or {closed_by or 'the end'} belongs here")

    def _type(self) -> str:
        token = self._take("word", "a type such as STRING")
        name = token.text.lower()
        if name in _PLAIN:
            return name
        if name in _SIZED:
            return name + self._numbers(name)
        if name not in _NESTED:
            near = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.6)
            self._fail(
                f"{token.text} is not a type: "
                + (f"did you mean {near[0].upper()}?" if near else f"the types are {', '.join(_NAMES)}"),
                token.position,
            )
        self._sign("<")
        if name == "struct":
            return f"struct<{','.join(f'{column.name}:{column.type}' for column, _ in self._fields('>'))}>"
        inner = [self._type()]
        if name == "map":
            self._sign(",")
            inner.append(self._type())
        self._sign(">")
        return f"{name}<{','.join(inner)}>"

    def _numbers(self, name: str) -> str:
        least, most = _SIZED[name]
        if not self._peek("("):
            if least:
                self._fail_here(f"{name.upper()} needs its length, as in {name.upper()}(20)")
            return ""
        self._next += 1
        numbers = [self._number()]
        while self._peek(",") and len(numbers) < most:
            self._next += 1
            numbers.append(self._number())
        self._sign(")")
        return f"({','.join(numbers)})"

    def _attributes(self) -> None:
        while self._next < len(self._tokens) and self._tokens[self._next].kind == "word":
            token = self._tokens[self._next]
            self._next += 1
            if token.text.lower() == "not":
                self._fail(
                    "NOT NULL does not go here: a field that is missing is null; filter it in a step", token.position
                )
            elif token.text.lower() == "comment":
                self._take("text", "a text in quotes")
            else:
                self._fail(f"{token.text!r} does not belong here: is a comma missing before it?", token.position)

    def _name(self) -> _Token:
        if self._next < len(self._tokens) and self._tokens[self._next].kind == "quoted":
            token = self._tokens[self._next]
            self._next += 1
            return token._replace(text=token.text[1:-1].replace("``", "`"))
        return self._take("word", "the name of a column")

    def _number(self) -> str:
        token = self._take("word", "a number")
        if not token.text.isdigit():
            self._fail(f"{token.text} is not a number", token.position)
        return token.text

    def _sign(self, sign: str) -> None:
        if not self._peek(sign):
            self._fail_here(f"{sign} belongs here")
        self._next += 1

    def _peek(self, sign: str) -> bool:
        return self._next < len(self._tokens) and self._tokens[self._next][:2] == ("sign", sign)

    def _take(self, kind: str, what: str) -> _Token:
        if self._next == len(self._tokens) or self._tokens[self._next].kind != kind:
            self._fail_here(f"{what} belongs here")
        self._next += 1
        return self._tokens[self._next - 1]

    def _tokenized(self) -> list[_Token]:
        tokens, position = [], 0
        while position < len(self._text):
            found = _TOKEN.match(self._text, position)
            if found is None:
                self._fail(f"{self._text[position]!r} does not belong into a schema", position)
            if found.lastgroup is not None:
                tokens.append(_Token(found.lastgroup, found[0], position))
            position = found.end()
        return tokens

    def _fail_here(self, text: str) -> NoReturn:
        at = self._tokens[self._next].position if self._next < len(self._tokens) else len(self._text.rstrip())
        self._fail(text, at)

    def _fail(self, text: str, position: int) -> NoReturn:
        before = self._text[:position]
        raise Malformed(text, before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1)
