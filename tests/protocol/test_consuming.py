"""What is said of consumers, in an environment where it holds and in one where it is bent."""

from __future__ import annotations

from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.testing.checks.invariants import names_of
from forebay.testing.simulated.clock import ManualClock
from tests.protocol.consuming import READER, missed_by_consumers
from tests.protocol.environment import Node, OwnersEnvironment
from tests.support.environments.simulated import TOPIC_ID


def _moved() -> tuple[OwnersEnvironment, Node]:
    """A consumer of A stood in the middle when the shard moved to B."""
    environment = OwnersEnvironment()
    node, other = environment.node("a"), environment.node("b")
    node.append(4)
    node.consume(2)
    node.seal()
    other.append(2)
    return environment, other


def _set_cursor(environment: OwnersEnvironment, offset: int) -> None:
    name = ReaderName.of("shop", "orders", READER)
    ProgressStore(environment.inner, "/forebay", ManualClock()).reset(
        name, 0, Progress(offset=offset, incarnation=TOPIC_ID)
    )


def _broken(environment: OwnersEnvironment, node: Node) -> set[str]:
    return names_of(missed_by_consumers(environment.disk.trace.notes(), node.reading().records))


def test_a_consumer_that_goes_on_at_the_next_owner_misses_nothing() -> None:
    environment, node = _moved()

    node.consume()

    assert _broken(environment, node) == set()


def test_a_record_that_no_consumer_was_handed_is_named() -> None:
    environment, node = _moved()
    node.consume()
    node.append()

    assert _broken(environment, node) == {"I25"}


def test_a_cursor_that_a_move_brings_back_or_forward_is_named() -> None:
    for offset in (0, 3):
        environment, node = _moved()
        _set_cursor(environment, offset)

        node.consume()

        assert _broken(environment, node) == {"I25"}
