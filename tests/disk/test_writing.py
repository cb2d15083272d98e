"""Steps on a disk, taken over short writes and failures."""

from __future__ import annotations

import errno

import pytest

from forebay.disk import make_directories, replace_file, write_all
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.testing.simulated.faults import plan_faults


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk(directories=["/data"])


def test_write_all_goes_on_after_short_writes(disk: SimulatedDisk) -> None:
    file = disk.create("/data/a")
    disk.shorten_at(disk.calls_reached, 3)
    disk.shorten_at(disk.calls_reached + 1, 4)

    write_all(file, memoryview(b"0123456789").cast("H"), 2)

    assert file.read_at(99, 0) == b"\0\x000123456789"
    assert [call.kind for call in disk.calls].count("write") == 3


def test_a_write_that_takes_nothing_is_an_error(disk: SimulatedDisk) -> None:
    file = disk.create("/data/a")
    disk.shorten_at(disk.calls_reached, 3)
    disk.shorten_at(disk.calls_reached + 1, 0)

    with pytest.raises(OSError, match="took none of 7 bytes at 3"):
        write_all(file, b"0123456789", 0)


def test_replace_file_fails_whole_or_not_at_all_at_every_call() -> None:
    healthy = SimulatedDisk(directories=["/data"])
    replace_file(healthy, "/data/a", b"the old content")
    replace_file(healthy, "/data/a", b"the new content, longer")
    faults = list(plan_faults(healthy.calls))
    assert len(faults) > 20

    for fault in faults:
        disk = SimulatedDisk(directories=["/data"])
        disk.plan(fault)
        outcome = [_try_replacing(disk, content) for content in (b"the old content", b"the new content, longer")]

        if disk.exists("/data/a"):
            content = disk.open("/data/a").read_at(99, 0)
            assert content in (b"the old content", b"the new content, longer"), fault
        if outcome[1]:
            assert content == b"the new content, longer", fault
        assert outcome.count(False) <= 1, fault
        assert "a.tmp" not in disk.list_directory("/data"), fault


def test_make_directories_syncs_a_directory_that_a_killed_process_may_have_made(disk: SimulatedDisk) -> None:
    disk.make_directory("/data/x")

    make_directories(disk, "/data/x/y")

    synced = [call.path for call in disk.calls if call.kind == "sync_directory"]
    assert synced == ["/data", "/data/x"]


def test_make_directories_goes_on_below_a_directory_it_may_not_read(disk: SimulatedDisk) -> None:
    disk.fail_when(lambda call: call.kind == "sync_directory", errno.EACCES)

    make_directories(disk, "/data/x")

    assert disk.exists("/data/x")


def _try_replacing(disk: SimulatedDisk, content: bytes) -> bool:
    try:
        replace_file(disk, "/data/a", content)
    except OSError:
        return False
    return True
