"""A process that ends in order says how far its shards went, and says nothing of those that are another's by then."""

from __future__ import annotations

from forebay.catalog import read_state
from forebay.metadata import Entry, MemoryMetadata
from forebay.shard.conclusion import Ended, end_reservations
from forebay.testing.moves import RecordingMetadata
from forebay.testing.schedules import PausingMetadata
from tests.protocol.world import KEYS, Node, World


def _owned() -> tuple[World, Node]:
    """A process that never notices the end of its session, and has exported everything."""
    world = World()
    metadata = PausingMetadata(world.metadata, lambda: None)
    node = world.node("a", metadata=metadata)
    metadata.sessions[-1].is_blind = True
    node.append(3)
    node.export()
    return world, node


def test_nothing_is_reserved_beyond_the_end_of_a_shard_that_was_closed_in_order() -> None:
    world, node = _owned()

    node.engine.close()

    state = world.state
    assert state is not None and (state.owner, state.reserved_end) == (None, 3)
    assert world.node("b").shard.decision.next_offset == 3


def test_whoever_was_overtaken_says_nothing_when_it_ends() -> None:
    world, node = _owned()
    node.die()
    other = world.node("b")
    other.append()
    before = world.state

    node.engine.close()

    assert world.state == before
    assert before is not None and before.reserved_end > other.shard.offsets().next


class _Overtaken(RecordingMetadata):
    """Somebody takes the shard over right behind a look at its state."""

    def __init__(self, world: World) -> None:
        super().__init__(world.inner)
        self._world = world

    def get(self, key: str) -> Entry | None:
        found = super().get(key)
        self._world.node("b").append()
        return found


def test_whoever_is_overtaken_while_it_looks_changes_nothing() -> None:
    world, node = _owned()
    epoch = node.shard.epoch
    node.die()

    end_reservations(_Overtaken(world), [Ended(KEYS.state, epoch, 3)])

    state = world.state
    assert state is not None and (state.epoch, state.holder) == (epoch + 1, "b")
    assert state.owner is not None and state.reserved_end > 3


def test_a_shard_that_nobody_knows_any_more_is_passed_over() -> None:
    store = MemoryMetadata()

    end_reservations(store, [Ended(KEYS.state, 1, 3)])

    assert read_state(store, KEYS.state) is None
