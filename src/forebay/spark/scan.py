"""What a task does: read its offsets from a shard's files and hand them on as Arrow, exactly those.

Runs on executors, in a process of its own. Every frame is checked before a record of it is shown. Offsets
without a record must be named by the log, else the task fails: a row that is missing is never silent.
Knows nothing of Spark.
"""

from __future__ import annotations

import errno
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from forebay.disk import Disk, SystemDisk
from forebay.errors import Corrupt, DataLoss, Unavailable
from forebay.format.batch import Batch, batch_of, merge
from forebay.format.segment import parse_segment_name
from forebay.pages import Page
from forebay.reading import Cursor
from forebay.records import Gap, Reason
from forebay.spark.columns import record_batch
from forebay.spark.planning import Range
from forebay.spark.snapshot import Split, followed, shard_directory
from forebay.wal.files import BelowFiles, FileList, SealedFile
from forebay.wal.follow import FollowedLog
from forebay.wal.survey import indexed_files

logger = logging.getLogger(__name__)

PAGE_BYTES: Final = 4 * 1024 * 1024
ROWS_ENOUGH: Final = 2048
"""Frames of fewer records are put together: each record batch costs Spark a fixed price."""
WAIT_SECONDS: Final = 10.0
"""How long an owner that has just come may take to publish what was there before."""


def read_split(split: Split) -> Iterator[pa.RecordBatch]:
    """The records of the split, range after range. `DataLoss` names what cannot be read."""
    disk = SystemDisk()
    for wanted in split.ranges:
        yield from _read_range(disk, split, wanted)


def _read_range(disk: Disk, split: Split, wanted: Range) -> Iterator[pa.RecordBatch]:
    missing = _Missing(split)
    name = f"{split.topic}[{wanted.partition}]"
    with followed(disk, split.path, split.topic_id, wanted.partition) as log:
        source = _Shard(log, _sealed(disk, split, wanted))
        cursor = Cursor(source, wanted.start, name=name, partition=wanted.partition, on_gap=missing)
        rows = 0
        try:
            while cursor.next < wanted.stop:
                found = cursor.pull(wanted.stop, PAGE_BYTES)
                if not found and cursor.next < wanted.stop and not log.wait(cursor.next, WAIT_SECONDS):
                    raise Unavailable(
                        f"{name} can be read up to {cursor.next} now, and up to {wanted.stop} when this read was "
                        f"planned: its owner is starting, or its files went; try again, or load it again"
                    )
                for batch in _coalesced(found):
                    rows += batch.count
                    yield record_batch(batch, split.columns, topic=split.topic, partition=wanted.partition)
        finally:
            source.close()
    if rows + missing.offsets != wanted.stop - wanted.start:
        raise Corrupt(
            f"{name}: {rows} records and {missing.offsets} named holes do not make up the offsets "
            f'[{wanted.start}, {wanted.stop}): run "forebay verify"'
        )


class _Missing:
    """Counts offsets without a record; fails for those that had one, unless told to go on."""

    def __init__(self, split: Split) -> None:
        self.offsets = 0
        self._split = split

    def __call__(self, partition: int, gap: Gap) -> None:
        if gap.reason is not Reason.SKIPPED:
            what = f"{self._split.topic}[{partition}]: offsets {gap} cannot be read"
            if self._split.fail_on_data_loss:
                raise DataLoss(f'{what}: set failOnDataLoss to false to go on without them; "forebay verify" says more')
            logger.warning("%s: skipped, since failOnDataLoss is false", what)
        self.offsets += gap.stop - gap.start


class _Shard:
    """Pages of one shard: from sealed files where they cover all that is wanted, else from the log as published."""

    def __init__(self, log: FollowedLog, sealed: FileList | None) -> None:
        self._log = log
        self._sealed = sealed

    def read(self, offset: int, bytes_max: int = PAGE_BYTES) -> Page:
        if self._sealed is not None:
            try:
                return self._sealed.read(offset, bytes_max)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                # Files went or were replaced: the log finds out which ones hold these offsets now.
                self.close()
                self._sealed = None
        try:
            return self._log.read(offset, bytes_max)
        except BelowFiles as error:
            begins = self._log.files.begins
            raise Unavailable(
                f"offset {offset} is not in the local files, which begin at {begins}: it lies in the store that the "
                "topic's history is exported to, and is read from there by forebay.open(…).topic(…).read_arrow()"
            ) from error

    def close(self) -> None:
        for file in self._sealed.all if self._sealed is not None else ():
            file.close()


def _sealed(disk: Disk, split: Split, wanted: Range) -> FileList | None:
    """The sealed files that hold the whole range without a hole between them, if there are such.

    They spare a task the walk through the newest file, which every look at the log as a whole begins with.
    """
    directory = shard_directory(disk, split.path, split.topic_id, wanted.partition)
    try:
        names = sorted(name for name in disk.list_directory(directory) if parse_segment_name(name))
        first = max(0, bisect_right(names, wanted.start, key=_start) - 1)
        last = bisect_left(names, wanted.stop, key=_start)
        files = list(indexed_files(disk, directory, names[first:last]).values())
    except FileNotFoundError:
        return None
    covered = wanted.start
    chosen: list[SealedFile] = []
    for file in files:
        if covered >= wanted.stop or (file.start != covered if chosen else file.start > covered):
            break
        chosen.append(file)
        covered = file.end
    return FileList(chosen) if covered >= wanted.stop else None


def _start(name: str) -> int:
    found = parse_segment_name(name)
    assert found is not None
    return found[0]


def _coalesced(batches: Sequence[Batch]) -> Iterator[Batch]:
    """The same records in fewer batches: consecutive small ones become one."""
    small: list[Batch] = []
    for batch in batches:
        if batch.count < ROWS_ENOUGH:
            small.append(batch)
            continue
        yield from _together(small)
        yield batch
        small = []
    yield from _together(small)


def _together(batches: Sequence[Batch]) -> Iterator[Batch]:
    if len(batches) > 1:
        first = batches[0]
        yield batch_of(merge(batches), base=first.base, epoch=first.epoch, appended_at=first.appended_at)
    else:
        yield from batches
