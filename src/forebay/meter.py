"""Counts what an open log does, as counters and histograms that a status shows and a server can publish.

One `LogMeter` for each open log. Each shard counts on its own, without a lock; the meter adds up what all shards have
counted, also those that were closed, moved or deleted since: a counter never falls while the log is open. Knows no
server and no format of metrics.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple, TypeAlias

from forebay.clock import Clock
from forebay.locks import Rank, RankedRLock
from forebay.topics import NAMESPACE_DEFAULT

BOUNDS_SECONDS: Final = (
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01,
    0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""The upper ends of a histogram's ranges, each included; a last range has everything above."""
TOPICS_MAX: Final = 1000
"""So many topics get numbers of their own; those of further topics count without a name."""


class MetricKind(Enum):
    """How a metric behaves."""

    COUNTER = "counter"
    """Only grows while the log is open."""
    GAUGE = "gauge"
    """What is so now."""
    HISTOGRAM = "histogram"
    """Durations, counted by their range."""


class Metric(Enum):
    """Everything that is counted, under the name a server publishes it by."""

    kind: MetricKind
    help: str

    APPEND_SECONDS = (
        "forebay_wal_append_latency_seconds",
        MetricKind.HISTOGRAM,
        "From taking queued appends to the answer",
    )
    FSYNC_SECONDS = ("forebay_wal_fsync_latency_seconds", MetricKind.HISTOGRAM, "Syncs of log files")
    PAUSE_SECONDS = (
        "forebay_wal_pause_seconds",
        MetricKind.HISTOGRAM,
        "Pauses of appends for a bulk load",
    )
    BYTES_WRITTEN = ("forebay_wal_bytes_written_total", MetricKind.COUNTER, "Bytes of records written to log files")
    RECORDS = ("forebay_wal_records_total", MetricKind.COUNTER, "Records appended")
    COMMITS = (
        "forebay_wal_commits_total",
        MetricKind.COUNTER,
        "Commits: one write, and a sync where the class asks for it",
    )
    ROTATIONS = ("forebay_wal_rotations_total", MetricKind.COUNTER, "Log files begun in place of full or old ones")
    CACHE_BYTES = ("forebay_wal_cache_bytes", MetricKind.GAUGE, "Bytes of the newest records held in memory")
    CACHE_HITS = ("forebay_wal_cache_hits_total", MetricKind.COUNTER, "Reads of new records answered from memory")
    CACHE_MISSES = ("forebay_wal_cache_misses_total", MetricKind.COUNTER, "Reads of new records that went to a file")
    EXPORT_CYCLE_SECONDS = ("forebay_export_cycle_seconds", MetricKind.HISTOGRAM, "Exports of one sealed segment each")
    EXPORT_BYTES = ("forebay_export_bytes_total", MetricKind.COUNTER, "Bytes of segments made history")
    EXPORT_OBJECTS = ("forebay_export_objects_total", MetricKind.COUNTER, "Segments made history")
    EXPORT_ERRORS = ("forebay_export_errors_total", MetricKind.COUNTER, "Exports that failed")
    EXPORT_LAG_BYTES = (
        "forebay_export_lag_bytes",
        MetricKind.GAUGE,
        "Bytes of full log files that are not history yet",
    )
    EXPORT_LAG_SECONDS = (
        "forebay_export_lag_seconds",
        MetricKind.GAUGE,
        "How long ago the oldest of them was appended to last",
    )
    HISTORY_QUERY_SECONDS = (
        "forebay_history_query_seconds",
        MetricKind.HISTOGRAM,
        "Reads of objects of history",
    )
    HISTORY_BYTES_READ = (
        "forebay_history_bytes_read_total",
        MetricKind.COUNTER,
        "Bytes of objects of history read",
    )
    METADATA_PUT_SECONDS = ("forebay_metadata_put_seconds", MetricKind.HISTOGRAM, "Transactions that write metadata")
    METADATA_DESCRIPTOR_WRITES = (
        "forebay_metadata_descriptor_writes_total", MetricKind.COUNTER, "Descriptors of segments written",
    )  # fmt: skip
    SUBSCRIPTION_DELIVERIES = (
        "forebay_subscription_deliveries_total", MetricKind.COUNTER, "Records delivered to consumers of subscriptions",
    )  # fmt: skip
    SUBSCRIPTION_REDELIVERIES = (
        "forebay_subscription_redeliveries_total", MetricKind.COUNTER, "Those that were delivered before",
    )  # fmt: skip
    SUBSCRIPTION_DEAD_LETTERS = (
        "forebay_subscription_dead_letters_total", MetricKind.COUNTER, "Spent records sent to dead-letter topics",
    )  # fmt: skip
    SUBSCRIPTION_CONSUMERS = (
        "forebay_subscription_consumers", MetricKind.GAUGE, "Consumers attached to subscriptions",
    )  # fmt: skip
    SUBSCRIPTION_LAG = (
        "forebay_subscription_lag", MetricKind.GAUGE, "Offsets not done by subscriptions",
    )  # fmt: skip
    READER_LAG = ("forebay_reader_lag", MetricKind.GAUGE, "Offsets not done by readers and groups")
    LAG_AGE_SECONDS = (
        "forebay_lag_age_seconds", MetricKind.GAUGE, "How long ago the cursors were looked at that lags are made of",
    )  # fmt: skip
    DISK_FREE_BYTES = (
        "forebay_disk_free_bytes", MetricKind.GAUGE, "Free bytes of the disks that the log is written to",
    )  # fmt: skip
    DISK_FREE_BYTES_MIN = (
        "forebay_disk_free_bytes_min", MetricKind.GAUGE, "Below so many free bytes appends are refused",
    )  # fmt: skip
    SUBSCRIPTION_HELD = (
        "forebay_subscription_held", MetricKind.GAUGE, "Records that consumers hold and have not acknowledged",
    )  # fmt: skip
    SUBSCRIPTION_SPENT = (
        "forebay_subscription_spent",
        MetricKind.GAUGE,
        "Records that were delivered as often as they may be, and block their partition or wait for the dead letters",
    )
    SHARDS_OPEN = ("forebay_shards_open", MetricKind.GAUGE, "Shards open in this process")
    SHARDS_FAILED = ("forebay_shards_failed", MetricKind.GAUGE, "Open shards that refuse appends")
    THREADS_STUCK = (
        "forebay_threads_stuck", MetricKind.GAUGE, "Threads of a worker that wait for a disk or a store without answer",
    )  # fmt: skip

    def __new__(cls, name: str, kind: MetricKind, text: str) -> Metric:
        metric = object.__new__(cls)
        metric._value_ = name
        metric.kind = kind
        metric.help = text
        return metric


@dataclass(frozen=True, slots=True)
class Durations:
    """What a histogram has counted: how many durations fell into each range, and their sum."""

    counts: tuple[int, ...]
    """One for each of `BOUNDS_SECONDS`, and one for everything above."""
    sum: float

    @property
    def count(self) -> int:
        """How many durations there were."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """An upper bound of the duration that `share` of all stayed within; `None` without any.

        Beyond the last bound it is infinite: how much longer they took was not counted.
        """
        if not self.count:
            return None
        left = share * self.count
        for bound, count in zip((*BOUNDS_SECONDS, float("inf")), self.counts, strict=True):
            left -= count
            if left <= 0:
                return bound
        return float("inf")


class Histogram:
    """Durations counted by their range. One thread at a time observes; any may take the value."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self._sum += seconds

    def add(self, other: Histogram) -> None:
        """Count everything that another has counted."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def value(self) -> Durations:
        """What was counted so far."""
        return Durations(tuple(self._counts), self._sum)


Labels: TypeAlias = tuple[tuple[str, str], ...]
"""What a number is about, as pairs of a label and its value: durability class, engine, sometimes the topic."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One number, what it is, and what it is about."""

    metric: Metric
    labels: Labels
    value: float | Durations


class ShardCounts:
    """What one open shard has done. Any thread may look.

    The thread that holds the shard's commit lock counts, and cache hits and misses the one that holds the cache's.
    """

    __slots__ = (
        "append_seconds",
        "bytes_written",
        "cache_hits",
        "cache_misses",
        "commits",
        "fsync_seconds",
        "pause_seconds",
        "records",
        "rotations",
    )

    def __init__(self) -> None:
        self.bytes_written = self.commits = self.records = self.rotations = 0
        self.cache_hits = self.cache_misses = 0
        self.append_seconds, self.fsync_seconds, self.pause_seconds = Histogram(), Histogram(), Histogram()

    @property
    def fsyncs(self) -> int:
        """How many syncs of log files have succeeded."""
        return self.fsync_seconds.value().count

    def add(self, other: ShardCounts) -> None:
        """Count everything that another has counted."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, Histogram):
                mine.add(theirs)
            else:
                setattr(self, name, mine + theirs)

    def samples(self, labels: Labels) -> list[Sample]:
        """Everything counted, by its metric."""
        return [
            Sample(Metric.APPEND_SECONDS, labels, self.append_seconds.value()),
            Sample(Metric.FSYNC_SECONDS, labels, self.fsync_seconds.value()),
            Sample(Metric.PAUSE_SECONDS, labels, self.pause_seconds.value()),
            Sample(Metric.BYTES_WRITTEN, labels, self.bytes_written),
            Sample(Metric.RECORDS, labels, self.records),
            Sample(Metric.COMMITS, labels, self.commits),
            Sample(Metric.ROTATIONS, labels, self.rotations),
            Sample(Metric.CACHE_HITS, labels, self.cache_hits),
            Sample(Metric.CACHE_MISSES, labels, self.cache_misses),
        ]


class _Counting(NamedTuple):
    """A shard that counts, as long as its owner lives."""

    owner: weakref.ref[object]
    labels: Labels
    counts: ShardCounts


def _pattern(text: str) -> str:
    """A pattern of names as they are written in full: `orders` is the topic `default/orders`, `*` is every topic."""
    text = text.removeprefix("/")
    is_name = "/" not in text and not any(mark in text for mark in "*?[")
    return f"{NAMESPACE_DEFAULT}/{text}" if is_name else text


class LogMeter:
    """Adds up what all shards of a log count, and counts what concerns the log as a whole. Safe for concurrent use."""

    def __init__(self, clock: Clock, topics: Sequence[str] = ()) -> None:
        """Topics whose name one of these patterns matches (`shop/*`) get numbers of their own, at most `TOPICS_MAX`."""
        self._clock = clock
        self._topics = tuple(_pattern(topic) for topic in topics)
        self._lock = RankedRLock(Rank.LEAF, "meter.sums")
        """Its holder may take it again: a signal handler that shows the status may have interrupted it there."""
        self._is_folding = False
        self._named: set[str] = set()
        self._counting: dict[int, _Counting] = {}
        """By the identity of the counts."""
        self._gone: deque[int] = deque()
        """Of shards that are no more. The garbage collector adds to it at any time, so without a lock."""
        self._ended: dict[Labels, ShardCounts] = {}
        self._durations = {metric: Histogram() for metric in _OF_THE_LOG if metric.kind is MetricKind.HISTOGRAM}
        self._totals: dict[tuple[Metric, Labels], int] = {
            (metric, ()): 0 for metric in _OF_THE_LOG if metric.kind is MetricKind.COUNTER
        }

    def watch(self, owner: object, counts: ShardCounts, *, topic: str, durability: str, engine: str) -> None:
        """Add up what a shard counts, once. It stays in the sums when `owner`, which counts, is no more."""
        key = id(counts)
        with self._lock:
            self._fold()
            if key not in self._counting:
                owned = weakref.ref(owner, lambda _: self._gone.append(key))
                self._counting[key] = _Counting(owned, self._labels(topic, durability, engine), counts)

    def observe(self, metric: Metric, seconds: float) -> None:
        """Count a duration that concerns the log as a whole."""
        with self._lock:
            self._durations[metric].observe(seconds)

    def add(self, metric: Metric, number: int = 1, *, topic: str | None = None) -> None:
        """Count so many more, of the log as a whole; of a topic that gets numbers of its own by itself."""
        with self._lock:
            key = (metric, () if topic is None else self._topic_label(topic))
            self._totals[key] = self._totals.get(key, 0) + number

    def topic_label(self, topic: str) -> Labels:
        """What the numbers of a topic are labelled with: its name if it gets numbers of its own, else nothing."""
        with self._lock:
            return self._topic_label(topic)

    @contextmanager
    def timed(self, metric: Metric) -> Iterator[None]:
        """Count how long it takes, also if it fails."""
        begun = self._clock.monotonic()
        try:
            yield
        finally:
            self.observe(metric, self._clock.monotonic() - begun)

    def samples(self) -> list[Sample]:
        """Every counter and histogram now, by metric and labels. Gauges are the log's own to add."""
        with self._lock:
            self._fold()
            sums: dict[Labels, ShardCounts] = {}
            for labels, counts in self._ended.items():
                sums.setdefault(labels, ShardCounts()).add(counts)
            for counting in self._counting.values():
                sums.setdefault(counting.labels, ShardCounts()).add(counting.counts)
            found = [sample for labels, counts in sums.items() for sample in counts.samples(labels)]
            found += [Sample(metric, (), durations.value()) for metric, durations in self._durations.items()]
            found += [Sample(metric, labels, total) for (metric, labels), total in self._totals.items()]
        return sorted(found, key=lambda sample: (sample.metric.value, sample.labels))

    def _labels(self, topic: str, durability: str, engine: str) -> Labels:
        return (("durability", durability), ("engine", engine), *self._topic_label(topic))

    def _topic_label(self, topic: str) -> Labels:
        if topic not in self._named:
            if len(self._named) >= TOPICS_MAX or not any(fnmatchcase(topic, pattern) for pattern in self._topics):
                return ()
            self._named.add(topic)
        return (("topic", topic),)

    def _fold(self) -> None:
        """Keep what shards that are no more have counted. The caller holds the lock."""
        if self._is_folding:
            return  # in a signal handler that has interrupted this
        try:
            self._is_folding = True
            while self._gone:
                ended = self._counting.get(self._gone[0])
                if ended is not None:
                    # In this order: whatever interrupts it (Ctrl-C), no sum falls.
                    self._ended.setdefault(ended.labels, ShardCounts()).add(ended.counts)
                    del self._counting[self._gone[0]]
                self._gone.popleft()
        finally:
            self._is_folding = False


_OF_THE_LOG: Final = (
    Metric.EXPORT_CYCLE_SECONDS,
    Metric.EXPORT_BYTES,
    Metric.EXPORT_OBJECTS,
    Metric.EXPORT_ERRORS,
    Metric.HISTORY_QUERY_SECONDS,
    Metric.HISTORY_BYTES_READ,
    Metric.METADATA_PUT_SECONDS,
    Metric.METADATA_DESCRIPTOR_WRITES,
    Metric.SUBSCRIPTION_DELIVERIES,
    Metric.SUBSCRIPTION_REDELIVERIES,
    Metric.SUBSCRIPTION_DEAD_LETTERS,
)
