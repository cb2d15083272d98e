"""A disk that fills under a log: a reserve is kept, a log that failed copies nothing in vain and says what it needs."""

from __future__ import annotations

import errno
import logging

import msgspec
import pytest

from forebay.errors import Unavailable
from forebay.testing.checks.history import AppendOutcome
from forebay.topics import Durability
from forebay.wal import upkeep
from tests.wal.rig import DIRECTORY, SMALL, Rig, Simulated, simulated
from tests.wal.scenarios import fail_next

MIN = 20_000
ROOMY = 1 << 30
LARGE = msgspec.structs.replace(SMALL, rotate_bytes_max=1 << 20)


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC])
@pytest.mark.parametrize("size", [10, 3_000])
def test_a_writer_that_is_quicker_than_the_clock_leaves_the_reserve(durability: Durability, size: int) -> None:
    disk = simulated()
    disk.free = MIN + 60_000
    rig = Rig(disk, durability, settings=msgspec.structs.replace(LARGE, free_bytes_min=MIN)).open()
    outcomes = {rig.append(3, size=size), rig.append_one(size=size)}
    while AppendOutcome.REFUSED not in outcomes:
        outcomes.add(rig.append_one(size=size))
        outcomes.add(rig.append(3, size=size))

    assert rig.disk.free >= MIN - 1_000, "though no time has passed; a frame has a head, too"
    rig.disk.free = ROOMY
    assert rig.append(size=size) is AppendOutcome.ACKED


def failed(free: int) -> Simulated:
    """A log whose sync has failed, on a disk with so much room."""
    rig = Rig(simulated(), Durability.DISK, settings=LARGE).open()
    rig.append(5, size=2_000)
    rig.flush()
    rig.append(2)
    fail_next(rig, "sync", errno.EIO)
    with pytest.raises(Unavailable, match="EIO"):
        rig.flush()
    rig.disk.free = free
    return rig


def made(rig: Simulated) -> int:
    """How many files were begun so far."""
    return sum(call.kind == "create" for call in rig.disk.calls)


def test_a_log_that_failed_on_a_full_disk_copies_nothing_says_so_once_and_waits_longer_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = failed(free=5_000)
    before, tried = made(rig), 0
    caplog.set_level(logging.WARNING)
    caplog.clear()
    for _ in range(100):
        if rig.shard.upkeep.needs_mending:
            tried += 1
        rig.disk.free -= 7
        rig.shard.upkeep.mend()
        rig.clock.advance(1)

    assert made(rig) == before
    assert 10 <= tried <= 20, "ten seconds apart in the end"
    [line] = [record.getMessage() for record in caplog.records]
    assert "takes 1" in line and "4993 are free" in line
    rig.disk.free = ROOMY
    rig.clock.advance(upkeep.HEAL_RETRY_SECONDS_MAX)
    rig.shard.upkeep.mend()
    assert rig.wal.failure is None
    assert rig.append() is AppendOutcome.ACKED
    assert [offset for offset, _ in rig.reading().records] == list(range(8))


def test_a_caller_who_asks_for_it_has_a_log_healed_at_once() -> None:
    rig = failed(free=5_000)
    for _ in range(5):
        rig.shard.upkeep.mend()
    rig.disk.free = ROOMY

    rig.flush()

    assert rig.wal.failure is None


def test_a_copy_for_which_the_room_is_gone_meanwhile_leaves_nothing() -> None:
    rig = failed(free=ROOMY)
    fail_next(rig, "write", errno.ENOSPC, suffix=".healing.tmp")

    assert not rig.wal.heal()

    assert [name for name in rig.disk.list_directory(DIRECTORY) if name.endswith(".tmp")] == []
    assert rig.wal.heal()


def test_a_start_says_how_many_bytes_it_needs() -> None:
    rig = failed(free=5_000)
    again = Rig(rig.disk, Durability.DISK, settings=LARGE, epoch=rig.epoch)

    with pytest.raises(Unavailable, match=r"is copied, for a sync of it failed: that takes 1\d{4} bytes, and 5000 are"):
        again.open()

    rig.disk.free = ROOMY
    assert len(again.open().reading().records) == 7
