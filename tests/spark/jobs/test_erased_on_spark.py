"""Erasing beside a compaction on Spark: what it replaced is named, and the command of the answer removes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from forebay.compacting.planning import Rules
from forebay.spark.jobs import compaction
from tests.compacting.directly import check_sound, location_of
from tests.storage.test_erasing import KEY, SECRET, TOPIC, environment_of, filled, live, others, places_of
from tests.support.erased import holders

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_what_a_compaction_on_spark_replaced_is_named_until_it_is_gone(spark: SparkSession, tmp_path: Path) -> None:
    environment = environment_of("local", tmp_path)
    with environment.open("one") as log:
        topic = filled(log)
        log.export_topic(TOPIC)
        wanted = others(live(topic))
        log.erase_key(TOPIC, KEY)

        report = compaction.run(spark, location_of(environment), [TOPIC], rules=Rules(settle_ms=0, segments_min=2))
        asked = log.erase_key(TOPIC, KEY)
        named = holders(SECRET, tmp_path)
        rewritten = log.erase_key(TOPIC, KEY, now=True)

        assert report.figures["rewrites"] == 1
        assert places_of(asked, environment) >= named != set()
        assert rewritten.remains == () and live(topic) == wanted
        assert holders(SECRET, tmp_path) | holders(KEY, tmp_path) == set()
    check_sound(environment)
