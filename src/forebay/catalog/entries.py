"""Stored values by their keys: an error names the key, and in a list one that cannot be read stops none of the others.

What decides by such a list that something may be removed must not use it: what is left out is not gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.metadata.value import Unknown, decode_value
from forebay.metadata import Entry

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
LOGGED_MAX: Final = 1_024
"""Unreadable values that are remembered as logged."""


def decode_entry(entry: Entry, kind: type[T]) -> tuple[T, Unknown]:
    """The stored value and what this version does not know of it; `Corrupt` or `UnsupportedFormat` names its key."""
    try:
        return decode_value(entry.value, kind)
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"{entry.key}: {error}") from error
    except Corrupt as error:
        raise Corrupt(
            f"{entry.key}: {error}; restore the metadata store from a backup, or delete it by its name"
        ) from error


def readable(entries: Iterable[Entry], kind: type[T]) -> Iterator[tuple[Entry, T]]:
    """Those entries that can be read, with their values. Each other is logged by its key, once."""
    for entry in entries:
        found = read_or_log(entry, kind)
        if found is not None:
            yield entry, found[0]


def read_or_log(entry: Entry, kind: type[T]) -> tuple[T, Unknown] | None:
    """As `decode_entry`; `None` for a value that cannot be read, which is logged once."""
    try:
        return decode_entry(entry, kind)
    except (Corrupt, UnsupportedFormat) as error:
        _log(entry.key, entry.value, str(error))
        return None


@lru_cache(maxsize=LOGGED_MAX)
def _log(key: str, value: bytes, error: str) -> None:
    """Cached, so that a list that is asked for every second says it once."""
    del key, value
    logger.warning("left out: %s", error)
