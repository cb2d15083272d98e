"""Places in a stream as people write them, in commands and addresses: an offset, a time, one of the two ends."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from forebay.errors import Invalid
from forebay.records import EARLIEST, LATEST, OFFSET_MAX, Position

_OFFSET: Final = re.compile(r"[0-9]{1,19}")
_MILLISECONDS: Final = re.compile(r"(-?[0-9]{1,18})ms")
END: Final = Position("end")
"""The end as it is when the command starts."""

_FORMS: Final = "an offset (1234), a time (2031-05-06T07:08:09Z, or 1935903600000ms)"


def parse_start(text: str, option: str) -> Position:
    """Where to begin: `earliest`, `latest`, an offset or a time."""
    if text == "earliest":
        return EARLIEST
    if text == "latest":
        return LATEST
    found = _offset_or_time(text)
    if found is None:
        raise Invalid(f"{option} is {text!r:.80}; give earliest, latest, {_FORMS}")
    return found


def parse_time(text: str, option: str) -> int:
    """A time, as milliseconds since 1970."""
    found = _offset_or_time(text)
    if found is None or found.kind != "time":
        raise Invalid(f"{option} is {text!r:.80}; give a time: 2031-05-06T07:08:09Z, or 1935903600000ms")
    return found.value


def parse_stop(text: str) -> Position:
    """Where to end: `end`, an offset or a time; what is there is not read any more."""
    found = END if text == "end" else _offset_or_time(text)
    if found is None:
        raise Invalid(f"--until is {text!r:.80}; give end, {_FORMS}")
    return found


def _offset_or_time(text: str) -> Position | None:
    if _OFFSET.fullmatch(text):
        if int(text) > OFFSET_MAX:
            raise Invalid(f"offset {text} is above the highest, {OFFSET_MAX}")
        return Position.at_offset(int(text))
    milliseconds = _MILLISECONDS.fullmatch(text)
    if milliseconds is not None:
        return Position.at_time(int(milliseconds[1]))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    # Without a zone it is UTC: a command must mean the same on every machine.
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return Position.at_time(round(aware.timestamp() * 1000))
