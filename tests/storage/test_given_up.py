"""A shard that this process gave up or lost: no handle keeps the closed one, the one opened again is looked after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forebay import Moved
from forebay.settings import MetadataSettings, Settings, StorageSettings, StoreSettings
from forebay.shard import SegmentShard
from forebay.storage import Storage
from forebay.testing.inside import inside
from tests.storage.rig import values, wal_of
from tests.support.waiting import until


def _settings(tmp_path: Path) -> Settings:
    return Settings(
        metadata=MetadataSettings(path=f"{tmp_path}/shared.sqlite"),
        storage=StorageSettings(mode="shared_fs"),
        store=StoreSettings(root=f"{tmp_path}/store"),
    )


def _id(log: Storage) -> str:
    assert log.directory_id is not None
    return log.directory_id


def _after_retiring(log: Storage, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Whenever a lost shard is closed, `act` comes right behind it."""
    engine = inside(log).engine
    retire = engine.retire_lost

    def retired(shard: SegmentShard, may_close: Callable[[], bool]) -> bool:
        is_closed = retire(shard, may_close)
        if is_closed:
            act()
        return is_closed

    monkeypatch.setattr(engine, "retire_lost", retired)


def test_a_shard_opened_again_right_after_it_was_lost_is_still_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Storage.open(tmp_path / "A", _settings(tmp_path)) as log:
        topic = log.create_topic("orders")
        topic.append(b"0")
        _after_retiring(log, monkeypatch, lambda: topic.append(b"1"))

        lost = wal_of(topic)
        lost.fence("the lease has ended")
        until(lambda: lost.closed and topic.offsets().next == 2)
        workers = inside(log).workers
        workers.sync.step()  # behind the step that gave it up

        shard = inside(topic).shard(0)
        assert workers.history.watches(shard)
        assert workers.sync.watches(shard)


def test_a_topic_that_comes_back_is_used_without_being_asked_for(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    with Storage.open(tmp_path / "A", settings) as a, Storage.open(tmp_path / "B", settings) as b:
        topic = a.create_topic("orders")
        topic.append(b"0")
        a.seal_topic("orders", target=_id(b))
        b.topic("orders").append(b"1")
        with pytest.raises(Moved):
            topic.append(b"refused")

        b.seal_topic("orders", target=_id(a))

        assert topic.append(b"2") == 2
        assert values(topic.read()) == [b"0", b"1", b"2"]
        with pytest.raises(Moved):
            b.topic("orders").append(b"refused")


def test_a_reader_goes_on_in_the_shard_that_was_lost_and_taken_again(tmp_path: Path) -> None:
    with Storage.open(tmp_path / "A", _settings(tmp_path)) as log:
        topic = log.create_topic("orders")
        topic.append(b"0")
        follower, reader = topic.follow(0, timeout=0.0), topic.read(0)
        assert values(follower) == [b"0"]

        lost = wal_of(topic)
        lost.fence("the lease has ended")
        until(lambda: lost.closed)
        topic.append(b"1")

        assert values(follower) == [b"1"]
        assert values(reader) == [b"0"]
        log.seal_topic("orders")
        assert values(follower) == []
        assert values(topic.read(0)) == [b"0", b"1"]
        with pytest.raises(Moved):
            topic.append(b"2")
