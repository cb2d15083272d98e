"""What flows through Forebay: records, positions in a stream, the named gaps of a stream, and the offsets of groups.

Knows nothing of bytes on disk. Records come in bulk, so they are structs without
garbage-collector tracking and never dataclasses. Ends are exclusive everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from forebay.errors import Invalid

Bytes: TypeAlias = bytes | bytearray | memoryview
Headers: TypeAlias = tuple[tuple[str, bytes | None], ...]
HeadersLike: TypeAlias = Mapping[str, bytes | None] | Iterable[tuple[str, bytes | None]]
"""Headers as a caller may give them."""

OFFSET_MAX = 2**63 - 1
TAG_BYTES_MAX = 1024
HEADERS_MAX = 1000
COPIED_HEADERS_MAX = 1200
"""Of a record that Forebay itself copies, and adds headers of its own to: a dead letter, or a routed record."""
TIMESTAMP_MAX = 2**62


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record as a reader gets it. `timestamp` is in milliseconds since 1970 UTC.

    A value of `None` is not an empty value; `headers` without any is the empty tuple.
    """

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    tag: str | None = None
    headers: Headers = ()


class Reason(enum.IntEnum):
    """Why a range of offsets holds no readable record. The numbers are stored on disk."""

    LOST = 1
    """May have been acknowledged; a crash took it."""
    SKIPPED = 2
    """Never used for an acknowledged record; not a loss."""
    DAMAGED = 3
    """Stored and acknowledged, but the bytes are no longer whole."""
    CAP = 4
    """Evicted by a size or count limit."""
    TTL = 5
    """Evicted by age."""
    HISTORY = 6
    """Catalogued: held by the history, not by this log. No reader of a topic is ever shown it."""
    DELETED = 7
    """Deleted by a user. Readers step over it in silence; it only keeps pages without a gap."""


class Gap(NamedTuple):
    """Offsets `[start, stop)` hold no readable record, for the given reason."""

    start: int
    stop: int
    reason: Reason

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop}) {self.reason.name.lower()}"


class Run(NamedTuple):
    """One append of an idempotent producer inside a frame: `count` records, in order. Producer 0 means none."""

    count: int  # type: ignore[assignment]
    producer: int
    sequence: int


class Position(NamedTuple):
    """Where to start reading: an offset, a time, or one of the two ends."""

    kind: str
    value: int = 0

    @classmethod
    def at_offset(cls, offset: int) -> Position:
        """Start at this offset."""
        return cls("offset", offset)

    @classmethod
    def at_time(cls, timestamp_ms: int) -> Position:
        """Start at the first record whose timestamp is at or after this time."""
        return cls("time", timestamp_ms)


EARLIEST = Position("earliest")
LATEST = Position("latest")


Start: TypeAlias = Position | int | Mapping[int, Position | int]
"""Where to begin: in every partition, or in each named one at a place of its own."""
OnGap: TypeAlias = Callable[[int, Gap], None]
"""Called with the partition and the gap, at its place in the stream."""
CommitAck: TypeAlias = Literal["durable", "cached"]
"""When a commit of a group returns: once it is stored, or at once."""


class Offsets(NamedTuple):
    """The watermarks of one partition; `next` is the next offset to assign."""

    earliest: int
    evict_floor: int
    durable: int
    exported: int
    next: int


class GroupOffset(NamedTuple):
    """Where a group stands in a partition: everything below `offset` is done, `lag` records are not.

    `end` and `lag` are `None` where this process cannot ask the partition how far it has come; `failure` says why.
    """

    topic: str
    partition: int
    offset: int
    end: int | None
    note: str
    failure: str | None = None

    @property
    def lag(self) -> int | None:
        return None if self.end is None else max(0, self.end - self.offset)


class DeliveredRecord(msgspec.Struct, frozen=True, gc=False):
    """A record that a subscription has delivered to a consumer, to be acknowledged; for the `attempt`th time."""

    record: Record
    attempt: int


class SpentReason(enum.StrEnum):
    """How the last delivery of a record ended that was delivered as often as it may be."""

    NACK = "nack"
    """The consumer refused it."""
    ACK_TIMEOUT = "ack_timeout"
    """The consumer did not answer in time."""
    CONSUMER_LEFT = "consumer_left"
    """The consumer left, or was closed, without an answer."""
    PROCESS_ENDED = "process_ended"
    """The process ended, or lost the partition, before the answer was stored."""


class LetterPlace(NamedTuple):
    """Where a dead letter lies in the dead-letter topic."""

    partition: int
    offset: int


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A record that a subscription could not get done, in the dead-letter topic."""

    place: LetterPlace
    """Where it lies there."""
    topic: str
    """The topic it comes from, as `namespace/topic`."""
    subscription: str
    record: Record
    """The record as it was, with its partition and offset in that topic."""
    attempts: int
    """How often it was delivered."""
    reason: SpentReason
    error: str | None
    """What a consumer said last about it (`nack(error=…)`)."""
    at: int
    """When it was put there, in milliseconds since 1970 UTC."""
    is_vouched: bool = False
    """Whether its seal says that a subscription has sent it. Else some caller may have appended it, headers and all."""


class LetterPage(NamedTuple):
    """Some dead letters, by partition and offset."""

    letters: list[DeadLetter]
    has_more: bool
    """Whether there are more behind the last one."""


class PeekedPage(NamedTuple):
    """The first records of a subscription that are not done."""

    records: list[Record]
    has_more: bool
    """Whether there are more that are not done."""


class DeliveryState(enum.StrEnum):
    """What a subscription does in a partition."""

    IDLE = "idle"
    """No consumer is attached in this process."""
    DELIVERING = "delivering"
    PAUSED = "paused"
    BLOCKED = "blocked"
    """A record is spent and `on_spent` is `block`: nothing more is delivered until the operator moves it."""
    DEAD_LETTERS_DELETED = "dead_letters_deleted"
    """The dead-letter topic is not there: spent records wait until it is created again."""
    DEAD_LETTERS_FULL = "dead_letters_full"
    """The dead-letter topic has no room: spent records wait."""
    DEAD_LETTERS_ELSEWHERE = "dead_letters_elsewhere"
    """Another process owns the dead-letter topic: spent records wait."""
    DEAD_LETTERS_FAILING = "dead_letters_failing"
    """Spent records cannot be appended for another reason, which `failure` says, and wait."""


class SubscriptionLag(NamedTuple):
    """How far a subscription has come in a partition, which ends at `end`: everything below `cursor` is done.

    Of what lies between, `done_above` offsets are done, and consumers hold `held` records. `delayed` ones were not
    done and wait to be delivered again; `spent` ones were delivered as often as they may be.
    """

    partition: int
    cursor: int
    end: int
    done_above: int = 0
    held: int = 0
    delayed: int = 0
    spent: int = 0
    state: DeliveryState = DeliveryState.IDLE
    failure: str | None = None
    """What keeps spent records from the dead-letter topic, and the next step."""
    dead_letters: int = 0
    """How many records went to the dead-letter topic since consumers are attached here."""
    lost: int = 0
    """Offsets that no consumer got since consumers are attached here, of a topic with dispatch `non_reliable`."""

    @property
    def lag(self) -> int:
        """How many offsets are not done."""
        return max(0, self.end - self.cursor - self.done_above)


class OffsetRange(NamedTuple):
    """Records of one append in one partition: `count` of them, at consecutive offsets from `first` on."""

    partition: int
    first: int
    count: int  # type: ignore[assignment]


class RecordPage(NamedTuple):
    """Records and gaps of one partition from an offset on, and where the partition stood when they were read."""

    records: Sequence[Record]
    gaps: Sequence[Gap]
    """Ranges from the asked offset to `next` without readable records. Deleted records leave no gap here."""
    next: int
    """Where to ask again. It also moves where there were only gaps, or deleted records."""
    head: int
    """The end of what can be read."""
    earliest: int
    evict_floor: int

    @property
    def caught_up(self) -> bool:
        """Whether there was nothing more to read."""
        return self.next >= self.head


def check_offset(offset: int) -> None:
    """Raise `Invalid` unless this is a number an offset can be."""
    if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset <= OFFSET_MAX:
        raise Invalid(f"offset is {offset!r}; allowed: 0 to {OFFSET_MAX}")
