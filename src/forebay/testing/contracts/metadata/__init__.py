"""What every `MetadataStore` must do. Knows the Protocol alone.

Inherit `MetadataContract` and give it two fixtures: `store`, an open and empty one, and `restart`, which
closes a store and opens what it kept. Watches are given time, so that a store behind a network passes too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from forebay.errors import Closed
from forebay.metadata import MetadataStore, Put
from forebay.testing.contracts.metadata.calls import TTL_S, drain, put
from forebay.testing.contracts.metadata.ranges import RangeContract
from forebay.testing.contracts.metadata.sessions import SessionContract
from forebay.testing.contracts.metadata.transactions import TransactionContract
from forebay.testing.contracts.metadata.watches import WatchContract


class MetadataContract(TransactionContract, RangeContract, WatchContract, SessionContract):
    """The whole suite. A test's name is its claim."""

    def test_a_closed_store_refuses_everything(self, store: MetadataStore) -> None:
        session = store.session(TTL_S)
        watch = store.watch("")
        store.close()
        store.close()

        for call in (
            lambda: store.get("a"),
            lambda: store.range(""),
            lambda: store.transaction([], []),
            lambda: store.watch(""),
            lambda: store.session(TTL_S),
            lambda: store.session_alive("x"),
            store.revision,
            lambda: watch.poll(0.0),
        ):
            with pytest.raises(Closed):
                call()
        assert not session.alive()
        session.close()
        watch.close()

    def test_an_abandoned_store_is_closed_and_its_sessions_with_it(self, store: MetadataStore) -> None:
        session = store.session(TTL_S)

        store.abandon()

        assert not session.alive()
        session.close()
        with pytest.raises(Closed):
            store.get("a")
        store.close()

    def test_closing_wakes_who_waits(self, store: MetadataStore) -> None:
        endings: list[BaseException] = []
        started = threading.Event()

        def wait() -> None:
            with store.watch("w/") as watch:
                started.set()
                try:
                    watch.poll(30.0)
                except Closed as error:
                    endings.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        started.wait(10.0)
        store.close()
        waiting.join(15.0)

        assert len(endings) == 1

    def test_a_restart_keeps_everything_but_sessions(
        self, store: MetadataStore, restart: Callable[[MetadataStore], MetadataStore]
    ) -> None:
        put(store, "a", value=b"1")
        put(store, "a", value=b"2")
        before = store.get("a")
        session = store.session(TTL_S)
        store.transaction([], [Put("leased", b"", session=session.id)])
        revision = store.revision()

        again = restart(store)

        assert again.get("a") == before
        assert again.get("leased") is None
        assert not again.session_alive(session.id)
        assert again.revision() >= revision
        assert put(again, "b") > revision

    def test_a_watch_goes_on_across_a_restart(
        self, store: MetadataStore, restart: Callable[[MetadataStore], MetadataStore]
    ) -> None:
        put(store, "w/0")
        with store.watch("w/") as watch:
            put(store, "w/1")
            drain(watch, 1)
            resume = watch.revision + 1
        put(store, "w/2")

        again = restart(store)
        put(again, "w/3")

        with again.watch("w/", from_revision=resume) as watch:
            assert [change.key for change in drain(watch, 2)] == ["w/2", "w/3"]
