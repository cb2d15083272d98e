"""How a client's records get to a topic of a broker: encoded, sent once or several times, stored once.

`Appends` sends one append and waits, or queues it. Queued appends are sent in order, one request at a time, with all
single records that have come meanwhile in one request. Single records for which tasks wait go together, too, as far as
they are likely to be of one partition: those of one turn of the loop, and those that come while a request is under way.
For one event loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from forebay.appends.queue import Producing
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
from forebay.client.lanes import BY_KEY, ProducerLanes
from forebay.client.transport import HttpCall, Transport
from forebay.clock import Clock
from forebay.decoders import decoder
from forebay.errors import (
    Closed,
    Conflict,
    Forbidden,
    ForebayError,
    Full,
    Indeterminate,
    Invalid,
    Moved,
    PartitionOutcomes,
    Throttled,
    Unauthenticated,
    Unavailable,
    UnknownTopic,
    Unsupported,
)
from forebay.partitioning import partition_of_key
from forebay.records import Headers, HeadersLike, OffsetRange
from forebay.wire import bodies
from forebay.wire.bodies import MediaType
from forebay.wire.items import RecordColumns
from forebay.wire.messages import AppendedRanges

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

ARROW_RECORDS_MIN: Final = 32
"""Fewer records go as JSON: an Arrow body has a head of about a kilobyte."""
JSON_BYTES_MAX: Final = 64 * 1024
"""Larger records go as Arrow, however few: bytes that are no text take up to six times as many in JSON."""
PART_RECORDS: Final = 10_000
PART_BYTES: Final = 4 * 1024 * 1024
"""What one request brings of an append that may be split, and of single records that are sent together."""
OVERTAKE_S: Final = 0.05
"""So long a request keeps back the records for which other tasks wait; later ones are sent beside it."""
QUEUED_BYTES_MAX: Final = 64 * 1024 * 1024
RECORD_BYTES: Final = 64
"""What a record counts for in a queue beside its key and value."""
ADDRESS_BYTES_MAX: Final = 1024
"""Key and tag of a record whose value is the whole body stand in the address."""
_APPENDED: Final = decoder(AppendedRanges)
_OF_A_PARTITION: Final = (Full, Moved)
"""Why records of one partition are refused, and others with them that share a request."""
_OF_A_RECORD: Final = (Invalid,)
"""Why one record is refused, or a request that brings too many."""
_OF_ALL: Final = (UnknownTopic, Unauthenticated, Forbidden, Unsupported)
"""Why any record is refused."""


class SentRecords(NamedTuple):
    """The records of one append, checked."""

    columns: RecordColumns | pa.RecordBatch
    rows: int
    bytes: int
    partition: int | None = None
    producing: Producing | None = None
    is_keyed: bool = False
    is_one: bool = False
    """Whether the caller appends a record, and not a batch that may have only one: it gets no ranges."""

    @property
    def is_single(self) -> bool:
        """Whether it may share a request: one record, of no producer that the caller has named."""
        return self.is_one and self.producing is None


class SentAppend(NamedTuple):
    """Where the records of one append are now."""

    ranges: tuple[OffsetRange, ...]
    offsets: Sequence[int]
    """Of each record, in the order given."""


NOTHING: Final = SentAppend((), ())


# Records, checked


def one_record(
    value: bytes | None,
    key: bytes | None,
    tag: str | None,
    headers: HeadersLike | None,
    timestamp: int | None,
    partition: int | None,
    producer: int | None,
    sequence: int | None,
    previous: int | None,
) -> SentRecords:
    """One record as an append; `Invalid` says what is wrong with it."""
    checked, hashed = checked_bytes("value", value), checked_bytes("key", key)
    label, pairs = checked_tag(tag), checked_headers(headers)
    columns = RecordColumns(
        values=[checked],
        keys=None if hashed is None else [hashed],
        tags=None if label is None else [label],
        headers=[pairs] if pairs else None,
        timestamps=None if timestamp is None else [checked_timestamp(timestamp)],
    )
    if partition is not None:
        checked_partition(partition)
    producing = checked_producing(producer, sequence, previous)
    size = RECORD_BYTES + len(checked or b"") + len(hashed or b"")
    return SentRecords(columns, 1, size, partition, producing, hashed is not None, is_one=True)


def many_records(
    values: Iterable[bytes | None],
    *,
    keys: Sequence[bytes | None] | None,
    tags: Sequence[str | None] | str | None,
    headers: Sequence[HeadersLike | None] | None,
    timestamps: Sequence[int] | int | None,
    partition: int | None,
    producer: int | None,
    sequence: int | None,
    previous: int | None,
) -> SentRecords:
    """Many records as one append."""
    column = checked_values(values)
    count = len(column)
    found = checked_column("keys", keys, count)
    columns = RecordColumns(
        values=column,
        keys=found,
        tags=checked_tags(tags, count),
        headers=checked_header_column(headers, count),
        timestamps=None if timestamps is None else list(map(int, checked_timestamps(timestamps, count, 0))),
    )
    if partition is not None:
        checked_partition(partition)
    producing = checked_producing(producer, sequence, previous)
    size = RECORD_BYTES * count + sum(map(len, filter(None, column))) + sum(map(len, filter(None, found or ())))
    is_keyed = found is not None and any(key is not None for key in found)
    return SentRecords(columns, count, size, partition, producing, is_keyed)


def arrow_records(
    batch: pa.RecordBatch,
    *,
    partition: int | None,
    producer: int | None,
    sequence: int | None,
    previous: int | None,
) -> SentRecords:
    """The rows of a record batch as one append; what its columns hold, the broker checks."""
    names = checked_arrow(batch).schema.names
    if "value" not in names:
        raise Invalid(f"the batch has no column value; it has: {', '.join(names)}")
    if partition is not None:
        checked_partition(partition)
    producing = checked_producing(producer, sequence, previous)
    # Rows that name a partition are placed by the broker, as those with a key are.
    is_placed_there = "key" in names or "partition" in names
    return SentRecords(batch, batch.num_rows, batch.nbytes, partition, producing, is_placed_there)


def in_parts(records: SentRecords) -> list[SentRecords]:
    """The append as several, none too large for one request."""
    columns = records.columns
    assert isinstance(columns, RecordColumns), "a record batch is one append"
    sizes = [
        RECORD_BYTES + len(value or b"") + len(key or b"")
        for value, key in zip(columns.values, columns.keys or itertools.repeat(None), strict=False)
    ]
    parts: list[SentRecords] = []
    start = 0
    while start < records.rows:
        stop, size = start, 0
        while (
            stop < records.rows and stop - start < PART_RECORDS and (stop == start or size + sizes[stop] <= PART_BYTES)
        ):
            size += sizes[stop]
            stop += 1
        some = RecordColumns(
            values=columns.values[start:stop],
            keys=columns.keys and columns.keys[start:stop],
            tags=columns.tags and columns.tags[start:stop],
            headers=columns.headers and columns.headers[start:stop],
            timestamps=columns.timestamps and columns.timestamps[start:stop],
        )
        parts.append(records._replace(columns=some, rows=stop - start, bytes=size))
        start = stop
    if records.producing is not None and len(parts) > 1:
        raise Invalid(
            "atomic=False may split the append, but a producer's sequence names exactly one in each partition: "
            "send less at once"
        )
    return parts


# Acknowledgements


class AsyncRemoteBatchAck:
    """Many records on their way to a broker. Await it for the ranges."""

    def __init__(self, answered: asyncio.Future[SentAppend]) -> None:
        self.answered = answered

    @property
    def done(self) -> bool:
        """Whether the outcome is known in every partition."""
        return self.answered.done()

    @property
    def ranges(self) -> tuple[OffsetRange, ...]:
        """What is acknowledged by now, a range for each partition; also of an append that failed in others."""
        if self._error() is None:
            return self.answered.result().ranges if self.done and not self.answered.cancelled() else ()
        outcome = self._outcome()
        return () if outcome is None else tuple(OffsetRange(*found) for found in outcome.ranges)

    @property
    def failures(self) -> Mapping[int, ForebayError]:
        """The partitions that are known by now to have failed, and why; none where the broker did not say.

        After `Indeterminate` the records of the partition may be there, after any other error they are not.
        """
        error, outcome = self._error(), self._outcome()
        if outcome is not None:
            return outcome.failures
        return {} if error is None or error.partition is None else {error.partition: error}

    def __await__(self) -> Generator[object, None, tuple[OffsetRange, ...]]:
        found = yield from asyncio.shield(self.answered).__await__()
        return found.ranges

    def _error(self) -> ForebayError | None:
        """What it has failed with, if it has."""
        error = self.answered.exception() if self.done and not self.answered.cancelled() else None
        return error if isinstance(error, ForebayError) else None

    def _outcome(self) -> PartitionOutcomes | None:
        """What the broker has said of each partition."""
        error = self._error()
        return None if error is None else error.append_outcome


class AsyncRemoteAck:
    """One record on its way to a broker. Await it for the offset, or its error."""

    def __init__(self, answered: asyncio.Future[SentAppend]) -> None:
        self.answered = answered

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.answered.done()

    def __await__(self) -> Generator[object, None, int]:
        found = yield from asyncio.shield(self.answered).__await__()
        return found.offsets[0]


class QueuedAppend(NamedTuple):
    """An append that waits to be sent, and who is to get its outcome."""

    records: SentRecords
    answered: asyncio.Future[SentAppend]

    def succeed(self, sent: SentAppend) -> None:
        """Its records are there."""
        if not self.answered.done():
            self.answered.set_result(sent)

    def fail(self, error: BaseException) -> None:
        """Why they are not, or may not be."""
        if not self.answered.done():
            self.answered.set_exception(error)


class SendQueue:
    """Appends that wait to be sent, and are sent in order, one request at a time. For one event loop."""

    def __init__(
        self,
        send: Callable[[SentRecords], Awaitable[SentAppend]],
        clock: Clock,
        partitions: Callable[[], int],
        *,
        linger_s: float = 0.0,
        batch_records: int = PART_RECORDS,
        batch_bytes: int = PART_BYTES,
        in_flight: asyncio.Semaphore | None = None,
        overtake_s: float | None = None,
    ) -> None:
        """A request waits for `linger_s` until it is full. `in_flight` is shared by queues that may not all send.

        `partitions` says how many the topic has, as far as is known here: a key is likely to be in that of its hash.
        With `overtake_s` the order of appends does not matter: a request that has no answer for so long keeps those
        behind it back no longer. One of which every append was cancelled is ended.
        """
        self._send = send
        self._clock = clock
        self._partitions = partitions
        self._linger_s = linger_s
        self._batch_records = batch_records
        self._batch_bytes = batch_bytes
        self._in_flight = in_flight or contextlib.nullcontext()
        self._overtake_s = overtake_s
        self._overtaken: set[asyncio.Task[None]] = set()
        """Requests on their way, where others may overtake them."""
        self._queue: deque[QueuedAppend] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._is_due = asyncio.Event()
        """What is queued fills a request, or is not to wait any longer."""
        self.queued_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or on its way."""
        return self._sending is None

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, records: SentRecords) -> asyncio.Future[SentAppend]:
        """Queue an append; its outcome comes later."""
        answered: asyncio.Future[SentAppend] = asyncio.get_running_loop().create_future()
        # Its outcome may interest no one; then its error is not worth a line in the log.
        answered.add_done_callback(lambda done: done.cancelled() or done.exception())
        if not records.rows:
            answered.set_result(NOTHING)
            return answered
        self._queue.append(QueuedAppend(records, answered))
        self.queued_bytes += records.bytes
        if len(self._queue) >= self._batch_records or self.queued_bytes >= self._batch_bytes:
            self._is_due.set()
        self._sending = self._send_soon()
        return answered

    def _send_soon(self) -> asyncio.Task[None]:
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_queued())
        return self._sending

    async def drain(self) -> None:
        """Send what is queued without a pause; return when all of it has its outcome."""
        while self._queue or self._sending is not None:
            self._is_due.set()
            # Not awaited: a caller that waits here is not to be cancelled with it.
            await asyncio.wait((self._send_soon(),))

    async def _send_queued(self) -> None:
        try:
            while self._queue:
                if self._linger_s:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._is_due.wait(), self._linger_s)
                async with self._in_flight:
                    if self._overtake_s is None:
                        await self._send_group(self._next_group())
                    else:
                        await asyncio.wait((self._begin(self._next_group()),), timeout=self._overtake_s)
        except BaseException:
            # The loop ends, and its tasks with it. No append is left without an outcome.
            for queued in self._queue:
                queued.fail(Closed("the client ended before it was sent"))
            self._queue.clear()
            self.queued_bytes = 0
            raise
        finally:
            self._sending = None

    def _begin(self, group: list[QueuedAppend]) -> asyncio.Task[None]:
        """Send a group in a task of its own, which ends early if no caller waits for it any more."""
        request = asyncio.create_task(self._send_group(group))
        self._overtaken.add(request)
        request.add_done_callback(self._overtaken.discard)

        def note(answered: asyncio.Future[SentAppend]) -> None:
            if answered.cancelled() and all(queued.answered.cancelled() for queued in group):
                request.cancel()

        for queued in group:
            queued.answered.add_done_callback(note)
        return request

    def _next_group(self) -> list[QueuedAppend]:
        """The appends of the next request: one, or single records for the same partition that follow each other."""
        group = [self._queue.popleft()]
        size = group[0].records.bytes
        while (
            group[0].records.is_single
            and self._queue
            and self._queue[0].records.is_single
            and self._queue[0].records.partition == group[0].records.partition
            and len(group) < self._batch_records
            and size + self._queue[0].records.bytes <= self._batch_bytes
        ):
            size += self._queue[0].records.bytes
            group.append(self._queue.popleft())
        self.queued_bytes -= size
        if len(self._queue) < self._batch_records and self.queued_bytes < self._batch_bytes:
            self._is_due.clear()
        return group

    async def _send_group(self, group: list[QueuedAppend]) -> None:
        """Send them in one request; in more, one after the other, where a part of them is why that was refused."""
        try:
            await self._send_in_parts(group)
        except BaseException:
            # The loop ends, and its tasks with it. No append is left without an outcome.
            for queued in group:
                queued.fail(Indeterminate("the client ended before the broker had answered: it may be there"))
            raise

    async def _send_in_parts(self, group: list[QueuedAppend]) -> None:
        waiting = [group]
        while waiting:
            # A caller that has gone before its record was sent does not want it sent.
            some = [queued for queued in waiting.pop() if not queued.answered.cancelled()]
            if not some:
                continue
            try:
                joined = some[0].records if len(some) == 1 else _joined(some, self._clock.now_ms())
                sent = await self._send(joined)
            except ForebayError as error:
                waiting += reversed(self._refused(some, error))
            except Exception as error:
                # Of a library, or a mistake of ours: this request is over, and those behind it are not.
                logger.exception("an append to a broker failed")
                for queued in some:
                    queued.fail(error)
            else:
                if len(some) == 1:
                    some[0].succeed(sent)
                    continue
                for queued, offset in zip(some, sent.offsets, strict=True):
                    # Which partition it is, the offsets of single records need not say.
                    queued.succeed(SentAppend((), (offset,)))

    def _refused(self, group: list[QueuedAppend], error: ForebayError) -> list[list[QueuedAppend]]:
        """Give each append its own outcome, as far as that is known; the groups in which the others are sent again."""
        outcome = error.append_outcome
        if len(group) > 1 and outcome is not None and len(outcome.records) == len(group):
            for queued, (partition, offset) in zip(group, outcome.records, strict=True):
                if offset is None:
                    queued.fail(outcome.failures.get(partition, error))
                else:
                    queued.succeed(SentAppend((), (offset,)))
            return []
        parts = self._parted(group, error) if outcome is None else [group]
        if len(parts) > 1:
            return parts
        for queued in group:
            queued.fail(error)
        return []

    def _parted(self, group: list[QueuedAppend], error: ForebayError) -> list[list[QueuedAppend]]:
        """The appends in parts, if nothing was done because of some of them; each key stays in order."""
        if not isinstance(error, _OF_A_PARTITION + _OF_A_RECORD) or isinstance(error, _OF_ALL) or len(group) == 1:
            return [group]
        places: dict[int | None, list[QueuedAppend]] = {}
        for queued in group:
            places.setdefault(likely_partition(queued.records, self._partitions()), []).append(queued)
        if len(places) > 1 or isinstance(error, _OF_A_PARTITION):
            return list(places.values())
        half = len(group) // 2
        return [group[:half], group[half:]]


def likely_partition(records: SentRecords, partitions: int) -> int | None:
    """The partition in which a record is likely to be, of so many, if anything is known of it."""
    assert isinstance(records.columns, RecordColumns), "a single record"
    key = records.columns.keys[0] if records.columns.keys else None
    if records.partition is not None or key is None:
        return records.partition
    return partition_of_key(key, partitions)


class Appends:
    """Appends to one topic. For one event loop."""

    def __init__(self, transport: Transport, path: str, name: str, clock: Clock, partitions: Callable[[], int]) -> None:
        """`partitions` says how many the topic has, as far as is known here: records without a key take turns."""
        self._transport = transport
        self._path = f"{path}/records"
        self._name = name
        self._partitions = partitions
        self._turns = itertools.count()
        self._lanes = ProducerLanes(clock)
        self._queue = SendQueue(self.send, clock, partitions)
        self._clock = clock
        self._awaited: dict[int | None, SendQueue] = {}
        """By the partition in which they are likely to be: records for which tasks wait, and requests with them."""

    async def append(self, records: SentRecords) -> SentAppend:
        """Append and wait. What was queued before comes before it.

        A call that is cancelled leaves in doubt whether the record is there, and changes nothing for others that were
        sent with it.
        """
        self._transport.check_open()
        if not records.rows:
            return NOTHING
        if not self._queue.is_idle:
            return await asyncio.shield(self._queue.put(records))
        if not records.is_single:
            return await self.send(records)
        try:
            return await self._queue_of(likely_partition(records, self._partitions())).put(records)
        except asyncio.CancelledError:
            self._check_not_closed_under()
            raise

    def _queue_of(self, place: int | None) -> SendQueue:
        """The records for which tasks wait that go with those of this partition."""
        queue = self._awaited.get(place)
        if queue is None:
            queue = SendQueue(self.send, self._clock, self._partitions, overtake_s=OVERTAKE_S)
            self._awaited[place] = queue
        return queue

    def _check_not_closed_under(self) -> None:
        """`Indeterminate` if the log is closed: that has ended a call which was on its way."""
        try:
            self._transport.check_open()
        except Closed as closed:
            raise Indeterminate(f"{closed}, and was so before the broker had answered", topic=self._name) from None

    async def in_turn(self, records: SentRecords) -> list[int]:
        """Append part after part."""
        offsets: list[int] = []
        for part in in_parts(records):
            offsets += (await self.append(part)).offsets
        return offsets

    def nowait(self, records: SentRecords) -> asyncio.Future[SentAppend]:
        """Queue an append; `Throttled` if too much waits already."""
        self._transport.check_open()
        if self._queue.queued_bytes + records.bytes > QUEUED_BYTES_MAX and len(self._queue):
            raise Throttled(
                f"{self._name}: {self._queue.queued_bytes} bytes wait to be sent; the limit is {QUEUED_BYTES_MAX}: "
                "wait for acknowledgements",
                topic=self._name,
            )
        return self._queue.put(records)

    async def drain(self) -> None:
        """Return when all that is queued has its outcome."""
        await self._queue.drain()

    def next_turn(self) -> int:
        """The partition for the next records without a key."""
        return next(self._turns) % self._partitions()

    # Requests

    async def send(self, records: SentRecords) -> SentAppend:
        """Append with a producer of the caller, or with a lane of this client."""
        if records.producing is not None:
            producer, sequence, previous, _ = records.producing
            call = self._call(records, records.partition, producer, sequence, previous)
            return await self._transport.call(call, self._decoded)
        target = records.partition
        if target is None and not records.is_keyed:
            target = self.next_turn()
        while True:
            lane = self._lanes.take(BY_KEY if target is None else target)
            call = self._call(records, target, lane.producer, lane.sequence, None)
            attempts = self._transport.attempts(call)
            try:
                sent = await self._transport.call(call, self._decoded, attempts)
            except Conflict as conflict:
                if attempts.is_in_doubt or conflict.producer != lane.producer or lane.sequence == 0:
                    raise
                # The broker no longer knows this producer: others have displaced it, or the records of a topic in
                # memory are gone. No attempt was in doubt, so the next lane repeats nothing.
                continue
            except (Invalid, Unavailable):
                # After an attempt in doubt the broker may have the sequence: other records must not be sent with it.
                if not attempts.is_in_doubt:
                    self._lanes.give_back(target, lane)
                raise
            # Any other end, a cancelled call too, leaves in doubt what the broker has: the lane is used no more.
            lane.sequence += 1
            self._lanes.give_back(target, lane)
            return sent

    def _call(
        self, records: SentRecords, partition: int | None, producer: int, sequence: int, previous: int | None
    ) -> HttpCall:
        query = {"producer": str(producer), "sequence": str(sequence)}
        if previous is not None:
            query["previous"] = str(previous)
        if partition is not None:
            query["partition"] = str(partition)
        elif records.is_keyed:
            query["offsets"] = "true"
        content, media, more = _body(records.columns, records.rows, records.bytes)
        return HttpCall(method="POST", path=self._path, query={**query, **more}, content=content, media=media)

    def _decoded(self, body: bytes) -> SentAppend:
        try:
            found = _APPENDED.decode(body)
        except msgspec.MsgspecError as error:
            # The broker has done it: only what it says of it is lost.
            raise Indeterminate(f"the answer to an append is not sound: {error}", topic=self._name) from error
        ranges = tuple(OffsetRange(each.partition, each.first, each.count) for each in found.ranges)
        if found.offsets is not msgspec.UNSET:
            return SentAppend(ranges, found.offsets)
        return SentAppend(ranges, [number for _, first, count in ranges for number in range(first, first + count)])


def _joined(group: Sequence[QueuedAppend], now_ms: int) -> SentRecords:
    """Single records as one append."""
    found = [queued.records.columns for queued in group]
    columns = [one for one in found if isinstance(one, RecordColumns)]
    keys = [one.keys[0] if one.keys else None for one in columns]
    tags = [one.tags[0] if one.tags else None for one in columns]
    headers: list[Headers] = [one.headers[0] if one.headers else () for one in columns]
    stamps = [one.timestamps[0] if one.timestamps else now_ms for one in columns]
    is_keyed = any(key is not None for key in keys)
    joined = RecordColumns(
        values=[one.values[0] for one in columns],
        keys=keys if is_keyed else None,
        tags=tags if any(tags) else None,
        headers=headers if any(headers) else None,
        timestamps=stamps if any(one.timestamps for one in columns) else None,
    )
    size = sum(queued.records.bytes for queued in group)
    return SentRecords(joined, len(group), size, group[0].records.partition, None, is_keyed)


def _body(columns: RecordColumns | pa.RecordBatch, rows: int, size: int) -> tuple[bytes, str, dict[str, str]]:
    """The body that brings the records, its media type, and what stands in the address for it."""
    if not isinstance(columns, RecordColumns):
        return bodies.encode_arrow([columns]), MediaType.ARROW, {}
    if rows == 1 and columns.values[0] and columns.headers is None:
        query = _address(columns)
        if query is not None:
            return columns.values[0], MediaType.RAW, query
    if rows < ARROW_RECORDS_MIN and size <= JSON_BYTES_MAX:
        return bodies.encode_json(columns), MediaType.JSON, {}
    return bodies.encode_arrow([_arrow(columns)]), MediaType.ARROW, {}


def _address(columns: RecordColumns) -> dict[str, str] | None:
    """Key, tag and time of one record for the address; `None` if they are too long for that."""
    key = columns.keys[0] if columns.keys else None
    tag = columns.tags[0] if columns.tags else None
    if len(key or b"") + len((tag or "").encode()) > ADDRESS_BYTES_MAX:
        return None
    query = {}
    if key is not None:
        query["key_b64"] = base64.b64encode(key).decode()
    if tag is not None:
        query["tag"] = tag
    if columns.timestamps:
        query["timestamp"] = str(columns.timestamps[0])
    return query


def _arrow(columns: RecordColumns) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415 - loaded only where it is used

    from forebay.format.columns.arrow import ARROW_SCHEMA  # noqa: PLC0415

    found: dict[str, object] = {
        "value": columns.values,
        "key": columns.keys,
        "tag": columns.tags,
        "timestamp": columns.timestamps,
        "headers": columns.headers
        and [[{"key": name, "value": value} for name, value in row] for row in columns.headers],
    }
    present = {name: column for name, column in found.items() if column is not None}
    schema = pa.schema([ARROW_SCHEMA.field(name) for name in present])
    return pa.RecordBatch.from_pydict(present, schema=schema)
