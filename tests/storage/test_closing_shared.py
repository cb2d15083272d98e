"""Closing where another directory may go on: the tail is exported, and nothing stays reserved."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from forebay.settings import Settings
from tests.storage.rig import QUICK, values


def _settings(tmp_path: Path, **export: int) -> Settings:
    return Settings.load(
        overrides={
            **QUICK,
            "storage": {"mode": "shared_fs"},
            "store": {"root": str(tmp_path / "store")},
            "metadata": {"path": str(tmp_path / "metadata.sqlite")},
            "export": export,
        }
    )


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_directories_that_take_turns_leave_no_gap(tmp_path: Path, durability: str) -> None:
    settings = _settings(tmp_path)
    for turn in range(6):
        with forebay.open(tmp_path / f"{turn % 2}", settings) as log:
            topic = log.create_topic("t", exist_ok=True, durability=durability)
            assert topic.append(b"%d" % turn) == turn
            assert values(topic.read()) == [b"%d" % number for number in range(turn + 1)]
    left = [path.name for path in tmp_path.glob("*/shards/*/aside")]
    assert left == []


def test_without_time_to_export_the_gap_is_what_was_not_exported_and_no_more(tmp_path: Path) -> None:
    settings = _settings(tmp_path, at_close_seconds_max=0)
    with forebay.open(tmp_path / "a", settings) as log:
        topic = log.create_topic("t", on_owner_loss="take_over")
        topic.append_many([b"v"] * 3)
        log.export_topic("t")
        topic.append_many([b"lost to others"] * 2)
    with forebay.open(tmp_path / "b", settings) as log:
        topic = log.topic("t")
        assert topic.append(b"v") == 5
        gaps: list[forebay.Gap] = []
        assert len(values(topic.read(on_gap=lambda _, gap: gaps.append(gap)))) == 4
        assert gaps == [forebay.Gap(3, 5, forebay.Reason.LOST)]
        kept = list((tmp_path / "a" / "shards").glob("*/*.seg"))
        assert kept


def test_the_same_directory_goes_on_exactly_there(tmp_path: Path) -> None:
    for turn in range(3):
        with forebay.open(tmp_path / "a", _settings(tmp_path, at_close_seconds_max=0)) as log:
            topic = log.create_topic("t", exist_ok=True)
            assert topic.append(b"v") == turn
            assert topic.recovery().gap is None


def test_a_mode_without_the_store_refuses_a_shard_whose_front_lies_there(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "a", _settings(tmp_path)) as log:
        log.create_topic("t").append(b"v")
        log.seal_topic("t", target=log.directory_id)
        log.unseal_topic("t")
    with forebay.open(tmp_path / "b", _settings(tmp_path)) as log:
        log.topic("t").append(b"v")
    local = {**QUICK, "metadata": {"path": str(tmp_path / "metadata.sqlite")}}
    with forebay.open(tmp_path / "b", local) as log, pytest.raises(forebay.Unavailable, match="lie in directory as"):
        log.topic("t").append(b"v")
