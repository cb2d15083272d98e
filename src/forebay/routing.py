"""Routers as their users see them: from which topics to which, by which rule, and how they fare.

Values alone. Embedded logs, clients of a broker and the messages between them share these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final, NamedTuple, TypedDict, Unpack

import msgspec
from msgspec import Meta

from forebay.errors import Invalid
from forebay.records import TAG_BYTES_MAX, Headers, Record

NAME_CHARACTERS_MAX: Final = 100
SOURCES_MAX: Final = 100
READER_PREFIX: Final = "router-"
"""The names of the readers of routers begin with this, in the topics that they read."""
CONDITIONS_MAX: Final = 100
"""Tags, headers to match, to set and to remove that a rule may name, of each kind."""
RULE_BYTES_MAX: Final = 64 * 1024
"""What all texts of a rule may have together."""

KEEP_KEY: Final = "keep"
NO_KEY: Final = "none"
TAG_AS_KEY: Final = "tag"
HEADER_AS_KEY: Final = "header:"
"""Followed by the name of a header, whose first value becomes the key."""

TOO_LARGE: Final = "too_large"
"""Under which `RouterStatus.lost` has records that the destination can never hold as the rule makes them."""

_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_CHARACTERS_MAX}}}")


class OnRefused(StrEnum):
    """What becomes of a record that the destination can never hold as the rule makes it."""

    SKIP = "skip"
    """It is counted, logged with its offset, and left out; it stays in its source."""
    STOP = "stop"
    """The router waits at it, in its partition, until it is altered or the destination can hold the record."""


class HeaderMatch(NamedTuple):
    """A header that a record must have; with `value`, with just this value."""

    name: str
    value: bytes | None = None


class RuleOptions(TypedDict, total=False):
    """A rule as callers write it. What is left out is no condition, and changes nothing."""

    tags: Iterable[str]
    """The record has one of these tags."""
    key_prefix: bytes
    """The record has a key that begins so."""
    headers: Mapping[str, bytes | None] | None
    """The record has each of these headers; with a value, with just this value."""
    key: str
    """What becomes the key: `keep`, `none`, `tag`, or `header:NAME`."""
    set_headers: Mapping[str, bytes] | None
    """These replace headers of their names."""
    remove_headers: Iterable[str]
    on_refused: str
    """What becomes of a record that the destination can never hold: `skip`, or `stop`."""


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
    on_refused: OnRefused = OnRefused.SKIP
    """What becomes of a record that the destination can never hold. The newest rule says it, also for older records."""

    @classmethod
    def of(cls, **options: Unpack[RuleOptions]) -> RouterRule:
        """The rule that these options say."""
        known = RuleOptions.__annotations__
        unknown = [name for name in options if name not in known]
        if unknown:
            raise Invalid(f"a router's rule has no {unknown[0]!a:.80}; it has: {', '.join(known)}")
        return cls(
            tags=tuple(listed_names(options.get("tags", ()))),
            key_prefix=options.get("key_prefix", b""),
            headers=tuple(HeaderMatch(name, value) for name, value in (options.get("headers") or {}).items()),
            key=options.get("key", KEEP_KEY),
            set_headers=tuple((options.get("set_headers") or {}).items()),
            remove_headers=tuple(listed_names(options.get("remove_headers", ()))),
            on_refused=_on_refused(options.get("on_refused", OnRefused.SKIP)),
        )

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
        return f"{READER_PREFIX}{self.router_id}"


class RouterState(StrEnum):
    """What a router does."""

    RUNNING = "running"
    """This process moves its records."""
    DEFINED = "defined"
    """It is not paused, and this process does not run routers."""
    PAUSED = "paused"
    FAILING = "failing"
    """It waits and tries again; `failures` says why."""
    SOURCE_DELETED = "source_deleted"
    """A topic that it reads was deleted: nothing more comes from there."""
    DESTINATION_DELETED = "destination_deleted"
    """The topic that it fills was deleted: it has stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatus:
    """How a router fares. The counts are those of this process since it began to run routers."""

    router: RouterSpec
    state: RouterState
    lag: int | None
    """Offsets of the sources that are not routed yet, as far as is stored; `None` where this process cannot ask."""
    routed: int
    left_out: int
    """Records that the rule does not take."""
    lost: dict[str, int] = field(default_factory=dict)
    """Offsets for which the sources have no readable record any more, by the reason, and records that are too large."""
    failures: dict[str, str] = field(default_factory=dict)
    """By partition, as `shop/orders[3]`, what keeps it waiting."""


def listed_names(many: Iterable[object]) -> list[str]:
    """Names in a list; `Invalid` for one that stands where a list belongs."""
    if isinstance(many, str | bytes) or not isinstance(many, Iterable):
        raise Invalid(f"{str(many)!a:.80} stands where a list of names belongs: write it in brackets")
    return [str(one) for one in many]


def _on_refused(text: str) -> OnRefused:
    try:
        return OnRefused(text)
    except ValueError as error:
        raise Invalid(f"on_refused is {text!a:.80}; use {' or '.join(OnRefused)}") from error


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
