"""Callbacks of appends may use the log as anybody does; a signal handler in the middle of an append is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import Ack, ForebayError, Indeterminate, Storage, Topic, Unavailable
from forebay.engines.background import Background
from forebay.shard import SegmentShard
from forebay.wal.hearing import is_inside
from tests.storage.rig import PATIENCE, QUICK, WatchedDisk, quick, until, values, wal_of

CLASSES = ("memory", "disk", "fsync")


def _heard(topic: Topic, work: Callable[[Ack], object], count: int = 1) -> list[object]:
    """What the callbacks of some appends, all queued before the first is written, returned or raised."""
    heard: list[object] = []

    def hear(ack: Ack) -> None:
        try:
            heard.append(work(ack))
        except ForebayError as error:
            heard.append(error)

    with wal_of(topic).committing:
        for ack in [topic.append_nowait(b"first") for _ in range(count)]:
            ack.add_callback(hear)
    until(lambda: len(heard) == count)
    return heard


@pytest.mark.parametrize("durability", CLASSES)
def test_a_callback_may_append_and_wait_for_it(tmp_path: Path, durability: str) -> None:
    """It ran under the log's lock: the shard was stuck for good."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", durability=durability)
        assert _heard(topic, lambda _: topic.append(b"inside")) == [1]
        assert topic.append(b"after") == 2


def test_a_thousand_callbacks_that_append_do_not_nest(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic, other = log.create_topic("t"), log.create_topic("other")
        second: list[int] = []

        def work(_: Ack) -> int:
            other.append_nowait(b"x").add_callback(lambda ack: second.append(ack.result()))
            other.append(b"y")
            return topic.append(b"inside")

        assert sorted(map(str, _heard(topic, work, 1000))) == sorted(map(str, range(1000, 2000)))
        until(lambda: len(second) == 1000)


@pytest.mark.parametrize("durability", CLASSES)
def test_a_callback_may_close_the_log_beside_another_closing(tmp_path: Path, durability: str) -> None:
    log = forebay.open(tmp_path / "log", QUICK)
    topic = log.create_topic("t", durability=durability)

    assert _heard(topic, lambda _: log.close(), 3) == [None] * 3
    log.close()

    with forebay.open(tmp_path / "log", QUICK) as log:
        assert values(log.topic("t").read()) == [b"first"] * 3


def test_a_callback_that_closes_while_the_closing_thread_waits_for_it_returns_at_once(tmp_path: Path) -> None:
    log = forebay.open(tmp_path / "log", QUICK)
    topic = log.create_topic("t")
    begun, returned = threading.Event(), threading.Event()

    def work(_: Ack) -> None:
        begun.set()
        until(lambda: log._ended)
        log.close()
        returned.set()

    topic.append_nowait(b"v").add_callback(work)
    assert begun.wait(PATIENCE)
    log.close()

    assert returned.wait(PATIENCE)


def test_a_callback_may_delete_its_topic(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", durability="memory")
        assert _heard(topic, lambda _: log.delete_topic("t")) == [None]
        assert log.topics() == []


def test_a_callback_cannot_wait_for_another_ack(tmp_path: Path) -> None:
    """The thread that ran it was the one that was to write."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic, other = log.create_topic("t"), log.create_topic("other")
        acks: list[Ack] = []

        def work(_: Ack) -> int:
            acks.append(other.append_nowait(b"v"))
            with wal_of(other).committing:
                return acks[0].result()

        [told] = _heard(topic, work)
        assert isinstance(told, Indeterminate)
        assert "add a callback" in str(told)
        assert acks[0].result(PATIENCE) == 0


def test_the_callback_of_a_refused_append_may_use_the_log(tmp_path: Path) -> None:
    disk = WatchedDisk()
    with Storage.open(str(tmp_path / "log"), quick(free_bytes_min=1), disk=disk) as log:
        topic = log.create_topic("t")
        disk.free = 0

        def work(ack: Ack) -> int:
            disk.free = None
            with pytest.raises(Unavailable):
                ack.result()
            return topic.append(b"instead")

        assert _heard(topic, work) == [0]


@pytest.mark.parametrize("lock", ["committing", "queue"])
def test_a_signal_that_comes_inside_an_append_is_refused_the_log(tmp_path: Path, lock: str) -> None:
    """A handler runs in the thread that it interrupts: here its work is done while that thread holds a lock."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        topic.append(b"before")
        wal = wal_of(topic)
        works: list[Callable[[], object]] = [log.close, topic.flush, topic.rotate]
        with wal.committing if lock == "committing" else wal.staging.lock:
            for work in works if lock == "committing" else [log.close, lambda: topic.append(b"not in")]:
                with pytest.raises(Unavailable, match="inside an append of the same log"):
                    work()
            if lock == "committing":
                with pytest.raises(Indeterminate, match="queued behind"):
                    topic.append(b"queued")

        assert topic.append(b"after") == (2 if lock == "committing" else 1)
        assert b"not in" not in values(topic.read())


def test_callbacks_left_by_an_interrupted_thread_are_called_by_the_upkeep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        topic.append(b"before")
        wal, heard = wal_of(topic), []
        with wal.committing:
            topic.append_nowait(b"v").add_callback(lambda ack: heard.append(ack.result()))
            wal._commit()

        until(lambda: heard)
        assert heard == [1]
        assert not wal.staging.due


@pytest.mark.parametrize("ending", ["delete", "seal"])
def test_a_callback_may_use_a_topic_for_the_first_time_while_its_own_is_given_up(tmp_path: Path, ending: str) -> None:
    """Found by review: it ran under the engine's lock, which opening a shard takes."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic, other = log.create_topic("t"), log.create_topic("other")
        heard: list[int] = []
        shard = topic._shard(0)
        # As if the thread that commits had not come to it yet.
        topic._commit_soon = lambda _: None
        topic.append_nowait(b"first").add_callback(lambda _: heard.append(other.append(b"inside")))
        assert not wal_of(topic).staging.is_empty

        if ending == "delete":
            log.delete_topic("t")
        else:
            assert log._parts.owned is not None
            log._parts.owned.retire(shard.ref)

        until(lambda: heard == [0])


def test_upkeep_calls_back_when_its_round_is_over(tmp_path: Path) -> None:
    """Found by review: a callback that opened a topic and a deletion that awaited the round waited for each other."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        maintenance = log._parts.maintenance
        assert maintenance is not None
        maintenance._thread = Background("idle", lambda: None)  # the test is the thread
        heard: list[bool] = []
        topic._commit_soon = lambda _: None
        shard = topic._shard(0)
        assert isinstance(shard, SegmentShard)
        is_stepping = is_inside(maintenance._stepping)
        topic.append_nowait(b"first").add_callback(lambda _: heard.append(is_stepping()))

        maintenance._busy[shard.ref.id] = shard
        shard.wal.queued_since = float("-inf")
        maintenance.step()

        until(lambda: heard)
        assert heard == [False]
