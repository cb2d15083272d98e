"""Filters that are applied before rows reach Spark: the same rows as a plain computation, in every tier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

import forebay
from forebay.errors import DataLoss
from forebay.format.control.offsets import OffsetSet
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.pages import Page
from forebay.records import Gap, Reason
from forebay.sealed import SealedSegment
from forebay.spark.place.location import Location
from forebay.spark.place.opening import opened
from forebay.spark.reading.filters import pushed
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.pieces import PieceReader
from forebay.spark.reading.snapshot import Range, ScanPiece, ShardView, Snapshot
from forebay.spark.reading.task import read_split, wanted_runs
from forebay.spark.reading.view import load
from forebay.spark.reading.where import parse_where
from tests.spark.edges import edged_topic, edges_of, misses_at_edges, read_rows, splits_of
from tests.spark.mixed import TOPIC, Mixed
from tests.spark.topics import SETTINGS, TIME, Filled, Row, skip_offsets
from tests.support.environments import directories
from tests.support.soak import SOAK

pytestmark = pytest.mark.slow

Test = Callable[[Any], bool]


def _time(milliseconds: int, microseconds: int = 0) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds, microseconds=microseconds)


_MIDDLE = TIME + 1001 * 4000
_SOME: list[tuple[Filter, str, Test]] = [
    (EqualTo(("offset",), 3205), "offset", lambda offset: offset == 3205),
    (EqualNullSafe(("offset",), 15), "offset", lambda offset: offset == 15),
    (LessThan(("offset",), 2499), "offset", lambda offset: offset < 2499),
    (LessThanOrEqual(("offset",), 2500), "offset", lambda offset: offset <= 2500),
    (GreaterThan(("offset",), 3300), "offset", lambda offset: offset > 3300),
    (GreaterThanOrEqual(("offset",), 5400), "offset", lambda offset: offset >= 5400),
    (In(("offset",), (0, 17, 3000, 5000, 10**9)), "offset", lambda offset: offset in (0, 3000, 5000)),
    (IsNull(("offset",)), "offset", lambda offset: False),
    (IsNotNull(("offset",)), "offset", lambda offset: True),
    (EqualTo(("partition",), 1), "partition", lambda partition: partition == 1),
    (In(("partition",), (0, 7)), "partition", lambda partition: partition == 0),
    (EqualTo(("topic",), TOPIC), "topic", lambda topic: True),
    (StringStartsWith(("topic",), "sho"), "topic", lambda topic: True),
    (EqualTo(("topic",), "shop/other"), "topic", lambda topic: False),
    (EqualTo(("timestamp",), _time(_MIDDLE)), "timestamp", lambda stamp: stamp == _MIDDLE),
    (LessThan(("timestamp",), _time(_MIDDLE)), "timestamp", lambda stamp: stamp < _MIDDLE),
    (LessThanOrEqual(("timestamp",), _time(_MIDDLE, 1)), "timestamp", lambda stamp: stamp <= _MIDDLE),
    (GreaterThan(("timestamp",), _time(_MIDDLE, -1)), "timestamp", lambda stamp: stamp >= _MIDDLE),
    (GreaterThanOrEqual(("timestamp",), _time(_MIDDLE, 1)), "timestamp", lambda stamp: stamp > _MIDDLE),
    (In(("timestamp",), (_time(TIME), _time(_MIDDLE))), "timestamp", lambda stamp: stamp in (TIME, _MIDDLE)),
    (EqualTo(("key",), b"key-3"), "key", lambda key: key == b"key-3"),
    (EqualTo(("key",), b"nobody"), "key", lambda key: False),
    (EqualNullSafe(("key",), None), "key", lambda key: key is None),
    (In(("key",), (b"key-3", b"key-4", None)), "key", lambda key: key in (b"key-3", b"key-4")),
    (IsNull(("key",)), "key", lambda key: key is None),
    (IsNotNull(("key",)), "key", lambda key: key is not None),
    (LessThan(("key",), b"key-2"), "key", lambda key: key is not None and key < b"key-2"),
    (GreaterThanOrEqual(("key",), b"key-5"), "key", lambda key: key is not None and key >= b"key-5"),
    (EqualTo(("tag",), "tag-2-é"), "tag", lambda tag: tag == "tag-2-é"),
    (In(("tag",), ("tag-2-é", "none")), "tag", lambda tag: tag == "tag-2-é"),
    (IsNull(("tag",)), "tag", lambda tag: tag is None),
    (GreaterThan(("tag",), "tag-3"), "tag", lambda tag: tag is not None and tag > "tag-3"),
    (StringStartsWith(("tag",), "tag-4"), "tag", lambda tag: tag is not None and tag.startswith("tag-4")),
]


@pytest.fixture(scope="module", params=["local", "shared_fs"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    root = tmp_path_factory.mktemp("filters")
    mixed = Mixed(directories.local(root) if request.param == "local" else directories.shared_fs(root))
    mixed.every_tier()
    yield mixed
    mixed.close()


@pytest.fixture(scope="module")
def loaded(mixed: Mixed) -> tuple[Snapshot, tuple[Range, ...]]:
    return load(ReadOptions.parse(mixed.options))


def _expected(rows: list[Row], column: str, test: Test) -> list[Row]:
    return [row for row in rows if test(TOPIC if column == "topic" else row[column])]


@pytest.mark.parametrize("case", _SOME, ids=[f"{type(each[0]).__name__}-{each[1]}" for each in _SOME])
def test_each_filter_lets_through_what_a_plain_computation_does(
    mixed: Mixed, loaded: tuple[Snapshot, tuple[Range, ...]], case: tuple[Filter, str, Test]
) -> None:
    filters, left = pushed([case[0]])

    assert left == []
    assert read_rows(loaded, filters) == _expected(mixed.rows, case[1], case[2])


@given(cases=st.lists(st.sampled_from(_SOME), min_size=2, max_size=4))
@settings(max_examples=5_000 if SOAK else 20)
def test_filters_together_let_through_what_passes_all(
    mixed: Mixed, loaded: tuple[Snapshot, tuple[Range, ...]], cases: list[tuple[Filter, str, Test]]
) -> None:
    expected = mixed.rows
    for _, column, test in cases:
        expected = _expected(expected, column, test)

    filters, _ = pushed([case[0] for case in cases])

    assert read_rows(loaded, filters) == expected


@pytest.mark.parametrize(
    "asked",
    [
        Not(EqualTo(("offset",), 1)),
        StringContains(("tag",), "tag"),
        EqualTo(("value",), b"1"),
        EqualTo(("headers", "key"), "a"),
        EqualTo(("offset",), "1"),
        EqualTo(("offset",), True),
        EqualTo(("timestamp",), datetime(2026, 1, 1)),  # noqa: DTZ001 - Spark has such times, and they are another type
        StringStartsWith(("key",), "k"),
        In(("key",), (b"a", "b")),
    ],
    ids=str,
)
def test_what_cannot_be_applied_exactly_is_left_to_spark(asked: Filter) -> None:
    fine = EqualTo(("offset",), 1)

    filters, left = pushed([asked, fine])

    assert len(left) == 1
    assert left[0] is asked
    assert [condition.value for condition in filters.conditions] == [1]


def test_partitions_offsets_and_times_leave_whole_pieces_out(
    mixed: Mixed, loaded: tuple[Snapshot, tuple[Range, ...]]
) -> None:
    one = splits_of(loaded, pushed([EqualTo(("partition",), 1), LessThan(("offset",), 100)])[0])
    late = splits_of(loaded, pushed([GreaterThan(("timestamp",), _time(TIME * 2))])[0])
    never = splits_of(loaded, pushed([IsNull(("offset",))])[0])

    assert [(part.partition, part.start, part.stop) for split in one for part in split.parts] == [(1, 0, 100)]
    assert all(piece.descriptor is None for split in late for part in split.parts for piece in part.pieces)
    assert never == []


@pytest.fixture(scope="module")
def edged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    topic = edged_topic(tmp_path_factory.mktemp("edged"))
    yield topic
    topic.close()


def test_first_and_last_times_of_segments_and_frames_are_found(edged: Mixed) -> None:
    """A row lies at every moment that is tried: one that is left out by a slip of `>` for `>=` is missed."""
    edges = edges_of(load(ReadOptions.parse(edged.options))[0])
    assert [len(edges[start]) for start in (0, 100, 130)] == [2, 6, 6], "a Parquet segment, and two of three frames"
    assert edges[160] == set(), "the tail, which has no index"
    for moment in set[int]().union(*edges.values()):
        assert [row["timestamp"] for row in edged.rows].count(moment) == 1

    assert misses_at_edges(edged) == []


def test_times_leave_out_the_segments_and_frames_that_cannot_match(edged: Mixed) -> None:
    """Each frame is found by its own times alone, so that the comparisons above have something to leave out."""
    loaded = load(ReadOptions.parse(edged.options))
    row = next(row for row in edged.rows if row["offset"] == 119)

    filters = parse_where(f"timestamp = timestamp_millis({row['timestamp']})")
    (part,) = [part for split in splits_of(loaded, filters) for part in split.parts]

    assert part.start == 100, "not the Parquet segment"
    with opened(loaded[0].location) as found:
        reader = PieceReader(found, part.shard, part.pieces, str(part), lambda start, stop: [])
        with contextlib.closing(reader):
            runs = [(run.start, run.stop) for run in wanted_runs(reader, part, filters)]
    assert runs == [(110, 120), (160, 165)], "one frame, and the tail, which has no index"


def test_a_loss_is_reported_where_the_filters_let_nothing_through(tmp_path: Path) -> None:
    """What was lost may have passed."""
    path = tmp_path / "data"
    with forebay.open(str(path), SETTINGS) as log:
        filled = Filled(log, TOPIC)
        filled.many(10)
    skip_offsets(path, filled.topic.spec, Gap(10, 25, Reason.LOST))
    with forebay.open(str(path), SETTINGS) as log:
        log.topic(TOPIC).append(b"later")
        log.export_topic(TOPIC)
    lost = load(ReadOptions.parse({"path": str(path), "topic": TOPIC}))

    with pytest.raises(DataLoss, match=r"offsets \[10, 25\) lost cannot be read"):
        read_rows(lost, pushed([EqualTo(("key",), b"nobody")])[0])


def test_a_look_up_by_key_reads_the_frames_of_its_records_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = b"in the second frame alone"
    topic = Mixed(directories.shared_fs(tmp_path), partitions=1)
    topic.filled.many(3000)
    topic.filled.topic.append(b"sought", key=key)
    topic.export()
    pages: list[int] = []
    plain = SealedSegment.read

    def noted(segment: SealedSegment, offset: int, bytes_max: int) -> Page:
        pages.append(offset)
        return plain(segment, offset, bytes_max)

    monkeypatch.setattr(SealedSegment, "read", noted)

    filters, _ = pushed([EqualTo(("key",), key)])
    splits = splits_of(load(ReadOptions.parse(topic.options)), filters)
    values = [row["value"] for split in splits for batch in read_split(split) for row in batch.to_pylist()]

    assert values == [b"sought"]
    assert pages == [3000]
    topic.close()


def test_tasks_of_a_look_up_weigh_the_index() -> None:
    """With the postings of a key a task reads little of a segment: they are fewer than the bytes call for."""
    found = SegmentDescriptor(
        kind=DescriptorKind.FRAMES, topic_id="ab" * 16, start=0, end=10**7, epoch=1, bytes=2**30, index_bytes=2**20
    )
    view = ShardView(
        topic=TOPIC,
        topic_id="ab" * 16,
        partition=0,
        is_durable=True,
        epoch=1,
        earliest=0,
        next=10**7,
        pieces=(ScanPiece(0, 10**7, 2**30, found),),
        deleted=OffsetSet(),
        generation=0,
    )
    loaded = (Snapshot(location=Location(path="/d"), shards=(view,)), (Range(0, 0, 10**7),))

    assert len(splits_of(loaded, pushed([EqualTo(("key",), b"1")])[0])) == 1
    assert len(splits_of(loaded, pushed([IsNotNull(("key",))])[0])) == 8
