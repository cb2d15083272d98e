"""A call on a topic that this process knows and owns reads no metadata: every call is counted, on every engine.

A server answers thousands of such calls a second: one read of the metadata store each would be its limit.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest

import forebay
import forebay.aio
from forebay import EARLIEST, Storage, Topic
from forebay.aio import AsyncLog, AsyncTopic
from forebay.catalog.metered import MeteredMetadata
from forebay.testing.inside import inside
from tests.storage.rig import QUICK
from tests.support.waiting import PATIENCE

NAME = "shop/orders"
GROUP = "billing"
READS = ("get", "range", "revision", "session_alive")
OWN_PACE = (
    "forebay-definitions",
    "forebay-limits",
    "forebay-cleanup",
    "forebay-history",
    "forebay-commits",
    "forebay-lags",
)
"""Workers that ask the metadata store at their own pace, whatever is called meanwhile."""
ENGINES: dict[str, dict[str, Any]] = {
    "segment, fsync": {"durability": "fsync"},
    "segment, disk": {"durability": "disk"},
    "segment, memory": {"durability": "memory"},
    "rocksdb": {"engine": "rocksdb"},
    "memory": {"engine": "memory"},
}
SETTINGS: dict[str, dict[str, object]] = {**QUICK, "progress": {"flush_interval_ms": 600_000}}


def shared(tmp_path: Path) -> dict[str, dict[str, object]]:
    """Settings under which a topic has history outside its log."""
    return {**SETTINGS, "storage": {"mode": "shared_fs"}, "store": {"root": f"{tmp_path}/store"}}


class ReadCounter:
    """Counts reads of the metadata store, by any thread that works for a call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[str] = []
        for method in READS:
            monkeypatch.setattr(MeteredMetadata, method, self._counted(method, getattr(MeteredMetadata, method)))

    def _counted(self, method: str, ask: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: Any, **named: Any) -> object:
            thread = threading.current_thread().name
            if not thread.startswith(OWN_PACE):
                self.reads.append(f"{method} {arguments[1:]} in {thread}")
            return ask(*arguments, **named)

        return counted

    def since(self, before: int) -> list[str]:
        return self.reads[before:]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> ReadCounter:
    # A machine that is too busy to follow changes in time would read each time, as it should.
    monkeypatch.setattr("forebay.definitions.STALE_SECONDS", 1e9)
    return ReadCounter(monkeypatch)


def _batch() -> pa.RecordBatch:
    return pa.record_batch({"value": [b"v"], "key": [b"k"], "tag": ["t"]})


def _taken(records: Iterator[object]) -> int:
    return sum(1 for _ in records)


def _followed(topic: Topic) -> None:
    with topic.follow(partition=0, timeout=PATIENCE) as stream:
        appended = topic.append_nowait(b"followed", partition=0)
        assert next(stream).value == b"followed"
        appended.result(PATIENCE)


CALLS: dict[str, Callable[[Storage, Topic], object]] = {
    "append": lambda log, topic: topic.append(b"v", key=b"k", tag="t"),
    "append_nowait": lambda log, topic: topic.append_nowait(b"v").result(PATIENCE),
    "append_many": lambda log, topic: topic.append_many([b"v", b"w"], keys=[b"k", b"l"]),
    "append_many_nowait": lambda log, topic: topic.append_many_nowait([b"v", b"w"]).result(PATIENCE),
    "append_arrow": lambda log, topic: topic.append_arrow(_batch()),
    "append_arrow_nowait": lambda log, topic: topic.append_arrow_nowait(_batch()).result(PATIENCE),
    "read": lambda log, topic: _taken(topic.read()),
    "read_arrow": lambda log, topic: _taken(topic.read_arrow()),
    "page": lambda log, topic: topic.page(0, 0),
    "read_cached": lambda log, topic: topic.read_cached(0, 0),
    "follow": lambda log, topic: _taken(topic.follow(EARLIEST, timeout=0)),
    "follow an append": lambda log, topic: _followed(topic),
    "offsets": lambda log, topic: topic.offsets(1),
    "status of the topic": lambda log, topic: topic.status(),
    "status of the log": lambda log, topic: log.status(),
    "commit cached": lambda log, topic: log.group(GROUP).commit(NAME, topic.offsets().next, ack="cached"),
    "commit": lambda log, topic: log.group(GROUP).commit(NAME, topic.offsets().next),
    "read_by_key": lambda log, topic: _taken(topic.read_by_key(b"k")),
    "read_by_tag": lambda log, topic: _taken(topic.read_by_tag("t")),
    "offset_at_time": lambda log, topic: topic.offset_at_time(0),
    "last_sequence": lambda log, topic: topic.last_sequence(7),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_calls_of_a_known_topic_read_no_metadata(tmp_path: Path, counter: ReadCounter, kind: str) -> None:
    found: dict[str, list[str]] = {}
    with forebay.open(tmp_path / "log", SETTINGS) as log:
        topic = log.create_topic(NAME, partitions=2, **ENGINES[kind])
        for partition in range(2):
            topic.append(b"first", partition=partition)
        log.group(GROUP).commit(NAME, 1)
        inside(log).follow_changes()
        log.topic(NAME)
        assert counter.reads, "the reads of an opening are counted"

        for name, call in CALLS.items():
            before = len(counter.reads)
            call(log, log.topic(NAME))
            found[name] = counter.since(before)

    assert {name: reads for name, reads in found.items() if reads} == {}


def test_calls_of_a_topic_whose_history_was_read_before_read_no_metadata(tmp_path: Path, counter: ReadCounter) -> None:
    """The first reader of history reads what is catalogued; a look-up by time read it again each time."""
    found: dict[str, list[str]] = {}
    with forebay.open(tmp_path / "log", shared(tmp_path)) as log:
        topic = log.create_topic(NAME, partitions=2)
        for partition in range(2):
            topic.append_many([b"old"] * 3, keys=[b"k"] * 3, tags="t", partition=partition)
        log.export_topic(NAME)
        for partition in range(2):
            inside(topic).drop_copies(partition)
            topic.append(b"first", partition=partition)
        log.group(GROUP).commit(NAME, 1)
        inside(log).follow_changes()

        for _ in range(2):
            found = {}
            for name, call in CALLS.items():
                before = len(counter.reads)
                call(log, log.topic(NAME))
                found[name] = counter.since(before)

        assert topic.page(0, 0).records[0].value == b"old"
        assert topic.offset_at_time(0) == 0
    assert {name: reads for name, reads in found.items() if reads} == {}


async def _all(records: AsyncIterator[object]) -> None:
    async for _ in records:
        pass


async def _awaited(ack: Awaitable[Awaitable[object]]) -> None:
    await (await ack)


async def _commit(log: AsyncLog, topic: AsyncTopic, ack: Literal["durable", "cached"]) -> None:
    await log.group(GROUP).commit(NAME, (await topic.offsets()).next, ack=ack)


async def _follow_an_append(topic: AsyncTopic) -> None:
    async with topic.follow(partition=0, timeout=PATIENCE) as stream:
        appended = asyncio.create_task(topic.append(b"followed", partition=0))
        assert (await anext(stream)).value == b"followed"
        await appended


async def _read_cached(topic: AsyncTopic) -> None:
    topic.read_cached(0, 0)


ASYNC_CALLS: dict[str, Callable[[AsyncLog, AsyncTopic], Awaitable[object]]] = {
    "append": lambda log, topic: topic.append(b"v", key=b"k", tag="t"),
    "append_many": lambda log, topic: topic.append_many([b"v", b"w"], keys=[b"k", b"l"]),
    "append_many_nowait": lambda log, topic: _awaited(topic.append_many_nowait([b"v", b"w"])),
    "append_arrow": lambda log, topic: topic.append_arrow(_batch()),
    "append_arrow_nowait": lambda log, topic: _awaited(topic.append_arrow_nowait(_batch())),
    "read": lambda log, topic: _all(topic.read()),
    "read_arrow": lambda log, topic: _all(topic.read_arrow()),
    "page": lambda log, topic: topic.page(0, 0),
    "read_cached": lambda log, topic: _read_cached(topic),
    "follow": lambda log, topic: _all(topic.follow(EARLIEST, timeout=0.0)),
    "follow an append": lambda log, topic: _follow_an_append(topic),
    "offsets": lambda log, topic: topic.offsets(1),
    "status of the topic": lambda log, topic: topic.status(),
    "status of the log": lambda log, topic: log.status(),
    "commit cached": lambda log, topic: _commit(log, topic, "cached"),
    "commit": lambda log, topic: _commit(log, topic, "durable"),
    "read_by_key": lambda log, topic: _all(topic.read_by_key(b"k")),
    "read_by_tag": lambda log, topic: _all(topic.read_by_tag("t")),
    "offset_at_time": lambda log, topic: topic.offset_at_time(0),
    "last_sequence": lambda log, topic: topic.last_sequence(7),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_calls_of_a_known_topic_in_an_event_loop_read_no_metadata(
    tmp_path: Path, counter: ReadCounter, kind: str
) -> None:
    found: dict[str, list[str]] = {}

    async def main() -> None:
        async with asyncio.timeout(PATIENCE), forebay.aio.open(tmp_path / "log", SETTINGS) as log:
            topic = await log.create_topic(NAME, partitions=2, **ENGINES[kind])
            for partition in range(2):
                await topic.append(b"first", partition=partition)
            await log.group(GROUP).commit(NAME, 1)
            await asyncio.to_thread(inside(log).follow_changes)
            await log.topic(NAME)
            assert counter.reads, "the reads of an opening are counted"

            for name, call in ASYNC_CALLS.items():
                before = len(counter.reads)
                await call(log, await log.topic(NAME))
                found[name] = counter.since(before)

    asyncio.run(main())

    assert {name: reads for name, reads in found.items() if reads} == {}
