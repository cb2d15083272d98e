"""Topics that come and go leave nothing in memory: handles, shards, caches, cursors, wakers, what workers note."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from functools import _lru_cache_wrapper
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import pytest

import forebay
import forebay.aio
import forebay.blobs.directory
import forebay.metadata.memory
from forebay.aio import AsyncLog
from forebay.blobs.directory import DirectoryStore
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.errors import UnknownTopic
from forebay.meter import Histogram
from forebay.records import EARLIEST
from forebay.settings import Settings
from forebay.storage import Storage
from forebay.testing.inside import inside
from tests.storage.rig import QUICK

TOPICS = 8
WORKERS_SECONDS = 20.0
"""In this time the workers of a log come to what was deleted last, on a busy machine, too."""
CONTAINERS = (dict, list, set, deque, WeakSet, WeakKeyDictionary, WeakValueDictionary)


def _settings(**export: object) -> Settings:
    return Settings.load(overrides={**QUICK, "export": export})


def _kept() -> Counter[str]:
    """How many objects of this library there are, by type, and how many entries their containers have, by name."""
    for _ in range(3):
        gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if not str(kind.__module__).startswith("forebay"):
            continue
        found[kind.__qualname__] += 1
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        for name in (*getattr(thing, "__dict__", ()), *slots):
            held = getattr(thing, name, None)
            # The buckets of a histogram are always as many: one that a worker has not come to yet is no growth.
            if isinstance(held, CONTAINERS) and kind is not Histogram:
                found[f"{kind.__qualname__}.{name}"] += len(held)
    for module in [module for name, module in sys.modules.items() if name.startswith("forebay")]:
        for name, held in vars(module).items():
            if isinstance(held, CONTAINERS):
                found[f"{module.__name__}.{name}"] += len(held)
            elif isinstance(held, _lru_cache_wrapper) and held.cache_info().maxsize is None:
                found[f"{module.__name__}.{name}"] += held.cache_info().currsize
    return found


def _use(log: Storage, name: str, **options: str) -> None:
    """A topic from its creation to its deletion, with whatever may note something by its name or id."""
    topic = log.create_topic(name, partitions=2, **options)  # type: ignore[arg-type]
    topic.append_many([b"value"] * 10, keys=[b"%d" % key for key in range(10)], tags=["tag"] * 10)
    topic.append(b"one", key=b"k")
    assert topic.append_nowait(b"soon", partition=1).result(60) >= 0
    assert len(list(topic.read())) == 12
    assert topic.read_by_key(b"k") is not None
    follower = topic.follow(EARLIEST, timeout=0)
    assert len(list(follower)) == 12
    reader = topic.reader("reader")
    reader.ack_up_to(1, ack="cached")
    log.group("group").commit(name, 1, ack="cached")
    log.alter_topic(name, ttl_ms=3_600_000, allow_loss=True)
    topic.delete_by_tag("tag")
    if options.get("engine") == "segment":
        topic.flush()
        topic.rotate()
    log.delete_topic(name)
    with pytest.raises(UnknownTopic):
        log.topic(name)


def _grown(use: Callable[[int], None]) -> list[str]:
    """What grows with the number of topics that are used one after the other."""
    counts = []
    for start in range(0, 3 * TOPICS, TOPICS):
        for number in range(start, start + TOPICS):
            use(number)
        counts.append(_kept())
    return _growth(*counts)


def _growth(first: Counter[str], second: Counter[str], third: Counter[str]) -> list[str]:
    """What grew each time.

    What libraries set up once does not grow again. On a busy machine workers may be a topic or two behind when the last
    count is taken: what they have yet to free goes within a while, a leak stays.
    """
    clock, once = SystemClock(), second - first
    deadline = clock.monotonic() + WORKERS_SECONDS
    while True:
        again = third - second
        grown = [name for name in once if min(once[name], again[name]) >= TOPICS // 2]
        if not grown or clock.monotonic() > deadline:
            return [f"{name}: {once[name]}, then {again[name]}" for name in grown]
        third = _kept()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"engine": "segment"}, {"engine": "rocksdb"}, {"engine": "memory"}], ids=str)
def test_topics_that_come_and_go_leave_nothing_in_memory(tmp_path: Path, options: dict[str, str]) -> None:
    with Storage.open(str(tmp_path / "log"), _settings()) as log:
        grown = _grown(lambda number: _use(log, f"t{number}", **options))
        caches, queues = inside(log).bounds

        assert grown == []
        assert caches.bytes == queues.bytes == 0


@pytest.mark.slow
def test_topics_of_a_log_in_memory_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a watch can still ask for is bounded; in this test by less than a topic needs.
    monkeypatch.setattr(forebay.metadata.memory, "HISTORY_CHANGES_MAX", 4)
    with Storage.open(":memory:", _settings()) as log:
        grown = _grown(lambda number: _use(log, f"t{number}", engine="memory"))

    assert grown == []


@pytest.mark.slow
def test_topics_used_by_asyncio_leave_nothing(tmp_path: Path) -> None:
    async def use(log: AsyncLog, name: str) -> None:
        topic = await log.create_topic(name, partitions=2)
        await asyncio.gather(*[topic.append(b"value", key=b"%d" % key) for key in range(10)])
        await topic.append_many([b"value"] * 10)
        following = topic.follow(EARLIEST)
        assert (await anext(following)).value == b"value"
        await following.aclose()
        await log.delete_topic(name)

    async def churn() -> list[str]:
        counts = []
        async with await forebay.aio.open(tmp_path / "log", QUICK) as log:
            for start in range(0, 3 * TOPICS, TOPICS):
                for number in range(start, start + TOPICS):
                    await use(log, f"t{number}")
                counts.append(_kept())
            return await asyncio.to_thread(_growth, *counts)

    assert asyncio.run(churn()) == []


def test_a_directory_store_remembers_a_bounded_number_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forebay.blobs.directory, "FOLDERS_MAX", 20)
    with closing(SystemDisk()) as disk:
        store = DirectoryStore(str(tmp_path / "store"), disk=disk, clock=SystemClock()).open()
        for number in range(50):
            store.put_if_absent(f"shard{number}/object", b"content")
            store.delete(f"shard{number}/object")

        assert len(store._durable) <= 22
        store.put_if_absent("shard0/object", b"again")
        assert store.get_range("shard0/object", 0, 5) == b"again"
