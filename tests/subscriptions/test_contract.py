"""The contracts of subscriptions, dead letters and lossy topics: embedded and for asyncio, on disk, in memory, and over
HTTP by both clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import forebay
from forebay import aio, client
from forebay.surface import Log, SubscribableTopic, awaiting
from forebay.testing.contracts.deadletters import DeadLetterContract, LastingDeadLetterContract
from forebay.testing.contracts.lossy import LossyContract
from forebay.testing.contracts.subscriptions import LastingSubscriptionContract, SubscriptionContract
from forebay.testing.contracts.surface import called
from tests.support.brokers import running_broker

AsLog = Callable[[awaiting.Log], Log]


def embedded(topic: forebay.Topic) -> SubscribableTopic:
    """Shows the type checker that a topic of this process has the surface."""
    return topic


def awaited(topic: aio.AsyncTopic) -> awaiting.SubscribableTopic:
    """Shows the type checker that a topic for asyncio has the surface."""
    return topic


def connected(topic: client.RemoteTopic) -> SubscribableTopic:
    """Shows the type checker that a topic on a broker has the surface."""
    return topic


def awaited_connected(topic: client.AsyncRemoteTopic) -> awaiting.SubscribableTopic:
    """Shows the type checker that a topic on a broker has the surface for asyncio."""
    return topic


class EmbeddedHome:
    def __init__(self, path: Path | str) -> None:
        self._path = path

    def open(self) -> Log:
        return forebay.open(self._path)


class AwaitedHome:
    def __init__(self, path: Path | str, as_log: AsLog) -> None:
        self._path = path
        self._as_log = as_log

    def open(self) -> Log:
        return self._as_log(aio.open(self._path)).__enter__()


@pytest.fixture
def as_log() -> Iterator[AsLog]:
    with called() as as_log:
        yield as_log


@pytest.mark.slow
class TestEmbeddedDirectory(LastingSubscriptionContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> EmbeddedHome:
        return EmbeddedHome(tmp_path)


class TestEmbeddedMemory(SubscriptionContract):
    @pytest.fixture
    def home(self) -> EmbeddedHome:
        return EmbeddedHome(":memory:")


@pytest.mark.slow
class TestAwaitedDirectory(LastingSubscriptionContract):
    @pytest.fixture
    def home(self, tmp_path: Path, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(tmp_path, as_log)


class TestAwaitedMemory(SubscriptionContract):
    @pytest.fixture
    def home(self, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(":memory:", as_log)


@pytest.mark.slow
class TestDeadLettersEmbeddedDirectory(LastingDeadLetterContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> EmbeddedHome:
        return EmbeddedHome(tmp_path)


class TestDeadLettersEmbeddedMemory(DeadLetterContract):
    @pytest.fixture
    def home(self) -> EmbeddedHome:
        return EmbeddedHome(":memory:")


class TestLossyEmbeddedMemory(LossyContract):
    @pytest.fixture
    def home(self) -> EmbeddedHome:
        return EmbeddedHome(":memory:")


@pytest.mark.slow
class TestDeadLettersAwaitedDirectory(LastingDeadLetterContract):
    @pytest.fixture
    def home(self, tmp_path: Path, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(tmp_path, as_log)


@pytest.mark.slow
class TestLossyAwaitedDirectory(LossyContract):
    @pytest.fixture
    def home(self, tmp_path: Path, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(tmp_path, as_log)


class TestDeadLettersAwaitedMemory(DeadLetterContract):
    @pytest.fixture
    def home(self, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(":memory:", as_log)


class RestartedHome:
    """A broker that is another process each time: what it knew of consumers is gone."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack

    def open(self) -> Log:
        self._stack.close()
        return forebay.connect(self._stack.enter_context(running_broker(self._path)).url)


class AwaitedRemoteHome:
    def __init__(self, url: str, as_log: AsLog) -> None:
        self._url = url
        self._as_log = as_log

    def open(self) -> Log:
        return self._as_log(aio.connect(self._url)).__enter__()


@pytest.mark.slow
class TestConnected(LastingSubscriptionContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> Iterator[RestartedHome]:
        with ExitStack() as stack:
            yield RestartedHome(tmp_path / "log", stack)


@pytest.mark.slow
class TestAwaitedConnected(LastingSubscriptionContract):
    @pytest.fixture
    def home(self, tmp_path: Path, as_log: AsLog) -> Iterator[AwaitedRemoteHome]:
        with running_broker(tmp_path / "log") as broker:
            yield AwaitedRemoteHome(broker.url, as_log)


@pytest.mark.slow
class TestDeadLettersConnected(LastingDeadLetterContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> Iterator[RestartedHome]:
        with ExitStack() as stack:
            yield RestartedHome(tmp_path / "log", stack)


@pytest.mark.slow
class TestLossyConnected(LossyContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> Iterator[RestartedHome]:
        with ExitStack() as stack:
            yield RestartedHome(tmp_path / "log", stack)


@pytest.mark.slow
class TestDeadLettersAwaitedConnected(LastingDeadLetterContract):
    @pytest.fixture
    def home(self, tmp_path: Path, as_log: AsLog) -> Iterator[AwaitedRemoteHome]:
        with running_broker(tmp_path / "log") as broker:
            yield AwaitedRemoteHome(broker.url, as_log)
