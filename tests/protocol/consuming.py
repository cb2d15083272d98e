"""A consumer that follows a topic from owner to owner; what it was handed and acknowledged stands in the trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from forebay.metadata import MetadataStore
from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.shard import SegmentShard
from forebay.testing.checks.cursors import Acked, Event, Found, Handed, StoredCursor, cursors_hold
from forebay.testing.checks.history import read_everything
from forebay.testing.checks.invariants import Violation
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.testing.simulated.trace import Note

READER: Final = "billing"
_HEARD: Final = "cursor"
_RECORDS: Final = "handed out"


class _Given(NamedTuple):
    partition: int
    records: frozenset[tuple[int, bytes | None]]


class Consumer:
    """The process of a consumer: it may be one of many, one after the other or at the same time."""

    def __init__(self, disk: SimulatedDisk, metadata: MetadataStore) -> None:
        self._disk = disk
        self._store = ProgressStore(metadata, "/forebay", ManualClock())
        self.handed = 0
        """Up to where it was handed records last."""

    def consume(self, shard: SegmentShard, most: int | None = None) -> None:
        """Read on from the cursor as this owner shows the shard, at most so many offsets, and acknowledge them."""
        start = self._look(shard)
        reading = read_everything(shard.read, shard.offsets().next, start)
        stop = max(start, reading.end if most is None else min(reading.end, start + most))
        given = frozenset(record for record in reading.records if record[0] < stop)
        self._disk.note(_RECORDS, _Given(shard.ref.partition, given))
        self._disk.note(_HEARD, Handed(_cursor(shard), start, stop))
        self.handed = stop
        self.acknowledge(shard)

    def acknowledge(self, shard: SegmentShard) -> None:
        """Everything that it was handed is done; by others, perhaps more is by now."""
        cursor, stop, spec = _cursor(shard), self.handed, shard.ref.spec
        # Before it is done: whichever caller dies, or never receives the answer, may find it done.
        self._disk.note(_HEARD, Acked(cursor, stop, None))
        progress = Progress(offset=stop, incarnation=spec.topic_id, epoch=shard.epoch)
        self._store.ack_up_to(_reader(shard), {shard.ref.partition: progress})
        self._disk.note(_HEARD, Acked(cursor, stop, self._found(shard)))

    def _look(self, shard: SegmentShard) -> int:
        offset = self._found(shard)
        self._disk.note(_HEARD, Found(_cursor(shard), offset))
        return offset

    def _found(self, shard: SegmentShard) -> int:
        found = self._store.get(_reader(shard), shard.ref.partition, shard.ref.spec.topic_id)
        return found.offset if found is not None else 0


def missed_by_consumers(
    notes: Iterable[Note], readable: Iterable[tuple[int, bytes | None]], partition: int = 0
) -> Iterator[Violation]:
    """I25: the cursor never went back, and of what can be read now every record was handed to a consumer."""
    heard: list[Event] = []
    handed: set[tuple[int, bytes | None]] = set()
    for note in notes:
        if note.kind == _HEARD:
            heard.append(note.payload)  # type: ignore[arg-type]  # only `Consumer` notes these
        elif isinstance(note.payload, _Given) and note.payload.partition == partition:
            handed |= note.payload.records
    yield from cursors_hold(event for event in heard if event.cursor.partition == partition)
    for record in readable:
        if record not in handed:
            yield Violation("I25", f"{record} of partition {partition} was never handed to a consumer")


def _cursor(shard: SegmentShard) -> StoredCursor:
    return StoredCursor(READER, shard.ref.partition, shard.ref.spec.topic_id)


def _reader(shard: SegmentShard) -> ReaderName:
    return ReaderName.of(shard.ref.spec.namespace, shard.ref.spec.topic, READER)
