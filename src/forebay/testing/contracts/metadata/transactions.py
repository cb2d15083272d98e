"""Transactions: entries and revisions, each comparison, races, limits."""

from __future__ import annotations

import threading

import pytest

from forebay.errors import Invalid
from forebay.metadata import (
    OPERATIONS_MAX,
    TRANSACTION_BYTES_MAX,
    Absent,
    Compare,
    Delete,
    DeleteRange,
    Exists,
    MetadataStore,
    Operation,
    Put,
    RevisionIs,
    SessionEnded,
    ValueIs,
)
from forebay.testing.contracts.metadata.calls import keys_under, put, run_all


class TransactionContract:
    """Reads, comparisons, limits."""

    def test_a_new_store_is_empty(self, store: MetadataStore) -> None:
        assert store.get("a") is None
        assert store.range("") == []

    def test_an_entry_carries_value_and_revisions(self, store: MetadataStore) -> None:
        first = put(store, "a", value=b"1")
        second = put(store, "a", value=b"2")

        entry = store.get("a")

        assert entry is not None
        assert (entry.key, entry.value, entry.session) == ("a", b"2", None)
        assert (entry.create_revision, entry.mod_revision) == (first, second)

    def test_a_key_deleted_and_put_again_is_a_new_one(self, store: MetadataStore) -> None:
        put(store, "a")
        store.transaction([], [Delete("a")])
        assert store.get("a") is None

        again = put(store, "a")

        entry = store.get("a")
        assert entry is not None
        assert (entry.create_revision, entry.mod_revision) == (again, again)

    def test_the_revision_rises_by_one_with_each_transaction_that_changes_something(self, store: MetadataStore) -> None:
        start = store.revision()

        assert put(store, "a", "b", "c") == start + 1
        assert put(store, "a") == start + 2
        assert store.transaction([], [Delete("a")]).revision == start + 3
        assert store.transaction([], [Delete("a")]).revision == start + 3
        assert store.transaction([], [DeleteRange("x")]).revision == start + 3
        assert store.transaction([], []).revision == start + 3
        assert store.transaction([Exists("a")], [Put("a", b"")]).revision == start + 3
        assert store.revision() == start + 3

    @pytest.mark.parametrize(
        ("compare", "holds"),
        [
            (Absent("no"), True),
            (Absent("yes"), False),
            (Exists("yes"), True),
            (Exists("no"), False),
            (Exists("ye"), False),
            (RevisionIs("no", 0), True),
            (RevisionIs("yes", 0), False),
            (ValueIs("yes", b"v"), True),
            (ValueIs("yes", b""), False),
            (ValueIs("yes", b"v\0"), False),
            (ValueIs("no", b"v"), False),
            (ValueIs("no", b""), False),
            (SessionEnded("unknown"), True),
        ],
    )
    def test_each_comparison(self, store: MetadataStore, compare: Compare, *, holds: bool) -> None:
        put(store, "yes")

        outcome = store.transaction([compare], [Put("result", b"r")])

        assert outcome.succeeded is holds
        assert (store.get("result") is not None) is holds

    def test_a_revision_compares_with_the_newest_change_of_its_key(self, store: MetadataStore) -> None:
        old = put(store, "a")
        new = put(store, "a")
        put(store, "b")

        assert not store.transaction([RevisionIs("a", old)], [Delete("b")]).succeeded
        assert not store.transaction([RevisionIs("a", new + 1)], [Delete("b")]).succeeded
        assert store.transaction([RevisionIs("a", new)], [Delete("b")]).succeeded

    def test_one_comparison_that_fails_stops_all_operations(self, store: MetadataStore) -> None:
        put(store, "a")

        outcome = store.transaction(
            [Exists("a"), Absent("b"), Exists("c")], [Put("b", b""), Delete("a"), DeleteRange("a")]
        )

        assert not outcome.succeeded
        assert keys_under(store, "") == ["a"]

    def test_of_many_who_compare_the_same_revision_one_wins(self, store: MetadataStore) -> None:
        revision = put(store, "a")
        barrier = threading.Barrier(6)
        wins: list[int] = []

        def contend(number: int) -> None:
            barrier.wait()
            if store.transaction([RevisionIs("a", revision)], [Put("a", b"%d" % number)]).succeeded:
                wins.append(number)

        run_all([threading.Thread(target=contend, args=(number,)) for number in range(6)])

        entry = store.get("a")
        assert entry is not None
        assert [entry.value] == [b"%d" % number for number in wins]

    def test_no_increment_by_compare_and_swap_is_lost(self, store: MetadataStore) -> None:
        put(store, "n", value=b"0")

        def add() -> None:
            for _ in range(10):
                while True:
                    entry = store.get("n")
                    assert entry is not None
                    higher = b"%d" % (int(entry.value) + 1)
                    if store.transaction([ValueIs("n", entry.value)], [Put("n", higher)]).succeeded:
                        break

        run_all([threading.Thread(target=add) for _ in range(4)])

        entry = store.get("n")
        assert entry is not None
        assert entry.value == b"40"

    def test_the_number_of_comparisons_and_operations_is_limited(self, store: MetadataStore) -> None:
        compares: list[Compare] = [Absent(f"k{number}") for number in range(OPERATIONS_MAX + 1)]
        operations: list[Operation] = [Put(f"k{number}", b"") for number in range(OPERATIONS_MAX + 1)]

        with pytest.raises(Invalid, match="101 operations in one transaction; the limit is 100"):
            store.transaction([], operations)
        with pytest.raises(Invalid, match="101 comparisons in one transaction; the limit is 100"):
            store.transaction(compares, [])

        assert store.range("") == []
        assert store.transaction(compares[:-1], operations[:-1]).succeeded
        assert len(store.range("")) == OPERATIONS_MAX

    def test_the_bytes_of_a_transaction_are_limited(self, store: MetadataStore) -> None:
        room = TRANSACTION_BYTES_MAX - len("ab")

        with pytest.raises(Invalid, match="524289 bytes in one transaction; the limit is 524288"):
            store.transaction([ValueIs("a", b"")], [Put("b", b"x" * (room + 1))])
        with pytest.raises(Invalid, match="the limit is 524288"):
            store.transaction([ValueIs("a", bytes(room + 1))], [Delete("b")])
        with pytest.raises(Invalid, match="the limit is 524288"):
            store.transaction([], [Put("é" * (TRANSACTION_BYTES_MAX // 2 + 1), b"")])

        assert store.range("") == []
        assert store.transaction([Absent("a")], [Put("b", b"x" * room)]).succeeded

    @pytest.mark.parametrize(
        "operations",
        [
            [Put("a", b"1"), Put("a", b"2")],
            [Put("a", b"1"), Delete("a")],
            [Delete("a"), Put("a", b"1")],
            [Put("a/b", b"1"), DeleteRange("a/")],
            [DeleteRange(""), Put("a/b", b"1")],
        ],
    )
    def test_a_key_has_one_fate_in_a_transaction(self, store: MetadataStore, operations: list[Operation]) -> None:
        put(store, "a", "a/b")

        with pytest.raises(Invalid, match="in one transaction"):
            store.transaction([], operations)

        assert keys_under(store, "") == ["a", "a/b"]

    def test_deletions_may_overlap(self, store: MetadataStore) -> None:
        start = put(store, "a/1", "a/2", "b")

        outcome = store.transaction([], [Delete("a/1"), DeleteRange("a/"), DeleteRange("a"), Delete("a/2")])

        assert outcome.revision == start + 1
        assert keys_under(store, "") == ["b"]

    @pytest.mark.parametrize("key", ["", "a\0b", "\ud800", 7, None, b"a"])
    def test_what_is_no_key_is_refused(self, store: MetadataStore, key: str) -> None:
        for call in (
            lambda: store.get(key),
            lambda: store.transaction([Absent(key)], []),
            lambda: store.transaction([], [Put(key, b"")]),
            lambda: store.transaction([], [Delete(key)]),
        ):
            with pytest.raises(Invalid, match="key"):
                call()

    def test_a_value_is_bytes(self, store: MetadataStore) -> None:
        with pytest.raises(Invalid, match="is bytes, not str"):
            store.transaction([], [Put("a", "text")])  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)), b"x" * 400_000])
    def test_any_bytes_are_kept(self, store: MetadataStore, value: bytes) -> None:
        put(store, "a", value=value)

        entry = store.get("a")

        assert entry is not None
        assert entry.value == value
        assert [found.value for found in store.range("")] == [value]
