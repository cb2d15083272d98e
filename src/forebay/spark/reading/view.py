"""Looks at topics: which offsets each partition holds now, where they lie, what of them ended.

Looks at a data directory beside its owner, or at history alone, and changes nothing. No handle leaves this
module. Knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from dataclasses import replace

from forebay.errors import Conflict, ForebayError, UnknownTopic, Unsupported
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened
from forebay.spark.reading.options import FROM_LATEST, Limit, ReadOptions, Topics
from forebay.spark.reading.pieces import PieceReader
from forebay.spark.reading.plan import check_partitions, resolve
from forebay.spark.reading.snapshot import Range, ScanPiece, ShardView, Snapshot
from forebay.topics import Engine, ShardRef, TopicSpec, refs_of
from forebay.views.look import LoadsSeen, ViewedShard, fallen

logger = logging.getLogger(__name__)


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
        for shard in self._shards.values():
            shard.close()
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
            self._shards[ref.id] = viewed(self._opened, ref, self._loads)
        return self._shards[ref.id]


def viewed(opened: Opened, ref: ShardRef, loads: LoadsSeen) -> ViewedShard:
    """A partition to be looked at; `close` it."""
    log = opened.log(ref.id)
    return ViewedShard(ref, opened.catalog(ref), log, loads, holder=opened.holder, disk=opened.disk)


def look_again(opened: Opened, topic_id: str, topic: str, partition: int, start: int, stop: int) -> Sequence[ScanPiece]:
    """Where offsets of a partition lie now, gaps for those that ended by a floor; nothing where the topic is gone."""
    specs = [spec for spec in opened.definitions.all() if spec.topic_id == topic_id and str(spec.name) == topic]
    if not specs:
        return []
    with contextlib.closing(viewed(opened, ShardRef(specs[0], partition), LoadsSeen())) as shard:
        view = shard.look()
    return [
        piece._replace(start=max(start, piece.start), stop=min(stop, piece.stop))
        for piece in (*fallen(view), *view.pieces)
        if piece.start < stop and piece.stop > start
    ]


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
