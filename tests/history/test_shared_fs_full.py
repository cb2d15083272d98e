"""A shared file system without room: the export says so, appends go on, and with room again nothing is missing."""

from __future__ import annotations

import errno

import pytest

from forebay.blobs.directory import UPLOADS, DirectoryStore
from forebay.errors import Indeterminate, Unavailable
from forebay.testing.checks.catalogs import check_history, from_blobs, keys_of
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.disk import ROOMY, SimulatedDisk
from forebay.testing.simulated.faults import PlannedFault, plan_faults
from tests.ledger import Ledger
from tests.support.environments.shard import ShardEnvironment, expected, history_of, stream


class Shared:
    """A shard with two sealed files, and the store of its history on a file system of another machine."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk(directories=["/shared"])
        clock = ManualClock(seed=1)
        self.environment = ShardEnvironment(
            blobs=DirectoryStore("/shared", disk=self.disk, clock=clock).open(), clock=clock
        )
        for _ in range(2):
            self.environment.append(10)
            self.environment.seal()
        self.exporter = self.environment.exporter()

    def export(self) -> int:
        return self.exporter.export(self.environment.shard.wal.files)

    def is_whole(self) -> bool:
        catalog = self.environment.catalog()
        flaws = check_history(
            self.environment.acked(),
            catalog.descriptors(),
            catalog.frontier().next,
            from_blobs(self.environment.store),
            self.environment.local_files(),
        )
        return flaws == []

    def goes_on(self) -> None:
        """Appends go on while there is no room; with room again all of it becomes history, and nothing else stays."""
        assert self.is_whole()
        self.environment.append(5)
        self.environment.seal()
        self.disk.heal()
        self.disk.free = ROOMY

        self.export()

        assert self.is_whole()
        with history_of(self.environment) as history:
            assert stream(history) == expected(0, 25)
        assert self.environment.keys() == keys_of(self.environment.catalog().descriptors())
        self.environment.clock.jump(10_000)
        self.environment.store.abort_stale_uploads(1)
        assert self.disk.list_directory(f"/shared/{UPLOADS}") == []


def every_fault() -> list[PlannedFault]:
    """Every call of an export that needs room, each write also after a part of its bytes; and from there on."""
    shared = Shared()
    first = shared.disk.calls_reached
    shared.export()
    calls = shared.disk.calls[first:]
    found = [fault for lasting in (False, True) for fault in plan_faults(calls, [errno.ENOSPC], lasting=lasting)]
    return [fault for fault in found if fault.number == errno.ENOSPC]


@pytest.mark.parametrize("planned", every_fault(), ids=str)
def test_no_room_at_any_call_of_an_export_is_named_and_costs_nothing(planned: PlannedFault, ledger: Ledger) -> None:
    shared = Shared()
    shared.disk.plan(planned)

    with pytest.raises((Unavailable, Indeterminate), match="directory /shared.*ENOSPC"):
        shared.export()

    shared.goes_on()
    ledger.count("exports without room")


@pytest.mark.parametrize("free", [0, 1, 250, 500, 750, 1_000])
def test_a_file_system_that_fills_up_is_named_and_costs_nothing(free: int, ledger: Ledger) -> None:
    shared = Shared()
    shared.disk.free = free

    with pytest.raises(Unavailable, match="directory /shared"):
        shared.export()

    shared.goes_on()
    ledger.count("exports without room")
