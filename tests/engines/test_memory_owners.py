"""Ephemeral shards whose session ends: kept if no other owner came, else given up, and never acknowledged by two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import NamedTuple

import pytest

from forebay.appends.queue import QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.clock import SystemClock
from forebay.engines import ByName, MemoryEngine
from forebay.engines.by_name import NewRecord
from forebay.errors import Closed, Fenced, Indeterminate, Moved, Unavailable
from forebay.metadata import MemoryMetadata, MetadataStore
from forebay.shard.ownership import OwnerSession
from forebay.testing.simulated.metadata import Fault, FaultyMetadata
from forebay.topics import ShardRef
from tests.engines.homes import SETTINGS, by_name, spec_of
from tests.shard.test_owner_session import Pausing

REF = ShardRef(spec_of("ephemeral"), 0)


class MemoryOwner(NamedTuple):
    """One process: its engine, and the session that may end under it."""

    by_name: ByName[MemoryEngine]
    owner_session: OwnerSession

    @property
    def engine(self) -> MemoryEngine:
        return self.by_name.engine

    def append(self, value: bytes) -> int:
        return self.by_name.write(REF, NewRecord(value, 1))

    def values(self) -> list[bytes | None]:
        batches = self.by_name.read_by_offset(REF, 0).batches
        return [value for batch in batches for value in batch.values()]


def member(store: MetadataStore, holder: str) -> MemoryOwner:
    owner_session = OwnerSession(store, 15.0, holder)
    engine = MemoryEngine(SETTINGS, clock=SystemClock(), metadata=store, owner_session=owner_session)
    return MemoryOwner(by_name(engine, store), owner_session)


@pytest.fixture
def store() -> FaultyMetadata:
    return FaultyMetadata(MemoryMetadata())


def test_what_no_other_owner_has_had_is_kept_and_owned_in_a_new_session(store: FaultyMetadata) -> None:
    here, there = member(store, "here"), member(store, "there")
    assert here.append(b"0") == 0
    here.owner_session.session.close()

    assert here.append(b"1") == 1

    assert here.values() == [b"0", b"1"]
    assert here.engine.open_shard(REF).epoch == 2
    with pytest.raises(Moved, match="living session"):
        there.append(b"x")


def test_nothing_is_acknowledged_once_another_has_it_and_the_next_use_says_who(store: FaultyMetadata) -> None:
    here, there = member(store, "here"), member(store, "there")
    here.append(b"0")
    shard = here.engine.open_shard(REF)
    here.owner_session.session.close()
    began = there.append(b"theirs")

    with pytest.raises(Fenced):
        here.append(b"zombie")

    assert here.engine.find(REF) is None
    with pytest.raises(Closed):
        shard.read(0)
    with pytest.raises(Moved, match="in directory there"):
        here.append(b"x")
    there.owner_session.session.close()
    assert here.append(b"again") > began


def test_what_is_held_stays_while_the_last_session_cannot_be_ended() -> None:
    store = Pausing()
    here = member(store, "here")
    here.append(b"0")
    session = store.sessions[0]
    session.is_late = session.is_cut_off = True

    with pytest.raises(Unavailable, match="of this very directory"):
        here.append(b"refused")
    assert here.values() == [b"0"]
    session.is_cut_off = False

    assert here.append(b"1") == 1
    assert here.values() == [b"0", b"1"]


def test_who_only_reads_stops_too(store: FaultyMetadata) -> None:
    here, there = member(store, "here"), member(store, "there")
    here.append(b"0")
    shard = here.engine.open_shard(REF)
    shard.check_owner()
    assert here.values() == [b"0"]
    here.owner_session.session.close()
    there.append(b"theirs")

    shard.check_owner()

    with pytest.raises(Closed):
        shard.read(0)
    assert here.engine.shards() == []


def test_a_shard_opened_after_its_process_lost_its_session_is_owned_in_one_that_lives(store: FaultyMetadata) -> None:
    here, there = member(store, "here"), member(store, "there")
    here.owner_session.session.close()

    here.append(b"0")

    with pytest.raises(Moved, match="living session"):
        there.append(b"x")


def test_an_answer_that_got_lost_on_the_way_back_is_not_taken_for_another_owner(store: FaultyMetadata) -> None:
    here = member(store, "here")
    here.append(b"0")
    here.owner_session.session.close()
    store.inject(Fault.FAIL_AFTER)
    store.inject(Fault.FAIL_BEFORE, after=1, method="get")
    with pytest.raises((Unavailable, Indeterminate)):
        here.append(b"refused")

    assert here.append(b"1") == 1
    assert here.values() == [b"0", b"1"]


def test_threads_that_learn_of_the_loss_at_once_give_it_up_once(store: FaultyMetadata) -> None:
    here, there = member(store, "here"), member(store, "there")
    here.append(b"0")
    shard = here.engine.open_shard(REF)
    here.owner_session.session.close()
    there.append(b"theirs")
    at_once = Barrier(8)

    def hear() -> None:
        at_once.wait(30)
        shard.check_owner()

    with ThreadPoolExecutor(8) as threads:
        for heard in [threads.submit(hear) for _ in range(8)]:
            heard.result(30)

    assert here.engine.shards() == []
    there.owner_session.session.close()
    here.append(b"again")
    again = here.engine.find(REF)
    shard.check_owner()
    assert again is not None and here.engine.find(REF) is again, "one that was opened since stays"


def test_a_closed_shard_says_so_though_its_session_has_ended_too(store: FaultyMetadata) -> None:
    here = member(store, "here")
    here.append(b"0")
    shard = here.engine.open_shard(REF)
    here.engine.close()
    store.close()

    with pytest.raises(Closed, match=r"\[0\] is closed"):
        shard.stage_one(QueuedRecord(b"1", None, None, (), 1, None, Ticket()), 1)
