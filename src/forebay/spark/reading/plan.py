"""Plans a read: which offsets, and by which task. Pure arithmetic over a snapshot, tested without Spark or files.

A task costs about 50 ms whatever it does, so there are few of them, and they are of equal size. One task may
take several partitions, and a partition may be cut anywhere: a cut that falls into the middle of a frame
costs that frame a second decoding and nothing else.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Final, NamedTuple

from forebay.errors import Invalid
from forebay.spark.reading.filters import NO_FILTERS, Filters
from forebay.spark.reading.options import FROM_EARLIEST, FROM_LATEST, Limit
from forebay.spark.reading.snapshot import Part, PartitionBounds, Range, ScanPiece, ShardView, Snapshot, Split

logger = logging.getLogger(__name__)

MIB: Final = 1024 * 1024
TASK_BYTES: Final = 128 * MIB
TASK_BYTES_MAX: Final = 256 * MIB
TASKS_MANY: Final = 64
"""From here on tasks grow instead of becoming more, up to `TASK_BYTES_MAX`."""


class Size(NamedTuple):
    """A file or object of a partition: it holds `[start, end)` in about so many bytes."""

    start: int
    end: int
    bytes: int


class _Piece(NamedTuple):
    """A part of a range that lies in one file, or in none."""

    shard: int
    start: int
    stop: int
    weight: int


def resolve(
    bounds: Sequence[PartitionBounds], starting: Limit, ending: Limit, *, fail_on_data_loss: bool
) -> list[Range]:
    """The offsets to read of each partition, fixed; partitions without any are left out.

    Raises `Invalid` for offsets that a topic does not have. Those that it no longer has are skipped and
    logged where data loss is not to fail.
    """
    for limit in (starting, ending):
        check_partitions(bounds, limit)
    ranges = []
    for shard, bound in enumerate(bounds):
        stop = _stop(bound, ending.at(bound.topic, bound.partition), ending.option)
        wanted = starting.at(bound.topic, bound.partition)
        if wanted == FROM_LATEST:
            wanted = bound.next
        if wanted > stop:
            raise Invalid(f"{bound}: {starting.option} is {wanted}, behind the end at {stop}: lower it")
        start = _start(bound, wanted, starting.option, fail_on_data_loss=fail_on_data_loss)
        if start < stop:
            ranges.append(Range(shard, start, stop))
    return ranges


def check_partitions(bounds: Sequence[PartitionBounds], limit: Limit) -> None:
    """`Invalid` if a limit that names partitions leaves one out, or names one that is not there."""
    if limit.by_topic is None:
        return
    there: dict[str, set[int]] = {}
    for bound in bounds:
        there.setdefault(bound.topic, set()).add(bound.partition)
    unread = sorted(set(limit.by_topic) - set(there))
    if unread:
        raise Invalid(f'option "{limit.option}" names {unread[0]}, which this read does not take: leave it out')
    for topic, partitions in there.items():
        named = set(limit.by_topic.get(topic, ()))
        missing, unknown = sorted(partitions - named), sorted(named - partitions)
        if missing or unknown:
            wrong = f"leaves out {_listed(missing)}" if missing else f"names {_listed(unknown)}"
            raise Invalid(
                f'option "{limit.option}" {wrong}: {topic} has partitions 0 to {max(partitions)}, name each of them'
            )


def _listed(partitions: Sequence[int]) -> str:
    shown = ", ".join(map(str, partitions[:10]))
    return f"partition {shown}{' and more' if len(partitions) > 10 else ''}"


def _start(bound: PartitionBounds, wanted: int, option: str, *, fail_on_data_loss: bool) -> int:
    if wanted == FROM_EARLIEST:
        return bound.earliest
    if wanted < bound.earliest:
        gone = f"{bound}: {option} is {wanted}, the earliest offset there is {bound.earliest}"
        if fail_on_data_loss:
            raise Invalid(f"{gone}: start there, or set failOnDataLoss to false to skip what is gone")
        logger.warning("%s: %d offsets that are gone are skipped", gone, bound.earliest - wanted)
        return bound.earliest
    return wanted


def _stop(bound: PartitionBounds, wanted: int, option: str) -> int:
    if wanted == FROM_LATEST:
        return bound.next
    if wanted > bound.next:
        raise Invalid(f"{bound}: {option} is {wanted}, its end is at {bound.next}: lower it or read later")
    return wanted


def split(
    ranges: Sequence[Range], sizes: Mapping[int, Sequence[Size]], partitions_min: int = 1
) -> list[tuple[Range, ...]]:
    """Deal the ranges out to tasks of about equal bytes; every offset to exactly one of them.

    `partitions_min` asks for more tasks than the bytes call for. `sizes` may be inexact, or incomplete:
    that makes tasks unequal, never wrong.
    """
    ordered = {shard: sorted(files) for shard, files in sizes.items()}
    pieces = [piece for wanted in ranges for piece in _pieces(wanted, ordered.get(wanted.shard, []))]
    records = sum(wanted.stop - wanted.start for wanted in ranges)
    total = sum(piece.weight for piece in pieces)
    tasks = max(_tasks(total), min(partitions_min, records))
    return [joined(task) for task in _dealt(pieces, total, tasks) if task]


def _tasks(total: int) -> int:
    size = min(TASK_BYTES_MAX, max(TASK_BYTES, total // TASKS_MANY))
    return max(1, -(-total // size))


def _pieces(wanted: Range, sizes: Sequence[Size]) -> Iterator[_Piece]:
    """The range cut at the ends of files. What lies in no file weighs nothing, and is read all the same."""
    shard, start, stop = wanted
    at = max(0, bisect_right(sizes, start, key=lambda file: file.start) - 1)
    for file in takewhile(lambda file: file.start < stop, islice(sizes, at, None)):
        first, last = max(start, file.start), min(stop, file.end)
        if first >= last:
            continue
        if start < first:
            yield _Piece(shard, start, first, 0)
        yield _Piece(shard, first, last, file.bytes * (last - first) // (file.end - file.start))
        start = last
    if start < stop:
        yield _Piece(shard, start, stop, 0)


def _dealt(pieces: Sequence[_Piece], total: int, tasks: int) -> list[list[Range]]:
    """Walk the pieces in order; each task takes until its share of the whole weight is full."""
    dealt: list[list[Range]] = [[] for _ in range(tasks)]
    task, before = 0, 0
    for shard, first, last, weight in pieces:
        start = first
        while start < last:
            share_end = total * (task + 1) // tasks
            stop = last
            if task + 1 < tasks and before + weight > share_end:
                stop = max(start, first + (share_end - before) * (last - first) // weight)
            if stop > start:
                dealt[task].append(Range(shard, start, stop))
            if stop < last:
                task += 1
            start = stop
        before += weight
    return dealt


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same offsets with neighbours of one partition as one range."""
    found: list[Range] = []
    for wanted in ranges:
        if found and (wanted.shard, wanted.start) == (found[-1].shard, found[-1].stop):
            found[-1] = found[-1]._replace(stop=wanted.stop)
        else:
            found.append(wanted)
    return tuple(found)


def plan(
    snapshot: Snapshot,
    ranges: Sequence[Range],
    *,
    columns: tuple[str, ...],
    filters: Filters = NO_FILTERS,
    partitions_min: int = 1,
    fail_on_data_loss: bool = True,
) -> list[Split]:
    """The tasks that together read these offsets of the snapshot, as far as the filters may let something through."""
    kept = narrowed(snapshot, ranges, filters)
    sizes: Mapping[int, Sequence[Size]] = {
        wanted.shard: [_size(piece, filters) for piece in snapshot.shards[wanted.shard].pieces] for wanted in kept
    }
    return [
        Split(
            location=snapshot.location,
            parts=tuple(_part(snapshot.shards[wanted.shard], wanted) for wanted in task),
            columns=columns,
            filters=filters,
            fail_on_data_loss=fail_on_data_loss,
        )
        for task in split(kept, sizes, partitions_min)
    ]


def narrowed(snapshot: Snapshot, ranges: Sequence[Range], filters: Filters) -> tuple[Range, ...]:
    """What is left of ranges once the pieces are left out in which the filters let nothing through."""
    return joined(part for wanted in ranges for part in _kept(snapshot.shards[wanted.shard], wanted, filters))


def _kept(view: ShardView, wanted: Range, filters: Filters) -> Iterator[Range]:
    """What is left of a range once pieces are left out in which the filters let nothing through."""
    if not filters.may_match_partition(view.topic, view.partition):
        return
    low, high = filters.offsets(wanted.start, wanted.stop)
    for piece in view.pieces_of(low, high):
        start, stop = max(low, piece.start), min(high, piece.stop)
        if start < stop and (piece.descriptor is None or filters.may_match(piece.descriptor)):
            yield Range(wanted.shard, start, stop)


def _size(piece: ScanPiece, filters: Filters) -> Size:
    """What a piece weighs: its bytes, or those of its index where that says which of them are needed."""
    weight = piece.bytes
    if filters.by_postings and piece.descriptor is not None:
        weight = min(weight, piece.descriptor.index_bytes)
    return Size(piece.start, piece.stop, weight)


def _part(view: ShardView, wanted: Range) -> Part:
    return Part(
        topic=view.topic,
        topic_id=view.topic_id,
        partition=view.partition,
        is_durable=view.is_durable,
        start=wanted.start,
        stop=wanted.stop,
        pieces=view.pieces_of(wanted.start, wanted.stop),
        deleted=view.deleted.clipped(wanted.start, wanted.stop),
    )
