"""How far readers, groups and subscriptions are behind, by their stored cursors, and how much room the disks have.

A worker looks at the metadata store and at partitions that are not open here, at most every `LOOK_S` and only if the
numbers are asked for. They are shown from memory: a store or a partition that hangs makes them old, and holds up
neither the caller nor any other number. Looking acquires nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from forebay.clock import Clock
from forebay.errors import ForebayError, UnknownTopic
from forebay.meter import Labels, LogMeter, Metric, Sample
from forebay.progress import ReaderCursor, is_reserved
from forebay.storage.cursors import Cursors
from forebay.storage.deadletters import LogTopics
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.topics import TopicName, TopicSpec
from forebay.workers import Worker

if TYPE_CHECKING:
    from forebay.storage.topic import Topic

logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""So old the numbers may be before a worker looks again."""
FIRST_S: Final = 1.0
"""So long the first caller waits for the first look."""
SERIES_MAX: Final = 10_000
"""So many readers and subscriptions get numbers of their own; the others count with their topic."""

Place: TypeAlias = tuple[str, int]
"""A topic, by its name, and a partition."""


class StoredPlace(NamedTuple):
    """A cursor as it was stored, and where its partition ended then if it is not open here."""

    topic: str
    reader: str
    partition: int
    offset: int
    done_above: int
    is_subscription: bool
    end: int | None


class Lags:
    """The lags of one log. Safe for concurrent use by threads."""

    def __init__(
        self,
        cursors: Cursors,
        subscriptions: SubscriptionStore,
        topics: LogTopics,
        meter: LogMeter,
        clock: Clock,
        free_bytes: Callable[[], Mapping[str, int]],
    ) -> None:
        """`free_bytes` asks each disk that the log writes to, by what lies there."""
        self._cursors = cursors
        self._subscriptions = subscriptions
        self._topics = topics
        self._meter = meter
        self._clock = clock
        self._free_bytes = free_bytes
        self._free: Mapping[str, int] = {}
        self._places: tuple[StoredPlace, ...] = ()
        self._looked_at: float | None = None
        """When the newest look that has ended began."""
        self._first = threading.Event()
        self._asked: set[Place] = set()
        """Partitions that a thread is asking where they end: one that hangs there is not followed by a second."""
        self.worker = Worker("forebay-lags", self._look, clock=clock)

    def samples(
        self, ends: Mapping[Place, int], served: Mapping[tuple[str, str], Mapping[int, tuple[int, int]]]
    ) -> list[Sample]:
        """What is known now. `ends` are those of open partitions, `served` where subscriptions with consumers stand.

        Asks a worker for a newer look if the last one is old, and waits for the very first one for a moment.
        """
        looked_at = self._looked_at
        if looked_at is None or self._clock.monotonic() - looked_at >= LOOK_S:
            self.worker.wake()
            self._first.wait(FIRST_S)
        sums = self._sums(ends, served)
        found = [Sample(metric, labels, value) for (metric, labels), value in sums.items()]
        found += [Sample(Metric.DISK_FREE_BYTES, (("disk", disk),), size) for disk, size in self._free.items()]
        if self._looked_at is not None:
            found.append(Sample(Metric.LAG_AGE_SECONDS, (), self._clock.monotonic() - self._looked_at))
        return found

    def _sums(
        self, ends: Mapping[Place, int], served: Mapping[tuple[str, str], Mapping[int, tuple[int, int]]]
    ) -> Counter[tuple[Metric, Labels]]:
        """The lags, added up by the labels that each topic and reader gets."""
        sums: Counter[tuple[Metric, Labels]] = Counter({(Metric.SUBSCRIPTION_LAG, ()): 0, (Metric.READER_LAG, ()): 0})
        for place in (*self._elsewhere(served), *_served_places(served)):
            end = ends.get((place.topic, place.partition), place.end)
            if end is None:
                continue
            metric, word = (
                (Metric.SUBSCRIPTION_LAG, "subscription") if place.is_subscription else (Metric.READER_LAG, "reader")
            )
            labels = self._meter.topic_label(place.topic)
            if labels and ((metric, (*labels, (word, place.reader))) in sums or len(sums) < SERIES_MAX):
                labels = (*labels, (word, place.reader))
            sums[metric, labels] += max(0, end - place.offset - place.done_above)
        return sums

    def _elsewhere(self, served: Mapping[tuple[str, str], Mapping[int, tuple[int, int]]]) -> Iterable[StoredPlace]:
        """Stored places, but for those of subscriptions that are served here and stand further by now."""
        for place in self._places:
            if not place.is_subscription or place.partition not in served.get((place.topic, place.reader), ()):
                yield place

    def _look(self) -> None:
        """Look at all cursors, and at the ends of partitions that are not open here. In the worker's thread."""
        began = self._clock.monotonic()
        self._free = self._free_bytes()
        found: list[StoredPlace] = []
        look = _Look(self._subscriptions)
        for cursor in self._cursors.every():
            if not self.worker.goes_on():
                return
            if is_reserved(cursor.reader):
                continue
            try:
                place = self._place_of(cursor, look)
            except UnknownTopic:
                continue
            except ForebayError as error:
                # One that cannot be asked, as one in the memory of another process, keeps no other from being shown.
                logger.debug("the lag of %s in %s/%s is not known: %s", cursor.reader, *cursor[:2], error)
                continue
            if place is not None:
                found.append(place)
        self._places, self._looked_at = tuple(found), began
        self._first.set()

    def _place_of(self, cursor: ReaderCursor, look: _Look) -> StoredPlace | None:
        """The cursor with the end of its partition; `None` if it belongs to a topic or partition that is no more."""
        topic = self._topics.topic(TopicName(cursor.namespace, cursor.topic))
        progress, partition = cursor.progress, cursor.partition
        if progress.incarnation != topic.spec.topic_id or partition >= topic.partitions:
            return None
        if (topic.name, partition) not in look.ends:
            is_open = topic.shard_if_open(partition) is not None
            # Also of an open one, which knows then what its history ends in.
            end = self._end_of(topic, partition)
            look.ends[topic.name, partition] = None if is_open else end
        return StoredPlace(
            topic.name,
            cursor.reader,
            partition,
            progress.offset,
            progress.acked.count if progress.acked else 0,
            look.is_subscription(topic.spec, cursor.reader),
            look.ends[topic.name, partition],
        )

    def _end_of(self, topic: Topic, partition: int) -> int | None:
        """Where a partition ends that is not open here; `None` while another thread waits for that answer."""
        place = (topic.name, partition)
        if place in self._asked:
            return None
        self._asked.add(place)
        try:
            return topic.lag_end(partition)
        finally:
            self._asked.discard(place)


class _Look:
    """What one look has found out already."""

    def __init__(self, subscriptions: SubscriptionStore) -> None:
        self.ends: dict[Place, int | None] = {}
        """Of partitions that are not open here; `None` for others."""
        self._subscriptions = subscriptions
        self._names: dict[str, frozenset[str]] = {}
        """The subscriptions of each topic, by its id."""

    def is_subscription(self, topic: TopicSpec, reader: str) -> bool:
        """Whether a subscription of the topic has this name."""
        names = self._names.get(topic.topic_id)
        if names is None:
            found = self._subscriptions.of_topic(topic)
            names = self._names[topic.topic_id] = frozenset(spec.name for spec in found if not spec.is_ending)
        return reader in names


def _served_places(served: Mapping[tuple[str, str], Mapping[int, tuple[int, int]]]) -> Iterable[StoredPlace]:
    for (topic, name), places in served.items():
        for partition, (offset, done_above) in places.items():
            yield StoredPlace(topic, name, partition, offset, done_above, True, None)
