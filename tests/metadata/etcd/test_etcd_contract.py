"""The store in etcd keeps the contract of every metadata store, on three real members."""

from __future__ import annotations

import pytest

from forebay.metadata import MetadataStore
from forebay.testing.contracts.metadata import MetadataContract
from forebay.testing.contracts.metadata.calls import put
from tests.support.etcd import Cluster


class TestEtcdMetadata(MetadataContract):
    @pytest.fixture(autouse=True)
    def _compacts(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def compact(self, store: MetadataStore) -> None:
        """etcd forgets when its operator says so."""
        put(store, "churn")
        self._cluster.compact()
