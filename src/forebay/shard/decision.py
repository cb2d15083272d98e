"""Where does a shard go on? A pure decision from the facts of its log and its recorded state.

Does no I/O, so that every row of the table can be tested by itself. The result is logged and shown.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from forebay.errors import Conflict, UnknownTopic
from forebay.format.descriptor import Phase, ShardState
from forebay.records import Gap, Reason
from forebay.topics import Durability


class Source(enum.StrEnum):
    """What the next offset follows from."""

    EMPTY = "empty"
    LOCAL = "local continuity"
    CATALOG = "catalog"


class LogFacts(Protocol):
    """What a decision needs to know of the local log."""

    @property
    def is_empty(self) -> bool: ...

    @property
    def end(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def reserved_end(self) -> int: ...

    @property
    def identity(self) -> str: ...

    @property
    def clean(self) -> bool: ...

    @property
    def torn_bytes(self) -> int: ...

    @property
    def damage(self) -> list[Gap]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecision:
    """How a shard was opened: its next offset, why, and what was found on the way."""

    next_offset: int
    source: Source
    exact: bool
    """The log's end is known to the record; no gap was needed."""
    clean: bool = False
    gap: Gap | None = None
    torn_bytes: int = 0
    """Bytes behind the last whole frame, never acknowledged, set aside."""
    damage: tuple[Gap, ...] = ()

    def __str__(self) -> str:
        parts = [f"next offset {self.next_offset} by {self.source}"]
        parts.append("after a clean stop" if self.clean else "exact" if self.exact else "tail not exact")
        if self.gap is not None:
            parts.append(f"gap {self.gap}")
        if self.torn_bytes:
            parts.append(f"{self.torn_bytes} torn bytes set aside")
        parts += [f"damage {gap}" for gap in self.damage]
        return ", ".join(parts)


def decide(
    facts: LogFacts, state: ShardState | None, *, name: str, durability: Durability, identity: str, holder: str
) -> RecoveryDecision:
    """The decision for a shard whose recorded state, before it was acquired now, is `state`.

    `identity` names the present boot and mount, `holder` the present directory.
    """
    if state is None:
        if not facts.is_empty:
            raise Conflict(
                f"{name} has a local log that ends at {facts.end}, but the metadata store does not know the shard: "
                "restore the metadata store, or move the shard's directory away to start anew"
            )
        return RecoveryDecision(next_offset=0, source=Source.EMPTY, exact=True)
    if state.phase is Phase.DELETING:
        raise UnknownTopic(f"{name} is being deleted")
    if facts.is_empty:
        return _without_log(state)
    if not _is_mine(facts, state, holder):
        raise Conflict(
            f"{name}: the local log is of epoch {facts.epoch}, but epoch {state.epoch} was held by {state.holder}: "
            "records may lie elsewhere; open the directory that held it last"
        )
    return _continue_log(facts, durability, identity)


def _is_mine(facts: LogFacts, state: ShardState, holder: str) -> bool:
    """Whether nobody else can have written since the newest state frame of the local log.

    An epoch that this directory acquired without writing anything leaves no frame, so all epochs since
    `holder_since` count as its own.
    """
    return facts.epoch == state.epoch or (state.holder == holder and facts.epoch >= state.holder_since)


def _without_log(state: ShardState) -> RecoveryDecision:
    if state.reserved_end == 0:
        return RecoveryDecision(next_offset=0, source=Source.EMPTY, exact=True)
    gap = Gap(0, state.reserved_end, Reason.LOST)
    return RecoveryDecision(next_offset=state.reserved_end, source=Source.CATALOG, exact=False, gap=gap)


def _continue_log(facts: LogFacts, durability: Durability, identity: str) -> RecoveryDecision:
    exact = (
        facts.clean or durability is Durability.FSYNC or (durability is Durability.DISK and facts.identity == identity)
    )
    next_offset = facts.end if exact else max(facts.end, facts.reserved_end)
    gap = Gap(facts.end, next_offset, Reason.LOST) if next_offset > facts.end else None
    return RecoveryDecision(
        next_offset=next_offset,
        source=Source.LOCAL,
        exact=exact,
        clean=facts.clean,
        gap=gap,
        torn_bytes=facts.torn_bytes,
        damage=tuple(facts.damage),
    )
