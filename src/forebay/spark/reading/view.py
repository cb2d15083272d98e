"""Looks at topics: which offsets each partition holds now, where they lie, what of them ended.

Looks at a data directory beside its owner, at history alone, or has a broker look, and changes nothing. No handle
leaves this module. Knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from forebay.errors import Conflict, ForebayError, UnknownTopic, Unsupported
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened
from forebay.spark.place.reading import ReadPlace, opened_to_read
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


class PlaceViews(Protocol):
    """Looks at the topics of one kind of location. For one thread; `close` it."""

    @property
    def place(self) -> ReadPlace:
        """The location, opened."""

    def look(self, topics: Topics) -> Snapshot:
        """Everything that these topics hold now."""

    def close(self) -> None:
        """Give back what is held."""


class FileViews:
    """The `PlaceViews` of files: a data directory beside its owner, or history alone."""

    def __init__(self, location: Location) -> None:
        self.place = Opened(location)
        self._shards: dict[str, ViewedShard] = {}
        self._loads = LoadsSeen()

    def look(self, topics: Topics) -> Snapshot:
        """See `PlaceViews`."""
        refs = [ref for spec in self._specs(topics) for ref in refs_of(spec)]
        views = self._loads.whole(lambda: [self._viewed(ref).look() for ref in refs])
        return Snapshot(location=self.place.location, shards=tuple(views))

    def close(self) -> None:
        """See `PlaceViews`."""
        for shard in self._shards.values():
            shard.close()
        self.place.close()

    def _specs(self, topics: Topics) -> list[TopicSpec]:
        definitions = self.place.definitions
        if topics.pattern is not None:
            return _matching(definitions.all(), topics.pattern)
        found = [definitions.get(name) for name in topics.names]
        for spec in found:
            _refuse_private(spec)
            _refuse_another(str(spec.name), spec.topic_id, topics.topic_id)
        return found

    def _viewed(self, ref: ShardRef) -> ViewedShard:
        if ref.id not in self._shards:
            self._shards[ref.id] = self.place.viewed(ref, self._loads)
        return self._shards[ref.id]


class BrokerViews:
    """The `PlaceViews` of a broker, which looks by itself: each topic at one moment, one topic after the other."""

    def __init__(self, location: Location) -> None:
        from forebay.spark.place.broker import BrokerPlace

        self.place = BrokerPlace(location)

    def look(self, topics: Topics) -> Snapshot:
        """See `PlaceViews`. Executors find the store of history by the location of the snapshot."""
        names = [str(name) for name in topics.names]
        if topics.pattern is not None:
            names = [str(spec.name) for spec in _matching(self.place.specs(), topics.pattern)]
        views: list[ShardView] = []
        location = self.place.location
        for name in names:
            found, store = self.place.look(name)
            if topics.pattern is None:
                _refuse_another(name, found[0].topic_id, topics.topic_id)
            views += found
            location = self.place.location.with_store(store)
        return Snapshot(location=location, shards=tuple(views))

    def close(self) -> None:
        """See `PlaceViews`."""
        self.place.close()


class Viewer:
    """Looks at topics as often as asked; what has not changed costs little. For one thread; `close` it."""

    def __init__(self, location: Location) -> None:
        self._views: PlaceViews = FileViews(location) if location.broker is None else BrokerViews(location)

    def look(self, topics: Topics) -> Snapshot:
        """Everything that these topics hold now. Raises `UnknownTopic`, `Conflict` and `Unsupported` by name."""
        return self._views.look(topics)

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
            found.setdefault(view.topic, {})[view.partition] = self._at_time(snapshot, view, timestamp)
        return replace(limit, by_topic=found, is_time=False)

    def close(self) -> None:
        """Give back what is held."""
        self._views.close()

    def _at_time(self, snapshot: Snapshot, view: ShardView, timestamp: int) -> int:
        with opened_to_read(snapshot.location, {view.topic_id: view.topic}) as found:

            def now(start: int, stop: int) -> Sequence[ScanPiece]:
                return look_again(found, view.topic_id, view.topic, view.partition, start, stop)

            reader = PieceReader(found, view.shard, view.pieces, str(view), now)
            with contextlib.closing(reader):
                offset = reader.first_at_time(timestamp, view.earliest, view.next, view.deleted)
        return FROM_LATEST if offset is None else offset


def _matching(specs: Iterable[TopicSpec], pattern: str) -> list[TopicSpec]:
    """The topics whose names match, without those that only their owner can read."""
    found = [spec for spec in specs if re.fullmatch(pattern, str(spec.name))]
    readable = [spec for spec in found if spec.engine is Engine.SEGMENT]
    for spec in found:
        if spec not in readable:
            logger.warning("%s matches %s, but only its owner can read it: left out", spec.name, pattern)
    if not readable:
        raise UnknownTopic(f'no topic matches {pattern}: see "forebay topic list" for what there is')
    return readable


def look_again(
    found: ReadPlace, topic_id: str, topic: str, partition: int, start: int, stop: int
) -> Sequence[ScanPiece]:
    """Where offsets of a partition lie now, gaps for those that ended by a floor; nothing where the topic is gone."""
    view = found.view(topic_id, topic, partition)
    if view is None:
        return []
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


def _refuse_another(name: str, found: str, wanted: str | None) -> None:
    if wanted not in (None, found):
        raise Conflict(
            f"{name} is not the topic that is meant: it has the id {found} and not {wanted}, for it was deleted and "
            "created again; load it again"
        )
