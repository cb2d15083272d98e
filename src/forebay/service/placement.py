"""Where a shard is served: by this broker, by another one, or for now by none.

The service asks before every call that needs a shard. The answer comes from memory. One broker without others is
`Alone`; a cluster has a placement of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from forebay.topics import ShardRef


@dataclass(frozen=True, slots=True)
class Here:
    """This broker serves the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class There:
    """Another broker serves the shard."""

    broker: str
    """The id of its data directory."""
    url: str
    """Where its clients reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nowhere:
    """No broker serves the shard now."""

    why: str
    retry_after_s: float
    """When to ask again."""


Placed: TypeAlias = Here | There | Nowhere

HERE: Final = Here()


class Placement(Protocol):
    """Which broker serves which shard."""

    def of(self, ref: ShardRef) -> Placed:
        """Who serves the shard, as far as this broker knows. No input or output: event loops ask for every call."""


class Alone:
    """The placement of a broker that has no others: every shard is served here."""

    def of(self, ref: ShardRef) -> Placed:
        """See `Placement`."""
        return HERE
