"""Records as text: what `produce` reads, line by line. `consume` writes the same JSON, so one feeds the other."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import UNSET

from forebay.errors import Invalid
from forebay.records import Headers


class InputFormat(enum.StrEnum):
    """How `produce` reads its input."""

    LINES = "lines"
    JSON = "json"
    FILE = "file"


class InputRecord(NamedTuple):
    """One record to be appended, and where it came from."""

    source: str
    value: bytes | None
    key: bytes | None = None
    tag: str | None = None
    headers: Headers = ()
    timestamp: int | None = None
    partition: int | None = None

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return len(self.value or b"") + len(self.key or b"")


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What holds for every record that does not say otherwise."""

    key: bytes | None = None
    key_separator: bytes | None = None
    tag: str | None = None
    partition: int | None = None


def read_records(
    lines: Iterable[bytes | None], source: str, input_format: InputFormat, defaults: Defaults
) -> Iterator[InputRecord | None]:
    """The records of a stream of lines. A bad line raises `Invalid` that names it; those before it have been given.

    `None` stands where more lines have to be waited for.
    """
    parse: Callable[[bytes, str, Defaults], InputRecord]
    parse = parse_json if input_format is InputFormat.JSON else parse_line
    number = 0
    for line in lines:
        if line is None:
            yield None
            continue
        number += 1
        if input_format is InputFormat.LINES or line.strip():
            yield parse(line, f"{source} line {number}", defaults)


def parse_line(line: bytes, where: str, defaults: Defaults) -> InputRecord:
    """A line is a value, or a key and a value if there is a separator."""
    key, value = defaults.key, line
    if defaults.key_separator is not None:
        key, separator, value = line.partition(defaults.key_separator)
        if not separator:
            shown = defaults.key_separator.decode("utf-8", "replace")
            raise Invalid(
                f"{where} has no key separator {shown!r}: write key{shown}value, or leave --key-separator out"
            )
    return InputRecord(where, value, key, defaults.tag, (), None, defaults.partition)


def parse_json(line: bytes, where: str, defaults: Defaults) -> InputRecord:
    """A JSON object with value or value_b64, and what else a record has."""
    from forebay.wire.items import item_headers, item_key, item_value, parse_item

    item = parse_item(line, where)
    has_key = item.key is not UNSET or item.key_b64 is not UNSET
    return InputRecord(
        where,
        item_value(item),
        item_key(item) if has_key else defaults.key,
        defaults.tag if item.tag is UNSET else item.tag,
        item_headers(item),
        None if item.timestamp is UNSET else item.timestamp,
        defaults.partition if item.partition is UNSET else item.partition,
    )
