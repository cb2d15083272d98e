"""Records as text: what `produce` reads, line by line. `consume` writes the same JSON, so one feeds the other."""

from __future__ import annotations

import base64
import binascii
import enum
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from forebay.errors import Invalid
from forebay.records import Headers

_KNOWN = {"value", "value_b64", "key", "key_b64", "tag", "headers", "timestamp", "partition"}
_IGNORED = {"offset", "topic"}
"""Written by `consume`, and given again when a record is appended."""


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
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{where} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Invalid(f'{where} is not a JSON object such as {{"value": "text"}}')
    if "gap" in fields:
        raise Invalid(f"{where} is a gap and holds no record: leave such lines out")
    unknown = sorted(fields.keys() - _KNOWN - _IGNORED)
    if unknown:
        raise Invalid(f"{where} has an unknown field {unknown[0]!r:.80}; known: {', '.join(sorted(_KNOWN))}")
    if not fields.keys() & {"value", "value_b64"}:
        raise Invalid(f'{where} has neither "value" nor "value_b64"')
    has_key = bool(fields.keys() & {"key", "key_b64"})
    tag, timestamp = fields.get("tag", defaults.tag), fields.get("timestamp")
    if tag is not None and not isinstance(tag, str):
        raise Invalid(f'{where}: "tag" is a text')
    return InputRecord(
        where,
        _bytes(fields, "value", where),
        _bytes(fields, "key", where) if has_key else defaults.key,
        tag,
        _headers(fields.get("headers"), where),
        _whole(timestamp, "timestamp", where),
        _whole(fields.get("partition", defaults.partition), "partition", where),
    )


def _bytes(fields: dict[str, Any], name: str, where: str) -> bytes | None:
    text, coded = fields.get(name), fields.get(f"{name}_b64")
    if name in fields and f"{name}_b64" in fields:
        raise Invalid(f'{where} has both "{name}" and "{name}_b64": give one')
    if coded is not None:
        return _decoded(coded, f"{name}_b64", where)
    if text is None:
        return None
    return _encoded(text, name, where)


def _encoded(text: object, name: str, where: str) -> bytes:
    if not isinstance(text, str):
        raise Invalid(f'{where}: "{name}" is {type(text).__name__}, not a text; write JSON as a text, bytes in base64')
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Invalid(f'{where}: "{name}" cannot be written as UTF-8: {error.reason}') from error


def _decoded(coded: object, name: str, where: str) -> bytes:
    try:
        return base64.b64decode(coded, validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError) as error:
        raise Invalid(f'{where}: "{name}" is not base64: {error}') from error


def _headers(given: object, where: str) -> Headers:
    if given is None:
        return ()
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(len(pair) == 2 for pair in pairs if isinstance(pair, list | tuple)):
        raise Invalid(f'{where}: "headers" is an object, or a list of pairs')
    return tuple(_header(pair, where) for pair in pairs)


def _header(pair: object, where: str) -> tuple[str, bytes | None]:
    if not isinstance(pair, list | tuple) or not isinstance(pair[0], str):
        raise Invalid(f'{where}: "headers" is an object, or a list of pairs of name and value')
    name, value = pair
    if value is None:
        return name, None
    if isinstance(value, dict) and value.keys() == {"b64"}:
        return name, _decoded(value["b64"], f"header {name}", where)
    return name, _encoded(value, f"header {name}", where)


def _whole(number: object, name: str, where: str) -> int | None:
    if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
        raise Invalid(f'{where}: "{name}" is a whole number')
    return number
