"""Loads that are over are known as long as a history names them, and a while longer; then they are forgotten."""

from __future__ import annotations

from unittest import mock

import pytest

from forebay.cleanup import objects
from forebay.cleanup.objects import ObjectCleanup
from forebay.errors import Unavailable
from forebay.format.metadata.descriptor import LoadStatus, gap_descriptor
from forebay.loads.book import LoadBook
from forebay.metadata import Delete
from forebay.records import Gap, Reason
from forebay.testing.simulated.clock import ManualClock
from tests.history.attached import LOAD, LoadEnvironment, LoadOwner, broken, values
from tests.support.environments.simulated import TOPIC_ID

BROUGHT = {0: values(0, 10), 1: values(1, 3)}


def _is_known(environment: LoadEnvironment, load_id: str = LOAD) -> bool:
    return LoadBook(environment.inner, "/forebay", ManualClock()).find(load_id) is not None


def _later(environment: LoadEnvironment, node: LoadOwner) -> None:
    """Past every grace, the sweep that is due then."""
    environment.clock.jump(2 * environment.settings.export.orphan_grace_s * 1000)
    node.collect_directory()


def _rewrite(environment: LoadEnvironment, partition: int) -> None:
    """What compaction does: something else stands for the offsets that the load brought."""
    catalog = environment.catalog(partition)
    named = [piece for piece in catalog.pieces() if piece.descriptor.load_id == LOAD]
    gap = Gap(named[0].descriptor.start, named[-1].descriptor.end, Reason.SKIPPED)
    catalog.replace(named, gap_descriptor(gap, topic_id=TOPIC_ID, epoch=1, created_at=0))


@pytest.fixture(params=["local", "shared_fs"])
def environment(request: pytest.FixtureRequest) -> LoadEnvironment:
    return LoadEnvironment(request.param, partitions=2)


def test_a_load_is_known_while_a_history_names_it(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.append(0)
    node.offer(BROUGHT)
    for _ in range(3):
        _later(environment, node)
    assert (environment.load().status, environment.load().unnamed_since) == (LoadStatus.OFFERED, None)
    node.loads.attach(LOAD)
    for _ in range(3):
        _later(environment, node)
    assert broken(environment, node, BROUGHT) == []

    _rewrite(environment, 0)
    for _ in range(3):
        _later(environment, node)

    load = environment.load()
    assert (load.status, load.unnamed_since) == (LoadStatus.COMMITTED, None), "the other partition names it still"


def test_a_load_that_no_history_names_is_forgotten_after_a_while(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.offer(BROUGHT)
    node.loads.attach(LOAD)
    for partition in (0, 1):
        _rewrite(environment, partition)
    _later(environment, node)
    assert _is_known(environment), "a reader that began before may ask for it"
    node.collect_directory()
    assert _is_known(environment)

    _later(environment, node)

    assert not _is_known(environment)
    assert [step for partition in (0, 1) for step in node.stream(partition) if not isinstance(step, Gap)] == []


def test_a_load_that_was_given_up_is_forgotten(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.offer(BROUGHT)
    node.loads.abandon(LOAD)
    node.shard(0)  # the owner of the first partition sees to it
    for _ in range(3):
        _later(environment, node)

    assert not _is_known(environment)


def test_a_load_of_a_deleted_topic_is_forgotten_by_the_sweep(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.offer(BROUGHT)
    node.loads.attach(LOAD)
    swept = ObjectCleanup(environment.inner, environment.settings, node.places, environment.clock)
    for _ in range(2):
        assert _is_known(environment)
        environment.clock.jump(2 * environment.settings.export.orphan_grace_s * 1000)
        swept.collect_directory(list, set())

    assert not _is_known(environment)


def test_notes_of_a_load_that_no_caller_finished_go_with_it(environment: LoadEnvironment) -> None:
    """As where the driver of a query gave it up, and no caller has looked since."""
    node = environment.node()
    node.offer(BROUGHT)
    node.shard(0)
    book = LoadBook(environment.inner, "/forebay", ManualClock())
    book.give_up(LOAD)
    assert book.pending() == {LOAD: {}}
    for _ in range(2):
        _later(environment, node)
        assert _is_known(environment) == bool(book.pending())

    assert book.pending() == {}


def test_notes_of_a_load_that_no_caller_knows_go_at_the_next_look(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.offer(BROUGHT)
    book = LoadBook(environment.inner, "/forebay", ManualClock())
    book.end_unknown(LOAD)
    assert book.pending() == {LOAD: {}}, "known, and so not touched"
    environment.inner.transaction([], [Delete(book.key(LOAD))])

    node.loads.step()

    assert book.pending() == {}


def test_a_history_that_cannot_be_read_keeps_its_loads_known(environment: LoadEnvironment) -> None:
    node = environment.node()
    node.offer(BROUGHT)
    node.loads.attach(LOAD)
    for partition in (0, 1):
        _rewrite(environment, partition)
    with mock.patch.object(objects, "named_in", side_effect=Unavailable("not now")):
        for _ in range(3):
            _later(environment, node)

    assert environment.load().unnamed_since is None
