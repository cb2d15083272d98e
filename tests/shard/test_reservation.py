"""Offsets reserved in the recorded state: only by the owner, and not behind a seal."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from forebay.catalog import read_state
from forebay.errors import Conflict, Fenced, Indeterminate, Unavailable
from forebay.format.metadata.descriptor import Phase
from forebay.metadata import Compare, Entry, MemoryMetadata, Operation, Outcome
from forebay.shard import Owner, Wanted, acquire
from forebay.shard.owner_loss import TakeOver
from forebay.shard.ownership import change_state, record_reserved, reserve_in_state
from forebay.testing.simulated.clock import ManualClock

SHARD = Wanted("/forebay/storage/topics/shop/orders/0/state", "ab" * 16)


def _reserved(store: MemoryMetadata) -> int:
    stored = read_state(store, SHARD.key)
    assert stored is not None
    return stored.state.reserved_end


def test_a_reservation_that_comes_after_the_seal_changes_nothing() -> None:
    """Else the next owner, should it stop before its first append, would leave a gap where nothing ever was."""
    store = MemoryMetadata()
    epoch = acquire(store, [SHARD], Owner(store.session(15).id, "here"), clock=ManualClock())[0].epoch
    reserve = reserve_in_state(store, SHARD, epoch, clock=ManualClock())
    assert reserve(100) == 100

    change_state(
        store,
        SHARD,
        epoch,
        lambda state: msgspec.structs.replace(
            state, phase=Phase.SEALED, owner=None, next_offset=22, reserved_end=22, sealed_by="here"
        ),
        clock=ManualClock(),
    )

    assert reserve(200) == 22
    assert _reserved(store) == 22


def test_an_older_owner_reserves_nothing_any_more() -> None:
    store = MemoryMetadata()
    first, second = store.session(15), store.session(15)
    reserve = reserve_in_state(
        store,
        SHARD,
        acquire(store, [SHARD], Owner(first.id, "here"), clock=ManualClock())[0].epoch,
        clock=ManualClock(),
    )
    first.close()
    acquire(store, [SHARD], Owner(second.id, "there"), clock=ManualClock())

    with pytest.raises(Fenced):
        reserve(100)
    assert _reserved(store) == 0


def test_a_reservation_that_asks_for_less_takes_nothing_back() -> None:
    """Two may be under way at once, one for an append and one ahead of need: offsets up to the higher are given out."""
    store = MemoryMetadata()
    epoch = acquire(store, [SHARD], Owner(store.session(15).id, "here"), clock=ManualClock())[0].epoch
    reserve = reserve_in_state(store, SHARD, epoch, clock=ManualClock())

    assert [reserve(100), reserve(60), reserve(101)] == [100, 100, 101]
    assert _reserved(store) == 101


@pytest.mark.parametrize("landed", [True, False])
def test_a_reservation_whose_answer_was_lost_leaves_no_append_in_doubt(landed: bool) -> None:  # noqa: FBT001
    """No offset that it asked for is used, so the caller may simply repeat the append: seen with a stopped etcd."""
    store = LosingMetadata(landed=landed)
    epoch = acquire(store, [SHARD], Owner(store.session(15).id, "here"), clock=ManualClock())[0].epoch
    reserve = reserve_in_state(store, SHARD, epoch, clock=ManualClock())
    store.is_lost = True

    with pytest.raises(Unavailable, match=r"nothing was written, offsets up to 100 may or may not be reserved"):
        reserve(100)

    store.is_lost = store.is_away = False
    assert reserve(60) == (100 if landed else 60)


class LosingMetadata(MemoryMetadata):
    """A store whose next transaction is lost, done or not, and that does not answer afterwards."""

    def __init__(self, *, landed: bool) -> None:
        super().__init__()
        self.is_lost = self.is_away = False
        self._landed = landed

    def get(self, key: str) -> Entry | None:
        if self.is_away:
            raise Unavailable("out of reach")
        return super().get(key)

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        if not self.is_lost:
            return super().transaction(compares, operations)
        if self._landed:
            super().transaction(compares, operations)
        self.is_away = True
        raise Indeterminate("its answer is lost")


def test_what_only_a_log_knows_of_offsets_is_nobodys_to_take_over_before_it_is_told() -> None:
    """The mode was changed, and whoever opened the log then died before it said how far its offsets went."""
    store = MemoryMetadata()

    def taken(holder: str, take_over: TakeOver) -> tuple[int, int]:
        session = store.session(15)
        owner = Owner(session.id, holder)
        [(before, epoch)] = acquire(
            store, [SHARD], owner, take_over=take_over, accepted_by="an operator", clock=ManualClock()
        )
        session.close()
        return before.reserved_end if before is not None else 0, epoch

    taken("here", TakeOver.NEVER)
    taken("here", TakeOver.WITH_YES)
    with pytest.raises(Conflict, match="its records lie there"):
        taken("there", TakeOver.WITH_YES)

    _, epoch = taken("here", TakeOver.WITH_YES)
    record_reserved(store, SHARD, epoch, 30, clock=ManualClock())
    assert taken("there", TakeOver.WITH_YES)[0] == 30
