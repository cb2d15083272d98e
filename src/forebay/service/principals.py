"""Who a caller is and what that caller may do: scopes on topics, by whole parts of their names.

Pure. Front-ends hand a `Principal` to the service with every call, so that one rule holds for all protocols.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from forebay.errors import Forbidden, Invalid
from forebay.topics import TopicName

EVERY_TOPIC: Final = "*"
"""The prefix that all topics have, and what belongs to no topic."""


class AccessScope(enum.StrEnum):
    """What may be done with topics. None of them includes another."""

    READ = "read"
    """Read records and offsets, follow, keep cursors of readers and groups."""
    WRITE = "write"
    """Append records."""
    DELETE = "delete"
    """End records: by offset, key or tag."""
    ADMIN = "admin"
    """Create, alter, seal, move and delete topics; with every topic also what concerns the whole broker."""

    @classmethod
    def parse(cls, text: str) -> AccessScope:
        """The scope of that name."""
        if text not in tuple(cls):
            raise Invalid(f"scope is {text!a:.80}; use one of {', '.join(cls)}")
        return cls(text)


def parse_prefix(text: str) -> str:
    """A topic prefix in its one spelling: `shop/` (a namespace), `shop/orders` (one topic) or `*` (every topic).

    A prefix covers whole parts of names: `shop/` does not cover `shop2/orders`, nor `shop/orders` `shop/orders2`.
    """
    if text == EVERY_TOPIC:
        return text
    namespace, slash, topic = text.removeprefix("/").partition("/")
    if not slash:
        raise Invalid(
            f'{text!a:.80} is not a topic prefix: write "{text:.80}/" for the topics of that namespace, '
            f'"default/{text:.80}" for one topic, or "*" for every topic'
        )
    # One part may be missing; a name that has both parts is checked as a whole.
    return str(TopicName(namespace, topic)) if topic else f"{TopicName(namespace, 'any').namespace}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller: a name for logs and quotas, and each of the scopes on all topics that one of the prefixes covers."""

    name: str
    scopes: frozenset[AccessScope]
    prefixes: frozenset[str]
    """As `parse_prefix` gives them."""
    token_id: str | None = None
    """Which of the tokens of this name was shown, for lines in the log; it is no secret."""


def may(principal: Principal, scope: AccessScope, topic: TopicName | None) -> bool:
    """Whether the caller may do this with the topic, or with no single topic (`None`): that takes every topic."""
    return scope in principal.scopes and _is_covered(principal, topic)


def check_may(principal: Principal, scope: AccessScope, topic: TopicName | None) -> None:
    """Return if the caller may; `Forbidden` names the scope that is missing, whether the topic exists or not."""
    if not may(principal, scope, topic):
        where = f"topic {topic}" if topic is not None else "the whole broker"
        raise Forbidden(
            f"{principal.name} has no scope {scope} on {where}: ask the operator for a token that has it",
            topic=topic,
            scope=str(scope),
        )


def listed(principal: Principal, topics: Iterable[TopicName]) -> list[TopicName]:
    """Those of the topics that the caller may know of: the ones on which it has any scope."""
    return [topic for topic in topics if _is_covered(principal, topic)]


class NameRange(NamedTuple):
    """Topics that lie side by side in the order of names."""

    prefix: str
    is_one: bool
    """Whether it is the topic of exactly this name, and not all that begin so."""

    def ends_before(self, name: str) -> bool:
        """Whether none of its topics comes after this name."""
        return self.prefix <= name and (self.is_one or not name.startswith(self.prefix))


def listed_ranges(principal: Principal, prefix: str) -> list[NameRange]:
    """Where the topics stand that the caller may know of and whose names begin with `prefix`: apart, and in order.

    A list of them reads these ranges alone, however many topics of others there are.
    """
    if EVERY_TOPIC in principal.prefixes:
        return [NameRange(prefix, is_one=False)]
    found = []
    for covered in sorted(principal.prefixes):
        if covered.endswith("/"):
            if covered.startswith(prefix) or prefix.startswith(covered):
                found.append(NameRange(max(covered, prefix, key=len), is_one=False))
        elif covered.startswith(prefix) and f"{covered.partition('/')[0]}/" not in principal.prefixes:
            found.append(NameRange(covered, is_one=True))
    return found


def _is_covered(principal: Principal, topic: TopicName | None) -> bool:
    prefixes = principal.prefixes
    if EVERY_TOPIC in prefixes:
        return True
    return topic is not None and (f"{topic.namespace}/" in prefixes or str(topic) in prefixes)
