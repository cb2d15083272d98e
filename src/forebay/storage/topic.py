"""A topic as its user holds it: append, read, follow. Chooses partitions, checks input, leaves the rest to shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, Unpack

from forebay.arguments import (
    check_page,
    checked_limit,
    checked_lookup_key,
    checked_lookup_tag,
    checked_partition,
    checked_producing,
    checked_seconds,
    checked_stop,
    checked_timestamp,
)
from forebay.clock import Clock
from forebay.engines import OwnedShard, ReadShard
from forebay.engines.seam import PAGE_BYTES, PAGE_RECORDS
from forebay.engines.unowned import UnownedShard
from forebay.errors import DataLoss, ForebayError, Indeterminate, Invalid, Unavailable
from forebay.pages import Page, Reach, record_page, shortened
from forebay.partitioning import Partitioner, partitions_of_key
from forebay.reading import Cursor, report_gap
from forebay.records import (
    EARLIEST,
    LATEST,
    HeadersLike,
    Offsets,
    OnGap,
    Position,
    Record,
    RecordPage,
    Start,
    check_offset,
)
from forebay.settings import WalSettings
from forebay.shard import RecoveryDecision, SegmentShard
from forebay.shard.deletes import DeleteBefore, DeleteKey, DeleteTag, Deletion, RangeDelete
from forebay.storage.acks import Ack, BatchAck
from forebay.storage.append import Appender
from forebay.storage.cursors import Cursors, Reader
from forebay.storage.deadletters import DeadLetters
from forebay.storage.positions import Positions, lag_end
from forebay.storage.read_ends import ReadEnds, end_of, load_status
from forebay.storage.shards import TopicShards
from forebay.storage.status import TopicStatus, partition_statuses
from forebay.storage.streams import (
    Added,
    Bounded,
    Following,
    LookupPages,
    LookupSpan,
    Stream,
    Waiting,
    as_arrow,
    as_records,
    wake,
)
from forebay.storage.subscriptions import Subscription, Subscriptions
from forebay.topics import SubscriptionOptions, SubscriptionSpec, TopicSpec

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class Topic:
    """One topic. Safe for concurrent use by threads; made by `create_topic` or `topic` of a log."""

    def __init__(
        self,
        settings: WalSettings,
        *,
        clock: Clock,
        shards: TopicShards,
        commit_soon: Callable[[OwnedShard], None],
        cursors: Cursors,
        subscriptions: Subscriptions,
        turns: Iterator[int],
    ) -> None:
        """`turns` is what all handles of the topic count records without a key by."""
        self._clock = clock
        self._shards = shards
        self._positions = Positions(shards)
        self._ends = ReadEnds()
        self._cursors = cursors
        self._subscriptions = subscriptions
        self._partitioner = Partitioner(*shards.spec.partition_counts, turns=turns)
        self.appender = Appender(
            self.name, settings, clock, self._partitioner, own=shards.own, find=shards.find, commit_soon=commit_soon
        )
        """For callers who wait in their own way."""

    @property
    def spec(self) -> TopicSpec:
        """The definition that this handle goes by."""
        return self._shards.spec

    @property
    def name(self) -> str:
        """`namespace/topic`."""
        return f"{self.spec.namespace}/{self.spec.topic}"

    @property
    def partitions(self) -> int:
        """How many partitions the topic has."""
        return self.spec.partitions

    def check_open(self) -> None:
        """`Closed` once the log of this handle is closed, and in a forked child."""
        self._shards.check_open()

    def adopt(self, spec: TopicSpec) -> None:
        """Go by this definition of the same topic from now on."""
        self._shards.spec = spec
        self._partitioner.counts = spec.partition_counts

    def __repr__(self) -> str:
        return f"<Topic {self.name}, {self.spec.partitions} partitions, {self.spec.durability}>"

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
        """Append one record and return its offset, once the topic's durability class holds for it.

        The partition follows from `key` (as in Kafka), else they take turns, unless `partition` says.
        With `producer` and `sequence` (0, 1, 2, … per partition) a repeated append gives its original offset. Sequences
        may leave numbers out if `previous` names the producer's last one in the partition, -1 for none.
        Raises `Unavailable` if nothing was done and `Indeterminate` if the outcome is unknown.
        """
        producing = None
        if producer is not None or sequence is not None or previous is not None:
            producing = checked_producing(producer, sequence, previous)
        row = self.appender.row(value, key, tag, headers, timestamp, producer)
        if partition is not None:
            checked_partition(partition)
        if producing is None:
            return self.appender.one(self._partitioner.choose(row[1], partition=partition), row, None)
        chosen, producing = self.appender.placed_one(row[1], partition, producing)
        return self.appender.one(chosen, row, producing)

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
        """Queue one record and return at once: `await` the ack, ask its `result()`, or give it a callback.

        Raises `Unavailable` at once if the queue is full.
        """
        ack, single = self.appender.prepare(
            value, key, tag, headers, timestamp, partition, producer, sequence, previous
        )
        ack.note_writer(self.appender.queue(single))
        return ack

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
        """Append many records; their offsets in the order given.

        In each partition they fall into they are one atomic append at consecutive offsets; without keys all
        go to one partition. More than `wal.frame_bytes_max` in one partition is `TooLarge`, or, with
        `atomic=False`, is split into several appends. With `producer` and `sequence` each partition's records are
        recognised by themselves, as in `append`: a repeat adds what is missing.
        """
        records = self.appender.prepare_many(
            values,
            keys=keys,
            tags=tags,
            headers=headers,
            timestamps=timestamps,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
            atomic=atomic,
        )
        return self.appender.batch(records) if atomic else self.appender.in_turn(records)

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
        """Queue many records as `append_many` and return at once: `await` the ack, ask it, or give it a callback.

        Where some partitions have room and others do not, the ack says which. Raises `Unavailable` at once if none
        has.
        """
        records = self.appender.prepare_many(
            values,
            keys=keys,
            tags=tags,
            headers=headers,
            timestamps=timestamps,
            partition=partition,
            producer=producer,
            sequence=sequence,
            previous=previous,
        )
        return self.appender.queue_batch(self.appender.prepared(records))

    def append_arrow(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> Sequence[int]:
        """Append the rows of a `pyarrow.RecordBatch`, as `append_many`, without a Python object per record.

        It has a column `value` and may have `key`, `tag`, `headers` and `timestamp`.
        """
        records = self.appender.prepare_arrow(
            batch, partition=partition, producer=producer, sequence=sequence, previous=previous
        )
        return list(self.appender.batch(records))

    def append_arrow_nowait(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
    ) -> BatchAck:
        """Queue the rows of a `pyarrow.RecordBatch` and return at once; see `append_many_nowait`."""
        records = self.appender.prepare_arrow(
            batch, partition=partition, producer=producer, sequence=sequence, previous=previous
        )
        return self.appender.queue_batch(self.appender.prepared(records))

    # Reading

    def read(
        self,
        start: Start = EARLIEST,
        *,
        stop: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """The records from `start` up to the end as it is now, or to offset `stop`; partition after partition.

        `start` is a position, or one per partition, as in `{0: 14, 2: EARLIEST}`; others are then left out. An offset
        behind the end is `Invalid`.
        A lost or damaged range raises `DataLoss` at its place, unless `on_gap(partition, gap)` takes it; the
        stream may be asked again and goes on behind it.
        """
        return Stream(Bounded(self._parts(start, stop, partition, on_gap), as_records), self.check_open)

    def page(
        self, partition: int, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> RecordPage:
        """One page of a partition from `offset` on, at least one record if there is any: about `bytes_max` of them.

        For callers who keep offsets themselves and ask again at `next`: it holds nothing open and never waits for
        appends. Gaps are in the answer and raise nothing. An offset behind the end is `Invalid`.
        """
        page, reach = self.batch_page(partition, offset, records_max=records_max, bytes_max=bytes_max)
        return record_page(page, reach, partition)

    def batch_page(self, partition: int, offset: int, *, records_max: int, bytes_max: int) -> tuple[Page, Reach]:
        """As `page`, by column: for those who send records on without an object for each."""
        place = self._shards.partition(partition)
        check_page(offset, records_max, bytes_max)
        page, reach = self._shards.ask(place, lambda shard: (shard.read(offset, bytes_max), shard.reach()))
        if offset > reach.head:
            self._positions.check_start(offset, place)
        return shortened(page, records_max), reach

    def read_cached(
        self, partition: int, offset: int, *, records_max: int = PAGE_RECORDS, bytes_max: int = PAGE_BYTES
    ) -> RecordPage | None:
        """As `page`, from memory alone; `None` where `page` has to be asked, which may read files or history.

        For event loops: it opens no shard, touches neither disk nor metadata, and waits for no thread that does. It
        is `None`, too, where there is so much that making records of it would hold the loop.
        """
        found = self.batch_page_cached(partition, offset, records_max=records_max, bytes_max=bytes_max)
        return None if found is None or found[0].holds_a_loop(records_max) else record_page(*found, partition)

    def batch_page_cached(
        self, partition: int, offset: int, *, records_max: int, bytes_max: int
    ) -> tuple[Page, Reach] | None:
        """As `batch_page`, from memory alone; see `read_cached`."""
        place = self._shards.partition(partition)
        check_page(offset, records_max, bytes_max)
        shard = self._shards.find(place)
        page = shard.read_cached(offset, bytes_max) if shard is not None else None
        if shard is None or page is None or offset > (reach := shard.reach()).head:
            return None
        return shortened(page, records_max), reach

    def read_arrow(
        self,
        start: Start = EARLIEST,
        *,
        stop: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[pa.RecordBatch]:
        """As `read`, as record batches, without a Python object per record."""
        return Stream(Bounded(self._parts(start, stop, partition, on_gap), as_arrow), self.check_open)

    def follow(
        self,
        start: Start = LATEST,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        stop: threading.Event | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """The records from `start` on and then new ones as they come, from all partitions.

        Ends when nothing came for `timeout` seconds, or soon after `stop` is set; asked again, it goes on. A
        reader that stalls costs the writer nothing and goes on where it was. Partitions that are added to the topic
        are followed from their first record on, unless partitions are named.
        """
        return self.waiting(self.following(start, partition=partition, on_gap=on_gap), timeout, stop)

    def waiting(
        self, following: Following[Record], timeout: float | None, stop: threading.Event | None
    ) -> Stream[Record]:
        """A stream for a thread that sleeps until there is more."""
        if timeout is not None:
            checked_seconds("timeout", timeout)
        checked_stop(stop)
        return Stream(Waiting(following, timeout, stop, clock=self._clock), self.check_open)

    def following(
        self,
        start: Start = LATEST,
        *,
        partition: int | None = None,
        on_gap: OnGap | None = None,
        start_of_added: Callable[[int], Position | int] | None = None,
    ) -> Following[Record]:
        """What `follow` asks again and again, for callers who wait in their own way.

        `start_of_added` says where to begin in a partition that is added: at `EARLIEST`, if nothing else is said.
        """
        cursors = [self._cursor(number, start, on_gap) for number in self._positions.chosen(start, partition)]
        if partition is not None or (isinstance(start, Mapping) and start_of_added is None):
            return Following(cursors, as_records)
        first = start_of_added or (lambda number: EARLIEST)

        def begin(number: int) -> Cursor[ReadShard]:
            return self._cursor(number, {number: first(number)}, on_gap)

        return Following(cursors, as_records, Added(lambda: self.spec.partitions, begin))

    def shard_page(self, partition: int, offset: int, bytes_max: int) -> tuple[ReadShard, object, Page]:
        """A page for readers that share it: the shard that gave it, and what had ended there before (`ended`)."""
        return self._shards.ask(partition, lambda shard: (shard, shard.ended(), shard.read(offset, bytes_max)))

    def is_served_by(self, partition: int, shard: ReadShard) -> bool:
        """Whether this shard still answers for the partition: false once it was lost, moved, deleted or opened again.

        What was read from it before may have ended since, in a way that it does not know of. For event loops: it takes
        no lock.
        """
        return self._shards.serves(partition, shard)

    def shard_if_open(self, partition: int) -> ReadShard | None:
        """The shard of a partition, if this process owns it and has it open. For event loops: it takes no lock."""
        return self._shards.find(self._shards.partition(partition))

    def on_published(self, waker: Callable[[], None], *, open_only: bool = False) -> Callable[[], None]:
        """Call `waker`, which must be quick, after each publication in the topic, until the result is called.

        With `open_only` of the partitions that this process has open: then nothing is read for it.
        """
        find = self._shards.find if open_only else self._shards.read
        found = [find(number) for number in range(self.spec.partitions)]
        return wake([shard for shard in found if shard is not None], waker)

    def acquire(self, partition: int | None = None) -> None:
        """Own a partition, or all of them, in this process from now on, as the first append to each would.

        This takes a partition over from an owner that is gone. `Unavailable` if that owner may have records that
        history lacks, unless the topic allows their loss: see "What you must know about losing a machine" in the
        README, and `Storage.take_over`. `Moved` if another process owns one, `Unsupported` on a log that is opened
        read-only.
        """
        for number in self._positions.partitions(partition):
            self._shards.own(number)

    def offsets(self, partition: int = 0) -> Offsets:
        """The watermarks of a partition: earliest, evict_floor, durable, exported, next.

        Where another directory holds the partition they are those of its history: `next` and `durable` are
        `exported`, for what lies above is known to the holder alone. Asking takes nothing over.
        """
        return self._shards.ask(partition, lambda shard: shard.offsets())

    def read_ends(self, partitions: Sequence[int] | None = None) -> list[int]:
        """Where a read of these partitions, or of all, ends now: with each bulk load in all of them, or in none."""
        chosen = range(self.spec.partitions) if partitions is None else partitions
        return self._ends.of(
            chosen,
            lambda number: self._shards.ask(number, end_of),
            lambda number, load_id: self._shards.ask(number, lambda shard: load_status(shard, load_id)),
        )

    def lag_end(self, partition: int = 0) -> int:
        """Where the lag of a reader ends: `offsets().next`, but before a gap that no record follows yet.

        After a crash of class `memory`, or a power loss, `next` lies behind everything that was reserved.
        """
        return self._shards.ask(partition, lag_end)

    def offset_at_time(self, timestamp: int, partition: int = 0) -> int | None:
        """The offset of the first record at or after the time (ms); `None` if there is none."""
        at = checked_timestamp(timestamp)
        return self._shards.ask(partition, lambda shard: shard.offset_at_time(at))

    def last_sequence(self, producer: int, partition: int = 0) -> int | None:
        """The newest acknowledged sequence of an idempotent producer; `None` if it is not known here."""
        return self._shards.ask(partition, lambda shard: shard.last_sequence(producer))

    def recovery(self, partition: int = 0) -> RecoveryDecision:
        """How the partition was recovered when it was opened; where it is not owned here, where its history ends."""
        return self._shards.ask(partition, lambda shard: shard.decision)

    def epoch(self, partition: int = 0) -> int:
        """Counts the owners of the partition; 0 where this process does not own it."""
        return self._shards.ask(partition, lambda shard: shard.epoch)

    def resolve(self, position: Position | int, partition: int = 0) -> int:
        """The offset that a position means in this partition now."""
        return self._positions.resolve(position, partition)

    def reader(self, name: str) -> Reader:
        """A reader of this name, whose place in the topic survives restarts and moves."""
        return Reader(self, name, self._cursors)

    def subscribe(self, name: str, *, start: Start = LATEST, **options: Unpack[SubscriptionOptions]) -> Subscription:
        """The subscription of this name, created if it is not there: its first records are those from `start` on.

        `mode` is `exclusive` (the default), `failover`, `shared` or `key_shared`. A record that is not acknowledged
        within `ack_timeout_ms` is delivered again; one that is refused (`nack`) after a delay of `backoff_min_ms`,
        doubled each time up to `backoff_max_ms`. After `deliveries_max` deliveries `on_spent` says what becomes of it:
        `block`, `drop` or `dead_letter`: then it goes to `dead_letter_topic`, which is made if it is missing and is
        `TOPIC.NAME.dead_letters` if none is named. Each partition is delivered up to `window_records_max` offsets ahead
        of the first record that is not done. `Conflict` if the subscription is there with other options. A reader or
        group of the same name shares its cursors: a new subscription goes on where those stand. In a topic with
        dispatch `non_reliable` nothing is stored, and each record is delivered at most once, from now on.
        """
        return self._subscriptions.open(self, name, start, options)

    def subscription(self, name: str) -> Subscription:
        """The subscription of this name; `UnknownSubscription` if there is none."""
        return self._subscriptions.get(self, name)

    def delete_subscription(self, name: str) -> None:
        """Remove the subscription of this name with its cursors; `Conflict` while a consumer is attached.

        Also one whose definition cannot be read. `UnknownSubscription` if there is none.
        """
        self._subscriptions.delete(self, name)

    def subscriptions(self) -> list[SubscriptionSpec]:
        """The definitions of all subscriptions of the topic, by name."""
        return self._subscriptions.of_topic(self.spec)

    def dead_letters(self) -> DeadLetters:
        """The dead letters in this topic, of whichever subscriptions. Other records of it are left alone."""
        return self._subscriptions.dead_letters(self)

    def starts(self, start: Start, partition: int | None = None) -> dict[int, int]:
        """The offsets that a caller means by `start` now, in the partitions it names or in all."""
        return {number: self._positions.first(number, start) for number in self._positions.chosen(start, partition)}

    def failure(self, partition: int = 0) -> str | None:
        """Why the partition refuses appends, or cannot write what class `memory` has acknowledged, if so."""
        return self._shards.ask(partition, lambda shard: shard.failure)

    def export_failure(self, partition: int = 0) -> str | None:
        """Why no more of the partition becomes history, with the next step; `None` while nothing keeps it from that.

        Only the owner of a topic on engine `segment` has an answer.
        """
        return self._shards.ask(
            partition, lambda shard: shard.export_failure if isinstance(shard, SegmentShard) else None
        )

    def status(self) -> TopicStatus:
        """How the partitions fare that this process owns and has open. Opens nothing and asks no other machine."""
        found = [self._shards.find(number) for number in range(self.spec.partitions)]
        return TopicStatus(
            name=self.name,
            partitions=self.spec.partitions,
            open=partition_statuses(shard for shard in found if shard is not None),
        )

    def flush(self) -> None:
        """On return everything appended so far is synced, whatever the durability class.

        `Unavailable` if some of it could not be written yet, `DataLoss` if acknowledged records are gone: raised once
        all partitions were tried.
        """
        errors: list[ForebayError] = []
        for number in range(self.spec.partitions):
            try:
                self._flush(number)
            except ForebayError as error:
                errors.append(error)
        if errors:
            raise next((error for error in errors if isinstance(error, DataLoss)), errors[0])

    def _flush(self, partition: int) -> None:
        shard = self._shards.read(partition)
        if isinstance(shard, UnownedShard):
            shard.refuse_if_lost()
        else:
            self._shards.ask_owned(partition, lambda shard: shard.flush())

    def rotate(self) -> None:
        """Begin a new log file in each partition that has records in its present one."""
        for number in range(self.spec.partitions):
            if not isinstance(self._shards.read(number), UnownedShard):
                self._shards.ask_owned(number, lambda shard: shard.rotate())

    # Looking up and deleting

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
        """The newest live record with exactly this key, or nothing; with `history` all of them, oldest first.

        Records before `start`, which is given as to `Topic.read`, are left out; `limit` ends the stream after so many.

        They are looked for where the hash of the key puts them, today and before partitions were added: partition
        after partition, today's last. Records that were appended to a partition of the caller's choice are found by
        naming it.

        A damaged range that may hold a record of the key, for the newest one above what is found, raises `DataLoss`
        at its place, unless `on_gap(partition, gap)` takes it; the next step goes on behind it.
        """
        wanted = checked_lookup_key(key)
        chosen = self._positions.chosen(start, partition)
        places = (
            [place for place in partitions_of_key(wanted, self.spec.partitions, self.spec.earlier) if place in chosen]
            if partition is None
            else chosen
        )
        return Stream(
            LookupPages(
                self._spans(reversed(places) if history else places, start),
                lambda place, start: self._shards.ask(
                    place, lambda shard: shard.read_by_key(wanted, start, history=history)
                ),
                partial(report_gap, str(self.spec.name), on_gap),
                limit=checked_limit(limit),
                one=not history,
            ),
            self.check_open,
        )

    def read_by_tag(
        self,
        tag: str,
        *,
        start: Start = EARLIEST,
        limit: int | None = None,
        partition: int | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """The live records with exactly this tag, up to the end as it is now; partition after partition.

        For `start`, `limit`, damaged ranges and `on_gap` see `read_by_key`.
        """
        wanted = checked_lookup_tag(tag)
        return Stream(
            LookupPages(
                self._spans(self._positions.chosen(start, partition), start),
                lambda place, start: self._shards.ask(place, lambda shard: shard.read_by_tag(wanted, start)),
                partial(report_gap, str(self.spec.name), on_gap),
                limit=checked_limit(limit),
            ),
            self.check_open,
        )

    def lookup_page(
        self,
        partition: int,
        start: Position,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        history: bool = False,
        records_max: int,
        bytes_max: int,
    ) -> tuple[Page, Reach]:
        """What a key or a tag has in one partition from `start` on, as a page: `read_by_key` or `read_by_tag`.

        For callers who ask again at `next`, which lies before everything that was not looked at: a record that only
        waits to be published, and a bulk load that is not committed yet. Gaps are in the answer and raise nothing.
        """
        place = self._shards.partition(partition)
        first = 0 if start == EARLIEST else self._positions.first(place, start)
        check_page(first, records_max, bytes_max)
        wanted_tag = None if tag is None else checked_lookup_tag(tag)
        wanted_key = b"" if tag is not None else checked_lookup_key(key)

        def look(shard: ReadShard) -> tuple[Page, Reach]:
            if wanted_tag is not None:
                page = shard.read_by_tag(wanted_tag, first, records_max=records_max, bytes_max=bytes_max)
            else:
                page = shard.read_by_key(
                    wanted_key, first, history=history, records_max=records_max, bytes_max=bytes_max
                )
            return page, shard.reach()

        return self._shards.ask(place, look)

    def _spans(self, places: Iterable[int], start: Start) -> list[LookupSpan]:
        """In which partitions to look, from where to where each reaches now."""
        whole = not isinstance(start, Mapping) and start == EARLIEST
        chosen = list(places)
        return [
            LookupSpan(
                place,
                0 if whole else self._positions.first(place, start),
                min(end, self._shards.ask(place, lambda shard: shard.published())),
            )
            for place, end in zip(chosen, self.read_ends(chosen), strict=True)
        ]

    def delete_by_key(self, key: bytes, *, partition: int | None = None) -> int:
        """Delete every record with exactly this key that is there now, in all partitions; how many there were.

        On return it holds by the durability class of the topic. If it fails, some may be deleted: repeat it. It is
        refused with `DataLoss` where a damaged range may hold such a record.
        """
        return self._delete(self._positions.partitions(partition), DeleteKey(checked_lookup_key(key)))

    def delete_by_tag(self, tag: str, *, partition: int | None = None) -> int:
        """Delete every record with exactly this tag, as `delete_by_key`."""
        return self._delete(self._positions.partitions(partition), DeleteTag(checked_lookup_tag(tag)))

    def delete_by_offset(self, start: int, stop: int, partition: int | None = None) -> int:
        """Delete the records of `[start, stop)` in a partition; how many there were."""
        check_offset(start)
        check_offset(stop)
        if stop < start:
            raise Invalid(f"the range [{start}, {stop}) ends before it begins")
        return self._delete([self._positions.only(partition)], RangeDelete(start, stop))

    def delete_before(self, offset: int, partition: int | None = None) -> int:
        """Delete everything below `offset` in a partition, which then begins there; how many records there were."""
        check_offset(offset)
        return self._delete([self._positions.only(partition)], DeleteBefore(offset))

    def _delete(self, places: Sequence[int], what: Deletion) -> int:
        # Asked of all before the first deletes: one that cannot must not leave the others half done.
        for place in places:
            self._shards.own(place)
        try:
            return sum(self._shards.ask_owned(place, lambda shard: shard.delete(what)) for place in places)
        except Unavailable as error:
            if isinstance(error.__cause__, OSError):
                raise Indeterminate(f"{error}: what was deleted stays so; repeat it") from error
            raise

    def refusal(self, partition: int) -> Unavailable | None:
        """Why this process cannot have a partition to change it, as `Moved`; `None` if it has it on return."""
        try:
            self._shards.own(self._shards.partition(partition))
        except Unavailable as error:
            return error
        return None

    def ask_owned(self, partition: int, call: Callable[[OwnedShard], T]) -> T:
        """What the shard of a partition answers that this process owns, or acquires for it."""
        return self._shards.ask_owned(partition, call)

    # How

    def _parts(
        self, start: Start, stop: int | None, partition: int | None, on_gap: OnGap | None
    ) -> list[tuple[Cursor[ReadShard], int]]:
        """Where to begin in each partition, and where it ends now."""
        if stop is not None:
            check_offset(stop)
        chosen = self._positions.chosen(start, partition, stop)
        cursors = [self._cursor(number, start, on_gap) for number in chosen]
        ends = self.read_ends(chosen)
        return [(cursor, end if stop is None else min(end, stop)) for cursor, end in zip(cursors, ends, strict=True)]

    def _cursor(self, partition: int, start: Start, on_gap: OnGap | None) -> Cursor[ReadShard]:
        name = f"{self.name}[{partition}]"
        first = self._positions.first(partition, start)
        find = self._shards.read
        return Cursor(find(partition), first, name=name, partition=partition, on_gap=on_gap, find=find)
