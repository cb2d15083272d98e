"""One read of a client shows a bulk load in all partitions or in none, wherever in its look the load comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pytest

import forebay
import forebay.aio
from forebay.client import RemoteTopic
from forebay.records import Offsets
from forebay.service.service import Service
from forebay.wire.messages import OffsetsItem
from tests.ledger import Ledger
from tests.storage.test_read_ends import LOADED, PARTITIONS, Looks, sizes
from tests.support.brokers import RunningBroker, running_broker
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow

TOPIC: Final = "shop/orders"
TAG: Final = "t"


class LoadedBroker:
    """A broker with a topic into which a bulk load may come at any step."""

    def __init__(self, broker: RunningBroker) -> None:
        self.broker = broker
        self._number = 0

    def filled(self) -> Self:
        """With some records in each partition."""
        topic = self.broker.log().create_topic(TOPIC, partitions=PARTITIONS)
        for number in range(PARTITIONS):
            topic.append_many([b"v"] * 5, tags=TAG, partition=number)
        return self

    def load(self) -> None:
        """The same number of records into every partition, by another thread than the one that looks."""
        self._number += 1
        loads, load_id = self.broker.log().loads_of(TOPIC), f"load-{self._number}"
        rows = pa.RecordBatch.from_pydict({"value": [b"v"] * LOADED, "tag": [TAG] * LOADED})
        segments = [segment for number in range(PARTITIONS) for segment in loads.stage(load_id, rows, number)]
        loads.offer(load_id, segments)
        assert loads.attach(load_id).is_over


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[LoadedBroker]:
    with running_broker(tmp_path / "log") as broker:
        yield LoadedBroker(broker).filled()


def _arrow(topic: RemoteTopic) -> list[int]:
    found = [0] * PARTITIONS
    for batch in topic.read_arrow():
        for partition in batch.column("partition").to_pylist():
            found[partition] += 1
    return found


def _awaited(topic: RemoteTopic, url: str) -> list[int]:
    async def read() -> list[int]:
        async with forebay.aio.connect(url) as log:
            return sizes(iter([record async for record in (await log.topic(TOPIC)).read()]))

    return asyncio.run(read())


FACES: Final[dict[str, Callable[[RemoteTopic, str], list[int]]]] = {
    "read": lambda topic, _: sizes(iter(topic.read())),
    "read_arrow": lambda topic, _: _arrow(topic),
    "read_by_tag": lambda topic, _: sizes(iter(topic.read_by_tag(TAG))),
    "asyncio": _awaited,
}


@pytest.mark.parametrize("face", FACES)
def test_a_load_that_comes_at_any_step_of_a_look_over_http_is_seen_whole_or_not_at_all(
    face: str, loaded: LoadedBroker, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    looks = Looks(monkeypatch)
    url = loaded.broker.url
    with forebay.connect(url) as log, ThreadPoolExecutor(1) as threads:
        topic = log.topic(TOPIC)
        before, at, is_reached = FACES[face](topic, url)[0], 0, True
        while is_reached:
            at += 1
            looks.steps, reached = 0, list[int]()

            def load(step: int, at: int = at, reached: list[int] = reached) -> None:
                if step == at and not reached:
                    reached.append(step)
                    threads.submit(loaded.load).result(PATIENCE)

            looks.act = load
            seen = FACES[face](topic, url)
            looks.act = lambda step: None
            after = FACES[face](topic, url)
            is_reached = bool(reached)

            assert seen in ([before] * PARTITIONS, [before + LOADED] * PARTITIONS), f"step {at}: {seen}"
            assert after == [before + LOADED * is_reached] * PARTITIONS, f"step {at}: {after}"
            before = after[0]
            ledger.count("loads inside of a look", face=face, handle="client")
    assert at > PARTITIONS


@pytest.mark.parametrize("face", ["read", "read_by_tag"])
def test_all_ends_come_from_one_answer(face: str, loaded: LoadedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asked for one partition after the other: a load between two answers was seen in the later ones."""
    asked = 0
    whole = Service.offsets

    async def counted(*arguments: Any) -> Any:
        nonlocal asked
        found = await whole(*arguments)
        asked += 1
        await asyncio.to_thread(loaded.load)
        return found

    with forebay.connect(loaded.broker.url) as log:
        topic = log.topic(TOPIC)
        monkeypatch.setattr(Service, "offsets", counted)

        assert FACES[face](topic, loaded.broker.url) == [5] * PARTITIONS
    assert asked == 1


def test_a_read_of_some_partitions_and_of_one_ends_where_they_do(loaded: LoadedBroker) -> None:
    with forebay.connect(loaded.broker.url) as log:
        topic = log.topic(TOPIC)
        assert sizes(iter(topic.read({1: 2, 3: forebay.EARLIEST}))) == [0, 3, 0, 5]
        assert sizes(iter(topic.read(4, partition=2))) == [0, 0, 1, 0]


def test_an_older_broker_that_names_no_end_is_read_up_to_what_is_next(
    loaded: LoadedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = OffsetsItem.of

    def without_end(partition: int, offsets: Offsets, *_: object) -> OffsetsItem:
        return whole(partition, offsets)

    monkeypatch.setattr(OffsetsItem, "of", without_end)
    with forebay.connect(loaded.broker.url) as log:
        assert sizes(iter(log.topic(TOPIC).read())) == [5] * PARTITIONS
