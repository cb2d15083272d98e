"""No crash looks like damage, all damage is found, and repairing may itself be cut short anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Final

import pytest

from forebay.disk import Disk
from forebay.format.metadata.descriptor import ShardState
from forebay.inspection.directory import ExpectedShard
from forebay.inspection.findings import Finding, Severity
from forebay.inspection.repair import repair_shard
from forebay.inspection.verify.shard import verify_shard
from forebay.testing.checks.history import Reading
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.crashes import CrashState, explore
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.support.soak import SOAK, sampled
from tests.wal.rig import DIRECTORY, ROOT, SMALL, TOPIC_ID, Rig, Simulated, simulated, spec_of
from tests.wal.scenarios import SCENARIOS, Scenario

pytestmark = pytest.mark.slow

STATES_MAX: Final = 16 if SOAK else 3
REPAIR_EVERY: Final = 1 if SOAK else 5
STRIDE: Final = 1 if SOAK else 7

CASES: Final = [
    pytest.param(scenario, durability, id=f"{scenario.name}-{durability}")
    for scenario in SCENARIOS
    for durability in scenario.durabilities
]


def _place(durability: Durability) -> ExpectedShard:
    return ExpectedShard(f"{TOPIC_ID}_0", "shop/orders[0]", DIRECTORY, spec_of(durability), 0)


def _state(epoch: int = 1000) -> ShardState:
    return ShardState(incarnation=TOPIC_ID, epoch=epoch, holder=ROOT, holder_since=1)


def _findings(disk: Disk, durability: Durability) -> list[Finding]:
    return verify_shard(disk, _place(durability), _state(), owned=False).findings


def _errors(disk: Disk, durability: Durability) -> list[str]:
    return [str(found) for found in _findings(disk, durability) if found.severity is Severity.ERROR]


def _reading(disk: SimulatedDisk, durability: Durability) -> Reading:
    return Rig(disk, durability, epoch=1000).open().reading()


def _sealed(durability: Durability = Durability.FSYNC) -> Simulated:
    """A shard with three sealed files and an active one, closed in order."""
    rig = Rig(simulated(), durability, seed="sealed").open()
    for _ in range(3):
        rig.group(2, 3)
        rig.append(size=300)
        rig.wal.rotate()
    rig.append(2)
    rig.shard.upkeep.close()
    return rig


@pytest.mark.parametrize(("scenario", "durability"), CASES)
def test_what_a_crash_leaves_is_never_called_damage(scenario: Scenario, durability: Durability, ledger: Ledger) -> None:
    disk = simulated()
    rig = Rig(disk, durability, seed=f"{scenario.name} {durability}").open()
    scenario.before(rig)
    begun = len(disk.trace)
    scenario.run(rig)
    wrong: list[str] = []

    states = explore(disk.trace, range(begun, len(disk.trace) + 1), states_max=STATES_MAX, names_max=3)
    for state in sampled(_each_disk_once(states), one_in=2, seed=f"{scenario.name} {durability}"):
        crashed = state.disk()
        before = len(crashed.trace)
        ledger.count("verified crash states", scenario=scenario.name)
        wrong += [f"{state}: {error}" for error in _errors(crashed, durability)]
        assert len(crashed.trace) == before, "verifying has changed something"

    assert wrong[:10] == []


@pytest.mark.parametrize(("scenario", "durability"), CASES)
def test_repairing_after_a_crash_changes_nothing_that_is_read(
    scenario: Scenario, durability: Durability, ledger: Ledger
) -> None:
    disk = simulated()
    rig = Rig(disk, durability, seed=f"repair {scenario.name} {durability}").open()
    scenario.before(rig)
    begun = len(disk.trace)
    scenario.run(rig)

    states = explore(disk.trace, range(begun, len(disk.trace) + 1), states_max=2, names_max=2)
    for state in itertools.islice(_each_disk_once(states), 0, None, REPAIR_EVERY):
        repaired = state.disk()
        repair_shard(_place(durability), SMALL, disk=repaired, clock=ManualClock(), apply=True)
        ledger.count("repaired crash states", scenario=scenario.name)

        assert _errors(repaired, durability) == []
        assert _reading(repaired, durability) == _reading(state.disk(), durability), str(state)


def _each_disk_once(states: Iterable[CrashState]) -> Iterator[CrashState]:
    """Without those that differ from an earlier one in what callers had been answered: verifying looks at files."""
    seen: set[tuple[str, bytes]] = set()
    for state in states:
        key = (state.boot, state.digest())
        if key not in seen:
            seen.add(key)
            yield state


def _files(rig: Simulated) -> Iterator[str]:
    for name in rig.disk.list_directory(DIRECTORY):
        if name.endswith((".seg", ".idx")) or name == "checkpoint":
            yield f"{DIRECTORY}/{name}"


def _flip(disk: SimulatedDisk, path: str, byte: int) -> None:
    file = disk.open(path, writable=True)
    file.write_at(bytes([file.read_at(1, byte)[0] ^ 0x10]), byte)
    file.close()


def test_every_flipped_byte_is_found(ledger: Ledger) -> None:
    rig = _sealed()
    newest = max(path for path in _files(rig) if path.endswith(".seg"))
    assert _findings(rig.disk, Durability.FSYNC) == []
    missed: list[str] = []

    for path in _files(rig):
        for byte in range(len(path) % STRIDE, rig.disk.open(path).size(), STRIDE):
            _flip(rig.disk, path, byte)
            ledger.count("flipped bytes")
            found = _findings(rig.disk, Durability.FSYNC)
            worst = {finding.severity for finding in found}
            # The mark that ends the newest file was never promised to anyone: without it there is a torn tail.
            if Severity.ERROR not in worst and not (path == newest and Severity.NOTE in worst):
                missed.append(f"{path} byte {byte}")
            _flip(rig.disk, path, byte)

    assert missed == []


def test_a_repair_cut_short_anywhere_is_finished_by_the_next(ledger: Ledger) -> None:
    durability = Durability.FSYNC
    rig = _sealed(durability)
    expected = _reading(_copied(rig), durability)
    for path in _files(rig):
        if not path.endswith(".seg"):
            _flip(rig.disk, path, 20)
    rig.disk.sync_filesystem(ROOT)
    begun = len(rig.disk.trace)
    repair_shard(_place(durability), SMALL, disk=rig.disk, clock=ManualClock(), apply=True)

    for state in explore(rig.disk.trace, range(begun, len(rig.disk.trace) + 1), states_max=6, names_max=6):
        disk = state.disk()
        repair_shard(_place(durability), SMALL, disk=disk, clock=ManualClock(), apply=True)
        ledger.count("interrupted repairs", damage=state.damage.value)

        assert _errors(disk, durability) == [], str(state)
        assert repair_shard(_place(durability), SMALL, disk=disk, clock=ManualClock(), apply=True) == []
        assert _reading(disk, durability) == expected


def _copied(rig: Simulated) -> SimulatedDisk:
    """The same files on a disk of its own."""
    return next(iter(explore(rig.disk.trace, [len(rig.disk.trace)], states_max=1))).disk()
