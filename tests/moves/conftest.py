"""One S3 server and one etcd for all tests of moves, and directories in each mode of storage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.blobs import servers
from tests.blobs.servers import Server
from tests.metadata.etcd.cluster import Cluster, running
from tests.moves import rig
from tests.moves.rig import Land

WITH_SERVERS = (pytest.mark.slow, pytest.mark.xdist_group("moves-servers"))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("etcd"), 1) as cluster:
        yield cluster


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> str:
    """A prefix that no other test uses."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", request.node.nodeid).strip("-")[-90:]


@pytest.fixture(
    params=[
        "local",
        "shared_fs",
        pytest.param("object_store", marks=WITH_SERVERS),
        pytest.param("object_store, etcd", marks=WITH_SERVERS),
    ]
)
def land(request: pytest.FixtureRequest, tmp_path: Path, folder: str) -> Land:
    """Directories between which a topic can move, in each mode."""
    if request.param == "local":
        return rig.local(tmp_path)
    if request.param == "shared_fs":
        return rig.shared_fs(tmp_path)
    server = request.getfixturevalue("s3_server")
    land = rig.object_store(tmp_path, server.endpoint, folder)
    if request.param == "object_store":
        return land
    return rig.in_etcd(land, request.getfixturevalue("etcd").endpoints, f"/{folder}")
