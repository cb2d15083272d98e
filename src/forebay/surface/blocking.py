"""The surface for calls that return when they are done. Errors are those of `forebay.errors`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, Unpack

from forebay.bulk import BackfillPlan, BackfillState, BulkLoad, LoadBatch, LoadSegment, LoadTarget
from forebay.errors import ForebayError
from forebay.records import (
    EARLIEST,
    LATEST,
    CommitAck,
    DeadLetter,
    DeliveredRecord,
    GroupOffset,
    HeadersLike,
    LetterPlace,
    OffsetRange,
    Offsets,
    OnGap,
    Position,
    Record,
    RecordPage,
    Start,
    SubscriptionLag,
)
from forebay.routing import RouterSpec, RouterStatus, RuleOptions
from forebay.topics import (
    SubscriptionChanges,
    SubscriptionOptions,
    SubscriptionSpec,
    TopicChanges,
    TopicLimits,
    TopicName,
    TopicSpec,
)

if TYPE_CHECKING:
    import pyarrow as pa

T_co = TypeVar("T_co", covariant=True)

PAGE_RECORDS = 10_000
PAGE_BYTES = 1024 * 1024
PAGE_LOADS = 1_000
UNACKED_MAX = 1_000
SESSION_TIMEOUT_MS = 30_000


class Stream(Protocol[T_co]):
    """An iterator that may be left and entered again, also after an error, and goes on where it was."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __next__(self) -> T_co: ...

    def close(self) -> None:
        """End the stream; harmless when repeated."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Ack(Protocol):
    """One record on its way: the append was queued and not waited for."""

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""

    def result(self, timeout: float | None = None) -> int:
        """Wait for the offset, or the error that the append failed with; `Indeterminate` if the time is up."""


class BatchAck(Protocol):
    """Many records on their way, those of each partition all together or not at all."""

    @property
    def done(self) -> bool:
        """Whether the outcome is known in every partition."""

    @property
    def ranges(self) -> Sequence[OffsetRange]:
        """What is acknowledged by now, a range for each partition."""

    @property
    def failures(self) -> Mapping[int, ForebayError]:
        """The partitions that are known by now to have failed, and why."""

    def result(self, timeout: float | None = None) -> Sequence[OffsetRange]:
        """Wait for every partition; the ranges, or the error if any has failed. `Indeterminate` if the time is up."""


class Reader(Protocol):
    """A name for the cursors of one topic: how far it has come in each partition survives restarts and moves."""

    @property
    def name(self) -> str:
        """What it is called."""

    def offset(self, partition: int = 0) -> int | None:
        """Everything below is done; `None` before the first acknowledgement."""

    def note(self, partition: int = 0) -> str:
        """What was noted beside the cursor."""

    def ack(self, record: Record, note: str = "") -> int:
        """This record, and all before it in its partition, are done."""

    def ack_up_to(
        self,
        offset: int,
        partition: int = 0,
        note: str = "",
        *,
        ack: CommitAck = "durable",
        expected: int | None = None,
    ) -> int:
        """Everything below `offset` is done; where the cursor stands on return. It never goes back."""

    def reset(self, position: Position | int = EARLIEST, partition: int = 0, note: str = "") -> int:
        """Set the cursor, also to an earlier place; the offset it stands for now."""

    def forget(self) -> None:
        """Remove every cursor of this reader."""

    def read(
        self, *, start: Position = EARLIEST, partition: int | None = None, on_gap: OnGap | None = None
    ) -> Stream[Record]:
        """What is not done yet, up to the end as it is now; from `start` where nothing was acknowledged."""

    def follow(
        self,
        *,
        start: Position = EARLIEST,
        partition: int | None = None,
        timeout: float | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """What is not done yet, and then new records as they come."""


class Group(Protocol):
    """A consumer group: a reader of its name in every topic that it commits in."""

    @property
    def name(self) -> str:
        """What it is called."""

    def commit(
        self,
        topic: str | TopicName,
        offset: int,
        partition: int = 0,
        *,
        note: str = "",
        ack: CommitAck = "durable",
        expected: int | None = None,
    ) -> int:
        """Everything below `offset` is done; where the group stands on return. With `expected`, only from there."""

    def fetch(self, topic: str | TopicName, partition: int = 0) -> int | None:
        """Everything below is done; `None` if the group has never committed there."""

    def note(self, topic: str | TopicName, partition: int = 0) -> str:
        """What was noted with the last commit."""

    def offsets(self) -> list[GroupOffset]:
        """Where the group stands in every topic that it has committed in, and how far each has come."""

    def reset(self, topic: str | TopicName, position: Position | int, partition: int | None = None) -> dict[int, int]:
        """Set the group's cursor in a partition, or in all of them, also to an earlier place; where each stands now."""

    def delete(self) -> int:
        """Forget every cursor of the group; how many there were."""


class BulkLoads(Protocol):
    """Bulk loads into one topic: segments that were staged beside the log come in everywhere at once, or nowhere.

    Stage rows, or write segments into the store that `target` names; `offer` them all under one id; `attach`, and
    `wait` until the load is over. A program that ends anywhere in between repeats all of it under another id, or the
    same calls with the same segments.
    """

    def target(self, load_id: str) -> LoadTarget:
        """Where the segments of a load with this id have to lie. Nothing is recorded."""

    def stage(self, load_id: str, batch: pa.RecordBatch, partition: int = 0) -> Sequence[LoadSegment]:
        """Write rows as segments of the load, for callers that do not reach the store; what to offer then."""

    def offer(
        self,
        load_id: str,
        segments: Iterable[LoadSegment],
        *,
        timeout: float | None = None,
        generation: int | None = None,
        batch: LoadBatch | None = None,
    ) -> BulkLoad | None:
        """Have the owners of the partitions attach these segments, all of them or none; how far the load is.

        It is given up if it is not attached everywhere within `timeout` seconds. `Conflict` if the topic has other
        partitions than at `generation`. With `batch`, the load that brings the batch: an earlier one that is not over
        goes first; `None` if the topic has the batch already. Harmless when repeated.
        """

    def get(self, load_id: str) -> BulkLoad:
        """How far a load has come; `UnknownLoad` if it was never offered to this topic."""

    def page(self, *, after: str | None = None, limit: int = PAGE_LOADS) -> tuple[list[BulkLoad], str | None]:
        """Loads by id, and the id to go on after if there are more."""

    def attach(self, load_id: str) -> BulkLoad:
        """Attach a load now where that can be done; how far it is then."""

    def wait(self, load_id: str, timeout: float) -> BulkLoad:
        """How far a load is, once it is over or so many seconds have passed."""

    def abandon(self, load_id: str) -> BulkLoad:
        """Give a load up: no reader ever sees any of it. `Conflict` if it is committed; harmless when repeated."""

    def backfill(self, backfill_id: str) -> BackfillState:
        """How far a backfill has come, also one that has not begun."""

    def begin_backfill(self, backfill_id: str, plan: BackfillPlan) -> BackfillState:
        """Have the id stand for these rows for ever; how far it is. `Conflict` if it stands for others.

        Then offer its loads one after the other, each as the batch of its number. Harmless when repeated.
        """


class Routers(Protocol):
    """Rules that move records from topics to a topic, each once. The process that owns the topics runs them."""

    def create(
        self,
        name: str,
        *,
        sources: Iterable[str | TopicName],
        destination: str | TopicName,
        start: Position = LATEST,
        **rule: Unpack[RuleOptions],
    ) -> RouterSpec:
        """Define a router: from `start` on, records of the sources go to the destination, each once.

        `Conflict` if there is a router of this name, `Invalid` if records could come back to where they came from.
        """

    def alter(self, name: str, **rule: Unpack[RuleOptions]) -> RouterSpec:
        """Give a router a new rule, as a whole, for the records that are routed from now on."""

    def pause(self, name: str) -> RouterSpec:
        """Have a router wait."""

    def resume(self, name: str) -> RouterSpec:
        """Have a router go on where it stopped."""

    def delete(self, name: str) -> None:
        """Remove a router. What it has routed stays."""

    def all(self) -> list[RouterSpec]:
        """Every router, by name."""

    def get(self, name: str) -> RouterSpec:
        """The router of this name; `UnknownRouter` if there is none."""

    def status(self, name: str) -> RouterStatus:
        """How a router fares."""

    def statuses(self) -> list[RouterStatus]:
        """How every router fares, by name."""


class Consumer(Protocol):
    """One consumer of a subscription: takes records and acknowledges each. Attached by `with` or its first `take`."""

    def take(self, records_max: int = 100, *, wait_s: float = 0.0) -> list[DeliveredRecord]:
        """Up to `records_max` records that are due; waits for the first of them up to `wait_s` seconds."""

    def each(self, *, wait_s: float | None = None) -> Iterator[DeliveredRecord]:
        """Records one by one as they come; ends when none came for `wait_s` seconds."""

    def ack(self, *done: DeliveredRecord) -> int:
        """These records are done; how many of them counted."""

    def ack_cumulative(self, last: DeliveredRecord) -> int:
        """This record and all before it in its partition are done. In modes `exclusive` and `failover` alone."""

    def nack(self, *failed: DeliveredRecord, delay_ms: int | None = None, error: str | None = None) -> int:
        """These could not be done, and are delivered again later. `error` says why: it stands in the dead letter."""

    @property
    def lost(self) -> int:
        """How many offsets no consumer got since this one was attached: of a topic with dispatch `non_reliable`."""

    def close(self) -> None:
        """Leave; what was not acknowledged is due for other consumers. Harmless when repeated."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class DeadLetters(Protocol):
    """The dead letters in a topic: records that subscriptions delivered as often as they may be, and did not get done.

    Of one subscription (`Subscription.dead_letters`), or all that lie in the topic (`SubscribableTopic.dead_letters`).
    """

    @property
    def topic(self) -> str:
        """The topic that they lie in, as `namespace/topic`."""

    def letters(self, records_max: int = 100, *, after: LetterPlace | None = None) -> list[DeadLetter]:
        """Up to `records_max` dead letters, by partition and offset; with `after`, those behind that place.

        No more than about 4 MiB of them: to see all, go on behind the last one until none comes.
        """

    def get(self, offset: int, partition: int = 0) -> DeadLetter:
        """The dead letter at a place; `Invalid` if there is none."""

    def replay(
        self,
        places: Iterable[LetterPlace] | None = None,
        *,
        to: str | TopicName | None = None,
        origins: Iterable[str | TopicName] = (),
    ) -> int:
        """Append dead letters to the topic they come from, or to another one, and remove them; how many.

        All that are here now, or those at `places`. Each exactly once, also if this is killed and run again. A record
        that is not `is_vouched` is replayed only if `origins` names the topic it says it comes from: any writer of this
        topic may have made it. Else it is passed over; `Invalid` if it is one of `places`.
        """

    def purge(self, places: Iterable[LetterPlace] | None = None) -> int:
        """Delete the dead letters that are here now, or those at `places`; how many."""


class Subscription(Protocol):
    """A reader of a topic whose records are delivered to consumers, and delivered again until they are acknowledged."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def spec(self) -> SubscriptionSpec:
        """The definition of the subscription."""

    def consumer(
        self, name: str = "", *, unacked_max: int = UNACKED_MAX, session_timeout_ms: int = SESSION_TIMEOUT_MS
    ) -> Consumer:
        """A consumer, which is given at most `unacked_max` records that it has not acknowledged.

        A broker that gets no request of it for `session_timeout_ms` (100 ms to an hour) gives what it holds to others:
        its process was killed, or cannot reach the broker. One of an embedded log is there as long as its process.
        """

    def consumers(self) -> list[str]:
        """The names of the consumers that are attached, in the order in which they came."""

    def lag(self) -> list[SubscriptionLag]:
        """How far it has come in each partition, and how much is not done."""

    def peek(self, records_max: int = 10, *, partition: int | None = None) -> list[Record]:
        """The first records that are not done, without taking them: no more than about 4 MiB of them."""

    def pause(self) -> None:
        """Deliver nothing more, also after a restart, until `resume`."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def alter(self, **changes: Unpack[SubscriptionChanges]) -> SubscriptionSpec:
        """Change how it delivers; its definition on return. What is not named stays as it is.

        Limits hold from now on, also for consumers that are attached. `on_spent` and `dead_letter_topic` change only
        while no consumer is attached; else `Conflict`. The mode cannot be changed.
        """

    def seek(self, position: Start = LATEST, *, partition: int | None = None) -> dict[int, int]:
        """Go on at another place, also an earlier one; where each partition stands now. While none is attached."""

    def dead_letters(self) -> DeadLetters:
        """Its records that were delivered as often as they may be; `Invalid` unless `on_spent` is `dead_letter`."""

    def flush(self) -> None:
        """On return every acknowledgement before is stored."""

    def delete(self) -> None:
        """Remove the subscription with its cursors. While none is attached."""


class TopicHandle(Protocol):
    """One topic: append to it, read and follow it, look records up, delete them."""

    @property
    def name(self) -> str:
        """`namespace/topic`."""

    @property
    def spec(self) -> TopicSpec:
        """The definition of the topic."""

    @property
    def partitions(self) -> int:
        """How many partitions the topic has."""

    def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        headers: HeadersLike | None = None,
        timestamp: int | None = None,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> int:
        """Append one record; its offset, once the topic's durability class holds for it."""

    def append_nowait(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        headers: HeadersLike | None = None,
        timestamp: int | None = None,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> Ack:
        """Queue one record; its acknowledgement comes later. `Unavailable` at once if the queue is full."""

    def append_many(
        self,
        values: Iterable[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        tags: Sequence[str | None] | str | None = None,
        headers: Sequence[HeadersLike | None] | None = None,
        timestamps: Sequence[int] | int | None = None,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
        atomic: bool = True,
    ) -> Sequence[int]:
        """Append many records, in each partition as one atomic append; their offsets in the order given."""

    def append_many_nowait(
        self,
        values: Iterable[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        tags: Sequence[str | None] | str | None = None,
        headers: Sequence[HeadersLike | None] | None = None,
        timestamps: Sequence[int] | int | None = None,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> BatchAck:
        """Queue many records, in each partition as one atomic append. `Unavailable` at once if no queue has room."""

    def append_arrow(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> Sequence[int]:
        """As `append_many`, by column."""

    def append_arrow_nowait(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> BatchAck:
        """As `append_many_nowait`, by column."""

    def read(
        self,
        start: Start = EARLIEST,
        *,
        stop: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """The records from `start` up to the end as it is now, or to offset `stop`; partition after partition."""

    def read_arrow(
        self,
        start: Start = EARLIEST,
        *,
        stop: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[pa.RecordBatch]:
        """As `read`, by column."""

    def page(
        self, partition: int, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> RecordPage:
        """Records and gaps of one partition from an offset on, and where to ask again."""

    def follow(
        self,
        start: Start = LATEST,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """The records from `start` on and then new ones as they come; ends after `timeout` seconds without any."""

    def read_by_key(
        self,
        key: bytes,
        *,
        history: bool = False,
        start: Start = EARLIEST,
        limit: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """The newest live record with this key; with `history` all of them, oldest first."""

    def read_by_tag(
        self,
        tag: str,
        *,
        start: Start = EARLIEST,
        limit: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """The live records with this tag, partition after partition."""

    def offsets(self, partition: int = 0) -> Offsets:
        """The watermarks of a partition."""

    def offset_at_time(self, timestamp: int, partition: int = 0) -> int | None:
        """The offset of the first record at or after the time (ms); `None` if there is none."""

    def last_sequence(self, producer: int, partition: int = 0) -> int | None:
        """The newest acknowledged sequence of an idempotent producer; `None` if it is not known."""

    def resolve(self, position: Position | int, partition: int = 0) -> int:
        """The offset that a position stands for now."""

    def delete_by_key(self, key: bytes, *, partition: int | None = None) -> int:
        """Delete the records with this key; how many there were."""

    def delete_by_tag(self, tag: str, *, partition: int | None = None) -> int:
        """Delete the records with this tag; how many there were."""

    def delete_by_offset(self, start: int, stop: int, partition: int | None = None) -> int:
        """Delete the records with offsets in `[start, stop)`; how many there were."""

    def delete_before(self, offset: int, partition: int | None = None) -> int:
        """Delete the records below `offset`; how many there were."""

    def flush(self) -> None:
        """On return everything appended so far is synced, whatever the durability class."""

    def reader(self, name: str) -> Reader:
        """A reader of this name."""


class SubscribableTopic(TopicHandle, Protocol):
    """A topic of a log that serves subscriptions."""

    def subscribe(self, name: str, *, start: Start = LATEST, **options: Unpack[SubscriptionOptions]) -> Subscription:
        """The subscription of this name, created if it is not there: its first records are those from `start` on."""

    def subscription(self, name: str) -> Subscription:
        """The subscription of this name; `UnknownSubscription` if there is none."""

    def delete_subscription(self, name: str) -> None:
        """Remove the subscription of this name with its cursors, also one whose definition cannot be read."""

    def subscriptions(self) -> list[SubscriptionSpec]:
        """The definitions of all subscriptions of the topic, by name."""

    def dead_letters(self) -> DeadLetters:
        """The dead letters in this topic, of whichever subscriptions."""


class Log(Protocol):
    """Topics in one place. Close it, or use it in a `with` statement."""

    def create_topic(
        self,
        name: str | TopicName,
        *,
        partitions: int = 1,
        durability: str | None = None,
        engine: str | None = None,
        compression: str = "none",
        exist_ok: bool = False,
        **limits: Unpack[TopicLimits],
    ) -> TopicHandle:
        """Create a topic and return it; `Conflict` if it exists, unless `exist_ok`."""

    def topic(self, name: str | TopicName) -> TopicHandle:
        """A topic that exists; else `UnknownTopic`."""

    def topics(
        self, prefix: str = "", *, after: str | TopicName | None = None, limit: int | None = None
    ) -> list[TopicSpec]:
        """The definitions of topics, by name: all, or a page of those that start with `prefix`, after `after`."""

    def alter_topic(
        self, name: str | TopicName, *, allow_loss: bool = False, **changes: Unpack[TopicChanges]
    ) -> TopicSpec:
        """Change a topic while it is used; its definition on return."""

    def delete_topic(self, name: str | TopicName) -> None:
        """Delete a topic with all its records: from the return on it is unknown."""

    def loads_of(self, name: str | TopicName) -> BulkLoads:
        """Bulk loads into one topic; `Unsupported` where no topic takes one."""

    def group(self, name: str) -> Group:
        """The consumer group of this name; it need not exist yet."""

    def groups(self) -> list[str]:
        """The names of all groups and readers that have committed anywhere."""

    def close(self) -> None:
        """End in order. Harmless when repeated."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
