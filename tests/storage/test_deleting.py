"""Deleting a topic with many objects holds up no other topic."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import Storage
from forebay.blobs import DirectoryStore
from forebay.testing.inside import inside
from tests.storage.rig import QUICK

SECONDS_MAX = 30
"""So long a call may take that ought to wait for nothing: only a hang is longer."""


def _open(path: Path) -> Storage:
    return forebay.open(
        path / "data",
        {**QUICK, "storage": {"mode": "shared_fs"}, "store": {"root": str(path / "store")}},
    )


def _exported(log: Storage, name: str) -> forebay.Topic:
    topic = log.create_topic(name)
    for _ in range(3):
        topic.append(b"v")
        log.export_topic(name)
    return topic


def _in_time(call: Callable[[], object]) -> None:
    """Do something that another thread must not hold up."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive(), "it waits for the deletion of another topic"
    for error in failed:
        raise error


def test_topics_are_created_and_deleted_while_the_objects_of_another_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    delete = DirectoryStore.delete
    with _open(tmp_path) as log:
        large = _exported(log, "shop/large")
        _exported(log, "shop/small")

        def held(store: DirectoryStore, key: str) -> None:
            if key.startswith(large.spec.topic_id):
                reached.set()
                assert go_on.wait(SECONDS_MAX * 3)
            delete(store, key)

        monkeypatch.setattr(DirectoryStore, "delete", held)
        deleting = threading.Thread(target=log.delete_topic, args=("shop/large",))
        deleting.start()
        try:
            assert reached.wait(SECONDS_MAX)
            _in_time(lambda: log.create_topic("shop/new").append(b"v"))
            _in_time(lambda: log.delete_topic("shop/small"))
            _in_time(lambda: log.create_topic("shop/small").append(b"v"))
            _in_time(inside(log).deletions.finish)
            assert [str(spec.name) for spec in log.topics()] == ["shop/new", "shop/small"]
        finally:
            go_on.set()
            deleting.join()

        assert inside(log).deletions.notes.deleting() == []
        assert not [
            path for path in (tmp_path / "store").rglob("*") if large.spec.topic_id in str(path) and path.is_file()
        ]
