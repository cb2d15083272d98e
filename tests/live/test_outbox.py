"""A watcher of many topics for a server: where it stands, gaps in band, and what one that does not ask costs."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import EARLIEST, Gap, Reason, Topic
from forebay.format.frame.batch import Batch
from forebay.live import Delivered, WatchedTopic, Watcher, deadlines
from forebay.live.feeds import CROWD_MIN, SharedPage
from forebay.live.outbox import Outbox
from forebay.pages import LOOP_BYTES_MAX, LOOP_RECORDS_MAX
from forebay.storage import Storage
from tests.live.test_watchers import Room, run
from tests.storage.rig import quick, wal_of
from tests.support.waiting import until

MANY = 1000


def values_of(batch: Batch, partition: int) -> Sequence[bytes | None]:
    return batch.values()


def watcher(here: Room, *topics: Topic, start: Any = EARLIEST, outbox_bytes_max: int = 1 << 20) -> Watcher[Any]:
    sources = [WatchedTopic.from_start(topic, values_of, start) for topic in topics]
    return Watcher(here.feeds, sources, outbox_bytes_max=outbox_bytes_max)


async def given(watching: Watcher[Any]) -> Delivered[Any]:
    found = await watching.take()
    assert found is not None
    return found


def test_one_watcher_has_many_topics_and_says_where_it_stands_in_each(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topics = [log.create_topic(name, partitions=2) for name in ("a", "b", "c")]
        watching = watcher(here, *topics)
        await watching.begin()
        waiting = asyncio.create_task(given(watching))
        await asyncio.sleep(0)
        await asyncio.to_thread(topics[1].append_many, [b"0", b"1"], partition=1)
        first = await waiting
        await asyncio.to_thread(topics[2].append, b"2", partition=0)
        second = await given(watching)

        assert (first.source.topic, first.partition, list(first.rows), first.next) == (topics[1], 1, [b"0", b"1"], 2)
        assert (second.source.topic, second.partition, list(second.rows), second.next) == (topics[2], 0, [b"2"], 1)
        watching.close()
        await asyncio.to_thread(topics[1].append, b"3", partition=1)
        again = watcher(here, topics[1], start={first.partition: first.next})
        assert list((await given(again)).rows) == [b"3"]

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_gaps_come_in_band_before_what_follows_them(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t", cap_records=4)
        topic.append_many([b"%d" % number for number in range(20)])
        await asyncio.to_thread(log.run_retention)

        watching = watcher(here, topic, start=0)
        first, second = await given(watching), await given(watching)

        assert (list(first.gaps), list(first.rows), first.next) == ([Gap(0, 16, Reason.CAP)], [], 16)
        assert (list(second.gaps), list(second.rows), second.next) == ([], [b"16", b"17", b"18", b"19"], 20)

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_page_in_which_records_were_deleted_is_rendered_once(tmp_path: Path) -> None:
    rendered: list[int] = []

    def render(batch: Batch, partition: int) -> Sequence[bytes | None]:
        rendered.append(batch.base)
        return batch.values()

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append_many([b"0", b"1", b"2"], keys=[b"a", b"b", b"c"])
        topic.delete_by_key(b"b")
        for _ in range(3):
            watching = Watcher(here.feeds, [WatchedTopic.from_start(topic, render, EARLIEST)])
            assert list((await given(watching)).rows) == [b"0", b"2"]
            kept.append(watching)

        assert rendered == [0, 2]

    kept: list[Watcher[Any]] = []
    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


@pytest.mark.slow
def test_a_watcher_that_does_not_ask_holds_no_more_than_its_outbox_and_misses_nothing(tmp_path: Path) -> None:
    record = b"x" * 1000

    async def use(log: Storage, here: Room) -> None:
        topics = [log.create_topic(f"t{number}") for number in range(8)]
        watching = watcher(here, *topics, outbox_bytes_max=3500)
        waiting = asyncio.create_task(watching.take())
        await asyncio.to_thread(until, lambda: watching.outbox.waiter is not None)
        waiting.cancel()
        await asyncio.wait([waiting])

        for topic in topics:
            await asyncio.to_thread(topic.append_many, [record, b"second"])
        outbox = watching.outbox
        await asyncio.to_thread(until, lambda: len(outbox.ready) == len(topics))

        assert 0 < outbox.bytes_held <= 3500
        assert [lane.waits_at for lane in outbox.lanes] == [None] * len(topics)  # it has left every feed
        found = [await given(watching) for _ in topics]
        assert {each.source.topic.name for each in found} == {topic.name for topic in topics}
        assert [list(each.rows) for each in found] == [[record, b"second"]] * len(topics)
        assert outbox.bytes_held == 0
        waiting = asyncio.create_task(watching.take())
        await asyncio.sleep(0)
        assert [lane.waits_at for lane in outbox.lanes] == [2] * len(topics)  # and comes back at the head
        waiting.cancel()

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


@pytest.mark.slow
@pytest.mark.proves("I27")
def test_of_a_thousand_watchers_one_that_stalls_costs_the_others_nothing_and_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.live.feeds.PAGES_MAX", 4)
    rendered: list[int] = []
    rounds = 12

    def render(batch: Batch, partition: int) -> Sequence[int]:
        rendered.append(batch.base)
        return [batch.base]

    async def follow(watching: Watcher[int], seen: list[int], all_there: list[asyncio.Event]) -> None:
        for number in range(rounds):
            assert list((await given(watching)).rows) == [number]
            seen[number] += 1
            if seen[number] == MANY:
                all_there[number].set()

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        stalled, *others = [
            Watcher(here.feeds, [WatchedTopic.from_start(topic, render, EARLIEST)]) for _ in range(MANY + 1)
        ]
        for watching in (stalled, *others):
            await watching.begin()
        await asyncio.to_thread(topic.append, b"first")
        first = await given(stalled)  # and it does not ask again until the others have got everything
        seen, all_there = [0] * rounds, [asyncio.Event() for _ in range(rounds)]
        following = [asyncio.create_task(follow(watching, seen, all_there)) for watching in others]
        for number in range(1, rounds):
            await all_there[number - 1].wait()
            await asyncio.to_thread(topic.append, b"%d" % number * 100)
        await asyncio.gather(*following)

        assert rendered == list(range(rounds))  # each page once, whatever the stalled one does
        gc.collect()  # what tests before have left
        assert sum(isinstance(found, SharedPage) for found in gc.get_objects()) <= 4 + 1
        assert stalled.outbox.bytes_held == 0
        assert list(first.rows) == [0]
        wal_of(topic).tail.cache.clear()
        assert next(iter((await given(stalled)).rows)) == 1

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_page_that_would_hold_the_loop_is_rendered_by_a_thread(tmp_path: Path) -> None:
    threads: list[int] = []

    def render(batch: Batch, partition: int) -> Sequence[bytes | None]:
        threads.append(threading.get_ident())
        return batch.values()

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        large = b"x" * (LOOP_BYTES_MAX + 1)
        watching = Watcher(here.feeds, [WatchedTopic.from_start(topic, render)])
        await watching.begin()
        for value in (b"small", large, b"small"):
            waiting = asyncio.create_task(given(watching))
            await asyncio.sleep(0)
            await asyncio.to_thread(topic.append, value)
            assert list((await waiting).rows) == [value]

        here_id = threading.get_ident()
        assert [thread == here_id for thread in threads] == [True, False, True]

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_watcher_waits_until_a_time_goes_on_after_it_and_says_when_it_has_ended(tmp_path: Path) -> None:
    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        watching = watcher(here, topic)
        loop = asyncio.get_running_loop()
        for until_time in (loop.time() - 1, loop.time() + 0.03):
            assert await watching.take(until_time) is None
            assert loop.time() >= until_time
            assert not watching.is_closed
        waiting = asyncio.create_task(watching.take(loop.time() + 3600))
        await asyncio.sleep(0)
        await asyncio.to_thread(topic.append, b"v")
        found = await waiting
        assert found is not None
        assert list(found.rows) == [b"v"]
        waiting = asyncio.create_task(watching.take(loop.time() + 3600))
        await asyncio.sleep(0)
        watching.close()
        assert await waiting is None
        assert watching.is_closed

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_many_small_records_are_rendered_by_a_thread(tmp_path: Path) -> None:
    threads: list[str] = []

    def render(batch: Batch, partition: int) -> Sequence[bytes | None]:
        threads.append(threading.current_thread().name)
        return batch.values()

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append_many([b""] * (LOOP_RECORDS_MAX + 1))
        watching = Watcher(here.feeds, [WatchedTopic.from_start(topic, render, EARLIEST)])
        assert len((await given(watching)).rows) == LOOP_RECORDS_MAX + 1
        assert threading.current_thread().name not in threads

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_however_many_watchers_have_a_deadline_the_loop_has_one_timer_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.live.feeds.LOOK_SECONDS", 1000)

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        loop, timers = asyncio.get_running_loop(), []
        sources = [WatchedTopic.from_start(topic, values_of) for _ in range(200)]
        watching = [Watcher(here.feeds, [source], 0.05) for source in sources]
        for each in watching:
            await each.begin()
        call_at = loop.call_at

        def counted(when: float, *call: Any, **context: Any) -> asyncio.TimerHandle:
            timers.append(call)
            return call_at(when, *call, **context)

        monkeypatch.setattr(loop, "call_at", counted)
        began = loop.time()
        assert await asyncio.gather(*(each.take() for each in watching)) == [None] * len(watching)
        assert loop.time() - began >= 0.05
        assert len(timers) < 20

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


def test_a_watcher_may_wait_without_an_end_and_looks_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "WAIT_SECONDS_MAX", 0.001)

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("a")
        entered: list[float] = []
        again = asyncio.Event()
        enter = here.feeds.deadlines.enter

        def counted(deadline: float, outbox: Outbox) -> int:
            entered.append(deadline)
            if len(entered) == 3:
                again.set()
            return enter(deadline, outbox)

        monkeypatch.setattr(here.feeds.deadlines, "enter", counted)
        watching = Watcher(here.feeds, [WatchedTopic.from_start(topic, values_of, EARLIEST)], math.inf)
        waiting = asyncio.create_task(given(watching))
        async with asyncio.timeout(10):
            await again.wait()
        await asyncio.to_thread(topic.append, b"0")
        assert list((await waiting).rows) == [b"0"]

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


@pytest.mark.slow
def test_pages_are_kept_up_to_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.live.feeds.PAGES_BYTES_MAX", 10_000)

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        watching = watcher(here, topic)
        for number in range(20):
            await asyncio.to_thread(topic.append, b"x" * 2_000)
            assert (await given(watching)).next == number + 1

        # Each counts for its records and for the one rendering of them.
        gc.collect()  # what tests before have left
        assert sum(isinstance(found, SharedPage) for found in gc.get_objects()) <= 3

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)


@pytest.mark.parametrize("count", [CROWD_MIN - 1, CROWD_MIN])
def test_the_loop_sleeps_before_it_wakes_a_crowd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The append that calls the loop has not returned yet, and needs the interpreter for that."""
    pause = 0.000123
    monkeypatch.setattr("forebay.live.feeds.WAKE_PAUSE_SECONDS", pause)

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.acquire()
        watching = [watcher(here, topic) for _ in range(count)]
        for each in watching:
            await each.begin()
        waiting = [asyncio.create_task(given(each)) for each in watching]
        await asyncio.sleep(0)
        loop, seen = asyncio.get_running_loop(), []
        call_later = loop.call_later

        def counted(delay: float, *call: Any, **context: Any) -> asyncio.TimerHandle:
            seen.append(delay)
            return call_later(delay, *call, **context)

        monkeypatch.setattr(loop, "call_later", counted)
        await asyncio.to_thread(topic.append, b"v")
        assert [list(found.rows) for found in await asyncio.gather(*waiting)] == [[b"v"]] * count
        assert (pause in seen) == (count == CROWD_MIN)

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)
