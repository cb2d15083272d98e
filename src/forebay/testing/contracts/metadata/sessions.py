"""Sessions: lives that others can watch end."""

from __future__ import annotations

import pytest

from forebay.errors import Closed, Invalid
from forebay.metadata import Exists, MetadataStore, Put, SessionEnded
from forebay.testing.contracts.metadata.calls import TTL_S, drain, keys_under, put


class SessionContract:
    """Lives that others can watch end."""

    def test_keys_of_a_session_vanish_when_it_ends(self, store: MetadataStore) -> None:
        session = store.session(TTL_S)
        other = store.session(TTL_S)
        put(store, "s/plain")
        store.transaction(
            [], [Put("s/1", b"1", session=session.id), Put("s/2", b"2", session=session.id), Put("s/3", b"", other.id)]
        )
        entry = store.get("s/1")
        assert entry is not None
        assert entry.session == session.id
        with store.watch("s/") as watch:
            start = store.revision()

            session.close()

            assert keys_under(store, "s/") == ["s/3", "s/plain"]
            assert store.get("s/1") is None
            assert [(change.revision, change.key, change.entry) for change in drain(watch, 2)] == [
                (start + 1, "s/1", None),
                (start + 1, "s/2", None),
            ]

    def test_a_session_is_alive_until_it_is_closed(self, store: MetadataStore) -> None:
        session = store.session(TTL_S)
        assert session.alive()
        assert store.session_alive(session.id)
        assert not store.session_alive("unknown")

        session.close()
        session.close()

        assert not session.alive()
        assert not store.session_alive(session.id)

    def test_a_session_that_has_ended_is_ended_again_without_harm(self, store: MetadataStore) -> None:
        session = store.session(10)
        session.close()

        store.end_session(session.id)
        store.end_session("no such session")

        assert not store.session_alive(session.id)

    def test_the_end_of_a_session_can_be_compared(self, store: MetadataStore) -> None:
        session = store.session(TTL_S)

        assert not store.transaction([SessionEnded(session.id)], [Put("owner", b"me")]).succeeded
        session.close()

        assert store.transaction([SessionEnded(session.id)], [Put("owner", b"me")]).succeeded

    def test_sessions_have_names_of_their_own(self, store: MetadataStore) -> None:
        names = set()
        for _ in range(5):
            session = store.session(TTL_S)
            names.add(session.id)
            session.close()

        assert len(names) == 5

    def test_an_ended_session_owns_nothing_more(self, store: MetadataStore) -> None:
        session = store.session(TTL_S)
        session.close()

        with pytest.raises(Closed, match=session.id):
            store.transaction([], [Put("a", b""), Put("b", b"", session=session.id)])

        assert store.range("") == []
        assert not store.transaction([Exists("no")], [Put("b", b"", session=session.id)]).succeeded

    def test_the_last_put_decides_whose_key_it_is(self, store: MetadataStore) -> None:
        first, second = store.session(TTL_S), store.session(TTL_S)
        store.transaction([], [Put(key, b"", session=first.id) for key in ("kept", "passed on", "gone")])
        put(store, "kept")
        store.transaction([], [Put("passed on", b"", session=second.id)])

        first.close()
        assert keys_under(store, "") == ["kept", "passed on"]

        second.close()
        assert keys_under(store, "") == ["kept"]

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, 1e9, float("nan")])
    def test_a_session_has_a_time_to_live(self, store: MetadataStore, ttl_s: float) -> None:
        with pytest.raises(Invalid, match="ttl_s is"):
            store.session(ttl_s)
