"""The store in memory: the contract, and what only it can do."""

from __future__ import annotations

from collections.abc import Callable
from random import Random  # noqa: TID251 - seeded

import pytest

from forebay.metadata import Delete, DeleteRange, MemoryMetadata, MetadataStore, Put, SessionEnded
from forebay.metadata.memory import RUN_ENTRIES_MAX
from forebay.testing.contracts.metadata import MetadataContract


class TestMemoryMetadata(MetadataContract):
    @pytest.fixture
    def store(self) -> MetadataStore:
        return MemoryMetadata()

    @pytest.fixture
    def restart(self) -> Callable[[MetadataStore], MetadataStore]:
        def restarted(store: MetadataStore) -> MetadataStore:
            assert isinstance(store, MemoryMetadata)
            again = MemoryMetadata(store.snapshot())
            again.end_all_sessions()
            store.close()
            return again

        return restarted


def test_a_snapshot_never_changes_and_can_be_gone_back_to() -> None:
    store = MemoryMetadata()
    store.transaction([], [Put("a", b"1")])
    snapshot = store.snapshot()

    store.transaction([], [Put("a", b"2"), Put("b", b"2")])
    other = MemoryMetadata(snapshot)
    store.restore(snapshot)

    for seen in (store, other):
        entry = seen.get("a")
        assert entry is not None
        assert entry.value == b"1"
        assert seen.get("b") is None
        assert seen.revision() == snapshot.revision == 1


def test_stores_of_one_snapshot_go_their_own_ways() -> None:
    snapshot = MemoryMetadata().snapshot()
    one, two = MemoryMetadata(snapshot), MemoryMetadata(snapshot)

    one.transaction([], [Put("a", b"")])

    assert two.range("") == []


def test_a_session_can_be_declared_dead() -> None:
    store = MemoryMetadata()
    session = store.session(30.0)
    store.transaction([], [Put("leased", b"", session=session.id)])

    store.end_session(session.id)

    assert not session.alive()
    assert store.get("leased") is None
    assert store.transaction([SessionEnded(session.id)], []).succeeded


def test_after_a_crash_of_the_machine_every_session_is_dead() -> None:
    store = MemoryMetadata()
    sessions = [store.session(30.0) for _ in range(3)]
    store.transaction([], [Put(session.id, b"", session=session.id) for session in sessions])
    after = MemoryMetadata(store.snapshot())

    after.end_all_sessions()

    assert after.range("") == []
    assert [session.alive() for session in sessions] == [True] * 3
    assert [after.session_alive(session.id) for session in sessions] == [False] * 3


def test_entries_are_those_of_a_plain_map_after_any_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.metadata.memory.RUN_ENTRIES_MAX", 8)
    random, plain, store = Random(7), dict[str, bytes](), MemoryMetadata()
    for step in range(600):
        # It grows, and then shrinks.
        put = [f"{random.randrange(200):03}" for _ in range(random.randrange(4))] if step < 300 else []
        gone = [f"{random.randrange(200):03}" for _ in range(random.randrange(4))] if step % 3 == 0 or not put else []
        whole = [f"{random.randrange(20):02}"] if step % 40 == 0 else []
        put = [key for key in dict.fromkeys(put) if key not in gone and not key.startswith(tuple(whole))]
        store.transaction(
            [], [*(Put(key, b"%d" % step) for key in put), *map(Delete, set(gone)), *map(DeleteRange, whole)]
        )
        plain = {key: value for key, value in plain.items() if key not in gone and not key.startswith(tuple(whole))}
        plain.update((key, b"%d" % step) for key in put)

        assert {entry.key: entry.value for entry in store.range("")} == plain
        assert store.snapshot().keys == tuple(sorted(plain))
        key, after = f"{random.randrange(220):03}", f"{random.randrange(220):03}"
        found = store.get(key)
        assert (found.value if found is not None else None) == plain.get(key)
        expected = sorted(key for key in plain if key.startswith("1") and key > after)
        assert [entry.key for entry in store.range("1", start_after=after)] == expected
        assert [entry.key for entry in store.range("1", start_after=after, limit=2)] == expected[:2]


@pytest.mark.slow
def test_a_change_copies_few_entries_however_many_there_are() -> None:
    """Each change copied all of them."""
    store = MemoryMetadata()
    for first in range(0, 20_000, 100):
        store.transaction([], [Put(f"{number:06}", b"") for number in range(first, first + 100)])
    before = store.snapshot()

    store.transaction([], [Put("010000", b"new"), Delete("000007")])

    runs = {id(run) for run in before.entries.runs}
    changed = [run for run in store.snapshot().entries.runs if id(run) not in runs]
    assert sum(len(run.keys) for run in changed) <= 2 * RUN_ENTRIES_MAX
    assert len(before.keys) == 20_000 == len(store.snapshot().keys) + 1
