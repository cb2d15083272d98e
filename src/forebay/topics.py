"""What a topic is: its name, its definition, which partition a record goes to; and what a subscription to it is.

A `TopicName` that exists is valid; the inside never checks it again. Names of users appear in
metadata keys only; files and objects are named by topic id. Knows nothing of disks or stores.
"""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple, TypedDict, TypeVar, Unpack

import msgspec
from msgspec import Meta

from forebay.decoders import converted
from forebay.errors import Conflict, Invalid, Unsupported

NAMESPACE_DEFAULT = "default"
PART_CHARACTERS_MAX = 100
PARTITIONS_MAX = 1024
ZSTD_LEVEL_DEFAULT = 1
ZSTD_LEVEL_MAX = 19
LIMIT_MAX = 2**62
COMPACT_LAG_MS = 86_400_000
WINDOW_RECORDS = 4_000
"""So many offsets, whichever of them are acknowledged, always fit into a stored cursor."""
WINDOW_RECORDS_MAX = 10_000_000
DELAY_MS_MAX = 86_400_000
DELIVERIES_MAX = 10_000

E = TypeVar("E", bound=enum.StrEnum)

_ALLOWED = f'write "topic" or "namespace/topic", each part 1 to {PART_CHARACTERS_MAX} of A-Z a-z 0-9 . _ -'
_FORBIDDEN = re.compile(r"[^A-Za-z0-9._-]")
_TOPIC_ID = re.compile(r"[0-9a-f]{32}")
_LEVEL = re.compile(r"[1-9][0-9]?")


@dataclass(frozen=True, slots=True, order=True)
class TopicName:
    """A namespace and a topic in it, both valid. `str()` gives `namespace/topic`."""

    namespace: str
    topic: str
    topic_id: str | None = field(default=None, compare=False, repr=False)
    """The topic that is meant, for a caller who means no later one of this name: that is `UnknownTopic` then."""

    def __post_init__(self) -> None:
        if self.topic_id is not None and not _TOPIC_ID.fullmatch(self.topic_id):
            raise Invalid(f"the id of a topic is {self.topic_id!a:.80}; it has 32 digits of 0-9 a-f")
        for part in (self.namespace, self.topic):
            flaw = _flaw(part)
            if flaw is not None:
                raise Invalid(f"{_shown(f'{self.namespace}/{self.topic}')} is not a topic name: {flaw}; {_ALLOWED}")

    @classmethod
    def parse(cls, text: str | TopicName) -> TopicName:
        """The name written as `text`, or `text` itself if it is a `TopicName`; `Invalid` says what is wrong with it.

        `/ns/topic` and `ns/topic` are one name; `topic` is `default/topic`.
        """
        if isinstance(text, cls):
            return text
        if not isinstance(text, str):
            raise Invalid(f"a topic name is a str or a TopicName, not {type(text).__name__}; {_ALLOWED}")
        parts = text.removeprefix("/").split("/")
        if len(parts) > 2 and "" not in parts:
            raise Invalid(f"{_shown(text)} is not a topic name: it has {len(parts)} parts; {_ALLOWED}")
        for part in parts:
            flaw = _flaw(part)
            if flaw is not None:
                raise Invalid(f"{_shown(text)} is not a topic name: {flaw}; {_ALLOWED}")
        return cls(NAMESPACE_DEFAULT, parts[0]) if len(parts) == 1 else cls(*parts)

    def means(self, topic_id: str) -> bool:
        """Whether the topic with this id is the one that is meant."""
        return self.topic_id in (None, topic_id)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.topic}"


def _flaw(part: str) -> str | None:
    """What is wrong with one part of a name, if anything."""
    if not part:
        return "it has an empty part"
    if part in (".", ".."):
        return f'a part may not be "{part}"'
    if len(part) > PART_CHARACTERS_MAX:
        return f"a part has {len(part)} characters"
    forbidden = _FORBIDDEN.search(part)
    if forbidden is not None:
        return f"character {forbidden[0]!a} (U+{ord(forbidden[0]):04X}) is not allowed"
    return None


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else f"{text[:77]}...")


@dataclass(frozen=True, slots=True, kw_only=True)
class DurabilityPolicy:
    """What a durability class asks of an engine. A new class is one more entry of `DURABILITY_POLICIES`."""

    acks_in_queue: bool = False
    """An append is acknowledged once its offset is reserved; it is written a little later, or when it is asked for."""
    writes_before_ack: bool = True
    """An append is with the operating system before it is acknowledged."""
    syncs_before_ack: bool = False
    """An append is on the disk before it is acknowledged."""

    def exact_after(self, *, clean: bool, same_boot: bool) -> bool:
        """Whether a log that was found after a stop holds everything that was acknowledged, so that it goes on there.

        `clean` if it was closed in order, `same_boot` if the machine has not stopped since it was written.
        """
        return clean or self.syncs_before_ack or (self.writes_before_ack and same_boot)


class Durability(enum.StrEnum):
    """When an append returns, and so what it survives."""

    EPHEMERAL = "ephemeral"
    """In memory only; records end with the process."""
    MEMORY = "memory"
    """Queued for the log; may survive."""
    DISK = "disk"
    """Written to the log; survives the end of the process."""
    FSYNC = "fsync"
    """Synced; survives power loss."""
    REPLICATED = "replicated"
    """In the shared store as well; survives the loss of the machine. Not offered yet."""

    @property
    def policy(self) -> DurabilityPolicy:
        """What the class asks of an engine."""
        return DURABILITY_POLICIES[self]

    @classmethod
    def parse(cls, text: str) -> Durability:
        """The class of that name; `Unsupported` for one that is not offered yet."""
        offered = tuple(member.value for member in cls if member is not cls.REPLICATED)
        if text == cls.REPLICATED:
            raise Unsupported(f'durability "replicated" is not offered yet; use one of {", ".join(offered)}')
        if text not in offered:
            raise Invalid(f"durability is {_shown(str(text))}; use one of {', '.join(offered)}")
        return cls(text)


DURABILITY_POLICIES: Final = {
    Durability.EPHEMERAL: DurabilityPolicy(writes_before_ack=False),
    Durability.MEMORY: DurabilityPolicy(acks_in_queue=True, writes_before_ack=False),
    Durability.DISK: DurabilityPolicy(),
    Durability.FSYNC: DurabilityPolicy(syncs_before_ack=True),
}


class Engine(enum.StrEnum):
    """Where the records of a topic are kept."""

    SEGMENT = "segment"
    """The log and its sealed segments."""
    MEMORY = "memory"
    """Memory alone: the class `ephemeral`."""
    ROCKSDB = "rocksdb"
    """A RocksDB database beside the log: look-ups and deletes at once, no history and no moves."""

    @classmethod
    def parse(cls, text: str) -> Engine:
        """The engine of that name."""
        if text not in tuple(cls):
            raise Invalid(f"engine is {_shown(str(text))}; use one of {', '.join(cls)}")
        return cls(text)


class OnFull(enum.StrEnum):
    """What happens at a cap of a topic."""

    DISCARD_OLD = "discard_old"
    """The oldest records are evicted."""
    REJECT_NEW = "reject_new"
    """Appends are refused until there is room."""


class Cleanup(enum.StrEnum):
    """What happens to records that a later one with the same key has superseded."""

    DELETE = "delete"
    """Nothing: they end by deletion and eviction alone."""
    COMPACT = "compact"
    """They are deleted in the background, once `compact_lag_ms` old."""


class TopicDispatch(enum.StrEnum):
    """How the subscriptions of a topic deliver its records."""

    RELIABLE = "reliable"
    """At least once: each is delivered until it is acknowledged, and how far a subscription has come is stored."""
    NON_RELIABLE = "non_reliable"
    """At most once: from now on, without a stored cursor; what a slow consumer misses is counted."""


class OnOwnerLoss(enum.StrEnum):
    """What happens to a partition whose owner is gone, with records that its directory alone has.

    Where history is shared: elsewhere no other directory can go on.
    """

    WAIT = "wait"
    """No other directory takes it over, until its own is back or an operator accepts the loss."""
    TAKE_OVER = "take_over"
    """The next write elsewhere takes it over, and what was not exported is lost."""


class TopicLimits(TypedDict, total=False):
    """How much of a topic is kept, and what of it: each partition by itself. A limit of `None` is none.

    And `dispatch`: how its subscriptions deliver; `on_owner_loss`: whether its partitions wait for an owner that is
    gone.
    """

    cap_records: int | None
    cap_bytes: int | None
    ttl_ms: int | None
    on_full: str
    cleanup: str
    compact_lag_ms: int
    dispatch: str
    on_owner_loss: str


class TopicChanges(TopicLimits, total=False):
    """What may be changed in a topic that exists."""

    partitions: int


class TopicSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of a topic, as stored. `topic_id` is its incarnation: new at every creation."""

    namespace: str
    topic: str
    topic_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)]
    generation: Annotated[int, Meta(ge=1)] = 1
    """Counts the changes of `partitions`."""
    engine: Engine = Engine.SEGMENT
    durability: Durability = Durability.DISK
    compression: str = "none"
    created_at: int = 0
    """Milliseconds since 1970 UTC."""
    cap_records: Annotated[int, Meta(ge=1)] | None = None
    """How many offsets each partition keeps."""
    cap_bytes: Annotated[int, Meta(ge=1)] | None = None
    """How many bytes of records each partition keeps."""
    ttl_ms: Annotated[int, Meta(ge=1)] | None = None
    """How long after their append records are kept."""
    on_full: OnFull = OnFull.DISCARD_OLD
    cleanup: Cleanup = Cleanup.DELETE
    compact_lag_ms: Annotated[int, Meta(ge=0)] = COMPACT_LAG_MS
    """How old a record is before it is compacted away."""
    dispatch: TopicDispatch = TopicDispatch.RELIABLE
    earlier: tuple[int, ...] = ()
    """How many partitions it had in each generation before this one: where older records of a key lie."""
    on_owner_loss: OnOwnerLoss | msgspec.UnsetType = msgspec.UNSET
    """As stored: a definition of an older version has none. `loss_policy` is what holds."""

    @property
    def partition_counts(self) -> tuple[int, ...]:
        """How many partitions it has, and had in each generation before, the newest first."""
        return (self.partitions, *reversed(self.earlier))

    @property
    def partition_generation(self) -> int:
        """The number of generations of partitions that are known."""
        return len(self.earlier) + 1

    @classmethod
    def create(
        cls,
        name: TopicName,
        *,
        topic_id: str,
        created_at: int,
        partitions: int = 1,
        engine: str | None = None,
        durability: str | None = None,
        compression: str = "none",
        cap_records: int | None = None,
        cap_bytes: int | None = None,
        ttl_ms: int | None = None,
        on_full: str = OnFull.DISCARD_OLD,
        cleanup: str = Cleanup.DELETE,
        compact_lag_ms: int = COMPACT_LAG_MS,
        dispatch: str = TopicDispatch.RELIABLE,
        on_owner_loss: str | None = None,
    ) -> TopicSpec:
        """The checked definition of a new topic. Of engine and durability, one may follow from the other."""
        if not _TOPIC_ID.fullmatch(topic_id):
            raise Invalid(f"topic id is {_shown(topic_id)}; it is 32 hexadecimal digits")
        # A truth value is a number to Python, but not to the process that reads the definition again.
        if not isinstance(partitions, int) or isinstance(partitions, bool) or not 1 <= partitions <= PARTITIONS_MAX:
            raise Invalid(f"partitions is {partitions!r} for {name}; allowed: 1 to {PARTITIONS_MAX}")
        parse_compression(compression)
        chosen_engine, chosen_durability = _engine_and_durability(engine, durability)
        lag, kept = _number("compact_lag_ms", compact_lag_ms, 0), _limit("ttl_ms", ttl_ms)
        return cls(
            namespace=name.namespace,
            topic=name.topic,
            topic_id=topic_id,
            partitions=partitions,
            engine=chosen_engine,
            durability=chosen_durability,
            compression=compression,
            created_at=created_at,
            cap_records=_limit("cap_records", cap_records),
            cap_bytes=_limit("cap_bytes", cap_bytes),
            ttl_ms=kept,
            on_full=_on_full(on_full, is_capped=cap_records is not None or cap_bytes is not None),
            cleanup=_cleanup(cleanup, lag, kept),
            compact_lag_ms=lag,
            dispatch=_choice("dispatch", TopicDispatch, dispatch),
            on_owner_loss=_on_owner_loss(on_owner_loss, chosen_engine, chosen_durability),
        )

    def altered(self, **changes: Unpack[TopicChanges]) -> TopicSpec:
        """The checked definition with these changes. Partitions can only be added: then keys hash again."""
        unknown = sorted(changes.keys() - TopicChanges.__annotations__.keys())
        if unknown:
            known = ", ".join(TopicChanges.__annotations__)
            raise Invalid(f"{unknown[0]} of a topic cannot be changed; what can: {known}")
        wanted: TopicChanges = {
            "partitions": self.partitions,
            "cap_records": self.cap_records,
            "cap_bytes": self.cap_bytes,
            "ttl_ms": self.ttl_ms,
            "on_full": self.on_full,
            "cleanup": self.cleanup,
            "compact_lag_ms": self.compact_lag_ms,
            "dispatch": self.dispatch,
            "on_owner_loss": self.loss_policy,
        }
        wanted.update(changes)
        checked = TopicSpec.create(
            self.name,
            topic_id=self.topic_id,
            created_at=self.created_at,
            engine=self.engine,
            durability=self.durability,
            compression=self.compression,
            **wanted,
        )
        if checked.partitions < self.partitions:
            raise Invalid(
                f"{self.name} has {self.partitions} partitions, and they can only be added: for {checked.partitions} "
                "copy its records into a new topic"
            )
        grown = checked.partitions > self.partitions
        return msgspec.structs.replace(
            checked,
            generation=self.generation + grown,
            earlier=(*self.earlier, self.partitions) if grown else self.earlier,
        )

    @property
    def name(self) -> TopicName:
        return TopicName(self.namespace, self.topic)

    @property
    def loss_policy(self) -> OnOwnerLoss:
        """What happens to a partition whose owner is gone with records that were not exported."""
        if isinstance(self.on_owner_loss, msgspec.UnsetType):
            return _usual_loss_policy(self.durability)
        return self.on_owner_loss

    @property
    def is_limited(self) -> bool:
        """Whether records are evicted."""
        return (self.cap_records, self.cap_bytes, self.ttl_ms) != (None, None, None)

    @property
    def ends_records(self) -> bool:
        """Whether records end by themselves, by eviction or compaction."""
        return self.is_limited or self.cleanup is Cleanup.COMPACT


def _engine_and_durability(engine: str | None, durability: str | None) -> tuple[Engine, Durability]:
    asked_engine = None if engine is None else Engine.parse(engine)
    asked = None if durability is None else Durability.parse(durability)
    in_memory = asked_engine is Engine.MEMORY or (asked_engine is None and asked is Durability.EPHEMERAL)
    if not in_memory and asked is Durability.EPHEMERAL:
        raise Invalid('durability "ephemeral" is never written to disk: leave the engine out or use engine "memory"')
    if in_memory and asked not in (None, Durability.EPHEMERAL):
        raise Invalid(
            f'engine "memory" keeps no records on disk: durability "{asked}" needs engine "segment" or "rocksdb"'
        )
    if asked_engine is Engine.ROCKSDB and asked is Durability.MEMORY:
        raise Unsupported(
            'engine "rocksdb" writes before it acknowledges: use durability "disk" or "fsync", or engine "segment"'
        )
    if in_memory:
        return Engine.MEMORY, Durability.EPHEMERAL
    return asked_engine or Engine.SEGMENT, asked or Durability.DISK


def _cleanup(text: str, lag: int, kept: int | None) -> Cleanup:
    chosen = _choice("cleanup", Cleanup, text)
    if chosen is Cleanup.COMPACT and kept is not None and lag >= kept:
        raise Invalid(
            f'ttl_ms {kept} ends every record before compact_lag_ms {lag} lets cleanup "compact" end any: choose a '
            "smaller lag, or a longer time to live"
        )
    return chosen


def _usual_loss_policy(durability: Durability) -> OnOwnerLoss:
    """Classes that write before they acknowledge wait for what was written; of the others nothing was promised."""
    return OnOwnerLoss.WAIT if durability.policy.writes_before_ack else OnOwnerLoss.TAKE_OVER


def _on_owner_loss(text: str | None, engine: Engine, durability: Durability) -> OnOwnerLoss:
    if text is None:
        return _usual_loss_policy(durability)
    policy = _choice("on_owner_loss", OnOwnerLoss, text)
    if policy is OnOwnerLoss.WAIT and engine is Engine.MEMORY:
        raise Invalid(
            'on_owner_loss "wait": records of engine "memory" end with their process, so there is nothing to '
            "wait for; leave it out"
        )
    if policy is OnOwnerLoss.TAKE_OVER and engine is Engine.ROCKSDB:
        raise Invalid(
            'on_owner_loss "take_over": records of engine "rocksdb" lie in one directory, and no other takes '
            "them over; leave it out"
        )
    return policy


def _limit(what: str, limit: int | None) -> int | None:
    return None if limit is None else _number(what, limit, 1)


def _number(what: str, number: int, least: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= LIMIT_MAX:
        raise Invalid(f"{what} is {number!r:.80}; allowed: {least} to {LIMIT_MAX}")
    return number


def _on_full(text: str, *, is_capped: bool) -> OnFull:
    policy = _choice("on_full", OnFull, text)
    if policy is OnFull.REJECT_NEW and not is_capped:
        raise Invalid('on_full "reject_new" needs a cap to be full at: give cap_records or cap_bytes')
    return policy


def _choice(what: str, choices: type[E], text: str) -> E:
    if text not in tuple(choices):
        raise Invalid(f"{what} is {_shown(str(text))}; use one of {', '.join(choices)}")
    return choices(text)


def parse_compression(text: str) -> int | None:
    """The zstd level that `none`, `zstd` or `zstd:<level>` asks for; `None` for no compression."""
    if not isinstance(text, str):
        raise Invalid(f"compression is {type(text).__name__}, not str")
    codec, colon, level = text.partition(":")
    if text == "none":
        return None
    if codec == "zstd" and not colon:
        return ZSTD_LEVEL_DEFAULT
    if codec == "zstd" and _LEVEL.fullmatch(level) and int(level) <= ZSTD_LEVEL_MAX:
        return int(level)
    allowed = f'use "none", "zstd" or "zstd:<level>" with a level of 1 to {ZSTD_LEVEL_MAX}'
    if codec in ("gzip", "lz4", "snappy"):
        raise Unsupported(f'compression "{codec}" is not offered; {allowed}')
    raise Invalid(f"compression is {_shown(text)}; {allowed}")


class SubscriptionMode(enum.StrEnum):
    """Which of its consumers a subscription delivers to."""

    EXCLUSIVE = "exclusive"
    """To its only consumer; a second one is refused."""
    FAILOVER = "failover"
    """To the consumer that came first; when that one leaves, to the next."""
    SHARED = "shared"
    """To all of them, each record to one."""
    KEY_SHARED = "key_shared"
    """To all of them, the records of a key in order and with one consumer at a time."""

    @property
    def has_one(self) -> bool:
        """Whether one consumer gets everything, so that it may acknowledge all up to a record."""
        return self in (SubscriptionMode.EXCLUSIVE, SubscriptionMode.FAILOVER)


class OnSpent(enum.StrEnum):
    """What becomes of a record that was delivered `deliveries_max` times and not acknowledged."""

    BLOCK = "block"
    """Its partition delivers nothing more until the operator moves the subscription."""
    DROP = "drop"
    """It counts as done; the loss is logged and counted."""
    DEAD_LETTER = "dead_letter"
    """It is appended to another topic, once, and then counts as done."""


class SubscriptionChanges(TypedDict, total=False):
    """What may be changed in a subscription that exists."""

    window_records_max: int
    ack_timeout_ms: int
    backoff_min_ms: int
    backoff_max_ms: int
    deliveries_max: int | None
    on_spent: str
    dead_letter_topic: str


class SubscriptionOptions(SubscriptionChanges, total=False):
    """How a subscription delivers: chosen when it is created."""

    mode: str


REDELIVERY_OPTIONS: Final = (
    "ack_timeout_ms",
    "backoff_min_ms",
    "backoff_max_ms",
    "deliveries_max",
    "on_spent",
    "dead_letter_topic",
)
"""Options of a subscription that say when and how often a record is delivered again."""


class SubscriptionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of a subscription, as stored. It is of the topic with this id, not of a later one of its name."""

    namespace: str
    topic: str
    name: str
    topic_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    subscription_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    """Its incarnation: new at every creation."""
    mode: SubscriptionMode = SubscriptionMode.EXCLUSIVE
    window_records_max: Annotated[int, Meta(ge=1, le=WINDOW_RECORDS_MAX)] = WINDOW_RECORDS
    """How far each partition is delivered ahead of its first record that is not done."""
    ack_timeout_ms: Annotated[int, Meta(ge=1, le=DELAY_MS_MAX)] = 30_000
    """A record that is not acknowledged for so long is delivered again."""
    backoff_min_ms: Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)] = 1_000
    """How long a record waits after its first nack; each further one doubles that."""
    backoff_max_ms: Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)] = 60_000
    deliveries_max: Annotated[int, Meta(ge=1, le=DELIVERIES_MAX)] | None = None
    """How often a record is delivered; `None` for any number of times."""
    on_spent: OnSpent = OnSpent.BLOCK
    dead_letter_topic: str | None = None
    """Where spent records go, as `namespace/topic`, if `on_spent` is `dead_letter`."""
    is_paused: bool = False
    is_ending: bool = False
    """Its deletion has begun: its cursors may be gone."""
    created_at: int = 0
    """Milliseconds since 1970 UTC."""

    @classmethod
    def create(
        cls,
        topic: TopicSpec,
        name: str,
        *,
        subscription_id: str,
        created_at: int,
        **options: Unpack[SubscriptionOptions],
    ) -> SubscriptionSpec:
        """The checked definition of a new subscription."""
        unknown = sorted(options.keys() - SubscriptionOptions.__annotations__.keys())
        if unknown:
            known = ", ".join(("mode", *SubscriptionChanges.__annotations__))
            raise Invalid(f"{unknown[0]} is no option of a subscription; options: {known}")
        _check_dispatch(topic, options)
        fields = {"namespace": topic.namespace, "topic": topic.topic, "name": name, "topic_id": topic.topic_id}
        try:
            spec = converted({**fields, "subscription_id": subscription_id, "created_at": created_at, **options}, cls)
        except msgspec.ValidationError as error:
            raise Invalid(f"the subscription {name} of {topic.name} cannot be so: {error}") from error
        if spec.deliveries_max is None and "on_spent" in options:
            raise Invalid(f'on_spent "{spec.on_spent}" needs deliveries_max: without it no record is spent')
        return spec._checked()

    def altered(self, topic: TopicSpec, changes: SubscriptionChanges) -> SubscriptionSpec:
        """The checked definition with these changes. With another `on_spent`, its dead-letter topic is another too."""
        if "mode" in changes:
            raise Invalid(
                f"the mode of a subscription cannot be changed, and {self.name} of {topic.name} has {self.mode}: "
                "delete it and create it again"
            )
        unknown = sorted(changes.keys() - SubscriptionChanges.__annotations__.keys())
        if unknown:
            known = ", ".join(SubscriptionChanges.__annotations__)
            raise Invalid(f"{unknown[0]} cannot be changed in a subscription; what can: {known}")
        _check_dispatch(topic, changes)
        fields: dict[str, object] = {**msgspec.structs.asdict(self), **changes}
        if "dead_letter_topic" not in changes and fields["on_spent"] != self.on_spent:
            fields["dead_letter_topic"] = None
        try:
            spec = converted(fields, SubscriptionSpec)
        except msgspec.ValidationError as error:
            raise Invalid(f"the subscription {self.name} of {topic.name} cannot be so: {error}") from error
        if spec.deliveries_max is None and spec.on_spent is not OnSpent.BLOCK:
            raise Invalid(
                f'on_spent "{spec.on_spent}" needs deliveries_max: without it no record is spent; give deliveries_max, '
                'or on_spent "block"'
            )
        return spec._checked()

    def _checked(self) -> SubscriptionSpec:
        """The same, complete; `Invalid` if its fields contradict each other."""
        if self.backoff_min_ms > self.backoff_max_ms:
            raise Invalid(f"backoff_min_ms {self.backoff_min_ms} is more than backoff_max_ms {self.backoff_max_ms}")
        return self._with_dead_letter_topic()

    def _with_dead_letter_topic(self) -> SubscriptionSpec:
        """The same, with the whole name of the topic for spent records, if there is to be one."""
        if self.on_spent is not OnSpent.DEAD_LETTER:
            if self.dead_letter_topic is not None:
                raise Invalid(f'dead_letter_topic {self.dead_letter_topic} needs on_spent "dead_letter"')
            return self
        given = self.dead_letter_topic
        name = dead_letter_name(self.namespace, self.topic, self.name) if given is None else TopicName.parse(given)
        if name == TopicName(self.namespace, self.topic):
            raise Invalid(f"spent records of {name} would come back into {name}: choose another dead_letter_topic")
        return msgspec.structs.replace(self, dead_letter_topic=str(name))

    def check_options(self, options: SubscriptionOptions) -> None:
        """`Conflict` if the subscription is not as these options would have made it."""
        for option, given in options.items():
            is_topic = option == "dead_letter_topic"
            wanted = str(TopicName.parse(given)) if is_topic and isinstance(given, str) else given
            if getattr(self, option) != wanted:
                raise Conflict(
                    f"the subscription {self.name} of {self.namespace}/{self.topic} has {option} "
                    f"{getattr(self, option)!s}, not {wanted!s:.80}: leave the option out, or "
                    + ("delete it and create it again" if option == "mode" else "alter the subscription"),
                    topic=f"{self.namespace}/{self.topic}",
                )


def _check_dispatch(topic: TopicSpec, options: SubscriptionChanges) -> None:
    """`Invalid` for options that say how records come again, where each is delivered at most once."""
    if topic.dispatch is TopicDispatch.NON_RELIABLE:
        for option in options.keys() & REDELIVERY_OPTIONS:
            raise Invalid(
                f'{option} says how records are delivered again, and {topic.name} has dispatch "non_reliable": '
                "each is delivered at most once; leave the option out"
            )


def dead_letter_name(namespace: str, topic: str, subscription: str) -> TopicName:
    """The topic for the spent records of a subscription that names none: `shop/orders.billing.dead_letters`.

    Names that are too long for that are cut, and distinguished by a hash.
    """
    name = f"{topic}.{subscription}.dead_letters"
    if len(name) > PART_CHARACTERS_MAX:
        digest = hashlib.sha256(f"{topic}/{subscription}".encode()).hexdigest()[:16]
        name = f"{topic[:40]}.{subscription[:20]}.{digest}.dead_letters"
    return TopicName(namespace, name)


def shard_id(topic_id: str, partition: int) -> str:
    """The name of one partition's shard: of its directory, its objects, its place in the engines."""
    return f"{topic_id}_{partition}"


class ShardRef(NamedTuple):
    """One partition of a topic."""

    spec: TopicSpec
    partition: int

    @property
    def id(self) -> str:
        """The name of the shard, of its directory and its objects."""
        return shard_id(self.spec.topic_id, self.partition)

    def __str__(self) -> str:
        return f"{self.spec.namespace}/{self.spec.topic}[{self.partition}]"


def refs_of(spec: TopicSpec) -> list[ShardRef]:
    """The shards of a topic."""
    return [ShardRef(spec, partition) for partition in range(spec.partitions)]
