"""The store in memory: the contract, and what only it can do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forebay.metadata import MemoryMetadata, MetadataStore, Put, SessionEnded
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
