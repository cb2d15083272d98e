"""One surface: the embedded library, asyncio and clients of a broker have it by type, method by method, and pass its
contract.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

import forebay
from forebay import aio, client, surface
from forebay.routers import AsyncRouters
from forebay.surface import Log, awaiting, blocking
from forebay.testing.contracts.surface import BesideContract, LastingContract, SurfaceContract, called
from tests.support.brokers import running_broker

AsLog = Callable[[awaiting.Log], Log]
_NAMES: Final = (
    "BulkLoads",
    "Consumer",
    "Group",
    "Log",
    "Reader",
    "Routers",
    "Stream",
    "SubscribableTopic",
    "Subscription",
    "TopicHandle",
)
_OF_SERVERS: Final = {"who"}
"""What a server gives beyond the surface: for which of its callers it reads."""
_OF_CALLS: Final = {"follow": {"stop"}, "take": {"bytes_max"}, "peek": {"bytes_max"}}
"""What a call takes and the surface does not: an event of `threading`; for how many bytes a server has room."""


def embedded(path: str | Path) -> Log:
    """Shows the type checker that a log of this process has the surface."""
    return forebay.open(path)


def awaited(path: str | Path, *, read_only: bool = False) -> awaiting.Log:
    """Shows the type checker that a log for asyncio has the surface."""
    return aio.open(path, read_only=read_only)


def connected(url: str) -> Log:
    """Shows the type checker that a client has the surface."""
    return forebay.connect(url)


def awaited_connected(url: str) -> awaiting.Log:
    """Shows the type checker that a client for asyncio has the surface."""
    return aio.connect(url)


class RemoteHome:
    def __init__(self, url: str) -> None:
        self._url = url

    def open(self) -> Log:
        return connected(self._url)


class AwaitedRemoteHome:
    def __init__(self, url: str, as_log: AsLog) -> None:
        self._url = url
        self._as_log = as_log

    def open(self) -> Log:
        return self._as_log(awaited_connected(self._url)).__enter__()


class DirectoryHome:
    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> Log:
        return embedded(self._path)


class EmbeddedMemory:
    def open(self) -> Log:
        return embedded(":memory:")


class AwaitedHome:
    def __init__(self, path: str, as_log: AsLog) -> None:
        self._path = path
        self._as_log = as_log

    def open(self) -> Log:
        log = self._as_log(awaited(self._path))
        return log.__enter__()


@pytest.fixture
def as_log() -> Iterator[AsLog]:
    with called() as as_log:
        yield as_log


class TestEmbeddedDirectory(LastingContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> DirectoryHome:
        return DirectoryHome(tmp_path / "log")


class TestEmbeddedMemory(SurfaceContract):
    @pytest.fixture
    def home(self) -> EmbeddedMemory:
        return EmbeddedMemory()


class TestAwaitedDirectory(LastingContract):
    @pytest.fixture
    def home(self, tmp_path: Path, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(str(tmp_path / "log"), as_log)


class TestAwaitedMemory(SurfaceContract):
    @pytest.fixture
    def home(self, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(":memory:", as_log)


class TestConnected(LastingContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> Iterator[RemoteHome]:
        with running_broker(tmp_path / "log") as broker:
            yield RemoteHome(broker.url)


class TestAwaitedConnected(LastingContract):
    @pytest.fixture
    def home(self, tmp_path: Path, as_log: AsLog) -> Iterator[AwaitedRemoteHome]:
        with running_broker(tmp_path / "log") as broker:
            yield AwaitedRemoteHome(broker.url, as_log)


class TestEmbeddedBeside(BesideContract):
    @pytest.fixture
    def logs(self, tmp_path: Path) -> Iterator[tuple[Log, Log]]:
        with forebay.open(tmp_path) as owner, forebay.open(tmp_path, read_only=True) as beside:
            yield owner, beside


class TestAwaitedBeside(BesideContract):
    @pytest.fixture
    def logs(self, tmp_path: Path, as_log: AsLog) -> Iterator[tuple[Log, Log]]:
        with forebay.open(tmp_path) as owner, as_log(awaited(tmp_path, read_only=True)) as beside:
            yield owner, beside


@pytest.mark.parametrize("name", [name for name in _NAMES if name != "Stream"])
def test_both_kinds_of_surface_have_the_same_methods(name: str) -> None:
    calls, awaits = (_methods(getattr(kind, name)) for kind in (blocking, awaiting))

    assert calls.keys() == awaits.keys()
    for method, signature in calls.items():
        assert signature.parameters == awaits[method].parameters, method


@pytest.mark.parametrize(
    ("implementation", "protocol"),
    [
        (forebay.Storage, surface.Log),
        (forebay.Topic, surface.TopicHandle),
        (forebay.Reader, surface.Reader),
        (forebay.Group, surface.Group),
        (forebay.TopicLoads, surface.BulkLoads),
        (forebay.Routers, surface.Routers),
        (AsyncRouters, awaiting.Routers),
        (forebay.Topic, surface.SubscribableTopic),
        (forebay.Subscription, surface.Subscription),
        (forebay.Consumer, surface.Consumer),
        (aio.AsyncLog, awaiting.Log),
        (aio.AsyncTopic, awaiting.TopicHandle),
        (aio.AsyncReader, awaiting.Reader),
        (aio.AsyncGroup, awaiting.Group),
        (aio.AsyncLoads, awaiting.BulkLoads),
        (aio.AsyncTopic, awaiting.SubscribableTopic),
        (aio.AsyncSubscription, awaiting.Subscription),
        (aio.AsyncConsumer, awaiting.Consumer),
        (client.RemoteLog, surface.Log),
        (client.RemoteTopic, surface.SubscribableTopic),
        (client.RemoteSubscription, surface.Subscription),
        (client.RemoteConsumer, surface.Consumer),
        (client.RemoteDeadLetters, surface.DeadLetters),
        (client.RemoteReader, surface.Reader),
        (client.RemoteGroup, surface.Group),
        (client.RemoteLoads, surface.BulkLoads),
        (client.RemoteRouters, surface.Routers),
        (client.AsyncRemoteLog, awaiting.Log),
        (client.AsyncRemoteTopic, awaiting.SubscribableTopic),
        (client.AsyncRemoteSubscription, awaiting.Subscription),
        (client.AsyncRemoteConsumer, awaiting.Consumer),
        (client.AsyncRemoteDeadLetters, awaiting.DeadLetters),
        (client.AsyncRemoteReader, awaiting.Reader),
        (client.AsyncRemoteGroup, awaiting.Group),
        (client.AsyncRemoteLoads, awaiting.BulkLoads),
        (client.AsyncRemoteRouters, awaiting.Routers),
    ],
)
def test_implementations_have_the_parameters_and_defaults_of_the_surface(implementation: type, protocol: type) -> None:
    """The type checker compares types; that a default is the same one is shown here."""
    for method, wanted in _methods(protocol).items():
        given = inspect.signature(getattr(implementation, method)).parameters
        apart = _OF_CALLS.get(method, set()) | _OF_SERVERS
        own = {name: given[name] for name in given if name not in apart}
        assert [(p.name, p.kind, p.default) for p in own.values()] == [
            (p.name, p.kind, p.default) for p in wanted.parameters.values()
        ], method


def _methods(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(method)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("__")
    }
