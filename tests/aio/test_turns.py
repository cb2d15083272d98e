"""Commits in the loop of a server: one write for all requests of a turn; what may take longer is left to others."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from forebay import Conflict, Indeterminate, Storage, Unavailable
from forebay.aio import AsyncLog, AsyncTopic, turns
from forebay.testing.inside import inside
from tests.aio.test_aio import collected
from tests.storage.rig import WatchedDisk, quick, values
from tests.support.waiting import PATIENCE


class Server:
    """A log whose loop commits, and which thread writes its segments."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, **wal: object) -> None:
        # No background sync comes in between: a commit beside one is left to others.
        self._settings = quick(sync_interval_ms=600_000, mark_interval_ms=600_000, **wal)
        self._path = path
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
            async with asyncio.timeout(PATIENCE), AsyncLog(self._path, self._settings, commits_in_loop=True) as log:
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


def test_the_appends_of_a_turn_are_written_once_in_the_loop_each_at_its_own_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path / "log", monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic = await begun(log)
        commits = inside(topic).wal().counters.commits
        server.writers.clear()

        found = await asyncio.gather(_appended(topic, 3), topic.append(b"one"), _appended(topic, 2), topic.append(b"o"))

        assert list(found) == [(1,), 4, (5,), 7]
        assert inside(topic).wal().counters.commits == commits + 1
        assert server.writers == [LOOP]

    server.run(use)


def test_one_refused_request_leaves_the_others_of_its_turn_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path / "log", monkeypatch)

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
    server = Server(tmp_path / "log", monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic = await begun(log)
        gone = asyncio.create_task(topic.append(b"gone"))
        stays = asyncio.create_task(topic.append(b"stays"))
        await asyncio.sleep(0)
        gone.cancel()

        assert await stays == 2
        assert values(await collected(topic.read())) == [b"first", b"gone", b"stays"]

    server.run(use)


def test_a_class_that_syncs_is_never_written_by_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path / "log", monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic = await begun(log, durability="fsync")
        await asyncio.gather(*(topic.append(b"v") for _ in range(5)))

    server.run(use)
    assert server.writers
    assert LOOP not in server.writers


def test_a_shard_that_another_thread_writes_does_not_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path / "log", monkeypatch)

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
        assert server.writers == [LOOP]
        assert not waiting.done()
        go_on.set()
        await holding
        assert await waiting == 1

    server.run(use)


@pytest.mark.parametrize("why", ["large", "slow", "new file"])
def test_what_may_take_long_is_left_to_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    server = Server(tmp_path / "log", monkeypatch, **({"rotate_bytes_max": 4096} if why == "new file" else {}))

    async def use(log: AsyncLog) -> None:
        topic = await begun(log)
        if why == "large":
            monkeypatch.setattr(turns, "TURN_BYTES_MAX", 10_000)
            await topic.append(b"v" * 20_000)
        elif why == "slow":
            monkeypatch.setattr(turns, "PATIENCE_SECONDS", -1.0)
            await topic.append(b"this one was slow")
            server.writers.clear()
            await topic.append(b"so the loop rests")
        else:
            await topic.append(b"v" * 5_000)
            server.writers.clear()
            await topic.append(b"in the next file")
        assert server.writers
        assert LOOP not in server.writers[-1:]

    server.run(use)


def test_a_write_that_fails_answers_every_request_of_its_turn_and_the_log_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path / "log", monkeypatch)

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


def test_one_slow_write_rests_the_loop_in_all_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic once learnt by itself that the disk does not keep up, and held the loop once for it."""
    server = Server(tmp_path / "log", monkeypatch)

    async def use(log: AsyncLog) -> None:
        topic, other = await begun(log), await begun(log, "other")
        monkeypatch.setattr(turns, "PATIENCE_SECONDS", -1.0)
        await topic.append(b"this one was slow")
        assert server.writers[-1] == LOOP
        await other.append(b"so the loop rests here too")
        assert server.writers[-1] != LOOP

    server.run(use)


def test_rests_grow_while_writes_stay_slow_and_begin_again_after_a_good_while() -> None:
    pace = turns.TurnPace(lambda: 0.0)
    now, rests = 100.0, []
    for _ in range(9):
        assert pace.allows(now)
        pace.note_write(now, now + 0.06)
        begun = now + 0.06
        now = begun
        while not pace.allows(now):
            now += 0.25
        rests.append(round(now - begun))

    assert rests == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    now += 61
    pace.note_write(now, now + 0.06)
    assert pace.allows(now + 1.1)


def test_a_sync_that_hangs_keeps_the_loop_from_writing_before_writes_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is stuck takes writes into memory for a while: the background sync sees it first."""
    server = Server(tmp_path / "log", monkeypatch)
    server._settings = quick(sync_interval_ms=20, mark_interval_ms=600_000)
    held = threading.Event()
    synced = threading.Event()

    def hang(kind: str, path: str) -> None:
        server.note(kind, path)
        if kind == "sync" and path.endswith(".seg") and not held.is_set():
            synced.set()
            assert held.wait(PATIENCE)

    async def use(log: AsyncLog) -> None:
        topic, other = await begun(log), await begun(log, "other")
        server.disk.meet = hang
        await topic.append(b"to be synced")
        assert await asyncio.to_thread(synced.wait, PATIENCE)
        await asyncio.sleep(turns.SYNC_PATIENCE_SECONDS + 0.2)
        server.writers.clear()
        await other.append(b"by another thread")
        assert server.writers and LOOP not in server.writers
        held.set()
        async with asyncio.timeout(PATIENCE):
            while server.writers[-1] != LOOP:
                await asyncio.sleep(0.05)
                await other.append(b"by the loop again, some time")

    try:
        server.run(use)
    finally:
        held.set()
