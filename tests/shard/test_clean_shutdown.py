"""A process that ends in order says how far its shards went, and says nothing of those that are another's by then."""

from __future__ import annotations

import pytest

from forebay.catalog import read_state
from forebay.format.metadata.descriptor import ShardState
from forebay.format.metadata.value import encode_value
from forebay.metadata import Entry, MemoryMetadata, Put
from forebay.shard.seal import ClosedShard, end_reservations
from forebay.testing.checks.moves import RecordingMetadata
from forebay.testing.checks.schedules import PausingMetadata
from forebay.testing.simulated.clock import ManualClock
from tests.protocol.environment import KEYS, Node, OwnersEnvironment


def _owned() -> tuple[OwnersEnvironment, Node]:
    """A process that never notices the end of its session, and has exported everything."""
    environment = OwnersEnvironment()
    metadata = PausingMetadata(environment.metadata, lambda: None)
    node = environment.node("a", metadata=metadata)
    metadata.sessions[-1].is_blind = True
    node.append(3)
    node.export()
    return environment, node


def test_nothing_is_reserved_beyond_the_end_of_a_shard_that_was_closed_in_order() -> None:
    environment, node = _owned()

    node.engine.close()

    state = environment.state
    assert state is not None and (state.owner, state.reserved_end) == (None, 3)
    assert environment.node("b").shard.decision.next_offset == 3


def test_whoever_was_overtaken_says_nothing_when_it_ends() -> None:
    environment, node = _owned()
    node.die()
    other = environment.node("b")
    other.append()
    before = environment.state

    node.engine.close()

    assert environment.state == before
    assert before is not None and before.reserved_end > other.shard.offsets().next


class _Overtaken(RecordingMetadata):
    """Somebody takes the shard over right behind a look at its state."""

    def __init__(self, environment: OwnersEnvironment) -> None:
        super().__init__(environment.inner)
        self._environment = environment

    def get(self, key: str) -> Entry | None:
        found = super().get(key)
        self._environment.node("b").append()
        return found


def test_whoever_is_overtaken_while_it_looks_changes_nothing() -> None:
    environment, node = _owned()
    epoch = node.shard.epoch
    node.die()

    end_reservations(_Overtaken(environment), [ClosedShard(KEYS.state, epoch, 3)], clock=ManualClock())

    state = environment.state
    assert state is not None and (state.epoch, state.holder) == (epoch + 1, "b")
    assert state.owner is not None and state.reserved_end > 3


def test_a_shard_that_nobody_knows_any_more_is_passed_over() -> None:
    store = MemoryMetadata()

    end_reservations(store, [ClosedShard(KEYS.state, 1, 3)], clock=ManualClock())

    assert read_state(store, KEYS.state) is None


class _Changing(MemoryMetadata):
    """Another process changes some states right behind a look at them, each so often."""

    def __init__(self, changes: dict[str, int]) -> None:
        super().__init__()
        self.changes = changes

    def get(self, key: str) -> Entry | None:
        found = super().get(key)
        if found is not None and self.changes.get(key, 0):
            self.changes[key] -= 1
            self.transaction([], [Put(key, found.value)])
        return found


def _closed(store: MemoryMetadata, count: int) -> list[ClosedShard]:
    """Shards that were closed in order at offset 3, with far more reserved."""
    state = ShardState(incarnation="i", epoch=4, owner="s", holder="h", reserved_end=65_536)
    ended = [ClosedShard(f"/state/{number}", 4, 3) for number in range(count)]
    for shard in ended:
        store.transaction([], [Put(shard.key, encode_value(state))])
    return ended


def _reserved(store: MemoryMetadata, ended: list[ClosedShard]) -> list[int]:
    found = [read_state(store, shard.key) for shard in ended]
    return [stored.state.reserved_end for stored in found if stored is not None]


@pytest.mark.parametrize("changed", [[0], [17, 29, 30], list(range(40))])
def test_a_state_that_changes_meanwhile_keeps_no_shard_from_ending_its_reservation(changed: list[int]) -> None:
    """The transaction of all 30 was refused, and nothing looked at that."""
    store = _Changing({})
    ended = _closed(store, 40)
    store.changes = {f"/state/{number}": 1 for number in changed}

    end_reservations(store, ended, clock=ManualClock())

    assert _reserved(store, ended) == [3] * 40


def test_a_state_that_never_stands_still_keeps_its_reservation_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    store = _Changing({})
    ended = _closed(store, 33)
    store.changes = {"/state/5": 1_000}

    end_reservations(store, ended, clock=ManualClock())

    assert _reserved(store, ended) == [65_536 if number == 5 else 3 for number in range(33)]
    assert "/state/5" in caplog.text
