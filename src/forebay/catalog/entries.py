"""Stored values by their keys: an error names the key, and in a list one that cannot be read stops none of the others.

What decides by such a list that something may be removed must not use it: what is left out is not gone.

The process notes the keys of values that it could not read, so that it can say which ones are still there
(`noted_values`). A note is a hint alone: what counts is what the metadata store has when it is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

import msgspec

from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.metadata.value import Unknown, decode_value
from forebay.metadata import Entry, MetadataStore

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
LOGGED_MAX: Final = 1_024
"""Unreadable values that are remembered as logged."""
NOTED_MAX: Final = 256
"""Keys of unreadable values that are noted. Once there are more, those that are met from then on are."""
DELETE_OR_RESTORE: Final = "restore the metadata store from a backup, or delete it by its name"

_NOTED: Final[dict[str, type[msgspec.Struct]]] = {}
"""Each key with what should stand there. Changed by single steps, from any thread, of all logs of the process."""


class UnreadableValue(NamedTuple):
    """A stored value that cannot be used."""

    key: str
    error: Corrupt | UnsupportedFormat
    """Why."""

    def __str__(self) -> str:
        """With the key and the next step: an upgrade where only later versions can read it."""
        return _said(self.key, self.error, DELETE_OR_RESTORE)


def decode_entry(entry: Entry, kind: type[T], step: str = DELETE_OR_RESTORE) -> tuple[T, Unknown]:
    """The stored value and what this version does not know of it; `Corrupt` or `UnsupportedFormat` names its key.

    `step` is what to do about one that is damaged.
    """
    try:
        return decode_value(entry.value, kind)
    except UnsupportedFormat as error:
        _note(entry.key, kind)
        raise UnsupportedFormat(_said(entry.key, error, step)) from error
    except Corrupt as error:
        _note(entry.key, kind)
        raise Corrupt(_said(entry.key, error, step)) from error


def refused(entry: Entry, kind: type[msgspec.Struct]) -> Corrupt | UnsupportedFormat | None:
    """Why a stored value cannot be used; `None` if it can."""
    try:
        decode_value(entry.value, kind)
    except (Corrupt, UnsupportedFormat) as error:
        _note(entry.key, kind)
        return error
    return None


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


def noted_values(store: MetadataStore, *, prefix: str) -> list[UnreadableValue]:
    """The values below the prefix that this process has met and could not read, and that still cannot be read.

    Asks the metadata store for each of them: not more than `NOTED_MAX`.
    """
    found = []
    for key, kind in sorted(_NOTED.copy().items()):
        entry = store.get(key) if key.startswith(f"{prefix}/") else None
        error = None if entry is None else refused(entry, kind)
        if error is not None:
            found.append(UnreadableValue(key, error))
    return found


def _said(key: str, error: Corrupt | UnsupportedFormat, step: str) -> str:
    return f"{key}: {error}" if isinstance(error, UnsupportedFormat) else f"{key}: {error}; {step}"


def _note(key: str, kind: type[msgspec.Struct]) -> None:
    if key not in _NOTED and len(_NOTED) >= NOTED_MAX:
        _NOTED.clear()
    _NOTED[key] = kind


@lru_cache(maxsize=LOGGED_MAX)
def _log(key: str, value: bytes, error: str) -> None:
    """Cached, so that a list that is asked for every second says it once."""
    del key, value
    logger.warning("left out: %s", error)
