"""Stores and metadata that fail at any call of a seal, a take-over, a move, a deletion, a retention.

Whichever caller was at it repeats it, or dies and another finishes it: one history, no gap, nothing overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple
from zlib import crc32

import pytest

from forebay.errors import ForebayError
from forebay.testing.checks.catalogs import references_are_complete
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import Operations, commits_of
from forebay.testing.simulated.blobs import Call, SimulatedBlobs, plan_faults
from forebay.testing.simulated.blobs import Fault as BlobFault
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault as MetadataFault
from tests.ledger import Ledger
from tests.protocol.environment import KEYS, Node, OwnersEnvironment
from tests.protocol.judging import finished
from tests.protocol.scenarios import SCENARIOS, InterruptedScenario
from tests.support.soak import SOAK, sampled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

EVERY: Final = 1 if SOAK else 2
"""Of those who may finish it after a fault, every so many-th does: each fault that is tried has at least one."""
ATTEMPTS: Final = 4
CASES: Final = [
    pytest.param(scenario, mode, id=f"{scenario.name}-{mode}") for scenario in SCENARIOS for mode in scenario.modes
]


class Armed(NamedTuple):
    """One fault, at one call of a run."""

    fault: MetadataFault | BlobFault
    method: str
    at: int
    times: int = 1

    @property
    def is_late(self) -> bool:
        return self.fault in (MetadataFault.TIME_OUT, BlobFault.LATE)

    def __str__(self) -> str:
        store = "metadata" if isinstance(self.fault, MetadataFault) else "store"
        return f"{store}: {self.fault.value}"


class Run:
    """A scenario up to the part that meets the fault, on a store in memory."""

    def __init__(self, scenario: InterruptedScenario, mode: str) -> None:
        self.scenario = scenario
        self.blobs = SimulatedBlobs(clock=ManualClock())
        self.environment = OwnersEnvironment(mode, blobs=self.blobs)
        self.nodes = scenario.before(self.environment)
        self.first = len(self.blobs.calls)
        self.before = dict(self.environment.faulty.calls)
        self.violations: list[Violation] = []
        self.environment.on_commit = self._committed

    def _committed(self, operations: Operations) -> None:
        for commit in commits_of(KEYS, [operations]):
            self.violations += references_are_complete(commit.pieces, self.environment.fetch)

    def calls(self) -> tuple[dict[str, int], list[Call]]:
        """What is asked of the metadata store and of the store when nothing fails."""
        self.scenario.run(self.environment, self.nodes)
        asked = {method: count - self.before.get(method, 0) for method, count in self.environment.faulty.calls.items()}
        return asked, self.blobs.calls[self.first :]

    def meet(self, armed: Armed) -> None:
        """Run with the fault armed; whatever it makes of it."""
        if isinstance(armed.fault, MetadataFault):
            self.environment.faulty.inject(armed.fault, method=armed.method, after=armed.at, count=armed.times)
        else:
            self.blobs.fail_at(self.first + armed.at, armed.fault)
        self.attempt()
        self.environment.faulty.heal()
        self.blobs.heal()

    def attempt(self) -> bool:
        try:
            self.scenario.run(self.environment, self.nodes)
        except (ForebayError, OSError):
            return False
        return True

    def land(self) -> int:
        return len(self.environment.faulty.land()) + self.blobs.land()

    def die(self) -> None:
        for node in self.nodes:
            node.die()


def faults_of(scenario: InterruptedScenario, mode: str) -> Iterator[Armed]:
    """Every fault at every call."""
    asked, calls = Run(scenario, mode).calls()
    for method, count in asked.items():
        for index in range(count):
            for fault in MetadataFault if method == "transaction" else [MetadataFault.FAIL_BEFORE]:
                yield Armed(fault, method, index)
                if method == "transaction":
                    yield Armed(fault, method, index, times=100)
    for call, blob_fault in plan_faults(calls):
        yield Armed(blob_fault, call.method, call.index - calls[0].index)


@pytest.mark.parametrize(("scenario", "mode"), CASES)
@pytest.mark.proves("I20", "I22")
def test_whatever_fails_the_next_process_brings_it_to_its_end(
    scenario: InterruptedScenario, mode: str, ledger: Ledger
) -> None:
    broken: list[str] = []
    for armed in sampled(faults_of(scenario, mode), one_in=2, seed=f"{scenario.name} {mode}"):
        # By chance, but always the same: else one kind of fault would go with one way to finish it.
        first = crc32(repr(armed).encode()) % EVERY
        for name in scenario.by[first::EVERY]:
            for lands in ("before", "after") if armed.is_late else ("never",):
                violations = _then_dies(scenario, mode, armed, name, lands)
                ledger.count("protocol faults", scenario=f"{scenario.name}, {mode}", fault=str(armed))
                if violations:
                    ledger.violation("protocol faults", scenario=f"{scenario.name}, {mode}", fault=str(armed))
                broken += [f"{armed} at {armed.method} {armed.at}, then {name}: {v}" for v in violations]
    assert broken[:10] == []


def _then_dies(scenario: InterruptedScenario, mode: str, armed: Armed, name: str, lands: str) -> list[Violation]:
    """The process dies over the fault, or when it has repeated what it was at."""
    run = Run(scenario, mode)
    run.meet(armed)
    if name == scenario.by[0]:
        repeated = any(run.attempt() for _ in range(ATTEMPTS))
        if not repeated:
            run.violations.append(Violation("I22", "it cannot be repeated"))
    run.die()
    if lands == "before":
        run.land()
    violations = finished(run.environment, scenario, name)
    if lands == "after":
        before = run.environment.committed
        run.land()
        if run.environment.committed != before:
            violations.append(
                Violation("I20", f"landed after all was done: {run.environment.committed[len(before) :]}")
            )
    return [*run.violations, *violations]


def _moved_away(blobs: SimulatedBlobs) -> tuple[OwnersEnvironment, Node, Node]:
    environment = OwnersEnvironment(blobs=blobs)
    node, other = environment.node("a"), environment.node("b")
    node.append(3)
    node.rotate()
    return environment, node, other


def test_an_upload_that_lands_after_the_topic_was_deleted_is_swept_after_its_grace(ledger: Ledger) -> None:
    for method in ("upload", "put_if_absent"):
        blobs = SimulatedBlobs(clock=ManualClock())
        environment, node, other = _moved_away(blobs)
        blobs.inject(BlobFault.LATE, method=method)
        with pytest.raises(ForebayError):
            node.shard.history.catch_up()
        other.delete()
        # Before its grace no caller finds anything, and neither look must be the last one for that.
        node.clear_moved()
        other.deletions.sweep_late()

        assert blobs.land() == 1
        assert blobs.contents
        environment.clock.advance(environment.settings.export.orphan_grace_s + 1)
        other.deletions.sweep_late()

        assert blobs.contents == {}
        assert environment.inner.snapshot().keys == ()
        assert environment.log_files("a") == {}
        ledger.count("zombie writes")


def test_a_list_that_is_old_when_the_topic_is_deleted_leaves_nothing_for_ever() -> None:
    blobs = SimulatedBlobs(clock=ManualClock())
    environment, node, other = _moved_away(blobs)
    node.shard.history.catch_up()
    blobs.hold_lists_back()
    node.append()
    node.export()
    other.delete()
    assert blobs.contents, "the list did not show all of it"
    blobs.let_lists_go()
    node.clear_moved()
    environment.clock.advance(environment.settings.export.orphan_grace_s + 1)

    other.deletions.sweep_late()

    assert blobs.contents == {}
    assert environment.inner.snapshot().keys == ()
