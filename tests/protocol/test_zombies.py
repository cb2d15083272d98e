"""What an owner does that was overtaken without noticing, case by case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

import pytest

from forebay.errors import Closed, Fenced
from forebay.shard import Wanted, acquire
from forebay.testing.checks.schedules import PausingMetadata
from forebay.testing.simulated.blobs import Fault, SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from tests.ledger import Ledger
from tests.protocol.environment import KEYS, Node, OwnersEnvironment
from tests.protocol.judging import check_environment
from tests.support.environments.simulated import GRACE_S, TOPIC_ID
from tests.wal.rig import stage


def _blind(environment: OwnersEnvironment, name: str) -> Node:
    """A process that never notices the end of its session."""
    metadata = PausingMetadata(environment.metadata, lambda: None)
    node = environment.node(name, metadata=metadata)
    metadata.sessions[-1].is_blind = True
    return node


def test_a_sweep_of_an_overtaken_owner_leaves_alone_what_the_next_one_is_about_to_name(ledger: Ledger) -> None:
    blobs = SimulatedBlobs(clock=ManualClock())
    environment = OwnersEnvironment(blobs=blobs)
    zombie, node = _blind(environment, "a"), environment.node("b")
    zombie.append()
    zombie.export()
    zombie.die()
    node.append()
    node.rotate()
    blobs.inject(Fault.SERVER_ERROR, method="put_if_absent")
    with pytest.raises(Exception, match="injected"):
        node.shard.history.catch_up()
    environment.clock.advance(GRACE_S + 1)

    assert zombie.cleanup.collect_owned(zombie.shard) == []
    node.shard.history.catch_up()

    ledger.count("zombie writes")
    assert check_environment(environment, node.reading()) == []


@pytest.mark.parametrize("attempt", ["export", "seal", "delete"])
def test_an_overtaken_owner_stops_for_ever_once_it_hears_of_it(attempt: str, ledger: Ledger) -> None:
    """Its session seems to live: what it finds in the metadata store is all that tells it."""
    environment = OwnersEnvironment()
    zombie, node = _blind(environment, "a"), environment.node("b")
    zombie.append(4)
    zombie.export()
    shard = zombie.shard
    zombie.append(2)
    zombie.rotate()
    zombie.die()
    # The next owner has its epoch and has not come to the history yet.
    acquire(environment.inner, [Wanted(KEYS.state, TOPIC_ID)], node.owner_session.owner, clock=ManualClock())
    attempts: dict[str, Callable[[], object]] = {
        "export": shard.history.catch_up,
        "seal": zombie.seal,
        "delete": lambda: shard.deletes.delete_range(0, 2),
    }

    with contextlib.suppress(Fenced):
        attempts[attempt]()

    assert shard.wal.fenced is not None or shard.wal.closed
    with pytest.raises((Fenced, Closed)):
        shard.wal.acknowledge(stage(shard.wal, (b"late",), None, 0))
    ledger.count("zombie writes")


def _export(zombie: Node) -> None:
    zombie.export()
    # All of it lies in a hole of history by now, so there is nothing to be added.
    raise Fenced


def _close(zombie: Node) -> None:
    """In order, with a tail to export and a reservation to give back."""
    zombie.engine.close()
    # Nobody who closes wants to hear of it.
    raise Fenced


ATTEMPTS: Final[dict[str, Callable[[Node], object]]] = {
    "close": _close,
    "export": _export,
    "reserve": lambda zombie: zombie.shard.wal.writer.reserve_ahead(),
    "seal": lambda zombie: zombie.seal(),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_overtaken_owner_changes_nothing_whatever_it_tries(attempt: str, ledger: Ledger) -> None:
    environment = OwnersEnvironment()
    zombie, node = _blind(environment, "a"), environment.node("b")
    zombie.append(2)
    zombie.die()
    node.append()
    before = environment.inner.revision()
    for _ in range(7):
        zombie.append()

    with pytest.raises(Fenced):
        ATTEMPTS[attempt](zombie)

    ledger.count("zombie writes")
    assert environment.inner.revision() == before
    assert check_environment(environment, node.reading()) == []
