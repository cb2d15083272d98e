"""A shard whose directory is gone is refused where starting over would give offsets out twice, and else goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import forebay
from forebay.records import Gap, Reason
from tests.cli.rig import Shell


def test_a_shard_that_lost_its_directory_does_not_start_over(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with forebay.open(str(data)) as log:
        log.create_topic("shop/orders", durability="fsync").append(b"first")
    for shard in (data / "shards").iterdir():
        shutil.rmtree(shard)

    for _ in range(2):
        with (
            forebay.open(str(data)) as log,
            pytest.raises(forebay.DataLoss, match=r"shop/orders\[0\] has lost its directory"),
        ):
            log.topic("shop/orders").append(b"second")


def test_all_shards_are_refused_by_a_recovery_of_all(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with forebay.open(str(data)) as log:
        log.create_topic("shop/orders", partitions=2).append(b"first", partition=1)
    for shard in (data / "shards").glob("*_1"):
        shutil.rmtree(shard)

    with forebay.open(str(data)) as log:
        recovered = log.recover()

        assert [(failed.ref.partition, type(failed.error)) for failed in recovered.failed] == [(1, forebay.DataLoss)]
        with pytest.raises(forebay.DataLoss, match=r"shop/orders\[1\]"):
            recovered.raise_failed()


def test_the_topic_can_be_deleted_and_created_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with forebay.open(str(data)) as log:
        log.create_topic("shop/orders").append(b"first")
    for shard in (data / "shards").iterdir():
        shutil.rmtree(shard)

    with forebay.open(str(data)) as log:
        log.delete_topic("shop/orders")

        assert log.create_topic("shop/orders").append(b"again") == 0


def test_that_it_would_be_refused_is_shown_and_found_beforehand(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "data")
    with forebay.open(str(shell.directory)) as log:
        log.create_topic("shop/orders").append(b"first")
    shutil.rmtree(shell.shards()[0])

    (shard,) = shell.ok("topic", "show", "shop/orders", "--json").items[0]["shards"]
    found = shell.run("verify")

    assert shard["recovery"] is None and "has lost its directory" in shard["failure"]
    assert found.code == 6 and "shop/orders[0]: the shard has lost its directory" in found.out


@pytest.mark.parametrize("exported", [True, False])
def test_where_offsets_are_reserved_in_the_metadata_store_it_goes_on_behind_them(
    tmp_path: Path, *, exported: bool
) -> None:
    data = tmp_path / "data"
    settings = {
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(tmp_path / "history")},
        "export": {"at_close_seconds_max": 5 if exported else 0},
    }
    with forebay.open(str(data), settings) as log:
        log.create_topic("shop/orders", durability="fsync").append(b"first")
    for shard in (data / "shards").iterdir():
        shutil.rmtree(shard)

    gaps: list[Gap] = []
    with forebay.open(str(data), settings) as log:
        topic = log.topic("shop/orders")
        offset = topic.append(b"second")
        values = [record.value for record in topic.read(on_gap=lambda partition, gap: gaps.append(gap))]

    assert values == ([b"first", b"second"] if exported else [b"second"])
    assert gaps == ([] if exported else [Gap(0, offset, Reason.LOST)])
    assert offset >= 1


def test_a_backup_that_comes_back_after_it_went_on_gives_no_offset_out_twice(tmp_path: Path) -> None:
    data = tmp_path / "data"
    settings = {
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(tmp_path / "history")},
        "export": {"at_close_seconds_max": 0},
        "wal": {"reserve_records_min": 4},
    }
    with forebay.open(str(data), settings) as log:
        topic = log.create_topic("shop/orders", durability="fsync")
        before = [topic.append(b"before") for _ in range(5)]
    (shard,) = (data / "shards").iterdir()
    shard.rename(tmp_path / "backup")
    with forebay.open(str(data), settings) as log:
        between = [log.topic("shop/orders").append(b"between") for _ in range(5)]
    shutil.rmtree(shard)
    (tmp_path / "backup").rename(shard)

    with forebay.open(str(data), settings) as log:
        after = [log.topic("shop/orders").append(b"after") for _ in range(5)]

    assert len({*before, *between, *after}) == 15
    assert any((shard / "aside").iterdir())
