"""What the tests of the metadata contract do again and again."""

from __future__ import annotations

import threading

from forebay.metadata import Change, MetadataStore, Put, Watch

TTL_S = 30.0


def put(store: MetadataStore, *keys: str, value: bytes = b"v") -> int:
    """Put these keys in one transaction and give its revision."""
    return store.transaction([], [Put(key, value) for key in keys]).revision


def keys_under(store: MetadataStore, prefix: str) -> list[str]:
    """The keys of a range."""
    return [entry.key for entry in store.range(prefix)]


def drain(watch: Watch, count: int) -> list[Change]:
    """The next `count` changes, and no fewer."""
    found: list[Change] = []
    patience = 20
    while len(found) < count and patience > 0:
        changes = watch.poll(1.0)
        found += changes
        patience -= not changes
    assert len(found) == count, found
    return found


def run_all(threads: list[threading.Thread], *, started: bool = False) -> None:
    """Run these threads to their end."""
    if not started:
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
