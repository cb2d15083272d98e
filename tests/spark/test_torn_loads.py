"""A look at a topic shows a bulk load in all its partitions or in none, whenever it is committed meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from forebay.catalog import ShardCatalog
from forebay.format.metadata.descriptor import LoadStatus
from forebay.loads.book import AttachedPart, LoadBook
from forebay.loads.prepare import Load
from forebay.metadata import MetadataStore
from forebay.metadata.open_store import open_metadata
from forebay.spark.place import opening
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.snapshot import ShardView
from forebay.spark.reading.view import Viewer, load, look_again
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.views.look import ViewedShard
from tests.spark.mixed import Mixed
from tests.support.environments import directories


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Mixed]:
    mixed = Mixed(directories.local(tmp_path))
    for partition in (0, 1):
        mixed.filled.many(10, partition)
    mixed.export()
    yield mixed
    mixed.close()


@pytest.fixture
def viewer(mixed: Mixed) -> Iterator[Viewer]:
    with contextlib.closing(Viewer(ReadOptions.parse(mixed.options).location)) as viewer:
        yield viewer


def _ends(mixed: Mixed, viewer: Viewer) -> list[int]:
    return [view.next for view in viewer.look(ReadOptions.parse(mixed.options).topics).shards]


def test_a_load_that_comes_between_two_partitions_is_seen_in_both(mixed: Mixed, viewer: Viewer) -> None:
    looked, views = ViewedShard.look, list[ShardView]()

    def look_and_load(viewed: ViewedShard) -> ShardView:
        views.append(looked(viewed))
        if len(views) in (1, 3):
            mixed.load(5)
        return views[-1]

    with mock.patch.object(ViewedShard, "look", look_and_load):
        assert _ends(mixed, viewer) == [15, 15], "not the one that came during the second try"
    assert _ends(mixed, viewer) == [20, 20]


def test_a_load_that_is_committed_between_two_partitions_is_seen_in_both(mixed: Mixed, viewer: Viewer) -> None:
    looked, views = ViewedShard.look, list[ShardView]()
    commit, may_commit = LoadBook.commit, threading.Event()

    def commit_later(book: LoadBook, load_id: str) -> Load:
        return commit(book, load_id) if may_commit.is_set() else book.get(load_id).load

    def look_and_commit(viewed: ViewedShard) -> ShardView:
        views.append(looked(viewed))
        if len(views) == 1:
            may_commit.set()
            mixed.log.loads.attach(load_id)
        return views[-1]

    load_id = f"load-{len(mixed.filled.rows)}"
    with mock.patch.object(LoadBook, "commit", commit_later):
        mixed.load(5)
        assert _ends(mixed, viewer) == [10, 10]
        with mock.patch.object(ViewedShard, "look", look_and_commit):
            assert _ends(mixed, viewer) == [15, 15]
    assert [view.next for view in views] == [10, 15, 15, 15]


class _Asked:
    """Counts what a look asks the metadata store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(opening, "open_metadata", lambda *args, **more: self._counted(open_metadata(*args, **more)))

    def since(self, act: Callable[[], object]) -> int:
        before = self.count
        act()
        return self.count - before

    def _counted(self, store: MetadataStore) -> MetadataStore:
        for name in ("get", "range"):
            setattr(store, name, self._counting(getattr(store, name)))
        return store

    def _counting(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **more: Any) -> Any:
            self.count += 1
            return ask(*args, **more)

        return asked


def test_a_look_asks_no_more_the_more_loads_a_history_has(mixed: Mixed, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Asked(monkeypatch)
    options = ReadOptions.parse(mixed.options)

    def again() -> None:
        spec = mixed.filled.topic.spec
        with contextlib.closing(opening.Opened(options.location)) as opened:
            assert look_again(opened, spec.topic_id, mixed.topic, 0, 0, 5)

    counts = []
    for loads in (2, 10):
        for number in range(loads):
            mixed.load(1, partitions=[[0], [1], [0, 1]][number % 3])
        counts.append((asked.since(lambda: load(options)), asked.since(again)))

    assert counts[0] == counts[1]
    assert counts[0][0] < 20
    ends = [mixed.filled.topic.offsets(partition).next for partition in (0, 1)]
    assert [view.next for view in load(options)[0].shards] == ends


def test_a_first_look_at_loads_that_are_over_is_made_once(mixed: Mixed, viewer: Viewer) -> None:
    looked, views = ViewedShard.look, list[ShardView]()

    def look(viewed: ViewedShard) -> ShardView:
        views.append(looked(viewed))
        return views[-1]

    mixed.load(5)
    mixed.load(5, partitions=[1])
    with mock.patch.object(ViewedShard, "look", look):
        assert _ends(mixed, viewer) == [15, 20]

    assert len(views) == 2


@contextlib.contextmanager
def _offered(mixed: Mixed) -> Iterator[str]:
    """A load that is attached everywhere and not committed while this lasts, unless by `_commit`."""
    load_id = f"load-{len(mixed.filled.rows)}"
    with mock.patch.object(LoadBook, "commit", lambda book, load_id: book.get(load_id).load):
        mixed.load(5)
        yield load_id


_commit = LoadBook.commit


def _end(mixed: Mixed, load_id: str, *, is_kept: bool) -> None:
    if is_kept:
        _commit(LoadBook(inside(mixed.log).metadata, "/forebay", ManualClock()), load_id)
    else:
        mixed.log.loads.abandon(load_id)


@pytest.mark.parametrize("is_kept", [True, False], ids=["committed", "given up"])
def test_a_load_that_ends_between_the_history_and_the_list_of_offers(
    mixed: Mixed, viewer: Viewer, *, is_kept: bool
) -> None:
    """A load that is on no list any more is not committed for that: it may have become a gap."""
    really, left, here = LoadBook.pending, [1], threading.get_ident()

    def end_and_list(book: LoadBook) -> dict[str, dict[int, AttachedPart]]:
        if threading.get_ident() == here and left and left.pop():
            _commit(
                LoadBook(inside(mixed.log).metadata, "/forebay", ManualClock()), load_id
            ) if is_kept else mixed.log.loads.abandon(load_id)
        return really(book)

    with _offered(mixed) as load_id, mock.patch.object(LoadBook, "pending", end_and_list):
        shards = viewer.look(ReadOptions.parse(mixed.options).topics).shards

    assert [view.next for view in shards] == [15, 15]
    assert all((view.pieces[-1].gap is None) is is_kept for view in shards)


@pytest.mark.parametrize("is_kept", [True, False], ids=["committed", "given up"])
def test_a_load_that_ends_between_the_list_of_offers_and_its_own_key(
    mixed: Mixed, viewer: Viewer, *, is_kept: bool
) -> None:
    really, left, here = ShardCatalog.load_status, [1], threading.get_ident()

    def end_and_ask(catalog: ShardCatalog, asked: str) -> LoadStatus:
        if threading.get_ident() == here and left and left.pop():
            _commit(
                LoadBook(inside(mixed.log).metadata, "/forebay", ManualClock()), load_id
            ) if is_kept else mixed.log.loads.abandon(load_id)
        return really(catalog, asked)

    with _offered(mixed) as load_id, mock.patch.object(ShardCatalog, "load_status", end_and_ask):
        shards = viewer.look(ReadOptions.parse(mixed.options).topics).shards

    assert [view.next for view in shards] == [15, 15]
    assert all((view.pieces[-1].gap is None) is is_kept for view in shards)


def test_a_load_that_is_given_up_while_its_gaps_are_made_is_never_shown(mixed: Mixed, viewer: Viewer) -> None:
    """At each step of giving up, every partition ends before the load or has a gap in its place."""
    seen: list[bool] = []

    def look() -> None:
        shards = viewer.look(ReadOptions.parse(mixed.options).topics).shards
        seen.extend(view.next == 10 or view.pieces[-1].gap is not None for view in shards)

    take_out, end = ShardCatalog.take_out, LoadBook.end

    def take_out_and_look(*args: Any, **more: Any) -> None:
        look()
        take_out(*args, **more)
        look()

    def end_and_look(book: LoadBook, load_id: str) -> None:
        end(book, load_id)
        look()

    with _offered(mixed) as load_id, mock.patch.multiple(ShardCatalog, take_out=take_out_and_look):
        look()
        with mock.patch.object(LoadBook, "end", end_and_look):
            mixed.log.loads.abandon(load_id)

    assert len(seen) == 12
    assert all(seen)
