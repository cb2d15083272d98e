"""No call of the asyncio surface asks the metadata store or the disk in the thread of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import forebay.aio
from forebay import EARLIEST, ForebayError, Storage
from forebay.aio import AsyncLog, AsyncTopic
from forebay.catalog.metered import MeteredMetadata
from forebay.engines.rocksdb.shard import RocksShard
from forebay.testing.inside import inside
from tests.storage.rig import QUICK, WatchedDisk
from tests.support.waiting import PATIENCE

ASKED = ("get", "range", "transaction", "watch", "session", "session_alive", "revision")
"""Every question to a metadata store."""


class Watched:
    """What the metadata store and the disk of a log were asked, by the thread that asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: dict[str, list[str]] = {}
        self.disk = WatchedDisk()
        self.disk.meet = lambda kind, path: self._note(f"{kind} {path}")
        for name in ASKED:
            monkeypatch.setattr(MeteredMetadata, name, self._watched(name, getattr(MeteredMetadata, name)))
        opening = Storage.open

        def open_watched(*arguments: Any, **named: Any) -> Storage:
            return opening(*arguments, **named, disk=self.disk)

        monkeypatch.setattr(Storage, "open", open_watched)

    def _watched(self, name: str, ask: Callable[..., object]) -> Callable[..., object]:
        def asked(*arguments: Any, **named: Any) -> object:
            self._note(f"metadata {name}")
            return ask(*arguments, **named)

        return asked

    def _note(self, what: str) -> None:
        self.threads.setdefault(threading.current_thread().name, []).append(what)

    @property
    def in_loop(self) -> list[str]:
        """What was asked in the thread of the loop, which is the one that runs the test."""
        return self.threads.get(threading.current_thread().name, [])


async def append_many_times(topic: AsyncTopic) -> None:
    await asyncio.gather(*(topic.append(b"v", partition=0) for _ in range(20)))


async def append_nowait(topic: AsyncTopic) -> None:
    await (await topic.append_nowait(b"v", key=b"a"))


async def append_many_nowait(topic: AsyncTopic) -> None:
    await (await topic.append_many_nowait([b"v", b"w"], keys=[b"a", b"b"]))


async def append_arrow_nowait(topic: AsyncTopic) -> None:
    await (await topic.append_arrow_nowait(pa.record_batch({"value": [b"v"]})))


async def append_in_turn(topic: AsyncTopic) -> None:
    await topic.append_many([b"v", b"w"], keys=[b"a", b"b"], atomic=False)


async def read(topic: AsyncTopic) -> None:
    async for _ in topic.read():
        pass


async def read_by_key(topic: AsyncTopic) -> None:
    async for _ in topic.read_by_key(b"a"):
        pass


async def follow(topic: AsyncTopic) -> None:
    async with topic.follow(EARLIEST, timeout=0.0) as stream:
        async for _ in stream:
            pass


async def follow_an_append(topic: AsyncTopic) -> None:
    async with topic.follow(partition=1, timeout=PATIENCE) as stream:
        appended = asyncio.create_task(topic.append(b"new", partition=1))
        assert (await anext(stream)).value == b"new"
        await appended


async def page(topic: AsyncTopic) -> None:
    await topic.page(0, 0)


async def read_cached(topic: AsyncTopic) -> None:
    topic.read_cached(0, 0)
    topic.read_cached(1, 0)


async def offsets(topic: AsyncTopic) -> None:
    await topic.offsets(0)


async def status(topic: AsyncTopic) -> None:
    await topic.status()


async def append(topic: AsyncTopic) -> None:
    await topic.append(b"v", key=b"a")


async def append_many(topic: AsyncTopic) -> None:
    await topic.append_many([b"v", b"w"], keys=[b"a", b"b"])


async def append_arrow(topic: AsyncTopic) -> None:
    await topic.append_arrow(pa.record_batch({"value": [b"v"]}))


CALLS: tuple[Callable[[AsyncTopic], Awaitable[None]], ...] = (
    append,
    append_many_times,
    append_many,
    append_nowait,
    append_many_nowait,
    append_in_turn,
    append_arrow,
    append_arrow_nowait,
    read,
    read_by_key,
    follow,
    follow_an_append,
    page,
    read_cached,
    offsets,
    status,
)


async def as_it_is(log: AsyncLog, topic: AsyncTopic) -> None:
    """Every shard is open."""


async def given_up(log: AsyncLog, topic: AsyncTopic) -> None:
    """No shard is open: each is opened by the call."""
    await asyncio.to_thread(_close_shards, log)


async def lost(log: AsyncLog, topic: AsyncTopic) -> None:
    """The session has ended: every shard is to be acquired again."""
    await asyncio.to_thread(inside(log).lose_session)


async def deleted(log: AsyncLog, topic: AsyncTopic) -> None:
    """The handle has outlived its topic."""
    await log.delete_topic(topic.name)


async def made_again(log: AsyncLog, topic: AsyncTopic) -> None:
    """The handle has outlived its topic, whose name another one has."""
    await log.delete_topic(topic.name)
    await log.create_topic(topic.name, partitions=2)


async def wider(log: AsyncLog, topic: AsyncTopic) -> None:
    """Another handle has added a partition, which has no shard yet."""
    await asyncio.to_thread(inside(log).log.alter_topic, topic.name, partitions=3)


def _end(shard: RocksShard | None) -> None:
    if shard is not None:
        shard.end("is closed", clean=True)


def _close_shards(log: AsyncLog) -> None:
    within = inside(log)
    for shard in within.engine.shards():
        within.engine.retire(shard.ref)
    for stored in within.rocksdb.shards():
        within.rocksdb.registry.give_up(stored.ref.spec.topic_id, stored.ref.partition, _end)
    for ephemeral in within.memory.shards():
        within.memory.registry.drop(ephemeral)


KINDS: dict[str, dict[str, Any]] = {
    "fsync": {"durability": "fsync"},
    "disk": {"durability": "disk"},
    "memory": {"durability": "memory"},
    "ephemeral": {"durability": "ephemeral"},
    "rocksdb": {"engine": "rocksdb"},
    "capped": {"cap_bytes": 1_000_000, "on_full": "reject_new"},
}
CASES = (as_it_is, given_up, lost, deleted, made_again, wider)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.__name__))
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_asked_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, case: Callable[..., Awaitable[None]]
) -> None:
    watched, found = Watched(monkeypatch), dict[str, list[str]]()

    async def main() -> None:
        async with asyncio.timeout(PATIENCE), forebay.aio.open(tmp_path / "log", QUICK) as log:
            for call in CALLS:
                topic = await log.create_topic(call.__name__, partitions=2, **KINDS[kind])
                await topic.append_many([b"1", b"2", b"3"], keys=[b"a", b"b", b"c"])
                await case(log, topic)
                before = len(watched.in_loop)
                # Not every case lets every call succeed; none may make it block.
                with contextlib.suppress(ForebayError):
                    await call(topic)
                if len(watched.in_loop) > before:
                    found[call.__name__] = watched.in_loop[before:]

    asyncio.run(main())

    assert found == {}
    assert watched.threads, "other threads have asked"
