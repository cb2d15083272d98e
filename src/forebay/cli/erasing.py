"""Where the bytes of deleted records lie until the files and objects they are in are compacted."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.cli.invocation import Invocation
    from forebay.topics import TopicSpec


def remains(run: Invocation, spec: TopicSpec, places: dict[int, list[int]]) -> list[dict[str, Any]]:
    """Each place that has bytes of the records at these offsets, by partition, and until when."""
    return _local_remains(run, spec, places) if run.url is None else _asked_remains(run.url, spec, places)


def _asked_remains(url: str, spec: TopicSpec, places: dict[int, list[int]]) -> list[dict[str, Any]]:
    """As a broker says: it names its log files by their offsets, and nothing of what was set aside."""
    from forebay.cli.brokers import BrokerCalls
    from forebay.client.topics import topic_path
    from forebay.client.transport import HttpCall
    from forebay.storage.usage import Tier
    from forebay.wire.messages import SegmentList

    left = []
    with BrokerCalls(url) as calls:
        for partition, offsets in places.items():
            start: int | None = 0 if offsets else None
            while start is not None:
                query = {"partition": str(partition), "start": str(start)}
                call = HttpCall(method="GET", path=f"{topic_path(spec.name)}/segments", query=query)
                page = calls.ask(call, SegmentList)
                for file in page.local:
                    if _has(offsets, file.start, file.end):
                        tier = Tier.SEALED if file.sealed else Tier.LOG
                        place = f"log file [{file.start}, {file.end})"
                        left.append(_left(partition, tier, place, file.bytes or 0))
                left += [
                    _left(partition, Tier.HISTORY, piece.object, piece.bytes)
                    for piece in page.history
                    if piece.object is not None and _has(offsets, piece.start, piece.end)
                ]
                start = page.next
    return left


def _left(partition: int, tier: str, place: str, size: int, until: str = "compaction") -> dict[str, Any]:
    return {"partition": partition, "tier": tier, "place": place, "bytes": size, "until": until}


def _local_remains(run: Invocation, spec: TopicSpec, places: dict[int, list[int]]) -> list[dict[str, Any]]:
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
