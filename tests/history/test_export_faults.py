"""Stores and metadata that fail in the middle of an export: repeated until done, it leaves one true history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
import pytest

from forebay.blobs import Stat
from forebay.catalog import ShardCatalog
from forebay.errors import Corrupt, ForebayError, Indeterminate
from forebay.format.files.segment import index_name
from forebay.format.metadata.descriptor import DescriptorKind
from forebay.records import Bytes
from forebay.testing.checks.catalogs import (
    Ending,
    Fetch,
    check_history,
    ending_of,
    from_files,
    references_are_complete,
    runs_converge,
    sweep_is_right,
)
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import (
    Operations,
    RecordingMetadata,
    commits_of,
    nothing_of_older_epochs,
    one_epoch_at_a_time,
)
from forebay.testing.simulated.blobs import Call, Fault, SimulatedBlobs, plan_faults
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault as MetadataFault
from forebay.testing.simulated.metadata import FaultyMetadata
from tests.ledger import Ledger
from tests.support.environments.shard import KEYS, TOPIC, ShardEnvironment, expected, history_of, stream
from tests.support.soak import SOAK

DAY_MS: Final = 86_400_000
GRACE_S: Final = 3600
ATTEMPTS: Final = 4
EVERY: Final = 1 if SOAK else 5
"""Of the pairs of faults, every so many-th."""


class Run:
    """Three sealed files with a gap before the second, to be exported into a store through metadata that both may fail.

    What is promised of references is checked at every commit, the rest when asked for.
    """

    def __init__(self) -> None:
        clock = ManualClock(seed=1)
        self.blobs = SimulatedBlobs(clock=clock)
        self.environment = ShardEnvironment(durability="memory", blobs=self.blobs, clock=clock)
        self.environment.append(10)
        self.environment.seal()
        self.environment.reopen()
        for _ in range(2):
            self.environment.append(5)
            self.environment.seal()
        self.files = self.environment.shard.wal.files
        self.violations: list[Violation] = []
        self.faulty = FaultyMetadata(RecordingMetadata(self.environment.metadata, on_commit=self._committed))
        self.exporter = self.environment.exporter(catalog=self.environment.catalog(self.faulty))

    def _committed(self, operations: Operations) -> None:
        for commit in commits_of(KEYS, [operations]):
            self.violations += references_are_complete(commit.pieces, self.fetch)

    @property
    def fetch(self) -> Fetch:
        """Objects as they lie there, without a call that a fault could meet."""
        return from_files({f"/{key}": content for key, content in self.blobs.contents.items()}, "")

    def is_exported(self) -> bool:
        try:
            self.exporter.export(self.files)
        except ForebayError:
            return False
        return True

    def export(self) -> int:
        """Repeat until done; how many attempts that took."""
        return 1 + next(attempt for attempt in range(ATTEMPTS) if self.is_exported())

    def ending(self) -> Ending:
        return ending_of(self.environment.catalog().descriptors(), self.blobs.contents)

    def broken(self) -> list[Violation]:
        """Everything that is not as promised, and as if nothing had failed."""
        catalog = self.environment.catalog()
        pieces, frontier = catalog.descriptors(), catalog.frontier().next
        commits = commits_of(KEYS, self.environment.metadata.committed)
        return [
            *self.violations,
            *check_history(self.environment.acked(), pieces, frontier, self.fetch, self.environment.local_files()),
            *one_epoch_at_a_time(commits),
            *nothing_of_older_epochs(commits),
            *runs_converge(UNDISTURBED, self.ending()),
        ]

    def sweep(self) -> list[str]:
        """A day later: whatever is old enough and not needed."""
        self.environment.clock.jump(DAY_MS)
        return self.environment.collect(self.exporter)


def _undisturbed() -> tuple[Ending, list[Call], dict[str, int]]:
    run = Run()
    assert run.export() == 1
    return run.ending(), run.blobs.calls, run.faulty.calls


UNDISTURBED, CALLS, METADATA_CALLS = _undisturbed()


def _report(run: Run, ledger: Ledger, fault: str, at: str = "any call") -> None:
    broken = run.broken()
    ledger.count("export faults", fault=fault, at=at)
    if broken:
        ledger.violation("export faults", fault=fault, at=at)
    assert broken == []


def test_the_run_has_three_files_and_a_gap_and_each_is_stored_once() -> None:
    kinds = [piece.kind for piece in UNDISTURBED.pieces]

    assert kinds == [DescriptorKind.FRAMES, DescriptorKind.GAP, DescriptorKind.FRAMES, DescriptorKind.FRAMES]
    assert [call.method for call in CALLS] == ["stat", "upload", "put_if_absent"] * 3
    assert METADATA_CALLS["transaction"] == 3


LANDINGS: Final[dict[str, tuple[Callable[[Run], object], Callable[[Run], object]]]] = {
    "before it is repeated": (lambda run: run.blobs.land(), lambda _: None),
    "when all is done": (lambda _: None, lambda run: run.blobs.land()),
    "never": (lambda _: None, lambda _: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("landing", LANDINGS)
def test_a_store_that_fails_at_any_call_leaves_no_gap_and_no_other_content(landing: str, ledger: Ledger) -> None:
    between, at_the_end = LANDINGS[landing]
    for call, fault in plan_faults(CALLS):
        if fault is not Fault.LATE and landing != "never":
            continue
        run = Run()
        run.blobs.fail_at(call.index, fault)

        done = run.is_exported()
        between(run)
        run.export()
        at_the_end(run)

        assert done == (fault is Fault.DUPLICATE)
        _report(run, ledger, fault=fault.value, at=call.method)


def _pairs() -> Iterator[tuple[tuple[Call, Fault], tuple[Call, Fault]]]:
    for first, fault in plan_faults(CALLS):
        run = Run()
        run.blobs.fail_at(first.index, fault)
        run.export()
        for second in plan_faults(run.blobs.calls[first.index + 1 :]):
            yield (first, fault), second


@pytest.mark.slow
def test_a_store_that_fails_again_while_it_is_repeated_does_no_harm_either(ledger: Ledger) -> None:
    for number, faults in enumerate(_pairs()):
        if number % EVERY:
            continue
        run = Run()
        for call, fault in faults:
            run.blobs.fail_at(call.index, fault)

        run.export()
        run.blobs.land()

        _report(run, ledger, fault="two of a store")


@pytest.mark.parametrize("lands", ["before it is repeated", "when all is done"])
@pytest.mark.parametrize("fault", list(MetadataFault))
def test_metadata_that_fails_at_any_call_leaves_no_gap_and_no_double(
    fault: MetadataFault, lands: str, ledger: Ledger
) -> None:
    methods = METADATA_CALLS if fault is MetadataFault.FAIL_BEFORE else {"transaction": METADATA_CALLS["transaction"]}
    for method, calls in methods.items():
        for step in range(calls):
            for count in (1, 100):
                run = Run()
                run.faulty.inject(fault, method=method, after=step, count=count)

                run.is_exported()
                run.faulty.heal()
                if lands == "before it is repeated":
                    run.faulty.land()
                run.export()
                run.faulty.land()

                _report(run, ledger, fault=f"metadata {fault.value}", at=method)


def test_what_an_older_epoch_had_under_way_never_lands_after_a_take_over(ledger: Ledger) -> None:
    for step in range(METADATA_CALLS["transaction"]):
        run = Run()
        run.faulty.inject(MetadataFault.TIME_OUT, after=step, count=100)
        assert not run.is_exported()
        run.environment.own(run.environment.epoch + 1)

        landed = run.faulty.land()
        run.environment.exporter(epoch=run.environment.epoch + 1).export(run.files)

        assert not any(outcome.succeeded for outcome in landed)
        ledger.count("zombie writes", n=len(landed))
        _report(run, ledger, fault="lands after a take-over", at="transaction")


def test_a_transaction_that_lands_after_its_segments_were_merged_changes_nothing() -> None:
    """Their keys are free again then: only the end of history shows that it was done before."""
    for step in range(METADATA_CALLS["transaction"]):
        run = Run()
        run.faulty.inject(MetadataFault.TIME_OUT, after=step)
        run.export()
        catalog = run.environment.catalog()
        pieces = catalog.pieces()
        merged = msgspec.structs.replace(pieces[0].descriptor, end=pieces[-1].descriptor.end, content_hash="ef" * 16)
        assert catalog.replace(pieces, merged)

        landed = run.faulty.land()

        assert [outcome.succeeded for outcome in landed] == [False]
        assert catalog.descriptors() == [merged]
        assert catalog.frontier().next == merged.end


def _with_orphans() -> Run:
    """Two orphans old enough to be swept, one that is younger, and a list that still shows one already gone."""
    run = Run()
    run.blobs.put_if_absent(f"{TOPIC}_0/1-{'0' * 32}.seg", b"left behind")
    run.blobs.put_if_absent(f"{TOPIC}_0/1-{'0' * 32}.idx", b"left behind")
    run.environment.clock.jump(DAY_MS)
    run.blobs.put_if_absent(f"{TOPIC}_0/1-{'1' * 32}.seg", b"just left behind")
    return run


def _sweep_calls() -> list[Call]:
    run = _with_orphans()
    run.export()
    first = len(run.blobs.calls)
    run.environment.collect(run.exporter)
    return run.blobs.calls[first:]


@pytest.mark.parametrize("when", ["before the export", "after the export"])
def test_a_sweep_that_fails_at_any_call_takes_the_orphans_and_nothing_else(when: str, ledger: Ledger) -> None:
    for call, fault in plan_faults(_sweep_calls()):
        run = _with_orphans()
        if when == "after the export":
            run.export()
        before = list(run.blobs.another_process().list())
        run.blobs.fail_at(len(run.blobs.calls) + call.index - _sweep_calls()[0].index, fault)

        for _ in range(ATTEMPTS):
            try:
                run.environment.collect(run.exporter)
                break
            except ForebayError:
                continue
        after = list(run.blobs.another_process().list())
        run.export()
        run.blobs.land()

        older = run.environment.clock.now_ms() - GRACE_S * 1000
        assert list(sweep_is_right(before, after, UNDISTURBED.objects, older_than_ms=older)) == []
        run.blobs.delete(f"{TOPIC}_0/1-{'1' * 32}.seg")
        _report(run, ledger, fault=fault.value, at=f"sweep {call.method}")


@pytest.mark.parametrize("stale_from", range(len(CALLS)))
def test_a_list_that_is_old_lets_nothing_be_swept_that_is_needed(stale_from: int, ledger: Ledger) -> None:
    """The export breaks off at a call; lists stay as they are then; the rest is exported; a day later comes a sweep."""
    run = Run()
    run.blobs.fail_at(stale_from, Fault.FAIL_BEFORE)
    assert not run.is_exported()
    run.blobs.hold_lists_back()
    early = run.sweep()
    run.export()

    late = run.sweep()
    run.blobs.let_lists_go()

    assert [early, late, run.sweep()] == [[], [], []]
    _report(run, ledger, fault="stale list")


def _one_file(blobs: SimulatedBlobs | None = None) -> ShardEnvironment:
    environment = ShardEnvironment(blobs=blobs)
    environment.append(10)
    environment.seal()
    return environment


@pytest.mark.parametrize("part", ["segment", "index"])
def test_what_stands_under_the_key_already_is_compared_by_content(part: str) -> None:
    environment = _one_file()
    environment.export()
    key = environment.catalog().descriptors()[0].object_key
    key = index_name(key) if part == "index" else key
    whole = environment.store.get_range(key, 0, 1 << 20)
    again = _one_file()
    again.store.put_if_absent(key, whole[:-1] + bytes([whole[-1] ^ 1]))

    again.export()

    assert again.store.get_range(key, 0, 1 << 20) == whole
    with history_of(again) as history:
        assert stream(history) == expected(0, 10)


class _DecayingBlobs(SimulatedBlobs):
    """The disk damages the file just before it is uploaded."""

    environment: ShardEnvironment

    def upload(self, key: str, source: Iterable[Bytes]) -> Stat:
        self.environment.disk.open(self.environment.shard.wal.files.all[0].path, writable=True).write_at(b"!", 200)
        return super().upload(key, source)


def test_what_is_uploaded_is_what_was_checked() -> None:
    blobs = _DecayingBlobs()
    blobs.environment = _one_file(blobs)

    with pytest.raises(Corrupt, match="not exported"):
        blobs.environment.export()

    assert blobs.contents == {}
    assert blobs.environment.catalog().descriptors() == []


def test_an_object_that_a_late_transaction_may_yet_name_is_not_swept() -> None:
    environment = _one_file()
    faulty = FaultyMetadata(environment.metadata)
    faulty.inject(MetadataFault.TIME_OUT, count=100)
    with pytest.raises(Indeterminate):
        environment.exporter(catalog=environment.catalog(faulty)).export(environment.shard.wal.files)
    environment.clock.jump(DAY_MS)

    swept = environment.collect()
    faulty.land()

    assert swept == []
    with history_of(environment) as history:
        assert stream(history) == expected(0, 10)


def test_the_object_of_a_manifest_is_not_swept() -> None:
    environment = _one_file()
    environment.export()
    [inner] = environment.catalog().descriptors()
    manifest = msgspec.structs.replace(
        inner, kind=DescriptorKind.MANIFEST, object_key=f"{TOPIC}_0/manifest-1", content_hash="ef" * 16
    )
    environment.store.put_if_absent(manifest.object_key, b"what it lists")
    catalog = ShardCatalog(environment.metadata, KEYS, TOPIC, manifest=lambda _: [inner], clock=ManualClock())
    assert catalog.replace(catalog.pieces(), manifest)
    environment.clock.jump(DAY_MS)

    assert environment.collect(environment.exporter(catalog=catalog), catalog=catalog) == []
