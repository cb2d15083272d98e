"""After a failed write or sync: what readers saw is there, what failed is gone, and appends go on."""

from __future__ import annotations

import errno
import threading

import msgspec
import pytest

from forebay.errors import Indeterminate, Unavailable
from forebay.records import Gap, Reason
from forebay.testing.checks.history import AppendOutcome
from forebay.testing.checks.invariants import check_log
from forebay.topics import Durability
from forebay.wal.scan import LogScan
from forebay.wal.writer import ActiveFile
from tests.wal.rig import DIRECTORY, SMALL, Rig, Simulated, simulated
from tests.wal.scenarios import fail_next

DISK, FSYNC = Durability.DISK, Durability.FSYNC
LARGE = msgspec.structs.replace(SMALL, rotate_bytes_max=1 << 20)


def _failed_sync(rig: Simulated) -> None:
    fail_next(rig, "sync", errno.EIO)
    with pytest.raises(Unavailable, match="EIO"):
        rig.flush()


def test_pages_that_the_system_dropped_come_back_from_the_cache() -> None:
    rig = Rig(simulated(), DISK, settings=LARGE).open()
    rig.append(3)
    rig.flush()
    rig.append(2)
    rig.append()
    _failed_sync(rig)
    rig.disk.discard_failed(f"{DIRECTORY}/00000000000000000000-00000001.seg")

    assert rig.wal.heal()

    assert rig.append() is AppendOutcome.ACKED
    again = Rig(rig.disk, DISK, epoch=1).open()
    assert check_log(rig.history(), again.reading()) == []
    assert [offset for offset, _ in again.reading().records] == list(range(7))


def test_what_neither_file_nor_cache_gives_back_is_a_lost_range_and_no_more() -> None:
    rig = Rig(simulated(), DISK, settings=LARGE).open()
    rig.append()
    rig.flush()
    for _ in range(4):
        rig.append(size=3000)
    held = rig.wal.tail.cache.next_frame(0)
    assert held is not None
    _failed_sync(rig)
    rig.disk.discard_failed(f"{DIRECTORY}/00000000000000000000-00000001.seg")

    assert rig.wal.heal()

    reading = rig.reading()
    assert reading.gaps == [Gap(1, held.base, Reason.LOST)]
    assert [offset for offset, _ in reading.records] == [0, *range(held.base, 5)]
    assert reading == Rig(rig.disk, DISK, epoch=1).open().reading()


def test_a_failed_append_is_indeterminate_and_gone_once_the_log_has_healed() -> None:
    rig = Rig(simulated(), FSYNC).open()
    rig.append()
    fail_next(rig, "sync", errno.EIO)

    assert rig.append() is AppendOutcome.INDETERMINATE
    assert rig.append() is AppendOutcome.REFUSED
    assert rig.wal.failure is not None and "EIO" in rig.wal.failure
    rig.shard.upkeep.maintain()

    assert [value for _, value in rig.reading().records] == [b"a0.0"]
    assert rig.append() is AppendOutcome.ACKED
    assert check_log(rig.history(), rig.reading()) == []


def test_appends_that_only_waited_when_the_log_failed_were_not_written() -> None:
    """The one whose bytes were on their way is indeterminate, the next in the queue merely unavailable."""
    rig = Rig(simulated(), DISK).open()
    rig.append()
    _, ticket = rig.stage()
    fail_next(rig, "sync", errno.EIO)
    target = rig.wal.begin_background_sync()
    assert target is not None
    with pytest.raises(OSError) as failure:
        target.active.file.sync()
    rig.wal.fail_background_sync(target, failure.value)

    with pytest.raises(Unavailable):
        rig.wal.acknowledge(ticket)  # type: ignore[arg-type]


def test_a_repeat_of_an_append_that_failed_is_taken_as_new_once_healed() -> None:
    rig = Rig(simulated(), FSYNC).open()
    rig.append(producing=(1, 0))
    fail_next(rig, "write", errno.EIO, taken=60)
    assert rig.append(producing=(1, 1)) is AppendOutcome.INDETERMINATE
    rig.shard.upkeep.maintain()

    assert rig.append(producing=(1, 1)) is AppendOutcome.ACKED
    assert rig.append(producing=(1, 0)) is AppendOutcome.ACKED
    assert check_log(rig.history(), rig.reading()) == []


def test_no_file_is_left_behind_while_its_background_sync_is_still_running() -> None:
    """The system reports a failed sync once: were the file rotated meanwhile, no caller would heal it."""
    rig = Rig(simulated(), DISK).open()
    rig.append()
    target = rig.wal.begin_background_sync()
    assert target is not None

    rig.append(size=5000)
    rig.append()
    assert len(rig.wal.files.all) == 1

    rig.wal.end_background_sync(target)
    rig.append()
    assert len(rig.wal.files.all) == 2


def test_a_full_disk_refuses_appends_before_it_is_full_and_takes_them_again() -> None:
    rig = Rig(simulated(), DISK, settings=msgspec.structs.replace(SMALL, free_bytes_min=10_000)).open()
    rig.append()
    rig.disk.free = 5_000
    rig.clock.advance(1)

    assert rig.append() is AppendOutcome.REFUSED
    assert rig.wal.failure is None
    assert rig.append(2) is AppendOutcome.REFUSED
    rig.disk.free = 1 << 30
    assert rig.append() is AppendOutcome.ACKED
    assert check_log(rig.history(), rig.reading()) == []


def test_the_error_of_a_failed_append_says_what_happened_and_what_to_do() -> None:
    rig = Rig(simulated(), FSYNC).open()
    rig.append()
    _, ticket = rig.stage()
    fail_next(rig, "sync", errno.EIO)

    with pytest.raises(Indeterminate, match=r"shop/orders\[0\].*EIO.*read before you repeat it"):
        rig.wal.acknowledge(ticket)  # type: ignore[arg-type]


class Signalling:
    """A lock that says when a thread comes for it."""

    def __init__(self, lock: threading.RLock) -> None:
        self.came = threading.Event()
        self._lock = lock

    def __enter__(self) -> None:
        self.came.set()
        self._lock.acquire()

    def __exit__(self, *ended: object) -> None:
        self._lock.release()


def test_the_file_of_a_log_that_heals_is_not_sealed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment the copy is listed and not yet the one that is written: the sealing thread took it for rotated."""
    rig = Rig(simulated(), DISK).open()
    rig.append()
    fail_next(rig, "write", errno.EIO, taken=60)
    assert rig.append() is AppendOutcome.INDETERMINATE
    restart = rig.wal.writer.restart_after_failure
    sealing = threading.Thread(target=rig.shard.upkeep.seal_rotated)

    def seal_beside(active: ActiveFile, scan: LogScan) -> None:
        lock = Signalling(rig.wal.committing)
        monkeypatch.setattr(rig.wal.group, "lock", lock)
        sealing.start()
        while sealing.is_alive() and not lock.came.wait(0.01):
            pass
        restart(active, scan)

    monkeypatch.setattr(rig.wal.writer, "restart_after_failure", seal_beside)
    rig.flush()
    sealing.join()

    assert rig.wal.files.all[-1] is rig.wal.writer.active
    assert [name for name in rig.disk.list_directory(rig.directory) if name.endswith(".idx")] == []
    assert rig.append() is AppendOutcome.ACKED
    assert check_log(rig.history(), rig.reading()) == []
