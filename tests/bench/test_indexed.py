"""The stores that look-ups are compared on: all find the same, and one that does not is reported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from bench import indexed, payload
from bench.cases import engines, lookup
from bench.indexed import IndexedStore, Stream
from bench.plan import TOY
from forebay.testing.inside import inside

STREAM = Stream(600, keys=60, tags=6)
STORES: dict[str, Callable[[Path], IndexedStore]] = {
    **{engine: partial(indexed.Forebay, engine=engine) for engine in engines.ENGINES},
    **engines.PEERS,
}


def filled(store: IndexedStore) -> IndexedStore:
    store.append_many(STREAM.rows(0, 599))
    last = STREAM.rows(599, 600)
    store.append(599, last.keys[0], last.tags[0], last.times[0], last.values[0])
    return store


def test_neighbours_have_different_keys_and_each_key_as_many_records() -> None:
    keys = [STREAM.key(offset) for offset in range(STREAM.count)]

    assert len(set(keys)) == 60 and keys[:60] != sorted(keys[:60])
    assert [offset for offset, key in enumerate(keys) if key == keys[7]] == list(STREAM.with_key(7))
    assert STREAM.newest(7) == STREAM.newest(67) == max(STREAM.with_key(7)) == 547


@pytest.mark.parametrize("name", list(STORES))
def test_every_store_finds_what_was_written_and_not_what_was_deleted(name: str, tmp_path: Path) -> None:
    with closing(filled(STORES[name](tmp_path))) as store:
        assert list(store.values()) == STREAM.rows(0, 600).values
        assert store.at(599) == STREAM.value(599)
        assert store.newest(STREAM.key(7)) == (547, STREAM.value(547))
        assert store.newest(b"key") is None
        assert store.tagged("tag-1") == [STREAM.value(offset) for offset in range(1, 600, 6)]
        assert store.tagged("tag") == []
        assert store.at_time(STREAM.time(599)) == 590
        assert store.at_time(STREAM.time(599) + 1) is None

        assert store.delete(STREAM.key(7)) == 10
        assert store.delete(STREAM.key(7)) == 0
        assert store.newest(STREAM.key(7)) is None
        assert store.tagged("tag-1") == [STREAM.value(offset) for offset in range(1, 600, 6) if offset % 60 != 7]
        assert sum(1 for _ in store.values()) == 590


@pytest.mark.parametrize("ability", ["at", "newest", "tagged", "at_time", "delete"])
def test_an_answer_that_is_wrong_is_reported(ability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(filled(indexed.Sqlite(tmp_path))) as store:
        monkeypatch.setattr(store, ability, lambda asked: None)

        with pytest.raises(payload.Wrong):
            engines._looked_up("sqlite", store, STREAM, TOY.lookups)


def test_deletes_that_leave_the_records_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(filled(indexed.Sqlite(tmp_path))) as store:
        monkeypatch.setattr(store, "delete", lambda key: 10)

        with pytest.raises(payload.Wrong):
            engines._looked_up("sqlite", store, STREAM, TOY.lookups)


def test_bytes_are_counted_however_the_store_is_read(tmp_path: Path) -> None:
    with lookup._opened(tmp_path) as log:
        store = inside(log).places.store
        assert isinstance(store, lookup.CountedStore)
        store.upload("a/b", [b"x" * 100])
        before = lookup.CountedStore.read_bytes

        store.get_range("a/b", 10, 30)
        store.get_ranges("a/b", [(0, 5), (95, 200)])
        assert b"".join(store.read("a/b", 0, 50, chunk_bytes=20)) == b"x" * 50

        assert lookup.CountedStore.read_bytes - before == 20 + 10 + 50


def test_a_history_that_is_not_in_the_store_alone_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.shard.history.ShardHistory.retain", lambda history: 0)

    with pytest.raises(payload.Wrong, match="beside the log"):
        lookup._make(tmp_path, Stream(TOY.looked_up, keys=TOY.looked_up, tags=TOY.looked_up // 10))
