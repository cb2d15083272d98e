"""One real cluster of three for all tests of the etcd store, and stores on it that are closed at the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from forebay.clock import Clock, SystemClock
from forebay.errors import ForebayError
from forebay.metadata.etcd import EtcdMetadata
from forebay.settings import MetadataSettings
from tests.support.etcd import Cluster, running

REQUEST_MS = 30_000
"""Longer than a cluster on a busy machine takes to answer or to elect a leader; a test of the limit names its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:  # all of the run, so that each is worth one comparison and no more
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.xdist_group("etcd"))  # one cluster for the run, not one per worker
            item.add_marker(pytest.mark.slow)


class OpenStore(Protocol):
    """Opens a store on the cluster."""

    def __call__(
        self, *endpoints: str, clock: Clock | None = None, request_timeout_ms: int = REQUEST_MS
    ) -> EtcdMetadata: ...


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("etcd"), 3) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    """Three healthy members without keys or leases."""
    _cluster.start_all()
    _cluster.wipe()
    return _cluster


@pytest.fixture
def open_store(cluster: Cluster) -> Iterator[OpenStore]:
    """Open stores, on all members unless some are named."""
    stores: list[EtcdMetadata] = []

    def opened(*endpoints: str, clock: Clock | None = None, request_timeout_ms: int = REQUEST_MS) -> EtcdMetadata:
        settings = MetadataSettings(
            backend="etcd",
            endpoints=endpoints or cluster.endpoints,
            request_timeout_ms=request_timeout_ms,
            lease_margin_s=1,
        )
        stores.append(EtcdMetadata.open(settings, clock=clock or SystemClock()))
        return stores[-1]

    yield opened
    for store in stores:
        with contextlib.suppress(ForebayError):
            store.close()


@pytest.fixture
def store(open_store: OpenStore) -> EtcdMetadata:
    return open_store()


@pytest.fixture
def restart(open_store: OpenStore) -> Callable[[EtcdMetadata], EtcdMetadata]:
    def restarted(store: EtcdMetadata) -> EtcdMetadata:
        store.close()
        return open_store()

    return restarted
