"""Bring back what a shard has set aside: torn tails, and the files of an owner that another has replaced.

What a copy is a copy of stands in its headers, and that is also how a repetition knows what is there already:
no note apart from the records could be out of step with them, and no window of producers is too short.
Knows files, topics and their streams; changes nothing but the topic that it appends to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import NamedTuple

from pyroaring import BitMap64

from forebay.arguments import checked_partition
from forebay.clock import SystemClock
from forebay.directory import LogDirectory, is_owned
from forebay.disk import Disk, SystemDisk
from forebay.errors import Conflict, Corrupt, Invalid, Moved, UnknownTopic, Unsupported, UnsupportedFormat
from forebay.format.checksum import salted
from forebay.format.files.segment import HEADER_BYTES, SEGMENT_SUFFIX, SegmentHeader, decode_header, parse_segment_name
from forebay.format.frame.batch import Batch, decode
from forebay.format.frame.head import FrameHead, Verdict
from forebay.format.metadata.descriptor import DescriptorKind
from forebay.inspection.directory import Inspected, look, metadata_of
from forebay.inspection.history.catalog import HistoryPlaces
from forebay.places import Stores, is_local
from forebay.records import EARLIEST, Gap, Headers, Position, Reason, Record
from forebay.storage import Storage, Topic
from forebay.topics import Engine, TopicName, TopicSpec
from forebay.wal.recovery.resume import ASIDE
from forebay.wal.removals import KINDS, Removals
from forebay.wal.walk import ControlFrame, DataFrames, Unreadable, walk

ORIGIN = "forebay-origin-"
_IDENTITY = ("topic-id", "partition", "offset", "epoch")
APPEND_BYTES = 1024 * 1024

HeaderOf = Callable[[int, int], bytes | None]
"""The first bytes of the segment that begins at an offset in an epoch, if history has it."""


class Damaged(NamedTuple):
    """Bytes of a file that are no whole frame."""

    byte: int
    bytes: int


class Remains(NamedTuple):
    """A file with records that may be no part of the shard's log. Without a header none of them can be checked."""

    path: str
    header: SegmentHeader | None
    begins: int
    """The byte of the first frame: 0 in a torn tail."""

    @property
    def is_tail(self) -> bool:
        return self.begins == 0


@dataclass(slots=True, kw_only=True)
class Listed:
    """What a file holds. `lost` counts the records whose offsets the topic reports as lost."""

    path: str
    is_tail: bool
    readable: bool
    start: int | None = None
    stop: int | None = None
    records: int = 0
    lost: int = 0
    epochs: list[int] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Salvaged:
    """What was brought back of one partition, or would be."""

    copied: int = 0
    present: int = 0
    """Copied before."""


def remains(
    disk: Disk, directory: str, *, log_too: bool = False, header_of: HeaderOf = lambda start, epoch: None
) -> list[Remains]:
    """The files that the shard in `directory` has set aside, oldest offsets first; with `log_too`, its log as well."""
    names = _names(disk, directory)
    aside = [f"{ASIDE}/{name}" for name in _names(disk, f"{directory}/{ASIDE}") if SEGMENT_SUFFIX in name]
    logs = [name for name in names if parse_segment_name(name) is not None]
    found = []
    for name in sorted([*aside, *(logs if log_too else [])], key=lambda name: name.rpartition("/")[2]):
        path = f"{directory}/{name}"
        header = decode_header(_head(disk, path))
        if isinstance(header, SegmentHeader):
            found.append(Remains(path, header, HEADER_BYTES))
        else:
            beside = [f"{directory}/{other}" for other in (*logs, *aside)]
            found.append(Remains(path, _header_of_tail(disk, path, beside, header_of), 0))
    return found


class Salvage:
    """What can be brought back of one partition: the lost records in these files."""

    def __init__(self, disk: Disk, files: Sequence[Remains], topic: Topic, partition: int) -> None:
        self.files = files
        self.topic = topic
        self.partition = partition
        self._disk = disk

    @cached_property
    def listed(self) -> list[Listed]:
        """What each file holds, and how much of it the topic has lost."""
        ended = Removals()
        found = [_surveyed(self._disk, file, ended) for file in self.files]
        spans = [(item.start, item.stop) for item in found if item.start is not None and item.stop is not None]
        lost = lost_offsets(self.topic, self.partition, _merged(spans))
        # An offset means one record for ever: what had been deleted when it was lost stays deleted.
        lost.remove_range(0, ended.floor.earliest)
        self._lost = BitMap64(offset for offset in lost if offset not in ended.deletes)
        for item, file in zip(found, self.files, strict=True):
            item.lost = sum(len(self._wanted(batch)) for batch in _batches(self._disk, file))
        return found

    def copy_to(
        self, target: Topic | None, *, apply: bool, on_records: Callable[[int], None] = lambda count: None
    ) -> Salvaged:
        """Append every lost record to the target, once, with headers that say where it comes from.

        On return each is there; a repetition finds it there and appends nothing. Without `apply`, or without a
        target, it is only counted. `on_records` is called with the records of the files that have been gone through.
        """
        counted = Salvaged()
        if not any(item.lost for item in self.listed):
            return counted
        there = self._there(target) if target is not None else {}
        for file in self.files:
            for batch in _batches(self._disk, file):
                wanted = self._wanted(batch)
                known = there.setdefault(batch.epoch, BitMap64())
                fresh = wanted - known
                if fresh and apply and target is not None:
                    _append(target, self.partition, self.topic.spec, batch, fresh)
                counted.present += len(wanted) - len(fresh)
                counted.copied += len(fresh)
                known |= fresh
                on_records(batch.count)
        return counted

    def _wanted(self, batch: Batch) -> BitMap64:
        return BitMap64(range(batch.base, batch.end)) & self._lost

    def _there(self, target: Topic) -> dict[int, BitMap64]:
        """The offsets, by epoch, that the target has copies of already."""
        there: dict[int, BitMap64] = {}
        # In the topic itself a copy stands behind what was lost.
        start = Position.at_offset(self._lost.min()) if target.spec == self.topic.spec else EARLIEST
        for record in target.read(start, partition=self.partition, on_gap=lambda partition, gap: None):
            if record.headers:
                for offset, epoch in _origins(record.headers, self.topic.spec.topic_id, self.partition):
                    there.setdefault(epoch, BitMap64()).add(offset)
        return there


@contextlib.contextmanager
def salvages(
    log: Storage, name: str | TopicName, *, partition: int | None = None, source: str | PurePath | None = None
) -> Iterator[list[Salvage]]:
    """For each partition, or this one, what the directory `source` has set aside; without `source`, that of the log.

    The log is that of the directory which has the topic now: only its owner knows what is lost, and may append.
    """
    topic = log.topic(name)
    if log.path is None and log.read_only:
        raise Unsupported(
            f"this log has no data directory: salvage {topic.name} in the process that owns its directory"
        )
    if log.path is None or topic.spec.engine is not Engine.SEGMENT:
        where = "in a RocksDB database" if topic.spec.engine is Engine.ROCKSDB else "in the memory of its owner"
        raise Unsupported(f"{topic.name} lives {where}: it never sets anything aside")
    chosen = _chosen(topic, partition)
    clock, settings = SystemClock(), log.settings
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(contextlib.closing(SystemDisk(settings.runtime.descriptors_max)))
        here = LogDirectory.look(log.path, disk)
        directory = here if source is None else LogDirectory.look(source, disk)
        found = look(log.path, settings, disk, clock)
        stores = stack.enter_context(contextlib.closing(Stores(found, settings, disk=disk, clock=clock)))
        metadata = stack.enter_context(metadata_of(here, settings, disk, clock))
        made = []
        for place in found.places():
            if place.spec != topic.spec or place.partition not in chosen:
                continue
            _check_holder(found, topic, place.partition)
            history = HistoryPlaces.of(place, metadata, stores, found.prefix)
            assert history is not None
            files = remains(
                disk,
                f"{directory.shards}/{place.id}",
                log_too=_is_left_behind(directory, found, disk),
                header_of=header_in_history(history),
            )
            made.append(Salvage(disk, files, topic, place.partition))
        yield made


def target_of(log: Storage, found: Sequence[Salvage], into: str | TopicName | None, *, create: bool) -> Topic | None:
    """The topic that records are copied into, their own without `into`; `None` if it is missing and not to be made."""
    topic = found[0].topic
    if into is None:
        return topic
    try:
        target = log.topic(into)
    except UnknownTopic:
        if not create or not any(one.files for one in found):
            return None
        spec = topic.spec
        return log.create_topic(
            into, partitions=spec.partitions, durability=spec.durability, compression=spec.compression
        )
    if target.spec == topic.spec:
        raise Invalid(f"into names {topic.name} itself: to append the records there again, leave it out (--append)")
    if target.spec.engine is not Engine.SEGMENT or target.partitions < topic.partitions:
        raise Conflict(
            f"{target.name} has {target.partitions} partitions on the {target.spec.engine} engine, and {topic.name} "
            f"{topic.partitions} on segments: name another topic, or one that does not exist yet"
        )
    return target


def _chosen(topic: Topic, partition: int | None) -> range:
    if partition is None:
        return range(topic.partitions)
    if not 0 <= checked_partition(partition) < topic.partitions:
        raise Invalid(f"partition is {partition}; {topic.name} has 0 to {topic.partitions - 1}")
    return range(partition, partition + 1)


def _check_holder(found: Inspected, topic: Topic, partition: int) -> None:
    """Only the directory that has the topic now knows what is lost, and may append."""
    state = found.state(topic.spec, partition)
    if state is not None and state.holder not in (None, found.id):
        raise Moved(
            f"{topic.name}[{partition}] is in {found.directory_name(state.holder)} now, and {found.path} is "
            f"{found.id}: open that one (--data), and name the one that has the files as the source (--from)"
        )


def _is_left_behind(directory: LogDirectory, found: Inspected, disk: Disk) -> bool:
    """Whether the other directory was left as its process died, so that its files lie where they were written."""
    return directory.id != found.id and not is_owned(directory.path, disk)


def lost_offsets(topic: Topic, partition: int, spans: Sequence[tuple[int, int]]) -> BitMap64:
    """The offsets within the spans that the topic reports as lost or damaged when it is read."""
    lost = BitMap64()

    def note(partition: int, gap: Gap) -> None:
        if gap.reason in (Reason.LOST, Reason.DAMAGED):
            lost.update(range(gap.start, gap.stop))

    for start, stop in spans:
        for _ in topic.read_arrow(start, stop=stop, partition=partition, on_gap=note):
            pass
    return lost


def header_in_history(history: HistoryPlaces) -> HeaderOf:
    """Asks the store for the header of a segment that is not here any more."""

    def header_of(start: int, epoch: int) -> bytes | None:
        for piece in history.read().pieces:
            named = piece.descriptor
            if named.start == start and named.kind is DescriptorKind.FRAMES and not is_local(named):
                return history.stores.of(named.store).get_range(named.object_key, 0, HEADER_BYTES)
        return None

    return header_of


def origin_headers(spec: TopicSpec, record: Record, epoch: int) -> Headers:
    """What a copy says of its original, behind the headers that it had."""
    said = {
        "topic": str(spec.name),
        "topic-id": spec.topic_id,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "epoch": str(epoch),
    }
    return (*record.headers, *((ORIGIN + name, value.encode()) for name, value in said.items()))


def _append(target: Topic, partition: int, spec: TopicSpec, batch: Batch, wanted: BitMap64) -> None:
    """Append the wanted records of a batch in a few appends, each well below the largest frame."""
    group: list[Record] = []
    size = 0
    for record in batch.records(partition):
        if record.offset not in wanted:
            continue
        group.append(record)
        size += len(record.value or b"") + len(record.key or b"")
        if size >= APPEND_BYTES:
            _append_group(target, partition, spec, group, batch.epoch)
            group, size = [], 0
    if group:
        _append_group(target, partition, spec, group, batch.epoch)


def _append_group(target: Topic, partition: int, spec: TopicSpec, group: list[Record], epoch: int) -> None:
    target.append_many(
        [record.value for record in group],
        keys=[record.key for record in group],
        tags=[record.tag for record in group],
        headers=[origin_headers(spec, record, epoch) for record in group],
        timestamps=[record.timestamp for record in group],
        partition=partition,
        atomic=False,
    )


def _origins(headers: Headers, topic_id: str, partition: int) -> Iterator[tuple[int, int]]:
    """What a record is a copy of. A copy that was lost and brought back itself is one of several."""
    columns = [[value for name, value in headers if name == ORIGIN + part] for part in _IDENTITY]
    for said in zip(*columns, strict=False):
        with contextlib.suppress(ValueError):
            if said[0] == topic_id.encode() and int(said[1] or b"") == partition:
                yield int(said[2] or b""), int(said[3] or b"")


def _surveyed(disk: Disk, file: Remains, ended: Removals) -> Listed:
    """What the file holds; `ended` learns what it says of deletes and floors."""
    item = Listed(path=file.path, is_tail=file.is_tail, readable=file.header is not None)
    epochs: set[int] = set()
    for step in _steps(disk, file):
        if isinstance(step, Damaged):
            item.damaged.append(step)
            continue
        if isinstance(step, Removals):
            ended.add(step)
            continue
        item.start = step.base if item.start is None else min(item.start, step.base)
        item.stop = max(item.stop or 0, step.end)
        item.records += step.count
        epochs.add(step.epoch)
    item.epochs = sorted(epochs)
    return item


def _batches(disk: Disk, file: Remains) -> Iterator[Batch]:
    return (step for step in _steps(disk, file) if isinstance(step, Batch))


def _steps(disk: Disk, file: Remains) -> Iterator[Batch | Removals | Damaged]:
    """Every whole frame with records or deletes, wherever it stands, and the bytes between them that are none."""
    if file.header is None:
        return
    with contextlib.closing(disk.open(file.path)) as opened:
        size, start = opened.size(), file.header.start
        for step in walk(opened, salted(file.header.salt), file.begins, size, expected=start, end=start):
            match step:
                case DataFrames():
                    for head, place in step.each():
                        yield _records_of(step, head, place)
                case ControlFrame():
                    if step.head.kind in KINDS:
                        yield _removals_of(step)
                case Unreadable():
                    if step.verdict is Verdict.NEWER:
                        raise UnsupportedFormat(
                            f"{file.path} has at byte {step.byte} a frame of a newer version: upgrade"
                        )
                    yield Damaged(step.byte, step.stop - step.byte)


def _records_of(data: DataFrames, head: FrameHead, place: int) -> Batch | Damaged:
    try:
        return decode(data.buffer, place, head)
    except Corrupt:
        return Damaged(data.origin + place, head.length)


def _removals_of(control: ControlFrame) -> Removals | Damaged:
    found = Removals()
    try:
        found.take(control.head, control.buffer, control.position)
    except Corrupt:
        return Damaged(control.origin + control.position, control.head.length)
    return found


def _header_of_tail(disk: Disk, path: str, beside: Sequence[str], header_of: HeaderOf) -> SegmentHeader | None:
    """The header of the file that a tail was cut from: its salt starts the checksum of every frame."""
    name = path.rpartition("/")[2].partition(SEGMENT_SUFFIX)[0] + SEGMENT_SUFFIX
    named = parse_segment_name(name)
    if named is None:
        return None
    for other in beside:
        if other != path and other.rpartition("/")[2].startswith(name):
            header = decode_header(_head(disk, other))
            if isinstance(header, SegmentHeader):
                return header
    stored = header_of(*named)
    header = decode_header(stored) if stored is not None else Verdict.TORN
    return header if isinstance(header, SegmentHeader) else None


def _head(disk: Disk, path: str) -> bytes:
    with contextlib.closing(disk.open(path)) as file:
        return file.read_at(HEADER_BYTES, 0)


def _names(disk: Disk, directory: str) -> list[str]:
    return disk.list_directory(directory) if disk.exists(directory) else []


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
