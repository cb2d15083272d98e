"""Followers of asyncio: what they cost the thread that appends, and how soon they see records of class memory."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType

import pytest

import forebay.aio
from forebay import EARLIEST, Topic
from forebay.testing.inside import inside
from tests.support.waiting import PATIENCE

MANY = 300


def calls_of_an_append(topic: Topic) -> int:
    """How many Python functions the calling thread runs for an append that it waits for."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        topic.append(b"second")
    finally:
        sys.setprofile(None)
    return calls


def test_an_append_costs_its_writer_with_many_followers_what_it_costs_with_one(tmp_path: Path) -> None:
    """Each follower had a waker of its own, and the appending thread called every one of them."""

    async def measured(followers: int) -> int:
        async with asyncio.timeout(PATIENCE), forebay.aio.open(tmp_path / f"{followers}") as log:
            topic = await log.create_topic("t")
            await topic.append(b"first")
            streams = [topic.follow(EARLIEST) for _ in range(followers)]
            for stream in streams:
                assert (await anext(stream)).value == b"first"
            waiting = [asyncio.create_task(anext(stream)) for stream in streams]
            await asyncio.sleep(0)
            assert inside(topic).shard().wakers, "the followers wait"

            calls = await asyncio.to_thread(calls_of_an_append, inside(topic).topic)

            assert [record.value for record in await asyncio.gather(*waiting)] == [b"second"] * followers
            for stream in streams:
                await stream.aclose()
            return calls

    one, many = asyncio.run(measured(1)), asyncio.run(measured(MANY))

    # A worker may have left one of the two more to do than the other, but nothing for each follower.
    assert many < one + MANY / 3


def test_a_follower_sees_what_class_memory_has_acknowledged_before_any_flush_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record waited for `wal.flush_interval_ms`, the next round of the sync worker or a look of the follower.

    None of them happens here.
    """
    monkeypatch.setattr("forebay.live.feeds.LOOK_SECONDS", 1e6)

    async def follow() -> None:
        settings = {"wal": {"flush_interval_ms": 60_000}}
        async with asyncio.timeout(PATIENCE), forebay.aio.open(tmp_path / "log", settings) as log:
            topic = await log.create_topic("t", durability="memory")
            await topic.append(b"the first reserves offsets, and is written for that")
            with inside(log).workers.sync.paused():
                async with topic.follow(1) as stream:
                    for number in range(20):
                        waiting = asyncio.create_task(anext(stream))
                        await asyncio.sleep(0)
                        await topic.append(b"%d" % number)
                        assert (await waiting).value == b"%d" % number

    asyncio.run(follow())
