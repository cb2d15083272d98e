"""Compaction spread over Spark: the same as in one process, with keys that supersede each other across segments."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import forebay
from forebay.format.metadata.descriptor import DescriptorKind
from forebay.spark.jobs import compaction
from forebay.spark.jobs.superseding import KeyUnit, superseded_by_spark
from tests.cli.rig import Shell
from tests.compacting.directly import AT_ONCE, Here, catalog_of, check_sound, compacted, kinds_of, location_of, shown
from tests.spark.mixed import Mixed
from tests.spark.topics import SETTINGS
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


class Counted:
    """Progress that is remembered."""

    def __init__(self) -> None:
        self.whole = self.done = 0

    def total(self, amount: int) -> None:
        self.whole += amount

    def advance(self, amount: int) -> None:
        self.done += amount


def test_all_partitions_are_compacted_from_the_store_beside_their_owner(spark: SparkSession, tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    mixed = Mixed(environment, partitions=2)
    mixed.every_tier()
    mixed.export()
    counted = Counted()

    report = compaction.run(spark, location_of(environment, None), [TOPIC], rules=AT_ONCE, progress=counted)

    assert report.is_clean and report.figures["rewrites"] == 2, report.lines()
    assert counted.whole == counted.done > 0
    assert compacted(environment).summary == "nothing to do"
    for partition in range(2):
        assert kinds_of(mixed.log, mixed.filled.topic, partition) == [DescriptorKind.PARQUET]
    assert shown(mixed.filled.topic) == mixed.rows
    mixed.close()
    check_sound(environment)


def test_superseded_records_are_those_that_one_process_finds(spark: SparkSession, tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("one") as log:
        topic = log.create_topic(TOPIC)
        for number in range(5):
            topic.append_many([b"v"] * 40, keys=[None if n % 7 == 0 else b"k%d" % (n * number % 11) for n in range(40)])
            log.export_topic(TOPIC)
        pieces = catalog_of(log, topic).descriptors()
    units = [KeyUnit(piece, (), 3, 2**50) for piece in pieces]
    location = location_of(environment)

    found = superseded_by_spark(spark, location, units)

    assert found == Here(location).superseded(units)
    assert 0 < len(found) < 200


def test_command_says_what_it_would_do_and_what_it_did(spark: SparkSession, tmp_path: Path) -> None:
    with forebay.open(str(tmp_path / "data"), SETTINGS) as log:
        topic = log.create_topic(TOPIC)
        for _ in range(3):
            topic.append_many([b"value"] * 100)
            log.export_topic(TOPIC)
    shell = Shell(tmp_path / "data")
    words = ("history", "compact", TOPIC, "--older-than", "0", "--segments-min", "2", "--set", "wal.free_bytes_min=0")

    (planned,) = shell.ok(*words, "--dry-run", "--json").items
    said = shell.ok(*words).out
    (again,) = shell.ok(*words, "--json").items

    assert planned["dry_run"] and planned["figures"]["segments_to_read"] == 3
    assert "compact: 1 rewrite, " in said and "segments before 3, segments 1" in said
    assert again["summary"] == "nothing to do" and again["findings"] == []
    assert shell.run("history", "compact", "shop/none").code == 2
