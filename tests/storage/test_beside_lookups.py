"""Look-ups beside the owner of a directory: by key, tag and time, while it appends, seals, deletes and gives up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import Storage, Topic, UnknownTopic, Unsupported
from forebay.engines.readonly import FollowedShard
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.wal.files import LogFile
from tests.storage.rig import QUICK, WatchedDisk, quick, values

RARELY = quick(mark_interval_ms=600_000, sync_interval_ms=600_000, rotate_bytes_max=2**30)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Topic]:
    with Storage.open(tmp_path / "log", RARELY) as log:
        topic = log.create_topic("t", partitions=2)
        for number in range(12):
            tag = ("a", "a/b")[number % 2]
            topic.append(b"%d" % number, key=b"k%d" % (number % 4), tag=tag, timestamp=1_000 + number)
        yield topic


@pytest.fixture
def disk() -> WatchedDisk:
    return WatchedDisk()


@pytest.fixture
def clock() -> ManualClock:
    """The reader's: what ended, it looks at as often as the test says."""
    return ManualClock()


@pytest.fixture
def beside(tmp_path: Path, owner: Topic, disk: WatchedDisk, clock: ManualClock) -> Iterator[Topic]:
    with Storage.open(tmp_path / "log", RARELY, read_only=True, disk=disk, clock=clock) as log:
        yield log.topic("t")


def answers(topic: Topic) -> list[object]:
    """What a topic says of keys, tags and times."""
    keys = [b"k%d" % number for number in range(5)]
    return [
        [values(topic.read_by_key(key)) for key in keys],
        [values(topic.read_by_key(key, history=True)) for key in keys],
        [values(topic.read_by_tag(tag)) for tag in ("a", "a/b", "a/")],
        [topic.offset_at_time(1_000 + number, number % 2) for number in range(14)],
    ]


def test_look_ups_beside_the_owner_give_what_the_owner_gives(owner: Topic, beside: Topic, clock: ManualClock) -> None:
    assert answers(beside) == answers(owner)

    owner.append(b"more", key=b"k1", tag="a", timestamp=1_012)
    [shard] = [inside(beside).read_shard(record.partition) for record in owner.read_by_key(b"k1")]
    assert isinstance(shard, FollowedShard)
    [found] = shard.read_by_key(b"k1").batches
    assert values(found.records(0)) == [b"more"], "read as soon as it is acknowledged"
    owner.delete_by_key(b"k2")
    owner.delete_before(1, 0)
    owner.rotate()
    owner.append(b"last", key=b"k3", tag="a/b", timestamp=1_013)
    clock.advance(1)

    assert values(beside.read_by_key(b"k2", history=True)) == []
    assert answers(beside) == answers(owner)


def test_look_ups_beside_the_owner_go_on_when_files_are_sealed_and_removed_under_them(
    owner: Topic, beside: Topic, disk: WatchedDisk
) -> None:
    expected = answers(owner)
    assert answers(beside) == expected
    owner.rotate()
    for partition in (0, 1):
        beside.offsets(partition)
        shard = inside(owner).segment(partition)
        shard.upkeep.seal_rotated()
    replaced = 0

    def vanish(kind: str, path: str) -> None:
        nonlocal replaced
        if kind == "list_directory":
            disk.meet = lambda kind, path: None
        elif kind == "read" and path.endswith(".seg"):
            replaced += 1
            raise FileNotFoundError(2, "it was replaced", path)

    disk.meet = vanish
    assert answers(beside) == expected
    assert replaced > 0


def test_a_look_up_beside_the_owner_reads_only_what_is_new_of_a_file_that_grows(owner: Topic, beside: Topic) -> None:
    owner.append_many([b"x" * 4096] * 500, keys=[b"bulk"] * 500, partition=0)
    assert len(list(beside.read_by_key(b"bulk", partition=0, history=True))) == 500
    shard = inside(beside).read_shard(0)
    assert isinstance(shard, FollowedShard)
    held = inside(shard).log.files.all[-1]
    assert isinstance(held, LogFile)
    postings = held._postings
    owner.append(b"new", key=b"k9", partition=0)

    assert values(beside.read_by_key(b"k9", partition=0)) == [b"new"]

    grown = inside(shard).log.files.all[-1]
    assert isinstance(grown, LogFile)
    assert grown is not held
    assert grown._postings is postings


def test_a_look_up_beside_the_owner_learns_that_the_topic_was_deleted(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log, forebay.open(tmp_path / "log", QUICK, read_only=True) as beside:
        log.create_topic("t").append(b"v", key=b"k", tag="a")
        topic = beside.topic("t")
        assert values(topic.read_by_key(b"k")) == values(topic.read_by_tag("a")) == [b"v"]

        log.delete_topic("t")

        with pytest.raises(UnknownTopic, match="deleted"):
            list(topic.read_by_key(b"k"))
        with pytest.raises(UnknownTopic, match="deleted"):
            list(topic.read_by_tag("a"))


def test_deletes_beside_the_owner_are_refused_with_the_way_out(beside: Topic) -> None:
    said = "opened read-only: write in the process that owns"
    with pytest.raises(Unsupported, match=said):
        beside.delete_by_key(b"k1")
    with pytest.raises(Unsupported, match=said):
        beside.delete_before(1, 0)
