"""What callers of one shard were answered, in order, and what a reader gets: the two sides that every promise compares.

Pure values; knows nothing of files. A history is kept as notes in the trace of a simulated disk, or
by hand; each value of a history is used once, so that a record says which append it came from.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.pages import Page
from forebay.records import Gap
from forebay.topics import Durability

NOTE = "history"
PAGES_MAX = 100_000


class AppendOutcome(enum.Enum):
    """What the caller of an append was answered."""

    PENDING = "pending"
    ACKED = "acked"
    REFUSED = "refused"
    INDETERMINATE = "indeterminate"


class Begun(NamedTuple):
    """An append was handed over."""

    attempt: int
    values: tuple[bytes, ...]
    caller: str = ""
    producing: tuple[int, int] | None = None


class AppendAnswered(NamedTuple):
    """The caller of an append got its answer."""

    attempt: int
    outcome: AppendOutcome
    offset: int = -1


class Synced(NamedTuple):
    """Everything below `end` was said to be durable."""

    end: int


class ReadSeen(NamedTuple):
    """A reader was shown these records."""

    records: tuple[tuple[int, bytes], ...]


class Crashed(NamedTuple):
    """The process died; with the power gone, so did what was not synced."""

    power: bool


class Troubled(NamedTuple):
    """The disk failed a call: until it heals, what class `memory` had only queued may not be shown."""


class Healed(NamedTuple):
    """The log writes again: what class `memory` had queued is there too."""


class Lost(NamedTuple):
    """The log said by an error that what class `memory` had acknowledged in `[start, stop)` is gone."""

    start: int
    stop: int


Event = Begun | AppendAnswered | Synced | ReadSeen | Crashed | Troubled | Healed | Lost


@dataclass(slots=True)
class Append:
    """One append and its outcome."""

    begun: Begun
    outcome: AppendOutcome = AppendOutcome.PENDING
    offset: int = -1
    durable: bool = False
    """Said to be durable, by its class or by a later sync."""
    troubled: bool = False
    lost: bool = False
    """Said to be lost."""
    crashes: list[Crashed] = field(default_factory=list)
    """What has happened since it was acknowledged."""

    @property
    def records(self) -> list[tuple[int, bytes]]:
        """Where each of its values should be."""
        return [(self.offset + place, value) for place, value in enumerate(self.begun.values)]


class ShardEvents:
    """The events of one shard of one durability class."""

    def __init__(self, durability: Durability, events: Iterable[Event] = ()) -> None:
        self.durability = durability
        self.appends: dict[int, Append] = {}
        self.acked: list[Append] = []
        self.seen: dict[int, bytes] = {}
        self.contradictions: list[str] = []
        """Two readings that showed different records at one offset."""
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """One more thing happened."""
        match event:
            case Begun():
                self.appends[event.attempt] = Append(event)
            case AppendAnswered():
                self._answered(event)
            case Synced(end):
                for append in self.acked:
                    append.durable |= self._is_held(append) and append.offset + len(append.begun.values) <= end
            case ReadSeen(records):
                for offset, value in records:
                    if self.seen.setdefault(offset, value) != value:
                        self.contradictions.append(f"offset {offset} showed {self.seen[offset]!r}, then {value!r}")
            case Crashed():
                for append in self.acked:
                    append.crashes.append(event)
            case Troubled() | Healed() | Lost():
                self._befall(event)

    def _befall(self, event: Troubled | Healed | Lost) -> None:
        for append in self.acked:
            if isinstance(event, Lost):
                append.lost |= event.start <= append.offset < event.stop
            else:
                append.troubled = isinstance(event, Troubled)

    def _is_held(self, append: Append) -> bool:
        """Whether a sync that returns now speaks for the append, also for one that trouble has kept in the queue."""
        return self.must_survive(append) or (append.troubled and not append.crashes and not append.lost)

    def _answered(self, answered: AppendAnswered) -> None:
        append = self.appends[answered.attempt]
        append.outcome, append.offset = answered.outcome, answered.offset
        if answered.outcome is AppendOutcome.ACKED:
            append.durable = self.durability is Durability.FSYNC
            self.acked.append(append)

    def with_outcome(self, outcome: AppendOutcome) -> list[Append]:
        """The appends that ended like this."""
        return [append for append in self.appends.values() if append.outcome is outcome]

    def must_survive(self, append: Append) -> bool:
        """Whether an acknowledged append may under no circumstances be missing now."""
        if append.durable:
            return True
        if self.durability is Durability.DISK:
            return not any(crash.power for crash in append.crashes)
        return not append.crashes and not append.troubled and not append.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A shard read from `start` to its head: records and gaps in the order in which they came."""

    start: int
    steps: tuple[tuple[int, bytes | None] | Gap, ...]
    end: int
    next: int
    """The offset that the next append would get."""

    @property
    def records(self) -> list[tuple[int, bytes | None]]:
        """Offset and value of each record."""
        return [(step[0], step[1]) for step in self.steps if not isinstance(step, Gap)]

    @property
    def gaps(self) -> list[Gap]:
        """The named gaps."""
        return [step for step in self.steps if isinstance(step, Gap)]


def read_everything(read: Callable[[int], Page], next_offset: int, start: int = 0) -> Reading:
    """Pull pages from `start` until one is empty."""
    steps: list[tuple[int, bytes | None] | Gap] = []
    offset = start
    for _ in range(PAGES_MAX):
        page = read(offset)
        steps += sorted([*_records(page), *page.events], key=lambda step: step[0])
        if page.next == offset:
            return Reading(start=start, steps=tuple(steps), end=offset, next=next_offset)
        offset = page.next
    raise AssertionError(f"a reading did not end within {PAGES_MAX} pages; it stands at offset {offset}")


def _records(page: Page) -> list[tuple[int, bytes | None]]:
    return [(batch.base + place, value) for batch in page.batches for place, value in enumerate(batch.values())]
