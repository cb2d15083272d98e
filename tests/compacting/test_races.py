"""Compactors that die between any two steps, whatever the owner does meanwhile: history stays one and true."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Final

import pytest

from forebay.errors import Closed, ForebayError
from forebay.format.metadata.descriptor import DescriptorKind
from forebay.metadata import Compare, Entry, Operation, Outcome, Put
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import Commit, commits_of
from forebay.testing.simulated.blobs import Call, Fault, plan_faults
from forebay.testing.simulated.metadata import Fault as MetadataFault
from forebay.testing.simulated.metadata import FaultyMetadata
from tests.compacting.environment import LEASE, CompactionEnvironment, Compactor
from tests.ledger import Ledger
from tests.support.environments.shard import KEYS
from tests.support.soak import SOAK

pytestmark = pytest.mark.slow

STEPS: Final = 5
"""Lease, look, write, swap, end."""
ACTS: Final[dict[str, Callable[[CompactionEnvironment], None]]] = {
    "nothing": lambda environment: None,
    "export": CompactionEnvironment.grow,
    "delete": CompactionEnvironment.delete,
    "evict": CompactionEnvironment.move_floor,
    "sweep": CompactionEnvironment.sweep,
    "take over": CompactionEnvironment.take_over,
}


def test_steps_are_these() -> None:
    environment = CompactionEnvironment()
    compactor = Compactor(environment)

    assert list(compactor.steps()) == ["lease", "look", "write", "swap", "end"]
    assert [piece.kind for piece in environment.catalog().descriptors()] == [DescriptorKind.PARQUET]
    environment.check()


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("then", ["goes on", "dies"])
def test_owner_acts_between_any_two_steps(act: str, then: str, ledger: Ledger) -> None:
    for at in range(STEPS):
        environment = CompactionEnvironment()
        compactor = Compactor(environment)
        for number, _ in enumerate(compactor.steps()):
            if number == at:
                ACTS[act](environment)
                environment.check()
                if then == "dies":
                    break
        compactor.close()
        environment.check()
        ACTS["sweep"](environment)
        environment.check()
        Compactor(environment).run()
        environment.check()
        assert not _is_work_left(environment), "what was cut short is done by the next run"
        ledger.count("compactions beside an owner", act=act, then=then)


def _is_work_left(environment: CompactionEnvironment) -> bool:
    next_ = Compactor(environment)
    steps = list(next_.steps())
    return steps != ["lease", "end"]


def test_segment_is_not_rewritten_for_the_little_that_a_floor_took() -> None:
    environment = CompactionEnvironment()
    Compactor(environment).run()
    (piece,) = environment.catalog().pieces()
    environment.move_floor(9)
    assert not _is_work_left(environment) and environment.catalog().pieces() == [piece]

    environment.move_floor(11)
    Compactor(environment).run()

    assert [piece.descriptor.records for piece in environment.catalog().pieces()] == [9]
    environment.check()


def test_second_compactor_is_refused_until_the_first_is_gone() -> None:
    environment = CompactionEnvironment()
    first, second = Compactor(environment), Compactor(environment)
    going = first.steps()
    assert [next(going), next(going)] == ["lease", "look"]

    assert list(second.steps()) == [] and second.is_refused
    assert list(going)[-1] == "end"
    environment.check()


@pytest.mark.parametrize("at", range(1, STEPS - 1))
def test_compactor_that_lost_its_lease_changes_nothing(at: int, ledger: Ledger) -> None:
    """Paused for so long that another came: what it wrote is named by no caller, and swept."""
    environment = CompactionEnvironment()
    slow, quick = Compactor(environment), Compactor(environment)
    going = slow.steps()
    for _ in range(at):
        next(going)
    slow.session.close()
    assert list(quick.steps())[-1] == "end"
    swapped = environment.catalog().pieces()

    with contextlib.suppress(ForebayError):
        list(going)
    assert environment.catalog().pieces() == swapped
    environment.check()
    environment.sweep()
    environment.check()
    named = {piece.descriptor.object_key for piece in environment.catalog().pieces()}
    assert {key for key in environment.blobs.contents if key.endswith(".parquet")} == named
    ledger.count("compactors that lost their lease", at=str(at))


class Interposed(FaultyMetadata):
    """Lets something happen right before the swap is committed."""

    def __init__(self, environment: CompactionEnvironment, act: Callable[[], object]) -> None:
        super().__init__(environment.metadata)
        self._act: Callable[[], object] | None = act

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        act = self._act
        if act is not None and any(isinstance(one, Put) and one.key == KEYS.cur for one in operations):
            self._act = None
            act()
        return super().transaction(compares, operations)


class Answering(FaultyMetadata):
    """Lets something happen right after so many questions were answered."""

    def __init__(self, environment: CompactionEnvironment, questions: int, act: Callable[[], object]) -> None:
        super().__init__(environment.metadata)
        self.left = questions
        self._act = act

    def get(self, key: str) -> Entry | None:
        found = super().get(key)
        self._answered()
        return found

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        found = super().range(prefix, start_after=start_after, limit=limit)
        self._answered()
        return found

    def _answered(self) -> None:
        self.left -= 1
        if self.left == 0:
            self._act()


def swept_around_a_swap(questions: int) -> tuple[CompactionEnvironment, bool]:
    """An owner sweeps; a compactor that had written long ago swaps and ends after so many questions of that sweep.

    True if the sweep had more questions.
    """
    environment = CompactionEnvironment()
    going = Compactor(environment).steps()
    while next(going) != "write":
        pass
    answering = Answering(environment, questions, lambda: list(going))
    environment.exporter = environment.exporter_on(answering)
    environment.sweep()
    is_reached = answering.left <= 0
    list(going)
    return environment, is_reached


@pytest.mark.proves("I16", "I18")
def test_compactor_swaps_and_ends_between_any_two_questions_of_a_sweep(ledger: Ledger) -> None:
    """I16: a sweep asks for compactors before it reads the catalog, so what one names meanwhile is spared."""
    questions, is_reached = 0, True
    while is_reached:
        questions += 1
        environment, is_reached = swept_around_a_swap(questions)
        environment.check()
        assert any("/compacted/" in key for key in environment.blobs.contents)
        ledger.count("swaps inside a sweep")
    assert questions > 3, "the lease and the catalog are asked for"


def exported_around_a_swap() -> list[Violation]:
    """An owner adds to history; a compactor swaps after the owner has looked and before it commits."""
    environment = CompactionEnvironment()
    going = Compactor(environment).steps()
    while next(going) != "write":
        pass
    environment.exporter = environment.exporter_on(Interposed(environment, lambda: list(going)))
    environment.grow()
    return [*environment.broken(), *generations_rise(commits_of(KEYS, environment.metadata.committed))]


def generations_rise(commits: Iterable[Commit]) -> Iterator[Violation]:
    """I32: a change of history by compaction has a generation of its own, which nothing takes back."""
    generation = 0
    for commit in commits:
        if commit.cur is not None:
            if commit.cur.generation < generation:
                yield Violation("I32", f"generation {generation} of the catalog went back to {commit.cur.generation}")
            generation = commit.cur.generation


@pytest.mark.proves("I32")
def test_compactor_swaps_inside_an_export() -> None:
    assert exported_around_a_swap() == []


def test_swap_is_refused_if_the_lease_ends_at_the_last_moment() -> None:
    """Else a sweep that finds no compactor alive could take what the swap is about to name."""
    environment = CompactionEnvironment()

    def lose_and_sweep() -> None:
        compactor.session.close()
        environment.sweep()

    compactor = Compactor(environment, Interposed(environment, lose_and_sweep))
    with contextlib.suppress(ForebayError):
        compactor.run()

    assert not any("/compacted/" in key for key in environment.blobs.contents)
    environment.check()


@pytest.mark.parametrize("act", ["export", "delete", "evict", "sweep", "take over"])
def test_owner_acts_right_before_the_swap(act: str) -> None:
    environment = CompactionEnvironment()
    compactor = Compactor(environment, Interposed(environment, lambda: ACTS[act](environment)))

    compactor.run()

    environment.check()
    environment.sweep()
    environment.check()


def test_sweep_spares_what_a_living_compactor_has_written() -> None:
    environment = CompactionEnvironment()
    going = Compactor(environment).steps()
    while next(going) != "write":
        pass
    written = {key for key in environment.blobs.contents if "/compacted/" in key}
    assert len(written) == 2

    environment.sweep()
    assert {key for key in environment.blobs.contents if "/compacted/" in key} == written
    assert list(going)[-1] == "end"
    environment.check()


def test_orphans_of_a_dead_compactor_are_swept() -> None:
    environment = CompactionEnvironment()
    compactor = Compactor(environment)
    for step in compactor.steps():
        if step == "write":
            break
    compactor.close()
    environment.sweep()

    assert not any("/compacted/" in key for key in environment.blobs.contents)
    assert environment.metadata.get(LEASE) is None
    environment.check()


def _undisturbed() -> tuple[list[Call], dict[str, int]]:
    environment = CompactionEnvironment()
    before = len(environment.blobs.calls)
    faulty = FaultyMetadata(environment.metadata)
    Compactor(environment, faulty).run()
    return environment.blobs.calls[before:], faulty.calls


CALLS, METADATA_CALLS = _undisturbed()


def _recovered(environment: CompactionEnvironment) -> None:
    environment.blobs.heal()
    environment.check()
    environment.blobs.land()
    environment.check()
    ACTS["delete"](environment)
    Compactor(environment).run()
    environment.check()
    environment.sweep()
    environment.check()


def test_store_fails_at_any_call(ledger: Ledger) -> None:
    faults = list(plan_faults(CALLS))
    chosen = [pair for number, pair in enumerate(faults) if number % 4 == 0 or pair[0].method == "upload"]
    for call, fault in faults if SOAK else chosen:
        environment = CompactionEnvironment()
        environment.blobs.fail_at(call.index, fault)
        compactor = Compactor(environment)
        with contextlib.suppress(ForebayError, AssertionError):
            compactor.run()
        compactor.close()
        _recovered(environment)
        ledger.count("store faults of compaction", fault=fault.value)
    assert Fault.FAIL_AFTER in {fault for _, fault in faults}


def test_metadata_fails_at_any_call(ledger: Ledger) -> None:
    kinds = [("transaction", fault) for fault in MetadataFault]
    kinds += [(method, MetadataFault.FAIL_BEFORE) for method in ("get", "range")]
    for method, fault in kinds:
        for number, late in product(range(METADATA_CALLS[method]), (False, True)):
            if late and fault is not MetadataFault.TIME_OUT:
                continue
            environment = CompactionEnvironment()
            faulty = FaultyMetadata(environment.metadata)
            faulty.inject(fault, method=method, after=number)
            compactor = Compactor(environment, faulty)
            with contextlib.suppress(ForebayError, AssertionError):
                compactor.run()
            compactor.close()
            if late:
                ACTS["delete"](environment)
                # A session that has ended takes no key.
                with contextlib.suppress(Closed):
                    faulty.land()
            _recovered(environment)
            ledger.count("metadata faults of compaction", fault=fault.value, method=method)
