"""A stream over topics: where it begins, how far it can go now, and the tasks that read from one point to the next.

Spark asks some ninety times a second how far it can go: it is answered from the last look, until that is old.
What a query has read is never shown otherwise without a word: a topic created again, a directory that is an older
copy, records that were evicted before they were read are named failures. Knows nothing of Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from forebay.clock import Clock
from forebay.errors import Conflict, DataLoss, Unavailable
from forebay.spark.reading.options import Limit, ReadOptions, Topics
from forebay.spark.reading.plan import plan
from forebay.spark.reading.snapshot import Range, ShardView, Snapshot, Split
from forebay.spark.reading.streaming.admission import Backlog, WeighedRange, admitted, clipped
from forebay.spark.reading.streaming.offsets import Place, Point, StreamOffsets, TopicPoints

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.2
"""How long one look answers for; longer if it was costly."""
LOOK_SHARE: Final = 0.05
"""How much of the time may go into looking while there is nothing to read."""
AWAY_SECONDS: Final = 60.0
"""How long the last look answers while there is no other to be had, as when the metadata store changes its leader."""
WAIT_SECONDS: Final = 10.0
"""How long an owner that has just come may take to show again what a stream has read already."""
_PAUSE_SECONDS: Final = 0.1
_UNREAD: Final = Point(0, 0)
"""Where partitions and topics begin that are new."""


class Views(Protocol):
    """What a stream asks of `forebay.spark.reading.view.Viewer`."""

    def look(self, topics: Topics) -> Snapshot:
        """Everything that these topics hold now."""

    def ranges(
        self, snapshot: Snapshot, starting: Limit, ending: Limit, *, fail_on_data_loss: bool
    ) -> tuple[Range, ...]:
        """The offsets between these limits, fixed."""


class TopicStream:
    """One run of a streaming query over the topics of its options. For one thread."""

    def __init__(self, options: ReadOptions, views: Views, clock: Clock) -> None:
        self._options = options
        self._views = views
        self._clock = clock
        self._seen: Snapshot | None = None
        self._seen_at = 0.0
        self._look_again_at = 0.0
        self._target: StreamOffsets | None = None
        self._warned: set[str] = set()

    def initial(self) -> StreamOffsets:
        """Where a query begins that has no checkpoint yet, by its options."""
        snapshot = self._look()
        options = self._options
        wanted = self._views.ranges(
            snapshot, options.starting, options.ending, fail_on_data_loss=options.fail_on_data_loss
        )
        starts = {found.shard: found.start for found in wanted}
        return _offsets((view, starts.get(shard, view.next)) for shard, view in enumerate(snapshot.shards))

    def newest(self) -> StreamOffsets:
        """The end of every partition, as far as is known."""
        return _offsets((view, view.next) for view in self._recent().shards)

    def fix_target(self) -> None:
        """From now on the stream ends where its topics end now."""
        self._target = _offsets((view, view.next) for view in self._look().shards)

    def latest(self, start: StreamOffsets, *, limited: bool = True) -> StreamOffsets:
        """How far the next micro-batch goes. Equal to `start` if there is nothing to read.

        Partitions and topics that are new begin at 0. `limited` keeps to the limits of the options.
        """
        views = self._covering(start)
        points = {place: point for place, point in start.places() if place in views}
        waiting: dict[Place, Backlog] = {}
        for place, view in views.items():
            read, stop = points.get(place, _UNREAD).offset, self._stop(place, view)
            if read < stop:
                waiting[place] = clipped(min(max(read, view.earliest), stop), stop, _records(view, read))
        ends = self._admitted(waiting, views) if limited else {place: found.stop for place, found in waiting.items()}
        for place, end in ends.items():
            if end > points.get(place, _UNREAD).offset:
                points[place] = Point(end, views[place].epoch)
        return _of_points(points, views)

    def splits(self, start: StreamOffsets, end: StreamOffsets, columns: tuple[str, ...]) -> list[Split]:
        """The tasks that read from one point to another; the same rows whenever they are planned.

        Of the records between the points they show those that meet the condition of the options. How far a micro-batch
        goes does not depend on it.
        """
        views = self._covering(end)
        assert self._seen is not None
        shards = {_place(view): shard for shard, view in enumerate(self._seen.shards)}
        ranges = []
        for place, point in end.places():
            read = (start.at(place) or _UNREAD).offset
            if place in views and read < point.offset:
                ranges.append(Range(shards[place], self._first(views[place], read, point.offset), point.offset))
        return plan(
            self._seen,
            [wanted for wanted in ranges if wanted.start < wanted.stop],
            columns=columns,
            filters=self._options.where,
            partitions_min=self._options.partitions_min,
            fail_on_data_loss=self._options.fail_on_data_loss,
        )

    def _admitted(self, waiting: Mapping[Place, Backlog], views: Mapping[Place, ShardView]) -> dict[Place, int]:
        ends = admitted(waiting, self._options.offsets_max)
        within = {
            place: clipped(waiting[place].start, end, _bytes(views[place], waiting[place].start))
            for place, end in ends.items()
            if end > waiting[place].start
        }
        return ends if self._options.bytes_max is None else {**ends, **admitted(within, self._options.bytes_max)}

    def _stop(self, place: Place, view: ShardView) -> int:
        if self._target is None:
            return view.next
        target = self._target.at(place)
        return 0 if target is None else min(view.next, target.offset)

    def _first(self, view: ShardView, offset: int, stop: int) -> int:
        """Where reading begins: there, unless what lies there was evicted."""
        if offset >= view.earliest:
            return offset
        gone = (
            f"{view}: this query stands at offset {offset}, and the earliest there is {view.earliest}: "
            "what lay between was evicted before it was read"
        )
        if self._options.fail_on_data_loss:
            raise DataLoss(
                f"{gone}; set failOnDataLoss to false to go on without it", shard=view, start=offset, stop=view.earliest
            )
        logger.warning("%s: %d offsets are skipped", gone, min(view.earliest, stop) - offset)
        return view.earliest

    def _covering(self, offsets: StreamOffsets) -> dict[Place, ShardView]:
        """The partitions as they are now, of which none ends before these offsets."""
        deadline = self._clock.monotonic() + WAIT_SECONDS
        snapshot = self._recent()
        while True:
            offsets.check_lives({view.topic: view.topic_id for view in snapshot.shards})
            views = {_place(view): view for view in snapshot.shards}
            behind = [place for place, point in offsets.places() if not self._reaches(views.get(place), place, point)]
            if not behind:
                return views
            if self._clock.monotonic() >= deadline:
                place, point = behind[0], offsets.at(behind[0])
                assert point is not None
                raise Conflict(
                    f"{place}: this query has read up to offset {point.offset}, and the topic ends at "
                    f"{views[place].next}: it is another copy, or an older one; point the query at the one that it "
                    "read, or begin again with a new checkpointLocation"
                )
            self._clock.sleep(_PAUSE_SECONDS)
            snapshot = self._look()

    def _reaches(self, view: ShardView | None, place: Place, point: Point) -> bool:
        if view is None:
            self._lose(place.topic)
            return True
        if view.epoch < point.epoch:
            raise Conflict(
                f"{place}: this query has read it in epoch {point.epoch}, and now it is at epoch {view.epoch}: it is "
                "an older copy; point the query at the one that it read, or begin again with a new checkpointLocation"
            )
        return view.next >= point.offset

    def _lose(self, topic: str) -> None:
        gone = f"{topic} was deleted, and this query had not ended it"
        if self._options.fail_on_data_loss:
            raise DataLoss(f"{gone}: set failOnDataLoss to false to go on without it")
        self._warn(gone, "it goes on without it")

    def _warn(self, what: str, more: object) -> None:
        """Say it once."""
        if what not in self._warned:
            logger.warning("%s: %s", what, more)
            self._warned.add(what)

    def _recent(self) -> Snapshot:
        if self._seen is None:
            return self._look()
        if self._clock.monotonic() < self._look_again_at:
            return self._seen
        try:
            return self._look()
        except Unavailable as error:
            if self._clock.monotonic() - self._seen_at >= AWAY_SECONDS:
                raise
            self._warn("nothing new can be seen now", error)
            return self._seen

    def _look(self) -> Snapshot:
        began = self._clock.monotonic()
        try:
            self._seen = self._views.look(self._options.topics)
            self._seen_at = began
        finally:
            ended = self._clock.monotonic()
            self._look_again_at = ended + max(LOOK_SECONDS, (ended - began) / LOOK_SHARE)
        return self._seen


def _place(view: ShardView) -> Place:
    return Place(view.topic, view.partition)


def _records(view: ShardView, start: int) -> list[WeighedRange]:
    return [WeighedRange(p.start, p.stop, 0 if p.gap else p.stop - p.start) for p in view.pieces if p.stop > start]


def _bytes(view: ShardView, start: int) -> list[WeighedRange]:
    """What pieces weigh; of one whose size is not known, as of the newest records, each offset weighs something."""
    found = (piece for piece in view.pieces if piece.stop > start)
    return [WeighedRange(p.start, p.stop, 0 if p.gap else max(p.bytes, p.stop - p.start)) for p in found]


def _offsets(ends: Iterator[tuple[ShardView, int]]) -> StreamOffsets:
    found = [(view, offset) for view, offset in ends]
    points = {_place(view): Point(offset, view.epoch) for view, offset in found}
    return _of_points(points, {_place(view): view for view, _ in found})


def _of_points(points: Mapping[Place, Point], views: Mapping[Place, ShardView]) -> StreamOffsets:
    topics: dict[str, dict[int, Point]] = {}
    for place, point in points.items():
        topics.setdefault(place.topic, {})[place.partition] = point
    ids = {place.topic: view.topic_id for place, view in views.items()}
    return StreamOffsets({name: TopicPoints(ids[name], partitions) for name, partitions in topics.items()})
