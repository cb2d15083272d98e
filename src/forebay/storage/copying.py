"""Copies the records of one topic into another, on whatever engines: once each, however often it is interrupted.

Before a batch is appended, a plan of it is noted beside the copy's place in the source: where it ends, and under
which sequence each partition of the target gets its part. A later run finds by the sequences what has arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

from forebay.appends.producer_window import ReservedProducer
from forebay.appends.queue import record_bytes
from forebay.arguments import StoredOffset
from forebay.errors import Conflict, Invalid
from forebay.partitioning import partition_of_key
from forebay.progress import ReservedReader
from forebay.records import Gap, Record
from forebay.storage.cursors import Reader
from forebay.storage.topic import Topic

BATCH_RECORDS = 5_000
BATCH_TARGETS = 64
"""So many partitions of the target get something of one batch, so that its plan fits into a note."""

OnRecords = Callable[[int], None]


class Copied(NamedTuple):
    """What a copy did. It is complete if the counts are equal and no one else writes to the target.

    Of a source that another directory holds only what is exported can be counted and copied: export it there first.
    """

    copied: int
    """Records that were appended now."""
    source: int
    """Records in the source, up to where its copy ends."""
    target: int
    """Records in the target."""
    gaps: list[tuple[int, Gap]]
    """By partition, what the source has lost or evicted: there is nothing to copy."""


class Plan(NamedTuple):
    """The batch that is being copied: it ends at `stop`, and goes to a target of so many partitions."""

    stop: int
    partitions: int
    sequences: dict[int, int]

    @classmethod
    def parse(cls, note: str) -> Self | None:
        """As noted; `None` if nothing is under way."""
        if not note:
            return None
        stop, partitions, *parts = note.split()
        return cls(int(stop), int(partitions), dict(map(_pair, parts)))

    def __str__(self) -> str:
        parts = (f"{partition}:{sequence}" for partition, sequence in self.sequences.items())
        return " ".join([str(self.stop), str(self.partitions), *parts])


def _pair(text: str) -> tuple[int, int]:
    partition, _, sequence = text.partition(":")
    return int(partition), int(sequence)


def copy_records(source: Topic, target: Topic, *, bytes_max: int, on_records: OnRecords | None = None) -> Copied:
    """Bring every record that the source has now into the target; see `Storage.copy_topic`."""
    if source.spec.topic_id == target.spec.topic_id:
        raise Invalid(f"{source.name} cannot be copied into itself: name another topic")
    gaps: list[tuple[int, Gap]] = []
    copied = 0
    ends: dict[int, int] = {}
    for partition in range(source.partitions):
        ends[partition] = source.offsets(partition).next
        copy = _PartitionCopy(source, target, partition, bytes_max)
        for count in copy.run(ends[partition], gaps):
            copied += count
            if on_records is not None:
                on_records(count)
    held = sum(_count(source, partition, end) for partition, end in ends.items())
    return Copied(copied, held, sum(_count(target, number, None) for number in range(target.partitions)), gaps)


def _count(topic: Topic, partition: int, end: int | None) -> int:
    stream = topic.read_arrow(partition=partition, stop=end, on_gap=lambda _, gap: None)
    return sum(batch.num_rows for batch in stream)


class _PartitionCopy:
    """The copy of one partition of the source."""

    def __init__(self, source: Topic, target: Topic, partition: int, bytes_max: int) -> None:
        self._source = source
        self._target = target
        self._partition = partition
        self._bytes_max = bytes_max
        self._reader: Reader = source.reader(ReservedReader(f"copy-{target.spec.topic_id}"))
        text = f"{source.spec.topic_id}/{partition}/{target.spec.topic_id}"
        drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") or 1
        # Of all ids, as ever: a copy that an older version began goes on.
        self._producer = ReservedProducer(drawn)
        self._gaps: list[tuple[int, Gap]] = []

    def run(self, end: int, gaps: list[tuple[int, Gap]]) -> Iterator[int]:
        """Copy everything below `end`; after each batch, how many records it appended."""
        self._gaps = gaps
        at = self._reader.offset(self._partition) or 0
        plan = Plan.parse(self._reader.note(self._partition))
        if plan is not None:
            yield self._append(list(self._read(at, plan.stop)), plan)
            at = plan.stop
        for batch in self._batches(at, end):
            plan = self._planned(batch)
            self._go_on_from(at, str(plan))
            yield self._append(batch, plan)
            at = plan.stop
        self._go_on_from(max(at, end), "")

    def _go_on_from(self, offset: int, note: str) -> None:
        """Everything below is copied. A power loss must not take of the target what is noted as copied here."""
        self._target.flush()
        self._reader.reset(offset, self._partition, note)

    def _read(self, start: int, stop: int) -> Iterator[Record]:
        def on_gap(partition: int, gap: Gap) -> None:
            self._gaps.append((partition, gap))

        return iter(self._source.read(StoredOffset(start), stop=stop, partition=self._partition, on_gap=on_gap))

    def _batches(self, start: int, stop: int) -> Iterator[list[Record]]:
        batch: list[Record] = []
        size, targets = 0, set[int]()
        for record in self._read(start, stop):
            bytes_more = record_bytes(record.value, record.key, record.tag, record.headers)
            more = targets | {self._place(record, self._target.partitions)}
            full = len(batch) >= BATCH_RECORDS or len(more) > BATCH_TARGETS or size + bytes_more > self._bytes_max
            if batch and full:
                yield batch
                batch, size, more = [], 0, {self._place(record, self._target.partitions)}
            batch.append(record)
            size, targets = size + bytes_more, more
        if batch:
            yield batch

    def _place(self, record: Record, partitions: int) -> int:
        """The same partition where there are as many, else by key, and keyless records of one partition together."""
        if partitions == self._source.partitions or record.key is None:
            return record.partition % partitions
        return partition_of_key(record.key, partitions)

    def _planned(self, batch: Sequence[Record]) -> Plan:
        count = self._target.partitions
        sequences = {}
        for place in sorted({self._place(record, count) for record in batch}):
            last = self._target.last_sequence(self._producer, place)
            sequences[place] = 0 if last is None else last + 1
        return Plan(batch[-1].offset + 1, count, sequences)

    def _append(self, batch: Sequence[Record], plan: Plan) -> int:
        """Append what has not arrived yet; how many records that is."""
        appended = 0
        for place, sequence in plan.sequences.items():
            last = self._target.last_sequence(self._producer, place)
            if last is not None and last >= sequence:
                continue
            if last != (sequence - 1 if sequence else None):
                raise Conflict(
                    f"{self._target.name}[{place}] does not remember how far the copy of {self._source.name} came: "
                    "copy into a new topic"
                )
            part = [record for record in batch if self._place(record, plan.partitions) == place]
            if part:
                self._append_part(part, place, sequence)
            appended += len(part)
        return appended

    def _append_part(self, part: Sequence[Record], place: int, sequence: int) -> None:
        self._target.append_many(
            [record.value for record in part],
            keys=[record.key for record in part],
            tags=[record.tag for record in part],
            headers=[record.headers for record in part],
            timestamps=[record.timestamp for record in part],
            partition=place,
            producer=self._producer,
            sequence=sequence,
        )
