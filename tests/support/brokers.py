"""A broker for tests: in a thread of this process, or as a process of its own."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx
import uvloop

from forebay.broker.app import BrokerPhase
from forebay.broker.heap import SettledHeap
from forebay.broker.serve import BrokerRun, bound_socket
from forebay.metadata import MetadataStore
from forebay.settings import Settings
from forebay.storage import Storage
from forebay.testing.inside import inside

START_SECONDS = 60.0


def plain_client(url: str) -> httpx.Client:
    """A client without TLS, with any number of connections: loading all authorities takes as long as many requests."""
    no_limits = httpx.Limits(max_connections=None)
    return httpx.Client(base_url=url, timeout=START_SECONDS, limits=no_limits, verify=False)


class RunningBroker:
    """A broker that serves, and where."""

    def __init__(self, url: str, process: BrokerRun, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.process = process
        self.loop = loop

    def stop(self) -> None:
        """Ask it to end, as a signal would."""
        self.loop.call_soon_threadsafe(self.process.stop)

    def metadata(self) -> MetadataStore:
        """The metadata store of its log."""
        return self.process.broker.service.metadata

    def log(self) -> Storage:
        """Its log, for threads."""
        return inside(self.process.broker.service).log

    def client(self) -> httpx.Client:
        """A plain HTTP client of it."""
        return plain_client(self.url)


def server_settings(*, metrics: Sequence[str] = (), **server: object) -> Settings:
    """Settings of a broker on a free port of the loopback address; `metrics` are topics with numbers of their own."""
    tree = {"server": {"port": 0, **server}, "metrics": {"topics": list(metrics)}}
    return Settings.load(None, tree, environment={})


@contextmanager
def running_broker(
    path: Path | str, settings: Settings | None = None, *, ready: bool = True, heap: SettledHeap | None = None
) -> Iterator[RunningBroker]:
    """A broker in a thread, stopped in order at the end; what ends it by itself is raised there."""
    settings = settings or server_settings()
    started: list[RunningBroker] = []
    bound = threading.Event()
    failed: list[BaseException] = []

    async def run() -> None:
        process = BrokerRun(path, settings, heap)
        with bound_socket(settings.server) as socket:

            def note(url: str) -> None:
                started.append(RunningBroker(url, process, asyncio.get_running_loop()))
                bound.set()

            await process.run(socket, note)

    def serve() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failed.append(error)
        finally:
            bound.set()

    thread = threading.Thread(target=serve, name="broker")
    thread.start()
    try:
        assert bound.wait(START_SECONDS)
        if failed:
            raise failed[0]
        broker = started[0]
        if ready:
            wait_ready(broker)
        yield broker
    finally:
        if started:
            started[0].stop()
        thread.join(START_SECONDS)
    assert not thread.is_alive(), "the broker has not stopped"
    if failed:
        raise failed[0]


def wait_ready(broker: RunningBroker) -> None:
    """Return when the broker serves all routes."""
    done = threading.Event()

    def look() -> None:
        if broker.process.broker.phase is BrokerPhase.STARTING:
            broker.loop.call_later(0.005, look)
        else:
            done.set()

    broker.loop.call_soon_threadsafe(look)
    assert done.wait(START_SECONDS)


class BrokerCommand:
    """`forebay serve` as a process of its own."""

    def __init__(self, data: Path, *arguments: str, is_verbose: bool = True, stops: Path | None = None) -> None:
        """`is_verbose`: every request has a line in the log. `stops`: where it notes what stopped its loop."""
        words = ["serve", "--data", str(data), "--set", "server.port=0", "--log-format", "json", *arguments]
        if is_verbose:
            words.append("--verbose")
        # Not a pipe: one that is not read would stop the broker at its next log line.
        self._logged = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the broker
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                *(["forebay.cli"] if stops is None else ["tests.support.stops", str(stops)]),
                *words,
            ],
            stdout=subprocess.PIPE,
            stderr=self._logged,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"https?://\S+?(?=;)", line)
        if found is None:
            self.process.communicate(timeout=START_SECONDS)
            with self._logged:
                raise AssertionError(f"the broker did not start: {line} {self.logged()}")
        self.url = found[0]

    def client(self) -> httpx.Client:
        """A plain HTTP client of it, once it is ready."""
        # Not the same client: one that has asked cannot be entered any more.
        with plain_client(self.url) as asking:
            while asking.get("/v1/ready").status_code != httpx.codes.OK:
                pass
        return plain_client(self.url)

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal and wait; the exit code, and what it has logged."""
        self.process.send_signal(number)
        self.process.communicate(timeout=START_SECONDS)
        return self.process.returncode, self.logged()

    def logged(self) -> str:
        """What it has written to stderr. For a broker that has ended."""
        self._logged.seek(0)
        return self._logged.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self._logged.close()
