"""Routers in requests and answers of the HTTP API, for server and client alike.

    {"sources": ["shop/orders"], "destination": "shop/eu", "start": "earliest",
     "rule": {"tags": ["eu"], "headers": {"kind": null}, "set_headers": {"via": "eu", "raw": {"b64": "/w=="}}}}

Bytes that are UTF-8 are a text, others an object with base64, as the headers of a record are.
"""

from __future__ import annotations

from typing import Annotated, Self, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from forebay.routing import (
    CONDITIONS_MAX,
    KEEP_KEY,
    SOURCES_MAX,
    OnRefused,
    RouterRule,
    RouterSource,
    RouterSpec,
    RouterState,
    RouterStatus,
    RuleOptions,
)
from forebay.wire.items import CodedBytes, HeaderValue

Named: TypeAlias = Annotated[list[str], Meta(max_length=CONDITIONS_MAX)]
KeyText = Annotated[str, Meta(extra_json_schema={"pattern": "^(keep|none|tag|header:.+)$"})]
"""Documented here; the router itself refuses what is wrong, and names what is allowed."""


class RuleItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which records a router takes, and what it changes. A record has to meet every condition that is given."""

    tags: Named = []
    """The record has one of these tags."""
    key_prefix: str | CodedBytes = ""
    """The record has a key that begins so."""
    headers: Annotated[dict[str, HeaderValue], Meta(max_length=CONDITIONS_MAX)] = {}
    """The record has each of these headers; with a value, with just this value."""
    key: KeyText = KEEP_KEY
    """What becomes the key."""
    set_headers: Annotated[dict[str, str | CodedBytes], Meta(max_length=CONDITIONS_MAX)] = {}
    """These replace headers of their names."""
    remove_headers: Named = []
    on_refused: OnRefused | UnsetType = UNSET
    """What becomes of a record that the destination can never hold: `skip`, also where nothing is said, or `stop`."""

    @classmethod
    def of(cls, rule: RouterRule) -> Self:
        """The rule as it is sent."""
        return cls(
            tags=list(rule.tags),
            key_prefix=_sent(rule.key_prefix),
            headers={match.name: None if match.value is None else _sent(match.value) for match in rule.headers},
            key=rule.key,
            set_headers={name: _sent(value) for name, value in rule.set_headers},
            remove_headers=list(rule.remove_headers),
            # Brokers of earlier versions know no such field, and do what it says by default.
            on_refused=UNSET if rule.on_refused is OnRefused.SKIP else rule.on_refused,
        )

    def options(self) -> RuleOptions:
        """The rule that was sent, as callers write it."""
        return {
            "tags": self.tags,
            "key_prefix": _received(self.key_prefix),
            "headers": {name: None if value is None else _received(value) for name, value in self.headers.items()},
            "key": self.key,
            "set_headers": {name: _received(value) for name, value in self.set_headers.items()},
            "remove_headers": self.remove_headers,
            "on_refused": OnRefused.SKIP if self.on_refused is UNSET else self.on_refused,
        }

    def rule(self) -> RouterRule:
        """The rule that was sent."""
        return RouterRule.of(**self.options())


class RouterPut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A router to be created."""

    sources: Annotated[list[str], Meta(extra_json_schema={"minItems": 1, "maxItems": SOURCES_MAX})]
    destination: str
    start: str = "latest"
    """Where it begins in each source: `earliest`, `latest` or a time."""
    rule: RuleItem = RuleItem()


class RouterSourceItem(msgspec.Struct, frozen=True, kw_only=True):
    """A topic that a router reads. A later topic of the same name is another one."""

    topic: str
    topic_id: str


class RouterItem(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of a router."""

    name: str
    router_id: str
    """Another one after the router was deleted and created again."""
    sources: list[RouterSourceItem]
    destination: str
    destination_id: str
    rule: RuleItem
    version: int
    """How many rules it has had."""
    is_paused: bool
    created_at: int

    @classmethod
    def of(cls, router: RouterSpec) -> Self:
        """The definition as it is sent."""
        return cls(
            name=router.name,
            router_id=router.router_id,
            sources=[RouterSourceItem(topic=source.topic, topic_id=source.topic_id) for source in router.sources],
            destination=router.destination,
            destination_id=router.destination_id,
            rule=RuleItem.of(router.rule),
            version=router.version,
            is_paused=router.is_paused,
            created_at=router.created_at,
        )

    def spec(self) -> RouterSpec:
        """The definition that was sent, with its present rule alone."""
        return RouterSpec(
            name=self.name,
            router_id=self.router_id,
            sources=tuple(RouterSource(topic=source.topic, topic_id=source.topic_id) for source in self.sources),
            destination=self.destination,
            destination_id=self.destination_id,
            rules=(self.rule.rule(),),
            rules_before=self.version - 1,
            created_at=self.created_at,
            is_paused=self.is_paused,
        )


class RouterStatusItem(msgspec.Struct, frozen=True, kw_only=True):
    """How a router fares. The counts are those of the broker since it started."""

    router: RouterItem
    state: RouterState
    lag: int | None
    """Offsets of the sources that are not known to be routed; `null` where the broker cannot say."""
    routed: int
    left_out: int
    """Records that the rule does not take."""
    lost: dict[str, int]
    """Offsets for which the sources have no readable record any more, by the reason."""
    failures: dict[str, str]
    """By partition, as `shop/orders[3]`, what keeps it waiting."""

    @classmethod
    def of(cls, status: RouterStatus) -> Self:
        """The status as it is sent."""
        return cls(
            router=RouterItem.of(status.router),
            state=status.state,
            lag=status.lag,
            routed=status.routed,
            left_out=status.left_out,
            lost=status.lost,
            failures=status.failures,
        )

    def status(self) -> RouterStatus:
        """The status that was sent."""
        return RouterStatus(
            router=self.router.spec(),
            state=self.state,
            lag=self.lag,
            routed=self.routed,
            left_out=self.left_out,
            lost=self.lost,
            failures=self.failures,
        )


class RouterList(msgspec.Struct, frozen=True):
    """Some routers, by name. With `after`, ask again for those behind that name; without, there are no more."""

    routers: list[RouterStatusItem]
    after: str | None = None


def _sent(value: bytes) -> str | CodedBytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return CodedBytes(value)


def _received(value: str | CodedBytes) -> bytes:
    return value.b64 if isinstance(value, CodedBytes) else value.encode()
