"""Somebody acts between the look of another and what follows from it: what was looked at is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from forebay.catalog import ShardCatalog, read_state
from forebay.catalog.removals import RecordedRemovals
from forebay.errors import Conflict, Fenced, Unavailable
from forebay.format.metadata.descriptor import LoadStatus
from forebay.loads.book import LoadBook
from forebay.metadata import Compare, MemoryMetadata, MetadataStore, Operation, Outcome
from forebay.shard import Owner, Wanted, acquire
from forebay.shard.ownership import change_state
from forebay.shard.seal import bring_into_history
from forebay.testing.checks.moves import RecordingMetadata
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault
from tests.history.attached import LOAD, LoadEnvironment, LoadOwner, broken, values
from tests.protocol.environment import KEYS
from tests.support.environments.simulated import TOPIC_ID

BROUGHT = {0: values(0, 4)}


class Overtaken(RecordingMetadata):
    """Lets somebody else act right before the transaction of this number."""

    def __init__(self, inner: MetadataStore, act: Callable[[], object], number: int = 0) -> None:
        super().__init__(inner)
        self._act = act
        self._left = number

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        self._left -= 1
        if self._left == -1:
            self._act()
        return super().transaction(compares, operations)


class Contended(RecordingMetadata):
    """Before each of the first transactions, another change of the same key is made."""

    def __init__(self, inner: MetadataStore, act: Callable[[int], object], times: int) -> None:
        super().__init__(inner)
        self._act = act
        self._left = times

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        if self._left:
            self._left -= 1
            self._act(self._left)
        return super().transaction(compares, operations)


def test_an_owner_whose_state_keeps_changing_waits_by_the_clock_that_it_was_given() -> None:
    store, clock = MemoryMetadata(), ManualClock()
    wanted = Wanted(KEYS.state, "ab" * 16)
    [(_, epoch)] = acquire(store, [wanted], Owner(store.session(10).id, "a"), clock=ManualClock())

    def reserve(metadata: MetadataStore, end: int, by: ManualClock) -> int:
        return change_state(
            metadata, wanted, epoch, lambda state: msgspec.structs.replace(state, reserved_end=end), clock=by
        ).reserved_end

    busy = Contended(store, lambda left: reserve(store, left + 1, ManualClock()), times=4)

    assert reserve(busy, 99, clock) == 99
    assert clock.monotonic() > 0


def test_an_owner_that_is_overtaken_while_it_changes_the_state_is_fenced() -> None:
    store = MemoryMetadata()
    wanted = [Wanted(KEYS.state, "ab" * 16)]
    session = store.session(10)
    [(_, epoch)] = acquire(store, wanted, Owner(session.id, "a"), clock=ManualClock())
    session.close()
    other = Owner(store.session(10).id, "b")
    late = Overtaken(store, lambda: acquire(store, wanted, other, clock=ManualClock()))

    with pytest.raises(Fenced):
        change_state(
            late,
            wanted[0],
            epoch,
            lambda state: msgspec.structs.replace(state, reserved_end=99),
            clock=ManualClock(),
        )

    stored = read_state(store, KEYS.state)
    assert stored is not None
    assert (stored.state.epoch, stored.state.owner, stored.state.reserved_end) == (epoch + 1, other.session, 0)


def _attached() -> tuple[LoadEnvironment, LoadOwner]:
    """A load that is attached everywhere, and neither committed nor given up."""
    environment = LoadEnvironment()
    node = environment.node()
    node.append(count=3)
    node.offer(BROUGHT)
    inside(node.loads).attach_to(LOAD, environment.load(), [node.shard()])
    return environment, node


def test_a_load_that_is_given_up_while_it_is_committed_stays_given_up() -> None:
    environment, node = _attached()
    book = LoadBook(environment.inner, "/forebay", ManualClock())

    ended = LoadBook(Overtaken(environment.inner, lambda: book.give_up(LOAD)), "/forebay", ManualClock()).commit(LOAD)

    assert ended.status is environment.load().status is LoadStatus.ABANDONED
    node.settle()
    assert broken(environment, node, BROUGHT) == []


def test_a_load_that_is_committed_while_it_is_given_up_stays_committed() -> None:
    environment, node = _attached()
    book = LoadBook(environment.inner, "/forebay", ManualClock())

    with pytest.raises(Conflict, match="is committed"):
        LoadBook(Overtaken(environment.inner, lambda: book.commit(LOAD)), "/forebay", ManualClock()).give_up(LOAD)

    assert environment.load().status is LoadStatus.COMMITTED
    assert broken(environment, node, BROUGHT) == []


def test_an_attach_that_lands_right_before_it_is_repeated_is_not_forgotten() -> None:
    """The repetition is refused, for what it compares has changed; appends wait until it is known by what."""
    environment = LoadEnvironment()
    before = environment.node()
    before.append(count=3)
    before.offer(BROUGHT)
    before.close()
    # Two transactions of the attach: the one that is late, and its repetition.
    held = Overtaken(environment.faulty, environment.faulty.land, number=10**9)
    node = environment.node(metadata=held)
    bring_into_history(node.shard())
    environment.faulty.inject(Fault.TIME_OUT)
    held._left = 1

    node.settle()

    assert held._left < 0, "it has landed in between"
    assert node.append() == [7]
    assert broken(environment, node, BROUGHT) == []


def test_an_owner_that_is_overtaken_while_it_drops_the_front_of_history_drops_nothing() -> None:
    environment = LoadEnvironment()
    node = environment.node()
    for _ in range(3):
        node.append()
        bring_into_history(node.shard())
    epoch, pieces = node.shard().epoch, environment.catalog(0).descriptors()
    node.owner_session.session.close()
    other = Owner(environment.inner.session(10).id, "b")
    late = Overtaken(
        environment.inner,
        lambda: acquire(environment.inner, [Wanted(KEYS.state, TOPIC_ID)], other, clock=ManualClock()),
    )

    with pytest.raises((Fenced, Unavailable)):
        RecordedRemovals(ShardCatalog(late, KEYS, TOPIC_ID, clock=ManualClock())).drop_below(epoch, 2)

    assert environment.catalog(0).descriptors() == pieces
