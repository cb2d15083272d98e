"""The move protocol alone, for a small bound: every order in which owners reach the metadata store, every fault.

The transactions are the real ones; what lies between them (a log, a store) is as small as can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Final, NamedTuple, cast

import pytest

from forebay.appends.producer_window import ProducerWindow
from forebay.blobs import Stat
from forebay.catalog import ShardCatalog
from forebay.errors import ForebayError, Moved
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor, ShardState, gap_descriptor
from forebay.format.metadata.value import decode_value
from forebay.metadata import MemoryMetadata, MetadataStore
from forebay.places import Places
from forebay.records import Reason
from forebay.shard import Owner, SegmentShard, ShardContext, Situation, Wanted, acquire, decide
from forebay.shard.ownership import reserve_in_state
from forebay.shard.recovery import RecoveryDecision
from forebay.shard.seal import begin_seal, finish_seal
from forebay.testing.checks.catalogs import catalog_is_contiguous
from forebay.testing.checks.interleavings import Exploration, Moment, Program, Report
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import (
    Commit,
    Operations,
    commits_of,
    losses_are_accepted,
    nothing_of_older_epochs,
    one_epoch_at_a_time,
)
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import Durability
from forebay.wal.recovery.survey import Survey
from tests.ledger import Ledger
from tests.protocol.environment import KEYS, OwnersEnvironment, settings_of
from tests.protocol.judging import Passing, passings, seals_are_exact
from tests.support.environments.simulated import TOPIC_ID
from tests.support.soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

SETTINGS: Final = settings_of("shared_fs")
REF: Final = OwnersEnvironment().ref


class Began(NamedTuple):
    """An owner goes on at this offset."""

    epoch: int
    at: int


class Acked(NamedTuple):
    """An owner has acknowledged a record."""

    offset: int
    value: str


class Store:
    """Has every object that was ever named."""

    name = "store"

    def stat(self, key: str) -> Stat:
        return Stat(key, 0, None, None, 0)


class Shard:
    """A shard whose log is a number, and whose files are in the store as soon as they are catalogued."""

    def __init__(self, store: MetadataStore, name: str, epoch: int, decision: RecoveryDecision) -> None:
        self.ref = REF
        self.epoch = epoch
        self.name = name
        self.next = decision.next_offset
        self.exported = decision.next_offset
        self.catalog = ShardCatalog(store, KEYS, TOPIC_ID, clock=ManualClock())
        self.history = self.upkeep = self.wal = self
        self.files = SimpleNamespace(begins=decision.next_offset)
        self.writer = SimpleNamespace(next=self.next, opening_gap=None, active=None)

    def append(self, report: Report) -> None:
        """What is reserved is written, and acknowledged."""
        report(Acked(self.next, f"{self.name}{self.next}"))
        self.next += 1
        self.writer.next = self.next

    def catch_up(self, _: object = None, *, accept_damage: bool = False, gives_back: bool = False) -> None:
        """Everything written becomes history, as one file; what is reserved beyond may be given back with it."""
        if self.exported < self.next:
            piece = SegmentDescriptor(
                kind=DescriptorKind.FRAMES,
                topic_id=TOPIC_ID,
                start=self.exported,
                end=self.next,
                epoch=self.epoch,
                content_hash=self.name,
                store="store",
                object_key=f"{self.name}{self.exported}",
            )
            self.catalog.extend(self.epoch, [piece], lambda: gives_back)
            self.exported = self.next

    def hold(self, _: ForebayError) -> None:
        """Nothing is appended once a seal has begun."""

    def flush(self) -> None: ...

    def rotate(self) -> None: ...

    def seal_rotated(self, *, accept_damage: bool = False) -> None: ...

    def rotated(self) -> list[object]:
        return []

    def publish_local(self, _: object = None) -> None: ...


def owner(
    name: str, session: str, *, exports: bool = True, gives_back: bool = False, seals: bool = True, tries: int = 1
) -> Program:
    """Acquire, recover, reserve, append, export, append, and seal; any error ends it."""

    def run(store: MetadataStore, report: Report) -> None:
        try:
            shard = _opened(store, name, session, tries, report)
            if shard is None:
                return
            reserve = reserve_in_state(store, Wanted(KEYS.state, TOPIC_ID), shard.epoch, clock=ManualClock())
            reserve(shard.next + 3)
            shard.append(report)
            if exports:
                shard.catch_up(gives_back=gives_back)
                if gives_back:
                    reserve(shard.next + 3)
                shard.append(report)
            if seals:
                _seal(shard, store)
        except ForebayError as error:
            report(type(error).__name__)

    return run


def _opened(store: MetadataStore, name: str, session: str, tries: int, report: Report) -> Shard | None:
    for _ in range(tries):
        try:
            [(before, epoch)] = acquire(
                store, [Wanted(KEYS.state, TOPIC_ID)], Owner(session, name), clock=ManualClock(), accepted_by=name
            )
        except Moved:
            continue
        catalog = ShardCatalog(store, KEYS, TOPIC_ID, clock=ManualClock())
        here = Situation(name, Durability.FSYNC, "", name, frontier=catalog.frontier().next, shared=True)
        decision = decide(Survey(directory="", window=ProducerWindow(1, 1)), before, here)
        if decision.gap is not None:
            catalog.extend(epoch, [gap_descriptor(decision.gap, topic_id=TOPIC_ID, epoch=epoch, created_at=0)])
        report(Began(epoch, decision.next_offset))
        return Shard(store, name, epoch, decision)
    return None


def _seal(shard: Shard, store: MetadataStore) -> None:
    places = cast(Places, SimpleNamespace(store=Store(), store_name="store", manifest=None, clock=ManualClock()))
    around = ShardContext(store, SETTINGS, places, shard.name, lambda: True)
    sealing = cast(SegmentShard, shard)
    begin_seal(sealing, around, None)
    finish_seal(sealing, around, clock=ManualClock(), on_file=None)


@lru_cache(maxsize=4096)
def _commits(operations: Operations) -> tuple[Commit, ...]:
    return tuple(commits_of(KEYS, [operations]))


def judge(moment: Moment) -> Iterator[Violation]:
    """I4, I15, I19 to I21 and I41, of whatever has happened so far."""
    commits = [commit for _, operations in moment.recorded.committed for commit in _commits(operations)]
    yield from one_epoch_at_a_time(commits)
    yield from nothing_of_older_epochs(commits)
    yield from losses_are_accepted(commits)
    yield from seals_are_exact(commits)
    passed = passings(commits)
    for left, taken, _ in passed:
        if left.owner in moment.sessions - {taken.owner}:
            yield Violation("I19", f"epoch {taken.epoch} was taken from {left.owner}, which lives")
    catalog = ShardCatalog(MemoryMetadata(moment.recorded.memory), KEYS, TOPIC_ID, clock=ManualClock())
    pieces, frontier = catalog.descriptors(), catalog.frontier().next
    yield from catalog_is_contiguous(pieces, frontier)
    began = {
        event.epoch: event.at
        for standing in moment.standings
        for event in standing.reported
        if isinstance(event, Began)
    }
    acked = [event for standing in moment.standings for event in standing.reported if isinstance(event, Acked)]
    if len({ack.offset for ack in acked}) < len(acked):
        yield Violation("I4", f"an offset stands for two records: {acked}")
    for ack in acked:
        yield from _kept(ack, pieces, frontier, passed)
    # One that was overtaken while it recovered finds what the next owner did; it will write nothing.
    for passing in passed[-1:]:
        at = began.get(passing.taken.epoch)
        if at is not None and at != passing.hole[1]:
            yield Violation("I21", f"epoch {passing.taken.epoch} began at {at}, left was {passing.left}")


def _kept(ack: Acked, pieces: list[SegmentDescriptor], frontier: int, passed: list[Passing]) -> Iterator[Violation]:
    """An acknowledged record is history, or still its owner's, or lies where an owner was taken over."""
    piece = next((piece for piece in pieces if piece.start <= ack.offset < piece.end), None)
    lost = any(start <= ack.offset < stop for start, stop in (passing.hole for passing in passed))
    if piece is None:
        held = not lost and ack.offset >= frontier
    elif piece.kind is DescriptorKind.GAP:
        held = lost and piece.reason == Reason.LOST
    else:
        held = ack.value.startswith(piece.content_hash)
    if not held and not (piece is None and lost):
        yield Violation("I21", f"{ack} is in {piece}, history ends at {frontier}, passed {passed}")


@lru_cache(maxsize=4096)
def _epoch(value: bytes) -> int:
    return decode_value(value, ShardState)[0].epoch


class Zombies:
    """Counts what owners write whose shard another has."""

    def __init__(self) -> None:
        self.attempts = 0
        self.successes = 0

    def heard(self, moment: Moment, index: int, succeeded: bool) -> None:  # noqa: FBT001 - the signature of `on_write`
        entry = moment.recorded.memory.entries.get(KEYS.state)
        own = [event.epoch for event in moment.standings[index].reported if isinstance(event, Began)]
        if entry is not None and own and _epoch(entry.value) > own[0]:
            self.attempts += 1
            self.successes += succeeded


class Bound(NamedTuple):
    """Which owners, how many faults, and how many leases that end while their owners live."""

    owners: tuple[Program, ...]
    faults: int
    endings: int


SAME_DIRECTORY: Final = (owner("a", "A", seals=False), owner("a", "B", seals=False))
"""Two processes of one data directory: their holder is the same, only the epoch differs."""


def _bounds() -> dict[str, Bound]:
    brief = (owner("a", "A", exports=False), owner("b", "B", exports=False, seals=False))
    whole = (owner("a", "A"), owner("b", "B"))
    idle = (owner("a", "A", gives_back=True, seals=False), owner("b", "B", exports=False, seals=False))
    bounds = {
        "one gives back what it reserved": Bound(idle, 0, 1),
        "two owners, a fault": Bound(brief, 1, 1),
        "two that export and seal": Bound(whole, 0, 1),
        "two of one directory": Bound(SAME_DIRECTORY, 0, 1),
    }
    if SOAK:
        three = tuple(owner(name, name.upper(), exports=False, seals=name == "a") for name in "abc")
        bounds |= {
            "two owners, two faults": Bound(brief, 2, 0),
            "two that try again": Bound((owner("a", "A", tries=2), owner("b", "B", tries=2)), 0, 2),
            "three owners": Bound(three, 0, 1),
        }
    return bounds


BOUNDS: Final = _bounds()


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.proves("I4", "I15", "I19", "I20", "I21", "I41")
def test_no_order_and_no_fault_breaks_a_move(name: str, ledger: Ledger) -> None:
    bound, zombies = BOUNDS[name], Zombies()
    exploration = Exploration(dict(zip("ABC", bound.owners, strict=False)), judge, zombies.heard)

    schedules = exploration.explore(faults=bound.faults, endings=bound.endings)

    ledger.count("schedules, exhaustive", n=schedules, bound=name)
    ledger.count("moments of these schedules", n=exploration.moments, bound=name)
    ledger.count("zombie writes", n=zombies.attempts, bound=name)
    if exploration.violations or zombies.successes:
        ledger.violation("schedules, exhaustive", n=len(exploration.violations), bound=name)
    assert list(exploration.violations)[:5] == []
    assert zombies.successes == 0
    assert zombies.attempts > 0
