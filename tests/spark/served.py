"""A topic in every tier that a broker owns, and the options that lead to the broker."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import msgspec

import forebay
from forebay.client import RemoteLog
from forebay.settings import ServerSettings
from tests.spark.mixed import TOPIC, Mixed
from tests.support.brokers import BrokerCommand, running_broker
from tests.support.environments.directories import Environment
from tests.support.ports import free_ports


class ServedMixed(Mixed):
    """The same as `Mixed`, owned by a broker in a thread of this process."""

    def __init__(self, environment: Environment, *, partitions: int = 2, topic: str = TOPIC, port: int = 0) -> None:
        self._held = contextlib.ExitStack()
        settings = msgspec.structs.replace(environment.settings, server=ServerSettings(port=port))
        self.broker = self._held.enter_context(running_broker(environment.root / "one", settings))
        super().__init__(environment, partitions=partitions, topic=topic, log=self.broker.log())

    @property
    def by_broker(self) -> dict[str, str]:
        """By the broker alone."""
        return {"broker": self.broker.url, "topic": self.topic}

    def close(self) -> None:
        self._held.close()


class Restarted:
    """A broker as a process of its own, which can be killed and started again at the same address."""

    def __init__(self, data: Path, *settings: str) -> None:
        (port,) = free_ports(1)
        self._data = data
        self._words = ["--set", f"server.port={port}", *(word for one in settings for word in ("--set", one))]
        self.command = self._started()

    def _started(self) -> BrokerCommand:
        command = BrokerCommand(self._data, *self._words)
        command.client().close()
        return command

    def kill(self) -> None:
        """`kill -9`, and start it again."""
        with self.command:
            self.command.end(signal.SIGKILL)
        self.command = self._started()

    def log(self) -> RemoteLog:
        """A connection to it."""
        return forebay.connect(self.command.url)
