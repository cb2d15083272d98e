"""The object store is away for a while: appends go on, export catches up, and nothing is lost."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import forebay
from forebay import Storage, Unavailable, places
from forebay.format.metadata.descriptor import Phase
from forebay.settings import ExportSettings, RetentionSettings, Settings, StorageSettings
from forebay.storage.background import cleanup, history
from tests.history.test_servers_killed import Bucket
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import (
    TOPIC,
    WAL,
    Environment,
    id_of,
    numbers,
    pieces_of,
    shard_of,
    state_of,
    told,
)
from tests.support.servers import s3_settings
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("moves-servers")]


class Store:
    """A server that can be away."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._away = False

    def leave(self) -> None:
        self._bucket.kill()
        self._away = True

    def come_back(self) -> None:
        if self._away:
            self._bucket.start()
            self._away = False


@pytest.fixture
def store(bucket: Bucket) -> Iterator[Store]:
    store = Store(bucket)
    yield store
    store.come_back()


@pytest.fixture
def environment(tmp_path: Path, bucket: Bucket, folder: str, monkeypatch: pytest.MonkeyPatch) -> Environment:
    for worker in (cleanup, history):
        monkeypatch.setattr(worker, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(history, "RETRY_SECONDS", 0.2)
    return directories.object_store(
        tmp_path,
        bucket.endpoint,
        folder,
        wal=msgspec.structs.replace(WAL, cache_bytes_max=0),
        export=ExportSettings(bytes_min=0),
        retention=RetentionSettings(check_interval_s=1, time_s=0, bytes_max=0, grace_s=0),
    )


def append(log: Storage, count: int) -> int:
    """Files of three records each; where the topic ends then."""
    topic = log.topic(TOPIC)
    for _ in range(count):
        first = topic.offsets().next
        topic.append_many([b"%d" % number for number in range(first, first + 3)])
        topic.rotate()
    return topic.offsets().next


def test_appends_go_on_while_the_store_is_away_and_export_catches_up(
    environment: Environment, store: Store, ledger: Ledger
) -> None:
    with environment.open("A") as a:
        topic = a.create_topic(TOPIC)
        end = append(a, 2)
        until(lambda: topic.offsets().exported == end)
        until(lambda: shard_of(topic).wal.files.begins == end)
        status = shard_of(topic).history.status
        assert (status().errors, status().error) == (0, None)

        store.leave()
        away_from, end = end, append(a, 5)
        until(lambda: status().errors >= 2)
        assert "s3://" in (status().error or "")
        assert status().behind.records == end - away_from
        assert topic.offsets().exported == away_from
        assert told(topic.read(away_from)) == numbers(away_from, end), "what is here can be read"
        with pytest.raises(Unavailable, match=r"s3://.*cannot read"):
            list(topic.read(0))
        with pytest.raises(Unavailable, match="s3://"):
            a.seal_topic(TOPIC)
        end = append(a, 1)
        assert state_of(a, topic).phase is Phase.OPEN, "the seal was taken back"

        store.come_back()
        until(lambda: topic.offsets().exported == end)
        until(lambda: shard_of(topic).history.status().error is None)
        assert told(topic.read()) == numbers(0, end)
        assert pieces_of(a, topic)[-1].end == end
    ledger.count("servers away", server="S3", moment="owner at work")


def test_a_process_starts_while_the_store_is_away(
    environment: Environment, store: Store, caplog: pytest.LogCaptureFixture, ledger: Ledger
) -> None:
    with environment.open("A") as a:
        a.create_topic(TOPIC)
        end = append(a, 2)
        until(lambda: a.topic(TOPIC).offsets().exported == end)
    store.leave()
    with caplog.at_level(logging.WARNING), environment.open("A") as a:
        assert "history is not exported for now, appends go on" in caplog.text
        topic = a.topic(TOPIC)
        exported, end = end, append(a, 2)
        assert topic.offsets().exported == exported
        assert told(topic.read(exported)) == numbers(exported, end)

        store.come_back()
        until(lambda: topic.offsets().exported == end)
        assert told(topic.read()) == numbers(0, end)
    ledger.count("servers away", server="S3", moment="start")


def test_a_process_starts_beside_a_store_that_takes_connections_and_answers_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour_ms = 3_600_000
    monkeypatch.setattr(places, "PROBE_SECONDS_MAX", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING):
        store = s3_settings(
            f"http://127.0.0.1:{silent.getsockname()[1]}", request_timeout_ms=hour_ms, retry_timeout_ms=hour_ms
        )
        export = ExportSettings(at_close_seconds_max=1)
        settings = Settings(storage=StorageSettings(mode="object_store"), store=store, export=export)
        with forebay.open(tmp_path / "data", settings) as log:
            topic = log.create_topic(TOPIC)

            assert "history is not exported for now, appends go on" in caplog.text
            assert topic.append(b"goes on") == 0


def test_a_topic_that_moves_waits_for_the_store_and_goes_on_exactly(
    environment: Environment, store: Store, ledger: Ledger
) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC)
        for number in range(22):
            topic.append(b"%d" % number, producer=7, sequence=number)
        a.seal_topic(TOPIC, target=id_of(b))
        store.leave()
        for _ in range(2):
            with pytest.raises(Unavailable, match="s3://"):
                b.topic(TOPIC).append(b"22", producer=7, sequence=22)

        store.come_back()
        taken = b.topic(TOPIC)
        assert taken.append(b"21", producer=7, sequence=21) == 21
        assert taken.append(b"22", producer=7, sequence=22) == 22
        assert told(taken.read()) == numbers(0, 23)
    ledger.count("servers away", server="S3", moment="move")
