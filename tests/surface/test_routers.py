"""Routers have one surface: embedded, for asyncio, and on a broker for threads and asyncio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

import forebay
from forebay import aio
from forebay.routers import AsyncRouters
from forebay.surface import Log, Routers, awaiting
from forebay.testing.contracts.routers import RoutedLog, RouterContract
from forebay.testing.contracts.surface import called
from tests.support.brokers import running_broker

AsLog = Callable[[awaiting.Log], Log]


def embedded(log: forebay.Storage) -> Routers:
    """Shows the type checker that routers of a log of this process have the surface."""
    return forebay.Routers(log)


def awaited(log: aio.AsyncLog) -> awaiting.Routers:
    """Shows the type checker that routers of a log for asyncio have it."""
    return AsyncRouters(log)


def remote(log: forebay.client.RemoteLog) -> Routers:
    """Shows the type checker that routers of a broker have it."""
    return log.routers


def awaited_remote(log: forebay.client.AsyncRemoteLog) -> awaiting.Routers:
    """Shows the type checker that routers of a broker for asyncio have it."""
    return log.routers


@pytest.fixture
def as_log() -> Iterator[AsLog]:
    with called() as as_log:
        yield as_log


def _called(routers: awaiting.Routers, as_log: AsLog) -> Routers:
    return cast("Routers", as_log(cast("awaiting.Log", routers)))


class TestEmbedded(RouterContract):
    @pytest.fixture
    def routed(self, tmp_path: Path) -> Iterator[RoutedLog]:
        with forebay.open(tmp_path) as log:
            routers = forebay.Routers(log)
            with routers.running():
                yield RoutedLog(log, routers)


class TestAwaited(RouterContract):
    @pytest.fixture
    def routed(self, tmp_path: Path, as_log: AsLog) -> Iterator[RoutedLog]:
        log = aio.open(tmp_path)
        with as_log(log) as blocking:
            routers = AsyncRouters(log)
            started = cast("forebay.Routers", _called(routers, as_log))
            started.start()
            yield RoutedLog(blocking, started)
            started.stop()


class TestConnected(RouterContract):
    @pytest.fixture
    def routed(self, tmp_path: Path) -> Iterator[RoutedLog]:
        with running_broker(tmp_path / "data") as broker, forebay.connect(broker.url) as log:
            yield RoutedLog(log, remote(log))


class TestAwaitedConnected(RouterContract):
    @pytest.fixture
    def routed(self, tmp_path: Path, as_log: AsLog) -> Iterator[RoutedLog]:
        with running_broker(tmp_path / "data") as broker:
            log = aio.connect(broker.url)
            with as_log(log) as blocking:
                yield RoutedLog(blocking, _called(awaited_remote(log), as_log))
