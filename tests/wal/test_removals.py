"""Deletes and floors in the log: written, restated by each new file, kept through crashes, failures and healing."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final, NamedTuple

import pytest

from forebay.errors import Fenced, Indeterminate, Unavailable
from forebay.format.control.frames import Floor
from forebay.format.control.offsets import OffsetSet
from forebay.records import Reason
from forebay.testing.checks.history import Reading
from forebay.testing.checks.invariants import Violation, check_log
from forebay.testing.simulated.crashes import CrashState, explore
from forebay.testing.simulated.trace import Note
from forebay.topics import Durability
from forebay.wal.removals import Removals
from tests.ledger import Ledger
from tests.support.soak import SOAK, sampled
from tests.wal.checks import OncePerDisk
from tests.wal.removals import check_removals, delete, flush, move_floor
from tests.wal.rig import BareRig, Rig, Simulated, after, history_of, simulated
from tests.wal.scenarios import ALL, fail_next

STATES_MAX: Final = 64 if SOAK else 4
NAMES_MAX: Final = 16 if SOAK else 4


def _deletes(rig: Simulated) -> None:
    delete(rig, 0)
    rig.append(2)
    delete(rig, 1, 3)
    delete(rig, 4)
    rig.append()
    rig.clock.advance(2)
    rig.shard.upkeep.maintain()
    delete(rig, 2)


def _floors(rig: Simulated) -> None:
    move_floor(rig, 1)
    rig.append(2)
    move_floor(rig, 3, 3)
    rig.append()
    move_floor(rig, 4)


def _rotations(rig: Simulated) -> None:
    delete(rig, 1)
    rig.append(2)
    rig.wal.rotate()
    delete(rig, 0, 4)
    move_floor(rig, 2, 1)
    rig.append()
    rig.shard.upkeep.seal_rotated()
    rig.wal.rotate()
    rig.append(size=4096)
    delete(rig, 5)
    rig.append()
    rig.shard.upkeep.seal_rotated()
    delete(rig, 6)


def _failures(rig: Simulated) -> None:
    delete(rig, 0)
    fail_next(rig, "write", errno.EIO, taken=9)
    delete(rig, 1)
    rig.shard.upkeep.maintain()
    rig.append()
    delete(rig, 3)
    fail_next(rig, "sync", errno.EIO)
    delete(rig, 2)
    for _ in range(2):
        rig.clock.advance(2)
        rig.shard.upkeep.maintain()
    move_floor(rig, 2)
    flush(rig)
    rig.append()


def _lives(rig: Simulated) -> None:
    """A clean stop before a delete, and one behind it."""
    rig.shard.upkeep.close()
    rig.open()
    delete(rig, 0)
    move_floor(rig, 1)
    rig.append()
    rig.shard.upkeep.close()
    rig.open()
    delete(rig, 3)
    rig.shard.upkeep.close()
    rig.open()
    rig.append()


SCENARIOS: Final = (_deletes, _floors, _rotations, _failures, _lives)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("durability", ALL)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.strip("_"))
@pytest.mark.proves("I23")
def test_no_crash_brings_back_what_was_deleted(
    scenario: Callable[[Simulated], None], durability: Durability, ledger: Ledger
) -> None:
    """I23, I24: deletes and floors hold as their class promised, reach no later record, and never go back."""
    disk = simulated()
    rig = Rig(disk, durability, seed=f"{scenario.__name__} {durability}").open()
    rig.append(3)
    flush(rig)
    begun = len(disk.trace)
    scenario(rig)

    broken: list[str] = []
    known = OncePerDisk[Recovered]()
    states = explore(disk.trace, range(begun, len(disk.trace) + 1), states_max=STATES_MAX, names_max=NAMES_MAX)
    for state in sampled(states, one_in=2, seed=f"{scenario.__name__} {durability}"):
        ledger.count("crash states", scenario=f"removals: {scenario.__name__.strip('_')}", damage=state.damage.value)
        broken += [f"{state}: {violation}" for violation in _violations(state, durability, known)]
    assert broken[:10] == []


class Recovered(NamedTuple):
    """What a recovery finds, and what the one after it finds."""

    reading: Reading
    first: Removals
    again: Removals


def _violations(state: CrashState, durability: Durability, known: OncePerDisk[Recovered]) -> list[Violation]:
    """What is gone stays gone."""
    notes = (*state.notes, Note("crash", state.damage.value))
    reading, first, again = known.get(state, lambda: _recovered(state, durability))
    violations = check_log(history_of(durability, notes), reading)
    violations += check_removals(notes, durability, first, reading.next)
    if (again.deletes, again.floor) != (first.deletes, first.floor):
        violations.append(Violation("I11", f"{first.deletes!r} became {again.deletes!r} by a second recovery"))
    return violations


def _recovered(state: CrashState, durability: Durability) -> Recovered:
    """Recover, go on, recover again."""
    rig = after(state, durability).open()
    found = rig.wal.writer.removals
    reading, first = rig.reading(), Removals(found.deletes, found.floor)
    rig.append(2)
    rig.wal.rotate()
    rig.append()
    rig.flush()
    return Recovered(reading, first, Rig(rig.disk, durability, epoch=rig.epoch).open().wal.writer.removals)


def test_an_unwritten_delete_changes_nothing_and_a_torn_one_is_unknown() -> None:
    rig = Rig(simulated(), Durability.FSYNC).open()
    rig.append(3)
    fail_next(rig, "write", errno.EIO, taken=9)

    with pytest.raises(Indeterminate, match="repeat it"):
        rig.wal.remove(Removals(OffsetSet.of([1])))
    assert rig.wal.writer.removals.is_some is False
    with pytest.raises(Unavailable, match="read-only"):
        rig.wal.remove(Removals(OffsetSet.of([1])))
    assert rig.wal.heal()
    assert Rig(rig.disk, Durability.FSYNC, epoch=rig.epoch).open().wal.writer.removals.is_some is False


def test_a_healed_log_records_deletes_that_its_failed_file_had_lost() -> None:
    rig = Rig(simulated(), Durability.FSYNC).open()
    rig.append(3)
    active = rig.wal.writer.active
    assert active is not None
    first = active.position
    delete(rig, 1)
    move_floor(rig, 1, 1)
    rig.append()
    active.file.write_at(b"\xff" * 40, first + 8)
    fail_next(rig, "write", errno.EIO)
    rig.append()

    assert rig.wal.heal()

    recovered = Rig(rig.disk, Durability.FSYNC, epoch=rig.epoch).open().wal.writer.removals
    assert set(recovered.deletes) == {1}
    assert recovered.floor == Floor(1, 1, Reason.CAP)


def test_a_log_that_begins_a_new_file_first_can_delete() -> None:
    """A crash left a gap, so that the next file is made by whichever caller writes next."""
    disk = simulated()
    rig = Rig(disk, Durability.MEMORY).open()
    rig.append(3)
    rig.wal.commit()
    again = Rig(disk, Durability.MEMORY, epoch=rig.epoch).open()
    assert again.wal.writer.opening_gap is not None

    assert delete(again, 1)

    assert again.wal.head == again.wal.writer.next
    last = Rig(disk, Durability.MEMORY, epoch=again.epoch).open()
    assert set(last.wal.writer.removals.deletes) == {1}
    assert list(check_log(last.history(), last.reading())) == []


def test_no_delete_is_acknowledged_once_the_lease_has_ended() -> None:
    rig = BareRig(simulated(), Durability.FSYNC).begin()
    rig.append(2)
    rig.lease = False

    with pytest.raises(Indeterminate):
        rig.wal.remove(Removals(OffsetSet.of([0])))
    with pytest.raises(Fenced):
        rig.wal.remove(Removals(OffsetSet.of([0])))
