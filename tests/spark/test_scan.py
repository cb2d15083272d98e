"""What tasks read, without Spark: together exactly the rows of the topic, and every missing one is named."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql.pandas.types import to_arrow_schema

import forebay
from forebay.errors import (
    Conflict,
    Corrupt,
    DataLoss,
    Invalid,
    Unavailable,
    UnknownTopic,
    Unsupported,
    UnsupportedFormat,
)
from forebay.records import Gap, Reason
from forebay.spark.reading import task
from forebay.spark.reading.columns import SPARK_TYPES, arrow_schema
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.plan import plan
from forebay.spark.reading.schema import spark_schema
from forebay.spark.reading.snapshot import Range, Split
from forebay.spark.reading.task import read_split
from forebay.spark.reading.view import load
from tests.spark.topics import SETTINGS, Filled, Row, flip_a_bit, in_order, lose_some, rows_in, skip_offsets, splits_of

pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def log(path: Path) -> Iterator[forebay.Storage]:
    with forebay.open(str(path), SETTINGS) as opened:
        yield opened


def _options(path: Path, topic: str = "shop/orders", **options: str) -> ReadOptions:
    return ReadOptions.parse({"path": str(path), "topic": topic, **options})


def _splits(path: Path, **options: str) -> list[Split]:
    return splits_of(_options(path, **options))


def _read(path: Path, **options: str) -> list[Row]:
    return rows_in(batch for split in _splits(path, **options) for batch in read_split(split))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_rows_of_every_tier_are_read_while_the_owner_holds_the_directory_and_after(
    path: Path, compression: str
) -> None:
    with forebay.open(str(path), SETTINGS) as log:
        filled = Filled(log, "shop/orders", partitions=3, compression=compression)
        filled.every_tier()

        assert _read(path) == in_order(filled.rows)
        assert _read(path, minPartitions="11") == in_order(filled.rows)

    assert _read(path) == in_order(filled.rows)


def test_any_range_is_read_exactly(path: Path, log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders")
    filled.every_tier()
    ends = [0, 2999, 3000, 5501, 5650, 5740, 7983]
    assert len(filled.rows) == ends[-1]

    for start in ends:
        for stop in (end for end in ends if end >= start):
            starting, ending = (f'{{"shop/orders": {{"0": {place}}}}}' for place in (start, stop))
            assert _read(path, startingOffsets=starting, endingOffsets=ending) == filled.rows[start:stop]


def test_every_record_batch_has_the_very_schema_that_spark_checks_in_the_first(
    path: Path, log: forebay.Storage
) -> None:
    Filled(log, "shop/orders", partitions=2).every_tier()

    for columns in (
        tuple(SPARK_TYPES),
        ("value",),
        ("timestamp",),
        ("topic",),
        ("offset", "topic"),
        ("headers", "timestamp", "tag", "key"),
    ):
        expected = to_arrow_schema(spark_schema(columns), timezone="UTC")
        batches = [batch for split in _splits(path, columns=",".join(columns)) for batch in read_split(split)]
        assert batches
        assert all(batch.schema.equals(expected) for batch in batches)
        assert arrow_schema(columns).equals(expected)


def test_record_without_headers_has_null_there(path: Path, log: forebay.Storage) -> None:
    topic = log.create_topic("shop/orders")
    topic.append_many([b""] * 3, headers=[[("a", b"1"), ("b", None)], [], [("c", b"")]])
    topic.append_many([b""] * 3000)
    topic.append_many([b""] * 100_000)

    (split,) = _splits(path, columns="headers")
    first, second, third = (batch.column("headers") for batch in read_split(split))

    pairs = [[{"key": "a", "value": b"1"}, {"key": "b", "value": None}], None, [{"key": "c", "value": b""}]]
    assert first.to_pylist() == pairs
    assert (second.null_count, third.null_count) == (3000, 100_000)


def test_small_frames_are_put_together(path: Path, log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders")
    filled.singles(500)
    filled.many(3000)
    filled.singles(500)

    (split,) = _splits(path)

    assert [batch.num_rows for batch in read_split(split)] == [500, 3000, 500]


def test_what_is_appended_after_the_look_is_not_read(path: Path, log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders", partitions=2)
    filled.many(10, 0)
    snapshot, ranges = load(_options(path))

    filled.many(10, 0)
    filled.many(10, 1)
    filled.seal()

    assert ranges == (Range(0, 0, 10),)
    splits = plan(snapshot, ranges, columns=tuple(SPARK_TYPES))
    assert rows_in(batch for split in splits for batch in read_split(split)) == filled.rows[:10]


def test_a_split_is_plain_and_outlives_sealing(path: Path, log: forebay.Storage) -> None:
    filled = Filled(log, "shop/orders")
    filled.singles(50)
    splits = pickle.loads(pickle.dumps(_splits(path)))

    filled.seal()
    filled.singles(50)

    assert rows_in(batch for split in splits for batch in read_split(split)) == filled.rows[:50]


def test_files_that_go_while_a_task_reads_are_looked_up_again(path: Path, log: forebay.Storage) -> None:
    """A sealed file is opened when it is first needed: by then another may hold its records."""
    filled = Filled(log, "shop/orders")
    filled.many(3000)
    filled.seal()
    filled.many(3000)
    filled.topic.rotate()
    (split,) = _splits(path)
    batches = read_split(split)
    first = next(batches)

    filled.seal()

    assert rows_in(iter([first, *batches])) == filled.rows


def test_topic_without_records_is_planned_without_a_task(path: Path) -> None:
    with forebay.open(str(path), SETTINGS) as log:
        log.create_topic("shop/orders", partitions=3)
        assert _splits(path) == []

    assert _splits(path) == []


def test_lost_offsets_fail_by_name_or_are_skipped(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled = _with_hole(path, Reason.LOST)

    with pytest.raises(DataLoss, match=r"shop/orders\[0\]: offsets \[10, 25\) lost cannot be read: set failOnDataLoss"):
        _read(path)
    behind = _read(path, failOnDataLoss="false")

    assert [row["value"] for row in behind] == [*(row["value"] for row in filled.rows), b"behind"]
    assert "offsets [10, 25) lost cannot be read: 15 offsets skipped, since failOnDataLoss is false" in caplog.text


def test_losses_of_class_memory_are_reported_and_no_failure(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lose_some(path, "shop/orders")
    with forebay.open(str(path), SETTINGS) as log:
        log.topic("shop/orders").append(b"after")

        assert [row["value"] for row in _read(path)] == [b"before"] * 10 + [b"after"]

    assert "lost cannot be read: 90 offsets skipped, since records of its durability class" in caplog.text


def _with_hole(path: Path, reason: Reason) -> Filled:
    """Ten records, a gap, and one behind it."""
    with forebay.open(str(path), SETTINGS) as log:
        filled = Filled(log, "shop/orders")
        filled.many(10)
    skip_offsets(path, filled.topic.spec, Gap(10, 25, reason))
    return filled


def test_offsets_that_no_record_ever_had_are_no_loss(path: Path) -> None:
    filled = _with_hole(path, Reason.SKIPPED)

    rows = _read(path)

    assert rows[:10] == filled.rows
    assert [(row["offset"], row["value"]) for row in rows[10:]] == [(25, b"behind")]


def test_lost_offsets_outside_the_range_do_not_matter(path: Path) -> None:
    filled = _with_hole(path, Reason.LOST)

    for start, stop, values in ((0, 10, [row["value"] for row in filled.rows]), (25, 26, [b"behind"])):
        starting, ending = (f'{{"shop/orders": {{"0": {place}}}}}' for place in (start, stop))
        rows = _read(path, startingOffsets=starting, endingOffsets=ending)
        assert [row["value"] for row in rows] == values


@pytest.mark.parametrize("sealed", [True, False])
def test_damaged_frame_fails_by_name_or_is_skipped_and_logged(
    path: Path, caplog: pytest.LogCaptureFixture, *, sealed: bool
) -> None:
    with forebay.open(str(path), SETTINGS) as log:
        filled = Filled(log, "shop/orders")
        filled.many(3000)
        filled.topic.append_many([b"victim" * 1000] * 10)
        filled.many(3000)
        if sealed:
            filled.seal()
    flip_a_bit(path, b"victim" * 1000)

    with pytest.raises(DataLoss, match=r"shop/orders\[0\]: offsets \[3000, 3010\) damaged cannot be read"):
        _read(path)
    assert _read(path, failOnDataLoss="false") == filled.rows
    assert "shop/orders[0]: offsets [3000, 3010) damaged cannot be read: 10 offsets skipped" in caplog.text


def test_a_log_that_ends_before_the_plan_is_an_error_and_not_fewerrows_in(
    path: Path, log: forebay.Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = Filled(log, "shop/orders")
    filled.many(10)
    (split,) = _splits(path)
    monkeypatch.setattr(task, "WAIT_SECONDS", 0.0)
    (part,) = split.parts
    further = replace(part, stop=11, pieces=(part.pieces[0]._replace(stop=11),))
    beyond = replace(split, parts=(further,))

    with pytest.raises(Unavailable, match=r"shop/orders\[0\] can be read up to 10 now, and up to 11 when this read"):
        list(read_split(beyond))


def test_topic_deleted_since_the_look_is_an_error(path: Path, log: forebay.Storage) -> None:
    Filled(log, "shop/orders").many(10)
    (split,) = _splits(path)

    log.delete_topic("shop/orders")
    log.create_topic("shop/orders").append_many([b"another"] * 10)

    with pytest.raises(Unavailable, match=r"shop/orders\[0\]: offsets \[0, 10\) were there .*load it again"):
        list(read_split(split))


def test_another_topic_of_the_name_is_refused_where_an_id_is_given(path: Path, log: forebay.Storage) -> None:
    topic_id = log.create_topic("shop/orders").spec.topic_id
    assert load(_options(path, topicId=topic_id))[0].shards[0].topic_id == topic_id

    log.delete_topic("shop/orders")
    log.create_topic("shop/orders")

    with pytest.raises(Conflict, match=f"shop/orders is not the topic that is meant: .* not {topic_id}, .*load it"):
        load(_options(path, topicId=topic_id))


def test_timestamp_outside_of_spark_is_an_error_that_names_it(path: Path, log: forebay.Storage) -> None:
    log.create_topic("shop/orders").append(b"far", timestamp=2**62)

    with pytest.raises(Invalid, match=r"shop/orders: a timestamp in offsets \[0, 1\) has no place in Spark's type"):
        _read(path)
    (split,) = _splits(path, columns="value")
    assert [batch.to_pylist() for batch in read_split(split)] == [[{"value": b"far"}]]


def test_unknown_topic_and_directory_are_named(path: Path, tmp_path: Path, log: forebay.Storage) -> None:
    with pytest.raises(UnknownTopic, match="there is no topic shop/other"):
        load(_options(path, "shop/other"))
    with pytest.raises(Invalid, match="nowhere is not a Forebay data directory"):
        load(_options(tmp_path / "nowhere"))


def test_relative_path_becomes_absolute_where_the_read_is_planned(
    path: Path, log: forebay.Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    Filled(log, "shop/orders").many(10)
    monkeypatch.chdir(path.parent)

    snapshot, _ = load(_options(Path("data")))

    assert snapshot.location.path == str(path)


def test_records_in_the_memory_of_another_process_are_refused(path: Path, log: forebay.Storage) -> None:
    log.create_topic("shop/orders", durability="ephemeral")

    with pytest.raises(Unsupported, match="shop/orders lives in the memory of its owner"):
        load(_options(path))
    with pytest.raises(Unsupported, match=":memory: lives in the memory of its owner"):
        load(_options(Path(":memory:")))


def test_directory_of_a_newer_version_is_refused(path: Path) -> None:
    with forebay.open(str(path), SETTINGS) as log:
        log.create_topic("shop/orders")
    marker = path / "forebay.json"
    marker.write_text(marker.read_text().replace('"format":1', '"format":2'))

    with pytest.raises(UnsupportedFormat, match="has format 2, this version knows up to 1: upgrade"):
        load(_options(path))


def test_rows_that_do_not_add_up_are_an_error(
    path: Path, log: forebay.Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = Filled(log, "shop/orders")
    filled.many(10)
    (split,) = _splits(path)
    monkeypatch.setattr(task, "coalesced", lambda batches: (batch.slice(0, 5) for batch in batches))

    with pytest.raises(Corrupt, match=r"5 records, 0 that are left out and 0 named gaps do not make up the offsets"):
        list(read_split(split))
