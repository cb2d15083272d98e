"""Both engines keep the contract: the memory engine, and the segment engine in each durability class."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.disk import SystemDisk
from forebay.testing.contracts.engines import EngineContract
from tests.engines.homes import MemoryHome, SegmentHome


class TestMemoryEngine(EngineContract):
    @pytest.fixture
    def home(self) -> MemoryHome:
        return MemoryHome()


class TestSegmentEngine(EngineContract):
    @pytest.fixture(params=["memory", "disk", "fsync"])
    def home(self, request: pytest.FixtureRequest, tmp_path: Path) -> SegmentHome:
        return SegmentHome(SystemDisk(), str(tmp_path), request.param)
