"""The gate of a take-over is decided by one look: whatever changes after it is compared by the transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import pytest

from forebay.catalog import ShardCatalog, ShardKeys, read_state
from forebay.errors import Moved, Unavailable, UnknownTopic
from forebay.format.metadata.descriptor import Cur, Phase, ShardState
from forebay.format.metadata.keys import topic_key
from forebay.format.metadata.value import encode_value
from forebay.metadata import Compare, Delete, MemoryMetadata, Operation, Outcome, Put
from forebay.shard import Owner, Wanted, acquire
from forebay.shard.owner_loss import LOSSES_MAX, TakeOver
from forebay.shard.ownership import reserve_in_state
from forebay.testing.checks.moves import RecordingMetadata, commits_of, losses_are_accepted
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import OnOwnerLoss, TopicName, TopicSpec

KEYS: Final = ShardKeys("shop", "orders", 0, "/forebay")
TOPIC_ID: Final = "ab" * 16
SHARD: Final = Wanted(KEYS.state, TOPIC_ID)
DEFINITION: Final = topic_key("shop", "orders")
CLOCK: Final = ManualClock()


def _defined(store: MemoryMetadata | RecordingMetadata, policy: OnOwnerLoss) -> None:
    spec = TopicSpec.create(TopicName("shop", "orders"), topic_id=TOPIC_ID, created_at=0, on_owner_loss=policy.value)
    store.transaction([], [Put(DEFINITION, encode_value(spec))])


def _left(policy: OnOwnerLoss = OnOwnerLoss.WAIT, **fields: object) -> RecordingMetadata:
    """A store with a shard that directory `a` has left: history up to 4, and offsets up to 10 reserved."""
    store = RecordingMetadata(MemoryMetadata())
    _defined(store, policy)
    state = ShardState(incarnation=TOPIC_ID, epoch=3, owner="gone", holder="a", holder_since=1, reserved_end=10)
    puts = [
        Put(KEYS.state, encode_value(msgspec.structs.replace(state, **fields))),
        Put(KEYS.cur, encode_value(Cur(start=0, next=4, epoch=3))),
    ]
    store.transaction([], puts)
    return store


def _acquired(store: RecordingMetadata, holder: str = "b", **options: object) -> ShardState:
    """The state after the directory has acquired the shard."""
    acquire(store, [SHARD], Owner(f"{holder}1", holder), clock=CLOCK, **options)  # type: ignore[arg-type]
    stored = read_state(store, KEYS.state)
    assert stored is not None
    return stored.state


class _Meanwhile(RecordingMetadata):
    """Lets another process act once, between a look and the transaction that was worked out from it."""

    def __init__(self, inner: RecordingMetadata, act: Callable[[], object]) -> None:
        super().__init__(inner)
        self._act: Callable[[], object] | None = act

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        act, self._act = self._act, None
        if act is not None:
            act()
        return super().transaction(compares, operations)


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({}, True),
        ({"owner": None}, True),
        ({"phase": Phase.SEALING}, True),
        ({"reserved_end": 4}, False),
        ({"reserved_end": 3}, False),
        ({"phase": Phase.SEALED, "owner": None, "next_offset": 4, "reserved_end": 4}, False),
        ({"holder": "b"}, False),
        ({"holder": None, "owner": None}, False),
    ],
)
@pytest.mark.proves("I41")
def test_a_tail_at_risk_is_refused_and_nothing_else_is(fields: dict[str, object], is_refused: bool) -> None:  # noqa: FBT001
    store = _left(OnOwnerLoss.WAIT, **fields)
    before = store.range("")

    if is_refused:
        with pytest.raises(Unavailable, match=r"waits for directory a, .* offsets \[4, 10\)"):
            _acquired(store)
        assert store.range("") == before
    else:
        assert _acquired(store).losses == ()


@pytest.mark.proves("I41")
def test_each_yes_is_recorded_and_the_checker_finds_one_that_is_not() -> None:
    for options, by in (({"accepted_by": "anna"}, "anna"), ({}, 'on_owner_loss "take_over"')):
        store = _left(OnOwnerLoss.WAIT if options else OnOwnerLoss.TAKE_OVER)
        [loss] = _acquired(store, **options).losses
        assert (loss.start, loss.stop, loss.holder, loss.epoch, loss.by) == (4, 10, "a", 3, by)
        assert list(losses_are_accepted(commits_of(KEYS, store.committed))) == []

    freely = _left()
    _acquired(freely, take_over=TakeOver.FREELY)
    assert [v.invariant for v in losses_are_accepted(commits_of(KEYS, freely.committed))] == ["I41"]


def test_a_definition_that_is_changed_after_the_look_counts() -> None:
    store = _left(OnOwnerLoss.TAKE_OVER)
    meanwhile = _Meanwhile(store, lambda: _defined(store, OnOwnerLoss.WAIT))
    with pytest.raises(Unavailable, match="waits for"):
        _acquired(meanwhile)

    store = _left(OnOwnerLoss.TAKE_OVER)
    with pytest.raises(UnknownTopic):
        _acquired(_Meanwhile(store, lambda: store.transaction([], [Delete(DEFINITION)])))


def test_an_owner_that_comes_back_after_the_look_keeps_the_shard() -> None:
    """The yes was for what it had; it has more by now."""
    store = _left()
    session = store.session(15)

    def back() -> None:
        [(_, epoch)] = acquire(store, [SHARD], Owner(session.id, "a"), clock=CLOCK)
        reserve_in_state(store, SHARD, epoch, clock=CLOCK)(20)

    with pytest.raises(Moved, match="living session"):
        _acquired(_Meanwhile(store, back), accepted_by="anna")
    session.close()
    with pytest.raises(Unavailable, match=r"\[4, 20\)"):
        _acquired(store)


def test_what_a_late_export_still_brings_is_not_given_up() -> None:
    """The process that was the owner is late, and its export lands after the look: it needs no yes any more."""
    store = _left()

    def exported() -> None:
        catalog = ShardCatalog(store, KEYS, TOPIC_ID, clock=CLOCK)
        reserve_in_state(store, SHARD, 3, clock=CLOCK)(12)
        store.transaction([], [Put(KEYS.cur, encode_value(Cur(start=4, next=8, epoch=3)))])
        assert catalog.frontier().next == 8

    [loss] = _acquired(_Meanwhile(store, exported), accepted_by="anna").losses
    assert (loss.start, loss.stop) == (8, 12)


def test_the_newest_losses_are_kept() -> None:
    store, holders = _left(), ["b", "c"]
    for number in range(LOSSES_MAX + 3):
        state = _acquired(store, holders[number % 2], accepted_by=f"operator {number}")
        reserve_in_state(store, SHARD, state.epoch, clock=CLOCK)(20 + number)
    assert len(state.losses) == LOSSES_MAX
    assert state.losses[-1].by == f"operator {LOSSES_MAX + 2}" and state.losses[0].by == "operator 3"
