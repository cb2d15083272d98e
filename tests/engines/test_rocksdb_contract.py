"""The RocksDB engine keeps the contract of all engines, in both of its durability classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.testing.contracts.engines import EngineContract
from tests.engines.lookup_homes import RocksHome, rocks_home


class TestRocksEngine(EngineContract):
    @pytest.fixture(params=["disk", "fsync"])
    def home(self, request: pytest.FixtureRequest, tmp_path: Path) -> RocksHome:
        return rocks_home(str(tmp_path / "rocksdb"), request.param)
