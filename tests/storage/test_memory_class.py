"""Topics of class `memory` on a disk that fails: what was acknowledged is kept, or named when it is gone."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import pytest

import forebay.aio
from forebay import DataLoss, Storage, Topic, Unavailable
from tests.storage.rig import WatchedDisk, quick, values, wal_of
from tests.support.waiting import until

LONG: Final = {"flush_interval_ms": 60_000, "sync_interval_ms": 60_000, "mark_interval_ms": 60_000}
"""Nothing is written but when a test asks for it."""


def _open(path: Path, disk: WatchedDisk, **wal: object) -> Storage:
    return Storage.open(path / "log", quick(**{**LONG, **wal}), disk=disk)


@pytest.fixture
def disk() -> Iterator[WatchedDisk]:
    disk = WatchedDisk()
    yield disk
    disk.free, disk.meet = None, lambda kind, path: None


def _topic(log: Storage, partitions: int = 1) -> Topic:
    """A topic whose partitions have one written record each."""
    topic = log.create_topic("t", partitions=partitions, durability="memory")
    for partition in range(partitions):
        topic.append(b"first", partition=partition)
    topic.flush()
    return topic


def _failing(kind: str, times: int = 1) -> Callable[[str, str], None]:
    left = [times]

    def meet(met: str, path: str) -> None:
        if met == kind and path.endswith(".seg") and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "the disk failed", path)

    return meet


def _fill(topic: Topic, disk: WatchedDisk) -> int:
    """Let the disk be full, and the log know it: how many records the topic has acknowledged since."""
    disk.free = 1000
    tried = 0

    def is_refused() -> bool:
        nonlocal tried
        tried += 1
        topic.append(b"more")
        try:
            topic.flush()
        except Unavailable:
            return True
        return False

    # Free space is asked for now and then: the first commits may pass.
    until(is_refused)
    return tried


def test_flush_raises_while_the_disk_is_full_and_nothing_is_gone(tmp_path: Path, disk: WatchedDisk) -> None:
    with _open(tmp_path, disk, free_bytes_min=1 << 20) as log:
        topic = _topic(log)
        base = 1 + _fill(topic, disk)
        acks = [topic.append_nowait(b"nowait", key=b"k") for _ in range(3)]
        assert topic.append(b"one") == base + 3
        assert [ack.result(5) for ack in acks] == [base, base + 1, base + 2]
        assert list(topic.append_many([b"many"] * 3)) == [base + 4, base + 5, base + 6]
        assert topic.append(b"mine", producer=7, sequence=0) == base + 7
        assert topic.append(b"mine", producer=7, sequence=0) == base + 7
        with pytest.raises(Unavailable, match="wait in memory"):
            topic.flush()

        failure = topic.failure()
        assert failure is not None and f"[{base - 1}, {base + 8})" in failure and "are free" in failure
        assert [partition.failure for partition in topic.status().open] == [failure]
        with pytest.raises(Unavailable, match="nothing is deleted"):
            topic.delete_by_key(b"k")
        assert topic.last_sequence(7) == 0

        disk.free = None
        topic.flush()
        assert topic.failure() is None
        assert [record.offset for record in topic.read()] == list(range(base + 8))
        assert topic.append(b"mine", producer=7, sequence=1) == base + 8


def test_one_error_of_the_disk_leaves_flush_true_and_the_producer_in_step(tmp_path: Path, disk: WatchedDisk) -> None:
    with _open(tmp_path, disk) as log:
        topic = _topic(log)
        for sequence in range(9):
            topic.append(b"%d" % sequence, producer=7, sequence=sequence)
        disk.meet = _failing("write")

        topic.flush()

        assert values(topic.read())[1:] == [b"%d" % sequence for sequence in range(9)]
        assert topic.append(b"9", producer=7, sequence=9) == 10
        assert topic.append(b"5", producer=7, sequence=5) == 6


def test_closing_raises_what_is_lost_and_still_closes_everything(tmp_path: Path, disk: WatchedDisk) -> None:
    log = _open(tmp_path, disk)
    topic = _topic(log, partitions=2)
    other = log.create_topic("other", durability="disk")
    other.append(b"kept")
    topic.append_many([b"a", b"b"], partition=1)
    disk.meet = _failing("write", times=1_000)
    shard = topic.status().open[1]

    with pytest.raises(DataLoss, match=r"default/t\[1\].*\[1, 3\) were acknowledged and are lost") as raised:
        log.close()

    assert (raised.value.start, raised.value.stop) == (1, 3)
    assert shard.partition == 1
    log.close()
    disk.meet = lambda kind, path: None
    with _open(tmp_path, disk) as again:
        assert values(again.topic("other").read()) == [b"kept"]
        assert values(again.topic("t").read(partition=0)) == [b"first"]
        assert values(again.topic("t").read(partition=1, on_gap=lambda partition, gap: None)) == [b"first"]


def test_flush_tries_every_partition_before_it_raises(tmp_path: Path, disk: WatchedDisk) -> None:
    with _open(tmp_path, disk) as log:
        topic = _topic(log, partitions=2)
        broken = wal_of(topic, 0).writer.place.directory
        for partition in range(2):
            topic.append(b"x", partition=partition)

        def meet(kind: str, path: str) -> None:
            if kind == "write" and path.startswith(broken):
                raise OSError(errno.EIO, "the disk failed", path)

        disk.meet = meet
        with pytest.raises(Unavailable, match=r"t\[0\]"):
            topic.flush()

        assert [topic.offsets(partition).durable for partition in range(2)] == [1, 2]
        disk.meet = lambda kind, path: None


def test_a_topic_that_cannot_write_is_not_sealed_and_goes_on(tmp_path: Path, disk: WatchedDisk) -> None:
    with _open(tmp_path, disk, free_bytes_min=1 << 20) as log:
        topic = _topic(log)
        base = 1 + _fill(topic, disk)
        topic.append(b"waits")

        with pytest.raises(Unavailable, match="wait in memory"):
            log.seal_topic("t")

        assert topic.append(b"goes on") == base + 1
        disk.free = None
        log.seal_topic("t")
        assert len(values(topic.read())) == base + 2


def test_a_topic_that_is_deleted_takes_what_waits_with_it(tmp_path: Path, disk: WatchedDisk) -> None:
    with _open(tmp_path, disk) as log:
        topic = _topic(log)
        topic.append(b"waits")
        disk.meet = _failing("write", times=1_000)

        log.delete_topic("t")

        assert [topic.name for topic in log.topics()] == []


@pytest.mark.parametrize("trouble", ["full", "write", "sync"])
def test_an_event_loop_loses_nothing_that_was_acknowledged(
    tmp_path: Path, disk: WatchedDisk, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Storage, "open", partial(Storage.open, disk=disk))

    async def use() -> list[bytes | None]:
        settings = quick(**{**LONG, "free_bytes_min": 1 << 20})
        async with forebay.aio.open(tmp_path / "log", settings) as log:
            topic = await log.create_topic("t", durability="memory")
            await topic.append(b"first")
            await topic.flush()
            if trouble == "full":
                disk.free = 1000
            else:
                disk.meet = _failing(trouble)
            acks = [await topic.append_nowait(b"%d" % number) for number in range(5)]
            assert await asyncio.gather(*(topic.append(b"%d" % number) for number in range(5, 10)))
            await topic.append_many([b"10", b"11"])
            await topic.append(b"12", producer=7, sequence=0)
            assert [ack.result(5) for ack in acks] == list(range(1, 6))
            cancelled = asyncio.create_task(topic.flush())
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            with suppress(Unavailable):
                await topic.flush()
            disk.free = None
            await topic.flush()
            await topic.append(b"12", producer=7, sequence=0)
            return [record.value async for record in topic.read()]

    assert asyncio.run(use()) == [b"first", *(b"%d" % number for number in range(13))]
