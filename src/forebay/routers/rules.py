"""What a router does with a record: whether it passes, what is changed on the way, and where it goes.

Pure: the same record under the same rule and the same number of partitions always has the same outcome. Movers rely on
that when they route records again after a crash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from forebay.errors import Invalid
from forebay.partitioning import partition_of_key
from forebay.records import TAG_BYTES_MAX, Headers, Record
from forebay.topics import TopicName

NAME_CHARACTERS_MAX: Final = 100
SOURCES_MAX: Final = 100
CONDITIONS_MAX: Final = 100
"""Tags, headers to match, to set and to remove that a rule may name, of each kind."""
RULE_BYTES_MAX: Final = 64 * 1024
"""What all texts of a rule may have together."""

KEEP_KEY: Final = "keep"
NO_KEY: Final = "none"
TAG_AS_KEY: Final = "tag"
HEADER_AS_KEY: Final = "header:"
"""Followed by the name of a header, whose first value becomes the key."""

_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_CHARACTERS_MAX}}}")


class HeaderMatch(NamedTuple):
    """A header that a record must have; with `value`, with just this value."""

    name: str
    value: bytes | None = None


class RouterRule(msgspec.Struct, frozen=True, kw_only=True):
    """Which records a router takes, and what it changes. A record has to meet every condition that is given."""

    tags: tuple[str, ...] = ()
    """The record has one of these tags."""
    key_prefix: bytes = b""
    """The record has a key that begins so."""
    headers: tuple[HeaderMatch, ...] = ()
    """The record has each of these headers."""
    key: str = KEEP_KEY
    """What becomes the key: `keep`, `none`, `tag`, or `header:NAME`. Where there is no such value, there is no key."""
    set_headers: tuple[tuple[str, bytes], ...] = ()
    """These replace headers of their names."""
    remove_headers: tuple[str, ...] = ()

    def takes(self, record: Record) -> bool:
        """Whether the record meets every condition."""
        if self.tags and record.tag not in self.tags:
            return False
        if self.key_prefix and (record.key is None or not record.key.startswith(self.key_prefix)):
            return False
        return all(
            any(name == match.name and (match.value is None or match.value == value) for name, value in record.headers)
            for match in self.headers
        )

    def key_of(self, record: Record) -> bytes | None:
        """The key that the record gets."""
        if self.key == KEEP_KEY:
            return record.key
        if self.key == TAG_AS_KEY:
            return None if record.tag is None else record.tag.encode()
        wanted = self.key.removeprefix(HEADER_AS_KEY) if self.key.startswith(HEADER_AS_KEY) else None
        return next((value for name, value in record.headers if name == wanted), None)

    def headers_of(self, record: Record) -> Headers:
        """The headers that the record gets."""
        if not self.set_headers and not self.remove_headers:
            return record.headers
        replaced = {*self.remove_headers, *(name for name, _ in self.set_headers)}
        return (*((name, value) for name, value in record.headers if name not in replaced), *self.set_headers)


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


class RouterSource(msgspec.Struct, frozen=True, kw_only=True):
    """A topic that a router reads. A later topic of the same name is another one."""

    topic: str
    topic_id: str


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A router as it is stored: from which topics to which, by which rule."""

    name: str
    router_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    """Drawn when the router is created: a later router of this name has another."""
    sources: tuple[RouterSource, ...]
    destination: str
    destination_id: str
    rules: tuple[RouterRule, ...]
    """The present one last. An older one stays while a partition may have to be routed by it again."""
    rules_before: int = 0
    """How many rules it had before these; so each rule has a number, its version."""
    created_at: int
    is_paused: bool = False

    @property
    def version(self) -> int:
        """The number of the present rule."""
        return self.rules_before + len(self.rules)

    @property
    def rule(self) -> RouterRule:
        """The present rule."""
        return self.rules[-1]

    def rule_of(self, version: int) -> RouterRule | None:
        """The rule of this number, while it is kept."""
        place = version - self.rules_before - 1
        return self.rules[place] if 0 <= place < len(self.rules) else None

    def altered(self, rule: RouterRule, oldest: int) -> RouterSpec:
        """The router with one more rule, and without those that came before the version `oldest`."""
        kept = self.rules[max(0, oldest - self.rules_before - 1) :]
        before = self.version - len(kept)
        return msgspec.structs.replace(self, rules=(*kept, rule), rules_before=before)

    @property
    def reader(self) -> str:
        """The name under which the router's cursors are stored in its sources."""
        return f"router-{self.router_id}"


def check_router_name(name: str) -> str:
    """The name itself; `Invalid` if no router can have it."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or name in (".", ".."):
        raise Invalid(f"{name!a:.120} is not a router's name: use 1 to {NAME_CHARACTERS_MAX} of A-Z a-z 0-9 . _ -")
    return name


def check_rule(rule: RouterRule) -> None:
    """`Invalid`, with what to write instead, for a rule that cannot be meant."""
    for what, many in (
        ("tags", rule.tags),
        ("headers", rule.headers),
        ("set_headers", rule.set_headers),
        ("remove_headers", rule.remove_headers),
    ):
        if len(many) > CONDITIONS_MAX:
            raise Invalid(f"a router's rule has {len(many)} {what}; allowed: {CONDITIONS_MAX}")
    if any(len(tag.encode()) > TAG_BYTES_MAX for tag in rule.tags):
        raise Invalid(f"a tag in a router's rule is longer than any record's: allowed are {TAG_BYTES_MAX} bytes")
    named = rule.key.startswith(HEADER_AS_KEY) and len(rule.key) > len(HEADER_AS_KEY)
    if rule.key not in (KEEP_KEY, NO_KEY, TAG_AS_KEY) and not named:
        raise Invalid(f"key is {rule.key!a:.80}; use keep, none, tag or header:NAME")
    size = len(msgspec.json.encode(rule))
    if size > RULE_BYTES_MAX:
        raise Invalid(f"a router's rule takes {size} bytes; allowed: {RULE_BYTES_MAX}")


def check_no_cycle(routers: Iterable[RouterSpec], sources: Sequence[TopicName], destination: TopicName) -> None:
    """`Invalid` if records that reach the destination could come back to one of the sources."""
    onward: dict[str, list[RouterSpec]] = {}
    for router in routers:
        for source in router.sources:
            onward.setdefault(source.topic, []).append(router)
    wanted = {str(source) for source in sources}
    ways: list[tuple[str, str]] = [(str(destination), str(destination))]
    seen: set[str] = set()
    while ways:
        topic, way = ways.pop()
        if topic in wanted:
            raise Invalid(
                f"records would go in a circle: {topic} → {way}"
                f"{'' if way == str(destination) else ' by routers that exist'}; "
                "choose another destination, or delete one of these routers first"
            )
        if topic not in seen:
            seen.add(topic)
            ways += [(router.destination, f"{way} → {router.destination}") for router in onward.get(topic, ())]
