"""Deletes and floors of a shard with history: what is gone is gone in every tier and for every owner."""

from __future__ import annotations

import contextlib
import random  # noqa: TID251  # seeded: the same run again
from collections.abc import Iterator
from typing import Final

import pytest

from forebay.errors import ForebayError
from forebay.format.control.frames import Floor
from forebay.format.control.offsets import OffsetSet
from forebay.records import Gap, Reason
from forebay.testing.checks.moves import commits_of
from forebay.testing.simulated.metadata import Fault
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.protocol.environment import KEYS, MODES, Node, OwnersEnvironment
from tests.support.environments.simulated import GRACE_S
from tests.support.soak import SOAK

STREAMS: Final = 400 if SOAK else 40


def live(node: Node, start: int = 0) -> list[int]:
    """The offsets that a reader is given."""
    return [offset for offset, _ in node.reading().records if offset >= start]


def holes(node: Node, start: int = 0) -> list[Gap]:
    """What a reader from `start` on learns of."""
    gaps: list[Gap] = []
    at = start
    while (page := node.shard.read(at, 60)).next > at:
        gaps += page.events
        at = page.next
    return gaps


@pytest.fixture(params=MODES)
def node(request: pytest.FixtureRequest) -> Node:
    """One directory with twelve records, in frames of three."""
    found = OwnersEnvironment(request.param).node("a")
    for _ in range(4):
        found.append(3)
    return found


def reopened(node: Node) -> Node:
    """The next process on the same directory, after this one died."""
    node.die()
    return node.environment.node(node.name)


def test_deleted_records_are_gone_before_and_behind_the_frontier(node: Node) -> None:
    node.export()
    node.append(3)
    deletes = node.shard.deletes

    assert deletes.delete_range(10, 13) == 3
    assert deletes.delete_range(4, 6) == 2
    assert deletes.delete_range(0, 13) == 8
    assert deletes.delete(OffsetSet.of([13, 99])) == 1
    assert deletes.delete(OffsetSet.of([13])) == deletes.delete(OffsetSet()) == 0

    for _ in range(2):
        assert live(node) == [14]
        assert holes(node) == [Gap(0, 14, Reason.DELETED)]
        node.export()
        node = reopened(node)
    state = node.environment.state
    assert state is not None and state.deletes > 0


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.TIME_OUT])
def test_a_delete_in_history_takes_effect_once_it_is_recorded_and_not_before(node: Node, fault: Fault) -> None:
    """I23: a reader that misses a record would find it again, if the delete never becomes durable."""
    node.export()
    environment = node.environment
    seen: list[list[int]] = []
    environment.on_commit = lambda _: seen.append(live(node))

    node.shard.deletes.delete_range(0, 2)
    environment.on_commit = lambda _: None
    environment.faulty.inject(fault, count=1_000)
    with pytest.raises(ForebayError):
        node.shard.deletes.delete_range(4, 6)

    assert seen[0] == list(range(12)), "when the transaction is committed, nobody has missed a record yet"
    assert live(node) == list(range(2, 12))


def test_a_page_goes_over_deleted_records_in_one_step_and_leads_on(node: Node) -> None:
    node.shard.deletes.delete_range(2, 11)

    assert node.shard.read(2, 1).events == [Gap(2, 11, Reason.DELETED)]
    assert node.shard.read(4, 1).next == 12
    node.shard.deletes.delete_range(11, 12)
    assert node.shard.read(4, 1) == ([], [Gap(4, 12, Reason.DELETED)], 12)
    assert live(node) == [0, 1]


def test_what_is_outstanding_is_recorded_before_its_records_are_history(node: Node) -> None:
    node.shard.deletes.delete_range(1, 5)
    node.shard.deletes.delete_before(1)
    node.shard.rotate()
    seen: list[tuple[int, int]] = []

    def committed(operations: object) -> None:
        state = node.environment.state
        assert state is not None
        seen.append((node.environment.catalog.frontier().next, state.deletes + state.earliest))

    node.environment.on_commit = committed
    node.export()

    assert {recorded for frontier, recorded in seen if frontier} == {2}
    assert len(node.shard.wal.writer.removals.deletes) == 0
    node.shard.rotate()
    assert live(node) == list(range(5, 12))
    assert live(reopened(node)) == list(range(5, 12))


def test_deleting_before_moves_earliest_in_every_life_and_never_back(node: Node) -> None:
    deletes = node.shard.deletes
    deletes.delete_range(1, 3)

    assert deletes.delete_before(5) == 3
    assert deletes.delete_before(4) == 0
    node.export()
    assert deletes.delete_before(8) == 3
    assert deletes.delete_before(10**9) == 4
    node.append()

    for _ in range(2):
        assert node.shard.offsets()[:2] == (12, 0)
        assert live(node) == [12]
        assert holes(node, 3) == [Gap(3, 12, Reason.DELETED)]
        node = reopened(node)


def test_a_tombstone_says_why_and_is_reported_once(node: Node) -> None:
    deletes = node.shard.deletes
    deletes.evict_below(5, Reason.TTL)
    node.export()
    deletes.evict_below(7, Reason.CAP)
    deletes.delete_before(9)

    for _ in range(2):
        assert holes(node, 2) == [Gap(2, 7, Reason.CAP), Gap(7, 9, Reason.DELETED)]
        assert holes(node, 7) == [Gap(7, 9, Reason.DELETED)]
        assert holes(node, 9) == []
        assert node.shard.deletes.floor == Floor(9, 7, Reason.CAP)
        node = reopened(node)


def test_deletes_count_records_and_not_the_gaps_between_them() -> None:
    environment = OwnersEnvironment("shared_fs", Durability.MEMORY)
    node = environment.node("a")
    node.append(3)
    node.export()
    node.append()
    node.shard.commit()
    node.die()
    other = environment.node("b")
    gap = other.shard.decision.gap
    assert gap is not None
    other.append(2)

    assert other.shard.deletes.delete_range(0, 10**6) == 5
    assert other.shard.deletes.deleted.count_in(gap.start, gap.stop) == 0
    assert [hole for hole in holes(other) if hole.reason is not Reason.DELETED] == [gap]


@pytest.mark.parametrize("mode", MODES)
def test_a_move_takes_everything_along(mode: str) -> None:
    environment = OwnersEnvironment(mode)
    node = environment.node("a")
    node.append(6)
    node.export()
    node.append(6)
    node.shard.deletes.delete_range(4, 8)
    node.shard.deletes.evict_below(2, Reason.CAP)
    node.shard.deletes.delete_range(11, 12)
    node.seal("b")

    other = environment.node("b")

    assert live(other) == [2, 3, 8, 9, 10]
    assert holes(other)[0] == Gap(0, 2, Reason.CAP)
    other.append()
    assert other.shard.deletes.delete_range(10, 13) == 2
    other.seal("a")
    node.engine.take_back(environment.ref)
    assert live(node) == [2, 3, 8, 9]


def test_a_zombie_deletes_nothing_of_what_another_owns() -> None:
    environment = OwnersEnvironment("shared_fs")
    node = environment.node("a")
    node.append(6)
    node.export()
    node.die()
    other = environment.node("b")
    assert live(other) == list(range(6))

    with pytest.raises(ForebayError):
        node.shard.deletes.delete_range(0, 3)
    with pytest.raises(ForebayError):
        node.shard.deletes.delete_before(3)

    assert live(other) == live(reopened(other)) == list(range(6))


@pytest.mark.parametrize("landing", [0, 1, 2])
def test_an_export_that_lands_late_brings_no_deleted_record_back(landing: int) -> None:
    """The outcome of the extending transaction is unknown when a delete comes: the next owner must know of it."""
    environment = OwnersEnvironment("shared_fs")
    node = environment.node("a")
    node.append(6)
    node.rotate()
    environment.faulty.inject(Fault.TIME_OUT, count=100)
    with pytest.raises(ForebayError):
        node.shard.history.catch_up()
    environment.faulty.heal()
    if landing == 0:
        environment.faulty.land()

    assert node.shard.deletes.delete_range(1, 3) == 2
    assert node.shard.deletes.delete_before(1) == 1
    if landing == 1:
        environment.faulty.land()
    node.die()
    other = environment.node("b")
    other.append()
    if landing == 2:
        environment.faulty.land()

    assert set(live(other)) & {0, 1, 2} == set()


def pieces(node: Node) -> list[tuple[int, int]]:
    """What the catalog names."""
    return [(piece.start, piece.end) for piece in node.environment.catalog.descriptors()]


@pytest.mark.parametrize("mode", MODES)
def test_what_the_floor_has_passed_leaves_the_catalog_the_directory_and_the_store(mode: str) -> None:
    environment = OwnersEnvironment(mode)
    node = environment.node("a")
    for _ in range(5):
        node.append(3)
        node.rotate()
    node.export()
    node.append()
    node.shard.deletes.delete_range(1, 5)
    node.shard.deletes.delete_before(8)
    history = node.shard.history.segments
    history.refresh()
    assert history.cover(0, 1)

    assert node.shard.history.retain() >= 2
    history.refresh()
    assert [bool(history.cover(offset, offset + 1)) for offset in (0, 5, 6)] == [False, False, True], (
        "whoever remembers it looks again"
    )
    environment.clock.advance(2 * GRACE_S)
    node.cleanup.collect_owned(node.shard)

    assert pieces(node) == [(6, 9), (9, 12), (12, 15)]
    assert node.shard.wal.files.begins in (6, 15)
    assert sum(path.endswith(".seg") for path in environment.objects()) == (3 if mode == "shared_fs" else 0)
    assert node.shard.history.retain() == 0
    for _ in range(2):
        assert live(node) == list(range(8, 16))
        assert holes(node) == [Gap(0, 8, Reason.DELETED)]
        assert node.shard.decision.damage == ()
        node = reopened(node)
    node.shard.deletes.delete_before(15)
    node.shard.history.retain()
    assert pieces(node) == [(12, 15)], "the newest stays"
    node.seal("b")
    assert live(environment.node("b")) == [15]


def test_vectors_of_windows_below_the_floor_go_too(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = OwnersEnvironment("shared_fs")
    node = environment.node("a")
    for _ in range(3):
        node.append(3)
        node.rotate()
    node.export()
    node.shard.deletes.delete_range(4, 5)
    monkeypatch.setattr("forebay.catalog.removals.WINDOW", 4)
    node.shard.deletes.delete_before(8)
    node.shard.history.retain()

    assert [entry.key for entry in environment.inner.range(KEYS.deletes)] == []
    assert live(reopened(node)) == [8]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_fault_of_dropping_leaves_a_gap(mode: str, ledger: Ledger) -> None:
    for fault, method in [
        (Fault.FAIL_BEFORE, "get"),
        (Fault.FAIL_BEFORE, "range"),
        *((f, "transaction") for f in Fault),
    ]:
        for index in range(8):
            environment = OwnersEnvironment(mode)
            node = environment.node("a")
            for _ in range(4):
                node.append(3)
                node.rotate()
            node.export()
            node.append()
            node.shard.deletes.delete_before(8)
            environment.faulty.inject(fault, method=method, after=index)
            with contextlib.suppress(ForebayError):
                node.shard.history.retain()
            environment.faulty.heal()
            assert pieces(node)[-1] == (9, 12)
            assert live(node) == list(range(8, 13))
            node = reopened(node)
            environment.faulty.land()
            assert live(node) == list(range(8, 13))
            node.shard.history.retain()
            assert pieces(node)[0] == (6, 9)
            ledger.count("metadata faults", fault=fault.value, method=method)


def test_a_directory_that_gave_a_shard_up_clears_away_what_has_ended_since() -> None:
    environment = OwnersEnvironment("shared_fs")
    node = environment.node("a")
    for _ in range(3):
        node.append(3)
        node.rotate()
    node.seal("b")
    other = environment.node("b")
    other.append()
    other.shard.deletes.delete_before(8)
    other.shard.history.retain()
    assert pieces(other)[0] == (6, 9)

    node.engine.clear_moved(environment.ref)

    assert environment.log_files("a") == {}


class Model:
    """What must be live, by the operations that were acknowledged."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.live: set[int] = set()
        self.head = 0
        self.earliest = 0

    def step(self, node: Node) -> Node:
        """One operation on both."""
        roll = self.random.randrange(12)
        if roll < 4:
            count = self.random.randint(1, 5)
            node.append(count)
            self.live |= set(range(self.head, self.head + count))
            self.head += count
        elif roll < 7:
            self._delete(node)
        elif roll == 7:
            offset = self.random.randint(0, self.head)
            gone = {at for at in self.live if at < offset}
            assert node.shard.deletes.delete_before(offset) == len(gone)
            self.live -= gone
            self.earliest = max(self.earliest, offset)
        elif roll == 8:
            node.rotate()
        elif roll == 9:
            node.export()
            node.shard.history.retain()
            node.environment.clock.advance(2 * GRACE_S)
            node.cleanup.collect_owned(node.shard)
        elif roll == 10:
            node.engine.close()
            return reopened(node)
        else:
            return reopened(node)
        return node

    def _delete(self, node: Node) -> None:
        if self.random.random() < 0.5:
            wanted = {self.random.randint(0, self.head + 3) for _ in range(3)}
            ended = node.shard.deletes.delete(OffsetSet.of(sorted(wanted)))
        else:
            start = self.random.randint(0, self.head)
            wanted = set(range(start, start + self.random.randint(0, 6)))
            ended = node.shard.deletes.delete_range(start, start + len(wanted))
        assert ended == len(wanted & self.live)
        self.live -= wanted


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_random_operations_leave_exactly_what_the_model_says(mode: str, ledger: Ledger) -> None:
    for seed in range(STREAMS):
        model = Model(f"{mode} {seed}")
        node = OwnersEnvironment(mode, seed=seed).node("a")
        for _ in range(40):
            node = model.step(node)
            assert node.shard.offsets().earliest == model.earliest
        assert live(node) == sorted(model.live), f"seed {seed}"
        assert [hole for hole in holes(node) if hole.reason is not Reason.DELETED] == []
        ledger.count("histories of deletes", mode=mode)


def _faults(mode: str) -> Iterator[tuple[Fault, str, int, int]]:
    """Every fault at every call of the scenario."""
    environment, node = _begun(mode)
    before = dict(environment.faulty.calls)
    _scenario(node, [], set())
    for method, count in environment.faulty.calls.items():
        for index in range(count - before.get(method, 0)):
            for fault in Fault if method == "transaction" else [Fault.FAIL_BEFORE]:
                yield fault, method, index, 1
                yield fault, method, index, 100


def _begun(mode: str) -> tuple[OwnersEnvironment, Node]:
    environment = OwnersEnvironment(mode)
    node = environment.node("a")
    node.append(4)
    node.export()
    node.append(4)
    return environment, node


def _scenario(node: Node, acked: list[int], begun: set[int]) -> None:
    """Deletes on both sides of the frontier, which moves meanwhile."""

    def delete(start: int, stop: int) -> None:
        begun.update(range(start, stop))
        node.shard.deletes.delete_range(start, stop)
        acked.extend(range(start, stop))

    delete(1, 2)
    delete(5, 6)
    delete(3, 5)
    node.export()
    delete(7, 8)
    begun.add(0)
    node.shard.deletes.delete_before(1)
    acked.append(0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_whatever_fails_no_acknowledged_delete_is_undone_and_no_other_record_goes(mode: str, ledger: Ledger) -> None:
    for fault, method, index, count in _faults(mode):
        environment, node = _begun(mode)
        acked: list[int] = []
        begun: set[int] = set()
        environment.faulty.inject(fault, method=method, after=index, count=count)
        with contextlib.suppress(ForebayError):
            _scenario(node, acked, begun)
        environment.faulty.heal()
        named = f"{fault.value} at {method} {index}, {count} times"
        alive = set(live(node)) if node.shard.wal.fenced is None else set()
        assert not alive & set(acked), named
        exported = environment.catalog.frontier().next if mode == "shared_fs" else 8
        node.die()
        other = environment.node("b" if mode == "shared_fs" else "a")
        other.append()
        environment.faulty.land()
        after = set(live(other))
        assert not after & set(acked), named
        assert set(range(exported)) - begun <= after, named
        _scenario(other, acked, begun)
        assert not set(live(other)) & set(range(8)) - {2, 6}, named
        assert commits_of(KEYS, environment.committed)
        ledger.count("metadata faults", fault=fault.value, method=method)
