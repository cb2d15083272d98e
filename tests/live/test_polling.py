"""Long polls: one page, waited for where there is none, and rendered once for all who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Gap, Invalid, Reason, UnknownTopic
from forebay.format.frame.batch import Batch
from forebay.live import PolledPage, Render, poll
from forebay.live.feeds import ShardFeed, SharedPage
from forebay.storage import Storage
from forebay.testing.inside import inside
from tests.live.test_watchers import Room, run
from tests.storage.rig import quick, wal_of

FAR = 30.0


def values_of(batch: Batch, partition: int) -> Sequence[bytes | None]:
    return batch.values()


def test_a_poll_gives_what_is_there_and_where_the_partition_stands(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t", partitions=2)
        topic.acquire()
        topic.append_many([b"0", b"1", b"2"], partition=1)

        assert await poll(here.feeds, topic, 1, 1, values_of) == PolledPage([b"1", b"2"], [], 3, 3, 0, 0)
        empty = await poll(here.feeds, topic, 0, 0, values_of)
        assert empty == PolledPage((), (), 0, 0, 0, 0)
        assert empty.caught_up
        assert here.reads == 0
        assert len(here.feeds) == 0
        assert not inside(topic).shard().wakers

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_many_polls_wait_for_one_page_and_it_is_rendered_once(tmp_path: Path) -> None:
    rendered: list[int] = []

    def render(batch: Batch, partition: int) -> Sequence[bytes | None]:
        rendered.append(batch.base)
        return batch.values()

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append(b"0")
        polls = [asyncio.create_task(poll(here.feeds, topic, 0, 1, render, wait_seconds=FAR)) for _ in range(50)]
        await asyncio.sleep(0)
        assert len(inside(topic).shard().wakers) == 1
        await asyncio.to_thread(topic.append, b"1")

        assert await asyncio.gather(*polls) == [PolledPage([b"1"], [], 2, 2, 0, 0)] * 50
        assert rendered == [1]
        assert here.reads == 0
        assert not inside(topic).shard().wakers

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_what_is_published_while_a_poll_looks_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.live.feeds.LOOK_SECONDS", 1000)
    whole = ShardFeed.page

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.acquire()

        def late(feed: ShardFeed, offset: int, render: Render[Any], *, is_waiting: bool) -> SharedPage | None:
            found = whole(feed, offset, render, is_waiting=is_waiting)
            monkeypatch.setattr(ShardFeed, "page", whole)
            topic.append(b"in between")
            return found

        monkeypatch.setattr(ShardFeed, "page", late)
        assert (await poll(here.feeds, topic, 0, 0, values_of, wait_seconds=FAR)).rows == [b"in between"]

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


@pytest.mark.slow
def test_a_poll_ends_when_its_time_is_up_behind_what_a_filter_left_out(tmp_path: Path) -> None:
    def none(batch: Batch, partition: int) -> Sequence[bytes]:
        return ()

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append_many([b"0", b"1"])
        waiting = asyncio.create_task(poll(here.feeds, topic, 0, 0, none, wait_seconds=0.5))
        await asyncio.to_thread(topic.append, b"2")

        found = await waiting
        assert (list(found.rows), found.caught_up, found.next) == ([], True, 3)
        assert len(here.feeds) == 0

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_what_is_not_in_memory_is_read_by_a_thread_even_if_the_time_is_up(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t", cap_records=2)
        topic.append_many([b"%d" % number for number in range(6)])
        await asyncio.to_thread(log.run_retention)
        wal_of(topic).tail.cache.clear()

        found = await poll(here.feeds, topic, 0, 1, values_of)

        assert found == PolledPage([], [Gap(1, 4, Reason.CAP)], 4, 6, 4, 4)
        assert await poll(here.feeds, topic, 0, 4, values_of) == PolledPage([b"4", b"5"], [], 6, 6, 4, 4)
        assert here.reads == 1

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_what_cannot_be_polled_is_refused(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append(b"0")
        with pytest.raises(Invalid):
            await poll(here.feeds, topic, 0, 2, values_of, wait_seconds=FAR)
        with pytest.raises(Invalid):
            await poll(here.feeds, topic, 1, 0, values_of)
        with pytest.raises(Invalid):
            await poll(here.feeds, topic, 0, -1, values_of)
        waiting = asyncio.create_task(poll(here.feeds, topic, 0, 1, values_of, wait_seconds=FAR))
        await asyncio.sleep(0)
        await asyncio.to_thread(log.delete_topic, "t")
        with pytest.raises(UnknownTopic):
            await waiting
        assert len(here.feeds) == 0

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_poll_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append(b"0")
        waiting = asyncio.create_task(poll(here.feeds, topic, 0, 1, values_of, wait_seconds=FAR))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert len(here.feeds) == 0
        assert not inside(topic).shard().wakers

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_log_opened_read_only_is_polled_for_its_polls(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = owner.create_topic("t")
        topic.append(b"0")
        beside = log.topic("t")
        waiting = [asyncio.create_task(poll(here.feeds, beside, 0, 1, values_of, wait_seconds=FAR)) for _ in range(5)]
        await asyncio.to_thread(topic.append, b"1")
        for found in await asyncio.gather(*waiting):
            assert (list(found.rows), found.next) == ([b"1"], 2)
        found = await poll(here.feeds, beside, 0, 2, values_of, wait_seconds=0.01)
        assert (found.rows, found.next, found.caught_up) == ((), 2, True)

    with forebay.open(tmp_path, quick()) as owner, forebay.open(tmp_path, quick(), read_only=True) as log:
        run(log, use)
