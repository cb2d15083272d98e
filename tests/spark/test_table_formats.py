"""What every open format promises its writers: all of a commit or nothing, once, by one writer at a time. No Spark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import forebay
from forebay.errors import Conflict, Invalid, Unavailable
from forebay.settings import TableSettings
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import look_up_table
from forebay.spark.tables.commit import (
    ATTEMPTS,
    FormatTable,
    Overtaken,
    QueryBatch,
    Ranges,
    TableChange,
    TopicOffsets,
    commit,
    decode_ranges,
    encode_ranges,
)
from forebay.spark.tables.delta import DeltaLakeTable
from forebay.spark.tables.formats import FORMATS, open_format
from tests.spark.topics import SETTINGS

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
NAME = "shop.orders"
LATER_MS = 10**15
FOLDER = "data/lake"


@pytest.fixture
def location(tmp_path: Path) -> Location:
    with forebay.open(str(tmp_path / "data [1] 50%"), SETTINGS):
        pass
    return Location.of(tmp_path / "data [1] 50%")


@pytest.fixture(params=sorted(FORMATS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_one(kind: str, location: Location) -> Iterator[Callable[[], FormatTable]]:
    """Opens the table as another process would."""
    opened: list[FormatTable] = []

    def open_it() -> FormatTable:
        table = open_format(kind, location, NAME)
        opened.append(table)
        table.make(SCHEMA, {})
        return table

    yield open_it
    for table in opened:
        table.close()


def put(table: FormatTable, *numbers: int, schema: pa.Schema = SCHEMA) -> str:
    """Write a file as a task does, under a name of its own; its address."""
    folder = table.folder(FOLDER)
    path = Path(folder.removeprefix("file://"))
    path.mkdir(parents=True, exist_ok=True)
    name = f"{os.urandom(16).hex()}.parquet"
    columns = {"id": list(numbers), "name": [f"n{number}" for number in numbers]}
    pq.write_table(pa.table({field.name: columns[field.name] for field in schema}, schema), path / name)
    return f"{folder}/{name}"


def brought(ranges: Ranges, topic_id: str = "t1") -> TopicOffsets:
    ends = {partition: found[-1][1] for partition, found in ranges.items()}
    return TopicOffsets(topic="shop/orders", topic_id=topic_id, ranges=ranges, ends=ends)


def ids(kind: str, location: Location) -> list[int]:
    """The rows as another program reads them."""
    if kind == "delta":
        found = DeltaLakeTable(location, NAME)
        assert found.look()
        rows = pa.table(found.table.scan())
        assert found.table.to_pyarrow_table().num_rows == rows.num_rows
    else:
        table = look_up_table(location, NAME)
        assert table is not None
        rows = table.scan().to_arrow()
    return sorted(rows["id"].to_pylist())


def test_a_commit_brings_rows_and_records_how_far_the_table_is(
    kind: str, location: Location, open_one: Callable[[], FormatTable]
) -> None:
    assert not open_format(kind, location, NAME).look()
    table = open_one()
    for start, numbers in ((0, (0, 1)), (2, (2,)), (3, ())):
        ranges: Ranges = {0: [(start, start + 2)], 3: [(start, start + 1)]}
        files = [put(table, *numbers)] if numbers else []
        commit(table, TableChange(added=files, offsets=brought(ranges)), basis=table.next_offsets)

    seen = open_one()
    for found in (table, seen):
        assert (found.topic_id(), found.next_offsets()) == ("t1", {0: 5, 3: 4})
        assert list(found.commits()) == [{0: [(s, s + 2)], 3: [(s, s + 1)]} for s in (3, 2, 0)]
        assert len(found.files()) == 2
    assert ids(kind, location) == [0, 1, 2]


def test_a_batch_is_recorded_with_its_rows(kind: str, location: Location, open_one: Callable[[], FormatTable]) -> None:
    table = open_one()
    assert table.last_batch("q") == -1

    for number in (0, 7):
        commit(table, TableChange(added=[put(table, number)], batch=QueryBatch("q", number)), basis=table.version)
    commit(table, TableChange(batch=QueryBatch("empty", 1)), basis=table.version)

    assert [open_one().last_batch(query) for query in ("q", "empty", "other")] == [7, 1, -1]
    assert ids(kind, location) == [0, 7]


def test_of_two_writers_at_once_one_is_refused_and_nothing_comes_twice(
    kind: str, location: Location, open_one: Callable[[], FormatTable]
) -> None:
    one, other = open_one(), open_one()
    first = TableChange(added=[put(one, 1)], offsets=brought({0: [(0, 1)]}))
    again = TableChange(added=[put(other, 1)], offsets=brought({0: [(0, 1)]}))

    def meanwhile() -> None:
        commit(one, first, basis=one.next_offsets)

    with pytest.raises(Conflict, match=r"shop\.orders was changed by another job meanwhile: run it again"):
        commit(other, again, basis=other.next_offsets, check=meanwhile)

    assert other.next_offsets() == {0: 1}, "it was looked at: the next run goes on from there"
    assert ids(kind, location) == [1]


def test_what_another_changes_elsewhere_is_no_reason_to_refuse(
    kind: str, location: Location, open_one: Callable[[], FormatTable]
) -> None:
    one, other = open_one(), open_one()
    once = iter([1])

    def meanwhile() -> None:
        for number in once:
            commit(one, TableChange(added=[put(one, number)], batch=QueryBatch("another", 0)), basis=one.version)

    commit(
        other, TableChange(added=[put(other, 2)], batch=QueryBatch("q", 0)), basis=other.next_offsets, check=meanwhile
    )

    assert ids(kind, location) == [1, 2]
    assert (other.last_batch("q"), other.last_batch("another")) == (0, 0)


def test_a_commit_whose_answer_was_lost_is_not_made_again(
    kind: str, location: Location, open_one: Callable[[], FormatTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_one()
    attempt = table.attempt

    def lost(change: TableChange) -> None:
        """As when a store has taken the commit, fails to say so, and is asked again by its library."""
        attempt(change)
        raise Overtaken("it is there already")

    monkeypatch.setattr(table, "attempt", lost)
    commit(table, TableChange(added=[put(table, 1), put(table, 2)]), basis=lambda: None)

    assert ids(kind, location) == [1, 2]


def test_one_that_is_always_overtaken_gives_up(
    kind: str, location: Location, open_one: Callable[[], FormatTable]
) -> None:
    one, other = open_one(), open_one()

    def meanwhile() -> None:
        commit(one, TableChange(added=[put(one, 1)]), basis=one.version)

    with pytest.raises(Unavailable, match=f"changed {ATTEMPTS} times by others"):
        commit(other, TableChange(added=[put(other, 2)]), basis=other.next_offsets, check=meanwhile)
    assert ids(kind, location) == [1] * ATTEMPTS


def test_rows_in_the_place_of_all_others_never_take_the_place_of_unseen_ones(
    kind: str, location: Location, open_one: Callable[[], FormatTable]
) -> None:
    one, other = open_one(), open_one()
    commit(one, TableChange(added=[put(one, 1)]), basis=one.version)
    other.look()
    commit(other, TableChange(added=[put(other, 2)], replace=True), basis=other.version)
    assert ids(kind, location) == [2]

    def meanwhile() -> None:
        one.look()
        commit(one, TableChange(added=[put(one, 3)]), basis=one.version)

    with pytest.raises(Conflict, match="changed by another job"):
        commit(other, TableChange(added=[put(other, 4)], replace=True), basis=other.version, check=meanwhile)
    assert ids(kind, location) == [2, 3]


def test_files_are_exchanged_in_one_commit_and_the_files_themselves_stay(
    kind: str, location: Location, open_one: Callable[[], FormatTable]
) -> None:
    table = open_one()
    old, kept, new = put(table, 1), put(table, 2), put(table, 3)
    commit(table, TableChange(added=[old, kept]), basis=table.version)

    commit(table, TableChange(added=[new], removed=frozenset({old})), basis=lambda: table.files().keys())

    assert ids(kind, location) == [2, 3]
    assert table.files().keys() == {kept, new}
    assert set(table.named_files(TableSettings(), 0)) == {old, kept, new}
    assert Path(old.removeprefix("file://")).exists()
    table.expire(TableSettings(snapshots_kept_s=0), LATER_MS)
    assert set(table.named_files(TableSettings(snapshots_kept_s=0), LATER_MS)) == {kept, new}


def test_a_table_has_one_topic(open_one: Callable[[], FormatTable]) -> None:
    table = open_one()
    commit(table, TableChange(offsets=brought({0: [(0, 1)]})), basis=table.next_offsets)

    with pytest.raises(Conflict, match=r"shop\.orders is filled from another topic, of the id t1"):
        commit(table, TableChange(offsets=brought({0: [(0, 9)]}, "t2")), basis=table.next_offsets)
    assert open_one().next_offsets() == {0: 1}


def test_columns_are_added_and_none_changes_its_type(
    kind: str, location: Location, open_one: Callable[[], FormatTable]
) -> None:
    table = open_one()
    commit(table, TableChange(added=[put(table, 1)]), basis=table.version)
    wider = pa.schema([*SCHEMA, pa.field("more", pa.list_(pa.int32()))])

    for _ in range(2):
        table.fit(wider)
        table.look()
    assert table.check(wider).names == ["id", "name", "more"]
    with pytest.raises(Invalid, match="the rows have id, name"):
        table.check(SCHEMA)

    for given, shown in ((pa.string(), "string"), (pa.struct([("a", pa.int32())]), "struct<")):
        changed = pa.schema([pa.field("id", given), SCHEMA.field("name")])
        message = rf"column id of the table shop\.orders is long, and the rows have {shown}"
        with pytest.raises(Invalid, match=message):
            table.fit(changed)
    assert ids(kind, location) == [1]


def test_what_killed_runs_left_goes_after_its_grace_and_named_files_stay(
    kind: str, location: Location, open_one: Callable[[], FormatTable]
) -> None:
    table = open_one()
    named, replaced, stray = put(table, 1), put(table, 2), put(table, 3)
    commit(table, TableChange(added=[named, replaced]), basis=table.version)
    commit(table, TableChange(removed=frozenset({replaced})), basis=table.version)
    now_ms = int(Path(stray.removeprefix("file://")).stat().st_mtime * 1000) + 5_000

    def left() -> set[str]:
        return {address for address in (named, replaced, stray) if Path(address.removeprefix("file://")).exists()}

    folder = table.folder(FOLDER)
    assert table.remove_strays(folder, TableSettings(orphan_grace_s=3600), now_ms) == 0
    assert table.remove_strays(folder, TableSettings(orphan_grace_s=1), now_ms) == 1
    assert table.remove_strays(folder, TableSettings(orphan_grace_s=1, snapshots_kept_s=1800), now_ms) == 0
    assert left() == {named, replaced}, "an older version that is kept names it"
    settings: Any = TableSettings(orphan_grace_s=0, snapshots_kept_s=0)
    table.expire(settings, LATER_MS)
    table.remove_strays(folder, settings, LATER_MS)
    assert left() == {named}


def test_ranges_are_read_in_both_shapes_and_written_in_one() -> None:
    assert decode_ranges('{"0":[100,200],"1":[0,1]}') == {0: [(100, 200)], 1: [(0, 1)]}
    ranges: Ranges = {1: [(0, 3), (5, 9)], 0: []}
    assert encode_ranges(ranges) == '{"0":[],"1":[[0,3],[5,9]]}'
    assert decode_ranges(encode_ranges(ranges)) == ranges


def test_a_format_that_is_not_known_is_refused(location: Location) -> None:
    with pytest.raises(Invalid, match="take one of iceberg, delta"):
        open_format("hudi", location, NAME)
    for kind in FORMATS:
        with pytest.raises(Invalid, match="names no table"):
            open_format(kind, location, "orders")
