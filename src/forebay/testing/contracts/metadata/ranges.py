"""Ranges: prefixes, order, pages, deletion by prefix."""

from __future__ import annotations

import pytest

from forebay.errors import Invalid
from forebay.metadata import DeleteRange, Exists, MetadataStore, Put
from forebay.testing.contracts.metadata.calls import keys_under, put


class RangeContract:
    """Prefixes, order, pages."""

    def test_a_range_is_sorted_and_ends_with_its_prefix(self, store: MetadataStore) -> None:
        put(store, "a0", "a/2", "a", "a/10", "a/", "a.", "b", "A/1")

        assert keys_under(store, "a/") == ["a/", "a/10", "a/2"]
        assert keys_under(store, "a") == ["a", "a.", "a/", "a/10", "a/2", "a0"]
        assert keys_under(store, "") == ["A/1", "a", "a.", "a/", "a/10", "a/2", "a0", "b"]
        assert keys_under(store, "c") == []

    def test_percent_underscore_and_the_like_mean_themselves(self, store: MetadataStore) -> None:
        put(store, "a%b", "a_b", "axb", "a*b", "a?b", "a[b", "a\\b", "a'b", 'a"b')

        for mark in "%_*?[\\'\"":
            assert keys_under(store, f"a{mark}") == [f"a{mark}b"]
        entry = store.get("a_b")
        assert entry is not None
        assert entry.key == "a_b"

    def test_keys_of_all_languages_sort_by_code_point(self, store: MetadataStore) -> None:
        last = "\U0010ffff"
        keys = ["z", "é", "ö/1", "\ud7ff", "\ue000", "\uffff", "\U00010000", last, last + last, "名/前"]
        put(store, *keys)

        assert keys_under(store, "") == sorted(keys)
        assert keys_under(store, "名") == ["名/前"]
        assert keys_under(store, "\ud7ff") == ["\ud7ff"]
        assert keys_under(store, last) == [last, last + last]
        assert store.get("e\u0301") is None

    def test_pages_put_together_are_the_whole(self, store: MetadataStore) -> None:
        keys = [f"p/{number:03}" for number in range(57)]
        put(store, *keys)
        put(store, "o", "p", "q")

        pages: list[str] = []
        after: str | None = None
        while page := store.range("p/", start_after=after, limit=10):
            assert len(page) == 10 or page[-1].key == keys[-1]
            pages += [entry.key for entry in page]
            after = page[-1].key

        assert pages == keys

    def test_a_page_may_start_behind_a_key_that_is_not_there(self, store: MetadataStore) -> None:
        put(store, "p/1", "p/3")

        assert [entry.key for entry in store.range("p/", start_after="p/2")] == ["p/3"]
        assert [entry.key for entry in store.range("p/", start_after="a")] == ["p/1", "p/3"]
        assert store.range("p/", start_after="q") == []
        for limit in (0, -1):
            with pytest.raises(Invalid, match="limit is"):
                store.range("p/", limit=limit)

    def test_a_whole_range_is_deleted_by_one_operation_in_one_revision(self, store: MetadataStore) -> None:
        for batch in range(3):
            start = put(store, *(f"a/{batch}/{number}" for number in range(100)))
        put(store, "a0", "a.")

        outcome = store.transaction([Exists("a0")], [DeleteRange("a/"), Put("b", b"")])

        assert outcome.revision == start + 2
        assert keys_under(store, "") == ["a.", "a0", "b"]
