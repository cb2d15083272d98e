"""How records get into the shards of a topic: each partition's records all together or not at all, and by itself.

Records are checked, encoded and given a partition before any is queued. Then there are three ways in: `one` and `batch`
wait until the records hold, `queue` returns once they are queued, and `queue_if_open` is for event loops and opens no
shard. Knows shards, nothing of engines or disks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from forebay.appends.producer_window import ANY_BEFORE, Recalled, is_worker, numbers_calls
from forebay.appends.queue import Producing, QueuedRecord, QueueFull, record_bytes
from forebay.appends.ticket import Ticket
from forebay.arguments import (
    checked_arrow,
    checked_bytes,
    checked_column,
    checked_header_column,
    checked_headers,
    checked_partition,
    checked_producing,
    checked_tag,
    checked_tags,
    checked_timestamp,
    checked_timestamps,
    checked_values,
)
from forebay.clock import Clock
from forebay.engines import OwnedShard
from forebay.errors import Closed, Conflict, ForebayError, Invalid, Moved, TooLarge, Unavailable
from forebay.format.columns.layout import Strip
from forebay.format.columns.rows import HEADERS, KEYS, TAGS, ColumnBytes, Columns, Row, encode_columns
from forebay.format.frame.batch import batch_of, encode_arrow, key_strip, partition_column
from forebay.partitioning import Partitioner, Partitions, placed_by, resolve_named
from forebay.records import COPIED_HEADERS_MAX, HEADERS_MAX, HeadersLike, OffsetRange
from forebay.sealed import FRAME_BYTES_LIMIT
from forebay.settings import WalSettings
from forebay.storage.acks import Ack, BatchAck, Rows, Share, failure_of, mixed, placed

if TYPE_CHECKING:
    import pyarrow as pa

_NEW: Final = tuple.__new__
"""Half the cost of calling a named tuple's class."""

FRAME_ROOM = 1024
"""What a frame needs beside its columns: head, runs, padding."""
COPY_BYTES_MAX = FRAME_BYTES_LIMIT - FRAME_ROOM
"""What an append of one that copies records may have: a router, a sender of dead letters, a replay."""
COPY_ROOM = 1024 * 1024
"""So much of the largest frame that can be read is left free by callers, for headers that a copy has more."""


class ShardNotOpen(Exception):
    """A shard must be asked to place an append, and it is not open or may wait: a thread that may wait prepares it."""


class PartitionShare(NamedTuple):
    """The records of one call that go to one partition as one append, encoded."""

    partition: int
    columns: ColumnBytes
    rows: Rows | None
    """Their places in the call; `None` for all of them."""


class Records(NamedTuple):
    """The records of one call, ready to be queued: a part for each partition, or several that follow each other."""

    parts: Sequence[PartitionShare]
    count: int  # type: ignore[assignment]
    producing: Producing | None


NO_RECORDS: Final = Records((), 0, None)


class Queueable(Protocol):
    """What can be queued in one partition, all of it or nothing."""

    @property
    def partition(self) -> int:
        """Where it goes."""

    @property
    def ticket(self) -> Ticket:
        """What the shard answers."""

    def is_slow(self, shard: OwnedShard) -> bool:
        """Whether to queue it in this shard may wait for metadata or files; see `OwnedShard.stages_slowly`."""

    def stage(self, shard: OwnedShard) -> Ticket:
        """Queue it in this shard; `QueueFull` at once if there is no room."""


class Single(NamedTuple):
    """One record that can be queued."""

    partition: int
    entry: QueuedRecord
    size: int

    @property
    def ticket(self) -> Ticket:
        """See `Queueable`."""
        return self.entry.ticket

    def is_slow(self, shard: OwnedShard) -> bool:
        """See `Queueable`."""
        return shard.stages_slowly(1)

    def stage(self, shard: OwnedShard) -> Ticket:
        """See `Queueable`."""
        return shard.stage_one(self.entry, self.size)


class Batched(NamedTuple):
    """Records of one partition that can be queued as one append."""

    partition: int
    columns: ColumnBytes
    producing: Producing | None
    ticket: Ticket

    def is_slow(self, shard: OwnedShard) -> bool:
        """See `Queueable`."""
        return shard.stages_slowly(self.columns.count)

    def stage(self, shard: OwnedShard) -> Ticket:
        """See `Queueable`."""
        return shard.stage_many(self.columns, self.producing, self.ticket)


class PreparedBatch(NamedTuple):
    """Many records that can be queued, partition by partition, and the acknowledgement of all."""

    shares: Sequence[Batched]
    ack: BatchAck


class Appender:
    """Appends to the shards of one topic. Safe for concurrent calls; the caller holds no lock of the log."""

    def __init__(
        self,
        name: str,
        settings: WalSettings,
        clock: Clock,
        partitioner: Partitioner,
        *,
        own: Callable[[int], OwnedShard],
        find: Callable[[int], OwnedShard | None],
        commit_soon: Callable[[OwnedShard], None],
    ) -> None:
        """`own` gives the shard of a partition and opens it if need be, `find` only if it is open.

        `commit_soon` has another thread commit what is queued in a shard.
        """
        self._name = name
        self._settings = settings
        self._clock = clock
        self._partitioner = partitioner
        self._own = own
        self._find = find
        self._commit_soon = commit_soon
        self._bytes_max = min(settings.frame_bytes_max, FRAME_BYTES_LIMIT - COPY_ROOM) - FRAME_ROOM

    # Records that can be queued

    def row(
        self,
        value: bytes | None,
        key: bytes | None,
        tag: str | None,
        headers: HeadersLike | None,
        timestamp: int | None,
        producer: int | None = None,
    ) -> Row:
        """One record, checked. `producer` is who appends it: a copy may have more headers."""
        return (
            value if type(value) is bytes else checked_bytes("value", value),
            key if key is None or type(key) is bytes else checked_bytes("key", key),
            None if tag is None else checked_tag(tag),
            () if headers is None else checked_headers(headers, _headers_max(producer)),
            self._clock.now_ms() if timestamp is None else checked_timestamp(timestamp),
        )

    def prepare(
        self,
        value: bytes | None,
        key: bytes | None,
        tag: str | None,
        headers: HeadersLike | None,
        timestamp: int | None,
        partition: int | None,
        producer: int | None,
        sequence: int | None,
        previous: int | None,
        *,
        open_only: bool = False,
    ) -> tuple[Ack, Single]:
        """One record, checked, and its acknowledgement; `TooLarge` if no frame can hold it.

        With `open_only` it opens no shard, for event loops: see `ShardNotOpen`.
        """
        producing = None
        if producer is not None or sequence is not None or previous is not None:
            producing = checked_producing(producer, sequence, previous)
        if partition is not None:
            checked_partition(partition)
        hashed = key if key is None else checked_bytes("key", key)
        chosen, producing = self.placed_one(hashed, partition, producing, open_only=open_only)
        ack = Ack(chosen)
        row = self.row(value, key, tag, headers, timestamp, producer)
        entry = _NEW(QueuedRecord, (*row, producing, ack))
        size = record_bytes(*row[:4])
        if size > self._bytes_max:
            self._check_size(size, producer)
        return ack, _NEW(Single, (chosen, entry, size))

    def prepare_many(
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
        partitions: Sequence[int | None] | None = None,
        open_only: bool = False,
    ) -> Records:
        """Many records, checked and encoded by partition, for callers who queue them in their own way.

        Without `atomic` in parts that fit into a frame each. `partitions` has the partition that each record names,
        `None` for one that names none. For `open_only` see `prepare`.
        """
        values = checked_values(values)
        count = len(values)
        if count == 0:
            return NO_RECORDS
        producing = checked_producing(producer, sequence, previous)
        columns = Columns(
            values=values,
            timestamps=checked_timestamps(timestamps, count, self._clock.now_ms()),
            keys=checked_column("keys", keys, count),
            tags=checked_tags(tags, count),
            headers=checked_header_column(headers, count, _headers_max(producer)),
        )
        if partition is not None:
            checked_partition(partition)
        partition, named = resolve_named(partition, _named(partitions), self._partitioner.partitions)
        chosen: int | Partitions
        if partition is not None:
            chosen = partition
        else:
            place = partial(
                Partitioner.choose_many, keys=columns.keys, count=count, producer=producer or 0, named=named
            )
            chosen, producing = self._placed(place, producing, is_keyed=columns.keys is not None, open_only=open_only)
        parts = self._parts_of(chosen, columns, producer) if atomic else self._split_parts_of(chosen, columns)
        return Records(parts, count, producing if isinstance(chosen, int) else _in_each(producing, parts))

    def prepare_arrow(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
        open_only: bool = False,
    ) -> Records:
        """The rows of a record batch, checked and encoded by partition; see `prepare_many`."""
        if checked_arrow(batch).num_rows == 0:
            return NO_RECORDS
        if partition is not None:
            checked_partition(partition)
        producing = checked_producing(producer, sequence, previous)
        partition, named = resolve_named(partition, partition_column(batch), self._partitioner.partitions)
        chosen: int | Partitions
        if partition is not None:
            chosen = partition
        else:
            keys = key_strip(batch) if self._partitioner.partitions > 1 else None
            place = partial(_choose_rows, keys=keys, count=batch.num_rows, producer=producer or 0, named=named)
            chosen, producing = self._placed(place, producing, is_keyed=keys is not None, open_only=open_only)
        parts = self._arrow_parts_of(batch, chosen)
        is_keyed = partition is None and self._partitioner.partitions > 1 and "key" in batch.schema.names
        in_several = is_keyed or named is not None
        return Records(parts, batch.num_rows, _in_each(producing, parts) if in_several else producing)

    def prepare_columns(
        self,
        columns: ColumnBytes,
        *,
        partition: int | None = None,
        producer: int | None = None,
        sequence: int | None = None,
        previous: int | None = None,
        open_only: bool = False,
    ) -> Records:
        """Records that are encoded already, as `encode_arrow` encodes them; see `prepare_many`."""
        if columns.flags & KEYS and partition is None and self._partitioner.partitions > 1:
            names = ["timestamp", "key", "value"]
            names += [name for name, flag in (("tag", TAGS), ("headers", HEADERS)) if columns.flags & flag]
            rows = batch_of(columns, base=0, epoch=0, appended_at=0).to_arrow(0, names)
            return self.prepare_arrow(
                rows,
                partition=partition,
                producer=producer,
                sequence=sequence,
                previous=previous,
                open_only=open_only,
            )
        if partition is not None:
            checked_partition(partition)
        producing = checked_producing(producer, sequence, previous)
        chosen, producing = self.placed_one(None, partition, producing, open_only=open_only)
        self._check_size(columns.size)
        return Records([PartitionShare(chosen, columns, None)], columns.count, producing)

    # Where they go

    def placed_one(
        self, key: bytes | None, partition: int | None, producing: Producing | None, *, open_only: bool = False
    ) -> tuple[int, Producing | None]:
        """Where one record goes, or records without a key that stay together; and who appends it, for the shard."""
        producer = 0 if producing is None else producing.producer
        if partition is not None or producing is None:
            return self._partitioner.choose(key, partition=partition, producer=producer), producing
        place = partial(Partitioner.choose, key=key, producer=producer)
        chosen, producing = self._placed(place, producing, is_keyed=key is not None, open_only=open_only)
        assert isinstance(chosen, int), "one record goes to one partition"
        return chosen, producing

    def _placed(
        self,
        place: Callable[[Partitioner], int | Partitions],
        producing: Producing | None,
        *,
        is_keyed: bool,
        open_only: bool,
    ) -> tuple[int | Partitions, Producing | None]:
        """Where records go for which no partition is named: `place` says so, of any number of partitions.

        An append that may be a repeat goes where its first attempt went, although partitions were added since: with
        keys if its sequence names the call, without if its producer has appended there. Appends that another
        process owns the partition of are not found.
        """
        partitioner = self._partitioner
        counts = partitioner.counts
        chosen = place(partitioner)
        if producing is None or producing.previous is not None:
            return chosen, producing
        if is_keyed and not numbers_calls(producing.producer):
            return chosen, producing
        producing = producing._replace(generation=len(counts))
        if len(counts) == 1:
            return chosen, producing
        places = [chosen, *(place(Partitioner(count)) for count in counts[1:])]
        shares = [_shares(placed) for placed in places]
        known = {
            number: found
            for number in sorted(set().union(*shares))
            if (found := self._recalled(number, producing, open_only=open_only)) is not None
        }
        if is_keyed:
            known = {number: found for number, found in known.items() if found.last >= producing.sequence}
            return places[_first_attempt(producing, shares, known)], producing
        return next((placed for placed in places if placed in known), chosen), producing

    def _recalled(self, partition: int, producing: Producing, *, open_only: bool) -> Recalled | None:
        """See `OwnedShard.recall`; `None`, too, where another process owns the partition."""
        shard = self._find(partition)
        if open_only and (shard is None or shard.stages_slowly(0)):
            raise ShardNotOpen
        try:
            shard = self._own(partition) if shard is None else shard
            try:
                return shard.recall(producing)
            except Closed as ended:
                if open_only:
                    raise ShardNotOpen from ended
                return self._next_after(partition, shard, ended).recall(producing)
        except Moved:
            return None

    # One record

    def one(self, partition: int, row: Row, producing: Producing | None) -> int:
        """Append a record; its offset once its durability class holds."""
        shard = self._own(partition)
        value, key, tag, headers, _ = row
        size = record_bytes(value, key, tag, headers)
        if size > self._bytes_max:
            self._check_size(size, None if producing is None else producing.producer)
        try:
            return shard.append(row, size, producing)
        except (QueueFull, Closed) as refused:
            entry = QueuedRecord(*row, producing, Ticket())
            shard = self._patiently(Single(partition, entry, size), shard, refused)
            return shard.acknowledge(entry.ticket)

    # Many records

    def _parts_of(self, chosen: int | Partitions, columns: Columns, producer: int | None) -> list[PartitionShare]:
        """The records by partition, each part as one append; `TooLarge` if no frame can hold one of them."""
        parts = [
            PartitionShare(number, encode_columns(some), rows) for number, some, rows in _by_partition(chosen, columns)
        ]
        for part in parts:
            self._check_size(part.columns.size, producer)
        return parts

    def _split_parts_of(self, chosen: int | Partitions, columns: Columns) -> list[PartitionShare]:
        """The records by partition, in parts that fit into a frame each and follow each other."""
        return [
            part
            for number, some, rows in _by_partition(chosen, columns)
            for part in self._split(number, some, range(len(columns.values)) if rows is None else rows)
        ]

    def _arrow_parts_of(self, batch: pa.RecordBatch, by_row: int | Partitions) -> list[PartitionShare]:
        """The rows of a record batch by partition: one gather for all of them."""
        now = self._clock.now_ms()
        if isinstance(by_row, int):
            parts = [PartitionShare(by_row, encode_arrow(batch, now), None)]
        else:
            order = np.argsort(by_row, kind="stable")
            gathered = batch.take(order)
            ends = np.cumsum(np.bincount(by_row)).tolist()
            parts = [
                PartitionShare(number, encode_arrow(gathered.slice(start, end - start), now), order[start:end])
                for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
                if start < end
            ]
        for part in parts:
            self._check_size(part.columns.size)
        return parts

    def batch(self, records: Records) -> Sequence[int]:
        """Append many records and wait for all: each partition's are queued before any of them is waited for.

        A partition whose queue is full, or whose shard is being opened again, is waited for last: it holds up no other.
        """
        staged: list[tuple[Batched, OwnedShard]] = []
        later: list[tuple[Batched, OwnedShard, QueueFull | Closed]] = []
        failures: dict[int, ForebayError] = {}
        for part in records.parts:
            share = Batched(part.partition, part.columns, records.producing, Ticket())
            try:
                shard = self._own(share.partition)
                try:
                    share.stage(shard)
                    staged.append((share, shard))
                except (QueueFull, Closed) as refused:
                    later.append((share, shard, refused))
            except ForebayError as error:
                failures[share.partition] = error
        held = self._acknowledged(staged, failures)
        for share, shard, why in later:
            try:
                taken = self._patiently(share, shard, why)
            except ForebayError as error:
                failures[share.partition] = error
            else:
                held |= self._acknowledged([(share, taken)], failures)
        ranges = [held[part.partition] for part in records.parts if part.partition in held]
        if failures:
            failure = failure_of(self._name, ranges, failures)
            if not ranges:
                raise failure
            raise failure from next(iter(failures.values()))
        return placed(records.count, zip((part.rows for part in records.parts), ranges, strict=True))

    def in_turn(self, records: Records) -> Sequence[int]:
        """Append the parts one after the other. Once the first is in, a refusal no longer means nothing was done."""
        check_turns(records)
        held: list[OffsetRange] = []
        for part in records.parts:
            try:
                first = self.batch(Records([part._replace(rows=None)], part.columns.count, records.producing))[0]
            except ForebayError as error:
                if held:
                    raise mixed(self._name, held, {part.partition: error}) from error
                raise
            held.append(OffsetRange(part.partition, first, part.columns.count))
        return placed(records.count, zip((part.rows for part in records.parts), held, strict=True))

    def prepared(self, records: Records) -> PreparedBatch:
        """The records as they can be queued, with their acknowledgement."""
        ack = BatchAck(self._name, [Share(part.partition, part.columns.count, part.rows) for part in records.parts])
        return PreparedBatch(
            [
                Batched(part.partition, part.columns, records.producing, ticket)
                for part, ticket in zip(records.parts, ack.tickets, strict=True)
            ],
            ack,
        )

    # Queueing

    def queue(self, item: Queueable) -> OwnedShard:
        """Queue it and have it committed soon, in the shard that is returned. May open the shard.

        `QueueFull` at once if there is no room.
        """
        shard = self._queued(item)
        self._soon(shard, item.ticket)
        return shard

    def queue_if_open(
        self, item: Queueable, waiting: Container[int], commit_soon: Callable[[OwnedShard], None] | None = None
    ) -> bool:
        """As `queue`, for event loops: false, with nothing queued, if the shard is not open or has to ask others first.

        `waiting` are partitions that earlier appends wait for: this one does not overtake them, even if the shard is
        open by now. A loop that commits by itself gives its own `commit_soon`.
        """
        partition = item.partition
        shard = self._find(partition) if partition not in waiting else None
        if shard is None or item.is_slow(shard):
            return False
        try:
            item.stage(shard)
        except Closed:
            return False
        self._soon(shard, item.ticket, commit_soon)
        return True

    def queue_batch(self, batch: PreparedBatch) -> BatchAck:
        """Queue each partition's records that there is room for now; raises if there is room for none."""
        queued: list[tuple[OwnedShard, Batched]] = []
        try:
            for share in batch.shares:
                try:
                    queued.append((self._queued(share), share))
                except ForebayError as error:
                    share.ticket.finish(error)
        finally:
            # Also after an interrupt (Ctrl-C): what is queued is committed.
            for shard, share in queued:
                batch.ack.note_writer(shard)
                self._soon(shard, share.ticket)
        if not queued and batch.ack.refusal is not None:
            raise batch.ack.refusal
        return batch.ack

    def _queued(self, item: Queueable) -> OwnedShard:
        shard = self._own(item.partition)
        try:
            item.stage(shard)
        except Closed as ended:
            shard = self._next_after(item.partition, shard, ended)
            item.stage(shard)
        return shard

    def commit_soon(self, shard: OwnedShard) -> None:
        """Have another thread commit what is queued in the shard."""
        self._commit_soon(shard)

    def _soon(self, shard: OwnedShard, ticket: Ticket, commit_soon: Callable[[OwnedShard], None] | None = None) -> None:
        """See that what was queued is committed."""
        if shard.is_held(ticket):
            ticket.finish()
        else:
            (commit_soon or self._commit_soon)(shard)

    # How

    def _acknowledged(
        self, staged: Sequence[tuple[Batched, OwnedShard]], failures: dict[int, ForebayError]
    ) -> dict[int, OffsetRange]:
        """Wait for what was staged; what is in, by partition. What has failed is entered in `failures`."""
        held: dict[int, OffsetRange] = {}
        for share, shard in staged:
            try:
                first = shard.acknowledge(share.ticket)
            except ForebayError as error:
                failures[share.partition] = error
            else:
                held[share.partition] = OffsetRange(share.partition, first, share.columns.count)
        return held

    def _split(self, partition: int, columns: Columns, rows: Rows) -> list[PartitionShare]:
        """The columns in parts that fit into a frame each."""
        encoded = encode_columns(columns)
        if encoded.size <= self._bytes_max:
            return [PartitionShare(partition, encoded, rows)]
        if encoded.count == 1:
            self._check_size(encoded.size)
        half = encoded.count // 2
        lower, upper = _picked(columns, range(half)), _picked(columns, range(half, encoded.count))
        return [*self._split(partition, lower, rows[:half]), *self._split(partition, upper, rows[half:])]

    def _check_size(self, size: int, producer: int | None = None) -> None:
        """`TooLarge` if no frame can hold so many bytes.

        One that copies records is bound by the format alone: what fitted into its topic must fit into the next one.
        """
        limit = self._settings.frame_bytes_max
        if size > (COPY_BYTES_MAX if is_worker(producer) else self._bytes_max):
            raise TooLarge(
                f"{size} bytes in one append to {self._name}; the limit is wal.frame_bytes_max "
                f"({limit}): send less at once, or raise the setting",
                topic=self._name,
                size=size,
                limit=limit,
            )

    def _next_after(self, partition: int, shard: OwnedShard, ended: Closed) -> OwnedShard:
        """The shard as it is open now, where one was closed before it was used; raises why, if it has moved."""
        found = self._own(partition)
        if found is shard:
            raise ended
        return found

    def _patiently(self, item: Queueable, shard: OwnedShard, refused: QueueFull | Closed) -> OwnedShard:
        """Stage again after `shard` refused, until the time limit; the shard that took it.

        While the queue is full this thread helps to write it. Where the shard has ended, the one that is open now
        is tried; it may be full, too.
        """
        deadline = self._clock.monotonic() + self._settings.append_timeout_ms / 1000
        is_second = False
        while True:
            if isinstance(refused, Closed):
                if is_second and self._clock.monotonic() >= deadline:
                    raise refused
                shard = self._next_after(item.partition, shard, refused)
            elif (left := deadline - self._clock.monotonic()) > 0:
                shard.commit_within(left)
            else:
                waited = self._settings.append_timeout_ms
                raise Unavailable(f"{self._name}: waited {waited} ms (wal.append_timeout_ms): {refused}") from refused
            is_second = True
            try:
                item.stage(shard)
            except (QueueFull, Closed) as again:
                refused = again
            else:
                return shard


def check_turns(records: Records) -> None:
    """`Invalid` if one idempotent append would become several in a partition."""
    if records.producing is not None and len(records.parts) > len({part.partition for part in records.parts}):
        raise Invalid(
            "atomic=False may split the append, but a producer's sequence names exactly one in each partition: "
            "send less at once"
        )


def _in_each(producing: Producing | None, parts: Sequence[PartitionShare]) -> Producing | None:
    """The append in each partition that a keyed batch falls into: it follows any lower sequence there.

    The caller cannot know which partitions its earlier batches fell into. A repeat finds the parts that are there.
    """
    if producing is None or producing.previous is None:
        return producing and producing._replace(previous=ANY_BEFORE)
    partitions = len({part.partition for part in parts})
    if partitions > 1:
        raise Invalid(
            f"previous is {producing.previous}, the last sequence in one partition, but the records fall into "
            f"{partitions}: name the partition, or leave previous out"
        )
    return producing


def _choose_rows(
    partitioner: Partitioner, *, keys: Strip | None, count: int, producer: int, named: Partitions | None
) -> int | Partitions:
    """The partitions of rows with these keys: one hash over the whole column."""
    if keys is None:
        return partitioner.choose_many(None, count, producer=producer, named=named)
    by_key = partitioner.choose_column(*keys, producer=producer)
    return by_key if named is None else placed_by(named, by_key)


def _shares(placed: int | Partitions) -> dict[int, int]:
    """How many records go to each partition; of a number alone, that there are some."""
    if isinstance(placed, int):
        return {placed: 0}
    numbers, counts = np.unique(placed, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _first_attempt(producing: Producing, shares: Sequence[Mapping[int, int]], known: Mapping[int, Recalled]) -> int:
    """Which of several ways to place a call its first attempt went: the first one if there was none.

    Partitions that know the call have as many of its records as that way gives them, and all of them if nothing went
    wrong. Of those that no longer remember, or never had it, the shard itself says so.
    """
    found = {number: recalled.records for number, recalled in known.items() if recalled.records is not None}
    fitting = [
        place
        for place, share in enumerate(shares)
        if all(share.get(number) in (records, 0) for number, records in found.items())
    ]
    if not fitting:
        raise Conflict(
            f"producer {producing.producer} repeats sequence {producing.sequence} with other records than before: a "
            "repeat has the same records; give a new append the next sequence",
            producer=producing.producer,
            sequence=producing.sequence,
            kind="other_records",
        )
    if not known:
        return 0
    missing = [len(share.keys() - found) for share in shares]
    forgotten = [len(known.keys() & share.keys()) - len(found) for share in shares]
    # Where two ways give each partition as many records, all of them are there: only which is which is not known.
    return min(fitting, key=lambda place: (missing[place], -forgotten[place]))


def _headers_max(producer: int | None) -> int:
    """How many headers a record may have, by who appends it."""
    return COPIED_HEADERS_MAX if is_worker(producer) else HEADERS_MAX


def _named(partitions: Sequence[int | None] | None) -> Partitions | None:
    """The partition that each record names, -1 for one that names none."""
    if partitions is None:
        return None
    return np.array([-1 if number is None else number for number in partitions], np.int64)


def _by_partition(chosen: int | Partitions, columns: Columns) -> list[tuple[int, Columns, Rows | None]]:
    """The records of each partition, and their places in the call."""
    if isinstance(chosen, int):
        return [(chosen, columns, None)]
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(chosen.tolist()):
        rows.setdefault(number, []).append(row)
    return [(number, _picked(columns, places), places) for number, places in rows.items()]


def _picked(columns: Columns, rows: Sequence[int]) -> Columns:
    """Some rows of the columns."""
    return Columns(
        values=[columns.values[row] for row in rows],
        timestamps=[int(columns.timestamps[row]) for row in rows],
        keys=None if columns.keys is None else [columns.keys[row] for row in rows],
        tags=None if columns.tags is None else [columns.tags[row] for row in rows],
        headers=None if columns.headers is None else [columns.headers[row] for row in rows],
    )
