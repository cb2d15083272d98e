"""The segment engine keeps the contract of look-ups, deletes and eviction, whatever its files are doing meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.disk import SystemDisk
from forebay.engines import SegmentEngine
from forebay.shard import SegmentShard, ShardRef
from forebay.testing.clock import ManualClock
from forebay.testing.contracts.lookups import LookupContract
from forebay.testing.contracts.removals import RemovalContract
from forebay.wal.staging import Ticket
from tests.engines.homes import SegmentHome
from tests.engines.lookup_homes import limited_spec


class LookupSegmentHome(SegmentHome):
    """The segment engine in a directory of the machine."""

    def __init__(self, path: Path, durability: str) -> None:
        self.clock = ManualClock()
        super().__init__(SystemDisk(), str(path), durability, clock=self.clock)

    def open(self) -> SegmentEngine:
        engine = super().open()
        engine._on_open = self._opened
        return engine

    def _opened(self, shard: SegmentShard) -> None:
        settle = shard.settle

        def settled(ticket: Ticket) -> int:
            offset = settle(ticket)
            self.settled(shard)
            return offset

        shard.settle = settled

    def settled(self, shard: SegmentShard) -> None:
        """What time would do to class `memory`: no thread is here for it."""
        if self._durability == "memory":
            shard.commit()

    def ref(self, partition: int = 0, **limits: int | str | None) -> ShardRef:
        return ShardRef(limited_spec("segment", self._durability, **limits), partition)


class RestlessHome(LookupSegmentHome):
    """The same, but each append is sealed and made history before the next: all is read from sealed files."""

    def settled(self, shard: SegmentShard) -> None:
        shard.rotate()
        shard.upkeep.seal_rotated()
        shard.archive.catch_up()


class TestSegmentEngine(LookupContract, RemovalContract):
    @pytest.fixture(params=["memory", "disk", "fsync"])
    def home(self, request: pytest.FixtureRequest, tmp_path: Path) -> LookupSegmentHome:
        return LookupSegmentHome(tmp_path, request.param)


class TestSegmentEngineAllSealed(RemovalContract, LookupContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> LookupSegmentHome:
        return RestlessHome(tmp_path, "disk")
