"""Whoever takes a shard over recognises repeats of what its producers sent to the owners before."""

from __future__ import annotations

import pytest

from forebay.testing.history import NOTE, AppendAnswered, AppendOutcome
from tests.protocol.world import MODES, Node, World


def _offset_of_last(world: World) -> int:
    told = [
        note.payload
        for note in world.disk.trace.notes()
        if note.kind == NOTE and isinstance(note.payload, AppendAnswered)
    ]
    assert told[-1].outcome is AppendOutcome.ACKED
    return told[-1].offset


def _produced_long_ago(mode: str) -> tuple[World, Node]:
    """The newest file has nothing of the producer but what is restated there of files before it."""
    world = World(mode)
    node = world.node("a")
    for sequence in range(2):
        node.append(producing=(7, sequence))
    node.export()
    node.append(3)
    node.export()
    node.append()
    return world, node


@pytest.mark.parametrize("mode", MODES)
def test_a_producer_that_was_silent_for_files_is_known_after_a_move(mode: str) -> None:
    world, node = _produced_long_ago(mode)
    node.seal()
    other = world.node("b")

    assert other.shard.last_sequence(7) == 1
    other.append(producing=(7, 1))

    assert _offset_of_last(world) == 1
    other.append(producing=(7, 2))
    assert _offset_of_last(world) == 6


def test_it_is_known_after_a_take_over_as_far_as_it_was_exported() -> None:
    world, node = _produced_long_ago("shared_fs")
    node.append(producing=(7, 2))
    node.die()
    other = world.node("b")

    assert other.shard.last_sequence(7) == 1
    other.append(producing=(7, 0))

    assert _offset_of_last(world) == 0
