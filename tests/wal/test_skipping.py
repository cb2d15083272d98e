"""A log that goes on behind what history holds: readers get on, and no crash hides or doubles an offset."""

from __future__ import annotations

import errno
import threading
from typing import Final

import pytest

from forebay.errors import DataLoss, Moved, Unavailable
from forebay.format.metadata.descriptor import ShardState
from forebay.reading import Cursor
from forebay.records import Gap, Reason
from forebay.shard import Situation, decide
from forebay.shard.tiers import NoHistory, Tiers
from forebay.testing.checks.history import AppendOutcome, Reading
from forebay.testing.checks.invariants import names_follow_bytes, stream_is_gapless
from forebay.testing.simulated.crashes import explore
from forebay.topics import Durability
from forebay.wal.files import SealedFile
from forebay.wal.readonly import FollowedLog
from forebay.wal.recovery.resume import Start
from tests.ledger import Ledger
from tests.wal.rig import DIRECTORY, ROOT, SMALL, TOPIC_ID, Bare, BareRig, simulated
from tests.wal.scenarios import fail_next

FSYNC, DISK, MEMORY = Durability.FSYNC, Durability.DISK, Durability.MEMORY
ALL: Final = (FSYNC, DISK, MEMORY)
HELD = Moved("records are being attached")


def _skip(rig: Bare, stop: int) -> None:
    """As whichever caller attaches to history does it."""
    rig.wal.hold(HELD)
    rig.wal.commit()
    rig.wal.rotate()
    rig.wal.skip_to_history(stop)
    rig.wal.release()


def _recovered(rig: Bare, frontier: int) -> Bare:
    """Open as the same directory again, with a catalog that ends at `frontier`."""
    state = ShardState(incarnation=TOPIC_ID, epoch=rig.epoch, owner="gone", holder=ROOT, holder_since=1)
    facts = rig.surveyed()
    identity = rig.disk.identity(DIRECTORY)
    here = Situation("shop/orders[0]", rig.durability, identity, ROOT, frontier=frontier, covered=frontier)
    decision = decide(facts, state, here)
    return rig.begin(Start(next_offset=decision.next_offset, gap=decision.gap), facts=facts)


def _offsets(reading: Reading) -> list[int]:
    return [offset for offset, _ in reading.records]


@pytest.mark.parametrize("durability", ALL)
@pytest.mark.parametrize("before", [0, 3])
def test_appends_go_on_behind_it_and_readers_learn_where_the_rest_is(durability: Durability, before: int) -> None:
    rig = BareRig(simulated(), durability).begin()
    if before:
        rig.append(before)
    _skip(rig, 50)

    assert rig.wal.head == rig.wal.offsets().next == rig.wal.queue.first == 50
    assert rig.append(2) is AppendOutcome.ACKED
    reading = rig.reading()
    assert reading.gaps == [Gap(before, 50, Reason.HISTORY)]
    assert _offsets(reading) == [*range(before), 50, 51]
    rig.upkeep.close()
    assert _recovered(BareRig(rig.disk, durability, epoch=1), 50).reading().steps == reading.steps


@pytest.mark.parametrize("frontier", [5, 50])
@pytest.mark.parametrize("durability", ALL)
@pytest.mark.proves("I11")
def test_a_recovery_that_goes_on_behind_it_reserves_nothing_for_the_next_one_to_skip(
    durability: Durability, frontier: int
) -> None:
    """The owner died between the attachment and its own step. Recoveries without an append go on at one place."""
    disk = simulated()
    rig = BareRig(disk, durability).begin()
    rig.append(3)
    rig.wal.commit()
    reserved = rig.wal.writer.reserved_end

    first = _recovered(BareRig(disk, durability, epoch=1), frontier)
    second = _recovered(BareRig(disk, durability, epoch=2), frontier)

    expected = max(frontier, reserved) if durability is MEMORY else frontier
    assert 5 < reserved < 50
    assert [first.wal.queue.next, second.wal.queue.next] == [expected, expected]
    assert second.append(2) is AppendOutcome.ACKED
    assert _offsets(second.reading()) == [0, 1, 2, expected, expected + 1]


def test_the_file_behind_it_starts_exactly_there_so_that_it_continues_the_history() -> None:
    rig = BareRig(simulated(), FSYNC).begin()
    rig.append(3)
    _skip(rig, 50)
    _skip(rig, 70)
    rig.append(2)
    rig.wal.rotate()
    rig.upkeep.seal_rotated()

    files = rig.wal.files.all
    assert [(file.previous_end, file.start, file.end) for file in files] == [(0, 0, 3), (3, 70, 72), (72, 72, 72)]
    assert [isinstance(file, SealedFile) for file in files] == [True, True, False]
    names = [name for name in rig.disk.list_directory(DIRECTORY) if name.endswith(".seg")]
    assert [int(name[:20]) for name in names] == [0, 70, 72]
    assert rig.reading().gaps == [Gap(3, 70, Reason.HISTORY)]


def test_who_waited_at_the_old_head_gets_on_here_and_in_other_processes() -> None:
    rig = BareRig(simulated(), FSYNC).begin()
    rig.append(3)
    follower = FollowedLog(rig.disk, rig.clock, DIRECTORY, SMALL, lambda: True)
    assert Tiers(follower, NoHistory()).read(3).next == 3
    woken: list[bool] = []
    waiter = threading.Thread(target=lambda: woken.append(rig.wal.wait(3, timeout=30)))
    waiter.start()

    _skip(rig, 50)

    waiter.join()
    assert woken == [True]
    assert rig.read(3).events == [Gap(3, 50, Reason.HISTORY)]
    assert follower.wait(3, timeout=0)
    assert Tiers(follower, NoHistory()).read(3).events == [Gap(3, 50, Reason.HISTORY)]


def test_a_reader_that_no_caller_gives_the_history_to_learns_of_a_loss() -> None:
    rig = BareRig(simulated(), FSYNC).begin()
    rig.append(3)
    _skip(rig, 50)
    cursor = Cursor(rig, 0, name="shop/orders[0]", partition=0)
    assert [batch.count for batch in cursor.pull()] == [3]

    with pytest.raises(DataLoss, match=r"\[3, 50\) history"):
        cursor.pull()


def test_nothing_moves_when_no_file_can_be_begun_and_it_may_be_repeated() -> None:
    rig = BareRig(simulated(), DISK).begin()
    rig.append(3)
    rig.wal.hold(HELD)
    rig.wal.commit()
    for kind in ("create", "rename", "sync_directory"):
        fail_next(rig, kind, errno.EIO, suffix="")
        with pytest.raises(Unavailable, match="no new log file could be begun"):
            rig.wal.skip_to_history(50)
        assert (rig.wal.head, rig.wal.offsets().next) == (3, 3)

    rig.wal.skip_to_history(50)
    rig.wal.skip_to_history(50)
    rig.wal.release()

    assert rig.append() is AppendOutcome.ACKED
    assert rig.reading().gaps == [Gap(3, 50, Reason.HISTORY)]


def test_a_log_that_did_not_know_before_it_ended_knows_when_it_begins() -> None:
    """The catalog goes further than the log: what lies between is history, whatever else is lost behind it."""
    for durability, gap in ((FSYNC, None), (MEMORY, Gap(5, 8, Reason.LOST))):
        rig = BareRig(simulated(), durability).begin()
        rig.append(3)
        rig.wal.commit()
        again = _recovered(BareRig(rig.disk, durability, epoch=1), 5)

        assert again.wal.head == 5
        assert again.wal.offsets().next == (gap.stop if gap is not None else 5)
        again.append()
        again.wal.commit()
        assert again.reading().gaps == [Gap(3, 5, Reason.HISTORY), *([gap] if gap is not None else [])]


def test_a_gap_that_opens_a_file_never_swallows_what_history_holds() -> None:
    """The file behind history has no record yet when the next start finds that offsets may be lost."""
    rig = BareRig(simulated(), MEMORY).begin()
    rig.append(3)
    _skip(rig, 50)
    rig.append()
    again = _recovered(BareRig(rig.disk, MEMORY, epoch=1), 50)
    stop = again.wal.offsets().next
    assert stop > 50

    for rounds in range(2):
        assert again.append() is AppendOutcome.ACKED
        again.wal.flush()
        assert again.reading().gaps == [Gap(3, 50, Reason.HISTORY), Gap(50, stop, Reason.LOST)], rounds


@pytest.mark.slow
@pytest.mark.parametrize("durability", ALL)
@pytest.mark.parametrize("rotated", [1, 0])
def test_no_crash_around_it_hides_or_doubles_an_offset(durability: Durability, rotated: int, ledger: Ledger) -> None:
    rig = BareRig(simulated(), durability, seed=f"skip {durability} {rotated}").begin()
    rig.append(3)
    rig.flush()
    begun = len(rig.disk.trace)
    rig.wal.hold(HELD)
    rig.wal.commit()
    if rotated:
        rig.wal.rotate()
    rig.wal.skip_to_history(50)
    rig.wal.release()
    rig.append()
    rig.see()
    rig.append(2)

    assert list(names_follow_bytes(rig.disk.trace)) == []
    for state in explore(rig.disk.trace, range(begun, len(rig.disk.trace) + 1), states_max=10, names_max=8):
        ledger.count("crash states", scenario="behind history", damage=state.damage.value)
        again = BareRig(state.disk(), durability, epoch=1)
        # The catalog has it before the log learns of it.
        _judge(_recovered(again, 50), str(state))


def _judge(rig: Bare, state: str) -> None:
    for _ in range(2):
        assert rig.wal.offsets().next >= 50, state
        assert rig.append() is AppendOutcome.ACKED
        rig.flush()
        reading = rig.see()
        assert list(stream_is_gapless(reading)) == [], state
        assert _offsets(reading)[:3] == [0, 1, 2], state
        assert reading.gaps[0] == Gap(3, 50, Reason.HISTORY), state
        assert all(gap.reason is Reason.LOST for gap in reading.gaps[1:]), state
        assert rig.history().contradictions == [], state
        rig = _recovered(BareRig(rig.disk, rig.durability, epoch=rig.epoch), 50)
        assert rig.reading().records == reading.records, state
