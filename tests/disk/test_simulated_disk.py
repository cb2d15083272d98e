"""The simulated disk and clock themselves: faults strike where asked, processes end, time stands still."""

from __future__ import annotations

import errno

import pytest

from forebay.testing.simulated import trace
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.testing.simulated.faults import Call, plan_faults


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk(directories=["/data"])


def test_the_trace_holds_every_change_and_note_in_order(disk: SimulatedDisk) -> None:
    file = disk.create("/data/a")
    file.write_at(b"abc", 0)
    file.sync()
    disk.note("ack", 1)
    file.truncate(1)
    disk.rename("/data/a", "/data/b")
    disk.link("/data/b", "/data/c")
    disk.unlink("/data/b")
    disk.make_directory("/data/d")
    disk.remove_directory("/data/d")
    disk.sync_directory("/data")
    disk.sync_filesystem("/data")

    data, inode, directory = 2, 3, 4
    assert disk.trace.operations == [
        trace.Create(inode, data, "a"),
        trace.TracedWrite(inode, 0, b"abc"),
        trace.Sync(inode),
        trace.Note("ack", 1),
        trace.Truncate(inode, 1),
        trace.Rename(inode, data, "a", data, "b"),
        trace.Link(inode, data, "c"),
        trace.Unlink(data, "b"),
        trace.MakeDirectory(directory, data, "d"),
        trace.RemoveDirectory(data, "d"),
        trace.SyncDirectory(data),
        trace.SyncFilesystem(),
    ]
    assert disk.trace.notes() == (trace.Note("ack", 1),)
    assert disk.trace.notes(3) == ()


def test_reading_and_what_changes_nothing_leave_no_trace(disk: SimulatedDisk) -> None:
    file = disk.create("/data/a")
    steps = len(disk.trace)

    file.read_at(9, 0)
    file.size()
    file.write_at(b"", 0)
    disk.make_directory("/data")
    disk.list_directory("/data")
    disk.exists("/data")

    assert len(disk.trace) == steps


def test_the_call_of_an_index_fails_once_and_did_nothing(disk: SimulatedDisk) -> None:
    disk.fail_at(1, OSError(errno.EIO))
    file = disk.create("/data/a")

    with pytest.raises(OSError, match="EIO injected at write, call 1") as raised:
        file.write_at(b"abc", 0)

    assert raised.value.errno == errno.EIO
    assert file.size() == 0
    assert file.write_at(b"abc", 0) == 3


def test_errors_come_as_the_class_that_the_system_would_raise(disk: SimulatedDisk) -> None:
    disk.fail_when(lambda call: call.kind == "open", errno.ENOENT)
    disk.create("/data/a")

    with pytest.raises(FileNotFoundError):
        disk.open("/data/a")


def test_calls_that_match_fail_until_healed(disk: SimulatedDisk) -> None:
    disk.fail_when(lambda call: call.kind == "sync", OSError(errno.EIO, "dead"), times=None)
    file = disk.create("/data/a")

    for _ in range(3):
        with pytest.raises(OSError):
            file.sync()
    disk.heal()

    file.sync()
    failed = [step for step in disk.trace.operations if isinstance(step, trace.SyncFailed)]
    assert len(failed) == 3


def test_a_write_may_take_a_part_and_then_fail_or_go_on(disk: SimulatedDisk) -> None:
    file = disk.create("/data/a")
    disk.shorten_at(1, 2)
    disk.fail_at(2, errno.ENOSPC, taken=1)

    assert file.write_at(b"abcdef", 0) == 2
    with pytest.raises(OSError):
        file.write_at(b"cdef", 2)

    assert file.read_at(99, 0) == b"abc"


def test_a_call_may_do_its_work_and_fail_nevertheless(disk: SimulatedDisk) -> None:
    disk.create("/data/a")
    disk.fail_at(1, errno.EIO, after=True)

    with pytest.raises(OSError):
        disk.rename("/data/a", "/data/b")

    assert disk.list_directory("/data") == ["b"]


def test_space_runs_out_and_comes_back(disk: SimulatedDisk) -> None:
    file = disk.create("/data/a")
    disk.free = 5

    assert file.write_at(b"abc", 0) == 3
    assert disk.free_bytes("/data") == 2
    assert file.write_at(b"defg", 3) == 2
    with pytest.raises(OSError) as raised:
        file.write_at(b"f", 5)
    assert raised.value.errno == errno.ENOSPC
    assert file.write_at(b"ABCDE", 0) == 5, "what is there already can be written over"

    file.truncate(1)
    assert disk.free_bytes("/data") == 4
    disk.unlink("/data/a")
    assert disk.free_bytes("/data") == 5


def test_a_frozen_disk_answers_every_call_with_an_error(disk: SimulatedDisk) -> None:
    file = disk.create("/data/a")
    steps = len(disk.trace)
    disk.freeze()

    for call in (lambda: file.write_at(b"x", 0), file.sync, lambda: file.read_at(1, 0), lambda: disk.exists("/data")):
        with pytest.raises(OSError):
            call()
    file.close()

    assert len(disk.trace) == steps


def test_a_lock_dies_with_its_process_and_not_with_another(disk: SimulatedDisk) -> None:
    second, third = disk.another_process(), disk.another_process()
    assert disk.lock("/data/lock") is not None

    third.end_process()
    assert second.lock("/data/lock") is None

    disk.end_process()
    assert second.lock("/data/lock") is not None
    with pytest.raises(OSError):
        disk.exists("/data")


def test_processes_see_one_disk(disk: SimulatedDisk) -> None:
    second = disk.another_process()

    disk.create("/data/a").write_at(b"abc", 0)

    assert second.open("/data/a").read_at(9, 0) == b"abc"
    assert second.trace is disk.trace
    assert second.identity("/data") == disk.identity("/data")


def test_a_reboot_changes_the_identity(disk: SimulatedDisk) -> None:
    before = disk.identity("/data")

    disk.boot = "boot-2"

    assert disk.identity("/data") != before


def test_a_plan_reaches_every_call_with_the_errors_it_can_meet(disk: SimulatedDisk) -> None:
    disk.create("/data/a").write_at(b"abc", 0)

    plan = [str(planned) for planned in plan_faults(disk.calls)]

    assert disk.calls == [Call(0, "create", "/data/a"), Call(1, "write", "/data/a")]
    assert plan == [
        "EIO at call 0 (create /data/a)",
        "ENOSPC at call 0 (create /data/a)",
        "EMFILE at call 0 (create /data/a)",
        "EIO at call 1 (write /data/a)",
        "ENOSPC at call 1 (write /data/a)",
        "short write after 1 bytes at call 1 (write /data/a)",
        "short write after 17 bytes at call 1 (write /data/a)",
        "EIO after 17 bytes at call 1 (write /data/a)",
        "ENOSPC after 9 bytes at call 1 (write /data/a)",
    ]


def test_a_lasting_fault_spares_the_calls_that_cannot_meet_it(disk: SimulatedDisk) -> None:
    file = disk.create("/data/a")
    file.write_at(b"abc", 0)
    full = next(planned for planned in plan_faults(disk.calls, [errno.ENOSPC], lasting=True))
    fresh = SimulatedDisk(directories=["/data"])

    fresh.plan(full)

    for _ in range(2):
        with pytest.raises(OSError):
            fresh.create("/data/a")
    assert fresh.list_directory("/data") == []


def test_time_stands_still_until_turned() -> None:
    clock = ManualClock(1_000)
    assert (clock.now_ms(), clock.monotonic()) == (1_000, 0.0)

    clock.advance(1.5)
    clock.sleep(0.5)
    assert (clock.now_ms(), clock.monotonic()) == (3_000, 2.0)

    clock.jump(-2_500)
    assert (clock.now_ms(), clock.monotonic()) == (500, 2.0)
    with pytest.raises(ValueError):
        clock.advance(-1)


def test_one_seed_gives_the_same_bytes_again() -> None:
    first, again, other = ManualClock(seed=1), ManualClock(seed=1), ManualClock(seed=2)

    assert first.random_bytes(16) == again.random_bytes(16) != other.random_bytes(16)
    assert len(first.random_bytes(16)) == 16
