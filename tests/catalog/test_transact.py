"""The loop behind every change of the metadata store: contention, lost answers, the limit, and how long it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from forebay.catalog.transact import ATTEMPTS, PAUSE_MAX_S, PAUSE_S, Done, Write, transact
from forebay.errors import Conflict, Indeterminate, Unavailable
from forebay.metadata import Absent, Entry, MemoryMetadata, MetadataStore, Put, RevisionIs, SessionEnded
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata


class PausesClock(ManualClock):
    """A clock that keeps how long it was asked to wait."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        super().sleep(seconds)


def _increment(
    store: MetadataStore, clock: ManualClock | None = None, before_write: Callable[[], None] = lambda: None
) -> int:
    """Count up by one: not harmless when repeated, so that a change made twice would show."""
    token = b""

    def change(entry: Entry | None) -> Write[int] | Done[int]:
        nonlocal token
        number, who = entry.value.split() if entry is not None else (b"0", b"")
        if token and who == token:
            return Done(int(number))
        token = b"%d-%d" % (threading.get_ident(), id(change))
        before_write()
        revision = entry.mod_revision if entry is not None else 0
        return Write([RevisionIs("n", revision)], [Put("n", b"%d %s" % (int(number) + 1, token))], int(number) + 1)

    return transact(store, lambda: store.get("n"), change, what="n is not counted", clock=clock or ManualClock())


def _number(store: MetadataStore) -> int:
    entry = store.get("n")
    return int(entry.value.split()[0]) if entry is not None else 0


def test_two_threads_that_change_one_key_lose_no_change() -> None:
    store = MemoryMetadata()

    def count(seed: int) -> None:
        for _ in range(50):
            _increment(store, ManualClock(seed=seed))

    threads = [threading.Thread(target=count, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert _number(store) == 100


def test_another_change_between_look_and_write_is_seen_by_the_next_look() -> None:
    store = MemoryMetadata()
    others = iter([True])

    def other() -> None:
        if next(others, False):
            store.transaction([], [Put("n", b"41 other")])

    assert _increment(store, ManualClock(), other) == 42


@pytest.mark.parametrize("fault", [Fault.FAIL_AFTER, Fault.TIME_OUT], ids=["applied", "not applied"])
@pytest.mark.parametrize("lost", range(1, ATTEMPTS))
def test_an_answer_that_is_lost_at_any_attempt_is_looked_up(fault: Fault, lost: int) -> None:
    """Whether the change was made or not, it is made once; attempts before it were refused."""
    faulty = FaultyMetadata(MemoryMetadata())
    refused = iter(range(lost - 1))

    def other() -> None:
        if next(refused, None) is not None:
            faulty.inner.transaction([], [Put("n", b"7 other")])

    faulty.inject(fault, after=lost - 1)
    assert _increment(faulty, ManualClock(), other) == (8 if lost > 1 else 1)
    assert _number(faulty) == (8 if lost > 1 else 1)


@pytest.mark.parametrize("fault", [Fault.FAIL_AFTER, Fault.TIME_OUT], ids=["applied", "not applied"])
def test_answers_that_are_lost_every_time_end_in_a_look(fault: Fault) -> None:
    """Applied: the next look finds it. Not applied: it may still land, so the outcome is unknown and not a failure."""
    faulty = FaultyMetadata(MemoryMetadata())
    faulty.inject(fault, count=ATTEMPTS)

    if fault is Fault.FAIL_AFTER:
        assert _increment(faulty, ManualClock()) == 1
        return
    with pytest.raises(Indeterminate, match="n is not counted.*last of 24 attempts"):
        _increment(faulty, ManualClock())
    assert [outcome.succeeded for outcome in faulty.land()] == [True] + [False] * (ATTEMPTS - 1)


def test_the_last_attempt_is_looked_up_too() -> None:
    """All but the last answer `not applied`, the last one is applied and its answer lost."""
    faulty = FaultyMetadata(MemoryMetadata())
    faulty.inject(Fault.TIME_OUT, count=ATTEMPTS - 1)
    faulty.inject(Fault.FAIL_AFTER, after=ATTEMPTS - 1)

    assert _increment(faulty, ManualClock()) == 1


def test_at_the_limit_the_error_names_what_changed_and_nothing_is_done() -> None:
    store = MemoryMetadata()
    session = store.session(60)
    attempts = 0

    def change(entry: Entry | None) -> Write[None]:
        nonlocal attempts
        attempts += 1
        revision = entry.mod_revision if entry is not None else 0
        store.transaction([], [Put("busy", b"%d" % attempts)])
        return Write(
            [RevisionIs("busy", revision), Absent("calm"), SessionEnded(session.id)], [Put("result", b"")], None
        )

    with pytest.raises(Unavailable, match=f"it is not done: busy, session {session.id} changed 24 times") as raised:
        transact(store, lambda: store.get("busy"), change, what="it is not done", clock=ManualClock())

    assert "calm" not in str(raised.value)
    # One more look than attempts: what came of the last one.
    assert attempts == ATTEMPTS + 1
    assert store.get("result") is None


def test_what_a_change_refuses_comes_out_at_once() -> None:
    store = MemoryMetadata()

    def change(entry: Entry | None) -> Done[None]:
        raise Conflict("not like this")

    with pytest.raises(Conflict, match="not like this"):
        transact(store, lambda: store.get("n"), change, what="it", clock=ManualClock())


def test_a_store_that_is_away_is_not_asked_again() -> None:
    faulty = FaultyMetadata(MemoryMetadata())
    faulty.inject(Fault.FAIL_BEFORE)

    with pytest.raises(Unavailable):
        _increment(faulty, ManualClock())

    assert faulty.calls["transaction"] == 1


@pytest.mark.parametrize("method", ["get", "transaction"])
def test_a_store_that_is_away_when_a_lost_answer_is_looked_up_leaves_the_outcome_unknown(method: str) -> None:
    """`Unavailable` would say that nothing was done."""
    faulty = FaultyMetadata(MemoryMetadata())
    faulty.inject(Fault.TIME_OUT)
    faulty.inject(Fault.FAIL_BEFORE, method=method, after=1)

    with pytest.raises(Indeterminate, match="n is not counted, as far as is known"):
        _increment(faulty, ManualClock())

    assert [outcome.succeeded for outcome in faulty.land()] == [True]


def test_a_store_that_is_away_after_a_refusal_leaves_nothing_in_doubt() -> None:
    faulty = FaultyMetadata(MemoryMetadata())
    faulty.inject(Fault.FAIL_BEFORE, method="get", after=1)
    others = iter([True])

    def other() -> None:
        if next(others, False):
            faulty.inner.transaction([], [Put("n", b"41 other")])

    with pytest.raises(Unavailable):
        _increment(faulty, ManualClock(), other)
    assert _number(faulty) == 41


def test_pauses_grow_up_to_a_limit_and_differ_between_callers() -> None:
    """The first retry follows at once: most often the other is done. Then each pause is about twice the one before."""
    spent = []
    for seed in (1, 2):
        faulty, clock = FaultyMetadata(MemoryMetadata()), PausesClock(seed)
        faulty.inject(Fault.TIME_OUT, count=ATTEMPTS)
        with pytest.raises(Indeterminate):
            _increment(faulty, clock)
        spent.append(clock.pauses)

    assert all(len(pauses) == ATTEMPTS - 2 for pauses in spent)
    assert spent[0] != spent[1]
    for pauses in spent:
        longest = [min(PAUSE_MAX_S, PAUSE_S * 2**number) for number in range(len(pauses))]
        assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True))
        assert sum(pauses) < 1.0


def test_what_others_change_while_it_waits_does_not_refuse_the_next_attempt() -> None:
    """A shard's state changes with every reservation, so oftener than the longest pause."""
    store = MemoryMetadata()
    met = iter(range(3))

    class BusyClock(ManualClock):
        def sleep(self, seconds: float) -> None:
            store.transaction([], [Put("n", b"41 other")])
            super().sleep(seconds)

    def other() -> None:
        if next(met, None) is not None:
            store.transaction([], [Put("n", b"7 other")])

    assert _increment(store, BusyClock(), other) == 42


def test_a_change_that_meets_no_other_does_not_wait() -> None:
    clock = PausesClock()

    assert _increment(MemoryMetadata(), clock) == 1

    assert clock.pauses == []
