"""Some shards of many hang: the others answer and become durable, and the number of threads is bounded."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, Final

import pytest

import forebay.aio
from forebay.aio import AsyncTopic
from forebay.executor import GIVEN_UP_MAX
from tests.aio.test_aio import collected
from tests.support.hanging import HungPlace
from tests.support.waiting import PATIENCE, async_until

pytestmark = pytest.mark.slow

TOPICS: Final = 100
HUNG: Final = 20
LOOK_SECONDS: Final = 0.05
THREADS_MAX: Final = 2 * GIVEN_UP_MAX
"""Threads that hang, of calls and of commits, and those that work in their place."""


async def until_durable(topic: AsyncTopic, offset: int) -> None:
    """Return once the record at the offset is durable, though no call says when that is."""
    for _ in range(round(PATIENCE / LOOK_SECONDS)):
        if (await topic.offsets()).durable > offset:
            return
        await asyncio.sleep(LOOK_SECONDS)
    pytest.fail(f"{topic.name} is not durable at {offset}")


async def use_others(log: forebay.aio.AsyncLog, topics: list[AsyncTopic]) -> None:
    """Each verb of daily use, for topics that do not hang."""
    for topic in topics:
        offset = await topic.append(b"v", key=b"k")
        assert len(await collected(topic.read())) == offset + 1
        await log.group("g").commit(topic.name, offset)
        await until_durable(topic, offset)
    assert len(await log.topics()) == TOPICS
    await log.status()


def test_topics_beside_many_that_hang_are_used_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = HungPlace(monkeypatch, "files")

    async def use() -> None:
        async with forebay.aio.open(tmp_path / "data") as log:
            topics = [await log.create_topic(f"t{number}") for number in range(TOPICS)]
            for topic in topics:
                await topic.append(b"v", key=b"k")
            hung, others = topics[:HUNG], topics[HUNG::8]
            place.hang(*((topic.spec.topic_id, str(topic.name)) for topic in hung))
            waiting: list[asyncio.Future[Any]] = []
            try:
                for topic in hung:
                    waiting += [asyncio.ensure_future(call) for call in (topic.append(b"w"), topic.flush())]
                await async_until(lambda: len(place.held) == HUNG)
                async with asyncio.timeout(PATIENCE):
                    await use_others(log, others)
                assert threading.active_count() <= THREADS_MAX
                assert not any(future.done() for future in waiting)
            finally:
                place.answers.set()
            await asyncio.gather(*waiting)

    asyncio.run(use())
