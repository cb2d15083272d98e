"""A batch that goes to several partitions and fails in some: the client says which, why, and what stands."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import forebay
from forebay import aio
from forebay.clock import SystemClock
from forebay.partitioning import partition_of_key
from forebay.settings import Settings
from tests.support.brokers import running_broker


def test_a_batch_that_fails_in_one_partition_says_which_and_what_stands(tmp_path: Path) -> None:
    """The client once knew of no partition, and repeated what could not succeed until its time was up."""
    keys = [b"k%d" % number for number in range(99)]
    first, second = (next(key for key in keys if partition_of_key(key, 2) == number) for number in (0, 1))
    with running_broker(tmp_path / "log") as broker, forebay.connect(broker.url) as log:
        topic = log.create_topic("t", partitions=2, cap_records=2, on_full="reject_new")
        topic.append_many([b"0", b"1"], partition=1)

        clock = SystemClock()
        begun = clock.monotonic()
        ack = topic.append_many_nowait([b"a", b"b", b"c"], keys=[first, second, first])
        with pytest.raises(forebay.Indeterminate, match="repeat only what is missing"):
            ack.result()
        assert clock.monotonic() - begun < 30
        assert [tuple(found) for found in ack.ranges] == [(0, 0, 2)]
        [(partition, failure)] = ack.failures.items()
        assert partition == 1
        assert isinstance(failure, forebay.Full)
        assert (failure.topic, failure.partition) == ("default/t", 1)
        assert [record.value for record in topic.read(partition=0)] == [b"a", b"c"]

        both = topic.append_many_nowait([b"d"] * 2, keys=[first, second])
        with pytest.raises(forebay.Full):
            both.result()
        assert list(both.failures) == [0], "refused as a whole, for the first reason that was found"
        assert both.ranges == ()
        one = topic.append_many_nowait([b"e"], partition=1)
        with pytest.raises(forebay.Full):
            one.result()
        assert list(one.failures) == [1]
        good = log.create_topic("good").append_many_nowait([b"x"])
        good.result()
        assert good.failures == {}


def test_records_that_share_a_request_do_not_share_the_refusal_of_one_of_them(tmp_path: Path) -> None:
    """One that is too large for its topic is refused alone; the others are there once each, in order."""
    settings = Settings.load(None, {"server": {"port": 0}, "wal": {"frame_bytes_max": 65536}}, environment={})

    async def append(url: str) -> list[int | BaseException]:
        async with aio.connect(url) as log:
            topic = await log.create_topic("t", partitions=2)
            sizes = [200_000 if number in (13, 14, 31) else 10 for number in range(40)]
            acks = [await topic.append_nowait(b"x" * size, key=b"%d" % n) for n, size in enumerate(sizes)]
            return await asyncio.gather(*acks, return_exceptions=True)

    with running_broker(tmp_path / "log", settings) as broker, forebay.connect(broker.url) as log:
        outcomes = asyncio.run(append(broker.url))
        stored = {record.key: record.offset for record in log.topic("t").read()}

    refused = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
    assert refused == [13, 14, 31]
    assert all(isinstance(outcomes[number], forebay.Invalid) for number in refused)
    assert stored == {b"%d" % n: offset for n, offset in enumerate(outcomes) if isinstance(offset, int)}
    assert len(stored) == 37
