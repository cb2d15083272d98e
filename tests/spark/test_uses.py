"""I36: every use of one DataFrame equals the use of a fresh one, whatever else was asked of it before, or is beside it.

Spark 4.3 keeps the plan of a push-down on an object that all scans of one `load()` share. So each condition that the
source can apply is used before and after the whole, twice, in a union, in a join with itself, cached, by a view, in
subqueries and from two threads, and compared with a plain computation: as a filter of Spark's on one DataFrame, and as
the option `where` of DataFrames beside each other; from the source, and from the table of a topic that lies partly in
Parquet files, partly in frames and partly in the log. Push-down is on, which `forebay.spark.session` leaves off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import pairwise
from threading import Barrier
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from forebay.format.metadata.descriptor import DescriptorKind
from forebay.spark import table
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.pushing import SETTING, keeps_plans_apart, may_push
from forebay.spark.reading.view import look
from tests.compacting.directly import compacted
from tests.spark.mixed import TOPIC, Mixed
from tests.spark.topics import Row
from tests.support.environments import directories

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Place = tuple[int, int]
Condition = tuple[str, Callable[[Row], bool]]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    """Two partitions, each with a Parquet segment, a segment of two frames, and two files of the log."""
    mixed = Mixed(directories.shared_fs(tmp_path_factory.mktemp("uses")))
    for count in (60, 40):
        for partition in (0, 1):
            mixed.filled.many(count, partition)
        mixed.export()
    compacted(mixed.environment, [TOPIC])
    for partition in (0, 1):
        mixed.filled.many(30, partition)
        mixed.filled.many(20, partition)
    mixed.export()
    for partition in (0, 1):
        mixed.filled.many(25, partition)
    mixed.filled.seal()
    for partition in (0, 1):
        mixed.filled.singles(10, partition)
        for start in (5, 105, 155, 180):
            mixed.delete(partition, start, start + 3)
    yield mixed
    mixed.close()


def _conditions(mixed: Mixed) -> list[Condition]:
    """Each condition that the source applies, at values that rows have: at the ends of segments, frames and files."""
    rows = {(row["partition"], row["offset"]): row for row in mixed.rows}
    parquet, frame, hot = (rows[1, offset]["timestamp"] for offset in (99, 129, 184))
    first = rows[0, 100]["timestamp"]
    return [
        ("offset = 99", lambda row: row["offset"] == 99),
        ("offset <= 100 AND offset < 100", lambda row: row["offset"] < 100),
        ("offset > 148 AND offset >= 150", lambda row: row["offset"] >= 150),
        ("offset IN (0, 99, 100, 174, 184, 6)", lambda row: row["offset"] in (0, 99, 100, 174, 184)),
        ("partition = 1 AND partition IS NOT NULL", lambda row: row["partition"] == 1),
        ("topic LIKE 'shop/%' AND topic = 'shop/orders' AND offset <=> 184", lambda row: row["offset"] == 184),
        (f"timestamp = {_at(parquet)}", lambda row: row["timestamp"] == parquet),
        (f"timestamp < {_at(first)}", lambda row: row["timestamp"] < first),
        (f"timestamp > {_at(frame)}", lambda row: row["timestamp"] > frame),
        (
            f"timestamp >= {_at(parquet)} AND timestamp <= {_at(frame)}",
            lambda row: parquet <= row["timestamp"] <= frame,
        ),
        (f"timestamp IN ({_at(hot)}, {_at(first)})", lambda row: row["timestamp"] in (hot, first)),
        ("key = X'6B65792D35'", lambda row: row["key"] == b"key-5"),
        ("key IS NULL", lambda row: row["key"] is None),
        ("key IN (X'6B65792D33', X'6B65792D34', NULL)", lambda row: row["key"] in (b"key-3", b"key-4")),
        ("key IS NOT NULL AND key < X'6B65792D32'", lambda row: row["key"] is not None and row["key"] < b"key-2"),
        ("tag = 'tag-2-é'", lambda row: row["tag"] == "tag-2-é"),
        ("tag <=> NULL", lambda row: row["tag"] is None),
        ("tag >= 'tag-3' AND tag LIKE 'tag-4%'", lambda row: (row["tag"] or "").startswith("tag-4")),
    ]


def _at(milliseconds: int) -> str:
    return f"timestamp_millis({milliseconds})"


class Frames:
    """One way to ask: the whole topic, and what meets a condition; each is one DataFrame, however often it is used."""

    def __init__(self, spark: SparkSession, mixed: Mixed, kind: str) -> None:
        self.spark = spark
        self.mixed = mixed
        self.conditions = _conditions(mixed)
        self._kind = kind
        self.whole = self._load()
        self._found: dict[str, DataFrame] = {}

    def at(self, condition: str) -> DataFrame:
        """What meets the condition."""
        if condition not in self._found:
            by_option = self._kind.endswith("where")
            self._found[condition] = self._load(where=condition) if by_option else self.whole.where(condition)
        return self._found[condition]

    def expected(self, test: Callable[[Row], bool] = lambda row: True) -> list[Place]:
        """What a plain computation says."""
        return [(row["partition"], row["offset"]) for row in self.mixed.rows if test(row)]

    def _load(self, **more: str) -> DataFrame:
        options = {**self.mixed.options, **more}
        if self._kind.startswith("table"):
            return table(self.spark, options.pop("topic"), **options)
        return self.spark.read.format("forebay").options(**options).load()


@pytest.fixture(scope="module")
def pushing(spark: SparkSession) -> Iterator[SparkSession]:
    before = spark.conf.get(SETTING)
    spark.conf.set(SETTING, "true")
    yield spark
    spark.conf.set(SETTING, str(before))


@pytest.fixture(scope="module", params=["source", "source, where", "table", "table, where"])
def frames(request: pytest.FixtureRequest, pushing: SparkSession, mixed: Mixed) -> Frames:
    return Frames(pushing, mixed, request.param)


def _places(frame: DataFrame) -> list[Place]:
    return sorted((row.partition, row.offset) for row in frame.select("partition", "offset").collect())


def _each(frames: Frames, conditions: Sequence[Condition]) -> DataFrame:
    """What meets each of the conditions, with its number among them: all in one query."""
    found = [
        frames.at(text).select(f.lit(number).alias("number"), "partition", "offset")
        for number, (text, _) in enumerate(conditions)
    ]
    return reduce(DataFrame.unionAll, found)


def _by_number(rows: Sequence[Any]) -> list[tuple[int, int, int]]:
    return sorted((row.number, row.partition, row.offset) for row in rows)


def _each_expected(frames: Frames, conditions: Sequence[Condition]) -> list[tuple[int, int, int]]:
    numbered = enumerate(test for _, test in conditions)
    return [(number, *place) for number, test in numbered for place in frames.expected(test)]


def test_the_topic_has_what_each_condition_is_about(mixed: Mixed) -> None:
    for text, test in _conditions(mixed):
        assert 0 < sum(map(test, mixed.rows)) < len(mixed.rows), text
    options = ReadOptions.parse(mixed.options)
    for view in look(options.location, options.topics).shards:
        kinds = [piece.descriptor and piece.descriptor.kind for piece in view.pieces]
        assert kinds[:2] == [DescriptorKind.PARQUET, DescriptorKind.FRAMES]
        assert [(piece.start, piece.stop) for piece in view.pieces][:2] == [(0, 100), (100, 150)]
        assert view.pieces[-1].descriptor is None and view.next == 185


@pytest.mark.proves("I36")
def test_the_whole_is_whole_before_and_after_each_condition_twice_and_beside_all_of_them(frames: Frames) -> None:
    whole = frames.expected()
    assert _places(frames.whole) == whole
    for text, test in frames.conditions[::4]:
        assert _places(frames.at(text)) == frames.expected(test), text
        assert frames.whole.count() == len(whole), text
    beside = _each(frames, frames.conditions).unionAll(frames.whole.select(f.lit(-1), "partition", "offset"))
    expected = [(-1, *place) for place in whole] + _each_expected(frames, frames.conditions)
    assert _by_number(beside.collect()) == expected
    assert _places(frames.whole) == whole
    text, test = frames.conditions[0]
    assert _places(frames.at(text)) == frames.expected(test)


def test_conditions_are_joined_with_each_other_and_with_the_whole(frames: Frames) -> None:
    chosen = [frames.conditions[number] for number in (2, 8, 12)]
    key = ["partition", "offset"]
    for (left, left_test), (right, right_test) in pairwise(chosen):
        both = frames.at(left).select(*key).join(frames.at(right).select(*key), key, "full_outer")
        with_all = both.join(f.broadcast(frames.whole.select(*key)), key)

        either = frames.expected(lambda row, one=left_test, other=right_test: one(row) or other(row))  # type: ignore[misc]
        assert _places(with_all) == either


def test_a_cached_condition_changes_no_other_use(frames: Frames) -> None:
    some = frames.conditions[3::4]
    cached = _each(frames, some).cache()
    try:
        for _ in range(2):
            assert _by_number(cached.collect()) == _each_expected(frames, some)
            assert frames.whole.count() == len(frames.expected())
        text, test = frames.conditions[3]
        assert _places(frames.at(text)) == frames.expected(test)
    finally:
        cached.unpersist(blocking=True)
    assert _places(frames.whole) == frames.expected()


def test_views_are_whole_in_queries_and_in_subqueries_with_conditions(frames: Frames) -> None:
    frames.whole.createOrReplaceTempView("whole_topic")
    chosen = dict(list(enumerate(frames.conditions))[::4])
    counts = []
    for number, (text, _) in chosen.items():
        frames.at(text).createOrReplaceTempView(f"part_{number}")
        counts.append(f"(SELECT count(*) FROM part_{number})")

    row = frames.spark.sql(f"SELECT array({', '.join(counts)}), count(*) FROM whole_topic").first()
    found = frames.spark.sql(
        "SELECT partition, offset FROM whole_topic WHERE offset IN (SELECT offset FROM part_0) "
        "OR timestamp >= (SELECT min(timestamp) FROM part_8)"
    )

    assert row is not None
    assert list(row[0]) == [len(frames.expected(test)) for _, test in chosen.values()]
    assert row[1] == len(frames.expected())
    least = min(row["timestamp"] for row in frames.mixed.rows if frames.conditions[8][1](row))
    assert _places(found) == frames.expected(lambda row: row["offset"] == 99 or row["timestamp"] >= least)
    assert frames.spark.table("whole_topic").count() == len(frames.expected())


@pytest.mark.proves("I36")
def test_two_threads_use_one_dataframe(frames: Frames) -> None:
    begun = Barrier(2)

    def ask(conditions: Sequence[Condition]) -> list[tuple[str, list[Place], int]]:
        begun.wait(60)
        return [(text, _places(frames.at(text)), frames.whole.count()) for text, _ in conditions]

    chosen = frames.conditions[1::4]
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(ask, (chosen, chosen[::-1]))]

    expected = [(text, frames.expected(test), len(frames.expected())) for text, test in chosen]
    assert found == [expected, expected[::-1]]


def test_this_spark_is_seen_to_share_plans_so_nothing_is_pushed(
    pushing: SparkSession, mixed: Mixed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not keeps_plans_apart(pushing)
    assert not may_push(pushing)

    Frames(pushing, mixed, "source").at("offset < 3").explain("formatted")

    reported = capsys.readouterr().out
    assert "Filter" in reported and "PushedFilters: [" not in reported.replace("PushedFilters: []", "")


def test_filters_are_right_where_push_down_is_off(pushing: SparkSession, mixed: Mixed) -> None:
    pushing.conf.set(SETTING, "false")
    try:
        frames = Frames(pushing, mixed, "source")
        for text, test in frames.conditions[1::6]:
            assert _places(frames.at(text)) == frames.expected(test)
            assert frames.whole.count() == len(frames.expected())
    finally:
        pushing.conf.set(SETTING, "true")
