"""What a log counts: sums that stay when their shard goes, ranges of durations, topics by name."""

from __future__ import annotations

import gc
import math
import threading

import pytest

from forebay.clock import SystemClock
from forebay.meter import (
    BOUNDS_SECONDS,
    TOPICS_MAX,
    Durations,
    Histogram,
    Labels,
    LogMeter,
    Metric,
    MetricKind,
    ShardCounts,
)
from tests.support.waiting import PATIENCE


class Owner:
    """Stands for the log of a shard: it counts as long as it lives."""

    def __init__(self, meter: LogMeter, topic: str = "default/a", durability: str = "fsync") -> None:
        self.counts = ShardCounts()
        meter.watch(self, self.counts, topic=topic, durability=durability, engine="segment")


def value(meter: LogMeter, metric: Metric, labels: Labels = ()) -> float | Durations:
    (found,) = (sample.value for sample in meter.samples() if sample.metric is metric and sample.labels == labels)
    return found


def labels(topic: str | None = None) -> Labels:
    pairs = (("durability", "fsync"), ("engine", "segment"))
    return pairs if topic is None else (*pairs, ("topic", topic))


def test_a_duration_falls_into_the_first_range_that_reaches_it() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS_SECONDS[0], BOUNDS_SECONDS[0] * 1.01, BOUNDS_SECONDS[-1] * 2):
        histogram.observe(seconds)
    counts = histogram.value().counts
    assert (counts[0], counts[1], counts[-1]) == (2, 1, 1)
    assert sum(counts) == histogram.value().count == 4
    assert histogram.value().sum == pytest.approx(BOUNDS_SECONDS[0] * 2.01 + BOUNDS_SECONDS[-1] * 2)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 0.001), (0.9, 0.001), (0.95, 1.0), (1.0, 1.0)])
def test_a_quantile_is_the_bound_that_so_many_stayed_within(share: float, expected: float) -> None:
    histogram = Histogram()
    for _ in range(90):
        histogram.observe(0.0009)
    for _ in range(10):
        histogram.observe(0.9)
    assert histogram.value().quantile(share) == expected


def test_a_quantile_of_nothing_is_none_and_one_beyond_the_last_bound_is_infinite() -> None:
    histogram = Histogram()
    assert histogram.value().quantile(0.5) is None
    histogram.observe(3600.0)
    assert histogram.value().quantile(0.5) == math.inf


def test_what_shards_of_one_class_and_engine_count_is_added_up() -> None:
    meter = LogMeter(SystemClock())
    owners = [Owner(meter, "default/1"), Owner(meter, "default/2")]
    for number, owner in enumerate(owners, 1):
        owner.counts.records += number
        owner.counts.fsync_seconds.observe(0.001)
    other = Owner(meter, "default/1", "disk")
    other.counts.records += 50
    assert value(meter, Metric.RECORDS, labels()) == 3
    fsyncs = value(meter, Metric.FSYNC_SECONDS, labels())
    assert isinstance(fsyncs, Durations)
    assert fsyncs.count == 2


@pytest.mark.slow
def test_sums_stay_when_the_shard_is_gone_and_go_on_when_it_is_opened_again() -> None:
    meter = LogMeter(SystemClock())
    owner = Owner(meter)
    owner.counts.records += 5
    owner.counts.append_seconds.observe(0.01)
    del owner
    gc.collect()
    assert value(meter, Metric.RECORDS, labels()) == 5
    again = Owner(meter)
    again.counts.records += 2
    assert value(meter, Metric.RECORDS, labels()) == 7
    durations = value(meter, Metric.APPEND_SECONDS, labels())
    assert isinstance(durations, Durations)
    assert durations.count == 1


def test_shards_that_come_and_go_leave_nothing_but_their_sum() -> None:
    meter = LogMeter(SystemClock())
    for _ in range(1000):
        owner = Owner(meter)
        owner.counts.records += 1
        del owner
    assert value(meter, Metric.RECORDS, labels()) == 1000
    assert len({sample.labels for sample in meter.samples()}) == 2


def test_a_shard_that_is_watched_twice_counts_once() -> None:
    meter = LogMeter(SystemClock())
    owner = Owner(meter)
    meter.watch(owner, owner.counts, topic="default/a", durability="fsync", engine="segment")
    owner.counts.records += 1
    assert value(meter, Metric.RECORDS, labels()) == 1


def test_what_fails_is_timed_too() -> None:
    meter = LogMeter(SystemClock())
    with pytest.raises(ZeroDivisionError), meter.timed(Metric.EXPORT_CYCLE_SECONDS):
        raise ZeroDivisionError
    durations = value(meter, Metric.EXPORT_CYCLE_SECONDS)
    assert isinstance(durations, Durations)
    assert durations.count == 1


def test_topics_that_a_pattern_names_have_numbers_of_their_own_up_to_a_limit() -> None:
    meter = LogMeter(SystemClock(), ("shop/*",))
    owners = [Owner(meter, f"shop/{number}") for number in range(TOPICS_MAX + 5)]
    for owner in (*owners, Owner(meter, "shop2/1")):
        owner.counts.records += 1
    assert value(meter, Metric.RECORDS, labels("shop/0")) == 1
    assert value(meter, Metric.RECORDS, labels()) == 6
    named = {sample.labels for sample in meter.samples() if dict(sample.labels).get("topic")}
    assert len(named) == TOPICS_MAX


@pytest.mark.parametrize("pattern", ["a", "default/a", "/default/a", "*", "def*/a", "default/[ab]"])
def test_a_topic_is_named_by_a_pattern_however_that_is_written(pattern: str) -> None:
    meter = LogMeter(SystemClock(), (pattern,))
    owner = Owner(meter, "default/a")
    owner.counts.records += 1
    assert value(meter, Metric.RECORDS, labels("default/a")) == 1


def test_what_concerns_the_log_is_counted_from_several_threads_without_a_loss() -> None:
    meter = LogMeter(SystemClock())

    def count() -> None:
        for _ in range(2000):
            meter.add(Metric.EXPORT_BYTES, 3)
            meter.observe(Metric.HISTORY_QUERY_SECONDS, 0.001)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(meter, Metric.EXPORT_BYTES) == 24_000
    durations = value(meter, Metric.HISTORY_QUERY_SECONDS)
    assert isinstance(durations, Durations)
    assert durations.count == 8000


def test_every_metric_has_a_name_of_its_kind_and_says_what_it_counts() -> None:
    for metric in Metric:
        assert metric.value.startswith("forebay_"), metric
        assert metric.help, metric
        assert metric.value.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric
        assert metric.value.endswith("_seconds") or metric.kind is not MetricKind.HISTOGRAM, metric


def test_a_signal_in_the_middle_of_counting_may_look() -> None:
    """It waited for the lock that its own thread held."""
    meter, seen = LogMeter(SystemClock()), list[object]()

    class Interrupting(Histogram):
        def observe(self, seconds: float) -> None:
            meter.add(Metric.EXPORT_OBJECTS)
            seen.append(value(meter, Metric.EXPORT_OBJECTS))

    meter._durations[Metric.HISTORY_QUERY_SECONDS] = Interrupting()
    counting = threading.Thread(target=meter.observe, args=(Metric.HISTORY_QUERY_SECONDS, 0.1), daemon=True)
    counting.start()
    counting.join(PATIENCE)

    assert seen == [1]


@pytest.mark.slow
def test_a_look_in_the_middle_of_another_counts_a_shard_that_is_gone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = LogMeter(SystemClock())
    owner = Owner(meter)
    owner.counts.records += 3
    del owner
    gc.collect()
    whole, looked = ShardCounts.add, list[object]()

    def interrupted(mine: ShardCounts, theirs: ShardCounts) -> None:
        if not looked:
            looked.append(None)
            looked[0] = value(meter, Metric.RECORDS, labels())
        whole(mine, theirs)

    monkeypatch.setattr(ShardCounts, "add", interrupted)

    assert value(meter, Metric.RECORDS, labels()) == 3
    assert looked == [3]
