"""Which offsets are read, and by which task: pure arithmetic over facts, tested without Spark or files.

A task costs about 50 ms whatever it does, so there are few of them, and they are of equal size. One task may
take several partitions, and a partition may be cut anywhere: a cut that falls into the middle of a frame
costs that frame a second decoding and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from forebay.errors import Invalid
from forebay.spark.options import FROM_EARLIEST, FROM_LATEST, Places

logger = logging.getLogger(__name__)

MIB: Final = 1024 * 1024
TASK_BYTES_MIN: Final = 64 * MIB
TASK_BYTES: Final = 128 * MIB
TASK_BYTES_MAX: Final = 256 * MIB
TASKS_MANY: Final = 64
"""From here on tasks grow instead of becoming more, up to `TASK_BYTES_MAX`."""


class Bounds(NamedTuple):
    """What a partition holds at the moment of looking: `[earliest, next)`."""

    earliest: int
    next: int


class Range(NamedTuple):
    """Offsets `[start, stop)` of a partition."""

    partition: int
    start: int
    stop: int


class FileSize(NamedTuple):
    """A file of a partition: it holds `[start, end)` in about so many bytes."""

    start: int
    end: int
    bytes: int


class _Piece(NamedTuple):
    """A part of a range that lies in one file, or in none."""

    partition: int
    start: int
    stop: int
    weight: int


def resolve(
    name: str, bounds: Sequence[Bounds], starting: Places, ending: Places, *, fail_on_data_loss: bool
) -> list[Range]:
    """The offsets to read of each partition, fixed; partitions without any are left out.

    Raises `Invalid` for offsets that the topic does not have. Those that it no longer has are skipped and
    logged where data loss is not to fail.
    """
    for option, places in (("startingOffsets", starting), ("endingOffsets", ending)):
        _check_partitions(name, option, places, len(bounds))
    ranges = []
    for partition, bound in enumerate(bounds):
        place = f"{name}[{partition}]"
        stop = _stop(place, _of(ending, partition), bound)
        wanted = _of(starting, partition)
        if wanted > stop:
            raise Invalid(f"{place}: startingOffsets is {wanted}, behind the end at {stop}: lower it")
        start = _start(place, wanted, bound, fail_on_data_loss=fail_on_data_loss)
        if start < stop:
            ranges.append(Range(partition, start, stop))
    return ranges


def _check_partitions(name: str, option: str, places: Places, count: int) -> None:
    if isinstance(places, int):
        return
    missing = sorted(set(range(count)) - set(places))
    unknown = sorted(set(places) - set(range(count)))
    if missing or unknown:
        wrong = f"leaves out {_listed(missing)}" if missing else f"names {_listed(unknown)}"
        raise Invalid(f'option "{option}" {wrong}: {name} has partitions 0 to {count - 1}, name each of them')


def _listed(partitions: Sequence[int]) -> str:
    shown = ", ".join(map(str, partitions[:10]))
    return f"partition {shown}{' and more' if len(partitions) > 10 else ''}"


def _of(places: Places, partition: int) -> int:
    return places if isinstance(places, int) else places[partition]


def _start(place: str, wanted: int, bound: Bounds, *, fail_on_data_loss: bool) -> int:
    if wanted == FROM_EARLIEST:
        return bound.earliest
    if wanted < bound.earliest:
        gone = f"{place}: startingOffsets is {wanted}, the earliest offset there is {bound.earliest}"
        if fail_on_data_loss:
            raise Invalid(f"{gone}: start there, or set failOnDataLoss to false to skip what is gone")
        logger.warning("%s: skipped what is gone", gone)
        return bound.earliest
    return wanted


def _stop(place: str, wanted: int, bound: Bounds) -> int:
    if wanted == FROM_LATEST:
        return bound.next
    if wanted > bound.next:
        raise Invalid(f"{place}: endingOffsets is {wanted}, its end is at {bound.next}: lower it or read later")
    return wanted


def split(
    ranges: Sequence[Range], files: Mapping[int, Sequence[FileSize]], partitions_min: int = 1
) -> list[tuple[Range, ...]]:
    """Deal the ranges out to tasks of about equal bytes; every offset to exactly one of them.

    `partitions_min` asks for more tasks than the bytes call for. `files` may be inexact, or incomplete:
    that makes tasks unequal, never wrong.
    """
    pieces = [piece for wanted in ranges for piece in _pieces(wanted, files.get(wanted.partition, ()))]
    records = sum(wanted.stop - wanted.start for wanted in ranges)
    total = sum(piece.weight for piece in pieces)
    tasks = max(_tasks(total), min(partitions_min, records))
    return [_joined(task) for task in _dealt(pieces, total, tasks) if task]


def _tasks(total: int) -> int:
    size = min(TASK_BYTES_MAX, max(TASK_BYTES, total // TASKS_MANY))
    return max(1, -(-total // size))


def _pieces(wanted: Range, files: Sequence[FileSize]) -> Iterator[_Piece]:
    """The range cut at the ends of files. What lies in no file weighs nothing, and is read all the same."""
    partition, start, stop = wanted
    for file in sorted(files):
        first, last = max(start, file.start), min(stop, file.end)
        if first >= last:
            continue
        if start < first:
            yield _Piece(partition, start, first, 0)
        yield _Piece(partition, first, last, file.bytes * (last - first) // (file.end - file.start))
        start = last
    if start < stop:
        yield _Piece(partition, start, stop, 0)


def _dealt(pieces: Sequence[_Piece], total: int, tasks: int) -> list[list[Range]]:
    """Walk the pieces in order; each task takes until its share of the whole weight is full."""
    dealt: list[list[Range]] = [[] for _ in range(tasks)]
    task, before = 0, 0
    for partition, first, last, weight in pieces:
        start = first
        while start < last:
            share_end = total * (task + 1) // tasks
            stop = last
            if task + 1 < tasks and before + weight > share_end:
                stop = max(start, first + (share_end - before) * (last - first) // weight)
            if stop > start:
                dealt[task].append(Range(partition, start, stop))
            if stop < last:
                task += 1
            start = stop
        before += weight
    return dealt


def _joined(task: Sequence[Range]) -> tuple[Range, ...]:
    """Neighbours of one partition as one range."""
    joined = [task[0]]
    for wanted in task[1:]:
        if (wanted.partition, wanted.start) == (joined[-1].partition, joined[-1].stop):
            joined[-1] = joined[-1]._replace(stop=wanted.stop)
        else:
            joined.append(wanted)
    return tuple(joined)
