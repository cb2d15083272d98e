"""Another process acts between any two calls of an operation, or the process dies there: see `between_calls`."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Final

import pytest

from forebay.cleanup import deleted_topics
from forebay.testing.simulated.others import Killed
from forebay.topics import TopicName
from tests.ledger import Ledger
from tests.protocol.between_calls import (
    DONE_BEFORE,
    FAR,
    OPERATIONS,
    OTHER,
    OTHERS,
    TOPIC,
    arrive_late,
    calls_of,
    judge,
    meet,
    new_scene,
    outcome,
    router_book,
)
from tests.support.soak import SOAK, sampled

pytestmark = pytest.mark.slow

MODES: Final = ("shared_fs", "local") if SOAK else ("shared_fs",)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process answers by itself here: a deletion waits for none."""
    monkeypatch.setattr(deleted_topics, "OWNER_SECONDS", 0.0)


@pytest.mark.proves("I22", "I25")
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_what_others_do_between_two_calls_breaks_nothing(operation: str, ledger: Ledger) -> None:
    for mode in MODES:
        cases = itertools.product(OTHERS, calls_of(operation, mode))
        for other, call in sampled(cases, one_in=40, seed=f"{operation} {mode}"):
            meet(operation, other, call, mode)
            ledger.count("interleavings", operation=operation, other=other)


@pytest.mark.proves("I22")
def test_an_owner_that_stops_during_the_deletion_of_its_topic_leaves_nothing_of_it(ledger: Ledger) -> None:
    """It says so in the state of the shard, which the deletion is about to remove."""
    operation, other = "delete what another owns", "stops what was deleted"
    for call in calls_of(operation, "shared_fs"):
        meet(operation, other, call, "shared_fs")
        ledger.count("interleavings", operation=operation, other=other)


@pytest.mark.proves("I22", "I25")
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_a_transaction_that_lands_late_breaks_nothing(operation: str, ledger: Ledger) -> None:
    for mode in MODES:
        for other in sampled(OTHERS, one_in=12, seed=f"late {operation} {mode}"):
            number = 0
            while arrive_late(operation, other, number, mode):
                number += 1
            ledger.count("late transactions", n=number, operation=operation)


@pytest.mark.proves("I22")
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_a_process_that_dies_between_two_calls_leaves_what_the_next_one_finishes(
    operation: str, ledger: Ledger
) -> None:
    for mode in MODES:
        for call in sampled(calls_of(operation, mode), one_in=6, seed=f"dies {operation} {mode}"):
            scene = new_scene(mode)
            scene.a.metadata.die_before(call)
            with pytest.raises(Killed):
                OPERATIONS[operation](scene)
            scene.peers.kill(scene.a)
            # Another process looks meanwhile, and meets nothing that is half made.
            names = {str(spec.name) for spec in scene.b.log.topics()}
            assert names <= {TOPIC, OTHER, FAR, "shop/new"}
            for router in router_book(scene.b).all():
                assert {TopicName.parse(source.topic) for source in router.sources} == {TopicName.parse(TOPIC)}
            scene.a = scene.peers.open("A")
            refused = outcome(partial(OPERATIONS[operation], scene))
            assert refused is None or isinstance(refused, DONE_BEFORE.get(operation, ())), refused
            judge(scene)
            ledger.count("kills", operation=operation)
