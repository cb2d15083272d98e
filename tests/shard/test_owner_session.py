"""The session of a process: one that was replaced has ended for everybody, so that nothing stays owned in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.errors import Moved, Unavailable
from forebay.metadata import MemoryMetadata, Session
from forebay.shard import Owner, Wanted, acquire
from forebay.shard.ownership import OwnerSession
from forebay.testing.checks.moves import RecordingMetadata
from forebay.testing.simulated.clock import ManualClock
from tests.support.waiting import until

SHARD = Wanted("/forebay/storage/topics/shop/orders/0/state", "ab" * 16)


class Late:
    """A session that is too late to be renewed for a while, and is renewed after all."""

    def __init__(self, inner: Session) -> None:
        self.inner = inner
        self.is_late = False
        self.is_cut_off = False
        self.closes = 0
        self.looks = 0

    @property
    def id(self) -> str:
        return self.inner.id

    def alive(self) -> bool:
        self.looks += 1
        return not self.is_late and self.inner.alive()

    def close(self) -> None:
        self.closes += 1
        if self.is_cut_off:
            raise Unavailable("the store is away")
        self.inner.close()


class Pausing(RecordingMetadata):
    """A store whose sessions may be late."""

    def __init__(self) -> None:
        super().__init__(MemoryMetadata())
        self.sessions: list[Late] = []
        self.is_away = False
        self.asked = 0
        self.meet: Callable[[], object] = lambda: None

    def session(self, ttl_s: float) -> Session:
        self.asked += 1
        self.meet()
        if self.is_away:
            raise Unavailable("the store is away")
        self.sessions.append(Late(self.inner.session(ttl_s)))
        return self.sessions[-1]


def test_what_was_owned_in_a_session_that_came_back_too_late_can_be_acquired_again() -> None:
    store = Pausing()
    owner_session = OwnerSession(store, 15, "here")
    acquire(store, [SHARD], owner_session.owner, clock=ManualClock())

    store.sessions[0].is_late = True
    again = owner_session.owner
    store.sessions[0].is_late = False

    assert not store.sessions[0].alive()
    assert acquire(store, [SHARD], again, clock=ManualClock())[0].epoch == 2


def test_a_session_that_could_not_be_ended_for_everybody_is_ended_later() -> None:
    store = Pausing()
    owner_session = OwnerSession(store, 15, "here")
    acquire(store, [SHARD], owner_session.owner, clock=ManualClock())
    first = store.sessions[0]
    first.is_late = first.is_cut_off = True

    with pytest.raises(Unavailable):
        acquire(store, [SHARD], owner_session.owner, clock=ManualClock())
    assert store.session_alive(first.id)
    first.is_cut_off = False

    assert acquire(store, [SHARD], owner_session.owner, clock=ManualClock())[0].epoch == 2
    assert not store.session_alive(first.id)
    assert len(store.sessions) == 2


def test_while_the_store_is_away_nobody_waits_for_the_end_of_the_last_session_besides() -> None:
    store = Pausing()
    owner_session = OwnerSession(store, 15, "here")
    first = store.sessions[0]
    first.is_late = store.is_away = True

    with pytest.raises(Unavailable):
        _ = owner_session.session
    assert first.closes == 0
    store.is_away = False

    assert owner_session.session.alive()
    assert not store.session_alive(first.id)


def test_who_comes_back_too_early_is_told_to_wait_and_not_to_go_elsewhere() -> None:
    store = MemoryMetadata()
    acquire(store, [SHARD], Owner(store.session(15).id, "here"), clock=ManualClock())

    with pytest.raises(Unavailable, match="of this very directory.*try again then") as refused:
        acquire(store, [SHARD], Owner(store.session(15).id, "here"), clock=ManualClock())
    assert not isinstance(refused.value, Moved)

    with pytest.raises(Moved, match="in directory here: use it there"):
        acquire(store, [SHARD], Owner(store.session(15).id, "there"), clock=ManualClock())


@pytest.mark.parametrize("is_away", [False, True])
def test_threads_that_need_a_new_session_ask_for_it_once_and_share_the_answer(*, is_away: bool) -> None:
    """Each asked in turn under one lock: while the store was away the last one waited for as many time-outs."""
    store, asked, go_on = Pausing(), threading.Event(), threading.Event()
    owner_session = OwnerSession(store, 15, "here")
    late = store.sessions[0]
    late.is_late, store.is_away, store.asked = True, is_away, 0
    store.meet = lambda: asked.set() or go_on.wait(30)  # type: ignore[func-returns-value]

    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(lambda: owner_session.session)
        assert asked.wait(30)
        looks = late.looks
        others = [threads.submit(lambda: owner_session.session) for _ in range(3)]
        until(lambda: late.looks == looks + 3)
        go_on.set()
        answers = [found.exception(30) or found.result().id for found in (first, *others)]

    assert store.asked == 1
    if is_away:
        assert [type(answer) for answer in answers] == [Unavailable] * 4
    else:
        assert answers == [store.sessions[1].id] * 4


def test_a_thread_that_is_interrupted_while_it_asks_leaves_the_next_one_free_to_ask() -> None:
    store = Pausing()
    owner_session = OwnerSession(store, 15, "here")
    store.sessions[0].is_late = True

    def interrupt() -> None:
        store.meet = lambda: None
        raise KeyboardInterrupt

    store.meet = interrupt
    with pytest.raises(KeyboardInterrupt):
        _ = owner_session.session

    assert owner_session.session.alive()
    assert not store.session_alive(store.sessions[0].id)
