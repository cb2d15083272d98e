"""A second process beside a directory whose topic has gone: it reads what everybody else reads."""

from __future__ import annotations

from pathlib import Path

from forebay.engines.readonly import FollowedShard
from forebay.records import Gap, Reason
from forebay.settings import Settings
from forebay.storage import Storage, Topic
from forebay.testing.inside import inside
from tests.storage.rig import QUICK


def _settings(tmp_path: Path) -> Settings:
    return Settings.load(
        overrides={
            "wal": {**QUICK["wal"], "reserve_records_min": 64},
            "metadata": {"path": f"{tmp_path}/shared.sqlite"},
            "storage": {"mode": "shared_fs"},
            "store": {"root": f"{tmp_path}/store"},
            "export": {"at_close_seconds_max": 0},
        }
    )


def _told(topic: Topic) -> list[bytes | Gap | None]:
    reported: list[bytes | Gap | None] = []
    # One by one: a gap is reported between two records.
    for record in topic.read(0, partition=0, on_gap=lambda _, gap: reported.append(gap)):
        reported.append(record.value)  # noqa: PERF401
    return reported


def test_records_that_were_lost_in_a_take_over_are_lost_beside_their_old_directory_too(tmp_path: Path) -> None:
    """Found by review: the old files reported records where every other reader got a gap."""
    settings = _settings(tmp_path)
    with Storage.open(tmp_path / "A", settings) as a:
        topic = a.create_topic("orders", on_owner_loss="take_over")
        topic.append(b"0")
        a.export_topic("orders")
        topic.append(b"1")
    with Storage.open(tmp_path / "B", settings) as b:
        topic = b.topic("orders")
        taken_at = topic.append(b"2")
        b.export_topic("orders")

        with Storage.open(tmp_path / "A", settings, read_only=True) as beside:
            assert _told(beside.topic("orders")) == _told(topic) == [b"0", Gap(1, taken_at, Reason.LOST), b"2"]
            assert beside.topic("orders").offsets().next == taken_at + 1
            assert beside.topic("orders").offset_at_time(0) == 0


def test_who_waits_beside_a_directory_learns_of_what_another_one_has_exported(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    with Storage.open(tmp_path / "A", settings) as a, Storage.open(tmp_path / "B", settings) as b:
        a.create_topic("orders").append(b"0")
        a.seal_topic("orders")
        topic = b.topic("orders")
        topic.append(b"1")

        with Storage.open(tmp_path / "A", settings, read_only=True) as beside:
            shard = inside(beside.topic("orders")).read_shard(0)
            assert shard.wait(0, 0)
            assert not shard.wait(1, 0)
            b.export_topic("orders")
            assert shard.wait(1, 10)
            assert _told(beside.topic("orders")) == [b"0", b"1"]


def test_look_ups_beside_the_old_directory_find_what_everybody_else_finds(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    with Storage.open(tmp_path / "A", settings) as a:
        topic = a.create_topic("orders", on_owner_loss="take_over")
        topic.append(b"0", key=b"k", tag="a")
        a.export_topic("orders")
        topic.append(b"lost", key=b"k", tag="a")
    with Storage.open(tmp_path / "B", settings) as b:
        b.topic("orders").append(b"2", key=b"k", tag="a")
        b.export_topic("orders")

        with Storage.open(tmp_path / "A", settings, read_only=True) as beside:
            seen = beside.topic("orders")
            assert [record.value for record in seen.read_by_key(b"k")] == [b"2"]
            assert [record.value for record in seen.read_by_key(b"k", history=True)] == [b"0", b"2"]
            assert [record.value for record in seen.read_by_tag("a")] == [b"0", b"2"]
            shard = inside(seen).read_shard(0)
            assert isinstance(shard, FollowedShard)
            assert shard.read_by_tag("a").events == []
