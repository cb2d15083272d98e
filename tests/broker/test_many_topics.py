"""Many topics on one broker, idle and written once a second: memory, descriptors and threads stay where they are.

Meanwhile others look at all of them. What stopped the broker's loop for longest is printed with its cause.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
import uvloop

import forebay
from bench import web
from tests.ledger import Ledger
from tests.support.brokers import BrokerCommand
from tests.support.measures import MachineUse, p99_ms, rise_per_minute
from tests.support.soak import SOAK
from tests.support.stops import read_stops

pytestmark = pytest.mark.slow

TOPICS: Final = 10_000 if SOAK else 300
CONNECTIONS: Final = 32
ROUND_SECONDS: Final = 1.0 if SOAK else 0.1
"""How often each topic is written, where the machine carries that."""
WARM_ROUNDS: Final = 2
SECONDS: Final = 900.0 if SOAK else 1.0
"""For how long topics are written once they are warm."""
IDLE_SECONDS: Final = 10.0 if SOAK else 0.2
RISE_BYTES_MAX: Final = 1_000_000
"""What a process may grow in a minute."""


class Writers:
    """Clients that write to every topic in turn. For one event loop."""

    def __init__(self, connections: list[web.Connection]) -> None:
        self._connections = connections
        self._requests = [
            web.request_bytes("POST", f"/v1/topics/many/t{number}/records", b'[{"value": "%s"}]' % (b"x" * 100))
            for number in range(TOPICS)
        ]
        self.took: list[float] = []
        """How long each append took, in seconds."""

    async def round(self) -> float:
        """Write one record to each topic, evenly over the time of a round; how long it took."""
        loop = asyncio.get_running_loop()
        begun = loop.time()

        async def write(first: int) -> None:
            for number in range(first, TOPICS, CONNECTIONS):
                await asyncio.sleep(begun + number / TOPICS * ROUND_SECONDS - loop.time())
                sent = loop.time()
                await self._connections[first].body(self._requests[number])
                self.took.append(loop.time() - sent)

        await asyncio.gather(*(write(first) for first in range(min(CONNECTIONS, TOPICS))))
        await asyncio.sleep(begun + ROUND_SECONDS - loop.time())
        return loop.time() - begun


async def lag_of(connection: web.Connection) -> float:
    """How late the event loop of the broker came at most in the last minute, in seconds."""
    text = (await connection.body(web.request_bytes("GET", "/metrics"))).decode()
    found = re.search(r"^forebay_loop_lag_seconds (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


LOOKS: Final = ("/v1/topics", "/v1/status", "/v1/groups", "/v1/usage", "/metrics")


async def look_around(connection: web.Connection) -> int:
    """What an operator's pages ask for: every page of every list; how many topics there are."""
    topics = 0
    for path in LOOKS:
        after: str | None = path
        while after is not None:
            answer = await connection.body(web.request_bytes("GET", after))
            if path == "/metrics":
                break
            page = json.loads(answer)
            topics += len(page.get("topics", ())) if path == "/v1/topics" else 0
            after = f"{path}?after={page['after']}" if page.get("after") else None
    return topics


class Measured:
    """What was seen of a broker with many topics."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.rounds: list[float] = []
        self.uses: list[tuple[float, MachineUse]] = []
        self.lags: list[float] = []
        self.took: list[float] = []
        self.begun = 0.0
        """When the topics were warm, by the monotonic clock of the machine."""
        self.listed = 0
        """How many topics a look at all of them found."""
        self.idle_cpu = 0.0
        """Seconds of the processor in a second without a request."""

    async def run(self, port: int) -> None:
        """Open all topics by writing to them, leave them alone for a while, then write to them for long."""
        loop = asyncio.get_running_loop()
        async with web.connected(port, 1) as [first]:
            await web.until_ready(first)
        # Not before: a broker closes connections that no request came over for long.
        async with web.connected(port, CONNECTIONS) as connections:
            writers = Writers(connections)
            for _ in range(WARM_ROUNDS):
                await writers.round()
            before, begun = MachineUse.of(self._pid), loop.time()
            await asyncio.sleep(IDLE_SECONDS)
            self.idle_cpu = (MachineUse.of(self._pid).cpu_seconds - before.cpu_seconds) / (loop.time() - begun)
            writers.took.clear()
            begun = self.begun = loop.time()
            while loop.time() - begun < SECONDS:
                self.rounds.append(await writers.round())
                self.uses.append((loop.time(), MachineUse.of(self._pid)))
                self.lags.append(await lag_of(connections[0]))
                self.listed = await look_around(connections[0])
            self.took = writers.took


POOLED_MAX: Final = 80
"""Threads that begin when they are first needed, however many topics there are: 8 for the broker's calls, 64 for single
syncs and 8 for marks and rotations."""


def test_many_topics_that_are_written_all_the_time_cost_no_more_with_time(tmp_path: Path, ledger: Ledger) -> None:
    with forebay.open(tmp_path / "data") as log:
        for number in range(TOPICS):
            log.create_topic(f"many/t{number}")
    # What is kept in memory of the newest records is full from the start: what grows then is not the cache.
    small = "runtime.cache_bytes_max=1048576"
    with BrokerCommand(tmp_path / "data", "--set", small, is_verbose=False, stops=tmp_path / "stops.json") as broker:
        seen = Measured(broker.process.pid)
        port = urlsplit(broker.url).port
        assert port is not None
        uvloop.run(seen.run(port))
    stops = [stop for stop in read_stops(tmp_path / "stops.json") if stop.at >= seen.begun]
    assert seen.listed == TOPICS
    first, last = seen.uses[0][1], seen.uses[-1][1]
    assert last.threads <= first.threads + POOLED_MAX
    assert last.descriptors <= first.descriptors + 4
    # With 1,000 topics memory stands still from the 40th record of each on.
    later = [(at, float(use.resident_bytes)) for at, use in seen.uses[2 * len(seen.uses) // 3 :]]
    rise = rise_per_minute(later) if len(later) > 1 else 0.0
    if SOAK:
        assert rise < RISE_BYTES_MAX
    of = {"topics": f"{TOPICS:,}"}
    for figure, value in (
        ("resident, kB", last.resident_bytes / 1e3),
        ("growth in a minute, kB", rise / 1e3),
        ("descriptors", last.descriptors),
        ("threads", last.threads),
        ("p99 of an append, µs", p99_ms(seen.took) * 1e3),
        ("the slowest round, ms", max(seen.rounds) * 1e3),
        ("loop lag, µs", max(seen.lags) * 1e3 * 1e3),
        ("the longest stop of the loop, µs", stops[0].seconds * 1e6 if stops else 0),
        ("idle: processor, 1/1000 of a core", seen.idle_cpu * 1e3),
    ):
        ledger.count(f"many topics: {figure}", n=round(value), **of)
    for stop in stops[:5]:
        ledger.count(f"many topics: a stop by {stop.cause}", n=round(stop.seconds * 1e6), **of)
