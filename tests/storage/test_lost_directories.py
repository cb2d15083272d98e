"""A shard whose directory is gone is refused: starting over at offset 0 would give offsets out twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import forebay


def test_a_shard_that_lost_its_directory_does_not_start_over(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with forebay.open(str(data)) as log:
        log.create_topic("shop/orders", durability="fsync").append(b"first")
    for shard in (data / "shards").iterdir():
        shutil.rmtree(shard)

    for _ in range(2):
        with (
            forebay.open(str(data)) as log,
            pytest.raises(forebay.Conflict, match=r"shop/orders\[0\] has lost its directory"),
        ):
            log.topic("shop/orders").append(b"second")


def test_all_shards_are_refused_by_a_recovery_of_all(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with forebay.open(str(data)) as log:
        log.create_topic("shop/orders", partitions=2).append(b"first", partition=1)
    for shard in (data / "shards").glob("*_1"):
        shutil.rmtree(shard)

    with forebay.open(str(data)) as log, pytest.raises(forebay.Conflict, match=r"shop/orders\[1\]"):
        log.recover()


def test_the_topic_can_be_deleted_and_created_anew(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with forebay.open(str(data)) as log:
        log.create_topic("shop/orders").append(b"first")
    for shard in (data / "shards").iterdir():
        shutil.rmtree(shard)

    with forebay.open(str(data)) as log:
        log.delete_topic("shop/orders")

        assert log.create_topic("shop/orders").append(b"again") == 0
