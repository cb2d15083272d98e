"""What a log says when it cannot write: which appends are certainly not in it, and which may be."""

from __future__ import annotations

from typing import NamedTuple

from forebay.errors import Indeterminate, Unavailable
from forebay.wal.writer import ShardPlace


class Refusals(NamedTuple):
    """The errors after a write that failed half way."""

    later: Unavailable
    written: Indeterminate
    queued: Unavailable


def refusals(name: object, reason: str) -> Refusals:
    """For appends from now on, for those that were being written, and for those that waited behind them."""
    return Refusals(
        later=Unavailable(f"{name} is read-only since its log could not be written ({reason}); it recovers by itself"),
        written=Indeterminate(
            f"{name}: the append was being written when the log failed ({reason}): it is not visible now and, "
            "should the process crash before the log recovers, may appear once; read before you repeat it"
        ),
        queued=Unavailable(f"{name}: the append was not written, the log failed before it ({reason}); try again"),
    )


def too_full(place: ShardPlace, free: int, least: int) -> Unavailable:
    """Refused before the disk is full."""
    return Unavailable(
        f"{place}: {free} bytes are free below {place.directory}, fewer than wal.free_bytes_min "
        f"({least}): free some space; appends go on by themselves then"
    )
