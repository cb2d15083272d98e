"""Many watchers in an event loop: each gets every record from its start on, once and in order; pages are shared."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random  # noqa: TID251 - seeded: the same run again
from typing import Any, TypeVar

import pytest

import forebay
import forebay.aio
from forebay import EARLIEST, LATEST, Closed, DataLoss, Gap, Reason, Record, Topic, UnknownTopic
from forebay.aio import AsyncStream
from forebay.engines import ReadShard
from forebay.engines.memory_records import HeldRecords
from forebay.engines.readonly import FollowedShard
from forebay.format.frame.batch import Batch
from forebay.live import Feeds, WatchedTopic, Watcher
from forebay.live.feeds import PAGES_MAX, WOKEN_MAX, ShardFeed
from forebay.live.outbox import Lane
from forebay.pages import Page
from forebay.records import Position
from forebay.storage import Storage
from forebay.storage.streams import Following
from forebay.testing.inside import inside
from tests.storage.rig import quick, values, wal_of
from tests.support.waiting import PATIENCE, until

T = TypeVar("T")
MANY = 3 * WOKEN_MAX + 5


class Room:
    """An event loop's feeds over an embedded log, with threads that run its reads."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self.reads = 0
        self.started: set[asyncio.Future[Any]] = set()
        self.feeds = Feeds(self.start)

    def start(self, _key: Hashable, call: Callable[[], T], /) -> asyncio.Future[T]:
        self.reads += 1
        started = asyncio.get_running_loop().run_in_executor(self._threads, call)
        self.started.add(started)
        started.add_done_callback(self.started.discard)
        return started

    async def idle(self) -> None:
        """Return when no call runs in a thread."""
        while self.started:
            await asyncio.wait(set(self.started))

    def watch(
        self, topic: Topic, start: Position | int = EARLIEST, timeout: float | None = None
    ) -> AsyncStream[Record]:
        begin = partial(topic.following, start)
        return AsyncStream(Watcher(self.feeds, [WatchedTopic(topic, begin, Batch.records)], timeout), topic.check_open)


@asynccontextmanager
async def room() -> AsyncIterator[Room]:
    with ThreadPoolExecutor(4) as threads:
        async with asyncio.timeout(PATIENCE):
            yield Room(threads)


def run(log: Storage, use: Callable[[Storage, Room], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with room() as here:
            await use(log, here)

    asyncio.run(whole())


async def taken(stream: AsyncStream[Record], count: int) -> list[Record]:
    return [await anext(stream) for _ in range(count)]


async def begun(streams: list[AsyncStream[Record]]) -> None:
    for stream in streams:
        await stream.__aenter__()


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["disk", "memory", "ephemeral"])
def test_every_watcher_gets_what_the_model_says(tmp_path: Path, durability: str) -> None:
    """Watchers with starts of their own, of which some sleep, while threads append singly and in batches."""
    chance = Random(7)
    partitions, rounds = 3, 40

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t", partitions=partitions, durability=durability)
        topic.append_many([b"early"] * 30, keys=[b"%d" % n for n in range(30)])
        starts = [chance.choice([EARLIEST, LATEST]) for _ in range(MANY)]
        streams = [here.watch(topic, start) for start in starts]
        await begun(streams)
        now = [topic.offsets(number).next for number in range(partitions)]
        firsts = [[0] * partitions if start == EARLIEST else now for start in starts]

        def append(writer: int) -> None:
            for number in range(rounds):
                value = b"%d.%d" % (writer, number)
                if number % 3:
                    topic.append(value, key=value)
                else:
                    topic.append_many([value] * 5, keys=[value] * 5)

        writing = [asyncio.to_thread(append, writer) for writer in range(3)]
        reading = asyncio.gather(*(_watched(stream, Random(n)) for n, stream in enumerate(streams)))
        await asyncio.gather(*writing)
        ends = [topic.offsets(number).next for number in range(partitions)]
        model = {number: [(r.offset, r.value) for r in topic.read(0, partition=number)] for number in range(partitions)}
        for wanted, seen in zip(firsts, await reading, strict=True):
            for number in range(partitions):
                assert seen[number] == model[number][wanted[number] :]
                assert seen[number][-1][0] == ends[number] - 1

    async def _watched(stream: AsyncStream[Record], mood: Random) -> dict[int, list[tuple[int, bytes | None]]]:
        seen: dict[int, list[tuple[int, bytes | None]]] = {number: [] for number in range(partitions)}
        last = 3 * (rounds - len(range(0, rounds, 3)) + 5 * len(range(0, rounds, 3)))
        total = 0
        async for record in stream:
            seen[record.partition].append((record.offset, record.value))
            total += record.value != b"early"
            if total == last:
                break
            if mood.random() < 0.02:
                await asyncio.sleep(mood.choice([0, 0.005]))
        await stream.aclose()
        return seen

    with forebay.open(tmp_path, quick(cache_bytes_max=4096)) as log:
        run(log, use)


def test_one_waker_serves_all_watchers_and_a_page_is_rendered_once(tmp_path: Path) -> None:
    rendered: list[int] = []

    def render(batch: Batch, partition: int) -> list[int]:
        rendered.append(batch.base)
        return [record.offset for record in batch.records(partition)]

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append(b"0")
        begin = partial(topic.following, EARLIEST)
        streams = [
            AsyncStream(Watcher(here.feeds, [WatchedTopic(topic, begin, render)]), topic.check_open)
            for _ in range(MANY)
        ]
        assert [await anext(stream) for stream in streams] == [0] * MANY
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.sleep(0)

        assert len(inside(topic).shard().wakers) == 1
        await asyncio.to_thread(topic.append_many, [b"1", b"2"])
        assert await asyncio.gather(*waiting) == [1] * MANY
        assert [await anext(stream) for stream in streams] == [2] * MANY
        assert rendered == [0, 1]
        assert here.reads == MANY  # where each begins, and no page

        for stream in streams:
            await stream.aclose()
        assert not inside(topic).shard().wakers
        assert len(here.feeds) == 0

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_filter_that_shows_nothing_of_a_page_goes_on_behind_it(tmp_path: Path) -> None:
    def odd(batch: Batch, partition: int) -> list[Record]:
        return [record for record in batch.records(partition) if record.tag == "odd"]

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        for number in range(10):
            topic.append(b"%d" % number, tag="odd" if number % 5 == 3 else "even")
        watched = WatchedTopic(topic, partial(topic.following, EARLIEST), odd)
        stream = AsyncStream(Watcher(here.feeds, [watched], 0), topic.check_open)

        assert values([record async for record in stream]) == [b"3", b"8"]

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_slow_watcher_reads_on_its_own_and_comes_back_to_the_shared_pages(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        slow, quick_one = here.watch(topic), here.watch(topic)
        await begun([slow, quick_one])
        for number in range(PAGES_MAX + 50):
            await asyncio.to_thread(topic.append, b"%d" % number * 200)
            assert (await anext(quick_one)).offset == number
        before = here.reads
        wal_of(topic).tail.cache.clear()

        assert [record.offset for record in await taken(slow, PAGES_MAX + 50)] == list(range(PAGES_MAX + 50))
        assert here.reads > before  # from files, in a thread
        before = here.reads
        waiting = [asyncio.create_task(anext(stream)) for stream in (slow, quick_one)]
        await asyncio.sleep(0)
        await asyncio.to_thread(topic.append, b"new")
        assert {(await task).value for task in waiting} == {b"new"}
        assert here.reads == before

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_cancelled_watcher_skips_nothing(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        stream = here.watch(topic)
        for number in range(20):
            waiting = asyncio.create_task(anext(stream))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            if number % 2:
                waiting.cancel()
            await asyncio.to_thread(topic.append, b"%d" % number)
            await asyncio.wait([waiting])
            if waiting.cancelled():
                assert (await anext(stream)).offset == number
            else:
                assert waiting.result().offset == number

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_record_that_is_published_between_the_look_and_the_wait_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.live.feeds.LOOK_SECONDS", 1000)
    whole = ShardFeed.wait

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append(b"0")
        stream = here.watch(topic, LATEST)
        await begun([stream])

        def late(feed: ShardFeed, lane: Lane, offset: int) -> None:
            monkeypatch.setattr(ShardFeed, "wait", whole)
            topic.append(b"in between")
            whole(feed, lane, offset)

        monkeypatch.setattr(ShardFeed, "wait", late)
        assert (await anext(stream)).value == b"in between"

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_partitions_that_are_added_are_watched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.live.feeds.LOOK_SECONDS", 0.01)

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        streams = [here.watch(topic, LATEST) for _ in range(5)]
        await begun(streams)
        waiting = [asyncio.create_task(taken(stream, 2)) for stream in streams]
        await asyncio.sleep(0)

        await asyncio.to_thread(log.alter_topic, "t", partitions=3)
        await asyncio.to_thread(topic.append, b"1", partition=1)
        await asyncio.to_thread(topic.append, b"2", partition=2)

        assert [set(values(found)) for found in await asyncio.gather(*waiting)] == [{b"1", b"2"}] * 5
        assert len(here.feeds) == 3

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_watcher_that_is_cancelled_while_it_begins_in_added_partitions_watches_them_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.live.feeds.LOOK_SECONDS", 0.01)
    whole, inside_grow, go_on = Following.grow, threading.Event(), threading.Event()

    def slowly(following: Following[Record]) -> None:
        inside_grow.set()
        assert go_on.wait(60)
        whole(following)

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        stream = here.watch(topic, LATEST)
        await begun([stream])
        monkeypatch.setattr(Following, "grow", slowly)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.to_thread(log.alter_topic, "t", partitions=2)
        assert await asyncio.to_thread(inside_grow.wait, 60)
        waiting.cancel()
        await asyncio.wait([waiting])
        go_on.set()
        await here.idle()

        await asyncio.to_thread(topic.append, b"1", partition=1)
        async with asyncio.timeout(PATIENCE):
            assert (await anext(stream)).value == b"1"
        # Again, for a call that was left under way must not stand for the next one.
        go_on.clear()
        inside_grow.clear()
        waiting = asyncio.create_task(anext(stream))
        await asyncio.to_thread(log.alter_topic, "t", partitions=3)
        assert await asyncio.to_thread(inside_grow.wait, 60)
        waiting.cancel()
        await asyncio.wait([waiting])
        go_on.set()
        await here.idle()
        await asyncio.to_thread(log.alter_topic, "t", partitions=4)
        await asyncio.to_thread(topic.append, b"3", partition=3)
        async with asyncio.timeout(PATIENCE):
            assert (await anext(stream)).value == b"3"

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_topic_that_is_deleted_and_created_again_ends_its_watchers(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append(b"old")
        streams = [here.watch(topic) for _ in range(5)]
        assert values([await anext(stream) for stream in streams]) == [b"old"] * 5
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.sleep(0)

        await asyncio.to_thread(log.delete_topic, "t")
        again = await asyncio.to_thread(log.create_topic, "t")
        await asyncio.to_thread(again.append_many, [b"new"] * 3)

        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, UnknownTopic)
        with pytest.raises(UnknownTopic):
            await anext(streams[0])
        assert values(await taken(here.watch(again), 3)) == [b"new"] * 3

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_gap_in_the_middle_is_reported_at_its_place_to_each_watcher(tmp_path: Path) -> None:
    with forebay.open(tmp_path, quick()) as log:
        topic = log.create_topic("t")
        topic.append_many([b"0", b"1"])
    with forebay.open(tmp_path, quick()) as log:
        topic = log.topic("t")
        topic.append(b"2")
        wal = wal_of(topic)
        with wal.committing:
            wal.writer.skip_lost(5, 3)
            wal.queue.restart_at(5)
        topic.append(b"5")

        async def use(log: Storage, here: Room) -> None:
            seen: list[object] = []
            begin = partial(topic.following, EARLIEST, on_gap=lambda partition, gap: seen.append(gap))
            async for record in AsyncStream(
                Watcher(here.feeds, [WatchedTopic(topic, begin, Batch.records)], 0), topic.check_open
            ):
                seen.append(record.value)  # noqa: PERF401 - gaps are appended in between
            assert seen == [b"0", b"1", b"2", Gap(3, 5, Reason.LOST), b"5"]

            for stream in (here.watch(topic, timeout=0), here.watch(topic, timeout=0)):
                found: list[bytes | None] = []
                with pytest.raises(DataLoss, match=r"\[3, 5\)"):
                    async for record in stream:
                        found.append(record.value)  # noqa: PERF401 - what came before the error counts
                assert found == [b"0", b"1", b"2"]
                assert values([record async for record in stream]) == [b"5"]

        run(log, use)


def test_what_is_evicted_behind_a_slow_watcher_is_a_gap_for_it_alone(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t", cap_records=4)
        gaps: list[Gap] = []
        begin = partial(topic.following, EARLIEST, on_gap=lambda partition, gap: gaps.append(gap))
        slow = AsyncStream(Watcher(here.feeds, [WatchedTopic(topic, begin, Batch.records)], 0), topic.check_open)
        keeps_up = here.watch(topic, timeout=0)
        await begun([slow, keeps_up])
        for number in range(20):
            await asyncio.to_thread(topic.append, b"%d" % number)
            assert (await anext(keeps_up)).offset == number
        await asyncio.to_thread(log.run_retention)

        assert [record.offset async for record in slow] == [16, 17, 18, 19]
        assert gaps == [Gap(0, 16, Reason.CAP)]

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


@pytest.mark.parametrize("durability", ["disk", "ephemeral"])
def test_what_was_deleted_is_not_given_from_a_page_that_was_kept(tmp_path: Path, durability: str) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t", durability=durability)
        topic.append_many([b"0", b"1", b"2"], keys=[b"a", b"b", b"c"])
        assert values(await taken(here.watch(topic), 3)) == [b"0", b"1", b"2"]

        await asyncio.to_thread(topic.delete_by_key, b"b")

        assert values([record async for record in here.watch(topic, timeout=0)]) == [b"0", b"2"]

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_page_that_is_asked_for_in_the_middle_of_an_append_is_not_current_after_a_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records that were being appended were taken for ended ones, and stood for those that were deleted later."""
    seen: list[object] = []
    with forebay.open(tmp_path, quick()) as log:
        topic = log.create_topic("t", durability="ephemeral")
        topic.append(b"0")
        shard = inside(topic).shard()

        def look(held: HeldRecords, name: str, value: object) -> None:
            if name == "live":
                seen.append(shard.ended())
            object.__setattr__(held, name, value)

        monkeypatch.setattr(HeldRecords, "__setattr__", look)
        topic.append(b"1")
        monkeypatch.undo()
        assert seen
        topic.delete_by_offset(0, 1)

        assert shard.ended() not in seen


def test_watchers_of_a_shard_that_is_lost_and_opened_again_go_on(tmp_path: Path) -> None:
    shared = {
        "storage": {"mode": "shared_fs"},
        "store": {"root": f"{tmp_path}/store"},
        "metadata": {"path": f"{tmp_path}/shared.sqlite"},
    }

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append(b"0")
        streams = [here.watch(topic) for _ in range(3)]
        assert values([await anext(stream) for stream in streams]) == [b"0"] * 3
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.sleep(0)

        lost = wal_of(topic)
        lost.fence("the lease has ended")
        await asyncio.to_thread(until, lambda: lost.closed)
        await asyncio.to_thread(topic.append, b"1")

        assert values(await asyncio.gather(*waiting)) == [b"1"] * 3
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        await asyncio.to_thread(until, lambda: len(inside(topic).shard().wakers) == 1)
        await asyncio.to_thread(topic.append, b"2")
        assert values(await asyncio.gather(*waiting)) == [b"2"] * 3

    with forebay.open(tmp_path / "a", shared) as log:
        run(log, use)


def test_what_is_published_before_the_waker_is_in_a_shard_opened_again_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of one watcher came back empty and late, after the waker had gone to the new shard with another's read."""
    monkeypatch.setattr("forebay.live.feeds.LOOK_SECONDS", 1000)
    whole, read, go_on = Topic.shard_page, threading.Event(), threading.Event()

    def late_at_the_end(topic: Topic, partition: int, offset: int, bytes_max: int) -> tuple[ReadShard, object, Page]:
        found = whole(topic, partition, offset, bytes_max)
        if offset == 1 and not read.is_set():
            read.set()
            assert go_on.wait(60)
        return found

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append(b"0")
        newest = here.watch(topic, LATEST)
        await begun([newest])
        waiting = asyncio.create_task(anext(newest))
        await asyncio.sleep(0)
        monkeypatch.setattr(Topic, "shard_page", late_at_the_end)
        await asyncio.to_thread(inside(log).engine.retire, inside(topic).segment().ref)
        assert await asyncio.to_thread(read.wait, 60)
        await asyncio.to_thread(topic.append, b"1")
        assert values(await taken(here.watch(topic), 2)) == [b"0", b"1"]
        go_on.set()
        async with asyncio.timeout(PATIENCE):
            assert (await waiting).value == b"1"

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_log_that_is_closed_ends_its_watchers(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        streams = [here.watch(topic) for _ in range(3)]
        await begun(streams)
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.sleep(0)

        await asyncio.to_thread(log.close)

        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, Closed)

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_watcher_ends_when_nothing_came_in_its_time_and_goes_on_when_asked_again(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        stream = here.watch(topic, timeout=0.01)
        assert [record async for record in stream] == []
        topic.append(b"0")
        assert values([record async for record in stream]) == [b"0"]

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_log_opened_read_only_is_polled_once_for_all_its_watchers(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = owner.create_topic("t")
        topic.append(b"0")
        beside = log.topic("t")
        streams = [here.watch(beside) for _ in range(20)]
        assert values([await anext(stream) for stream in streams]) == [b"0"] * 20
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        before = here.reads
        await asyncio.to_thread(until, lambda: here.reads >= before + 3)
        topic.append(b"1")
        assert values(await asyncio.gather(*waiting)) == [b"1"] * 20

    with forebay.open(tmp_path, quick()) as owner, forebay.open(tmp_path, quick(), read_only=True) as log:
        run(log, use)


def test_however_often_a_polled_shard_is_looked_at_unasked_one_look_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look that finds nothing asked for the next one: looks unasked, and waits at other offsets, multiplied."""
    monkeypatch.setattr("forebay.live.feeds.LOOK_SECONDS", 0.001)
    monkeypatch.setattr("forebay.live.feeds.LOOKS_REST", 0)
    far = 3600.0
    monkeypatch.setattr(FollowedShard, "poll_seconds", far)

    async def use(log: Storage, here: Room) -> None:
        owner.create_topic("t").append(b"0")
        loop, polls = asyncio.get_running_loop(), []
        call_later = loop.call_later

        def counted(delay: float, *call: Any, **context: Any) -> asyncio.TimerHandle:
            if delay >= far:
                polls.append(call)
            return call_later(delay, *call, **context)

        monkeypatch.setattr(loop, "call_later", counted)
        stream = here.watch(log.topic("t"), LATEST)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.to_thread(until, lambda: here.reads >= 10)
        assert len(polls) == 1
        waiting.cancel()
        await asyncio.wait([waiting])

    with forebay.open(tmp_path, quick()) as owner, forebay.open(tmp_path, quick(), read_only=True) as log:
        run(log, use)


def test_a_feed_that_ends_while_a_thread_reads_for_it_leaves_no_waker_in_a_shard_opened_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, reading, go_on = Topic.shard_page, threading.Event(), threading.Event()

    def slowly(topic: Topic, *args: int) -> tuple[ReadShard, object, Page]:
        found = whole(topic, *args)
        reading.set()
        assert go_on.wait(60)
        return found

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append(b"0")
        stream = here.watch(topic, LATEST)
        await begun([stream])
        monkeypatch.setattr(Topic, "shard_page", slowly)
        waiting = asyncio.create_task(anext(stream))
        before = inside(topic).shard()
        await asyncio.to_thread(log.seal_topic, "t")
        await asyncio.to_thread(log.unseal_topic, "t")
        await asyncio.to_thread(topic.append, b"1")
        assert await asyncio.to_thread(reading.wait, 60)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await waiting
        go_on.set()
        await here.idle()

        assert inside(topic).shard() is not before
        assert len(here.feeds) == 0
        assert not inside(topic).shard().wakers

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_two_event_loops_watch_one_log(tmp_path: Path) -> None:
    ready, results = threading.Barrier(3), {}

    def loop_of(name: str, topic: Topic) -> None:
        async def whole() -> None:
            async with room() as here:
                streams = [here.watch(topic) for _ in range(10)]
                await begun(streams)
                await asyncio.to_thread(ready.wait, 60)
                results[name] = await asyncio.gather(*(taken(stream, 50) for stream in streams))

        asyncio.run(whole())

    with forebay.open(tmp_path, quick()) as log:
        topic = log.create_topic("t")
        threads = [threading.Thread(target=loop_of, args=(name, topic)) for name in "ab"]
        for thread in threads:
            thread.start()
        ready.wait(60)
        assert len(inside(topic).shard().wakers) == 2
        for number in range(50):
            topic.append(b"%d" % number)
        for thread in threads:
            thread.join(60)

        expected = [b"%d" % number for number in range(50)]
        assert [values(found) for name in "ab" for found in results[name]] == [expected] * 20


@pytest.mark.slow
def test_a_loop_that_is_closed_without_a_word_costs_the_writer_nothing_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with forebay.open(tmp_path, quick()) as log, ThreadPoolExecutor(2) as threads:
        topic = log.create_topic("t")
        topic.append(b"0")

        async def use() -> weakref.ref[Feeds]:
            here = Room(threads)
            stream = here.watch(topic)
            assert (await anext(stream)).offset == 0
            return weakref.ref(here.feeds)

        loop = asyncio.new_event_loop()
        gone = loop.run_until_complete(use())
        loop.close()
        kept = inside(topic).shard().wakers.copy()

        assert topic.append(b"1") == 1
        assert topic.append(b"2") == 2
        del kept, loop
        gc.collect()

        assert gone() is None
        assert not inside(topic).shard().wakers
        assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


@pytest.mark.slow
def test_a_watcher_that_is_dropped_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.live.feeds.LOOK_SECONDS", 0.005)

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        stream = here.watch(topic)
        await begun([stream])
        assert len(here.feeds) == 1
        del stream
        gc.collect()
        await asyncio.to_thread(until, lambda: len(here.feeds) == 0)
        assert not inside(topic).shard().wakers

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)
