"""One hung shard: the verbs of the asyncio surface go on for another topic while calls at the hung one wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import forebay.aio
from forebay import EARLIEST, LATEST
from forebay.aio import AsyncLog, AsyncTopic
from forebay.aio.workers import READ
from tests.aio.test_aio import collected
from tests.support.hanging import PLACES, HungPlace
from tests.support.waiting import PATIENCE, async_until

ANSWER_SECONDS: Final = 30.0
EACH: Final = READ.threads
"""So many calls of each kind wait at the hung topic: more than any class has threads."""

HUNG: Final[dict[str, Callable[[AsyncLog, AsyncTopic], Awaitable[object]]]] = {
    "append": lambda _, topic: topic.append(b"late"),
    "flush": lambda _, topic: topic.flush(),
    "rotate": lambda _, topic: topic.rotate(),
    "delete_before": lambda _, topic: topic.delete_before(1),
    "delete_by_key": lambda _, topic: topic.delete_by_key(b"none"),
    "export": lambda log, topic: log.export_topic(topic.name),
    "lookup": lambda _, topic: collected(topic.read_by_key(b"k")),
    "commit": lambda log, topic: log.group("g").commit(topic.name, 1),
    "alter_topic": lambda log, topic: log.alter_topic(topic.name, cap_records=1000),
    "reader": lambda _, topic: topic.reader("r").ack_up_to(1),
    "segments": lambda log, topic: log.segments(topic.name),
    "recorded": lambda log, topic: log.recorded(topic.name),
}
VERBS: Final[dict[str, Callable[[AsyncLog, AsyncTopic], Awaitable[object]]]] = {
    "create_topic": lambda log, _: log.create_topic("new"),
    "topic": lambda log, topic: log.topic(topic.name),
    "topics": lambda log, _: log.topics(),
    "alter_topic": lambda log, topic: log.alter_topic(topic.name, cap_records=1000),
    "status": lambda log, _: log.status(),
    "groups": lambda log, _: log.groups(),
    "commit": lambda log, topic: log.group("g").commit(topic.name, 1),
    "group_offsets": lambda log, _: log.group("g").offsets(),
    "usage": lambda log, topic: log.usage(topic.name),
    "segments": lambda log, topic: log.segments(topic.name),
    "recorded": lambda log, topic: log.recorded(topic.name),
    "append": lambda _, topic: topic.append(b"v", key=b"k"),
    "append_many": lambda _, topic: topic.append_many([b"v"] * 3),
    "read": lambda _, topic: collected(topic.read()),
    "read_by_key": lambda _, topic: collected(topic.read_by_key(b"k")),
    "page": lambda _, topic: topic.page(0, 0),
    "offsets": lambda _, topic: topic.offsets(),
    "offset_at_time": lambda _, topic: topic.offset_at_time(0),
    "resolve": lambda _, topic: topic.resolve(LATEST),
    "reader": lambda _, topic: topic.reader("r").ack_up_to(1),
    "flush": lambda _, topic: topic.flush(),
    "rotate": lambda _, topic: topic.rotate(),
    "delete_by_key": lambda _, topic: topic.delete_by_key(b"none"),
    "delete_before": lambda _, topic: topic.delete_before(1),
    "subscribe": lambda _, topic: topic.subscribe("s", start=EARLIEST),
    "take": lambda _, topic: _taken(topic),
    "export": lambda log, topic: log.export_topic(topic.name),
    "copy": lambda log, topic: log.copy_topic(topic.name, "new"),
    "erase": lambda log, topic: log.erase_key(topic.name, b"k"),
    "retention": lambda log, topic: log.run_retention(topic.name),
    "delete_topic": lambda log, _: log.delete_topic("new"),
}


async def _taken(topic: AsyncTopic) -> int:
    async with (await topic.subscription("s")).consumer() as consumer:
        return await consumer.ack(*await consumer.take(wait_s=ANSWER_SECONDS))


FIRST: Final[dict[str, Callable[[AsyncLog, AsyncTopic], Awaitable[object]]]] = {
    "files": lambda _, topic: topic.append(b"held up"),
    "store": lambda log, topic: log.export_topic(topic.name),
    "metadata": lambda log, topic: log.group("g").commit(topic.name, 1),
}
"""What is called first, and hangs."""


@pytest.fixture(params=sorted(PLACES))
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def hung_place(place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[HungPlace]:
    found = HungPlace(monkeypatch, place)
    yield found
    found.answers.set()


@pytest.mark.slow
def test_every_verb_goes_on_for_another_topic_while_calls_at_a_hung_one_wait(
    tmp_path: Path, hung_place: HungPlace, place: str
) -> None:
    settings = forebay.Settings.load(
        overrides={
            "storage": {"mode": "shared_fs"},
            "store": {"root": f"{tmp_path}/store"},
            "metadata": {"path": f"{tmp_path}/meta.sqlite"},
            "wal": {"free_bytes_min": 0},
        }
    )

    async def use() -> None:
        async with forebay.aio.open(tmp_path / "data", settings) as log:
            hung, other = await log.create_topic("hung"), await log.create_topic("other")
            for topic in (hung, other):
                await topic.append(b"first", key=b"k")
                await topic.rotate()
            hung_place.hang((hung.spec.topic_id, str(hung.name)))
            waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(FIRST[place](log, hung))]
            await async_until(lambda: hung_place.held)
            try:
                waiting += [asyncio.ensure_future(call(log, hung)) for call in HUNG.values() for _ in range(EACH)]
                await asyncio.sleep(0)
                assert await late_verbs(log, other) == []
            finally:
                hung_place.answers.set()
            await asyncio.gather(*waiting)

    asyncio.run(use())


async def late_verbs(log: AsyncLog, topic: AsyncTopic) -> list[str]:
    """The verbs that do not answer in time for this topic."""
    late = []
    for name, verb in VERBS.items():
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await verb(log, topic)
        except TimeoutError:
            late.append(name)
    return late


def test_deletes_do_not_wait_behind_copies_of_whole_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def copy(*_: Any, **__: Any) -> None:
        begun.release()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(forebay.Storage, "copy_topic", copy)

    async def use() -> None:
        async with forebay.aio.open(tmp_path / "data") as log:
            topic = await log.create_topic("t")
            await topic.append(b"v", key=b"k")
            copying = [asyncio.ensure_future(log.copy_topic("t", f"c{number}")) for number in range(20)]
            assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE)
            try:
                async with asyncio.timeout(PATIENCE):
                    assert await topic.delete_by_key(b"k") == 1
                    assert await topic.delete_before(1) == 0
                    await log.delete_topic("t")
            finally:
                go_on.set()
            await asyncio.gather(*copying)

    asyncio.run(use())
