"""How a log and its topics fare, by one call: what is shown, what stays when a shard goes, and what it costs."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Durations, LogStatus, Metric, aio
from tests.support.environments.directories import shard_of
from tests.support.waiting import until

FSYNC = (("durability", "fsync"), ("engine", "segment"))


def value(status: LogStatus, metric: Metric, labels: tuple[tuple[str, str], ...] = ()) -> Any:
    (found,) = (sample.value for sample in status.metrics if (sample.metric, sample.labels) == (metric, labels))
    return found


def count(status: LogStatus, metric: Metric, labels: tuple[tuple[str, str], ...] = ()) -> int:
    found = value(status, metric, labels)
    assert isinstance(found, Durations)
    return found.count


def shared(tmp_path: Path) -> dict[str, Any]:
    return {"storage": {"mode": "shared_fs"}, "store": {"root": str(tmp_path / "history")}}


def test_appends_syncs_and_rotations_are_counted_by_class_and_engine(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "data") as log:
        topic = log.create_topic("a", durability="fsync")
        for _ in range(9):
            topic.append(b"value")
        topic.append_many([b"x"] * 10)
        topic.rotate()
        status = log.status()
        assert value(status, Metric.RECORDS, FSYNC) == 19
        assert value(status, Metric.COMMITS, FSYNC) == 10
        assert count(status, Metric.APPEND_SECONDS, FSYNC) == 2, "the first, and one of every eight"
        assert count(status, Metric.FSYNC_SECONDS, FSYNC) >= 10
        assert value(status, Metric.ROTATIONS, FSYNC) == 1
        assert value(status, Metric.BYTES_WRITTEN, FSYNC) > 13
        assert value(status, Metric.CACHE_BYTES, FSYNC) > 0
        assert value(status, Metric.SHARDS_OPEN) == 1
        assert value(status, Metric.SHARDS_FAILED) == 0
        assert count(status, Metric.METADATA_PUT_SECONDS) > 0


@pytest.mark.parametrize("engine", ["memory", "rocksdb"])
def test_other_engines_are_counted_too(tmp_path: Path, engine: str) -> None:
    with forebay.open(tmp_path / "data") as log:
        topic = log.create_topic("a", engine=engine)
        topic.append_many([b"x"] * 10)
        labels = (("durability", topic.spec.durability.value), ("engine", engine))
        assert value(log.status(), Metric.RECORDS, labels) == 10
        (shard,) = topic.status().open
        assert (shard.engine, shard.offsets.next, shard.export) == (engine, 10, None)


def test_no_counter_falls_when_topics_are_deleted_and_shards_are_opened_again(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "data") as log:
        for number in range(3):
            topic = log.create_topic("a", durability="fsync")
            topic.append(b"value")
            assert value(log.status(), Metric.RECORDS, FSYNC) == number + 1
            log.delete_topic("a")
            del topic
            status = log.status()
            assert value(status, Metric.RECORDS, FSYNC) == number + 1
            assert status.open == ()


def test_exports_and_reads_of_history_are_counted(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "data", shared(tmp_path)) as log:
        topic = log.create_topic("a", durability="fsync")
        topic.append_many([b"value"] * 100)
        log.export_topic("a")
        status = log.status()
        assert value(status, Metric.EXPORT_OBJECTS) == 1
        assert value(status, Metric.EXPORT_BYTES) > 500
        assert count(status, Metric.EXPORT_CYCLE_SECONDS) >= 1
        assert value(status, Metric.METADATA_DESCRIPTOR_WRITES) == 1
        assert value(status, Metric.EXPORT_ERRORS) == 0
        (shard,) = topic.status().open
        assert shard.export is not None
        assert (shard.export.exported, shard.export.behind.files) == (100, 0)
    reading = {**shared(tmp_path), "metadata": {"path": str(tmp_path / "data/metadata.sqlite")}}
    with forebay.open(None, reading, read_only=True) as log:
        assert len(list(log.topic("a").read(forebay.EARLIEST))) == 100
        status = log.status()
        assert status.read_only
        assert value(status, Metric.HISTORY_BYTES_READ) > 500
        assert count(status, Metric.HISTORY_QUERY_SECONDS) >= 1


def test_what_is_not_history_yet_counts_until_it_is(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "data", shared(tmp_path)) as log:
        topic = log.create_topic("a", durability="fsync")
        topic.append(b"value" * 100)
        assert value(log.status(), Metric.EXPORT_LAG_BYTES, FSYNC) == 0
        (tmp_path / "history").rename(tmp_path / "away")
        (tmp_path / "history").write_bytes(b"no directory")
        with pytest.raises(forebay.ForebayError):
            log.export_topic("a")
        until(lambda: value(log.status(), Metric.EXPORT_LAG_BYTES, FSYNC) > 500)
        while not value(log.status(), Metric.EXPORT_LAG_SECONDS, FSYNC):
            pass  # until a millisecond has passed
        assert value(log.status(), Metric.EXPORT_LAG_SECONDS, FSYNC) < 60

        (tmp_path / "history").unlink()
        (tmp_path / "away").rename(tmp_path / "history")
        log.export_topic("a")
        assert value(log.status(), Metric.EXPORT_LAG_BYTES, FSYNC) == 0
        assert value(log.status(), Metric.EXPORT_LAG_SECONDS, FSYNC) == 0


def test_an_export_that_fails_is_counted(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "data", shared(tmp_path)) as log:
        topic = log.create_topic("a", durability="fsync")
        topic.append(b"value")
        shutil.rmtree(tmp_path / "history")
        (tmp_path / "history").write_bytes(b"no directory")
        with pytest.raises(forebay.ForebayError):
            log.export_topic("a")
        assert value(log.status(), Metric.EXPORT_ERRORS) >= 1


def test_a_topic_that_the_settings_name_is_counted_by_itself(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "data", {"metrics": {"topics": ["shop/*"]}}) as log:
        log.create_topic("shop/orders", durability="fsync").append(b"value")
        log.create_topic("other", durability="fsync").append(b"value")
        status = log.status()
        assert value(status, Metric.RECORDS, (*FSYNC, ("topic", "shop/orders"))) == 1
        assert value(status, Metric.RECORDS, FSYNC) == 1


def test_the_status_of_a_topic_opens_nothing(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "data") as log:
        topic = log.create_topic("a", partitions=3)
        assert topic.status().open == ()
        topic.append(b"value", partition=1)
        status = topic.status()
        assert (status.name, status.partitions) == ("default/a", 3)
        (shard,) = status.open
        assert (shard.partition, shard.offsets.next, shard.segments, shard.failure) == (1, 1, 1, None)
        assert shard.epoch == topic.epoch(1)
        assert shard.decision == topic.recovery(1)


def test_a_shard_that_has_failed_is_shown_with_its_reason(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "data") as log:
        topic = log.create_topic("a", durability="fsync")
        topic.append(b"value")
        shard_of(topic).wal.fence("another owner")
        status = log.status()
        assert value(status, Metric.SHARDS_FAILED) == 1
        assert status.open[0].failure == "another owner"


def test_the_status_is_refused_once_the_log_is_closed(tmp_path: Path) -> None:
    log = forebay.open(tmp_path / "data")
    log.close()
    with pytest.raises(forebay.Closed):
        log.status()


def test_asyncio_shows_the_same(tmp_path: Path) -> None:
    async def run() -> None:
        async with aio.open(tmp_path / "data") as log:
            topic = await log.create_topic("a", durability="fsync")
            await topic.append(b"value")
            assert value(await log.status(), Metric.RECORDS, FSYNC) == 1
            assert (await topic.status()).open[0].offsets.next == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "name",
    [
        "forebay_wal_append_latency_seconds",
        "forebay_wal_fsync_latency_seconds",
        "forebay_wal_bytes_written_total",
        "forebay_wal_cache_bytes",
        "forebay_wal_rotations_total",
        "forebay_export_cycle_seconds",
        "forebay_export_bytes_total",
        "forebay_export_objects_total",
        "forebay_export_errors_total",
        "forebay_history_query_seconds",
        "forebay_history_bytes_read_total",
        "forebay_metadata_put_seconds",
        "forebay_metadata_descriptor_writes_total",
    ],
)
def test_a_status_has_every_metric_that_dashboards_go_by(tmp_path: Path, name: str) -> None:
    with forebay.open(tmp_path / "data") as log:
        log.create_topic("a").append(b"value")
        assert name in {sample.metric.value for sample in log.status().metrics}
