"""Every crash that the simulated disk knows, at every step of an export into a store on it, and of a sweep there.

The metadata store survives each crash as it stood at that moment: its transactions are noted in the trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import pytest

from forebay.blobs.directory import UPLOADS, DirectoryStore
from forebay.catalog import ShardCatalog, ShardKeys, read_state
from forebay.cleanup.collector import Collector, Scope
from forebay.export import Exporter, Origin
from forebay.history import History, Objects
from forebay.metadata import MemoryMetadata
from forebay.records import Gap
from forebay.shard.ownership import Owner, Wanted, acquire
from forebay.testing.checks.catalogs import (
    Ending,
    check_history,
    ending_of,
    from_files,
    keys_of,
    references_are_complete,
    runs_converge,
    sweep_is_right,
)
from forebay.testing.checks.history import AppendOutcome, Reading, read_everything
from forebay.testing.checks.invariants import Violation, names_follow_bytes
from forebay.testing.checks.moves import (
    Operations,
    RecordingMetadata,
    commits_of,
    nothing_of_older_epochs,
    one_epoch_at_a_time,
    replayed,
)
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.crashes import CrashState, explore
from forebay.testing.simulated.trace import Note
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.support.environments.simulated import files_of
from tests.support.soak import SOAK, sampled
from tests.wal.checks import Recoveries
from tests.wal.rig import DIRECTORY, ROOT, TOPIC_ID, Rig, Simulated, after, history_of, simulated

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

STATES_MAX: Final = 32 if SOAK else 1
NAMES_MAX: Final = 16 if SOAK else 3
RECOVERIES: Final = 64 if SOAK else 2

CLASSES: Final = [Durability.FSYNC, Durability.DISK, *([Durability.MEMORY] if SOAK else [])]

KEYS: Final = ShardKeys("shop", "orders", 0, "/forebay")
STORE: Final = f"{ROOT}/store"
NOTE: Final = "metadata"
DAY_MS: Final = 86_400_000
GRACE_S: Final = 3600


class Archive:
    """A shard, and the store and catalog that its history goes to."""

    def __init__(self, rig: Simulated, metadata: MemoryMetadata) -> None:
        self.rig = rig
        self.violations: list[Violation] = []
        self.metadata = RecordingMetadata(metadata, on_commit=self._committed)
        self.catalog = ShardCatalog(self.metadata, KEYS, TOPIC_ID, clock=ManualClock())
        self.store = DirectoryStore(STORE, disk=rig.disk, clock=rig.clock).open()

    def open(self) -> Archive:
        """Acquire the shard as a new process would, and recover it."""
        owner = Owner(f"session {self.rig.epoch + 1}", ROOT)
        acquire(self.metadata, [Wanted(KEYS.state, TOPIC_ID)], owner, clock=self.rig.clock)
        self.rig.open()
        return self

    def _committed(self, operations: Operations) -> None:
        self.rig.disk.note(NOTE, operations)
        for commit in commits_of(KEYS, [operations]):
            self.violations += references_are_complete(commit.pieces, from_files(files_of(self.rig.disk), STORE))

    def exporter(self) -> Exporter:
        origin = Origin(TOPIC_ID, 0, self.rig.epoch, ROOT, "directory")
        return Exporter(origin, self.catalog, self.store, disk=self.rig.disk, clock=self.rig.clock)

    def export(self) -> None:
        self.exporter().export(self.rig.wal.files)

    def seal(self) -> None:
        self.rig.wal.rotate()
        self.rig.shard.upkeep.seal_rotated()

    def sweep(self) -> None:
        exporter, files = self.exporter(), self.rig.wal.files
        scope = Scope(
            store=self.store,
            prefix=exporter.origin.prefix,
            catalog=self.catalog,
            is_compacting=lambda: False,
            unexported=lambda: exporter.unexported(files),
            epoch=exporter.origin.epoch,
        )
        Collector(self.rig.clock, GRACE_S).collect(scope)
        self.store.abort_stale_uploads(GRACE_S)

    def ending(self) -> Ending:
        prefix = f"{STORE}/"
        objects = {
            path.removeprefix(prefix): c for path, c in files_of(self.rig.disk).items() if path.startswith(prefix)
        }
        return ending_of(self.catalog.descriptors(), objects)

    def reading(self) -> Reading:
        """What a reader of history alone gets."""
        objects = Objects(self.store)
        try:
            return read_everything(History(self.catalog, objects.segment).read, self.catalog.frontier().next)
        finally:
            objects.close()


def _logs(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: content for path, content in files.items() if path.startswith(f"{DIRECTORY}/")}


def _three_files(archive: Archive) -> None:
    """With a gap before the second, where the class leaves one after a reboot."""
    archive.rig.append(3)
    archive.rig.append()
    archive.seal()
    archive.rig.disk.boot = "boot-2"
    archive.open()
    archive.rig.append(2)
    archive.seal()
    archive.rig.append(producing=(1, 0))
    archive.rig.append(producing=(1, 1))
    archive.seal()


def _export(archive: Archive) -> None:
    archive.export()
    archive.rig.append()
    archive.seal()
    archive.export()
    archive.rig.append(2)


def _orphans(archive: Archive) -> None:
    """What an attempt of another epoch left, a day ago and just now."""
    _three_files(archive)
    archive.export()
    for part in ("seg", "idx"):
        archive.store.put_if_absent(f"{TOPIC_ID}_0/1-{'0' * 32}.{part}", b"left behind")
    archive.rig.disk.create(f"{STORE}/{UPLOADS}/half.tmp").write_at(b"half", 0)
    archive.rig.clock.jump(DAY_MS)
    archive.rig.disk.now_ms = archive.rig.clock.now_ms()
    archive.store.put_if_absent(f"{TOPIC_ID}_0/2-{'1' * 32}.seg", b"just left behind")
    archive.rig.append()
    archive.seal()


def _sweep(archive: Archive) -> None:
    archive.sweep()
    archive.export()


SCENARIOS: Final[dict[str, tuple[Callable[[Archive], None], Callable[[Archive], None]]]] = {
    "export": (_three_files, _export),
    "sweep of a store": (_orphans, _sweep),
}


def _prepared(name: str, durability: Durability) -> Archive:
    rig = Rig(simulated(), durability, seed=f"{name} {durability}")
    return Archive(rig, MemoryMetadata()).open()


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.proves("I15", "I16", "I17", "I18", "I19", "I20", "I22")
def test_no_crash_of_an_export_or_a_sweep_breaks_a_promise(name: str, durability: Durability, ledger: Ledger) -> None:
    before, run = SCENARIOS[name]
    archive = _prepared(name, durability)
    before(archive)
    trace = archive.rig.disk.trace
    begun = len(trace)
    run(archive)

    assert archive.violations == []
    assert list(names_follow_bytes(trace)) == []
    states = explore(trace, range(begun, len(trace) + 1), states_max=STATES_MAX, names_max=NAMES_MAX)
    _judge(states, durability, name, ledger)


@pytest.mark.parametrize("durability", CLASSES)
def test_no_crash_inside_a_repeated_export_breaks_a_promise(durability: Durability, ledger: Ledger) -> None:
    archive = _prepared("export again", durability)
    _three_files(archive)
    trace = archive.rig.disk.trace
    begun = len(trace)
    _export(archive)
    states = list(explore(trace, range(begun, len(trace) + 1), states_max=1, names_max=2))
    chosen = states[:: max(1, len(states) // RECOVERIES)]

    again = itertools.chain.from_iterable(_exporting_again(state, durability) for state in chosen)
    _judge(sampled(again, one_in=2, seed=f"export again {durability}"), durability, "export again", ledger)


def _exporting_again(state: CrashState, durability: Durability) -> Iterator[CrashState]:
    """Every crash of the export that follows a crash."""
    archive = _recovered(state, durability)
    trace = archive.rig.disk.trace
    begun = len(trace)
    archive.rig.append()
    archive.seal()
    archive.export()
    yield from explore(trace, range(begun, len(trace) + 1), states_max=1, names_max=2)


def _judge(states: Iterable[CrashState], durability: Durability, name: str, ledger: Ledger) -> None:
    broken: list[str] = []
    digests: set[bytes] = set()
    recoveries = Recoveries(durability)
    for state in states:
        digests.add(state.digest())
        ledger.count("crash states", scenario=name, damage=state.damage.value)
        violations = [
            *_at_that_moment(state, durability),
            *recoveries.violations(state),
            *_export_and_go_on(state, durability),
        ]
        if violations:
            ledger.violation("crash states", scenario=name, damage=state.damage.value)
            broken += [f"{state}: {violation}" for violation in violations]
    ledger.count("distinct crash states", n=len(digests), scenario=name)
    assert broken[:10] == []


def _metadata_of(notes: Iterable[Note]) -> MemoryMetadata:
    return replayed(note.payload for note in notes if note.kind == NOTE)  # type: ignore[misc]  # only `Archive` notes


def _at_that_moment(state: CrashState, durability: Durability) -> list[Violation]:
    """I15 to I17 on what the crash left, before anyone repairs anything."""
    catalog = ShardCatalog(_metadata_of(state.notes), KEYS, TOPIC_ID, clock=ManualClock())
    files = state.files()
    history = history_of(durability, state.disk().trace.notes())
    fetch = from_files(files, STORE)
    return check_history(history, catalog.descriptors(), catalog.frontier().next, fetch, _logs(files))


def _recovered(state: CrashState, durability: Durability) -> Archive:
    metadata = _metadata_of(state.notes)
    stored = read_state(metadata, KEYS.state)
    assert stored is not None
    return Archive(after(state, durability, epoch=stored.state.epoch), metadata).open()


def _export_and_go_on(state: CrashState, durability: Durability) -> list[Violation]:
    """Recover, append, export to the end, sweep a day later; then all of it once more."""
    archive = _recovered(state, durability)
    assert archive.rig.append() is AppendOutcome.ACKED
    archive.seal()
    archive.export()
    violations = [*archive.violations, *_history_holds(archive), *_sweep_holds(archive)]
    first = archive.ending()
    archive.export()
    archive.sweep()
    violations += runs_converge(first, archive.ending())
    committed = [note.payload for note in archive.rig.disk.trace.notes() if note.kind == NOTE]
    commits = commits_of(KEYS, committed)  # type: ignore[arg-type]  # only `Archive` notes these
    return [*violations, *one_epoch_at_a_time(commits), *nothing_of_older_epochs(commits)]


def _history_holds(archive: Archive) -> Iterator[Violation]:
    """All of the log is history now, and reads the same."""
    files = files_of(archive.rig.disk)
    pieces, frontier = archive.catalog.descriptors(), archive.catalog.frontier().next
    yield from check_history(archive.rig.history(), pieces, frontier, from_files(files, STORE), _logs(files))
    log, history = archive.rig.reading(), archive.reading()
    if (_flat(log), log.end) != (_flat(history), history.end):
        yield Violation("I8", f"history reads {history}, the log {log}")


def _flat(reading: Reading) -> list[tuple[int, bytes | None] | Gap]:
    return sorted(reading.steps, key=lambda step: step[0])


def _sweep_holds(archive: Archive) -> Iterator[Violation]:
    clock, store = archive.rig.clock, archive.store
    clock.jump(DAY_MS)
    before, older = list(store.list()), clock.now_ms() - GRACE_S * 1000
    clock.jump(DAY_MS)
    archive.sweep()
    needed = keys_of(archive.catalog.descriptors())
    yield from sweep_is_right(before, store.list(), needed, older_than_ms=older + DAY_MS)
    if archive.rig.disk.list_directory(f"{STORE}/{UPLOADS}"):
        yield Violation("I18", "an upload cut short was not cleared away")
