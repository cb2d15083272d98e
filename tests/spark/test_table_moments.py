"""A topic that changes while it is looked at for a table: both parts of the table show one moment, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from pyspark.sql import SparkSession

from forebay.errors import Conflict
from forebay.spark import table as made
from forebay.spark.place.opening import Opened
from forebay.spark.reading.options import Topics
from forebay.spark.reading.snapshot import ShardView, Snapshot
from forebay.spark.reading.view import Viewer
from forebay.spark.tables.as_frame import LOOKS_MAX, Native, native_of
from tests.compacting.directly import compacted
from tests.spark.mixed import TOPIC, Mixed
from tests.spark.topics import spark_rows
from tests.support.environments.directories import shard_of, shared_fs

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
HERE = "forebay.spark.tables.as_frame"


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Mixed]:
    """Two files as one Parquet segment of 200 records, a file of frames behind it, and the log."""
    mixed = Mixed(shared_fs(tmp_path), partitions=1)
    for _ in range(2):
        mixed.filled.many(100)
        mixed.export()
    compacted(mixed.environment, [TOPIC])
    mixed.filled.many(100)
    mixed.export()
    mixed.filled.many(20)
    yield mixed
    mixed.close()


class Between:
    """Does something each time a part of the table was looked at and the source has not looked yet."""

    def __init__(self, work: Callable[[], object], times: int = 1) -> None:
        self._work = work
        self._times = times
        self.looks = 0

    def __call__(self, view: ShardView, found: Opened, *, fail_on_data_loss: bool) -> Native:
        native = native_of(view, found, fail_on_data_loss=fail_on_data_loss)
        self.looks += 1
        if self.looks <= self._times:
            self._work()
        return native


def _rows(spark: SparkSession, mixed: Mixed, between: Between) -> list[dict[str, object]]:
    options = {name: text for name, text in mixed.options.items() if name != "topic"}
    with mock.patch(f"{HERE}.native_of", between):
        return spark_rows(made(spark, TOPIC, **options))


def _evict(mixed: Mixed, kept: int) -> None:
    mixed.log.alter_topic(TOPIC, cap_records=kept, allow_loss=True)
    shard = shard_of(mixed.filled.topic)
    while shard.evict(2**50).reason is not None:
        pass
    shard.history.retain()


def test_a_topic_created_again_between_the_looks_is_refused_by_name(spark: SparkSession, mixed: Mixed) -> None:
    def anew() -> None:
        mixed.log.delete_topic(TOPIC)
        mixed.log.create_topic(TOPIC).append_many([b"another"] * 400)

    with pytest.raises(Conflict, match="shop/orders is not the topic that is meant: .*created again; load it again"):
        _rows(spark, mixed, Between(anew))


def test_compaction_between_the_looks_changes_no_row(spark: SparkSession, mixed: Mixed) -> None:
    between = Between(lambda: compacted(mixed.environment, [TOPIC]))

    assert _rows(spark, mixed, between) == mixed.rows
    assert between.looks == 2


@pytest.mark.parametrize("kept", [200, 50], ids=["within the files", "beyond the files"])
def test_eviction_between_the_looks_is_seen_in_both_parts(spark: SparkSession, mixed: Mixed, kept: int) -> None:
    between = Between(lambda: _evict(mixed, kept))

    assert _rows(spark, mixed, between) == mixed.rows[-kept:]
    assert between.looks == 2


def test_deletes_between_the_looks_are_seen_in_both_parts(spark: SparkSession, mixed: Mixed) -> None:
    def delete() -> None:
        mixed.delete(0, 50, 60)
        mixed.delete(0, 250, 260)

    assert _rows(spark, mixed, Between(delete)) == mixed.rows


def test_what_ends_once_the_source_has_looked_is_seen_too(spark: SparkSession, mixed: Mixed) -> None:
    look, looks = Viewer.look, list[Snapshot]()

    def later(viewer: Viewer, topics: Topics) -> Snapshot:
        if len(looks) == 1:
            mixed.delete(0, 50, 60)
            mixed.delete(0, 250, 260)
        looks.append(look(viewer, topics))
        return looks[-1]

    with mock.patch.object(Viewer, "look", later):
        assert _rows(spark, mixed, Between(lambda: None, 0)) == mixed.rows
    assert len(looks) == 4


def test_a_topic_that_is_never_at_rest_is_read_by_the_source_alone(
    spark: SparkSession, mixed: Mixed, caplog: pytest.LogCaptureFixture
) -> None:
    offsets = iter(range(50, 300, 20))

    def delete() -> None:
        offset = next(offsets)
        mixed.delete(0, offset, offset + 5)

    between = Between(delete, LOOKS_MAX)

    assert _rows(spark, mixed, between) == mixed.rows
    assert between.looks == LOOKS_MAX
    assert f"shop/orders changed at each of {LOOKS_MAX} looks: the source reads all of it" in caplog.text


def test_records_that_come_between_the_looks_are_for_the_next_table(spark: SparkSession, mixed: Mixed) -> None:
    before = mixed.rows
    between = Between(lambda: mixed.filled.many(10))

    assert _rows(spark, mixed, between) == before
    assert between.looks == 1
