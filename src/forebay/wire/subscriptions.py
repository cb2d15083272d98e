"""What requests and answers about subscriptions hold: one struct for each, for server and client alike.

Offsets are named by partition: `{"0": [17, 18], "2": [4]}`.
"""

from __future__ import annotations

from typing import Annotated, Final, Self, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from forebay.decoders import decoder
from forebay.errors import Unavailable
from forebay.records import (
    OFFSET_MAX,
    DeadLetter,
    DeliveredRecord,
    DeliveryState,
    LetterPage,
    LetterPlace,
    PeekedPage,
    SpentReason,
    SubscriptionLag,
)
from forebay.topics import (
    PARTITIONS_MAX,
    OnSpent,
    SubscriptionChanges,
    SubscriptionMode,
    SubscriptionOptions,
    SubscriptionSpec,
)
from forebay.wire.items import RecordItem, item_of, record_of

PULL_RECORDS: Final = 100
PULL_RECORDS_MAX: Final = 1_000
PULL_BYTES: Final = 1024 * 1024
PULL_BYTES_MAX: Final = 64 * 1024 * 1024
DELAY_MS_MAX: Final = 2**40
NAME_CHARACTERS_MAX: Final = 256

PartitionNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=PARTITIONS_MAX)]
RecordOffset: TypeAlias = Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
OffsetLists: TypeAlias = dict[PartitionNumber, list[RecordOffset]]
Places: TypeAlias = Annotated[
    str | dict[PartitionNumber, str],
    Meta(description="`earliest`, `latest`, an offset or a time; or one for each partition that is named."),
]


class SubscriptionPut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a subscription is to be created. One that exists is fine if it has the options that are given here."""

    start: Places = "latest"
    """Where a new one begins."""
    mode: SubscriptionMode | UnsetType = UNSET
    window_records_max: int | UnsetType = UNSET
    ack_timeout_ms: int | UnsetType = UNSET
    backoff_min_ms: int | UnsetType = UNSET
    backoff_max_ms: int | UnsetType = UNSET
    deliveries_max: int | UnsetType | None = UNSET
    on_spent: OnSpent | UnsetType = UNSET
    dead_letter_topic: str | UnsetType = UNSET

    def options(self) -> SubscriptionOptions:
        """The options that are given."""
        fields = msgspec.structs.asdict(self)
        del fields["start"]
        return {name: value for name, value in fields.items() if value is not UNSET}  # type: ignore[return-value]


class SubscriptionPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to change in a subscription, also while consumers are attached; what is left out stays as it is."""

    window_records_max: int | UnsetType = UNSET
    ack_timeout_ms: int | UnsetType = UNSET
    backoff_min_ms: int | UnsetType = UNSET
    backoff_max_ms: int | UnsetType = UNSET
    deliveries_max: int | UnsetType | None = UNSET
    """`null`: any number of times."""
    on_spent: OnSpent | UnsetType = UNSET
    """While no consumer is attached."""
    dead_letter_topic: str | UnsetType = UNSET
    """While no consumer is attached."""

    def changes(self) -> SubscriptionChanges:
        """The changes that are given."""
        fields = msgspec.structs.asdict(self)
        return {name: value for name, value in fields.items() if value is not UNSET}  # type: ignore[return-value]


class SubscriptionItem(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of a subscription."""

    name: str
    topic: str
    topic_id: str
    subscription_id: str
    """Its incarnation: another one after it was deleted and created again."""
    mode: SubscriptionMode
    window_records_max: int
    ack_timeout_ms: int
    backoff_min_ms: int
    backoff_max_ms: int
    deliveries_max: int | None
    on_spent: OnSpent
    dead_letter_topic: str | None
    is_paused: bool
    is_ending: bool
    created_at: int

    @classmethod
    def of(cls, spec: SubscriptionSpec) -> Self:
        """The definition as it is sent."""
        fields = msgspec.structs.asdict(spec)
        topic = f"{fields.pop('namespace')}/{fields.pop('topic')}"
        return cls(topic=topic, **fields)

    def spec(self) -> SubscriptionSpec:
        """The definition that was sent."""
        fields = msgspec.structs.asdict(self)
        namespace, _, topic = fields.pop("topic").partition("/")
        return SubscriptionSpec(namespace=namespace, topic=topic, **fields)


class SubscriptionList(msgspec.Struct, frozen=True):
    """All subscriptions of a topic, by name."""

    subscriptions: list[SubscriptionItem]


class Seeking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a subscription is to go on, also an earlier place."""

    to: Places
    partition: PartitionNumber | None = None
    """Left out: in every partition, or in those that `to` names."""


class SoughtPlaces(msgspec.Struct, frozen=True):
    """Where a subscription stands now in each partition that was moved."""

    offsets: dict[int, int]


class LagItem(msgspec.Struct, frozen=True, kw_only=True):
    """How far a subscription has come in a partition: everything below `cursor` is done, `lag` offsets are not."""

    partition: int
    cursor: int
    end: int
    lag: int
    done_above: int
    held: int
    delayed: int
    spent: int
    state: DeliveryState
    failure: str | None
    """What keeps spent records from the dead-letter topic."""
    dead_letters: int
    """Records that went to the dead-letter topic since consumers are attached."""
    lost: int
    """Offsets that no consumer got since consumers are attached: where records are delivered at most once."""

    @classmethod
    def of(cls, lag: SubscriptionLag) -> Self:
        """The lag as it is sent."""
        return cls(lag=lag.lag, **lag._asdict())

    def lag_of(self) -> SubscriptionLag:
        """The lag that was sent."""
        fields = msgspec.structs.asdict(self)
        del fields["lag"]
        return SubscriptionLag(**fields)


class LagPage(msgspec.Struct, frozen=True):
    """How far a subscription has come, partition by partition."""

    partitions: list[LagItem]


class PeekedRecords(msgspec.Struct, frozen=True):
    """The first records that are not done: as many as were asked for, and no more than about 1 MiB of them."""

    records: list[RecordItem]
    has_more: bool = False
    """Whether there are more that are not done."""

    @classmethod
    def of(cls, page: PeekedPage) -> Self:
        """The records as they are sent."""
        return cls([item_of(record) for record in page.records], page.has_more)


class ConsumerNames(msgspec.Struct, frozen=True):
    """The consumers that are attached, the one that came first first."""

    consumers: list[str]


class ConsumerPut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a consumer is attached."""

    name: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] | None = None
    """What others see of it; left out: its id."""
    unacked_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 1_000
    """It is given at most so many records that it has not acknowledged."""
    session_timeout_ms: Annotated[int, Meta(ge=100, le=3_600_000)] = 30_000
    """Without a request for so long it has left, and what it held is due for others."""


class AttachedConsumer(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer that is attached."""

    consumer: str
    name: str
    subscription_id: str
    session_timeout_ms: int


class Pulling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a consumer has done, and how much it takes next."""

    ack: OffsetLists = {}
    """These are done."""
    ack_up_to: dict[PartitionNumber, RecordOffset] = {}
    """These, and everything before them in their partition, are done: in modes `exclusive` and `failover`."""
    nack: OffsetLists = {}
    """These could not be done, and come again."""
    delay_ms: Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)] | None = None
    """After so long; left out: after the back-off of the subscription."""
    error: str | None = None
    """Why: it stands in the dead letter, if it comes to that."""
    max: Annotated[int, Meta(ge=1, le=PULL_RECORDS_MAX)] = PULL_RECORDS
    bytes_max: Annotated[int, Meta(ge=1, le=PULL_BYTES_MAX)] = PULL_BYTES
    """About; one record at least."""
    wait_ms: Annotated[int, Meta(ge=0)] = 0
    """How long to wait for a first record."""
    sequence: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    """Counts the pulls of the consumer: one whose answer was lost is repeated with its number, and loses nothing."""


class DeliveredItem(msgspec.Struct, frozen=True, kw_only=True):
    """A record that was delivered for the `attempt`th time."""

    record: RecordItem
    attempt: int

    @classmethod
    def of(cls, delivered: DeliveredRecord) -> Self:
        """The record as it is sent."""
        return cls(record=item_of(delivered.record), attempt=delivered.attempt)

    def delivered(self) -> DeliveredRecord:
        """The record that was sent."""
        return DeliveredRecord(record_of(self.record), self.attempt)


class PulledRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Records that the consumer holds from now on, and how many of its answers counted."""

    records: list[DeliveredItem]
    acked: int = 0
    nacked: int = 0
    lost: int = 0
    """Offsets that no consumer got since this one is attached: where records are delivered at most once."""


class Acking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is done. Empty, it says that the consumer is still there."""

    offsets: OffsetLists = {}
    up_to: dict[PartitionNumber, RecordOffset] = {}
    """Everything up to these, too: in modes `exclusive` and `failover`."""


class Nacking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What could not be done, and comes again: after `delay_ms`, or the back-off of the subscription."""

    offsets: OffsetLists
    attempts: dict[PartitionNumber, list[Annotated[int, Meta(ge=0, le=2**53)]]] | None = None
    """The `attempt` of each of them, in the same order: one that was delivered again since is not refused.

    So a call whose answer was lost may be repeated.
    """
    delay_ms: Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)] | None = None
    error: str | None = None
    """Why: it stands in the dead letter, if it comes to that."""
    is_unused: bool = False
    """They were not looked at, and are due at once, as if they had not been delivered. Needs `attempts`."""


class AnswerCount(msgspec.Struct, frozen=True):
    """How many records an answer counted for: those that the consumer held."""

    counted: int


_SAME_FIELDS: Final = ("topic", "subscription", "attempts", "reason", "error", "at", "is_vouched")
"""What a dead letter has under the same name when it is sent."""


class LetterItem(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter: the record as it was, where it lies, and how it came to be there."""

    partition: int
    """Where it lies in the dead-letter topic."""
    offset: int
    topic: str
    """Where it comes from."""
    subscription: str
    record: RecordItem
    """With its partition and offset in the topic that it comes from."""
    attempts: int
    reason: SpentReason
    error: str | None
    at: int
    """When it was put there, in milliseconds since 1970 UTC."""
    is_vouched: bool = False
    """Whether its seal says that a subscription has sent it. Else any writer of the topic may have."""

    @classmethod
    def of(cls, letter: DeadLetter) -> Self:
        """The letter as it is sent."""
        fields = {name: getattr(letter, name) for name in _SAME_FIELDS}
        return cls(**letter.place._asdict(), record=item_of(letter.record), **fields)

    def letter(self) -> DeadLetter:
        """The letter that was sent."""
        fields = {name: getattr(self, name) for name in _SAME_FIELDS}
        return DeadLetter(place=LetterPlace(self.partition, self.offset), record=record_of(self.record), **fields)


class LetterRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a dead letter lies."""

    partition: PartitionNumber = 0
    offset: RecordOffset


class LetterList(msgspec.Struct, frozen=True):
    """Some dead letters, by partition and offset: as many as were asked for, and no more than about 1 MiB of them.

    With `after`, ask again for those behind that place (`after_partition`, `after_offset`); without, there are no more.
    """

    letters: list[LetterItem]
    after: LetterRef | None = None

    @classmethod
    def of(cls, page: LetterPage) -> Self:
        """The letters as they are sent."""
        after = LetterRef(**page.letters[-1].place._asdict()) if page.has_more else None
        return cls([LetterItem.of(letter) for letter in page.letters], after)


class Replaying(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which dead letters to replay, and where to."""

    places: list[LetterRef] | None = None
    """Left out: all that are here now."""
    to: str | None = None
    """Another topic than the one each comes from."""
    origins: list[str] = []
    """Records that nothing vouches for are replayed only if they say that they come from one of these topics."""
    origin: str | None = None
    """Only those of a subscription: of this topic,"""
    subscription: str | None = None
    """and of this name."""


class Purging(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which dead letters to delete."""

    places: list[LetterRef] | None = None
    """Left out: all that are here now."""
    origin: str | None = None
    """Only those of a subscription: of this topic,"""
    subscription: str | None = None
    """and of this name."""


class LetterCount(msgspec.Struct, frozen=True):
    """How many dead letters were replayed or deleted."""

    letters: int


_PULLED: Final = decoder(PulledRecords)


def decode_pulled(body: bytes) -> tuple[list[DeliveredRecord], int]:
    """The records of the answer to a pull, and how many were lost; `Unavailable` if it was damaged on its way."""
    try:
        pulled = _PULLED.decode(body)
        return [item.delivered() for item in pulled.records], pulled.lost
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(f"the answer is not sound: {error}; ask again") from error
