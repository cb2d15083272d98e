"""I23: a delete is bounded by the head at its call, whatever is appended while it runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import forebay.engines.rocksdb.removal
from tests.engines.inside_deletes import (
    DELETES,
    FOUND,
    between_pieces,
    bounded_by_the_head,
    memory,
    rocks,
    segments,
    under_the_look,
    while_waiting,
    write,
)


@pytest.mark.parametrize("by", FOUND)
def test_a_look_that_is_repeated_reaches_no_record_that_came_meanwhile(by: str) -> None:
    engine, ref, disk = segments()
    under_the_look(disk, partial(write, engine, ref))

    assert list(bounded_by_the_head(engine, ref, DELETES[by])) == []


@pytest.mark.parametrize("by", DELETES)
@pytest.mark.parametrize("kind", ["segment", "rocksdb", "memory"])
def test_a_delete_that_waits_for_another_reaches_no_record_that_came_meanwhile(
    kind: str, by: str, tmp_path: Path
) -> None:
    engine, ref = {"segment": lambda: segments()[:2], "rocksdb": lambda: rocks(str(tmp_path)), "memory": memory}[kind]()
    while_waiting(engine.open_shard(ref), partial(write, engine, ref))

    assert list(bounded_by_the_head(engine, ref, DELETES[by])) == []
    engine.close()


@pytest.mark.parametrize("by", DELETES)
def test_rocksdb_delete_in_pieces_reaches_no_record_that_came_between_them(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forebay.engines.rocksdb.removal, "PIECE_RECORDS", 2)
    engine, ref = rocks(str(tmp_path / "rocksdb"))
    between_pieces(engine.open_shard(ref), partial(write, engine, ref))

    assert list(bounded_by_the_head(engine, ref, DELETES[by])) == []
    engine.close()
