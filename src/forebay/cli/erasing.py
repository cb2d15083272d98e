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
    from forebay.cli.tiers import database_of, pieces_of
    from forebay.storage.usage import Tier, bytes_below
    from forebay.topics import Engine

    found = look_at(run)
    if not any(places.values()):
        return []
    if spec.engine is Engine.ROCKSDB:
        database = database_of(found)
        if not run.disk.exists(database):
            return []
        until = "RocksDB compacts the files that have them"
        size = bytes_below(run.disk, database)
        return [{"tier": Tier.DATABASE, "place": database, "bytes": size, "until": until}]
    left = []
    for place in found.places():
        offsets = places.get(place.partition, []) if place.spec == spec else []
        for piece in pieces_of(found, place, run.disk) if offsets else ():
            # What was set aside is not known by offsets, and may have them.
            if piece.tier is Tier.ASIDE or _has(offsets, piece.start, piece.stop):
                until = "you remove what was set aside" if piece.tier is Tier.ASIDE else "compaction"
                left.append(_left(place.partition, piece.tier, piece.place, piece.bytes, until))
    return left


def _has(offsets: list[int], start: int, stop: int) -> bool:
    """Whether any of the offsets, which are sorted, lies in `[start, stop)`."""
    at = bisect_left(offsets, start)
    return at < len(offsets) and offsets[at] < stop


def _left(partition: int, tier: str, place: str, size: int, until: str = "compaction") -> dict[str, Any]:
    return {"partition": partition, "tier": tier, "place": place, "bytes": size, "until": until}
