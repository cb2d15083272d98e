"""Both disks pass one suite."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.disk import SystemDisk, replace_file
from forebay.testing.contracts.disk import ContractDisk, DiskContract
from forebay.testing.simulated.disk import SimulatedDisk


class TestSystemDisk(DiskContract):
    @pytest.fixture
    def disk(self) -> Iterator[SystemDisk]:
        disk = SystemDisk()
        yield disk
        disk.abandon()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)


class TestSystemDiskWithOneDescriptor(TestSystemDisk):
    """Every handle loses its descriptor to the next; only what the system keeps alive for a descriptor differs."""

    @pytest.fixture
    def disk(self) -> Iterator[SystemDisk]:
        disk = SystemDisk(descriptors_max=1)
        yield disk
        disk.abandon()

    def test_renaming_replaces_and_open_handles_keep_their_file(self, disk: ContractDisk, root: str) -> None:
        replace_file(disk, f"{root}/a", b"old")
        reader = disk.open(f"{root}/a")

        replace_file(disk, f"{root}/a", b"new")

        with pytest.raises(OSError) as raised:
            reader.read_at(9, 0)
        assert raised.value.errno == errno.ESTALE


class TestSimulatedDisk(DiskContract):
    @pytest.fixture
    def disk(self) -> SimulatedDisk:
        return SimulatedDisk(directories=["/data"])

    @pytest.fixture
    def root(self) -> str:
        return "/data"
