"""An acquisition of which nothing came is taken back, unless somebody else has the shard by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from forebay.catalog import read_state
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.format.metadata.value import encode_value
from forebay.metadata import Entry, MemoryMetadata, Put
from forebay.shard import Owner, Wanted, acquire
from forebay.shard.ownership import give_back
from forebay.testing.checks.moves import RecordingMetadata
from forebay.testing.simulated.clock import ManualClock

KEY: Final = "/forebay/storage/topics/shop/orders/0/state"
WANTED: Final = [Wanted(KEY, "ab" * 16)]
BEFORE: Final = ShardState(
    incarnation="ab" * 16, epoch=3, holder="a", holder_since=2, phase=Phase.OPEN, next_offset=7, reserved_end=64
)


class _Overtaken(RecordingMetadata):
    """Lets somebody else act once, right behind a look."""

    def __init__(self, inner: MemoryMetadata, act: Callable[[], object]) -> None:
        super().__init__(inner)
        self._act: Callable[[], object] | None = act

    def get(self, key: str) -> Entry | None:
        found = super().get(key)
        act, self._act = self._act, None
        if act is not None:
            act()
        return found


def _recorded() -> MemoryMetadata:
    store = MemoryMetadata()
    store.transaction([], [Put(KEY, encode_value(BEFORE))])
    return store


def _let_go_of() -> tuple[MemoryMetadata, ShardState | None, int]:
    """A store in which an owner's session ended right after it had acquired; what it found, and its epoch."""
    store = _recorded()
    session = store.session(10)
    [(before, epoch)] = acquire(store, WANTED, Owner(session.id, "a"), clock=ManualClock())
    session.close()
    return store, before, epoch


def _state(store: MemoryMetadata) -> ShardState:
    stored = read_state(store, KEY)
    assert stored is not None
    return stored.state


def test_the_shard_is_nobodys_again_and_its_epoch_is_used() -> None:
    store = _recorded()
    [(before, epoch)] = acquire(store, WANTED, Owner(store.session(10).id, "a"), clock=ManualClock())

    give_back(store, KEY, before, epoch)

    state = _state(store)
    assert (state.epoch, state.owner, state.next_offset, state.reserved_end) == (4, None, 7, 64)


def test_whoever_has_it_since_the_look_keeps_it() -> None:
    store, before, epoch = _let_go_of()
    other = Owner(store.session(10).id, "b")

    give_back(
        _Overtaken(store, lambda: acquire(store, WANTED, other, clock=ManualClock(), accepted_by="b")),
        KEY,
        before,
        epoch,
    )

    state = _state(store)
    assert (state.epoch, state.owner, state.holder) == (5, other.session, "b")


def test_whoever_had_it_before_the_look_keeps_it() -> None:
    store, before, epoch = _let_go_of()
    other = Owner(store.session(10).id, "b")
    acquire(store, WANTED, other, clock=ManualClock(), accepted_by="b")

    give_back(store, KEY, before, epoch)

    assert (_state(store).epoch, _state(store).owner) == (5, other.session)
