"""One server of each kind for the whole run, and a folder of its own in it for each test."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support import servers
from tests.support.servers import Server


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> str:
    """A prefix that no other test uses."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", request.node.nodeid).strip("-")[-150:]
