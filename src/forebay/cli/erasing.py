"""Where the bytes of deleted records lie until the files and objects they are in are compacted."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.cli.invocation import Invocation
    from forebay.topics import TopicSpec


def remains(run: Invocation, spec: TopicSpec, places: dict[int, list[int]]) -> list[dict[str, Any]]:
    """Each place that has bytes of the records at these offsets, by partition, and until when."""
    from forebay.cli.holding import look_at
    from forebay.cli.tiers import Tier, database_bytes, pieces_of
    from forebay.topics import Engine

    found = look_at(run)
    if not any(places.values()):
        return []
    if spec.engine is Engine.ROCKSDB:
        database = database_bytes(found, run.disk)
        if database is None:
            return []
        until = "RocksDB compacts the files that have them"
        return [{"tier": database.tier, "place": database.place, "bytes": database.bytes, "until": until}]
    left = []
    for place in found.places():
        offsets = places.get(place.partition, []) if place.spec == spec else []
        for piece in pieces_of(found, place, run.disk) if offsets else ():
            # What was set aside is not known by offsets, and may have them.
            if piece.tier is Tier.ASIDE or _has(offsets, piece.start, piece.stop):
                until = "you remove what was set aside" if piece.tier is Tier.ASIDE else "compaction"
                item = {"partition": place.partition, "tier": piece.tier, "place": piece.place, "bytes": piece.bytes}
                left.append({**item, "until": until})
    return left


def _has(offsets: list[int], start: int, stop: int) -> bool:
    """Whether any of the offsets, which are sorted, lies in `[start, stop)`."""
    at = bisect_left(offsets, start)
    return at < len(offsets) and offsets[at] < stop
