"""Deliberate breaks of ownership, sealing, taking over and deleting: for each the checks must name the promise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

import forebay.cleanup.deleted_topics
import forebay.cleanup.moved_shards
import forebay.engines.segment
import forebay.progress
import forebay.shard.history
import forebay.shard.ownership
import forebay.shard.seal
import forebay.shard.segment
import forebay.storage.cursors
import forebay.wal.recovery.resume
from forebay.appends.producer_window import ProducerWindow
from forebay.appends.queue import AppendQueue
from forebay.blobs import BlobStore, Stat
from forebay.catalog import ShardCatalog, StoredState, read_state
from forebay.clock import Clock
from forebay.errors import ForebayError
from forebay.export import Exporter
from forebay.format.metadata.descriptor import LoadStatus, Phase, ShardState
from forebay.history import History
from forebay.metadata import MetadataStore, SessionEnded
from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.records import Gap
from forebay.shard.owner_loss import Judgement
from forebay.shard.ownership import Wanted
from forebay.shard.recovery import KnownProducers
from forebay.storage.cursors import Cursors
from forebay.testing.checks.catalogs import every_record_has_a_copy, objects_are_whole
from forebay.testing.checks.history import AppendOutcome
from forebay.testing.checks.interleavings import Exploration
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import commits_of, losses_are_accepted
from forebay.testing.inside import inside
from forebay.testing.simulated.blobs import SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault
from forebay.topics import Durability, OnOwnerLoss
from forebay.wal.log import Wal
from tests.history.attached import LoadEnvironment, values
from tests.ledger import Ledger
from tests.mutants.breach import Breach
from tests.protocol.consuming import missed_by_consumers
from tests.protocol.environment import KEYS, Node, OwnersEnvironment
from tests.protocol.judging import check_environment
from tests.protocol.scenarios import SCENARIOS
from tests.protocol.test_exhaustive import SAME_DIRECTORY, Zombies, judge, owner
from tests.protocol.test_schedules import Play
from tests.protocol.two_processes import SimulatedStage, mode_of, run_schedule
from tests.storage.cursor_sequences import broken_by_some_sequence

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy


def _all_orders() -> list[Violation]:
    """Two owners, one lease that ends, every order."""
    owners = {"A": owner("a", "A", exports=False), "B": owner("b", "B", exports=False, seals=False)}
    exploration = Exploration(owners, judge, Zombies().heard)
    exploration.explore(faults=0, endings=1)
    return [Violation(*text.split(": ", 1)) for text in exploration.violations]


def _all_orders_of_one_directory() -> list[Violation]:
    """Two processes of one directory: the first loses its lease and goes on, in every order."""
    exploration = Exploration(dict(zip("AB", SAME_DIRECTORY, strict=True)), judge, Zombies().heard)
    exploration.explore(faults=0, endings=1)
    return [Violation(*text.split(": ", 1)) for text in exploration.violations]


def _some_schedules() -> list[Violation]:
    """Three owners, a few seeds."""
    violations: list[Violation] = []
    for seed in range(12):
        play = Play(seed)
        try:
            violations += play.run()
        except ForebayError as error:
            violations.append(Violation("recovery", f"{type(error).__name__}: {error}"))
        finally:
            play.schedule.end()
    return violations


def _two_processes() -> list[Violation]:
    """Whole processes with one metadata store, a few seeds."""
    with pytest.MonkeyPatch.context() as quick:
        quick.setattr(forebay.cleanup.deleted_topics, "OWNER_SECONDS", 0.0)
        schedules = [run_schedule(seed, SimulatedStage(mode_of(seed)), steps=32) for seed in range(41, 49)]
    return [violation for schedule in schedules for violation in schedule.violations]


def _take_over() -> list[Violation]:
    """A directory takes over that still has files of its own from before."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == "take-over")
    environment = OwnersEnvironment()
    scenario.run(environment, scenario.before(environment))
    return scenario.check(environment)


def _seal_without_an_object() -> list[Violation]:
    """The store has lost an object when the shard is sealed; once it has moved, local files are cleared away."""
    blobs = SimulatedBlobs(clock=ManualClock())
    environment = OwnersEnvironment(blobs=blobs)
    node, other = environment.node("a"), environment.node("b")
    node.append(3)
    node.export()
    node.append()
    for key in blobs.contents:
        blobs.delete(key)
    try:
        node.seal()
        other.append()
        node.clear_moved()
    except ForebayError:
        pass
    files = environment.log_files("a") | environment.log_files("b")
    return list(
        every_record_has_a_copy(environment.history(), environment.catalog.descriptors(), environment.fetch, files)
    )


def _seal_and_look_later() -> list[Violation]:
    """As above, but nothing else happens: what was recorded at the seal must be true at that moment."""
    blobs = SimulatedBlobs(clock=ManualClock())
    environment = OwnersEnvironment(blobs=blobs)
    node = environment.node("a")
    node.append(3)
    node.export()
    for key in blobs.contents:
        blobs.delete(key)
    with contextlib.suppress(ForebayError):
        node.seal()
    return environment.uncovered


def _export_over_an_object() -> list[Violation]:
    """Under the name of what is to be exported lies something else of its size, as a failing store may leave it."""
    twin = OwnersEnvironment(blobs=SimulatedBlobs(clock=ManualClock()))
    node = twin.node("a")
    node.append(3)
    node.export()
    blobs = SimulatedBlobs(clock=ManualClock())
    for key, content in twin.objects().items():
        blobs.upload(key, [bytes(len(content))])
    environment = OwnersEnvironment(blobs=blobs)
    node = environment.node("a")
    node.append(3)
    node.export()
    assert blobs.contents.keys() == twin.objects().keys(), "the same names, for the same bytes"
    return list(objects_are_whole(environment.catalog.descriptors(), environment.fetch))


def _retain_without_an_object() -> list[Violation]:
    """The store has lost an object when local copies go."""
    blobs = SimulatedBlobs(clock=ManualClock())
    environment = OwnersEnvironment(blobs=blobs)
    node = environment.node("a")
    node.append(3)
    node.export()
    node.append()
    for key in blobs.contents:
        blobs.delete(key)
    node.shard.history.retain()
    files = environment.log_files("a")
    return list(
        every_record_has_a_copy(environment.history(), environment.catalog.descriptors(), environment.fetch, files)
    )


def _repeat_after_a_move() -> list[Violation]:
    """A producer sends again what it sent to the owner before, some files ago."""
    environment = OwnersEnvironment()
    node, other = environment.node("a"), environment.node("b")
    node.append(producing=(1, 0))
    node.export()
    node.append()
    node.seal()
    other.append(producing=(1, 0))
    return check_environment(environment, other.reading())


def _consume_beside_a_load() -> list[Violation]:
    """A consumer comes when a load is attached and not yet committed, and again when it is."""
    environment = LoadEnvironment()
    node = environment.node()
    node.append(0, 2)
    node.offer({0: values(0, 4)})
    inside(node.loads).attach_to("load-1", environment.load(), [node.shard(0)])
    node.append()
    node.consume()
    node.settle()
    node.consume()
    records = [step for step in node.stream() if not isinstance(step, Gap)]
    return list(missed_by_consumers(environment.disk.trace.notes(), records))


def _append_elsewhere() -> list[Violation]:
    """An owner dies with records that history lacks, and another directory is asked to append."""
    return _losses_by(Node.append)


def _taken_over_with_a_yes() -> list[Violation]:
    """The same, and an operator gives these records up."""
    return _losses_by(Node.take_over)


def _losses_by(act: Callable[[Node], object]) -> list[Violation]:
    environment = OwnersEnvironment(on_owner_loss=OnOwnerLoss.WAIT)
    node, other = environment.node("a"), environment.node("b")
    node.append(3)
    node.die()
    act(other)
    return list(losses_are_accepted(commits_of(KEYS, environment.committed)))


def _idle_owner_dies() -> list[Violation]:
    """An owner dies that has exported everything: nothing is lost, so another directory goes on."""
    environment = OwnersEnvironment(on_owner_loss=OnOwnerLoss.WAIT)
    node, other = environment.node("a"), environment.node("b")
    node.append(3)
    node.export()
    node.die()
    if other.append() is not AppendOutcome.ACKED:
        return [Violation("I33", "no directory can go on, though nothing is at risk")]
    return check_environment(environment, other.reading())


def _export_beside_an_append() -> list[Violation]:
    """An export reaches the end of the log while an append of class memory waits, acknowledged; then the owner dies."""
    environment = OwnersEnvironment(durability=Durability.MEMORY)
    node = environment.node("a")
    node.append(3)
    node.rotate()
    node.append(2)
    node.shard.history.catch_up()
    node.die()
    environment.node("a").append(2)
    given = [append.offset for append in environment.history().acked]
    return [Violation("I4", f"offsets {given} were acknowledged")] if len(set(given)) < len(given) else []


def _delete_and_fail() -> list[Violation]:
    """The metadata store fails once objects are gone: whoever asks must hear that the topic is being deleted."""
    blobs = _TellingBlobs(clock=ManualClock())
    environment = OwnersEnvironment(blobs=blobs)
    node, other = environment.node("a"), environment.node("b")
    node.append(3)
    node.export()
    other.definitions.begin_deletion(environment.ref.spec.name)
    blobs.on_delete = lambda: environment.faulty.inject(Fault.FAIL_BEFORE, count=100)
    other.deletions.finish()
    state = environment.state
    if state is None or state.phase is Phase.DELETING:
        return []
    return list(objects_are_whole(environment.catalog.descriptors(), environment.fetch))


class _TellingBlobs(SimulatedBlobs):
    """Tells of each deletion."""

    on_delete: Callable[[], None]

    def delete(self, key: str) -> None:
        super().delete(key)
        self.on_delete()


# The breaks.


def _epoch_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardCatalog, "owned", lambda catalog, epoch: catalog.state())


def _reservation_outlives_a_seal(patch: pytest.MonkeyPatch) -> None:
    change_state = forebay.shard.ownership.change_state

    def keeping(
        store: MetadataStore, shard: Wanted, epoch: int, change: Callable[[ShardState], ShardState], *, clock: Clock
    ) -> ShardState:
        def kept(state: ShardState) -> ShardState:
            return msgspec.structs.replace(change(state), reserved_end=state.reserved_end)

        return change_state(store, shard, epoch, kept, clock=clock)

    patch.setattr(forebay.shard.seal, "change_state", keeping)


def _reserved_for_oneself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.shard.segment, "reserve_in_state", lambda *_, **__: lambda end: end)


def _epoch_not_compared_in_the_state(patch: pytest.MonkeyPatch) -> None:
    change_state = forebay.shard.ownership.change_state

    def anybody(
        store: MetadataStore, shard: Wanted, epoch: int, change: Callable[[ShardState], ShardState], **options: Any
    ) -> ShardState:
        stored = read_state(store, shard.key)
        return change_state(store, shard, epoch if stored is None else stored.state.epoch, change, **options)

    for module in (forebay.shard.ownership, forebay.shard.seal):
        patch.setattr(module, "change_state", anybody)


def _living_sessions_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.shard.ownership, "SessionEnded", lambda _: SessionEnded("nobody"))
    patch.setattr(forebay.shard.ownership, "refuse_if_owned", lambda *_, **__: None)


def _loss_needs_no_yes(patch: pytest.MonkeyPatch) -> None:
    for module in (forebay.shard.ownership, forebay.engines.segment):
        patch.setattr(module, "judge", lambda *_: Judgement())


def _accepted_loss_not_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.shard.ownership, "with_loss", lambda state, loss: state)


def _reservation_never_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Wal, "give_back_reserved", lambda *_: None)


def _given_back_beside_what_is_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AppendQueue, "if_idle_at", lambda queue, offset, step: step())


def _old_files_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.cleanup.moved_shards, "set_aside", lambda *_: [])
    patch.setattr(forebay.wal.recovery.resume, "set_aside", lambda *_: [])


def _coverage_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.shard.seal, "check_coverage", lambda *_: None)


def _coverage_checked_too_late(patch: pytest.MonkeyPatch) -> None:
    check, change = forebay.shard.seal.check_coverage, forebay.shard.ownership.change_state
    waiting: list[Callable[[], None]] = []

    def changed(*arguments: Any, clock: Clock) -> ShardState:
        state = change(*arguments, clock=clock)
        while waiting:
            waiting.pop()()
        return state

    patch.setattr(forebay.shard.seal, "check_coverage", lambda *args: waiting.append(lambda: check(*args)))
    patch.setattr(forebay.shard.seal, "change_state", changed)


def _objects_taken_unread(patch: pytest.MonkeyPatch) -> None:
    place = Exporter.place

    def unread(exporter: Exporter, store: BlobStore, key: str, file: Any, footer: Any) -> Stat:
        return store.stat(key) or place(exporter, store, key, file, footer)

    patch.setattr(Exporter, "place", unread)


def _epochs_of_one_directory_not_compared(patch: pytest.MonkeyPatch) -> None:
    change_state = forebay.shard.ownership.change_state

    def changed(
        store: MetadataStore, shard: Wanted, epoch: int, change: Callable[[ShardState], ShardState], **options: Any
    ) -> ShardState:
        stored = read_state(store, shard.key)
        is_ours = stored is not None and stored.state.holder_since <= epoch
        used = stored.state.epoch if stored is not None and is_ours else epoch
        return change_state(store, shard, used, change, **options)

    owned = ShardCatalog.owned

    def found(catalog: ShardCatalog, epoch: int) -> StoredState:
        stored = catalog.state()
        return stored if stored is not None and stored.state.holder_since <= epoch else owned(catalog, epoch)

    patch.setattr(ShardCatalog, "owned", found)
    for module in (forebay.shard.ownership, forebay.shard.seal):
        patch.setattr(module, "change_state", changed)


def _deleted_before_it_says_so(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.cleanup.deleted_topics, "mark_deleting", lambda *_: None)


def _copies_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.shard.history, "is_there", lambda *_: True)


def _cursors_go_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.progress, "moves_on", lambda *_: True)


def _cached_commits_compared_among_themselves(patch: pytest.MonkeyPatch) -> None:
    note = Cursors._note

    def blindly(cursors: Cursors, name: ReaderName, partition: int, progress: Progress) -> int:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(ProgressStore, "get", lambda *_: None)
            return note(cursors, name, partition, progress)

    patch.setattr(Cursors, "_note", blindly)
    patch.setattr(forebay.storage.cursors, "_further", lambda stored, noted: noted or stored)


def _durable_commits_blind_to_cached_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cursors, "_commit", lambda cursors, place, progress: cursors._advance({place: progress}))


def _repeats_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forebay.shard.segment, "known_in_history", lambda *_: KnownProducers(ProducerWindow(1, 1), 0))


def _loads_passed_over(patch: pytest.MonkeyPatch) -> None:
    def status(history: History, load_id: str) -> LoadStatus:
        found = history._catalog.load_status(load_id)
        return LoadStatus.ABANDONED if found is LoadStatus.OFFERED else found

    patch.setattr(History, "load_status", status)


MUTANTS: Final = (
    Breach("epoch not compared by an export", _epoch_not_compared, _all_orders, "I20"),
    Breach(
        "epochs compared only where the holder changed",
        _epochs_of_one_directory_not_compared,
        _all_orders_of_one_directory,
        "I20",
    ),
    Breach("sealed before coverage is checked", _coverage_checked_too_late, _seal_and_look_later, "I17"),
    Breach("an object that is there taken unread", _objects_taken_unread, _export_over_an_object, "I16"),
    Breach("reservation outlives a seal", _reservation_outlives_a_seal, _all_orders, "I21"),
    Breach("a living session is taken over", _living_sessions_ignored, _all_orders, "I19"),
    Breach("a tail at risk is taken over without a yes", _loss_needs_no_yes, _append_elsewhere, "I41"),
    Breach("an accepted loss is not recorded", _accepted_loss_not_recorded, _taken_over_with_a_yes, "I41"),
    Breach("a process takes over without a yes", _loss_needs_no_yes, _two_processes, "I41"),
    Breach("a process does not record the yes", _accepted_loss_not_recorded, _two_processes, "I41"),
    Breach("a process takes over from one that lives", _living_sessions_ignored, _two_processes, "I19"),
    Breach("a process reserves offsets for itself alone", _reserved_for_oneself, _two_processes, "I4"),
    Breach("an export gives nothing back", _reservation_never_given_back, _idle_owner_dies, "I33"),
    Breach("given back while an append waits", _given_back_beside_what_is_queued, _export_beside_an_append, "I4"),
    Breach("epoch not compared by a reservation or a seal", _epoch_not_compared_in_the_state, _some_schedules, "I20"),
    Breach("offsets reserved for oneself alone", _reserved_for_oneself, _some_schedules, "I4"),
    Breach("old files stay at a take-over", _old_files_stay, _take_over, "I20"),
    Breach("coverage not checked at a seal", _coverage_not_checked, _seal_without_an_object, "I17"),
    Breach("local copies go, those in the store are lost", _copies_not_looked_for, _retain_without_an_object, "I17"),
    Breach("a late acknowledgement moves a cursor back", _cursors_go_back, _some_schedules, "I25"),
    Breach(
        "a durable commit answers less than was cached before",
        _durable_commits_blind_to_cached_ones,
        lambda: list(broken_by_some_sequence()),
        "I25",
    ),
    Breach(
        "a cached commit moves a cursor back",
        _cached_commits_compared_among_themselves,
        lambda: list(broken_by_some_sequence()),
        "I25",
    ),
    Breach("repeats are not known after a move", _repeats_forgotten, _repeat_after_a_move, "I26"),
    Breach("a load that is not committed is passed over", _loads_passed_over, _consume_beside_a_load, "I25"),
    Breach("deleted before it says so", _deleted_before_it_says_so, _delete_and_fail, "I16"),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_checks_name_the_promise_that_a_break_breaks(
    mutant: Breach, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    mutant.check_sound()
    mutant.check_caught(monkeypatch, ledger)
