"""Reading through a broker: the rows of every tier, whatever happens between plan and read, and no secret gets out."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import forebay
from forebay.clock import SystemClock
from forebay.errors import Invalid, Unauthenticated, Unavailable, Unsupported
from forebay.service.tokens import Tokens
from forebay.settings import ExportSettings, RetentionSettings, ServerSettings
from forebay.spark.place.opening import opened
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.snapshot import Split
from forebay.spark.reading.task import read_split
from forebay.spark.source import ForebayDataSource
from forebay.testing.inside import inside
from tests.spark.mixed import TOPIC
from tests.spark.served import ServedMixed
from tests.spark.topics import SETTINGS, Filled, Row, in_order, rows_in, splits_of
from tests.support.brokers import running_broker, server_settings
from tests.support.environments import directories

pytestmark = pytest.mark.slow

NO_COPIES = RetentionSettings(time_s=0, bytes_max=0, grace_s=0)


@pytest.fixture(params=["local", "shared_fs"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServedMixed]:
    environment = directories.local(tmp_path)
    if request.param == "shared_fs":
        environment = directories.shared_fs(tmp_path, export=ExportSettings(orphan_grace_s=0), retention=NO_COPIES)
    mixed = ServedMixed(environment)
    yield mixed
    mixed.close()


def planned(mixed: ServedMixed, **options: str) -> list[Split]:
    return splits_of(ReadOptions.parse({**mixed.by_broker, **options}))


def rows_of(splits: list[Split]) -> list[Row]:
    """Each split is sent to another process first, as Spark does."""
    return rows_in(batch for split in splits for batch in read_split(pickle.loads(pickle.dumps(split))))


def test_every_tier_is_read_with_what_was_deleted_left_out(mixed: ServedMixed) -> None:
    mixed.every_tier()

    splits = planned(mixed, minPartitions="5")

    assert len(splits) >= 5
    assert rows_of(splits) == mixed.rows
    assert rows_of(splits) == mixed.rows, "a second use gives equal rows"


def test_conditions_times_and_offsets_choose_the_same_rows_as_by_path(mixed: ServedMixed) -> None:
    mixed.every_tier()
    middle = mixed.rows[len(mixed.rows) // 2]["timestamp"]
    for options in (
        {"where": "key = 'key-4' AND offset > 1000"},
        {"where": "tag LIKE 'tag-2%' AND partition = 1"},
        {"startingTimestamp": str(middle)},
        {"endingTimestamp": str(middle)},
    ):
        by_path = splits_of(ReadOptions.parse({**mixed.options, **options}))
        assert rows_of(planned(mixed, **options)) == rows_of(by_path)
    assert planned(mixed, startingTimestamp="99999999999999") == []


def test_a_pattern_reads_what_matches(mixed: ServedMixed) -> None:
    mixed.filled.many(10, 1)
    mixed.log.create_topic("other/orders").append(b"no")

    splits = splits_of(ReadOptions.parse({"broker": mixed.broker.url, "topicPattern": "shop/.*"}))

    assert rows_of(splits) == mixed.rows


@pytest.mark.proves("I32")
def test_a_plan_shows_its_moment_after_deletes_exports_compaction_and_retention(mixed: ServedMixed) -> None:
    for partition in (0, 1):
        mixed.filled.many(300, partition)
    mixed.export()
    for partition in (0, 1):
        mixed.filled.many(300, partition)
        mixed.filled.singles(20, partition)
    splits, rows = planned(mixed), mixed.rows

    mixed.filled.many(10, 0)
    mixed.delete(0, 10, 15)
    assert rows_of(splits) == rows, "what ends later is in it"
    mixed.export()
    assert rows_of(splits) == rows, "what was the log is history"
    mixed.compact()
    assert rows_of(splits) == rows, "segments that were compacted stay for a while"
    _drop_replaced(mixed)

    with pytest.raises(Unavailable, match=r"shop/orders\[0\]: records of \[10, 15\) went since this was loaded"):
        rows_of(splits)
    without = [row for row in rows if row["partition"] or not 10 <= row["offset"] < 15]
    assert rows_of([dataclasses.replace(split, fail_on_data_loss=False) for split in splits]) == without
    assert rows_of(planned(mixed)) == mixed.rows


def _drop_replaced(mixed: ServedMixed) -> None:
    """Only the Parquet segments are left of what is history."""
    if mixed.environment.settings.storage.mode == "local":
        for partition in (0, 1):
            directories.shard_of(mixed.filled.topic, partition).history.retain()
    for path in [path for suffix in ("seg", "idx") for path in (mixed.environment.root / "store").rglob(f"*.{suffix}")]:
        if "compacted" not in str(path):
            path.unlink()


def test_what_was_evicted_since_is_a_named_failure_or_left_out(mixed: ServedMixed) -> None:
    for _ in range(2):
        mixed.filled.many(100)
        mixed.export()
    mixed.filled.many(10)
    splits = planned(mixed)

    mixed.log.alter_topic(TOPIC, cap_records=110, allow_loss=True)
    while mixed.filled.topic.offsets(0).evict_floor < 100:
        mixed.log.run_retention(TOPIC)
    _drop_evicted(mixed)

    with pytest.raises(Unavailable, match=r"were evicted \(cap\); load it again"):
        rows_of(splits)
    left = rows_of([dataclasses.replace(split, fail_on_data_loss=False) for split in splits])
    assert [row["offset"] for row in left] == list(range(100, 210))


def _drop_evicted(mixed: ServedMixed) -> None:
    """The segment that was evicted as a whole goes for good."""
    directories.shard_of(mixed.filled.topic).history.retain()
    # Objects younger than a millisecond stay at first.
    while len([*(mixed.environment.root / "store").rglob("*.seg")]) > 1:
        inside(mixed.log).collect(mixed.filled.topic)


def test_a_plan_is_readable_after_its_topic_moved_to_another_directory(tmp_path: Path) -> None:
    mixed = ServedMixed(directories.shared_fs(tmp_path))
    for partition in (0, 1):
        mixed.filled.many(100, partition)
    mixed.export()
    for partition in (0, 1):
        mixed.filled.many(100, partition)
    splits = planned(mixed)

    with mixed.environment.open("two") as other:
        mixed.log.seal_topic(TOPIC, target=other.directory_id)
        other.topic(TOPIC).append(b"behind", partition=0)

        assert rows_of(splits) == mixed.rows, "its tail is in the store, and a store is all that tasks need"
        assert rows_of(planned(mixed)) == mixed.rows, "the broker that had it shows its history"
    mixed.close()


def test_a_plan_is_readable_after_the_broker_was_started_again(tmp_path: Path) -> None:
    mixed = ServedMixed(directories.local(tmp_path))
    mixed.filled.many(100, 0)
    mixed.filled.seal()
    mixed.filled.singles(20, 1)
    splits, rows = planned(mixed), mixed.rows
    port = int(mixed.broker.url.rpartition(":")[2])
    mixed.close()

    settings = msgspec.structs.replace(mixed.environment.settings, server=ServerSettings(port=port))
    with running_broker(tmp_path / "one", settings):
        assert rows_of(splits) == rows


def test_another_topic_of_the_name_is_not_taken_for_the_one_that_was_planned(mixed: ServedMixed) -> None:
    mixed.filled.many(50)
    splits = planned(mixed)
    mixed.log.delete_topic(TOPIC)
    mixed.log.create_topic(TOPIC, partitions=2).append_many([b"other"] * 100, partition=0)

    with pytest.raises(Unavailable, match="were there when this read was planned"):
        rows_of(splits)


def test_jobs_over_files_refuse_a_broker_and_say_where_to_go(mixed: ServedMixed) -> None:
    location = ReadOptions.parse(mixed.by_broker).location

    with (
        pytest.raises(Unsupported, match="needs the files themselves: do it where the data directory is"),
        opened(location),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/var/lib/x"}, 'option "path" and option "broker" contradict each other'),
        ({"metadata": "etcd://one:2379"}, 'option "metadata" and option "broker" contradict'),
        ({"store": "s3://bucket/x"}, 'option "store" and option "broker" contradict'),
        ({"settings": "forebay.yaml"}, 'option "settings" and option "broker" contradict'),
        ({"metadata.prefix": "/x"}, 'option "metadata.prefix" and option "broker" contradict'),
        ({"broker": "ftp://one"}, "option \"broker\" is 'ftp://one': write http://HOST:PORT"),
        ({"broker": "http://one?x=1"}, "write http://HOST:PORT"),
        ({"tokenEnv": "A", "tokenFile": "b"}, "tokenEnv and tokenFile contradict each other"),
        ({"token": "fbt_plain"}, 'option "token" is not known'),
        ({"store.options.secret_access_key": "plain"}, "as plain text, and would be sent to every machine"),
    ],
)
def test_what_contradicts_a_broker_is_refused_by_name(options: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid, match=re.escape(message)) as caught:
        ReadOptions.parse({"broker": "http://127.0.0.1:1", "topic": TOPIC, **options})
    assert "plain" not in str(caught.value).replace("plain text", "")


def test_a_token_and_a_password_are_not_repeated() -> None:
    for options in ({"broker": "http://me:fbt_secret@one:1"}, {"broker": "http://one:1", "tokenEnv": "fbt_sec-ret"}):
        with pytest.raises(Invalid) as caught:
            ReadOptions.parse({"topic": TOPIC, **options})
        assert "fbt" not in str(caught.value)
    with pytest.raises(Invalid, match='option "tokenEnv" goes with option "broker"'):
        ReadOptions.parse({"topic": TOPIC, "path": "/x", "tokenEnv": "A"})


def test_a_token_is_looked_up_where_it_is_used_and_seen_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = server_settings(access="tokens")
    with forebay.open(tmp_path / "data", SETTINGS) as log:
        filled = Filled(log, TOPIC)
        filled.many(30)
        filled.seal()
        filled.singles(5)
        tokens = Tokens(log.metadata, settings.metadata.prefix, SystemClock())
        secret = tokens.create("spark", scopes=["read"], prefixes=["shop/"]).secret.reveal()
    (tmp_path / "token").write_text(f"{secret}\n")
    seen: list[str] = []
    with caplog.at_level("DEBUG"), running_broker(tmp_path / "data", settings) as broker:
        for chosen in ({"tokenEnv": "SHOP_TOKEN"}, {"tokenFile": str(tmp_path / "token")}):
            monkeypatch.setenv("SHOP_TOKEN", secret)
            options = {"broker": broker.url, "topic": TOPIC, **chosen}
            source = ForebayDataSource(options)
            reader = source.reader(source.schema())
            splits = [part.value for part in reader.partitions()]
            seen += [repr(splits), str(ReadOptions.parse(options)), repr(pickle.dumps((reader, splits, source)))]
            assert rows_of(splits) == in_order(filled.rows)

            monkeypatch.delenv("SHOP_TOKEN")
            if "tokenEnv" in chosen:
                with pytest.raises(Invalid, match="spark.executorEnv.SHOP_TOKEN") as missing:
                    rows_of(splits)
                seen.append(str(missing.value))
        (tmp_path / "token").write_text("fbt_another-one")
        with pytest.raises(Unauthenticated) as refused:
            rows_of(splits)
        (tmp_path / "token").unlink()
        with pytest.raises(Invalid, match="cannot be read in this process") as away:
            rows_of(splits)
        with pytest.raises(Unauthenticated):
            splits_of(ReadOptions.parse({"broker": broker.url, "topic": TOPIC}))
    seen += [str(refused.value), str(away.value), *(f"{one.getMessage()} {vars(one)}" for one in caplog.records)]
    assert not [text for text in seen if "fbt_" in text or secret in text]


def test_a_broker_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.spark.place.broker.TIMEOUT_S", 0.3)

    with pytest.raises(Unavailable, match=r"the broker at http://127\.0\.0\.1:9 cannot be reached"):
        splits_of(ReadOptions.parse({"broker": "http://127.0.0.1:9", "topic": TOPIC}))
