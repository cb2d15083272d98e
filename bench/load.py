"""Requests that were made beforehand, sent over connections of one event loop; the same loop for Forebay and its peers.

What is timed on the side of the client is to send bytes and to find the end of each answer, whoever is asked. The
processor time of server and client is taken with every rate, because both share one machine: a rate alone would say
which of the two was slower, and not what a record costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from bench import payload
from bench.plan import Figures

Ask = Callable[[], Awaitable[bytes]]
"""Sends the next request of one connection; its answer."""


class Server(NamedTuple):
    """A process that serves on a port of 127.0.0.1."""

    port: int
    pid: int

    def cpu(self) -> float:
        """Seconds of processor time that it has used by now, all its threads together."""
        return cpu_of(self.pid)


def cpu_of(pid: int) -> float:
    """Seconds of processor time of a process, by its own clock (`clock_getcpuclockid`): finer than /proc's ticks."""
    return time.clock_gettime((~pid << 3) | 2)


class Load(NamedTuple):
    """What was done, and what it took."""

    done: int
    seconds: float
    server_cpu: float
    client_cpu: float

    def figures(self, name: str, each: int = 1) -> Figures:
        """The rate, and the processor time of a record, where each request had so many of them."""
        records = self.done * each
        return {
            f"{name} rate": records / self.seconds,
            f"{name} server": self.server_cpu / records * 1e6,
            f"{name} client": self.client_cpu / records * 1e6,
        }


class Watch:
    """Measures what is done between its making and `read`: time, and processor time of server and client."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._server_cpu, self._client_cpu, self._begun = server.cpu(), time.process_time(), time.perf_counter()

    def seconds(self) -> float:
        """How long it has run."""
        return time.perf_counter() - self._begun

    def read(self, done: int) -> Load:
        """So much was done since."""
        seconds = self.seconds()
        return Load(done, seconds, self._server.cpu() - self._server_cpu, time.process_time() - self._client_cpu)


async def load(server: Server, asks: Sequence[Ask], begins: bytes, seconds: float) -> Load:
    """Ask over all connections, again when an answer is there, for so long and at least once each.

    Every answer has to begin with the given bytes. What the server then holds is for the caller to check, afterwards.
    """
    sent, watch = 0, Watch(server)

    async def one(ask: Ask) -> None:
        nonlocal sent
        while True:
            sent += 1
            answer = await ask()
            if not answer.startswith(begins):
                raise payload.Wrong(f"a request was answered with {answer[:500]!r}")
            if watch.seconds() >= seconds:
                return

    await asyncio.gather(*map(one, asks))
    return watch.read(sent)


def repeated(server: Server, step: Callable[[], int], seconds: float) -> Load:
    """The same for a client that blocks: call a step, which says how many records it did, for so long."""
    done, watch = 0, Watch(server)
    while True:
        done += step()
        if watch.seconds() >= seconds:
            return watch.read(done)
