"""What is said of consumers, on a world where it holds and on one where it is bent."""

from __future__ import annotations

from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.testing.clock import ManualClock
from forebay.testing.invariants import names_of
from tests.protocol.consuming import READER, missed_by_consumers
from tests.protocol.ground import TOPIC_ID
from tests.protocol.world import Node, World


def _moved() -> tuple[World, Node]:
    """A consumer of A stood in the middle when the shard moved to B."""
    world = World()
    node, other = world.node("a"), world.node("b")
    node.append(4)
    node.consume(2)
    node.seal()
    other.append(2)
    return world, other


def _set_cursor(world: World, offset: int) -> None:
    name = ReaderName.of("shop", "orders", READER)
    ProgressStore(world.inner, "/forebay", ManualClock()).reset(name, 0, Progress(offset=offset, incarnation=TOPIC_ID))


def _broken(world: World, node: Node) -> set[str]:
    return names_of(missed_by_consumers(world.disk.trace.notes(), node.reading().records))


def test_a_consumer_that_goes_on_at_the_next_owner_misses_nothing() -> None:
    world, node = _moved()

    node.consume()

    assert _broken(world, node) == set()


def test_a_record_that_no_consumer_was_handed_is_named() -> None:
    world, node = _moved()
    node.consume()
    node.append()

    assert _broken(world, node) == {"I25"}


def test_a_cursor_that_a_move_brings_back_or_forward_is_named() -> None:
    for offset in (0, 3):
        world, node = _moved()
        _set_cursor(world, offset)

        node.consume()

        assert _broken(world, node) == {"I25"}
