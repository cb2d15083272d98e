"""A named reader of a topic: its place lies in the metadata store, apart from any owner; restarts and moves keep it.

At least once: what was read and not acknowledged is read again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from forebay.engines.operations import check_offset
from forebay.errors import Invalid
from forebay.partitioning import check_partition
from forebay.progress import Progress, ProgressStore, ReaderName, check_progress
from forebay.reading import OnGap
from forebay.records import EARLIEST, Position, Record
from forebay.storage.checks import StoredOffset, checked_partition
from forebay.storage.streams import Following, Stream

if TYPE_CHECKING:
    from forebay.storage.topic import Topic


class Reader:
    """One reader of one topic. Made by `Topic.reader`; safe for concurrent use by threads and processes."""

    def __init__(self, topic: Topic, name: str, store: ProgressStore) -> None:
        self.topic = topic
        self._name = ReaderName.of(topic.spec.namespace, topic.spec.topic, name)
        self._store = store

    @property
    def name(self) -> str:
        """What it is called."""
        return self._name.reader

    def offset(self, partition: int = 0) -> int | None:
        """Everything below is done; `None` before the first acknowledgement."""
        found = self._progress(partition)
        return found.offset if found is not None else None

    def note(self, partition: int = 0) -> str:
        """What was noted beside the place."""
        found = self._progress(partition)
        return found.note if found is not None else ""

    def ack(self, record: Record, note: str = "") -> int:
        """This record, and all before it in its partition, are done; see `ack_up_to`."""
        return self.ack_up_to(record.offset + 1, record.partition, note)

    def ack_up_to(self, offset: int, partition: int = 0, note: str = "") -> int:
        """Everything below `offset` is done; where the partition stands on return, durably.

        A place that is further already stays where it is, so a late or repeated call does no harm.
        """
        return self._store.ack_up_to(self._name, {partition: self.place(offset, partition, note)})[partition]

    def reset(self, position: Position | int = EARLIEST, partition: int = 0, note: str = "") -> int:
        """Set the place, also to an earlier one; the offset it stands for now."""
        offset = self.topic.resolve(position, partition)
        self._store.reset(self._name, partition, self.place(offset, partition, note))
        return offset

    def forget(self) -> None:
        """Remove every place of this reader."""
        self._store.forget(self._name, self.topic.partitions)

    def read(
        self, *, start: Position = EARLIEST, partition: int | None = None, on_gap: OnGap | None = None
    ) -> Stream[Record]:
        """What is not done yet, up to the end as it is now; from `start` where nothing was acknowledged."""
        return self.topic.read(self._places(start), partition=partition, on_gap=on_gap)

    def follow(
        self,
        *,
        start: Position = EARLIEST,
        partition: int | None = None,
        timeout: float | None = None,
        stop: threading.Event | None = None,
        on_gap: OnGap | None = None,
    ) -> Stream[Record]:
        """What is not done yet, and then new records as they come; see `Topic.follow`."""
        return self.topic.follow(self._places(start), partition=partition, timeout=timeout, stop=stop, on_gap=on_gap)

    def following(
        self, *, start: Position = EARLIEST, partition: int | None = None, on_gap: OnGap | None = None
    ) -> Following[Record]:
        """What `follow` asks again and again, for callers who wait in their own way."""
        return self.topic.following(self._places(start), partition=partition, on_gap=on_gap)

    def _places(self, start: Position) -> dict[int, Position | int]:
        places: dict[int, Position | int] = {}
        for partition in range(self.topic.partitions):
            done = self.offset(partition)
            places[partition] = start if done is None else StoredOffset(done)
        return places

    def _progress(self, partition: int) -> Progress | None:
        check_partition(checked_partition(partition), self.topic.partitions)
        return self._store.get(self._name, partition, self.topic.spec.topic_id)

    def place(self, offset: int, partition: int, note: str) -> Progress:
        """What is recorded for this place; `Invalid` if the partition has not come so far."""
        check_offset(offset)
        end = self.topic.offsets(partition).next
        if offset > end:
            raise Invalid(f"{self.topic.name}[{partition}] ends at {end}: nothing up to {offset} can be done yet")
        epoch = self.topic.epoch(partition)
        progress = Progress(offset=offset, incarnation=self.topic.spec.topic_id, epoch=epoch, note=note)
        check_progress(progress)
        return progress
