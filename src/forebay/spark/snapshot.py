"""Topics at one moment: which offsets each partition holds, where they lie, what of them ended; and the tasks that
read them.

Looks at a data directory beside its owner, or at history alone, and changes nothing. What it finds is plain, so
that it can be sent to other processes; no handle leaves this module. Knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from forebay.catalog.removals import RecordedRemovals
from forebay.errors import Conflict, ForebayError, UnknownTopic, Unsupported
from forebay.format.control.frames import NO_FLOOR, Floor, higher
from forebay.format.control.offsets import OffsetSet
from forebay.format.metadata.descriptor import LoadStatus, SegmentDescriptor, ShardState, gap_descriptor
from forebay.records import Gap, Reason
from forebay.shard import ShardRef, refs_of
from forebay.spark.covers import Cover
from forebay.spark.filters import NO_FILTERS, Filters
from forebay.spark.loaded import FoundHistory, LoadsSeen
from forebay.spark.options import FROM_LATEST, Limit, ReadOptions, Topics
from forebay.spark.pieces import PieceReader, ScanPiece
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened
from forebay.spark.planning import PartitionBounds, Range, Size, check_partitions, joined, resolve, split
from forebay.topics import Engine, TopicSpec, shard_id
from forebay.wal.readonly import FollowedLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """One partition at one moment. Its pieces are all of `[earliest, next)`, in order."""

    topic: str
    topic_id: str
    partition: int
    is_durable: bool
    """Whether a loss of its records is one: those of class `memory` may go with their process."""
    epoch: int
    earliest: int
    next: int
    pieces: tuple[ScanPiece, ...]
    deleted: OffsetSet
    generation: int
    """Of the catalog: another one has other pieces."""
    floor: Floor = NO_FLOOR
    """Why it begins where it does: what lies below `evict_floor` was evicted, the rest deleted."""

    @property
    def shard(self) -> str:
        """The name of its shard."""
        return shard_id(self.topic_id, self.partition)

    @property
    def bounds(self) -> PartitionBounds:
        """What it holds."""
        return PartitionBounds(self.topic, self.partition, self.earliest, self.next)

    def pieces_of(self, start: int, stop: int) -> tuple[ScanPiece, ...]:
        """The pieces that have offsets of `[start, stop)`."""
        first = bisect_right(self.pieces, start, key=lambda piece: piece.stop)
        last = bisect_left(self.pieces, stop, key=lambda piece: piece.start)
        return self.pieces[first:last]

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What there is to read at one moment, whatever is appended later."""

    location: Location
    shards: tuple[ShardView, ...]

    @property
    def bounds(self) -> list[PartitionBounds]:
        """What each partition holds."""
        return [view.bounds for view in self.shards]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Offsets `[start, stop)` of one partition for one task, and where they lie. Plain values alone."""

    topic: str
    topic_id: str
    partition: int
    is_durable: bool
    start: int
    stop: int
    pieces: tuple[ScanPiece, ...]
    deleted: OffsetSet

    @property
    def shard(self) -> str:
        """The name of its shard."""
        return shard_id(self.topic_id, self.partition)

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What one task reads. Plain values alone: it travels to another process, perhaps on another machine."""

    location: Location
    parts: tuple[Part, ...]
    columns: tuple[str, ...]
    filters: Filters
    fail_on_data_loss: bool


def look(location: Location, topics: Topics) -> Snapshot:
    """Everything that these topics hold now."""
    with contextlib.closing(Viewer(location)) as viewer:
        return viewer.look(topics)


def load(options: ReadOptions) -> tuple[Snapshot, tuple[Range, ...]]:
    """Look, and fix the offsets that the options ask for."""
    with contextlib.closing(Viewer(options.location)) as viewer:
        snapshot = viewer.look(options.topics)
        return snapshot, viewer.asked(snapshot, options)


def load_or_look(options: ReadOptions) -> tuple[Snapshot, tuple[Range, ...] | None]:
    """Look, and fix the offsets that the options ask for; `None` in place of offsets that the topics do not have."""
    with contextlib.closing(Viewer(options.location)) as viewer:
        snapshot = viewer.look(options.topics)
        try:
            return snapshot, viewer.asked(snapshot, options)
        except ForebayError as error:
            logger.info("%s; a stream with a checkpoint does not need them", error)
            return snapshot, None


def fix(snapshot: Snapshot, options: ReadOptions) -> tuple[Range, ...]:
    """The offsets of an earlier look that the options ask for. Raises what `load` raises."""
    with contextlib.closing(Viewer(options.location)) as viewer:
        return viewer.asked(snapshot, options)


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
    kept = joined(part for wanted in ranges for part in _kept(snapshot.shards[wanted.shard], wanted, filters))
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


class Viewer:
    """Looks at topics as often as asked; what has not changed costs little. For one thread; `close` it."""

    def __init__(self, location: Location) -> None:
        self._opened = Opened(location)
        self._shards: dict[str, ViewedShard] = {}
        self._loads = LoadsSeen()

    def look(self, topics: Topics) -> Snapshot:
        """Everything that these topics hold now. Raises `UnknownTopic`, `Conflict` and `Unsupported` by name."""
        refs = [ref for spec in self.specs(topics) for ref in refs_of(spec)]
        views = self._loads.whole(lambda: [self._viewed(ref).look() for ref in refs])
        return Snapshot(location=self._opened.location, shards=tuple(views))

    def specs(self, topics: Topics) -> list[TopicSpec]:
        """The definitions of these topics, as they are now."""
        definitions = self._opened.definitions
        if topics.pattern is None:
            found = [definitions.get(name) for name in topics.names]
            for spec in found:
                _refuse_private(spec)
                _refuse_another(spec, topics.topic_id)
            return found
        found = [spec for spec in definitions.all() if re.fullmatch(topics.pattern, str(spec.name))]
        readable = [spec for spec in found if spec.engine is Engine.SEGMENT]
        for spec in found:
            if spec not in readable:
                logger.warning("%s matches %s, but only its owner can read it: left out", spec.name, topics.pattern)
        if not readable:
            raise UnknownTopic(f'no topic matches {topics.pattern}: see "forebay topic list" for what there is')
        return readable

    def ranges(
        self, snapshot: Snapshot, starting: Limit, ending: Limit, *, fail_on_data_loss: bool
    ) -> tuple[Range, ...]:
        """The offsets between these limits, fixed."""
        fixed = [self.at_offsets(snapshot, limit) for limit in (starting, ending)]
        return tuple(resolve(snapshot.bounds, fixed[0], fixed[1], fail_on_data_loss=fail_on_data_loss))

    def asked(self, snapshot: Snapshot, options: ReadOptions) -> tuple[Range, ...]:
        """The offsets that the options ask for, fixed; `Invalid` names those that the topics do not have."""
        return self.ranges(snapshot, options.starting, options.ending, fail_on_data_loss=options.fail_on_data_loss)

    def at_offsets(self, snapshot: Snapshot, limit: Limit) -> Limit:
        """The limit by offsets: for a time, that of the first record which is not before it, or the end."""
        if not limit.is_time:
            return limit
        check_partitions(snapshot.bounds, limit)
        found: dict[str, dict[int, int]] = {}
        for view in snapshot.shards:
            timestamp = limit.at(view.topic, view.partition)
            found.setdefault(view.topic, {})[view.partition] = self._at_time(view, timestamp)
        return replace(limit, by_topic=found, is_time=False)

    def close(self) -> None:
        """Give back what is held."""
        for viewed in self._shards.values():
            viewed.close()
        self._opened.close()

    def _at_time(self, view: ShardView, timestamp: int) -> int:
        def now(start: int, stop: int) -> Sequence[ScanPiece]:
            return look_again(self._opened, view.topic_id, view.topic, view.partition, start, stop)

        reader = PieceReader(self._opened, view.shard, view.pieces, str(view), now)
        with contextlib.closing(reader):
            found = reader.first_at_time(timestamp, view.earliest, view.next, view.deleted)
        return FROM_LATEST if found is None else found

    def _viewed(self, ref: ShardRef) -> ViewedShard:
        if ref.id not in self._shards:
            self._shards[ref.id] = ViewedShard(self._opened, ref, self._loads)
        return self._shards[ref.id]


def look_again(opened: Opened, topic_id: str, topic: str, partition: int, start: int, stop: int) -> Sequence[ScanPiece]:
    """Where offsets of a partition lie now, gaps for those that ended by a floor; nothing where the topic is gone."""
    specs = [spec for spec in opened.definitions.all() if spec.topic_id == topic_id and str(spec.name) == topic]
    if not specs:
        return []
    with contextlib.closing(ViewedShard(opened, ShardRef(specs[0], partition), LoadsSeen())) as viewed:
        view = viewed.look()
    return [
        piece._replace(start=max(start, piece.start), stop=min(stop, piece.stop))
        for piece in (*_fallen(view), *view.pieces)
        if piece.start < stop and piece.stop > start
    ]


def _fallen(view: ShardView) -> Iterator[ScanPiece]:
    """What lies below the floors, as gaps."""
    evicted = min(view.floor.evict_floor, view.earliest)
    for gap in (Gap(0, evicted, view.floor.reason or Reason.CAP), Gap(evicted, view.earliest, Reason.DELETED)):
        if gap.start < gap.stop:
            ended = gap_descriptor(gap, topic_id=view.topic_id, epoch=view.epoch, created_at=0)
            yield ScanPiece(gap.start, gap.stop, 0, ended)


def _refuse_private(spec: TopicSpec) -> None:
    if spec.engine is Engine.MEMORY:
        raise Unsupported(f"{spec.name} lives in the memory of its owner: no other process, and so no Spark, reads it")
    if spec.engine is Engine.ROCKSDB:
        raise Unsupported(
            f"{spec.name} lives in a RocksDB database, which only its owner can open: Spark reads topics on engine "
            '"segment"; copy the records to one'
        )


def _refuse_another(spec: TopicSpec, topic_id: str | None) -> None:
    if topic_id not in (None, spec.topic_id):
        raise Conflict(
            f"{spec.name} is not the topic that is meant: it has the id {spec.topic_id} and not {topic_id}, for it was "
            "deleted and created again; load it again"
        )


class ViewedShard:
    """One partition, looked at again and again."""

    def __init__(self, opened: Opened, ref: ShardRef, loads: LoadsSeen) -> None:
        self._ref = ref
        self._loads = loads
        self._holder = opened.holder
        self._catalog = opened.catalog(ref)
        self._log = opened.log(ref.id)
        self._removals = RecordedRemovals(self._catalog)
        self._deleted = OffsetSet()
        self._deletes = 0
        self._history: FoundHistory | None = None
        self._descriptors: list[SegmentDescriptor] = []
        self._cover = Cover(opened.disk)

    def look(self) -> ShardView:
        """The partition as it is now."""
        # The log first: what it no longer has is recorded by then. Deletes before the catalog, which a compaction
        # changes first; the floor behind it, which moves before the catalog loses its front.
        local = self._local()
        before = self._state()
        if before is not None and before.deletes != self._deletes:
            self._deleted, self._deletes = self._deleted | self._removals.deleted(), before.deletes
        history, loads = self._loads.history_and_loads(self._catalog, self._catalogued)
        state = self._state()
        floor = state.floor if state is not None else NO_FLOOR
        deleted = self._deleted
        end = self._descriptors[-1].end if self._descriptors else history.next
        if local is not None and state is not None and state.holder not in (None, self._holder):
            local = None  # files here are what the shard was before it moved
        if local is not None:
            floor, deleted = higher(floor, local.removals.floor), deleted | local.removals.deletes
            end = max(end, local.head)
        given_up = {load for load, status in loads.items() if status is LoadStatus.ABANDONED}
        waits = {load for load, status in loads.items() if status is LoadStatus.OFFERED}
        first = next((each.start for each in self._descriptors if each.load_id in waits), end)
        end = max(floor.earliest, min(end, first))
        return ShardView(
            topic=str(self._ref.spec.name),
            topic_id=self._ref.spec.topic_id,
            partition=self._ref.partition,
            is_durable=self._ref.spec.durability.policy.writes_before_ack,
            epoch=state.epoch if state is not None else 0,
            earliest=floor.earliest,
            next=end,
            pieces=self._cover.pieces(floor.earliest, end, self._descriptors, given_up, local),
            deleted=deleted.clipped(floor.earliest, end),
            generation=history.generation,
            floor=floor,
        )

    def close(self) -> None:
        """Give back what is held."""
        if self._log is not None:
            self._log.close()

    def _local(self) -> FollowedLog | None:
        if self._log is not None:
            self._log.refresh()
        return self._log

    def _state(self) -> ShardState | None:
        stored = self._catalog.state()
        return stored.state if stored is not None and stored.state.incarnation == self._ref.spec.topic_id else None

    def _catalogued(self) -> FoundHistory:
        """Bring the descriptors up to date."""
        cur = self._catalog.frontier().cur
        if self._history is None or (cur.generation, cur.next) != (self._history.generation, self._history.next):
            self._descriptors = self._catalog.descriptors()
            named = frozenset(each.load_id for each in self._descriptors if each.load_id is not None)
            self._history = FoundHistory(cur.generation, cur.next, named)
        return self._history
