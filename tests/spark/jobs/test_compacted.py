"""The jobs over history that was compacted: Parquet segments count, are examined, copied and indexed as frames are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from pyspark.sql import SparkSession

import forebay
from forebay.compacting.planning import Rules
from forebay.inspection.findings import Severity
from forebay.spark.jobs import compaction, lake, migrate, profile, reindex, scrub
from forebay.spark.place.location import Location
from tests.cli.rig import flip

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def _settings(tmp_path: Path, name: str) -> dict[str, Any]:
    return {
        "storage": {"mode": "shared_fs"},
        "store": {"backend": "directory", "root": str(tmp_path / name)},
        "wal": {"free_bytes_min": 0},
    }


def _location(tmp_path: Path, name: str) -> Location:
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(_settings(tmp_path, name)))
    return Location.of(tmp_path / "data", file)


def _values(tmp_path: Path, name: str) -> list[bytes | None]:
    with forebay.open(str(tmp_path / "data"), _settings(tmp_path, name), read_only=True) as log:
        topic = log.topic("shop/orders")
        return [record.value for partition in range(2) for record in topic.read(partition=partition)]


@pytest.fixture
def location(tmp_path: Path, spark: SparkSession) -> Location:
    """Two partitions in Parquet, with records deleted before and after."""
    with forebay.open(str(tmp_path / "data"), _settings(tmp_path, "store")) as log:
        topic = log.create_topic("shop/orders", partitions=2)
        for partition in range(2):
            for _ in range(3):
                values = [b"%d" % number for number in range(100)]
                topic.append_many(values, keys=values, tags=["eu"] * 100, partition=partition)
                topic.rotate()
        topic.delete_by_offset(20, 40, partition=0)
        log.seal_topic("shop/orders")
    found = _location(tmp_path, "store")
    report = compaction.run(spark, found, ["shop/orders"], rules=Rules(segments_min=1, settle_ms=0))
    assert report.is_clean and len(list((tmp_path / "store").rglob("*.parquet"))) == 2
    with forebay.open(str(tmp_path / "data"), _settings(tmp_path, "store")) as log:
        log.topic("shop/orders").delete_by_offset(50, 60, partition=1)
        log.seal_topic("shop/orders")
    (tmp_path / "data" / "shards").rename(tmp_path / "aside")
    (tmp_path / "data" / "shards").mkdir()
    return found


def test_jobs_read_and_mend_parquet_segments(spark: SparkSession, location: Location, tmp_path: Path) -> None:
    before = _values(tmp_path, "store")
    index = next((tmp_path / "store").rglob("*_0/compacted/*.idx"))
    content = index.read_bytes()
    index.unlink()

    examined = scrub.run(spark, location)
    mended = reindex.run(spark, location)
    rebuilt = index.read_bytes()
    sound = scrub.run(spark, location)
    store = Location.parse(
        {"store": f"file://{tmp_path}/store", "metadata": f"sqlite://{tmp_path}/data/metadata.sqlite"}
    )
    alone = scrub.run(spark, store, ["shop/orders"])
    counted = profile.run(spark, store)
    lake.run(spark, location, "shop/orders", directory=str(tmp_path / "lake"), format="raw")
    moved = migrate.run(spark, location, _location(tmp_path, "new"), remove_old=True)

    assert [finding.what for finding in examined.findings] == ["the index object is missing"]
    assert mended.is_clean and mended.figures["damaged"] == 1 and rebuilt == content
    assert sound.is_clean and sound.figures["objects"] == sound.figures["sound"] == 2
    assert alone.is_clean and alone.figures["sound"] == 2, "no directory is needed to read the store"
    assert counted.is_clean and counted.figures["records"] == 570
    assert [part.figures["deleted"] for part in counted.parts[:2]] == [20, 10]
    rows = pq.read_table(str(tmp_path / "lake" / "data")).sort_by(
        [("_partition", "ascending"), ("_offset", "ascending")]
    )
    assert rows.column("value").to_pylist() == before and len(before) == 570
    assert moved.is_clean and moved.figures["copied"] == 2
    assert not list((tmp_path / "store").rglob("*.parquet")) and _values(tmp_path, "new") == before


def test_damage_in_parquet_is_named(spark: SparkSession, location: Location, tmp_path: Path) -> None:
    victim = next((tmp_path / "store").rglob("*_1/compacted/*.parquet"))
    flip(victim, 200)

    report = scrub.run(spark, location)
    counted = profile.run(spark, location)

    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    assert {finding.shard for finding in errors} == {"shop/orders[1]"} and victim.name in errors[0].file
    assert not counted.is_clean
