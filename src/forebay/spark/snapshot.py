"""A topic at one moment: which offsets it holds in a directory, and how they are dealt out to tasks.

Looks at the directory beside whoever owns it and changes nothing. What it finds is plain, so that it can be
sent to other processes; no handle leaves this module. Knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from forebay.catalog.removals import NO_FLOOR
from forebay.clock import SystemClock
from forebay.disk import Disk, SystemDisk
from forebay.errors import Invalid, Unsupported
from forebay.format.keys import state_key
from forebay.format.segment import parse_segment_name
from forebay.metadata import MetadataStore, SqliteMetadata
from forebay.settings import Settings
from forebay.shard import read_state
from forebay.spark.options import ReadOptions
from forebay.spark.planning import Bounds, FileSize, Range, resolve, split
from forebay.storage.building import IN_MEMORY
from forebay.storage.definitions import Definitions
from forebay.storage.directory import LogDirectory, is_owned
from forebay.topics import Engine, TopicSpec, shard_id
from forebay.wal.follow import FollowedLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a read covers, whatever is appended later."""

    path: str
    topic: str
    topic_id: str
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What one task reads. Plain values alone: it travels to another process, perhaps on another machine."""

    path: str
    topic: str
    topic_id: str
    ranges: tuple[Range, ...]
    columns: tuple[str, ...]
    fail_on_data_loss: bool


def look(options: ReadOptions) -> Snapshot:
    """Find the topic and fix the offsets to read, as they are now."""
    disk = SystemDisk()
    path = _absolute(options.path)
    directory = LogDirectory.look(path, disk)
    store = SqliteMetadata(directory.metadata_path, disk=disk, clock=SystemClock(), read_only=True)
    with contextlib.closing(store):
        spec = Definitions(store, Settings().metadata.prefix, SystemClock()).get(options.topic)
        if spec.engine is Engine.MEMORY:
            raise Unsupported(
                f"{spec.name} lives in the memory of its owner: no other process, and so no Spark, reads it"
            )
        if spec.engine is Engine.ROCKSDB:
            raise Unsupported(
                f"{spec.name} lives in a RocksDB database, which only its owner can open: Spark reads topics on engine "
                '"segment"; copy the records to one'
            )
        _refuse_moved(store, directory, spec)
    bounds = [_bounds(disk, path, spec, partition) for partition in range(spec.partitions)]
    ranges = resolve(
        str(spec.name), bounds, options.starting, options.ending, fail_on_data_loss=options.fail_on_data_loss
    )
    return Snapshot(path=path, topic=str(spec.name), topic_id=spec.topic_id, ranges=tuple(ranges))


def plan(snapshot: Snapshot, options: ReadOptions, columns: tuple[str, ...]) -> list[Split]:
    """The tasks that together read the snapshot."""
    disk = SystemDisk()
    files = {wanted.partition: _sizes(disk, snapshot, wanted) for wanted in snapshot.ranges}
    return [
        Split(
            path=snapshot.path,
            topic=snapshot.topic,
            topic_id=snapshot.topic_id,
            ranges=ranges,
            columns=columns,
            fail_on_data_loss=options.fail_on_data_loss,
        )
        for ranges in split(snapshot.ranges, files, options.partitions_min)
    ]


def shard_directory(disk: Disk, path: str, topic_id: str, partition: int) -> str:
    """Where a partition has its files."""
    return f"{LogDirectory.look(path, disk).shards}/{shard_id(topic_id, partition)}"


@contextlib.contextmanager
def followed(disk: Disk, path: str, topic_id: str, partition: int) -> Iterator[FollowedLog]:
    """The log of a partition, whoever owns it."""
    directory = shard_directory(disk, path, topic_id, partition)
    # Of these settings a reader needs none: they size what writers keep.
    log = FollowedLog(disk, SystemClock(), directory, Settings().wal, lambda: is_owned(path, disk))
    with contextlib.closing(log):
        yield log


def _absolute(path: str) -> str:
    if path == IN_MEMORY:
        raise Unsupported(f"{IN_MEMORY} lives in the memory of its owner: no other process, and so no Spark, reads it")
    if posixpath.isabs(path) or not path:
        return path
    # Tasks may run elsewhere: what the path is relative to must be settled here.
    return str(Path.cwd() / path)


def _refuse_moved(store: MetadataStore, directory: LogDirectory, spec: TopicSpec) -> None:
    """What another directory holds is not here: to show what is left would be to hide the rest."""
    for partition in range(spec.partitions):
        stored = read_state(store, state_key(spec.namespace, spec.topic, partition))
        if stored is not None and stored.state.holder not in (None, directory.id):
            raise Unsupported(
                f"{spec.name}[{partition}] is held by directory {stored.state.holder} and not by {directory.path}: "
                "read it by the path of that directory"
            )
        if stored is not None and (stored.state.deletes or stored.state.floor != NO_FLOOR):
            raise _shows_removed(spec, partition)


def _shows_removed(spec: TopicSpec, partition: int) -> Unsupported:
    return Unsupported(
        f"{spec.name}[{partition}] has deleted or evicted records, which this source would show again: copy what is "
        'left with "forebay topic copy" and read that, or use read_arrow() of the topic'
    )


def _bounds(disk: Disk, path: str, spec: TopicSpec, partition: int) -> Bounds:
    if not disk.exists(shard_directory(disk, path, spec.topic_id, partition)):
        return Bounds(0, 0)  # nothing was ever appended to it
    with followed(disk, path, spec.topic_id, partition) as log:
        offsets = log.offsets()
        if log.removals.is_some:
            raise _shows_removed(spec, partition)
        return Bounds(offsets.earliest, offsets.next)


def _sizes(disk: Disk, snapshot: Snapshot, wanted: Range) -> list[FileSize]:
    """How large the files of a range are, told by their names alone: each ends where the next one starts."""
    directory = shard_directory(disk, snapshot.path, snapshot.topic_id, wanted.partition)
    try:
        names = sorted(name for name in disk.list_directory(directory) if parse_segment_name(name))
    except FileNotFoundError as error:
        raise Invalid(f"{snapshot.topic} was deleted since it was loaded: load it again") from error
    starts = [found[0] for name in names if (found := parse_segment_name(name))]
    return [
        FileSize(start, end, _bytes(disk, f"{directory}/{name}"))
        for name, (start, end) in zip(names, pairwise([*starts, wanted.stop]), strict=True)
        if start < end and start < wanted.stop and end > wanted.start
    ]


def _bytes(disk: Disk, path: str) -> int:
    try:
        with contextlib.closing(disk.open(path)) as file:
            return file.size()
    except FileNotFoundError:
        return 0  # replaced meanwhile: only how equal the tasks are depends on it
