"""An export that reaches the end of the log gives back what is reserved beyond it, and no append ever uses that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from forebay.errors import ForebayError, Indeterminate, Unavailable
from forebay.format.metadata.descriptor import Cur
from forebay.format.metadata.value import decode_value
from forebay.metadata import Compare, Operation, Outcome, Put
from forebay.testing.checks.history import AppendOutcome
from forebay.testing.checks.moves import RecordingMetadata
from forebay.testing.inside import inside
from forebay.topics import Durability, OnOwnerLoss
from tests.protocol.environment import KEYS, Node, OwnersEnvironment
from tests.protocol.judging import check_environment
from tests.support.environments.directories import shared_fs, state_of
from tests.support.waiting import until


class Between(RecordingMetadata):
    """Acts once, right before or right after a transaction that extends history or gives offsets back."""

    def __init__(self, environment: OwnersEnvironment) -> None:
        super().__init__(environment.metadata)
        self.before: Callable[[], object] | None = None
        self.after: Callable[[], object] | None = None
        self.reserving: Callable[[], object] | None = None
        """Runs right before a transaction that reserves."""

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        if not any(isinstance(put, Put) and put.key in (KEYS.cur, KEYS.state) for put in operations):
            return super().transaction(compares, operations)
        if self.reserving is not None and all(isinstance(put, Put) and put.key == KEYS.state for put in operations):
            act, self.reserving = self.reserving, None
            act()
        is_export = any(isinstance(put, Put) and put.key == KEYS.cur for put in operations)
        if is_export and self.before is not None:
            act, self.before = self.before, None
            act()
        outcome = super().transaction(compares, operations)
        if is_export and outcome.succeeded and self.after is not None:
            act, self.after = self.after, None
            act()
        return outcome


def _begun(durability: Durability = Durability.FSYNC) -> tuple[OwnersEnvironment, Between, Node]:
    """An owner with three records that are sealed and not history; its topic waits for it if it is gone."""
    environment = OwnersEnvironment("shared_fs", durability, on_owner_loss=OnOwnerLoss.WAIT)
    metadata = Between(environment)
    node = environment.node("a", metadata=metadata)
    node.append(3)
    node.rotate()
    return environment, metadata, node


def _reserved(environment: OwnersEnvironment) -> int:
    state = environment.state
    assert state is not None
    return state.reserved_end


def _checked(environment: OwnersEnvironment, name: str = "a") -> None:
    """Every process has died; what the next one finds keeps every promise."""
    environment.inner.end_all_sessions()
    node = environment.node(name)
    assert node.append() is AppendOutcome.ACKED
    assert check_environment(environment, node.reading()) == []


@pytest.mark.proves("I41")
def test_an_export_that_reaches_the_end_leaves_nothing_at_risk() -> None:
    environment, _, node = _begun()
    assert _reserved(environment) > 3

    node.shard.history.catch_up()

    assert _reserved(environment) == 3
    assert [decode_value(put.value, Cur)[0].next for put in environment.committed[-1] if put.key == KEYS.cur] == [3]  # type: ignore[union-attr]
    # Nothing asks for more before the next append does, and that goes on exactly.
    assert not node.shard.wal.writer.wants_reservation
    node.shard.reserve_ahead()
    assert _reserved(environment) == 3
    environment.inner.end_all_sessions()
    other = environment.node("b")
    assert other.append() is AppendOutcome.ACKED
    assert [offset for offset, _ in other.reading().records] == [0, 1, 2, 3] and other.reading().gaps == []


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK, Durability.MEMORY])
@pytest.mark.proves("I4", "I41")
def test_an_append_after_it_reserves_before_its_first_byte(durability: Durability) -> None:
    environment, _, node = _begun(durability)
    node.shard.history.catch_up()
    assert _reserved(environment) == 3

    assert node.append() is AppendOutcome.ACKED

    assert _reserved(environment) > 3
    with pytest.raises(Unavailable, match="waits for|changed hands"):
        environment.inner.end_all_sessions()
        environment.node("b").shard  # noqa: B018 - it is opened
    _checked(environment)


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK, Durability.MEMORY])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.proves("I4", "I41")
def test_an_append_beside_its_transaction_keeps_what_it_uses(moment: str, durability: Durability) -> None:
    """The append is queued and written while the transaction of the export is on its way, or just back."""
    environment, metadata, node = _begun(durability)
    heard: list[AppendOutcome] = []

    def append() -> None:
        heard.append(node.append(2))
        node.shard.commit()

    setattr(metadata, moment, append)
    node.shard.history.catch_up()

    assert heard == [AppendOutcome.ACKED]
    assert environment.catalog.frontier().next == 3
    assert _reserved(environment) >= 5, "what is used is reserved"
    _checked(environment)


@pytest.mark.proves("I4")
def test_what_is_queued_is_not_given_back() -> None:
    """Class memory acknowledges what only waits: its offset must never stand for another record."""
    environment, _, node = _begun(Durability.MEMORY)
    node.shard.history  # noqa: B018 - opened before the append waits
    assert node.append(2) is AppendOutcome.ACKED
    assert not node.shard.wal.queue.is_empty

    node.shard.history.catch_up()

    assert _reserved(environment) >= 5


@pytest.mark.parametrize("outcome", ["landed", "lost"])
@pytest.mark.proves("I4", "I41")
def test_an_answer_that_is_lost_gives_nothing_away(outcome: str) -> None:
    environment, metadata, node = _begun()

    def lose() -> None:
        raise Indeterminate("its answer is lost")

    setattr(metadata, "after" if outcome == "landed" else "before", lose)
    node.shard.history.catch_up()
    assert environment.catalog.frontier().next == 3

    assert node.append() is AppendOutcome.ACKED
    assert _reserved(environment) >= 4
    _checked(environment)


def test_a_reservation_that_is_under_way_is_not_given_back() -> None:
    """It was asked for ahead of need, and its transaction is on its way when the export reaches the end."""
    environment, metadata, node = _begun()
    assert node.append(5) is AppendOutcome.ACKED  # of the 11 that are reserved, few are left
    node.rotate()
    writer = node.shard.wal.writer
    assert writer.wants_reservation
    metadata.reserving = node.shard.history.catch_up

    node.shard.reserve_ahead()

    assert metadata.reserving is None, "the export came in between"
    assert environment.catalog.frontier().next == 8
    assert _reserved(environment) >= writer.reserved_end > 8


@pytest.mark.proves("I41")
def test_an_owner_that_finds_all_exported_gives_back_what_an_earlier_one_left() -> None:
    """It was killed after an append whose reservation reached further, and after its export."""
    environment, _, node = _begun()
    node.shard.wal.give_back_reserved = lambda end: None  # type: ignore[method-assign]  # as if a commit took long
    node.shard.history.catch_up()
    assert _reserved(environment) > 3
    environment.inner.end_all_sessions()

    back = environment.node("a")
    assert back.shard.history.has_unused
    while back.shard.history.step():
        pass

    assert _reserved(environment) == 3 and not back.shard.history.has_unused


def test_what_could_not_be_given_back_is_tried_again() -> None:
    environment, metadata, node = _begun()
    history = node.shard.history
    history.catch_up()
    node.append()
    node.rotate()

    def away() -> None:
        raise Unavailable("the store is away")

    metadata.before = away
    with pytest.raises(ForebayError):
        history.step()
    history.catch_up()
    assert _reserved(environment) == 4 and not history.has_unused


@pytest.mark.slow
@pytest.mark.proves("I41")
def test_an_idle_topic_needs_no_yes(tmp_path: Path) -> None:
    """By the workers of a log: what is rotated, sealed and exported is given back without any call."""
    environment = shared_fs(tmp_path)
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic("shop/orders", durability="fsync")
        topic.append(b"0")
        assert state_of(a, topic).reserved_end > 1
        topic.rotate()
        a.export_topic("shop/orders")
        until(lambda: state_of(a, topic).reserved_end == 1)
        inside(a).lose_session()
        assert b.topic("shop/orders").append(b"1") == 1
