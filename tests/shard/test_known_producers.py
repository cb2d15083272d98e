"""The next owner of a shard recognises repeats of what its producers sent to the owners before."""

from __future__ import annotations

import pytest

from forebay.errors import Conflict
from forebay.testing.contracts.engines import append_by
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


def test_sequences_that_leave_numbers_out_are_known_after_a_take_over_and_after_a_crash() -> None:
    world = World("shared_fs")
    node = world.node("a")
    for producer in (7, 2**63 + 7):
        append_by(node.shard, producer, 5, previous=-1)
        append_by(node.shard, producer, 9, previous=5)
    node.export()
    append_by(node.shard, 7, 20, previous=9)
    node.die()

    node = world.node("a")
    assert [node.shard.last_sequence(producer) for producer in (7, 2**63 + 7)] == [20, 9]
    assert append_by(node.shard, 7, 20, previous=9) == 4
    node.die()

    other = world.node("b")
    assert [other.shard.last_sequence(producer) for producer in (7, 2**63 + 7)] == [9, 9]
    assert [append_by(other.shard, 2**63 + 7, sequence) for sequence in (5, 9)] == [2, 3]
    with pytest.raises(Conflict, match="sent sequence 30 after 20, expected one after 9"):
        append_by(other.shard, 7, 30, previous=20)
