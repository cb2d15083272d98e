"""What is checked of an environment at rest: records, history, and every change of its owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from forebay.errors import ForebayError
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.records import Gap, Reason
from forebay.shard import RecoveryDecision
from forebay.testing.checks.catalogs import check_history
from forebay.testing.checks.history import Crashed, Reading, ShardEvents
from forebay.testing.checks.invariants import Violation, check_log, recovery_is_stable
from forebay.testing.checks.moves import (
    Commit,
    Handover,
    commits_of,
    losses_are_accepted,
    move_goes_on,
    nothing_of_older_epochs,
    one_epoch_at_a_time,
)
from forebay.topics import Durability
from tests.protocol.consuming import missed_by_consumers
from tests.protocol.environment import KEYS, OwnersEnvironment
from tests.protocol.scenarios import InterruptedScenario, orphans_are_swept


class Passing(NamedTuple):
    """The shard was acquired, by the directory that had it before or by another."""

    left: ShardState
    taken: ShardState
    frontier: int

    @property
    def to_another(self) -> bool:
        return self.left.holder not in (None, self.taken.holder)

    @property
    def hole(self) -> tuple[int, int]:
        """The offsets that may be missing from then on; none after a seal."""
        if self.left.phase is Phase.SEALED:
            return (self.frontier, self.frontier)
        return (self.frontier, max(self.frontier, self.left.reserved_end))


def passings(commits: Iterable[Commit]) -> list[Passing]:
    """Every time that the shard was acquired."""
    found: list[Passing] = []
    left: ShardState | None = None
    frontier = 0
    for commit in commits:
        if commit.state is not None:
            if left is not None and commit.state.epoch > left.epoch and commit.state.phase is Phase.OPEN:
                found.append(Passing(left, commit.state, frontier))
            left = commit.state
        if commit.cur is not None:
            frontier = commit.cur.next
    return found


def excuse(history: ShardEvents, passed: Iterable[Passing]) -> ShardEvents:
    """Records that an unclean take-over left on the old owner's disk need not survive, and no others."""
    ranges = [passing.hole for passing in passed if passing.to_another]
    for append in history.acked:
        if any(start <= append.offset < stop for start, stop in ranges):
            append.durable, append.troubled = False, True
            # As if with the power: of class `disk`, too, it is gone with the disk that it was on.
            append.crashes.append(Crashed(power=True))
    return history


def check_environment(environment: OwnersEnvironment, reading: Reading) -> list[Violation]:
    """Every promise: of the log as read by its present owner, of history, of owners that followed each other."""
    commits = commits_of(KEYS, environment.committed)
    passed = passings(commits)
    history = excuse(environment.history(), passed)
    catalog = environment.catalog
    local = {f"{n}/{path}": content for n in "abc" for path, content in environment.log_files(n).items()}
    return [
        *environment.uncovered,
        *check_log(history, reading),
        *(holes_are_accounted_for(reading, passed) if environment.durability is Durability.FSYNC else ()),
        *check_history(history, catalog.descriptors(), catalog.frontier().next, environment.fetch, local),
        *owners_followed(commits, passed, reading, history, environment.openings),
    ]


def holes_are_accounted_for(reading: Reading, passed: Iterable[Passing]) -> Iterator[Violation]:
    """I21: a `lost` range lies where an owner stopped without a seal, and there alone."""
    ranges = [passing.hole for passing in passed]
    for gap in reading.gaps:
        if gap.reason is not Reason.LOST or not any(start <= gap.start and gap.stop <= stop for start, stop in ranges):
            yield Violation("I21", f"no take-over accounts for the hole {gap}")


def owners_followed(
    commits: list[Commit],
    passed: Iterable[Passing],
    reading: Reading,
    history: ShardEvents,
    openings: Mapping[int, RecoveryDecision],
) -> Iterator[Violation]:
    """I19 to I21, and I41."""
    yield from one_epoch_at_a_time(commits)
    yield from nothing_of_older_epochs(commits)
    yield from losses_are_accepted(commits)
    yield from seals_are_exact(commits)
    for passing in passed:
        decision = openings.get(passing.taken.epoch)
        if decision is not None and passing.to_another:
            yield from move_goes_on(_handover(passing, decision, reading, history))


def seals_are_exact(commits: Iterable[Commit]) -> Iterator[Violation]:
    """I21: a sealed shard has nothing given out beyond its end, so whichever caller comes next leaves no gap there."""
    for commit in commits:
        state = commit.state
        if state is not None and state.phase is Phase.SEALED and state.reserved_end != state.next_offset:
            yield Violation("I21", f"sealed at {state.next_offset} with {state.reserved_end} reserved")


def _handover(passing: Passing, decision: RecoveryDecision, reading: Reading, history: ShardEvents) -> Handover:
    left, _, frontier = passing
    began = decision.next_offset
    gaps = tuple(Gap(*gap) for gap in reading.gaps if frontier <= gap.start and gap.stop <= began)
    if left.phase is Phase.SEALED:
        return Handover(left, left.next_offset, frontier, began, gaps)
    below = [append.offset + len(append.begun.values) for append in history.acked if append.offset < began]
    return Handover(left, max(below, default=0), frontier, began, gaps)


def finished(environment: OwnersEnvironment, scenario: InterruptedScenario, name: str) -> list[Violation]:
    """What is broken once the scenario has been finished by the directory of that name, every process being dead."""
    try:
        nodes = scenario.finish(environment, name)
    except (ForebayError, OSError) as error:
        return [Violation("I22", f"cannot be finished: {type(error).__name__}: {error}")]
    violations = scenario.check(environment)
    if not nodes:
        return violations
    reading = nodes[0].reading()
    nodes[0].consume()
    violations += [
        *check_environment(environment, reading),
        *missed_by_consumers(environment.disk.trace.notes(), reading.records),
        *orphans_are_swept(environment, nodes[0]),
    ]
    if name in scenario.exact and environment.durability is Durability.FSYNC and reading.gaps:
        violations.append(Violation("I22", f"nothing was lost, and yet there are holes: {reading.gaps}"))
    for node in nodes:
        node.die()
    if environment.durability is Durability.FSYNC:
        # I11: its owner dies once more and finds everything as it was.
        violations += recovery_is_stable(reading, environment.node(nodes[0].name).reading())
    return violations
