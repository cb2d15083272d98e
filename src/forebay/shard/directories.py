"""Where data directories lie, recorded in the metadata store so that a message can name a path and not only an id.

A record is a courtesy to people: no decision rests on it, and a directory that was moved or copied corrects it when
it is opened next.
"""

from __future__ import annotations

import msgspec

from forebay.errors import Corrupt, Indeterminate, Unavailable, UnsupportedFormat
from forebay.format.metadata.keys import directory_key, prefix_of_state
from forebay.format.metadata.value import decode_value, encode_value
from forebay.metadata import Entry, MetadataStore, Put


class DirectoryPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The absolute path of a data directory, and the machine that opened it last."""

    path: str
    host: str


def record_directory(store: MetadataStore, prefix: str, directory_id: str, place: DirectoryPlace) -> None:
    """Record where the directory lies, unless the store says so already. Called once, when an owner opens it.

    A store that does not answer is no reason to refuse the opening.
    """
    key = directory_key(directory_id, prefix=prefix)
    value = encode_value(place)
    try:
        known = store.get(key)
        if known is None or known.value != value:
            store.transaction([], [Put(key, value)])
    except (Unavailable, Indeterminate):
        return


def directory_name(store: MetadataStore, prefix: str, directory_id: str | None) -> str:
    """`directory /srv/north (3f2a…)`, with the machine if there is one; without the path if it is not recorded."""
    try:
        return named_directory(directory_id, store.get(directory_key(directory_id or "", prefix=prefix)))
    except Unavailable:
        return named_directory(directory_id, None)


def named_directory(directory_id: str | None, entry: Entry | None) -> str:
    """`directory_name` for a caller that has read the record, or found none."""
    try:
        place = decode_value(entry.value, DirectoryPlace)[0] if entry is not None else None
    except (Corrupt, UnsupportedFormat):
        place = None
    if place is None:
        return f"directory {directory_id}"
    return f"directory {place.path}{f' on {place.host}' if place.host else ''} ({directory_id})"


def directory_beside(store: MetadataStore, state_key: str, directory_id: str | None) -> str:
    """`directory_name` for a caller that knows a shard by the key of its state."""
    return directory_name(store, prefix_of_state(state_key), directory_id)
