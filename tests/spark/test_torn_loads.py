"""A look at a topic shows a bulk load in all its partitions or in none, whenever it is committed meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from forebay.prepared import Load
from forebay.shard.loading import LoadBook
from forebay.spark import snapshot
from forebay.spark.options import ReadOptions
from forebay.spark.snapshot import ShardView, Viewer
from tests.moves import rig
from tests.spark.mixed import Mixed


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Mixed]:
    mixed = Mixed(rig.local(tmp_path))
    for partition in (0, 1):
        mixed.filled.many(10, partition)
    mixed.export()
    yield mixed
    mixed.close()


def _ends(mixed: Mixed, viewer: Viewer) -> list[int]:
    return [view.next for view in viewer.look(ReadOptions.parse(mixed.options).topics).shards]


def test_a_load_that_comes_between_two_partitions_is_seen_in_both(mixed: Mixed) -> None:
    looked, views = snapshot._Viewed.look, list[ShardView]()

    def look_and_load(viewed: snapshot._Viewed) -> ShardView:
        views.append(looked(viewed))
        if len(views) in (1, 3):
            mixed.load(5)
        return views[-1]

    viewer = Viewer(ReadOptions.parse(mixed.options).location)
    with mock.patch.object(snapshot._Viewed, "look", look_and_load):
        assert _ends(mixed, viewer) == [15, 15], "not the one that came during the second try"
    assert _ends(mixed, viewer) == [20, 20]
    viewer.close()


def test_a_load_that_is_committed_between_two_partitions_is_seen_in_both(mixed: Mixed) -> None:
    looked, views = snapshot._Viewed.look, list[ShardView]()
    commit, may_commit = LoadBook.commit, threading.Event()

    def commit_later(book: LoadBook, load_id: str) -> Load:
        return commit(book, load_id) if may_commit.is_set() else book.get(load_id).load

    def look_and_commit(viewed: snapshot._Viewed) -> ShardView:
        views.append(looked(viewed))
        if len(views) == 1:
            may_commit.set()
            mixed.log.loads.attach(load_id)
        return views[-1]

    viewer = Viewer(ReadOptions.parse(mixed.options).location)
    load_id = f"load-{len(mixed.filled.rows)}"
    with mock.patch.object(LoadBook, "commit", commit_later):
        mixed.load(5)
        assert _ends(mixed, viewer) == [10, 10]
        with mock.patch.object(snapshot._Viewed, "look", look_and_commit):
            assert _ends(mixed, viewer) == [15, 15]
    assert [view.next for view in views] == [10, 15, 15, 15]
    viewer.close()
