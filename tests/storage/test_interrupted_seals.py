"""A seal that was broken off is repeated or taken back where the topic was; what has arrived is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay import Corrupt, Moved, Unavailable
from forebay.export import Lag
from forebay.settings import MetadataSettings, Settings, StorageSettings, StoreSettings
from forebay.shard.history import ShardHistory
from forebay.storage import Storage
from tests.storage.rig import WatchedDisk, no_indexes, values


def _settings(tmp_path: Path) -> Settings:
    return Settings(
        metadata=MetadataSettings(path=f"{tmp_path}/shared.sqlite"),
        storage=StorageSettings(mode="shared_fs"),
        store=StoreSettings(root=f"{tmp_path}/store"),
    )


def _id(log: Storage) -> str:
    assert log.directory_id is not None
    return log.directory_id


def _break_off(lag: Lag) -> None:
    raise KeyboardInterrupt


def test_a_seal_that_was_broken_off_is_taken_back_by_the_next_use(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    with Storage.open(tmp_path / "A", settings) as a, Storage.open(tmp_path / "B", settings) as b:
        topic = a.create_topic("orders")
        topic.append(b"0")

        with pytest.raises(KeyboardInterrupt):
            a.seal_topic("orders", target=_id(b), on_file=_break_off)

        with pytest.raises(Moved):
            b.topic("orders").append(b"x")
        assert topic.append(b"1") == 1
        assert [state.next_offset for state in a.seal_topic("orders", target=_id(b))] == [2]
        assert b.topic("orders").append(b"2") == 2


def test_a_seal_is_repeated_where_one_partition_has_arrived_already(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    with Storage.open(tmp_path / "A", settings) as a, Storage.open(tmp_path / "B", settings) as b:
        topic = a.create_topic("orders", partitions=2)
        for partition in range(2):
            topic.append_many([b"0", b"1"], partition=partition)
        sealed: list[Lag] = []

        def break_off_in_the_second(lag: Lag) -> None:
            sealed.append(lag)
            if len(sealed) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            a.seal_topic("orders", target=_id(b), on_file=break_off_in_the_second)
        assert b.topic("orders").append(b"2", partition=0) == 2
        states = a.seal_topic("orders", target=_id(b))

        assert [state.holder for state in states] == [_id(b), _id(a)]
        assert b.topic("orders").append(b"2", partition=1) == 2
        assert values(b.topic("orders").read()) == [b"0", b"1", b"2"] * 2


def test_a_seal_that_finds_less_in_history_than_in_the_log_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever kept the end from being exported, and whichever caller said that it was."""
    settings = _settings(tmp_path)
    with Storage.open(tmp_path / "A", settings) as a, Storage.open(tmp_path / "B", settings) as b:
        topic = a.create_topic("orders")
        topic.append(b"0")
        a.export_topic("orders")
        topic.append(b"1")

        with monkeypatch.context() as patch:
            patch.setattr(ShardHistory, "catch_up", lambda history, on_file=None, accept_damage=False: None)
            with pytest.raises(Corrupt, match="history ends at 1 and the log at 2: it is not sealed"):
                a.seal_topic("orders", target=_id(b))

        with pytest.raises(Moved):
            b.topic("orders").append(b"x")
        assert topic.append(b"2") == 2
        assert values(topic.read()) == [b"0", b"1", b"2"]


def test_a_seal_waits_for_files_that_cannot_be_sealed_yet(tmp_path: Path) -> None:
    disk = WatchedDisk()
    with Storage.open(tmp_path / "A", _settings(tmp_path), disk=disk) as a:
        topic = a.create_topic("orders")
        topic.append(b"0")

        disk.meet = no_indexes
        with pytest.raises(Unavailable, match="could not be sealed yet"):
            a.seal_topic("orders")
        disk.meet = lambda kind, path: None

        assert [state.next_offset for state in a.seal_topic("orders")] == [1]
