"""The option `where` of a read: conditions in the words of SQL, applied where the records lie.

Comparisons of a column with a value, joined by AND. Each has the meaning that Spark gives to the same words, and the
rows that are shown meet all of them exactly. What cannot be applied that way is refused by name. Knows text and
conditions; knows neither Spark nor files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, NamedTuple, NoReturn

from forebay.errors import Invalid
from forebay.spark.reading.filters import Condition, Filters, micros_of

_COLUMNS: Final = ("offset", "partition", "timestamp", "topic", "key", "tag")
_OTHER_COLUMNS: Final = ("value", "headers")
_TEXTS: Final = ("topic", "tag")
_COMPARISONS: Final = {"=": "=", "==": "=", "<=>": "<=>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_WORDS_OF_SQL: Final = ("and", "or", "not", "in", "is", "null", "between", "like")
_NUMBER_MAX: Final = 2**63
_TIME_UNITS: Final = {"timestamp_millis": 1000, "timestamp_micros": 1}
_TIME: Final = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-](0\d|1[0-7]):[0-5]\d|[+-]18:00)", re.ASCII
)
_ESCAPES: Final = {"b": "\b", "n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_TOKEN: Final = re.compile(
    r"""(?P<space>\s+)
    | (?P<text>'(?:[^'\\]|\\.|'')*')
    | (?P<number>\d[\w.]*)
    | (?P<word>[^\W\d]\w*)
    | (?P<quoted>`[^`]+`)
    | (?P<mark><=>|<=|>=|<>|!=|==|[=<>(),-])""",
    re.VERBOSE | re.DOTALL,
)
_TAKEN: Final = (
    "where takes conditions joined by AND: offset, partition, timestamp, topic, key and tag with =, <=>, <, <=, >, >=, "
    "IN (…), BETWEEN … AND …, IS NULL, IS NOT NULL, and LIKE 'start%' for topic and tag; for anything else filter the "
    "DataFrame that was loaded, with its own .where(…)"
)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int
    """The place of its first character."""

    @property
    def word(self) -> str:
        """For comparing with words of SQL; no other token looks like one."""
        return self.text.lower() if self.kind in ("word", "mark") else ""


def parse_where(text: str) -> Filters:
    """The conditions that the option names. `Invalid` quotes the part that cannot be applied."""
    return Filters(tuple(_Parser(text).conditions()))


class _Parser:
    """Reads the text once, from left to right. Brackets around conditions change nothing, and are only counted."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._at = 0
        self._begun = 0
        """Where the condition that is being read begins."""

    def conditions(self) -> Iterator[Condition]:
        """All of them, in order."""
        depth = 0
        while True:
            while self._takes("("):
                depth += 1
            self._begun = self._next.at
            yield from self._condition()
            while depth and self._takes(")"):
                depth -= 1
            if self._next.kind == "end" and not depth:
                return
            if self._next.kind == "end":
                self._refuse("a bracket is not closed")
            if not self._takes("and"):
                self._refuse(f"{self._next.text} stands where AND should")

    def _condition(self) -> Iterator[Condition]:
        column = self._column()
        taken = self._take()
        if taken.text in _COMPARISONS:
            yield self._compared(column, _COMPARISONS[taken.text])
        elif taken.word == "is":
            negated = self._takes("not")
            self._expect("null")
            yield Condition(column, "is not null" if negated else "is null")
        elif taken.word == "in":
            yield Condition(column, "in", tuple(self._listed(column)))
        elif taken.word == "between":
            yield Condition(column, ">=", self._value(column))
            self._expect("and")
            yield Condition(column, "<=", self._value(column))
        elif taken.word == "like":
            yield Condition(column, "starts with", self._start(column))
        else:
            self._refuse(f"{taken.text or 'the end'} stands where a comparison should that can be applied")

    def _column(self) -> str:
        taken = self._take()
        name = taken.text.strip("`").lower()
        if taken.kind not in ("word", "quoted") or (taken.kind == "word" and name in _WORDS_OF_SQL):
            self._refuse("a condition begins with the name of a column")
        if name in _OTHER_COLUMNS:
            self._refuse(f"{name} is not compared where the records lie")
        if name not in _COLUMNS:
            self._refuse(f"{taken.text} is no column to compare")
        return name

    def _compared(self, column: str, name: str) -> Condition:
        if not self._is_null():
            return Condition(column, "=" if name == "<=>" else name, self._value(column))
        if name != "<=>":
            self._refuse(f"{name} NULL is true of no row; write IS NULL")
        return Condition(column, "is null")

    def _listed(self, column: str) -> Iterator[Any]:
        self._expect("(")
        while True:
            # No row equals null: it adds nothing to a list.
            if not self._is_null():
                yield self._value(column)
            if self._takes(")"):
                return
            self._expect(",")

    def _is_null(self) -> bool:
        return self._takes("null")

    def _value(self, column: str) -> Any:
        """A value of the column's type; times in microseconds, as conditions have them."""
        if column in _TEXTS:
            return self._string(f"{column} is compared with a text, as in 'eu'")
        if column == "key":
            return self._bytes()
        if column == "timestamp":
            return self._moment()
        return self._number(f"{column} is compared with a whole number")

    def _start(self, column: str) -> str:
        if column not in _TEXTS:
            self._refuse("LIKE is for topic and tag")
        pattern = self._string("LIKE takes a text that ends in %, as in 'eu-%'")
        parts = re.findall(r"\\[\\%_]|[^\\]", pattern, re.DOTALL)
        if "".join(parts) != pattern or not parts or parts[-1] != "%" or {"%", "_"} & set(parts[:-1]):
            self._refuse("LIKE takes a start and one % at the end; write \\_ and \\% for these characters")
        return "".join(part[-1] for part in parts[:-1])

    def _number(self, why: str) -> int:
        sign = -1 if self._takes("-") else 1
        taken = self._take()
        if taken.kind != "number" or not re.fullmatch("[0-9]+", taken.text):
            self._refuse(why)
        number = sign * int(taken.text) if len(taken.text) <= 20 else _NUMBER_MAX
        if not -_NUMBER_MAX <= number < _NUMBER_MAX:
            self._refuse(f"{taken.text} does not fit into a bigint")
        return number

    def _bytes(self) -> bytes:
        if not self._takes("x"):
            return self._string("key is compared with bytes, as in X'6B31', or with a text").encode()
        digits = self._string("X is followed by hexadecimal digits in quotes")
        if not re.fullmatch("(?:[0-9a-fA-F]{2})*", digits):
            self._refuse("X is followed by pairs of hexadecimal digits in quotes")
        return bytes.fromhex(digits)

    def _moment(self) -> int:
        unit = _TIME_UNITS.get(self._next.word)
        if unit is not None:
            name = self._take().text
            self._expect("(")
            number = self._number(f"{name} takes a whole number") * unit
            self._expect(")")
            if not -_NUMBER_MAX <= number < _NUMBER_MAX:
                self._refuse(f"{name} has no place in Spark's type")
            return number
        self._takes("timestamp")  # the word for a value of that type
        why = "timestamp is compared with a time and its zone, as in '2026-11-15T12:00:00Z', or timestamp_millis(…)"
        text = self._string(why)
        if not _TIME.fullmatch(text):
            self._refuse(why)
        try:
            return micros_of(datetime.fromisoformat(text))
        except ValueError as error:
            self._refuse(f"there is no such time ({error})")

    def _string(self, why: str) -> str:
        taken = self._take()
        if taken.kind != "text":
            self._refuse(why)
        return re.sub(r"''|\\(.)", self._unescaped, taken.text[1:-1], flags=re.DOTALL)

    def _unescaped(self, found: re.Match[str]) -> str:
        if found[0] == "''":
            return "'"
        if found[1] in "%_":
            return found[0]  # as Spark does, for LIKE
        if found[1] not in _ESCAPES:
            self._refuse(f"{found[0]} is no escape that is known here; a backslash is written as two")
        return _ESCAPES[found[1]]

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        taken = self._next
        if taken.kind != "end":
            self._at += 1
        return taken

    def _takes(self, word: str) -> bool:
        """Take this word, or mark, if it comes next."""
        found = self._next.word == word
        self._at += found
        return found

    def _expect(self, word: str) -> None:
        if not self._takes(word):
            self._refuse(f"{self._next.text or 'the end'} stands where {word.upper()} should")

    def _refuse(self, why: str) -> NoReturn:
        """Quote the text from the beginning of the condition up to what was looked at last."""
        last = self._next
        part = self._text[self._begun : last.at + len(last.text)].strip()
        raise Invalid(f'option "where" cannot be applied at "{part:.200}": {why}. {_TAKEN}')


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or found.lastgroup is None:
            part = text[at : at + 40]
            why = "texts stand in single quotes" if part[0] in "\"'" else "it is not understood"
            raise Invalid(f'option "where" cannot be applied at "{part}": {why}. {_TAKEN}')
        if found.lastgroup != "space":
            yield _Token(found.lastgroup, found[0], at)
        at = found.end()
    yield _Token("end", "", len(text))
