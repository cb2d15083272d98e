"""Which views a query reads, found in its text: enough to find a name that is nowhere, before Spark is started.

Not a parser of SQL: what is not plainly a name of one word behind FROM or JOIN is left to Spark.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_TOKEN: Final = re.compile(
    r"(?P<skip>\s+|--[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<quoted>`(?:[^`]|``)*`)|(?P<word>[^\W\d]\w*)|(?P<sign>.)",
    re.DOTALL,
)
_SUBQUERY: Final = ("select", "with", "from", "values", "table", "(")
_ENDS_LIST: Final = (
    *("where", "group", "order", "having", "limit", "union", "intersect", "except", "minus", "window", "select", "on"),
    *("using", "lateral", "pivot", "unpivot", "cluster", "distribute", "sort", "qualify", "offset", "when", "then"),
)
"""Words behind which a comma no longer parts tables."""
_BEFORE_A_TABLE: Final = ("from", "join")
_NO_TABLE: Final = ("lateral", "values", "select", "table", "unnest")


class Reference(NamedTuple):
    """A view that a query reads, and where it says so: line and column count from 1."""

    name: str
    line: int
    column: int


class _Token(NamedTuple):
    kind: str
    text: str
    position: int

    @property
    def word(self) -> str:
        return self.text.lower() if self.kind == "word" else self.text if self.kind == "sign" else ""


def references(query: str) -> tuple[Reference, ...]:
    """The names of one word that stand where tables stand, without those that the query defines itself."""
    tokens = [
        _Token(str(found.lastgroup), found[0], found.start())
        for found in _TOKEN.finditer(query)
        if found.lastgroup != "skip"
    ]
    defined = _defined(tokens)
    found = []
    for place in _table_places(tokens):
        name = _name(tokens, place)
        if name is not None and name.lower() not in defined:
            before = query[: tokens[place].position]
            column = tokens[place].position - (before.rfind("\n") + 1) + 1
            found.append(Reference(name, before.count("\n") + 1, column))
    return tuple(found)


def _defined(tokens: list[_Token]) -> set[str]:
    """Names that WITH gives: `name AS (` or `name (columns) AS (`, wherever they stand."""
    if not any(token.word == "with" for token in tokens):
        return set()
    names = set()
    for place, token in enumerate(tokens[:-2]):
        if token.kind in ("word", "quoted") and tokens[place + 1].word == "as" and tokens[place + 2].word == "(":
            names.add(_unquoted(token).lower())
        if token.kind in ("word", "quoted") and tokens[place + 1].word == "(":
            close = _closing(tokens, place + 1)
            if [one.word for one in tokens[close + 1 : close + 3]] == ["as", "("]:
                names.add(_unquoted(token).lower())
    return names


def _table_places(tokens: list[_Token]) -> list[int]:
    """Where a name may be that of a table: behind FROM and JOIN, and behind commas in between."""
    places = []
    listing: list[bool] = [False]
    """For each open parenthesis: whether a comma parts tables here."""
    calls: list[bool] = [False]
    """For each open parenthesis: whether it holds the arguments of a function."""
    for at, token in enumerate(tokens):
        before = tokens[at - 1] if at else None
        if token.word == "(":
            following = tokens[at + 1].word if at + 1 < len(tokens) else ""
            tables = before is not None and (before.word in _BEFORE_A_TABLE or (before.word == "," and listing[-1]))
            calls.append(following not in _SUBQUERY and not tables)
            listing.append(tables)
            if tables:
                places.append(at + 1)
        elif token.word == ")" and len(listing) > 1:
            listing.pop()
            calls.pop()
        elif token.word in _BEFORE_A_TABLE and not calls[-1] and (before is None or before.word != "distinct"):
            listing[-1] = True
            places.append(at + 1)
        elif token.word in _ENDS_LIST:
            listing[-1] = False
        elif token.word == "," and listing[-1] and not calls[-1]:
            places.append(at + 1)
    return places


def _name(tokens: list[_Token], place: int) -> str | None:
    """The name at a place, if it is one of one word and not that of a function."""
    if place >= len(tokens) or tokens[place].kind not in ("word", "quoted") or tokens[place].word in _NO_TABLE:
        return None
    following = tokens[place + 1].word if place + 1 < len(tokens) else ""
    return None if following in (".", "(") else _unquoted(tokens[place])


def _closing(tokens: list[_Token], opening: int) -> int:
    depth = 0
    for place in range(opening, len(tokens)):
        depth += {"(": 1, ")": -1}.get(tokens[place].word, 0)
        if depth == 0:
            return place
    return len(tokens)


def _unquoted(token: _Token) -> str:
    return token.text[1:-1].replace("``", "`") if token.kind == "quoted" else token.text
