"""Records on their way into a topic: checked one by one, appended partition by partition, counted as they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from forebay.cli.interruptions import Interruptions
from forebay.cli.produce.input import InputRecord
from forebay.cli.terminal import Meter
from forebay.errors import Indeterminate, Invalid, Unavailable

if TYPE_CHECKING:
    from forebay.clock import Clock
    from forebay.surface.blocking import TopicHandle

BATCH_BYTES = 1024 * 1024
BURST_SECONDS = 0.1
"""At a given rate, no more than this much at once."""
ATTEMPTS = 3
RETRY_SECONDS = 0.2


class SentTally:
    """What has been appended so far. `offsets` are `[first, end)` by partition."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.started: float | None = None
        self.records = 0
        self.bytes = 0
        self.offsets: dict[int, tuple[int, int]] = {}

    def start(self) -> None:
        """From now on time counts."""
        self.started = self.clock.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return self.clock.monotonic() - self.started if self.started is not None else 0.0


class RecordLimits(NamedTuple):
    """What a record must keep to."""

    partitions: int
    frame_bytes_max: int

    @property
    def batch_bytes(self) -> int:
        """How much may be appended at once, so that no append is too large for its frame."""
        return min(BATCH_BYTES, self.frame_bytes_max // 2)

    def checked(self, record: InputRecord | None) -> InputRecord | None:
        """The record, or `Invalid` that says where it came from: before anything of its batch is appended."""
        from forebay.arguments import checked_headers, checked_tag, checked_timestamp

        if record is None:
            return None
        try:
            checked_tag(record.tag)
            checked_headers(record.headers)
            if record.timestamp is not None:
                checked_timestamp(record.timestamp)
            if record.partition is not None and not 0 <= record.partition < self.partitions:
                raise Invalid(f"partition is {record.partition}; this topic has 0 to {self.partitions - 1}")
            self._check_size(record)
        except Invalid as error:
            raise Invalid(f"{record.source}: {error}") from error
        return record

    def _check_size(self, record: InputRecord) -> None:
        from forebay.appends.queue import record_bytes
        from forebay.storage.append import FRAME_ROOM

        size = record_bytes(record.value, record.key, record.tag, record.headers)
        if size + FRAME_ROOM > self.frame_bytes_max:
            raise Invalid(f"a record of {size} bytes; the limit is wal.frame_bytes_max ({self.frame_bytes_max})")


def groups_of(records: Iterable[InputRecord | None], count_max: int, bytes_max: int) -> Iterator[list[InputRecord]]:
    """Records in groups to be appended at once: what is at hand, up to the limits.

    Where reading fails, what was read before comes out first.
    """
    group: list[InputRecord] = []
    size = 0
    try:
        for record in records:
            if record is not None:
                group.append(record)
                size += record.size
            if group and (record is None or len(group) >= count_max or size >= bytes_max):
                yield group
                group, size = [], 0
    except Invalid:
        if group:
            yield group
        raise
    if group:
        yield group


class Sender:
    """Appends groups of records to one topic."""

    def __init__(
        self,
        topic: TopicHandle,
        interruptions: Interruptions,
        shown: Meter,
        tally: SentTally,
        *,
        rate: float | None,
        producer: int | None,
    ) -> None:
        from forebay.partitioning import Partitioner

        self._topic = topic
        self._clock = tally.clock
        self._interruptions = interruptions
        self._shown = shown
        self._tally = tally
        self._rate = rate
        self._producer = producer
        self._partitioner = Partitioner(topic.partitions)
        self._sequences: dict[int, int] = {}
        self._due = tally.clock.monotonic()

    def batch_of(self, count: int) -> int:
        """How many records to append at once, so that a rate is kept evenly."""
        return count if self._rate is None else max(1, min(count, int(self._rate * BURST_SECONDS)))

    def send(self, group: Sequence[InputRecord]) -> None:
        """Append the group. Each partition's part is appended whole or not at all, and counted when it holds."""
        self._pace(len(group))
        for partition, records in self._parts(group).items():
            with self._interruptions.held():
                first = self._append(partition, records)
                self._count(partition, records, first)
            self._shown.advance(len(records))

    def _pace(self, count: int) -> None:
        if self._rate is None:
            return
        now = self._clock.monotonic()
        if self._due > now:
            self._clock.sleep(self._due - now)
        self._due = max(self._due, now) + count / self._rate

    def _parts(self, group: Sequence[InputRecord]) -> dict[int, list[InputRecord]]:
        """The records of each partition, in order. Keyless ones of one group stay together."""
        parts: dict[int, list[InputRecord]] = {}
        keyless: int | None = None
        for record in group:
            if record.partition is None and record.key is None:
                if keyless is None:
                    keyless = self._partitioner.choose(None, producer=self._producer or 0)
                chosen = keyless
            else:
                chosen = self._partitioner.choose(record.key, partition=record.partition)
            parts.setdefault(chosen, []).append(record)
        return parts

    def _append(self, partition: int, records: Sequence[InputRecord]) -> int:
        """The offset of the first record. As an idempotent producer, an append in doubt is repeated."""
        if self._producer is None:
            return self._append_once(partition, records, None)
        if partition not in self._sequences:
            last = self._topic.last_sequence(self._producer, partition)
            self._sequences[partition] = 0 if last is None else last + 1
        for attempt in range(1, ATTEMPTS + 1):
            try:
                first = self._append_once(partition, records, self._sequences[partition])
            except (Unavailable, Indeterminate):
                if attempt == ATTEMPTS:
                    raise
                self._clock.sleep(RETRY_SECONDS * attempt)
            else:
                self._sequences[partition] += 1
                return first
        raise AssertionError

    def _append_once(self, partition: int, records: Sequence[InputRecord], sequence: int | None) -> int:
        now = self._clock.now_ms()
        offsets = self._topic.append_many(
            [record.value for record in records],
            keys=[record.key for record in records] if any(record.key is not None for record in records) else None,
            tags=[record.tag for record in records] if any(record.tag is not None for record in records) else None,
            headers=[record.headers for record in records] if any(record.headers for record in records) else None,
            timestamps=[now if record.timestamp is None else record.timestamp for record in records],
            partition=partition,
            producer=self._producer,
            sequence=sequence,
        )
        return offsets[0]

    def _count(self, partition: int, records: Sequence[InputRecord], first: int) -> None:
        tally = self._tally
        tally.records += len(records)
        tally.bytes += sum(record.size for record in records)
        low = tally.offsets.get(partition, (first, first))[0]
        tally.offsets[partition] = (low, first + len(records))
