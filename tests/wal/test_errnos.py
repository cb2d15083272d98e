"""EIO, ENOSPC, EMFILE and short writes at every call of the disk that a shard makes, once and for good."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from forebay.errors import ForebayError
from forebay.testing.checks.history import AppendOutcome, Crashed, Healed, Reading, Troubled
from forebay.testing.checks.invariants import Violation, check_log, healthy_or_read_only
from forebay.testing.simulated.crashes import crash_states
from forebay.testing.simulated.damage import CrashDamage
from forebay.testing.simulated.faults import PlannedFault, plan_faults
from forebay.testing.simulated.trace import Note
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.support.soak import sampled
from tests.wal.checks import OncePerDisk
from tests.wal.rig import Rig, Simulated, after, history_of, simulated
from tests.wal.scenarios import fail_next

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

ONCE, LASTING = 2, 4
"""In a normal run one in so many of the faults that strike once, and of those that last; in a soak run all."""
CRASHES: Final = (CrashDamage.KILLED, CrashDamage.OLD, CrashDamage.WHOLE)


def _write(rig: Simulated) -> None:
    rig.append()
    rig.append(3)
    rig.group(1, 2)
    _try(rig.flush)
    rig.append(12, size=20)
    rig.append(producing=(1, 0))
    rig.append(producing=(1, 1))


def _rotate(rig: Simulated) -> None:
    rig.append(2)
    _try(rig.wal.rotate)
    rig.append()
    rig.append(size=4096)
    rig.append()
    rig.append(producing=(1, 0))


def _seal(rig: Simulated) -> None:
    for _ in range(4):
        rig.append()
    _try(rig.wal.rotate)
    rig.append(2)
    rig.shard.upkeep.seal_rotated()
    rig.append()
    rig.clock.advance(2)
    rig.shard.upkeep.maintain()


def _close(rig: Simulated) -> None:
    rig.append(2)
    _try(rig.wal.rotate)
    rig.append()
    _try(rig.close)
    _reopen(rig)
    rig.append()
    _try(rig.close)
    _reopen(rig)
    rig.append()


def _recover(rig: Simulated) -> None:
    """A torn tail is found, set aside and cut."""
    rig.append(2)
    active = rig.wal.writer.active
    if active is not None:
        with contextlib.suppress(OSError):
            active.file.write_at(b"torn" * 5, active.position)
    _reopen(rig)
    rig.append()


def _heal(rig: Simulated) -> None:
    rig.append(2)
    fail_next(rig, "write", errno.EIO, taken=9)
    rig.append()
    rig.shard.upkeep.maintain()
    rig.append()
    fail_next(rig, "sync", errno.EIO)
    _try(rig.flush)
    rig.shard.upkeep.maintain()
    rig.append(2)


LIVES: Final = {"append": _write, "rotate": _rotate, "seal": _seal, "close": _close, "recover": _recover, "heal": _heal}


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK, Durability.MEMORY])
@pytest.mark.parametrize("name", LIVES)
@pytest.mark.proves("I10", "I28")
def test_no_failing_call_breaks_a_promise(name: str, durability: Durability, ledger: Ledger) -> None:
    life = LIVES[name]
    broken: list[str] = []
    known = OncePerDisk[Reading]()
    for fault in _plan(name, durability):
        kind = "short write" if fault.number is None else errno.errorcode[fault.number]
        ledger.count("faults", life=name, errno=kind)
        violations = _live_through(life, durability, fault, known)
        if violations:
            ledger.violation("faults", life=name, errno=kind)
            broken += [f"{fault}: {violation}" for violation in violations]
    assert broken[:10] == []


@pytest.mark.proves("I1", "I4")
@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
def test_a_file_whose_removal_was_not_durable_does_not_come_back_over_what_was_appended_since(
    durability: Durability,
) -> None:
    """A new file cannot be opened and is removed, the directory cannot be synced, and another process goes on."""
    rig = _begun(durability)
    reached = rig.disk.calls_reached
    _close(rig)
    lasting = plan_faults(rig.disk.calls[reached:], short_writes=False, lasting=True)
    faults = [fault for fault in lasting if fault.number == errno.EMFILE and _is_of_a_new_file(fault)]
    assert faults

    found = {str(fault): _live_through(_close, durability, fault, OncePerDisk()) for fault in faults}

    assert found == {str(fault): [] for fault in faults}


def _is_of_a_new_file(fault: PlannedFault) -> bool:
    return fault.call.kind == "open" and fault.call.path.endswith("/00000000000000000004-00000001.seg")


def _plan(name: str, durability: Durability) -> Iterator[PlannedFault]:
    rig = _begun(durability)
    reached = rig.disk.calls_reached
    LIVES[name](rig)
    calls = rig.disk.calls[reached:]
    yield from sampled(plan_faults(calls), one_in=ONCE, seed=f"{name} {durability}")
    lasting = plan_faults(calls, short_writes=False, lasting=True)
    yield from sampled(lasting, one_in=LASTING, seed=f"{name} {durability}")


def _begun(durability: Durability) -> Simulated:
    rig = Rig(simulated(), durability).open()
    rig.append(2)
    return rig


def _live_through(
    life: Callable[[Simulated], None], durability: Durability, fault: PlannedFault, known: OncePerDisk[Reading]
) -> list[Violation]:
    rig = _begun(durability)
    rig.disk.plan(fault)
    try:
        life(rig)
    except OSError as error:
        # Only an opening may fail so: nothing is open then, and nothing was promised.
        assert "SegmentShard.open" in _where(error), fault
    rig.note(Troubled())
    violations = list(_promises(rig, durability, known))
    rig.disk.heal()
    rig.clock.advance(2)
    if rig.wal.closed:
        rig.open()
    rig.shard.upkeep.maintain()
    works = rig.append() is AppendOutcome.ACKED
    rig.note(Healed())
    violations += healthy_or_read_only(rig.wal.failure, appends_work=works)
    if not works:
        violations.append(Violation("I28", f"not healed: {rig.wal.failure}"))
    return [*violations, *_promises(rig, durability, known)]


def _promises(rig: Simulated, durability: Durability, known: OncePerDisk[Reading]) -> Iterator[Violation]:
    """Whatever was acknowledged is there: now, after a kill and after a power cut."""
    if not rig.wal.closed:
        reading = _read(rig)
        if reading is not None:
            yield from reading
    for state in crash_states(rig.disk.trace, damages=CRASHES, states_max=2, names_max=2):
        found = known.get(state, lambda: after(state, durability).open().reading())  # noqa: B023 - called at once
        notes = (*state.notes, Note("crash", state.damage.value))
        yield from check_log(history_of(durability, notes), found)


def _read(rig: Simulated) -> list[Violation] | None:
    """A reading is right or fails with the disk's own error."""
    try:
        return check_log(rig.history(), rig.see())
    except OSError:
        return None


def _reopen(rig: Simulated) -> None:
    """Another process opens the shard: the one before was killed, unless it has closed the log."""
    if not rig.wal.closed:
        rig.note(Crashed(power=False))
    rig.open()


def _try(step: Callable[[], None]) -> None:
    """A step that may be refused with a reason."""
    try:
        step()
    except ForebayError as error:
        assert str(error)


def _where(error: OSError) -> str:
    names: list[str] = []
    step = error.__traceback__
    while step is not None:
        names.append(step.tb_frame.f_code.co_qualname)
        step = step.tb_next
    return " ".join(names)
