"""Commits for the loop of a server: one write for all requests of a turn, by another thread."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from forebay import Conflict, Indeterminate, Storage, Unavailable
from forebay.aio import AsyncLog, AsyncTopic
from forebay.appends.queue import QueueFull
from forebay.testing.inside import inside
from forebay.wal.log import Wal
from tests.aio.test_aio import collected
from tests.storage.rig import WatchedDisk, quick, values
from tests.support.waiting import PATIENCE


class TurnsLog:
    """A log that commits each turn of its loop, and which thread writes its segments."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, *, room_s: float = 0.0, **wal: object) -> None:
        # No background sync comes in between: a commit beside one is left to others.
        self._settings = quick(sync_interval_ms=600_000, mark_interval_ms=600_000, **wal)
        self._path = path
        self._room_s = room_s
        self.disk = WatchedDisk()
        self.writers: list[str] = []
        self.disk.meet = self.note
        opening = Storage.open
        monkeypatch.setattr(Storage, "open", lambda *a, **k: opening(*a, **k, disk=self.disk))

    def note(self, kind: str, path: str) -> None:
        if kind == "write" and path.endswith(".seg"):
            self.writers.append(threading.current_thread().name)

    def run(self, use: Callable[[AsyncLog], Awaitable[None]]) -> None:
        async def whole() -> None:
            opening = AsyncLog(self._path, self._settings, commits_each_turn=True, room_s=self._room_s)
            async with asyncio.timeout(PATIENCE), opening as log:
                await use(log)

        asyncio.run(whole())


LOOP = threading.main_thread().name


async def begun(log: AsyncLog, name: str = "t", **options: Any) -> AsyncTopic:
    """A topic whose first file is there: that one is made by another thread."""
    topic = await log.create_topic(name, **options)
    await topic.append(b"first")
    return topic


async def _appended(topic: AsyncTopic, count: int, **options: Any) -> tuple[int, ...]:
    ack = await topic.append_many_nowait([b"v"] * count, **options)
    return tuple(found.first for found in await ack)


def test_the_appends_of_a_turn_are_written_once_each_at_its_own_offsets_and_not_by_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TurnsLog(tmp_path / "log", monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic = await begun(log)
        commits = inside(topic).wal().counters.commits
        server.writers.clear()

        found = await asyncio.gather(_appended(topic, 3), topic.append(b"one"), _appended(topic, 2), topic.append(b"o"))

        assert list(found) == [(1,), 4, (5,), 7]
        assert inside(topic).wal().counters.commits == commits + 1
        assert len(server.writers) == 1 and LOOP not in server.writers

    server.run(use)


def test_one_refused_request_leaves_the_others_of_its_turn_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TurnsLog(tmp_path / "log", monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic = await begun(log)
        found = await asyncio.gather(
            _appended(topic, 2, producer=7, sequence=0),
            _appended(topic, 2, producer=7, sequence=5),
            _appended(topic, 2, producer=7, sequence=0),
            _appended(topic, 1),
            return_exceptions=True,
        )
        assert isinstance(found[1], Conflict), "it is out of step"
        assert [found[0], found[2], found[3]] == [(1,), (1,), (3,)], "a repeat gets the offsets of the first"
        assert len(await collected(topic.read())) == 4

    server.run(use)


def test_a_request_that_is_cancelled_in_its_turn_may_stand_and_stands_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TurnsLog(tmp_path / "log", monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic = await begun(log)
        gone = asyncio.create_task(topic.append(b"gone"))
        stays = asyncio.create_task(topic.append(b"stays"))
        await asyncio.sleep(0)
        gone.cancel()

        assert await stays == 2
        assert values(await collected(topic.read())) == [b"first", b"gone", b"stays"]

    server.run(use)


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_no_write_is_made_by_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str) -> None:
    """Writes without a sync were once made in the loop: one that hung held every request of a server."""
    server = TurnsLog(tmp_path / "log", monkeypatch, rotate_bytes_max=4096)

    async def use(log: AsyncLog) -> None:
        topic = await begun(log, durability=durability)
        for _ in range(5):
            await asyncio.gather(*(topic.append(b"v" * 500) for _ in range(5)))

    server.run(use)
    assert server.writers
    assert LOOP not in server.writers


def test_appends_of_one_turn_that_are_in_doubt_and_repeated_stand_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that hangs answers none of its turn; callers that gave up and repeat get the offsets of the first."""
    server = TurnsLog(tmp_path / "log", monkeypatch)
    hangs, go_on = threading.Event(), threading.Event()

    async def use(log: AsyncLog) -> None:
        topic, other = await begun(log), await begun(log, "other")
        stuck = inside(topic).wal().writer.place.directory

        def hang(kind: str, path: str) -> None:
            server.note(kind, path)
            if kind == "write" and path.startswith(stuck) and not go_on.is_set():
                hangs.set()
                assert go_on.wait(PATIENCE)

        server.disk.meet = hang
        given_up = [asyncio.create_task(_appended(topic, 2, producer=7, sequence=number)) for number in range(3)]
        assert await asyncio.to_thread(hangs.wait, PATIENCE)
        later = asyncio.create_task(topic.append(b"later"))
        assert await other.append(b"not held up") == 1
        assert len(await collected(other.read())) == 2
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        again = [asyncio.create_task(_appended(topic, 2, producer=7, sequence=number)) for number in range(3)]
        await asyncio.sleep(0.05)  # a moment in which one would be answered too early
        assert not later.done() and not any(task.done() for task in again)
        go_on.set()

        assert await asyncio.gather(*again) == [(1,), (3,), (5,)]
        assert await later == 7
        assert len(await collected(topic.read())) == 8

    try:
        server.run(use)
    finally:
        go_on.set()


class FullQueue:
    """A topic whose two partitions have full queues: nothing is written until `go_on` is set."""

    def __init__(self, server: TurnsLog) -> None:
        self._server = server
        self.go_on = threading.Event()

    def run(self, use: Callable[[AsyncTopic, list[asyncio.Task[int]]], Awaitable[None]]) -> None:
        """Hand on the topic, and the appends that wait in the queues."""

        async def filled(log: AsyncLog) -> None:
            topic = await log.create_topic("t", partitions=2)
            for partition in range(2):
                await topic.append(b"first", partition=partition)
            held = threading.Barrier(3)
            holding = [asyncio.create_task(asyncio.to_thread(self._hold, inside(topic).wal(n), held)) for n in range(2)]
            try:
                await asyncio.to_thread(held.wait, PATIENCE)
                queued = [asyncio.create_task(topic.append(b"q", partition=number % 2)) for number in range(8)]
                await use(topic, queued)
            finally:
                self.go_on.set()
                await asyncio.gather(*holding)

        self._server.run(filled)

    def _hold(self, wal: Wal, held: threading.Barrier) -> None:
        with wal.committing:
            held.wait(PATIENCE)
            assert self.go_on.wait(PATIENCE)


def _requests(topic: AsyncTopic) -> list[Awaitable[Any]]:
    """What a server does for one record, for several, for rows of Arrow, and for records of both partitions."""
    rows = pa.record_batch({"value": pa.array([b"r", b"r"], pa.binary())})
    keys = [b"k%d" % number for number in range(8)]
    return [
        topic.append_nowait(b"one", partition=0),
        topic.append_many_nowait([b"m", b"m"], partition=1, producer=7, sequence=0),
        topic.append_arrow_nowait(rows, partition=0),
        topic.append_many_nowait([b"s"] * 8, keys=keys),
    ]


async def _all_stand_once(topic: AsyncTopic, queued: list[asyncio.Task[int]], asked: Iterable[Awaitable[Any]]) -> None:
    """Once the queues are written, what waited in them and what these `_requests` asked for is there, and no more."""
    for ack in await asyncio.gather(*asked):
        await ack
    await asyncio.gather(*queued)
    found = [*await collected(topic.read(partition=0)), *await collected(topic.read(partition=1))]
    assert Counter(values(found)) == {b"first": 2, b"q": 8, b"one": 1, b"m": 2, b"r": 2, b"s": 8}


def test_requests_wait_a_moment_for_room_in_a_full_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More records under way than a queue takes are no reason to refuse one: the queue is written out in no time."""
    full = FullQueue(TurnsLog(tmp_path / "log", monkeypatch, room_s=PATIENCE, queue_records_max=4))

    async def use(topic: AsyncTopic, queued: list[asyncio.Task[int]]) -> None:
        gone, *waiting = [
            asyncio.ensure_future(each) for each in (topic.append_nowait(b"gone", partition=1), *_requests(topic))
        ]
        await asyncio.sleep(0.1)  # a moment in which one would be refused
        assert not any(each.done() for each in waiting), "there is no room, and none is refused"
        gone.cancel()
        full.go_on.set()

        await _all_stand_once(topic, queued, waiting)

    full.run(use)


def test_requests_are_refused_when_there_was_no_room_for_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FullQueue(TurnsLog(tmp_path / "log", monkeypatch, room_s=0.3, queue_records_max=4))

    async def use(topic: AsyncTopic, queued: list[asyncio.Task[int]]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(2):
            began = loop.time()
            refused = await asyncio.gather(*_requests(topic), return_exceptions=True)
            assert [type(each) for each in refused] == [QueueFull] * 4
            assert loop.time() - began >= 0.3
        full.go_on.set()

        await asyncio.gather(*queued)
        await _all_stand_once(topic, queued, _requests(topic))

    full.run(use)


def test_a_shard_that_another_thread_writes_does_not_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TurnsLog(tmp_path / "log", monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic, other = await begun(log), await begun(log, "other")
        server.writers.clear()
        taken, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with inside(topic).wal().committing:
                taken.set()
                assert go_on.wait(PATIENCE)

        holding = asyncio.create_task(asyncio.to_thread(hold))
        await asyncio.to_thread(taken.wait, PATIENCE)
        waiting = asyncio.create_task(topic.append(b"late"))

        assert await other.append(b"v") == 1
        assert len(server.writers) == 1
        assert not waiting.done()
        go_on.set()
        await holding
        assert await waiting == 1

    server.run(use)


def test_a_write_that_fails_answers_every_request_of_its_turn_and_the_log_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TurnsLog(tmp_path / "log", monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic, other = await begun(log), await begun(log, "other")
        broken = inside(topic).wal().writer.place.directory

        def fail(kind: str, path: str) -> None:
            server.note(kind, path)
            if kind == "write" and path.startswith(broken):
                raise OSError(errno.EIO, "EIO")

        server.disk.meet = fail
        found = await asyncio.gather(
            topic.append(b"a"), _appended(topic, 2), other.append(b"fine"), return_exceptions=True
        )
        assert all(isinstance(each, Indeterminate | Unavailable) for each in found[:2]), found
        assert found[2] == 1
        server.disk.meet = server.note

        wal = inside(topic).wal()
        while not await asyncio.to_thread(wal.heal):
            pass
        await topic.append(b"again")
        assert values(await collected(topic.read()))[-1] == b"again"

    server.run(use)
