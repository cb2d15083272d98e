"""Every error Forebay raises on purpose, few and sorted by what the caller should do.

    ForebayError
    ├── Invalid               the call is wrong: change it; nothing was done
    │   ├── UnknownTopic      no such topic (a successful look-up said so)
    │   ├── UnknownLoad       no such bulk load into the topic
    │   ├── UnknownRouter     no such router
    │   ├── UnknownSubscription   no such subscription of the topic
    │   ├── UnknownConsumer   a server knows no such consumer: its session is over
    │   ├── OffsetOutOfRange  an offset that the partition does not have (yet)
    │   ├── TooLarge          more bytes or records than one call may bring
    │   ├── Unauthenticated   a server asks for a token, and none that is valid was given
    │   ├── Forbidden         the token is valid, and does not allow this
    │   └── Unsupported       right in form, not offered here; the message names the way out
    │       └── UnsupportedFormat   bytes of a newer version: upgrade, nothing is corrupt
    ├── Conflict              it clashes with what is there (exists already, sequence out of step)
    ├── Unavailable           not now: try again; nothing was done, no offset was used
    │   ├── Throttled         a limit on what goes on at the same time, or in a second, is reached
    │   ├── NotReady          a server recovers its shards
    │   ├── Full              a cap of the topic leaves no room, and it refuses new records
    │   └── Moved             another owner has the shard; the message says who
    ├── Indeterminate         it may or may not have happened, at most once: read to find out
    ├── Closed                this handle has ended (closed, forked, interpreter exit)
    │   └── Fenced            a newer owner took the shard over; this one must stop
    └── Corrupt               bytes are not what was written: run "forebay verify"
        └── DataLoss          a stream met a lost or damaged range and has no `on_gap`

The message is for people and says the next step. The values in it that a program may act on are attributes, each `None`
where it does not apply: `topic` and `partition` of every error, and those of the classes below. Message and attributes
survive copying, and pickling to and from another process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal, NamedTuple, Self, TypeAlias


class PartitionOutcomes(NamedTuple):
    """What an append to several partitions came to in each of them."""

    ranges: tuple[tuple[int, int, int], ...]
    """What stands: a partition, the first offset there, and how many records."""
    failures: Mapping[int, ForebayError]
    """By partition, why its records are not there; after `Indeterminate` they may be."""
    records: tuple[tuple[int, int | None], ...] = ()
    """Of each record in the order given: its partition, and its offset if it stands. Empty where no one asked."""


class ForebayError(Exception):
    """The root of the tree above. `topic` is `namespace/topic`; `partition` is the number of the partition."""

    def __init__(self, *args: object, topic: object = None, partition: int | None = None, shard: object = None) -> None:
        """The message, and what it is about. `shard` names topic and partition at once: `shop/orders[3]`.

        All fields stand in `__dict__`, which exceptions take along when they are copied or pickled: a subclass
        takes its fields as keywords with defaults, for it is made again from its positional arguments alone.
        """
        super().__init__(*args)
        if shard is not None:
            topic, _, number = str(shard).removesuffix("]").partition("[")
            partition = int(number) if number.isdecimal() else None
        self.topic = None if topic is None else str(topic)
        self.partition = partition

    @property
    def detail(self) -> dict[str, object]:
        """The attributes that apply, by name: plain values, for programs in this or another process."""
        return {name: value for name, value in vars(self).items() if value is not None and not name.startswith("_")}

    @property
    def append_outcome(self) -> PartitionOutcomes | None:
        """Of a batch that a broker has appended to several partitions, and not to all: what stands, and what failed."""
        found: PartitionOutcomes | None = vars(self).get("_append_outcome")
        return found

    def with_outcome(self, outcome: PartitionOutcomes) -> Self:
        """The same error, which says what stands of the append that it ended."""
        again = copy.copy(self)
        vars(again)["_append_outcome"] = outcome
        return again

    def restated(self, message: str) -> Self:
        """The same error, with its attributes, in other words."""
        again = copy.copy(self)
        again.args = (message,)
        return again


class Invalid(ForebayError):
    """The call itself is wrong; nothing was done."""


class UnknownTopic(Invalid):
    """There is no such topic."""


class UnknownLoad(Invalid):
    """There is no such bulk load, or it is of another topic."""


class UnknownRouter(Invalid):
    """There is no such router, or the caller may not know of it."""


class UnknownSubscription(Invalid):
    """The topic has no such subscription."""


class UnknownConsumer(Invalid):
    """A server has no such consumer of a subscription: it has left, or its session is over. Attach it again."""


class OffsetOutOfRange(Invalid):
    """The partition does not have the offset: it goes from `earliest` to `next`, which is the next one to be given."""

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        offset: int | None = None,
        earliest: int | None = None,
        next: int | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.offset = offset
        self.earliest = earliest
        self.next = next


class TooLarge(Invalid):
    """The call brings more than it may. `size` is what it brings, as far as was counted, `limit` what is allowed."""

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        size: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.size = size
        self.limit = limit


class Unauthenticated(Invalid):
    """The caller has shown no valid token. Why a token is not valid is not said."""


class Forbidden(Invalid):
    """The caller's token does not allow the call. `scope` is the one that it would need."""

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        scope: str | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.scope = scope


class Unsupported(Invalid):
    """Not offered in this configuration."""


class UnsupportedFormat(Unsupported):
    """The bytes were written by a newer version."""


ConflictKind: TypeAlias = Literal["unknown_producer", "out_of_order", "too_old", "undecided", "other_records"]
"""Why an append with a producer is refused: the partition does not know the producer, which does not begin at 0; the
sequence does not follow the producer's last one; the repeat is older than what is remembered; damage may have taken
what would decide it; or the sequence was used for other records, which are stored."""


class Conflict(ForebayError):
    """The request contradicts what is stored. `expected` is the sequence or the offset that it would not.

    `kind`, of an append with a producer, says why; see `ConflictKind`.
    """

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        producer: int | None = None,
        sequence: int | None = None,
        expected: int | None = None,
        kind: ConflictKind | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.producer = producer
        self.sequence = sequence
        self.expected = expected
        self.kind = kind


class Unavailable(ForebayError):
    """Not possible now; nothing was done."""


class Throttled(Unavailable):
    """A limit is reached. `limit` names the setting, `retry_after_s` says when to try again, if that is known."""

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        limit: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.limit = limit
        self.retry_after_s = retry_after_s


class NotReady(Unavailable):
    """A server recovers its shards. `replay_progress` goes from 0 to 1."""

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        replay_progress: float | None = None,
        shards_done: int | None = None,
        shards_total: int | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.replay_progress = replay_progress
        self.shards_done = shards_done
        self.shards_total = shards_total


class Full(Unavailable):
    """A cap of the topic leaves no room for the append."""


class Moved(Unavailable):
    """Another owner holds the shard. `holder` is the id of the data directory that has its log files, if known."""

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        holder: str | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.holder = holder


class Indeterminate(ForebayError):
    """The outcome is unknown; it happened once or not at all."""


class Closed(ForebayError):
    """The handle has ended."""


class Fenced(Closed):
    """A newer epoch owns the shard. `deleted` is true where that is because its topic was deleted."""

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        deleted: bool | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.deleted = deleted


class Corrupt(ForebayError):
    """Stored bytes are damaged or contradict each other."""


class DataLoss(Corrupt):
    """A reader met a lost or damaged range: offsets `[start, stop)`, and why they cannot be read."""

    def __init__(
        self,
        *args: object,
        topic: object = None,
        partition: int | None = None,
        shard: object = None,
        start: int | None = None,
        stop: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(*args, topic=topic, partition=partition, shard=shard)
        self.start = start
        self.stop = stop
        self.reason = reason
