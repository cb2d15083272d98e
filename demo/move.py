"""A topic that moves from one data directory to another, and a reader that keeps its place in it.

Both directories share a metadata store and the store of history; each has a log of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import forebay

TOPIC = "shop/shipments"
READER = "warehouse"
BATCH = 1000
SETTINGS = """\
storage:
  mode: shared_fs
store:
  root: {root}/history
metadata:
  path: {root}/metadata.sqlite
wal:
  rotate_bytes_max: 1048576
"""


@dataclass(frozen=True)
class Move:
    """Where the topic changed hands, and what was read on both sides of that place."""

    sealed_at: int
    sealing_seconds: float
    objects: int
    decision: str
    """How the new directory found out where to go on."""
    acknowledged: int
    """Where the reader had come to before the move."""
    resumed_at: int
    """Where it was sent after the move."""
    from_history: int
    from_log: int
    """What the new directory reads of the whole stream: from the store, and from its own log behind it."""


def move_a_topic(root: Path, count: int) -> Move:
    """Append `count` shipments in `north`, read half of them, move to `south`, append `count` more, read all."""
    root.mkdir(parents=True, exist_ok=True)
    file = root / "shared.yaml"
    file.write_text(SETTINGS.format(root=root.absolute()))
    settings = forebay.Settings.load(str(file))
    with forebay.open(root / "north", settings) as north:
        shipments = north.create_topic(TOPIC, durability="fsync")
        append(shipments, count)
        acknowledged = read_in_order(shipments.read(stop=count // 2), 0)
        shipments.reader(READER).ack_up_to(acknowledged)
        begun = time.perf_counter()
        sealed = north.seal_topic(TOPIC)[0]
        seconds = time.perf_counter() - begun
        objects = len(list((root / "history").rglob("*.seg")))
    with forebay.open(root / "south", settings) as south:
        shipments = south.topic(TOPIC)
        append(shipments, count)
        reader = shipments.reader(READER)
        resumed_at = reader.offset() or 0
        read_in_order(reader.read(), resumed_at)
        end = read_in_order(shipments.read(), 0)
        # A log file is named by its first offset.
        own = min(int(file.name[:20]) for file in (root / "south").rglob("*.seg"))
        decision = str(shipments.recovery())
    return Move(sealed.next_offset, seconds, objects, decision, acknowledged, resumed_at, own, end - own)


def append(shipments: forebay.Topic, count: int) -> None:
    """Append `count` shipments; each says the offset that it must get."""
    first = shipments.offsets().next
    for start in range(first, first + count, BATCH):
        shipments.append_many([b"shipment %d" % number for number in range(start, min(start + BATCH, first + count))])


def read_in_order(records: Iterable[forebay.Record], start: int) -> int:
    """Read to the end, which is returned; each record must be the one appended at the next offset."""
    expected = start
    for record in records:
        if (record.offset, record.value) != (expected, b"shipment %d" % expected):
            raise SystemExit(f"the demo failed: offset {expected} was expected, {record} came")
        expected += 1
    return expected
