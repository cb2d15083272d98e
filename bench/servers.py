"""Peers that are servers: started on 127.0.0.1 for the run of a case and stopped after it."""

# ruff: noqa: PLC0415 - what is not installed is left out

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
def running(command: Sequence[str], port: int) -> Iterator[None]:
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
        yield
    finally:
        server.terminate()
        try:
            server.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextlib.contextmanager
def redis_server(path: Path, *, durable: bool) -> Iterator[int]:
    """Redis with an append-only file, synced at every write or by the system alone; gives its port."""
    port = free_port()
    sync = "always" if durable else "no"
    command = [str(program("redis-server")), "--bind", HOST, "--port", str(port), "--dir", str(path), "--save", ""]
    with running([*command, "--appendonly", "yes", "--appendfsync", sync], port):
        yield port


@contextlib.contextmanager
def nats_server(path: Path, *, durable: bool) -> Iterator[int]:
    """NATS with JetStream on disk, synced at every write or at its leisure; gives its port."""
    port = free_port()
    sync = "always" if durable else '"2m"'
    settings = path / "nats.conf"
    settings.write_text(
        f'host: "{HOST}"\nport: {port}\njetstream {{ store_dir: "{path}", sync_interval: {sync}, '
        "max_file_store: 4GB, max_memory_store: 64MB }\n"
    )
    with running([str(program("nats-server")), "-c", str(settings)], port):
        yield port


class RedisStream:
    """A stream in Redis, written by pipelines."""

    def __init__(self, port: int) -> None:
        import redis

        self._client = redis.Redis(host=HOST, port=port)

    def prepare(self, values: Sequence[bytes], first: int) -> Any:
        return values

    def write(self, prepared: Any) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for value in prepared:
            pipeline.xadd("t", {"v": value})
        pipeline.execute()

    def values(self) -> Iterator[bytes]:
        client: Any = self._client
        last: Any = "-"
        while entries := client.xrange("t", min=last, max="+", count=10_000):
            for _, fields in entries:
                yield fields[b"v"]
            last = b"(" + entries[-1][0]

    def close(self) -> None:
        self._client.close()


class NatsStream:
    """A stream in JetStream; a batch is published at once and its acknowledgements awaited together."""

    def __init__(self, port: int) -> None:
        import nats

        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(nats.connect(f"nats://{HOST}:{port}"))
        self._stream = self._client.jetstream()
        self._loop.run_until_complete(self._stream.add_stream(name="t", subjects=["t"]))

    def prepare(self, values: Sequence[bytes], first: int) -> Any:
        return values

    def write(self, prepared: Any) -> None:
        self._loop.run_until_complete(self._publish(prepared))

    def produce(self, values: Sequence[bytes], producers: int) -> None:
        """Each of the producers publishes its share one by one, awaiting every acknowledgement."""

        async def one(share: Sequence[bytes]) -> None:
            for value in share:
                await self._stream.publish("t", value)

        async def everyone() -> None:
            await asyncio.gather(*[one(values[number::producers]) for number in range(producers)])

        self._loop.run_until_complete(everyone())

    def values(self) -> Iterator[bytes]:
        for sequence in range(1, self.count() + 1):
            yield self._loop.run_until_complete(self._stream.get_msg("t", sequence)).data or b""

    def count(self) -> int:
        """How many messages the stream holds."""
        found: int = self._loop.run_until_complete(self._stream.stream_info("t")).state.messages
        return found

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    async def _publish(self, values: Sequence[bytes]) -> None:
        await asyncio.gather(*[self._stream.publish("t", value) for value in values])


SERVERS: dict[str, tuple[Any, Any]] = {"redis": (redis_server, RedisStream), "nats": (nats_server, NatsStream)}


@contextlib.contextmanager
def opened(name: str, path: Path, *, durable: bool) -> Iterator[Any]:
    """A server's stream, over a fresh server."""
    serve, client = SERVERS[name]
    with serve(path, durable=durable) as port:
        stream = client(port)
        try:
            yield stream
        finally:
            stream.close()


def redis_benchmark(port: int, requests: int, connections: int, size: int) -> float:
    """Appends to a stream per second as Redis's own tool measures them."""
    value = "x" * size
    command = [str(program("redis-benchmark")), "-h", HOST, "-p", str(port), "-c", str(connections)]
    command += ["-n", str(requests), "--csv", "XADD", "b", "*", "v", value]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return float(lines[-1].split('","')[1].strip('"'))
