"""The mode of storage is changed between two runs: no offset is given out twice, whichever caller goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay import Conflict, Unavailable
from forebay.settings import MetadataSettings, Settings, StorageSettings, StoreSettings
from forebay.storage import Storage
from tests.storage.rig import values


def _local(tmp_path: Path) -> Settings:
    return Settings(metadata=MetadataSettings(path=f"{tmp_path}/shared.sqlite"))


def _shared(tmp_path: Path) -> Settings:
    return Settings(
        metadata=MetadataSettings(path=f"{tmp_path}/shared.sqlite"),
        storage=StorageSettings(mode="shared_fs"),
        store=StoreSettings(root=f"{tmp_path}/store"),
    )


def test_what_was_written_in_mode_local_is_not_taken_over_by_a_directory_in_another_mode(tmp_path: Path) -> None:
    """Found by review: the other directory went on at offset 0, for only the log of the first knew any better."""
    with Storage.open(tmp_path / "A", _local(tmp_path)) as a:
        a.create_topic("orders", on_owner_loss="take_over").append_many([b"0", b"1"])

    with Storage.open(tmp_path / "B", _shared(tmp_path)) as b:
        for _ in range(2):
            with pytest.raises(Conflict, match="its records lie there"):
                b.topic("orders").append(b"x")

    with Storage.open(tmp_path / "A", _local(tmp_path)) as a:
        assert a.topic("orders").append(b"2") == 2


def test_a_directory_that_changes_to_another_mode_shows_how_far_its_log_went_before_anyone_may_take_over(
    tmp_path: Path,
) -> None:
    with Storage.open(tmp_path / "A", _local(tmp_path)) as a:
        a.create_topic("orders", on_owner_loss="take_over").append_many([b"0", b"1"])
    with Storage.open(tmp_path / "A", _shared(tmp_path)) as a:
        assert values(a.topic("orders").read()) == [b"0", b"1"]

    with Storage.open(tmp_path / "B", _shared(tmp_path)) as b:
        topic = b.topic("orders")
        topic.acquire()
        gap = topic.recovery().gap

        assert gap is not None and (gap.start, gap.stop) == (0, 2)
        assert topic.append(b"2") == 2


def test_a_log_that_goes_back_to_mode_local_is_not_taken_over_either(tmp_path: Path) -> None:
    with Storage.open(tmp_path / "A", _shared(tmp_path)) as a:
        a.create_topic("orders", on_owner_loss="take_over").append(b"0")
    with Storage.open(tmp_path / "A", _local(tmp_path)) as a:
        assert a.topic("orders").append(b"1") == 1

    with Storage.open(tmp_path / "B", _shared(tmp_path)) as b, pytest.raises(Conflict, match="its records lie there"):
        b.topic("orders").append(b"x")


def test_a_topic_whose_history_cannot_be_read_here_stays_where_it_is(tmp_path: Path) -> None:
    with Storage.open(tmp_path / "A", _local(tmp_path)) as a, Storage.open(tmp_path / "B", _local(tmp_path)) as b:
        topic = a.create_topic("orders", on_owner_loss="take_over")
        topic.append(b"0")
        a.seal_topic("orders")
        b.unseal_topic("orders")

        with pytest.raises(Unavailable, match="another data directory|open it with the settings"):
            b.topic("orders").append(b"x")

        a.unseal_topic("orders")
        assert topic.append(b"1") == 1
        assert values(topic.read()) == [b"0", b"1"]
