"""Calls that are killed inside: after every change of the disk and every transaction of the metadata store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from forebay.metadata import MemoryMetadata
from forebay.storage import Storage
from forebay.testing.simulated.crashes import CrashState
from forebay.testing.simulated.disk import SimulatedDisk
from tests.ledger import Ledger
from tests.protocol.above import BEGUN, after_crash, kills, opened, told
from tests.support.soak import sampled


class KilledCall(NamedTuple):
    """What is there before, the call that is killed inside, and what must be so after it, whether or not it ended."""

    prepare: Callable[[Storage], None]
    act: Callable[[Storage], None]
    check: Callable[[Storage, bool], None]
    one_in: int


def kill_inside(name: str, call: KilledCall, ledger: Ledger) -> None:
    """Run the call once, then open the log anew as each kill inside the call leaves it, and check."""
    prepare, act, check, one_in = call
    disk = SimulatedDisk()
    with opened(disk, MemoryMetadata()) as log:
        prepare(log)
        disk.note(BEGUN)
        act(log)
        disk.note("done")
    for state in _chosen(disk, one_in, name):
        with opened(*after_crash(state)) as log:
            check(log, bool(told(state, "done")))
        ledger.count("kills inside definitions", call=name)


def _chosen(disk: SimulatedDisk, one_in: int, seed: str) -> Iterator[CrashState]:
    """The kills right after a transaction or an answer, and of those after changes of the disk alone a sample."""
    after: list[CrashState] = []
    between: list[CrashState] = []
    noted = -1
    for state in kills(disk):
        (between if len(state.notes) == noted else after).append(state)
        noted = len(state.notes)
    yield from after
    yield from sampled(between, one_in=one_in, seed=seed)
