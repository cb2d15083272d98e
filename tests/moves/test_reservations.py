"""Offsets are reserved in the metadata store ahead of need; a shard that runs out without it fails alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from forebay import Unavailable
from forebay.storage import Topic
from forebay.testing.inside import inside
from tests.support.environments import directories
from tests.support.environments.directories import RESERVED, metadata_of, shard_of
from tests.support.waiting import until


def _reserved(topic: Topic) -> int:
    return shard_of(topic).wal.writer.reserved_end


def test_an_append_finds_its_offsets_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with directories.shared_fs(tmp_path).open("one") as log:
        topic = log.create_topic("t", durability="fsync")
        topic.append(b"first")
        metadata, asked = metadata_of(log), []
        transaction = metadata.transaction

        def counted(*args: Any, **options: Any) -> Any:
            asked.append(threading.current_thread())
            return transaction(*args, **options)

        monkeypatch.setattr(metadata, "transaction", counted)
        before = _reserved(topic)
        while topic.offsets().next <= before - RESERVED // 2:
            topic.append(b"v")
        until(lambda: _reserved(topic) > before)
        for _ in range(RESERVED):
            topic.append(b"v")

        assert asked
        assert threading.current_thread() not in asked


def test_without_the_metadata_store_a_shard_that_runs_out_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with directories.shared_fs(tmp_path).open("one") as log:
        one, other = (log.create_topic(name, durability="fsync") for name in ("one", "other"))
        one.append(b"0")
        other.append(b"0")

        def away(*args: Any, **options: Any) -> Any:
            raise Unavailable("the metadata store is away")

        with monkeypatch.context() as patch:
            patch.setattr(metadata_of(log), "transaction", away)
            room = _reserved(one) - 1
            for number in range(room):
                assert one.append(b"v") == number + 1
            with pytest.raises(Unavailable, match="the metadata store is away"):
                one.append(b"too many")
            with pytest.raises(Unavailable, match="the metadata store is away"):
                one.append_nowait(b"too many").result(60)
            assert [other.append(b"v") for _ in range(RESERVED // 2)] == list(range(1, RESERVED // 2 + 1))
            assert inside(one).wal().failure is None

        assert one.append(b"v") == room + 1
        assert one.failure() is None
