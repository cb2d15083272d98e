"""What a router does with a record: whether it passes, what is changed on the way, and where it goes.

Pure: the same record under the same rule and the same number of partitions always has the same outcome. Movers rely on
that when they route records again after a crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from forebay.errors import Invalid
from forebay.partitioning import partition_of_key
from forebay.records import Headers, Record
from forebay.routing import RouterRule, RouterSpec
from forebay.topics import TopicName


class RoutedRecords:
    """Records of one page that go to one partition of the destination, in the order of their offsets, by column."""

    __slots__ = ("headers", "keys", "last", "tags", "timestamps", "values")

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] = []
        self.tags: list[str | None] = []
        self.headers: list[Headers] = []
        self.timestamps: list[int] = []
        self.last = -1
        """The offset of the last of them in the source."""

    def add(self, record: Record, key: bytes | None, headers: Headers) -> None:
        """One more record, with its new key and headers."""
        self.values.append(record.value)
        self.keys.append(key)
        self.tags.append(record.tag)
        self.headers.append(headers)
        self.timestamps.append(record.timestamp)
        self.last = record.offset


class Routed(NamedTuple):
    """What becomes of the records of a page."""

    parts: dict[int, RoutedRecords]
    """What goes to each partition of the destination."""
    left_out: int
    """How many records the rule does not take."""


def routed(rule: RouterRule, records: Iterable[Record], partitions: int, arrived: Mapping[int, int]) -> Routed:
    """The records that the rule takes, by the partition of the destination that each goes to.

    `arrived` says up to which offset of the source each partition has got its records before: they are not routed
    again. A record with a key goes where the key's hash says, one without a key by the number of its own partition.
    """
    parts: dict[int, RoutedRecords] = {}
    left_out = 0
    for record in records:
        if not rule.takes(record):
            left_out += 1
            continue
        key = rule.key_of(record)
        place = record.partition % partitions if key is None else partition_of_key(key, partitions)
        if record.offset > arrived.get(place, -1):
            parts.setdefault(place, RoutedRecords()).add(record, key, rule.headers_of(record))
    return Routed(parts, left_out)


class RouterCircle(Invalid):
    """Records would come back to where they came from. `topics` are those on the way, which a caller may not know."""

    topics: tuple[TopicName, ...] = ()


def check_no_cycle(routers: Iterable[RouterSpec], sources: Sequence[TopicName], destination: TopicName) -> None:
    """`RouterCircle` if records that reach the destination could come back to one of the sources."""
    onward: dict[str, list[RouterSpec]] = {}
    for router in routers:
        for source in router.sources:
            onward.setdefault(source.topic, []).append(router)
    wanted = {str(source) for source in sources}
    ways: list[tuple[str, ...]] = [(str(destination),)]
    seen: set[str] = set()
    while ways:
        way = ways.pop()
        topic = way[-1]
        if topic in wanted:
            circle = RouterCircle(
                f"records would go in a circle: {' → '.join((topic, *way))}"
                f"{'' if len(way) == 1 else ' by routers that exist'}; "
                "choose another destination, or delete one of these routers first"
            )
            circle.topics = tuple(TopicName.parse(name) for name in way)
            raise circle
        if topic not in seen:
            seen.add(topic)
            ways += [(*way, router.destination) for router in onward.get(topic, ())]
