"""What a router does with a record: whether it passes, what is changed on the way, and where it goes.

Pure: the same record under the same rule and the same number of partitions always has the same outcome. Movers rely on
that when they route records again after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from forebay.appends.queue import record_bytes
from forebay.errors import Invalid
from forebay.partitioning import partition_of_key
from forebay.records import COPIED_HEADERS_MAX, Headers, Record
from forebay.routing import RouterRule, RouterSpec
from forebay.storage.append import COPY_BYTES_MAX
from forebay.topics import TopicName


class RoutedRecords:
    """Records of one page that go to one partition of the destination, in the order of their offsets, by column."""

    __slots__ = ("headers", "keys", "offsets", "size", "tags", "timestamps", "values")

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] = []
        self.tags: list[str | None] = []
        self.headers: list[Headers] = []
        self.timestamps: list[int] = []
        self.offsets: list[int] = []
        """Where they are in the source."""
        self.size = 0
        """About what they take in a frame."""

    def add(self, record: Record, key: bytes | None, headers: Headers, size: int) -> None:
        """One more record, with its new key and headers, which takes so many bytes."""
        self.values.append(record.value)
        self.keys.append(key)
        self.tags.append(record.tag)
        self.headers.append(headers)
        self.timestamps.append(record.timestamp)
        self.offsets.append(record.offset)
        self.size += size

    @property
    def last(self) -> int:
        """The offset of the last of them in the source."""
        return self.offsets[-1]

    def one_by_one(self) -> Iterator[RoutedRecords]:
        """Each of them alone."""
        for place, offset in enumerate(self.offsets):
            one = RoutedRecords()
            one.offsets, one.values, one.timestamps = [offset], [self.values[place]], [self.timestamps[place]]
            one.keys, one.tags, one.headers = [self.keys[place]], [self.tags[place]], [self.headers[place]]
            one.size = record_bytes(self.values[place], self.keys[place], self.tags[place], self.headers[place])
            yield one


class Routed(NamedTuple):
    """What becomes of the records of a page."""

    parts: dict[int, list[RoutedRecords]]
    """What goes to each partition of the destination, an append each."""
    left_out: int
    """How many records the rule does not take."""
    too_large: list[int]
    """The offsets of those that no frame can hold with the headers they get, or that get too many headers, in order."""


def routed(
    rule: RouterRule,
    records: Iterable[Record],
    partitions: int,
    arrived: Mapping[int, int],
    *,
    bytes_max: int = COPY_BYTES_MAX,
) -> Routed:
    """The records that the rule takes, by the partition of the destination that each goes to.

    `arrived` says up to which offset of the source each partition has got its records before: they are not routed
    again. A record with a key goes where the key's hash says, one without a key by the number of its own partition.
    An append has `bytes_max` at most, or one record.
    """
    parts: dict[int, list[RoutedRecords]] = {}
    left_out = 0
    too_large: list[int] = []
    for record in records:
        if not rule.takes(record):
            left_out += 1
            continue
        key = rule.key_of(record)
        place = record.partition % partitions if key is None else partition_of_key(key, partitions)
        if record.offset <= arrived.get(place, -1):
            continue
        headers = rule.headers_of(record)
        size = record_bytes(record.value, key, record.tag, headers)
        if size > COPY_BYTES_MAX or len(headers) > COPIED_HEADERS_MAX:
            too_large.append(record.offset)
            continue
        appends = parts.setdefault(place, [])
        if not appends or appends[-1].size + size > bytes_max:
            appends.append(RoutedRecords())
        appends[-1].add(record, key, headers, size)
    return Routed(parts, left_out, too_large)


class RouterCircle(Invalid):
    """Records would come back to where they came from. `topics` are those on the way, which a caller may not know."""

    topics: tuple[TopicName, ...] = ()


def check_no_cycle(
    routers: Iterable[RouterSpec],
    sources: Sequence[TopicName],
    destination: TopicName,
    letters_of: Callable[[str], Iterable[str]] = lambda _: (),
) -> None:
    """`RouterCircle` if records that reach the destination could come back to one of the sources.

    `letters_of` names the dead-letter topics that the subscriptions of a topic send spent records to.
    """
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
                f"{'' if len(way) == 1 else ' by routers, or dead letters, that exist'}; "
                "choose another destination, or delete one of these routers or subscriptions first"
            )
            circle.topics = tuple(TopicName.parse(name) for name in way)
            raise circle
        if topic not in seen:
            seen.add(topic)
            ways += [(*way, router.destination) for router in onward.get(topic, ())]
            ways += [(*way, letters) for letters in letters_of(topic)]
