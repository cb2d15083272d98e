"""Which views a query reads, found before Spark is started, so that a name that is nowhere is reported with its place.

sqlglot reads the query in Spark's dialect. It does not know all of Spark's SQL: what it cannot read is left to Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sqlglot import exp
    from sqlglot.tokenizer_core import Token


class Reference(NamedTuple):
    """A view that a query reads, and where it says so: line and column count from 1."""

    name: str
    line: int
    column: int


class Unread(NamedTuple):
    """Where a query could not be read further, and why: Spark alone knows whether it is right."""

    why: str
    line: int
    column: int


class Query(NamedTuple):
    """What is known of a query. With `unread` set, it may read other views than those."""

    references: tuple[Reference, ...]
    unread: Unread | None = None


@lru_cache(maxsize=256)
def understood(query: str) -> Query:
    """The names of one word that stand where tables stand, without those that the query defines itself."""
    from sqlglot import exp
    from sqlglot.dialects.dialect import Dialect
    from sqlglot.errors import ErrorLevel, ParseError, TokenError

    spark = Dialect.get_or_raise("spark")
    try:
        tokens = spark.tokenize(query)
        _name_functions(tokens)
        found = spark.parser(error_level=ErrorLevel.IMMEDIATE).parse(tokens, query)
    except TokenError:
        return Query((), Unread("a text or a name in quotes has no end", 1, 1))
    except ParseError as error:
        partial = spark.parser(error_level=ErrorLevel.IGNORE).parse(tokens, query)
        return Query(_references(query, partial), _unread(error.errors[0]))
    if not all(isinstance(tree, exp.Query) for tree in found):
        return Query(_references(query, found), Unread("this is not a SELECT", 1, 1))
    return Query(_references(query, found))


def _unread(error: Mapping[str, Any]) -> Unread:
    """What sqlglot says, without the names of its classes."""
    why = str(error["description"]).partition(" but got")[0]
    column = int(error["col"] or 1) - len(str(error["highlight"])) + 1
    return Unread("something is missing" if "<class" in why else why, int(error["line"] or 1), column)


def _name_functions(tokens: list[Token]) -> None:
    """`GROUP BY window(…)` calls a function: sqlglot takes the word for the clause of that name."""
    from sqlglot import TokenType

    for token, following in pairwise(tokens):
        if token.token_type is TokenType.WINDOW and following.token_type is TokenType.L_PAREN:
            token.token_type = TokenType.VAR


def _references(query: str, trees: list[exp.Expr | None]) -> tuple[Reference, ...]:
    from sqlglot import exp

    found = []
    for tree in trees:
        for table in tree.find_all(exp.Table) if tree is not None else ():
            named = isinstance(table.this, exp.Identifier) and not table.db
            # A hint names what the query reads elsewhere.
            if named and not table.find_ancestor(exp.Hint) and not _is_defined(table):
                found.append((table.this.meta["start"], table.name))
    return tuple(Reference(name, *_place(query, at)) for at, name in sorted(found))


def _is_defined(table: exp.Table) -> bool:
    """Whether a WITH gives the name: to the query behind it, and to those that it defines further on."""
    from sqlglot import exp

    name = table.name.lower()
    inside: exp.Expr | None = None
    around = table.parent
    while around is not None:
        given = around.args.get("with_")
        if isinstance(around, exp.CTE):
            inside = around
        elif isinstance(around, exp.With):
            defined = [one.alias.lower() for one in around.expressions]
            own = next((at for at, one in enumerate(around.expressions) if one is inside), 0)
            if name in defined[: own + bool(around.recursive)]:
                return True
        elif (
            isinstance(given, exp.With)
            and inside not in given.expressions
            and name in (one.alias.lower() for one in given.expressions)
        ):
            return True
        around = around.parent
    return False


def _place(query: str, position: int) -> tuple[int, int]:
    before = query[:position]
    return before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1
