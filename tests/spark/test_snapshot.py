"""What tasks read of a topic in all tiers at once, without Spark: exactly its rows, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from forebay.clock import SystemClock
from forebay.columnar import ParquetSegment
from forebay.disk import SystemDisk
from forebay.errors import Corrupt, DataLoss, Invalid, Unavailable, UnknownTopic
from forebay.format.metadata.descriptor import DescriptorKind, ShardState
from forebay.format.metadata.value import decode_value, encode_value
from forebay.loads.book import LoadBook
from forebay.loads.service import Loads
from forebay.metadata import Put, SqliteMetadata
from forebay.settings import ExportSettings, RetentionSettings
from forebay.spark.reading.options import ReadOptions, Topics
from forebay.spark.reading.snapshot import Split
from forebay.spark.reading.task import read_split
from forebay.spark.reading.view import Viewer, load
from forebay.topics import TopicName
from tests.spark.mixed import TOPIC, Mixed
from tests.spark.topics import TIME, Filled, Row, in_order, rows_in, splits_of
from tests.support.environments import directories
from tests.support.etcd import running

pytestmark = pytest.mark.slow


@pytest.fixture(params=["local", "shared_fs"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mixed]:
    mixed = Mixed(directories.local(tmp_path) if request.param == "local" else directories.shared_fs(tmp_path))
    yield mixed
    mixed.close()


def _read(mixed: Mixed, **options: str) -> list[Row]:
    return _rows(splits_of(ReadOptions.parse({**mixed.options, **options})))


def _rows(splits: list[Split]) -> list[Row]:
    return rows_in(batch for split in splits for batch in read_split(pickle.loads(pickle.dumps(split))))


def test_rows_of_all_tiers_are_what_was_appended_without_what_was_deleted(mixed: Mixed) -> None:
    mixed.every_tier()

    snapshot, _ = load(ReadOptions.parse(mixed.options))

    for view in snapshot.shards:
        kinds = {piece.descriptor and piece.descriptor.kind for piece in view.pieces}
        assert kinds >= {DescriptorKind.PARQUET, DescriptorKind.FRAMES, None}
    assert _read(mixed) == mixed.rows
    assert _read(mixed, minPartitions="7") == mixed.rows


def test_history_alone_is_read_by_its_store_and_metadata(tmp_path: Path) -> None:
    mixed = Mixed(directories.shared_fs(tmp_path))
    mixed.every_tier()
    mixed.export()
    exported = mixed.rows
    mixed.filled.many(10, 0)
    options = {"store": f"file://{tmp_path}/store", "metadata": f"sqlite://{tmp_path}/shared.sqlite", "topic": TOPIC}

    assert _rows(splits_of(ReadOptions.parse(options))) == exported
    assert _read(mixed) == mixed.rows
    mixed.close()


def test_several_topics_are_one_table_by_name_and_by_pattern(tmp_path: Path) -> None:
    environment = directories.local(tmp_path)
    mixed = Mixed(environment, partitions=1)
    mixed.filled.many(20)
    other = Filled(mixed.log, "shop/returns", partitions=2)
    other.many(10, 1)
    mixed.log.create_topic("shop/private", durability="ephemeral")
    mixed.log.create_topic("else/where").append(b"no")
    options = {name: text for name, text in mixed.options.items() if name != "topic"}

    named = {**options, "topics": f"{TOPIC}, shop/returns"}
    for asked in (named, {**options, "topicPattern": "shop/.*"}):
        batches = [batch for split in splits_of(ReadOptions.parse(asked)) for batch in read_split(split)]
        counts = Counter(row["topic"] for batch in batches for row in batch.to_pylist())
        assert counts == {TOPIC: 20, "shop/returns": 10}

    starts = {TOPIC: {"0": 15}, "shop/returns": {"0": 0, "1": 8}}
    splits = splits_of(ReadOptions.parse({**named, "startingOffsets": json.dumps(starts)}))
    assert sum(batch.num_rows for split in splits for batch in read_split(split)) == 7
    with pytest.raises(Invalid, match="leaves out partition 0, 1: shop/returns has partitions 0 to 1"):
        load(ReadOptions.parse({**named, "startingOffsets": json.dumps({TOPIC: {"0": 1}})}))
    with pytest.raises(Invalid, match="names else/where, which this read does not take"):
        load(ReadOptions.parse({**named, "startingOffsets": json.dumps({**starts, "else/where": {"0": 1}})}))
    with pytest.raises(UnknownTopic, match="no topic matches nothing"):
        load(ReadOptions.parse({**options, "topicPattern": "nothing"}))
    with pytest.raises(UnknownTopic, match="there is no topic shop/other"):
        load(ReadOptions.parse({**options, "topics": f"{TOPIC},shop/other"}))
    mixed.close()


def test_start_and_end_by_time_are_found_in_every_tier(mixed: Mixed) -> None:
    mixed.every_tier()
    for at in (12, 3160, 6500, len(mixed.rows) - 1):
        moment = sorted(row["timestamp"] for row in mixed.rows)[at]

        late = _read(mixed, startingTimestamp=str(moment))
        early = _read(mixed, endingTimestamp=str(moment))

        expected = [_from_time(mixed.rows, partition, moment) for partition in (0, 1)]
        assert late == [row for rows in expected for row in rows]
        assert in_order([*early, *late]) == mixed.rows
    assert _read(mixed, startingTimestamp=str(TIME * 2)) == []
    by_partition = json.dumps({TOPIC: {"0": 0, "1": TIME * 2}})
    assert {row["partition"] for row in _read(mixed, startingOffsetsByTimestamp=by_partition)} == {0}


def _from_time(rows: list[Row], partition: int, moment: int) -> list[Row]:
    """From the first record at or after the time on, as offsets go."""
    own = [row for row in rows if row["partition"] == partition]
    first = next((place for place, row in enumerate(own) if row["timestamp"] >= moment), len(own))
    return own[first:]


def test_evicted_records_are_gone_and_a_start_below_them_is_a_loss(
    mixed: Mixed, caplog: pytest.LogCaptureFixture
) -> None:
    mixed.every_tier()
    _evict(mixed, 2200)
    floors = [mixed.filled.topic.offsets(partition).earliest for partition in (0, 1)]
    assert min(floors) > 3000
    left = [row for row in mixed.rows if row["offset"] >= floors[row["partition"]]]

    assert _read(mixed) == left
    below = json.dumps({TOPIC: {"0": floors[0] - 1, "1": floors[1]}})
    with pytest.raises(Invalid, match=rf"startingOffsets is {floors[0] - 1}, the earliest offset there is {floors[0]}"):
        _read(mixed, startingOffsets=below)
    assert _read(mixed, startingOffsets=below, failOnDataLoss="false") == left
    assert "1 offsets that are gone are skipped" in caplog.text


def _evict(mixed: Mixed, cap_records: int) -> None:
    mixed.log.alter_topic(TOPIC, cap_records=cap_records, allow_loss=True)
    for partition in (0, 1):
        directories.shard_of(mixed.filled.topic, partition).evict(SystemClock().now_ms())


def test_a_range_is_read_again_as_it_was_whatever_was_deleted_sealed_and_exported_since(mixed: Mixed) -> None:
    mixed.every_tier()
    splits, before = splits_of(ReadOptions.parse(mixed.options)), mixed.rows

    for partition in (0, 1):
        mixed.delete(partition, 0, 100)
        mixed.delete(partition, 3300, 4000)
    mixed.filled.many(100)
    mixed.filled.seal()
    assert _rows(splits) == before

    mixed.export()
    directories.clear_up(mixed.log)
    assert _rows(splits) == before
    assert _read(mixed) == mixed.rows


def test_local_files_that_left_since_are_read_from_the_store(tmp_path: Path) -> None:
    """Their records are history by then: the look at the catalog is repeated where the plan leads nowhere."""
    keep_nothing = RetentionSettings(time_s=0, bytes_max=0, grace_s=0)
    mixed = Mixed(directories.shared_fs(tmp_path, retention=keep_nothing))
    mixed.every_tier()
    splits, before = splits_of(ReadOptions.parse(mixed.options)), mixed.rows

    mixed.filled.topic.rotate()
    mixed.export()
    for partition in (0, 1):
        directories.shard_of(mixed.filled.topic, partition).history.retain()

    assert len(mixed.environment.files("one")) == 2
    assert _rows(splits) == before
    mixed.close()


def test_what_was_evicted_since_the_plan_is_a_named_failure(mixed: Mixed) -> None:
    mixed.every_tier()
    mixed.export()
    splits = splits_of(ReadOptions.parse(mixed.options))

    _evict(mixed, 10)
    for path in [
        *(mixed.environment.root / "store").rglob("*.seg"),
        *(mixed.environment.root / "one" / "loads").rglob("*.seg"),
    ]:
        path.unlink()

    with pytest.raises(Unavailable, match=r"shop/orders\[0\]: records of \[\d+, \d+\) went since this was loaded"):
        _rows(splits)


def test_a_topic_that_moved_is_read_from_its_history(tmp_path: Path) -> None:
    mixed = Mixed(directories.shared_fs(tmp_path))
    mixed.filled.many(100)
    before = mixed.rows
    mixed.log.seal_topic(TOPIC)
    with mixed.environment.open("two") as other:
        topic = other.topic(TOPIC)
        topic.append(b"later")

        assert _read(mixed) == before
        other.export_topic(TOPIC)
        rows = _read(mixed)
        assert [row["value"] for row in rows[100:]] == [b"later"]
        assert _read(mixed, path=str(tmp_path / "two")) == rows
    mixed.close()


def test_files_of_a_directory_that_lost_the_shard_are_not_its_records(tmp_path: Path) -> None:
    """What they have beyond history, whichever caller holds the shard now could not take over."""
    mixed = Mixed(directories.shared_fs(tmp_path, export=ExportSettings(at_close_seconds_max=0)), partitions=1)
    mixed.filled.many(100)
    mixed.export()
    history = mixed.rows
    mixed.filled.many(10)
    mixed.close()
    store = SqliteMetadata(f"{tmp_path}/shared.sqlite", disk=SystemDisk(), clock=SystemClock())
    key = directories.keys_of(mixed.log, mixed.filled.topic).state
    entry = store.get(key)
    assert entry is not None
    state = decode_value(entry.value, ShardState)[0]
    store.transaction([], [Put(key, encode_value(msgspec.structs.replace(state, holder="f" * 32)))])
    store.close()

    assert _read(mixed) == history


def test_a_look_is_repeated_cheaply_and_sees_what_came(mixed: Mixed) -> None:
    mixed.every_tier()
    with contextlib.closing(Viewer(ReadOptions.parse(mixed.options).location)) as viewer:
        before = viewer.look(Topics(names=(TopicName.parse(TOPIC),)))
        mixed.filled.many(10, 0)
        mixed.delete(1, 0, 5)
        after = viewer.look(Topics(names=(TopicName.parse(TOPIC),)))

    assert [view.next for view in after.shards] == [before.shards[0].next + 10, before.shards[1].next]
    assert after.shards[1].deleted.count_in(0, 5) == 5
    assert before.shards[1].deleted.count_in(0, 5) == 0
    assert [view.epoch for view in after.shards] == [1, 1]


def test_nothing_behind_a_load_that_is_only_offered_is_shown(mixed: Mixed, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be given up: until then all partitions end before it."""
    mixed.filled.many(50, 0)
    mixed.filled.many(50, 1)
    before = mixed.rows
    with monkeypatch.context() as patched:
        patched.setattr(LoadBook, "commit", lambda book, load_id: book.get(load_id).load)
        mixed.load(20)
        mixed.filled.many(5, 0)

        assert _read(mixed) == before
    mixed.log.loads.step()
    assert _read(mixed) == mixed.rows


def test_a_load_that_was_given_up_is_a_gap_that_no_caller_misses(mixed: Mixed, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed.filled.many(50, 0)
    rows = list(mixed.filled.rows)
    with monkeypatch.context() as patched:
        patched.setattr(LoadBook, "commit", lambda book, load_id: book.get(load_id).load)
        patched.setattr(Loads, "finish", lambda *_: None)
        mixed.load(20)
        mixed.log.loads.abandon("load-50")
        mixed.filled.rows = rows
        mixed.filled.many(5, 0)

        assert _read(mixed) == mixed.rows


@pytest.mark.parametrize("deleted_since", [False, True])
def test_compaction_since_the_plan_gives_equal_rows_or_a_named_failure(tmp_path: Path, *, deleted_since: bool) -> None:
    mixed = Mixed(directories.shared_fs(tmp_path), partitions=1)
    for _ in range(3):
        mixed.filled.many(100)
        mixed.export()
    mixed.delete(0, 50, 60)
    splits, before = splits_of(ReadOptions.parse(mixed.options)), mixed.rows
    if deleted_since:
        mixed.delete(0, 150, 160)

    mixed.compact()
    assert _rows(splits) == before
    for path in (tmp_path / "store").rglob("*.seg"):
        path.unlink()

    if deleted_since:
        with pytest.raises(Unavailable, match=r"shop/orders\[0\]: records of \[150, 160\) went since this was loaded"):
            _rows(splits)
    else:
        assert _rows(splits) == before
    assert _read(mixed) == mixed.rows
    mixed.close()


def test_a_damaged_row_group_fails_by_name_or_is_skipped(tmp_path: Path) -> None:
    mixed = Mixed(directories.shared_fs(tmp_path), partitions=1)
    for _ in range(2):
        mixed.filled.many(100)
        mixed.export()
    mixed.compact()
    mixed.filled.many(5)
    (path,) = (tmp_path / "store").rglob("*.parquet")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    splits = splits_of(ReadOptions.parse(mixed.options))
    path.write_bytes(content)

    with pytest.raises((DataLoss, Unavailable), match=r"shop/orders\[0\]: offsets \[0, 200\)"):
        _rows(splits)
    mixed.close()


def test_a_segment_that_gives_fewer_records_than_the_catalog_says_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = Mixed(directories.shared_fs(tmp_path), partitions=1)
    for _ in range(2):
        mixed.filled.many(100)
        mixed.export()
    mixed.compact()
    plain = ParquetSegment.tables

    def fewer(segment: ParquetSegment, start: int, stop: int, names: Sequence[str]) -> Iterator[pa.Table]:
        return (table.slice(0, table.num_rows - 1) for table in plain(segment, start, stop, names))

    monkeypatch.setattr(ParquetSegment, "tables", fewer)

    with pytest.raises(Corrupt, match=r"gave 199 records, the catalog says 200"):
        _read(mixed)
    mixed.close()


def test_machines_that_do_not_see_the_directory_read_history_and_name_what_they_cannot(tmp_path: Path) -> None:
    mixed = Mixed(directories.shared_fs(tmp_path), partitions=1)
    mixed.filled.many(100)
    mixed.export()
    history, rows = splits_of(ReadOptions.parse(mixed.options)), mixed.rows
    mixed.filled.many(10)
    tail = splits_of(ReadOptions.parse({**mixed.options, "startingOffsets": json.dumps({TOPIC: {"0": 100}})}))
    mixed.close()
    (tmp_path / "one").rename(tmp_path / "unseen")

    assert _rows(history) == rows
    with pytest.raises(Invalid, match="one is not a Forebay data directory"):
        _rows(tail)


def test_a_task_without_the_secrets_of_the_store_says_which_and_where_to_set_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = Mixed(directories.shared_fs(tmp_path), partitions=1)
    mixed.filled.many(10)
    mixed.export()
    monkeypatch.setenv("PLACE_OF_HISTORY", str(tmp_path / "store"))
    (split,) = splits_of(ReadOptions.parse({**mixed.options, "store.root": "${PLACE_OF_HISTORY}"}))
    assert _rows([split]) == mixed.rows

    monkeypatch.delenv("PLACE_OF_HISTORY")

    with pytest.raises(
        Invalid, match="variable PLACE_OF_HISTORY, .* executors with spark.executorEnv.PLACE_OF_HISTORY"
    ):
        list(read_split(split))
    mixed.close()


@pytest.mark.slow
def test_metadata_in_etcd_is_named_by_its_members(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    with running(tmp_path / "etcd", 1) as cluster:
        environment = directories.in_etcd(directories.shared_fs(tmp_path), cluster.endpoints, "/shop")
        mixed = Mixed(environment)
        mixed.every_tier()
        members = ",".join(endpoint.removeprefix("http://") for endpoint in cluster.endpoints)
        options = {"store": f"file://{tmp_path}/store", "metadata": f"etcd://{members}/shop", "topic": TOPIC}

        assert _read(mixed) == mixed.rows
        mixed.export()
        assert _rows(splits_of(ReadOptions.parse(options))) == mixed.rows
        mixed.close()
