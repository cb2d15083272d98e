"""A process that dies after a failed sync: what it had shown is not lost unnoticed, what it had not is not shown."""

from __future__ import annotations

import errno

import pytest

from forebay.errors import Unavailable
from forebay.records import Gap, Reason
from forebay.testing.checks.invariants import check_log, promises_follow_syncs
from forebay.testing.simulated.crashes import crash_states, explore
from forebay.testing.simulated.damage import CrashDamage
from forebay.topics import Durability
from forebay.wal.readonly import FollowedLog
from tests.wal.checks import recover_and_go_on
from tests.wal.rig import DIRECTORY, SMALL, Rig, Simulated, after, simulated
from tests.wal.scenarios import fail_next


def failed(durability: Durability) -> Simulated:
    """Three durable records, and two more of which the sync has failed."""
    rig = Rig(simulated(), durability).open()
    rig.append(3)
    rig.flush()
    fail_next(rig, "sync", errno.EIO)
    rig.append(2)
    if durability is Durability.DISK:
        with pytest.raises(Unavailable, match="EIO"):
            rig.flush()
    assert rig.wal.failure is not None
    return rig


def kill(rig: Simulated) -> Simulated:
    """The next process, in the same life of the machine."""
    rig.disk.note("crash", CrashDamage.KILLED.value)
    return Rig(rig.disk, rig.durability, epoch=rig.epoch).open()


@pytest.mark.parametrize("lives", [1, 2, 3])
def test_offsets_that_the_system_dropped_are_lost_by_name_and_given_out_to_no_caller(lives: int) -> None:
    rig = failed(Durability.DISK)
    active = rig.wal.writer.active
    assert active is not None
    rig.disk.discard_failed(active.path)

    for _ in range(lives):
        # Those in between append nothing.
        rig = kill(rig)
    rig.append()

    reading = rig.reading()
    assert [offset for offset, _ in reading.records][:3] == [0, 1, 2]
    assert reading.gaps[0] == Gap(3, reading.records[3][0], Reason.LOST)
    assert reading.records[3][0] >= 5


def test_what_the_system_still_has_goes_on_without_a_gap() -> None:
    rig = kill(failed(Durability.DISK))

    rig.append()

    assert rig.shard.decision.exact
    assert [offset for offset, _ in rig.reading().records] == [0, 1, 2, 3, 4, 5]


def test_a_copy_that_finds_no_room_leaves_none_of_it_and_is_made_later() -> None:
    rig = failed(Durability.DISK)
    fail_next(rig, "write", errno.ENOSPC, suffix=".tmp")

    with pytest.raises(OSError, match="ENOSPC"):
        kill(rig)

    assert [name for name in rig.disk.list_directory(DIRECTORY) if name.endswith(".tmp")] == []
    assert len(kill(rig).reading().records) == 5


@pytest.mark.parametrize(("durability", "shown"), [(Durability.FSYNC, 3), (Durability.DISK, 5)])
def test_without_an_owner_others_see_no_more_than_it_had_shown(durability: Durability, shown: int) -> None:
    rig = failed(durability)
    follower = FollowedLog(rig.disk.another_process(), rig.clock, DIRECTORY, SMALL, lambda: False)

    follower.refresh()

    assert (follower.head, follower.durable) == (shown, 3)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_background_sync_that_failed_promises_nothing_of_that_file(rounds: int) -> None:
    """The system reports a lost write once: a sync that succeeds later has not written those bytes."""
    rig = Rig(simulated(), Durability.DISK).open()
    rig.append(3)
    rig.clock.advance(2)
    fail_next(rig, "sync", errno.EIO)

    for _ in range(rounds):
        rig.shard.upkeep.maintain()
        rig.promise()
        rig.append()
        rig.clock.advance(2)

    assert list(promises_follow_syncs(rig.disk.trace)) == []
    for state in explore(rig.disk.trace, damages=[CrashDamage.OLD, CrashDamage.CUT], states_max=2, names_max=2):
        assert recover_and_go_on(state, Durability.DISK) == []


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
def test_the_mark_of_an_idle_log_becomes_durable_too(durability: Durability) -> None:
    """I12: without it a power loss that takes `live` leaves no proof that the last record had been durable."""
    rig = Rig(simulated(), durability).open()
    rig.append()
    for _ in range(3):
        rig.clock.advance(2)
        rig.shard.upkeep.maintain()
    active = rig.wal.writer.active
    assert active is not None and active.marked == 1

    (state,) = crash_states(rig.disk.trace, damages=[CrashDamage.OLD], states_max=1)

    assert state.files()[active.path] == active.file.read_at(active.position, 0)


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
def test_what_a_recovery_has_shown_survives_the_next_power_loss(durability: Durability) -> None:
    """I9: a killed process may leave records that were never synced; the next one syncs them before it shows them."""
    rig = Rig(simulated(), durability).open()
    rig.append()
    rig.append()

    for state in explore(rig.disk.trace, damages=[CrashDamage.KILLED], states_max=1):
        again = after(state, durability).open()
        again.see()
        again.promise()
        for lost in crash_states(again.disk.trace, damages=[CrashDamage.OLD], states_max=1):
            assert recover_and_go_on(lost, durability) == []


@pytest.mark.parametrize("is_known", [True, False], ids=["with live", "without live"])
def test_a_sync_that_fails_while_the_log_is_opened_is_not_forgotten_by_the_next_opening(*, is_known: bool) -> None:
    """The next opening synced the file once more, which succeeded: what it called durable was not on the disk."""
    rig = Rig(simulated(), Durability.DISK).open()
    rig.append(3)
    rig.flush()
    rig.append(2)
    if not is_known:
        rig.disk.unlink(f"{DIRECTORY}/live")
    fail_next(rig, "sync", errno.EIO)
    with pytest.raises(OSError, match="EIO"):
        kill(rig)

    rig = kill(rig)

    rig.see()
    rig.promise()
    assert rig.wal.offsets().durable == 5
    for state in explore(rig.disk.trace, [*rig.disk.trace.prefixes()][-1:], states_max=4, names_max=2):
        recovered = after(state, Durability.DISK).open()
        assert list(check_log(recovered.history(), recovered.reading())) == []
