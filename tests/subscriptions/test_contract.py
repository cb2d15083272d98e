"""The contracts of subscriptions, dead letters and lossy topics: embedded and for asyncio, on disk and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay import aio
from forebay.surface import Log, SubscribableTopic, awaiting
from forebay.testing.contracts.deadletters import DeadLetterContract, LastingDeadLetterContract
from forebay.testing.contracts.lossy import LossyContract
from forebay.testing.contracts.subscriptions import LastingSubscriptionContract, SubscriptionContract
from forebay.testing.contracts.surface import called

AsLog = Callable[[awaiting.Log], Log]


def embedded(topic: forebay.Topic) -> SubscribableTopic:
    """Shows the type checker that a topic of this process has the surface."""
    return topic


def awaited(topic: aio.AsyncTopic) -> awaiting.SubscribableTopic:
    """Shows the type checker that a topic for asyncio has the surface."""
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


class TestEmbeddedDirectory(LastingSubscriptionContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> EmbeddedHome:
        return EmbeddedHome(tmp_path)


class TestEmbeddedMemory(SubscriptionContract):
    @pytest.fixture
    def home(self) -> EmbeddedHome:
        return EmbeddedHome(":memory:")


class TestAwaitedDirectory(LastingSubscriptionContract):
    @pytest.fixture
    def home(self, tmp_path: Path, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(tmp_path, as_log)


class TestAwaitedMemory(SubscriptionContract):
    @pytest.fixture
    def home(self, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(":memory:", as_log)


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


class TestDeadLettersAwaitedDirectory(LastingDeadLetterContract):
    @pytest.fixture
    def home(self, tmp_path: Path, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(tmp_path, as_log)


class TestLossyAwaitedDirectory(LossyContract):
    @pytest.fixture
    def home(self, tmp_path: Path, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(tmp_path, as_log)


class TestDeadLettersAwaitedMemory(DeadLetterContract):
    @pytest.fixture
    def home(self, as_log: AsLog) -> AwaitedHome:
        return AwaitedHome(":memory:", as_log)
