"""Ids of producers that Forebay itself uses: no caller gets in by one, on whichever way to append."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

import forebay
from forebay import EARLIEST, Invalid, aio
from forebay.aio.topic import AsyncTopic
from forebay.appends.producer_window import KEY_IDS, ROUTER_IDS, ReservedProducer
from forebay.appends.queue import Producing
from forebay.arguments import checked_producing
from forebay.client.awaiting import AsyncRemoteTopic
from forebay.client.blocking import RemoteTopic
from forebay.format.columns.rows import Columns, encode_columns
from forebay.routers import Routers
from forebay.routers.book import reader_of
from forebay.service.service import AppendRecords
from forebay.storage import Topic
from forebay.wire.items import RecordColumns
from tests.support.brokers import running_broker
from tests.support.waiting import until

FOREIGN: Final = [KEY_IDS, KEY_IDS + 7, ROUTER_IDS - 1, ROUTER_IDS, ROUTER_IDS + 7, 2**64 - 1]
GIVEN: Final[dict[str, Callable[[], Any]]] = {
    "append": lambda: b"v",
    "append_nowait": lambda: b"v",
    "append_many": lambda: [b"v", b"w"],
    "append_many_nowait": lambda: [b"v", b"w"],
    "append_named_nowait": lambda: [b"v", b"w"],
    "append_arrow": lambda: pa.RecordBatch.from_pydict({"value": pa.array([b"v"], pa.binary())}),
    "append_arrow_nowait": lambda: pa.RecordBatch.from_pydict({"value": pa.array([b"v"], pa.binary())}),
    "append_columns_nowait": lambda: encode_columns(Columns([b"v"], [1])),
}
"""What each way to append takes."""


def _ways(face: type) -> list[str]:
    """Every public method that appends as a producer."""
    methods = inspect.getmembers(face, inspect.isfunction)
    found = [name for name, call in methods if "sequence" in inspect.signature(call).parameters and name[0] != "_"]
    assert {"append", "append_nowait", "append_many", "append_arrow"} <= set(found) <= GIVEN.keys()
    return found


def _refuses(call: Callable[..., Any], name: str, producer: int) -> None:
    with pytest.raises(Invalid, match=f"producer is {producer}; allowed: 1 to {KEY_IDS - 1}"):
        call(GIVEN[name](), producer=producer, sequence=0)


@pytest.mark.parametrize("producer", FOREIGN)
def test_ids_of_forebay_are_refused_on_every_way_to_append(tmp_path: Path, producer: int) -> None:
    async def by_tasks() -> None:
        async with aio.open(tmp_path) as log:
            topic = await log.topic("t")
            for name in _ways(AsyncTopic):
                with pytest.raises(Invalid, match=f"producer is {producer}"):
                    await getattr(topic, name)(GIVEN[name](), producer=producer, sequence=0)
            for columns in (RecordColumns([b"v"]), encode_columns(Columns([b"v"], [1])), GIVEN["append_arrow"]()):
                with pytest.raises(Invalid, match=f"producer is {producer}"):
                    await AppendRecords(columns=columns, producer=producer, sequence=0).queue(topic)

    with forebay.open(tmp_path) as log:
        topic = log.create_topic("t", partitions=2)
        for name in _ways(Topic):
            _refuses(getattr(topic, name), name, producer)
    asyncio.run(by_tasks())
    with forebay.open(tmp_path) as log:
        assert list(log.topic("t").read()) == []


@pytest.mark.slow
def test_ids_of_forebay_are_refused_over_http_and_by_its_clients(tmp_path: Path) -> None:
    async def by_tasks(url: str, producer: int) -> None:
        async with aio.connect(url) as remote:
            topic = await remote.topic("t")
            for name in _ways(AsyncRemoteTopic):
                with pytest.raises(Invalid, match=f"producer is {producer}"):
                    await getattr(topic, name)(GIVEN[name](), producer=producer, sequence=0)

    with running_broker(tmp_path) as broker, broker.client() as http:
        broker.log().create_topic("t")
        with forebay.connect(broker.url) as remote:
            for producer in FOREIGN:
                for name in _ways(RemoteTopic):
                    _refuses(getattr(remote.topic("t"), name), name, producer)
                asyncio.run(by_tasks(broker.url, producer))
                answer = http.post(
                    f"/v1/topics/default/t/records?producer={producer}&sequence=0", json=[{"value": "v"}]
                )
                assert answer.status_code == 400
        assert list(broker.log().topic("t").read()) == []


def test_the_highest_id_of_a_caller_is_taken(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        topic = log.create_topic("t")
        assert topic.append(b"v", producer=KEY_IDS - 1, sequence=0) == topic.append(
            b"v", producer=KEY_IDS - 1, sequence=0
        )


def test_ids_of_forebay_lie_where_no_caller_s_do() -> None:
    for number in range(200):
        assert KEY_IDS <= ReservedProducer.of_key(b"%08d" % number) < ROUTER_IDS
        assert ROUTER_IDS <= ReservedProducer.of_worker(f"{number}") < 2**64
    assert checked_producing(ReservedProducer(KEY_IDS), 0, None) == Producing(KEY_IDS, 0, None)


@pytest.mark.slow
def test_no_number_of_other_producers_makes_a_destination_forget_its_router(tmp_path: Path) -> None:
    """Nothing of what was routed is routed again after a kill, whatever ids callers try in between."""
    settings = {"wal": {"producers_max": 4}}
    with forebay.open(tmp_path, settings) as log:
        source, target = log.create_topic("a"), log.create_topic("b")
        routers = Routers(log)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        reader = reader_of(routers.get("r"), source)
        source.append_many([b"%d" % number for number in range(100)])
        with routers.running():
            until(lambda: target.offsets().next == 100)
        # As after a kill: the cursor of the router was not stored.
        reader.reset(EARLIEST, 0, note="1 1")
        for producer in [*range(1, 40), *FOREIGN, *range(ROUTER_IDS, ROUTER_IDS + 40)]:
            try:
                target.append(b"other", producer=producer, sequence=0)
            except Invalid:
                assert producer >= KEY_IDS
        with routers.running():
            source.append(b"100")
            until(lambda: target.offsets().next >= 140)
        assert sorted(int(record.value or b"") for record in target.read() if record.value != b"other") == [*range(101)]
