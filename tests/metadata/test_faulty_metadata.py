"""The store with faults: without any it passes the contract, and each fault does what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forebay.errors import Indeterminate, Unavailable
from forebay.metadata import Compacted, MemoryMetadata, MetadataStore, Put, RevisionIs
from forebay.testing.contracts.metadata import MetadataContract
from forebay.testing.simulated.metadata import Fault, FaultyMetadata


@pytest.fixture
def store() -> FaultyMetadata:
    return FaultyMetadata(MemoryMetadata())


class TestFaultyMetadataWithoutFaults(MetadataContract):
    @pytest.fixture
    def store(self) -> MetadataStore:
        return FaultyMetadata(MemoryMetadata())

    @pytest.fixture
    def restart(self) -> Callable[[MetadataStore], MetadataStore]:
        def restarted(store: MetadataStore) -> MetadataStore:
            assert isinstance(store, FaultyMetadata)
            assert isinstance(store.inner, MemoryMetadata)
            again = MemoryMetadata(store.inner.snapshot())
            again.end_all_sessions()
            store.close()
            return FaultyMetadata(again)

        return restarted


def test_what_fails_before_is_not_done(store: FaultyMetadata) -> None:
    store.inject(Fault.FAIL_BEFORE, after=1, count=2)

    assert store.transaction([], [Put("a", b"")]).succeeded
    for _ in range(2):
        with pytest.raises(Unavailable):
            store.transaction([], [Put("b", b"")])

    assert store.get("b") is None
    assert store.transaction([], [Put("b", b"")]).succeeded


def test_what_fails_after_is_done(store: FaultyMetadata) -> None:
    store.inject(Fault.FAIL_AFTER)

    with pytest.raises(Indeterminate):
        store.transaction([], [Put("a", b"")])

    assert store.get("a") is not None


def test_what_times_out_lands_late_and_meets_its_comparison_then(store: FaultyMetadata) -> None:
    revision = store.transaction([], [Put("a", b"old")]).revision
    store.inject(Fault.TIME_OUT, count=2)
    for value in (b"late", b"later"):
        with pytest.raises(Indeterminate):
            store.transaction([RevisionIs("a", revision)], [Put("a", value)])
    entry = store.get("a")
    assert entry is not None
    assert entry.value == b"old"

    assert [outcome.succeeded for outcome in store.land()] == [True, False]

    entry = store.get("a")
    assert entry is not None
    assert entry.value == b"late"
    assert store.land() == []


@pytest.mark.parametrize("method", ["get", "range", "watch", "session", "session_alive", "revision"])
def test_every_other_call_can_fail_before(store: FaultyMetadata, method: str) -> None:
    arguments = {"session": [30.0], "revision": []}.get(method, ["a"])
    store.inject(Fault.FAIL_BEFORE, method=method)

    with pytest.raises(Unavailable, match=f"{method} number 0"):
        getattr(store, method)(*arguments)
    getattr(store, method)(*arguments)

    assert store.calls[method] == 2
    with pytest.raises(ValueError, match="can only fail before"):
        store.inject(Fault.FAIL_AFTER, method=method)


def test_a_watch_held_back_misses_nothing_in_the_end(store: FaultyMetadata) -> None:
    with store.watch("") as watch:
        store.hold_watches_back()
        store.transaction([], [Put("a", b"")])
        assert watch.poll(0.0) == []

        store.let_watches_go()

        assert [change.key for change in watch.poll(0.0)] == ["a"]


def test_a_watch_can_lose_its_place(store: FaultyMetadata) -> None:
    with store.watch("") as watch:
        store.compact_watches()

        with pytest.raises(Compacted, match="list again"):
            watch.poll(0.0)
