"""Streams over what changes under them: shards that are opened again, and records that are made as they are taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import EARLIEST, LATEST, Unavailable
from forebay.format.frame.batch import Batch
from forebay.records import Record
from forebay.settings import Settings
from forebay.storage import Storage
from forebay.testing.inside import inside
from forebay.topics import ShardRef
from tests.storage.rig import quick, values, wal_of
from tests.support.waiting import PATIENCE, until


def _shared(tmp_path: Path) -> Settings:
    return Settings.load(
        overrides={
            "storage": {"mode": "shared_fs"},
            "store": {"root": f"{tmp_path}/store"},
            "metadata": {"path": f"{tmp_path}/shared.sqlite"},
        }
    )


def test_a_shard_that_is_opened_again_wakes_the_stream_that_followed_the_one_before(tmp_path: Path) -> None:
    with Storage.open(tmp_path / "a", _shared(tmp_path)) as log:
        topic = log.create_topic("orders")
        topic.append(b"0")
        following, woken = topic.following(EARLIEST), threading.Event()
        assert following.listen(woken.set)
        assert values(following.next_page() or ()) == [b"0"]
        lost = wal_of(topic)
        lost.fence("the lease has ended")
        until(lambda: lost.closed)
        until(lambda: topic.append(b"1") == 1)

        assert values(following.next_page() or ()) == [b"1"]
        assert following.listen(woken.set)

        woken.clear()
        topic.append(b"2")
        assert woken.is_set()
        assert not following.listen(woken.set)
        following.leave(woken.set)
        assert not inside(topic).shard().wakers


def test_the_records_of_a_page_are_made_batch_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    whole = Batch.each_record

    def noted(batch: Batch, partition: int) -> Iterator[Record]:
        made.append(batch.base)
        return whole(batch, partition)

    with forebay.open(tmp_path, quick()) as log:
        topic = log.create_topic("t")
        for number in range(3):
            topic.append_many([b"%d" % number] * 100)
        monkeypatch.setattr(Batch, "each_record", noted)
        stream = topic.read()

        assert next(stream).offset == 0
        assert made == [0]
        assert [record.offset for record in stream] == list(range(1, 300))
        assert made == [0, 100, 200]


def test_partitions_that_are_added_are_followed_from_their_first_record_on(tmp_path: Path) -> None:
    with forebay.open(tmp_path, quick()) as log:
        topic = log.create_topic("t")
        topic.append(b"before")
        streams = [topic.follow(timeout=0), topic.reader("r").follow(start=LATEST, timeout=0)]
        named = [topic.follow(0, partition=0, timeout=0), topic.follow({0: EARLIEST}, timeout=0)]
        assert [list(stream) for stream in streams] == [[], []]

        log.alter_topic("t", partitions=3)
        topic.append(b"1", partition=1)
        topic.append(b"2", partition=2)

        for stream in streams:
            assert values(stream) == [b"1", b"2"]
        for stream in named:
            assert values(stream) == [b"before"]


def test_a_reader_goes_on_in_an_added_partition_where_it_has_acknowledged(tmp_path: Path) -> None:
    with forebay.open(tmp_path, quick()) as log:
        topic = log.create_topic("t")
        reader = topic.reader("r")
        stream = reader.follow(timeout=0)
        assert list(stream) == []

        log.alter_topic("t", partitions=2)
        topic.append_many([b"0", b"1", b"2"], partition=1)
        reader.ack_up_to(2, partition=1)

        assert values(stream) == [b"2"]


def test_an_added_partition_that_cannot_be_opened_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forebay.open(tmp_path, quick()) as log:
        topic = log.create_topic("t")
        stream = topic.follow(timeout=0)
        log.alter_topic("t", partitions=2)
        engine = inside(log).engine
        with monkeypatch.context() as patched:
            patched.setattr(engine, "may_own", _refused)
            with pytest.raises(Unavailable, match="no disk"):
                list(stream)

        topic.append(b"v", partition=1)
        assert values(stream) == [b"v"]


def _refused(ref: ShardRef) -> bool:
    raise Unavailable(f"{ref}: no disk")


def test_what_class_memory_has_acknowledged_is_published_at_once_if_a_reader_follows(tmp_path: Path) -> None:
    """It waited for `wal.flush_interval_ms` and the next round of the sync worker."""
    settings = Settings.load(
        overrides={"wal": {"flush_interval_ms": 60_000}, "runtime": {"maintenance_interval_ms": 60_000}}
    )
    with forebay.open(tmp_path, settings) as log:
        topic = log.create_topic("t", durability="memory")
        topic.append(b"the first reserves offsets, and is written for that")
        topic.append(b"1")
        assert wal_of(topic).head == 1

        woken = threading.Event()
        leave = topic.on_published(woken.set)
        assert topic.page(0, 2).caught_up  # a follower looks once it has entered its waker
        woken.clear()
        topic.append(b"2")
        assert woken.wait(PATIENCE)
        until(lambda: wal_of(topic).head == 3)

        woken.clear()
        topic.append(b"3")
        assert woken.wait(PATIENCE)
        leave()
