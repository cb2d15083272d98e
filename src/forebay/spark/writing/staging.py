"""What a task does with its rows: finished segments in the store of the topic, which no catalog names yet.

Memory is bounded: rows wait for their segment up to a limit, over all partitions together. Knows stores and Arrow,
not Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

from forebay.blobs import BlobStore
from forebay.clock import Clock
from forebay.format.frame.batch import encode_arrow
from forebay.loads.prepare import LoadPlace, Prepared, write_segment
from forebay.spark.writing.rows import parts_of

WAITING_BYTES_MAX: Final = 128 * 1024 * 1024
"""Rows that wait, over all partitions; the fullest partition then gets its segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Which rows of which load a task writes. `number` gives their place among those of others."""

    load_id: str
    topic_id: str
    partitions: int
    zstd_level: int | None
    number: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StagedSegment:
    """One finished segment, and the partition that it is for."""

    partition: int
    segment: Prepared


class SegmentWriter(Protocol):
    """Writes rows of a partition as finished segments: into a store, or by a broker."""

    def write(self, partition: int, rows: Sequence[pa.RecordBatch]) -> list[StagedSegment]:
        """The segments, in the order of the rows, of which there is at least one; on return they are durable."""


def stage(
    writer: SegmentWriter, task: Task, batches: Iterable[pa.RecordBatch], *, bytes_max: int = WAITING_BYTES_MAX
) -> list[StagedSegment]:
    """Write the rows; on return every segment is durable. Those of one partition stand in the order of their rows.

    Rows without partition and key go to one partition batch by batch, to the next one with the next batch; where
    they begin follows from the number of the task, so that many small tasks spread them.
    """
    staging = _Staging(writer)
    for turn, rows in enumerate(batches, start=task.number):
        if rows.num_rows:
            for part in parts_of(rows, task.partitions, turn):
                staging.add(part.partition, part.rows)
            while staging.waiting_bytes > bytes_max:
                staging.write_fullest()
    return staging.finish()


class StoreWriter:
    """Writes segments into a store that is reached from here."""

    def __init__(self, store: BlobStore, task: Task, clock: Clock) -> None:
        self._store = store
        self._task = task
        self._clock = clock
        self._now_ms = clock.now_ms()

    def write(self, partition: int, rows: Sequence[pa.RecordBatch]) -> list[StagedSegment]:
        """See `SegmentWriter`."""
        task = self._task
        segment = write_segment(
            self._store,
            LoadPlace(task.load_id, task.topic_id, partition),
            f"{task.number}-{task.attempt}",
            (encode_arrow(batch, self._now_ms) for batch in rows),
            clock=self._clock,
            zstd_level=task.zstd_level,
        )
        assert segment is not None, "there are rows"
        return [StagedSegment(partition, segment)]


class _Staging:
    def __init__(self, writer: SegmentWriter) -> None:
        self.waiting_bytes = 0
        self._writer = writer
        self._waiting: dict[int, list[pa.RecordBatch]] = {}
        self._sizes: dict[int, int] = {}
        self._staged: list[StagedSegment] = []

    def add(self, partition: int, rows: pa.RecordBatch) -> None:
        size = rows.nbytes
        self._waiting.setdefault(partition, []).append(rows)
        self._sizes[partition] = self._sizes.get(partition, 0) + size
        self.waiting_bytes += size

    def write_fullest(self) -> None:
        self._write(max(self._sizes, key=lambda partition: self._sizes[partition]))

    def finish(self) -> list[StagedSegment]:
        for partition in sorted(self._waiting):
            self._write(partition)
        return self._staged

    def _write(self, partition: int) -> None:
        waiting = self._waiting.pop(partition)
        self.waiting_bytes -= self._sizes.pop(partition)
        self._staged += self._writer.write(partition, waiting)
