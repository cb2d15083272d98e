"""Every store passes one suite: directories on two disks, buckets on real servers, and the simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.blobs import BlobStore, open_store
from forebay.disk import SystemDisk
from forebay.settings import StoreSettings
from forebay.testing.contracts.blobs import BlobContract
from forebay.testing.simulated.blobs import SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.disk import SimulatedDisk
from tests.support.servers import Server, azure_settings, s3_settings


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


class TestSimulated(BlobContract):
    @pytest.fixture
    def store(self) -> BlobStore:
        return SimulatedBlobs()

    @pytest.fixture
    def twin(self, store: SimulatedBlobs) -> BlobStore:
        return store.another_process()


class TestMemory(BlobContract):
    @pytest.fixture
    def store(self) -> BlobStore:
        return open_store(StoreSettings(backend="memory"), disk=SystemDisk())

    @pytest.fixture
    def twin(self, store: BlobStore) -> BlobStore:
        return store


class _OnAServer(BlobContract):
    """In a folder of its own for each test, so that one server will do for all."""

    @pytest.fixture
    def store(self, settings: StoreSettings) -> Iterator[BlobStore]:
        store = open_store(settings, disk=SystemDisk())
        yield store
        store.close()

    @pytest.fixture
    def twin(self, settings: StoreSettings) -> Iterator[BlobStore]:
        store = open_store(settings, disk=SystemDisk())
        yield store
        store.close()


@pytest.mark.slow
@pytest.mark.xdist_group("blob-servers")
class TestSeaweed(_OnAServer):
    @pytest.fixture
    def settings(self, seaweed_server: Server, folder: str) -> StoreSettings:
        return s3_settings(seaweed_server.endpoint, folder)


@pytest.mark.slow
@pytest.mark.xdist_group("blob-servers")
class TestMoto(_OnAServer):
    @pytest.fixture
    def settings(self, moto_server: Server, folder: str) -> StoreSettings:
        return s3_settings(moto_server.endpoint, folder)


@pytest.mark.slow
@pytest.mark.xdist_group("blob-servers")
class TestAzurite(_OnAServer):
    @pytest.fixture
    def settings(self, azurite_server: Server, folder: str) -> StoreSettings:
        return azure_settings(azurite_server.endpoint, folder)
