"""Which records are to be deleted: the ways to say it, the same for every engine."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class DeleteRange(NamedTuple):
    """Delete the records with offsets in `[start, stop)`."""

    start: int
    stop: int


class DeleteKey(NamedTuple):
    """Delete every record with exactly this key."""

    key: bytes


class DeleteTag(NamedTuple):
    """Delete every record with exactly this tag."""

    tag: str


class DeleteBefore(NamedTuple):
    """Delete everything below `offset`: `earliest` moves there."""

    offset: int


Deletion: TypeAlias = DeleteRange | DeleteKey | DeleteTag | DeleteBefore
