"""Watches: every change once and in order, from any revision still kept."""

from __future__ import annotations

import threading

import pytest

from forebay.errors import Closed
from forebay.metadata import (
    HISTORY_CHANGES_MAX,
    OPERATIONS_MAX,
    Change,
    Compacted,
    Delete,
    DeleteRange,
    MetadataStore,
    Put,
)
from forebay.testing.contracts.metadata.calls import drain, put, run_all


class WatchContract:
    """Changes, each once, in order."""

    def test_a_watch_gives_changes_in_order(self, store: MetadataStore) -> None:
        put(store, "w/0")
        with store.watch("w/") as watch:
            first = put(store, "w/2", "w/1", value=b"1")
            put(store, "x", "w")
            second = store.transaction([], [Delete("w/2"), Put("w/3", b"3")]).revision

            changes = drain(watch, 4)

            assert [(change.revision, change.key) for change in changes] == [
                (first, "w/2"),
                (first, "w/1"),
                (second, "w/2"),
                (second, "w/3"),
            ]
            entry = changes[0].entry
            assert entry is not None
            assert (entry.value, entry.create_revision, entry.mod_revision) == (b"1", first, first)
            assert changes[2].entry is None
            assert watch.revision >= second

    def test_a_deleted_range_shows_every_key(self, store: MetadataStore) -> None:
        put(store, "w/1", "w/2", "x")
        with store.watch("") as watch:
            revision = store.transaction([], [DeleteRange("w/")]).revision

            changes = drain(watch, 2)

        assert [(change.revision, change.key, change.entry) for change in changes] == [
            (revision, "w/1", None),
            (revision, "w/2", None),
        ]

    def test_a_quiet_watch_returns_empty_handed(self, store: MetadataStore) -> None:
        put(store, "w/0")
        with store.watch("w/") as watch:
            put(store, "x")

            assert watch.poll(0.0) == []
            assert watch.poll(0.05) == []

    def test_a_watch_goes_on_from_a_revision_without_missing_or_repeating(self, store: MetadataStore) -> None:
        first = put(store, "w/0")
        seen: list[int] = []
        resume = first
        for step in range(4):
            with store.watch("w/", from_revision=resume) as watch:
                seen += [change.revision for change in drain(watch, 1 + (step > 0))]
                resume = watch.revision + 1
            put(store, f"w/{step}")
            put(store, f"w/{step}")

        with store.watch("w/", from_revision=resume) as watch:
            seen += [change.revision for change in drain(watch, 2)]
            assert watch.poll(0.0) == []
        assert seen == list(range(first, first + 9))

    def test_a_waiting_watch_is_woken(self, store: MetadataStore) -> None:
        found: list[Change] = []
        with store.watch("w/") as watch:
            waiting = threading.Thread(target=lambda: found.extend(watch.poll(20.0)))
            waiting.start()
            put(store, "x")
            put(store, "w/1")
            waiting.join(15.0)

            assert not waiting.is_alive()
        assert [change.key for change in found] == ["w/1"]

    def test_every_change_of_concurrent_writers_is_seen_once(self, store: MetadataStore) -> None:
        def write(name: str) -> None:
            for number in range(25):
                put(store, f"w/{name}", value=b"%d" % number)

        with store.watch("w/") as watch:
            threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
            for thread in threads:
                thread.start()
            changes = drain(watch, 75)
            run_all(threads, started=True)

            assert watch.poll(0.0) == []
        assert [change.revision for change in changes] == sorted({change.revision for change in changes})
        for name in "abc":
            values = [change.entry.value for change in changes if change.key == f"w/{name}" and change.entry]
            assert values == [b"%d" % number for number in range(25)]

    def test_a_watch_that_comes_too_late_has_to_list_again(self, store: MetadataStore) -> None:
        old = put(store, "w/0")
        with store.watch("w/", from_revision=old) as watch, store.watch("w/") as idle:
            self.compact(store)

            for late in (watch, idle):
                with pytest.raises(Compacted, match="list again"):
                    late.poll(0.0)

        revision = store.revision()
        with store.watch("", from_revision=revision + 1) as watch:
            new = put(store, "w/1")
            assert [change.revision for change in drain(watch, 1)] == [new]

    def compact(self, store: MetadataStore) -> None:
        """Let the store forget its oldest changes; a store that forgets on demand overrides this."""
        for batch in range(HISTORY_CHANGES_MAX // OPERATIONS_MAX + 1):
            put(store, *(f"churn/{number}" for number in range(OPERATIONS_MAX)), value=b"%d" % batch)

    def test_a_closed_watch_says_so(self, store: MetadataStore) -> None:
        watch = store.watch("w/")
        watch.close()
        watch.close()

        with pytest.raises(Closed):
            watch.poll(0.0)
