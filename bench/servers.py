"""Peers that are servers: started on 127.0.0.1 for the run of a case and stopped after it."""

# ruff: noqa: PLC0415 - what is not installed is left out

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.load import Load, Server

HOST = "127.0.0.1"
START_SECONDS = 10.0


def program(name: str) -> str | None:
    """Where an executable is: beside this Python, or on the path."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def available(name: str) -> bool:
    """Whether server and client of a peer are there."""
    server, module = {"redis": ("redis-server", "redis"), "nats": ("nats-server", "nats")}[name]
    return program(server) is not None and importlib.util.find_spec(module) is not None


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(command: Sequence[str], port: int) -> Iterator[Server]:
    """The server, once it takes connections; ended with the block."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection((HOST, port), timeout=1).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        yield Server(port, server.pid)
    finally:
        server.terminate()
        try:
            server.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextlib.contextmanager
def redis_server(path: Path, *, durable: bool) -> Iterator[Server]:
    """Redis with an append-only file, synced at every write, as `fsync` is, or every second, as `disk` is."""
    port = free_port()
    sync = "always" if durable else "everysec"
    command = [str(program("redis-server")), "--bind", HOST, "--port", str(port), "--dir", str(path), "--save", ""]
    with running([*command, "--appendonly", "yes", "--appendfsync", sync], port) as server:
        yield server


@contextlib.contextmanager
def nats_server(path: Path, *, durable: bool) -> Iterator[Server]:
    """NATS with JetStream on disk, synced at every write, as `fsync` is, or every second, as `disk` is.

    Its release has to be 2.11 or later, as the one of `requirements-bench.lock` is.
    """
    port = free_port()
    sync = "always" if durable else '"1s"'
    settings = path / "nats.conf"
    settings.write_text(
        f'host: "{HOST}"\nport: {port}\njetstream {{ store_dir: "{path}", sync_interval: {sync}, '
        # What may wait to be stored, of all connections: by default 10,000 messages, and more are refused.
        "max_file_store: 16GB, max_memory_store: 64MB, max_buffered_msgs: 1000000, max_buffered_size: 1GB }\n"
    )
    with running([str(program("nats-server")), "-c", str(settings)], port) as server:
        yield server


class RedisStream:
    """A stream in Redis by the usual client of Python, written by pipelines."""

    client = "redis-py"

    def __init__(self, port: int) -> None:
        import redis

        self._client: Any = redis.Redis(host=HOST, port=port)

    def write(self, values: Sequence[bytes]) -> None:
        """Append a batch."""
        pipeline = self._client.pipeline(transaction=False)
        for value in values:
            pipeline.xadd("usual", {"v": value})
        pipeline.execute()

    def pages(self, stream: str, page: int) -> Iterator[list[bytes]]:
        """The values of all records, so many at once."""
        last: Any = "-"
        while entries := self._client.xrange(stream, min=last, max="+", count=page):
            yield [fields[b"v"] for _, fields in entries]
            last = b"(" + entries[-1][0]

    def close(self) -> None:
        """End the connection."""
        self._client.close()


class NatsStream:
    """A stream in JetStream by the usual client of Python; the acknowledgements of a batch are awaited together."""

    client = "nats-py"

    def __init__(self, port: int) -> None:
        import nats

        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(nats.connect(f"nats://{HOST}:{port}"))
        self._stream = self._client.jetstream()
        self._loop.run_until_complete(self._stream.add_stream(name="usual", subjects=["usual"]))

    def write(self, values: Sequence[bytes]) -> None:
        """Append a batch."""
        self._loop.run_until_complete(self._publish(values))

    def pages(self, stream: str, page: int) -> Iterator[list[bytes]]:
        """The values of all records, so many at once."""
        from nats.js.api import AckPolicy, ConsumerConfig

        run, config = self._loop.run_until_complete, ConsumerConfig(ack_policy=AckPolicy.NONE)
        subscription = run(self._stream.pull_subscribe(stream, config=config))
        left = run(self._stream.stream_info(stream)).state.messages
        while left > 0:
            found = run(subscription.fetch(min(page, left), timeout=START_SECONDS))
            left -= len(found)
            yield [message.data for message in found]
        run(subscription.unsubscribe())

    def close(self) -> None:
        """End the connection."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    async def _publish(self, values: Sequence[bytes]) -> None:
        await asyncio.gather(*[self._stream.publish("usual", value) for value in values])


SERVERS: dict[str, tuple[Any, Any]] = {"redis": (redis_server, RedisStream), "nats": (nats_server, NatsStream)}
"""How each server is started, and its usual client."""


def redis_benchmark(server: Server, connections: int, size: int, seconds: float) -> Load:
    """Appends of one record by Redis's own tool, over so many connections, for about so long.

    A short run before it warms the server and says how many appends these are.
    """
    rate = _benchmark(server, max(200, 2 * connections), connections, size).figures("short")["short rate"]
    return _benchmark(server, max(connections, int(rate * seconds)), connections, size)


def _benchmark(server: Server, requests: int, connections: int, size: int) -> Load:
    command = [str(program("redis-benchmark")), "-h", HOST, "-p", str(server.port), "-c", str(connections)]
    command += ["-n", str(requests), "--csv", "XADD", "benchmark", "*", "v", "x" * size]
    server_cpu, client_cpu = server.cpu(), _children_cpu()
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rate = float(lines[-1].split('","')[1].strip('"'))
    return Load(requests, requests / rate, server.cpu() - server_cpu, _children_cpu() - client_cpu)


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
