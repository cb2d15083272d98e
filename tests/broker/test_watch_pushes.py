"""Pages are written to the connections of a crowd as one piece of bytes, without a step of each stream's task."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import forebay
from forebay import LATEST
from forebay.broker import watch
from forebay.broker.guard import encode_chunk
from forebay.format.frame.batch import Batch
from forebay.live import WatchedTopic, Watcher, feeds
from forebay.storage import Storage
from tests.live.test_watchers import Room, run
from tests.storage.rig import quick
from tests.support.brokers import RunningBroker, running_broker, server_settings
from tests.support.waiting import until

SECONDS = 60.0
CROWD = 24
_CHUNK = re.compile(rb"^([0-9a-f]+)\r\n", re.M)


class Stream:
    """One connection that watches, and takes the chunks of its answer apart."""

    def __init__(self, broker: RunningBroker, query: str) -> None:
        at = urlsplit(broker.url)
        self._socket = socket.create_connection((at.hostname or "", at.port or 0), timeout=SECONDS)
        self._socket.sendall(f"GET /v1/watch?{query} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        self._received = b""
        self.text = b""
        while b"\r\n\r\n" not in self._received:
            self._received += self._socket.recv(1 << 16)
        self._received = self._received.partition(b"\r\n\r\n")[2]
        self.until(b"\nid: ")

    def until(self, mark: bytes) -> None:
        while mark not in self.text or not self.text.endswith(b"\n\n"):
            while (found := _CHUNK.match(self._received)) and len(self._received) >= (
                end := found.end() + int(found[1], 16) + 2
            ):
                assert self._received[end - 2 : end] == b"\r\n"
                self.text += self._received[found.end() : end - 2]
                self._received = self._received[end:]
            if mark not in self.text:
                self._received += self._socket.recv(1 << 16)

    @property
    def values(self) -> list[str]:
        return [value.decode() for value in re.findall(rb'"value":"([^"]*)"', self.text)]

    @property
    def last_id(self) -> str:
        found: bytes = re.findall(rb"\nid: (\S+)\n", b"\n" + self.text)[-1]
        return found.decode()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with running_broker(tmp_path / "data", server_settings(heartbeat_interval_ms=60_000)) as broker:
        yield broker


@contextmanager
def crowd(broker: RunningBroker, *queries: str) -> Iterator[list[Stream]]:
    with ExitStack() as held:
        streams = []
        for query in queries:
            streams.append(Stream(broker, query))
            held.callback(streams[-1].close)
        yield streams


def append(client: httpx.Client, *records: dict[str, Any]) -> None:
    assert client.post("/v1/topics/a/t/records", json=list(records)).status_code == 200


def test_a_page_is_one_piece_of_bytes_for_a_crowd_and_wakes_none_of_its_tasks(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bytes] = []
    steps: list[object] = []
    take = Watcher.take

    def counted(piece: bytes) -> bytes:
        made.append(piece)
        return encode_chunk(piece)

    async def counted_take(watcher: Watcher[Any], until: float | None = None) -> Any:
        steps.append(watcher)
        return await take(watcher, until)

    monkeypatch.setattr(watch, "encode_chunk", counted)
    monkeypatch.setattr(Watcher, "take", counted_take)
    with broker.client() as client:
        client.put("/v1/topics/a/t")
        append(client, {"value": "first"})
        with crowd(broker, *["topic=a/t"] * CROWD) as streams:
            until(lambda: len(steps) == CROWD)
            for number in range(10):
                append(client, {"value": f"v{number}"})
                for stream in streams:
                    stream.until(b'"v%d"' % number)

            assert [stream.values for stream in streams] == [[f"v{number}" for number in range(10)]] * CROWD
            assert len({stream.last_id for stream in streams}) == 1
            assert len(made) == 10, "one for each page"
            assert len(steps) == CROWD, "the tasks wait on"
            with crowd(broker, f"topic=a/t&last_event_id={streams[0].last_id}") as (resumed,):
                append(client, {"value": "next"})
                resumed.until(b'"next"')
                assert resumed.values == ["next"]


def test_streams_that_stand_alike_with_other_filters_get_their_own_records_and_places(broker: RunningBroker) -> None:
    with broker.client() as client:
        client.put("/v1/topics/a/t", json={"partitions": 2})
        queries = ["topic=a/t", "topic=a/t&tag=x", "topic=a/t&tag=y", "topic=a/t&key=k"]
        with crowd(broker, *queries, *queries) as streams:
            append(client, {"value": "1", "tag": "x", "key": "j"}, {"value": "2", "tag": "y", "key": "k"})
            append(client, {"value": "3", "tag": "y", "key": "j"}, {"value": "4", "tag": "x", "key": "k"})
            append(client, *[{"value": "end", "tag": tag, "key": "k"} for tag in "xy"])
            wanted = [{"1", "2", "3", "4"}, {"1", "4"}, {"2", "3"}, {"2", "4"}] * 2
            ends = [2, 1, 1, 2] * 2
            for stream, values, count in zip(streams, wanted, ends, strict=True):
                while stream.values.count("end") < count:
                    stream.until(b'"end"' if "end" not in stream.values else stream.text[-8:] + b"data: ")
                assert set(stream.values) - {"end"} == values
            for stream, query in zip(streams, [*queries, *queries], strict=True):
                with crowd(broker, f"{query}&last_event_id={stream.last_id}") as (resumed,):
                    append(client, {"value": "next", "tag": query[-1], "key": "k"})
                    resumed.until(b'"next"')
                    assert set(resumed.values) <= {"next", "end"}


def test_a_record_that_is_deleted_while_its_page_waits_for_a_crowd_is_shown_to_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feed has handed the page to all, and the delete returns before the loop comes to write it."""
    taken: list[bytes | None] = []

    def push(one: Watcher[bytes | None]) -> bool:
        last = one.take_last()
        found = one.take_ready() if last is None else None
        rows = [] if found is None else found.rows
        taken.extend(rows if last is None else last[0].rows(last[1]))
        return True

    async def use(log: Storage, here: Room) -> None:
        topic = log.create_topic("t")
        topic.append(b"first")
        watching = [Watcher(here.feeds, [WatchedTopic.from_start(topic, _values, LATEST)]) for _ in "123"]
        for one in watching:
            one.outbox.push = partial(push, one)
        tasks = [asyncio.create_task(one.take()) for one in watching]
        await asyncio.to_thread(until, lambda: all(one.outbox.waiter is not None for one in watching))
        monkeypatch.setattr(feeds, "WOKEN_MAX", 0)
        await asyncio.to_thread(topic.append, b"secret")
        await asyncio.to_thread(until, lambda: all(one.outbox.bytes_held for one in watching))
        assert await asyncio.to_thread(topic.delete_by_offset, 1, 2) == 1
        monkeypatch.undo()
        await asyncio.to_thread(topic.append, b"after")
        await asyncio.to_thread(until, lambda: taken.count(b"after") == len(watching))
        for task, one in zip(tasks, watching, strict=True):
            one.close()
            assert await task is None

    with forebay.open(tmp_path, quick()) as log:
        run(log, use)

    assert taken == [b"after"] * 3


def _values(batch: Batch, _: int) -> list[bytes | None]:
    return list(batch.values())


def test_an_error_in_one_stream_of_a_crowd_ends_that_stream_alone(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[bytes] = []

    def failing(piece: bytes) -> bytes:
        if not broken:
            broken.append(piece)
            raise RuntimeError("a mistake")
        return encode_chunk(piece)

    with broker.client() as client:
        client.put("/v1/topics/a/t")
        append(client, {"value": "first"})
        with crowd(broker, *["topic=a/t"] * 4) as streams:
            monkeypatch.setattr(watch, "encode_chunk", failing)
            append(client, {"value": "v"})
            for stream in streams:
                stream.until(b"data: ")
            assert sorted(b"event: error" in stream.text for stream in streams) == [False, False, False, True]
