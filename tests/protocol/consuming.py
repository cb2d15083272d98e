"""A consumer that follows the shard from owner to owner; what it was handed and acknowledged stands in the trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.testing.cursors import Acked, Cursor, Event, Found, Handed, cursors_hold
from forebay.testing.history import Reading, read_everything
from forebay.testing.invariants import Violation
from tests.protocol.ground import NAME, TOPIC_ID
from tests.protocol.world import Node, World

READER: Final = ReaderName.of(NAME.namespace, NAME.topic, "billing")
CURSOR: Final = Cursor(READER.reader, 0, TOPIC_ID)
_HEARD: Final = "cursor"
_RECORDS: Final = "handed out"


def consume(node: Node, most: int | None = None) -> None:
    """Read on from the cursor as this owner shows the shard, at most so many offsets, and acknowledge them."""
    disk, store = node.world.disk, ProgressStore(node.metadata, node.world.settings.metadata.prefix)
    shard = node.shard
    found = store.get(READER, 0, TOPIC_ID)
    start = found.offset if found is not None else 0
    disk.note(_HEARD, Found(CURSOR, start))
    reading = read_everything(shard.read, shard.offsets().next, start)
    stop = max(start, reading.end if most is None else min(reading.end, start + most))
    disk.note(_RECORDS, tuple(record for record in reading.records if record[0] < stop))
    disk.note(_HEARD, Handed(CURSOR, start, stop))
    # Before it is done: whoever dies, or never hears the answer, may find it done.
    disk.note(_HEARD, Acked(CURSOR, stop, None))
    store.ack_up_to(READER, {0: Progress(offset=stop, incarnation=TOPIC_ID, epoch=shard.epoch)})
    found = store.get(READER, 0, TOPIC_ID)
    disk.note(_HEARD, Acked(CURSOR, stop, found.offset if found is not None else 0))


def consumer_missed_nothing(world: World, reading: Reading) -> Iterator[Violation]:
    """I25: its cursor never went back, and of all that can be read now it was handed every record."""
    notes = world.disk.trace.notes()
    events: list[Event] = [note.payload for note in notes if note.kind == _HEARD]  # type: ignore[misc]  # ours alone
    yield from cursors_hold(events)
    handed = {record for note in notes if note.kind == _RECORDS for record in note.payload}  # type: ignore[attr-defined]
    for record in reading.records:
        if record not in handed:
            yield Violation("I25", f"{record} was never handed to the consumer")
