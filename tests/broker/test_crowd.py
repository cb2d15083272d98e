"""Many streams of one topic: what they want alike is made once; a crowd costs no thread and leaves no descriptor."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from forebay.broker import watch
from forebay.clock import SystemClock
from tests.support.brokers import RunningBroker, running_broker, server_settings
from tests.support.soak import SOAK

SECONDS = 60.0
CROWD = 1_000 if SOAK else 100
STALLED = 100 if SOAK else 10
APPENDS_SECONDS = 60.0 if SOAK else 0.5
SLOPE_BYTES_MAX = 1_000_000
"""What a process may grow in a minute."""
PATH = "/v1/topics/live/crowd"


class Stream:
    """One connection that follows the topic, without a thread or a decoder."""

    def __init__(self, broker: RunningBroker) -> None:
        at = urlsplit(broker.url)
        assert at.hostname is not None
        self.socket = socket.create_connection((at.hostname, at.port), timeout=SECONDS)
        self.socket.sendall(b"GET /v1/watch?topic=live/crowd HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        self._received = b""
        self.until(b"\nid: ")

    def until(self, mark: bytes) -> None:
        """Read until these bytes have come."""
        while mark not in self._received:
            piece = self.socket.recv(1 << 16)
            assert piece, f"the stream ended before {mark!r} came: {self._received[-500:]!r}"
            self._received += piece
        self._received = self._received.partition(mark)[2]


@contextmanager
def crowd(broker: RunningBroker, count: int) -> Iterator[list[Stream]]:
    with ExitStack() as held:
        streams = []
        for _ in range(count):
            streams.append(Stream(broker))
            held.enter_context(streams[-1].socket)
        yield streams


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    settings = server_settings(
        streams_max=2 * CROWD, streams_per_principal_max=2 * CROWD, connections_per_address_max=4 * CROWD
    )
    with running_broker(tmp_path / "data", settings) as broker:
        yield broker


@pytest.fixture
def client(broker: RunningBroker) -> Iterator[httpx.Client]:
    with broker.client() as client:
        assert client.put(PATH, json={}).status_code == 201
        yield client


def append(client: httpx.Client, value: str) -> None:
    assert client.post(f"{PATH}/records", json=[{"value": value}]).status_code == 200


def test_a_page_and_the_place_behind_it_are_rendered_once_for_all_streams(
    broker: RunningBroker, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []
    for name in ("items_of", "encode_event_id"):
        before = getattr(watch, name)

        def counted(*arguments: object, _name: str = name, _before: object = before) -> object:
            rendered.append(_name)
            return _before(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(watch, name, counted)
    with crowd(broker, 20) as streams:
        rendered.clear()
        append(client, "first")
        for stream in streams:
            stream.until(b'"value":"first"')
            stream.until(b"\nid: ")

    assert sorted(rendered) == ["encode_event_id", "items_of"]


def test_a_crowd_costs_no_thread_and_leaves_no_descriptor(broker: RunningBroker, client: httpx.Client) -> None:
    for _ in range(8):
        append(client, "x" * 1_000_000)  # fills what is kept of the end of a partition
    with crowd(broker, 1) as (stream,):
        append(client, "warm")
        stream.until(b"warm")
    _until_alone(broker)
    threads, descriptors = threading.active_count(), _descriptors()

    with crowd(broker, CROWD) as streams:
        with crowd(broker, STALLED):
            _append_for(client, streams, APPENDS_SECONDS)
        assert threading.active_count() <= threads
    _until_alone(broker)

    # The file that is written may have been kept open for the next write.
    assert _descriptors() <= descriptors + 2


def _append_for(client: httpx.Client, streams: list[Stream], seconds: float) -> None:
    """Append at a steady pace; every stream takes each record, and the process grows no further once it is warm."""
    now = SystemClock().monotonic
    begun, number, seen = now(), 0, []
    while number < 3 or now() - begun < seconds:
        value = f"{number:08d}" + "x" * 10_000
        append(client, value)
        for stream in streams:
            stream.until(value[:8].encode())
        seen.append((now(), _resident()))
        number += 1
    if SOAK:
        (early_at, early), (late_at, late) = seen[len(seen) // 3], seen[-1]
        assert (late - early) / (late_at - early_at) * 60 < SLOPE_BYTES_MAX


def _until_alone(broker: RunningBroker) -> None:
    """Return when the broker has seen that all streams are over."""
    done = threading.Event()

    def look() -> None:
        if broker.process.broker.quota_counts().streams:
            broker.loop.call_later(0.01, look)
        else:
            done.set()

    broker.loop.call_soon_threadsafe(look)
    assert done.wait(SECONDS)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
