"""Every store passes one suite: directories on two disks, buckets on real servers, and the simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.blobs import BlobStore, open_store
from forebay.disk import SystemDisk
from forebay.settings import StoreSettings
from forebay.testing.clock import ManualClock
from forebay.testing.contracts.blobs import BlobContract
from forebay.testing.disk import SimulatedDisk


class TestDirectory(BlobContract):
    @pytest.fixture
    def disk(self) -> Iterator[SystemDisk]:
        disk = SystemDisk()
        yield disk
        disk.abandon()

    @pytest.fixture
    def store(self, disk: SystemDisk, tmp_path: Path) -> BlobStore:
        return open_store(StoreSettings(root=str(tmp_path / "new" / "store")), disk=disk)

    @pytest.fixture
    def twin(self, store: BlobStore, disk: SystemDisk, tmp_path: Path) -> BlobStore:
        return open_store(StoreSettings(root=str(tmp_path / "new" / "store")), disk=disk)


class TestDirectoryOnSimulatedDisk(BlobContract):
    @pytest.fixture
    def disk(self) -> SimulatedDisk:
        return SimulatedDisk()

    @pytest.fixture
    def store(self, disk: SimulatedDisk) -> BlobStore:
        return open_store(StoreSettings(root="/blobs"), disk=disk, clock=ManualClock())

    @pytest.fixture
    def twin(self, store: BlobStore, disk: SimulatedDisk) -> BlobStore:
        return open_store(StoreSettings(root="/blobs"), disk=disk.another_process(), clock=ManualClock(seed=7))


class TestMemory(BlobContract):
    @pytest.fixture
    def store(self) -> BlobStore:
        return open_store(StoreSettings(backend="memory"), disk=SystemDisk())

    @pytest.fixture
    def twin(self, store: BlobStore) -> BlobStore:
        return store
