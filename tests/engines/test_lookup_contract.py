"""Look-ups, deletes and eviction: one contract, kept by every engine that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.testing.contracts.lookups import LookupContract
from forebay.testing.contracts.removals import RemovalContract
from tests.engines.beside import BesideHome, BesideRestlessHome
from tests.engines.lookup_homes import LookupMemoryHome, LookupSegmentHome, RestlessHome, RocksHome


class TestMemoryEngine(LookupContract, RemovalContract):
    @pytest.fixture
    def home(self) -> LookupMemoryHome:
        return LookupMemoryHome()


class TestRocksEngine(LookupContract, RemovalContract):
    @pytest.fixture(params=["disk", "fsync"])
    def home(self, request: pytest.FixtureRequest, tmp_path: Path) -> RocksHome:
        return RocksHome(str(tmp_path / "rocksdb"), request.param)


@pytest.mark.slow
class TestSegmentEngine(LookupContract, RemovalContract):
    @pytest.fixture(params=["memory", "disk", "fsync"])
    def home(self, request: pytest.FixtureRequest, tmp_path: Path) -> LookupSegmentHome:
        return LookupSegmentHome(str(tmp_path), request.param)


@pytest.mark.slow
class TestSegmentEngineAllSealed(RemovalContract, LookupContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> LookupSegmentHome:
        return RestlessHome(str(tmp_path), "disk")


@pytest.mark.slow
class TestSegmentEngineReadBesideItsOwner(LookupContract, RemovalContract):
    @pytest.fixture(params=[BesideHome, BesideRestlessHome])
    def home(self, request: pytest.FixtureRequest, tmp_path: Path) -> LookupSegmentHome:
        home: LookupSegmentHome = request.param(str(tmp_path), "disk")
        return home

    # It reads until it has caught up with three writers that never pause: from beside them that has no end.
    test_deletes_among_appends_end_what_came_before_and_nothing_behind = None  # type: ignore[assignment]
