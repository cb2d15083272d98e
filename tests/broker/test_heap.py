"""What a broker keeps for long is walked by the garbage collector once, and deleted topics leave nothing."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay.broker import heap as heaps
from forebay.broker import serve
from forebay.broker.heap import SettledHeap
from tests.support.brokers import running_broker, server_settings

OBJECTS = 20_000


class Linked:
    """Something that may be part of a circle."""

    def __init__(self) -> None:
        self.to: object = None


def circle() -> Linked:
    one, other = Linked(), Linked()
    one.to, other.to = other, one
    return one


def walked() -> int:
    """How many objects a full collection would look at now."""
    return len(gc.get_objects())


@pytest.fixture
def heap() -> Iterator[SettledHeap]:
    heap, hooks = SettledHeap(), len(gc.callbacks)
    yield heap
    heap.end()
    assert (gc.get_freeze_count(), len(gc.callbacks)) == (0, hooks)


def test_what_outlives_a_full_collection_is_not_walked_again(heap: SettledHeap) -> None:
    kept = [[number] for number in range(OBJECTS)]
    heap.freeze()
    assert walked() < OBJECTS
    kept += [[number] for number in range(OBJECTS)]
    assert walked() >= OBJECTS
    gc.collect()
    assert walked() < OBJECTS
    assert len(kept) == 2 * OBJECTS

    heap.freeze()
    heap.end()
    heap.end()
    assert walked() >= 2 * OBJECTS


class NotingHeap(SettledHeap):
    """Notes whether a collection before all topics are open sets anything apart."""

    def __init__(self) -> None:
        super().__init__()
        self.apart: list[int] = []

    def freeze(self) -> None:
        gc.collect()
        self.apart.append(gc.get_freeze_count())
        super().freeze()


def test_a_collection_before_all_topics_are_open_sets_apart_what_there_is(tmp_path: Path) -> None:
    """Else each of them walks all topics that are open by then: seconds, for ten thousand of them."""
    heap = NotingHeap()
    try:
        with running_broker(tmp_path / "data", heap=heap):
            assert [count > 0 for count in heap.apart] == [True]
    finally:
        heap.end()


def test_circles_of_deleted_topics_go_after_some(heap: SettledHeap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heaps, "DELETED_MAX", 3)
    kept = circle()
    heap.freeze()
    gone = weakref.ref(kept)
    del kept
    heap.note_deleted()
    heap.note_deleted()
    gc.collect()
    assert gone() is not None
    heap.note_deleted()
    gc.collect()

    assert gone() is None
    assert gc.get_freeze_count() > 0


@pytest.mark.slow
def test_a_broker_sets_its_topics_apart_at_its_start_and_as_they_are_added(
    tmp_path: Path, heap: SettledHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heaps, "DELETED_MAX", 2)
    with forebay.open(tmp_path / "data") as log:
        for number in range(5):
            log.create_topic(f"t{number}").append(b"x")
    with running_broker(tmp_path / "data", heap=heap) as broker, broker.client() as client:
        at_start = gc.get_freeze_count()
        assert at_start > 0
        for number in range(20):
            assert client.put(f"/v1/topics/default/more{number}").status_code == 201
            assert client.post(f"/v1/topics/default/more{number}/records", json=[{"value": "x"}]).status_code == 200
        gc.collect()
        assert gc.get_freeze_count() > at_start
        thawed: list[int] = []
        thaw = gc.unfreeze

        def noted() -> None:
            thawed.append(gc.get_freeze_count())
            thaw()

        monkeypatch.setattr(gc, "unfreeze", noted)
        for number in range(2):
            assert thawed == []
            assert client.delete(f"/v1/topics/default/more{number}").status_code == 204
        assert len(thawed) == 1


def test_the_process_of_a_broker_has_a_settled_heap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    class Run:
        def __init__(self, path: object, settings: object, heap: object) -> None:
            given.append(heap)

        async def run(self, bound: object, on_bound: Callable[[str], None]) -> None:
            on_bound("")

        def stop(self) -> None:
            pass

    monkeypatch.setattr(serve, "BrokerRun", Run)
    monkeypatch.setattr(serve, "allow_descriptors", lambda settings: None)
    switch_interval = sys.getswitchinterval()
    try:
        serve.serve(tmp_path / "data", server_settings(), on_bound=lambda url: None)
    finally:
        sys.setswitchinterval(switch_interval)
    assert [type(one) for one in given] == [SettledHeap]
