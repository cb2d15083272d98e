"""Background syncs where logs are in use all the time, or hang: no log waits for another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from forebay import Settings, Storage, Topic
from forebay.shard import SegmentShard
from forebay.storage.background import sync
from forebay.testing.inside import inside
from forebay.wal.sync_request import SyncRequest
from forebay.wal.upkeep import Upkeep
from forebay.workers import STUCK_MAX
from tests.storage.rig import WatchedDisk
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

IN_USE = 100


def _settings(*, syncfs_min: int, sync_interval_ms: int = 20) -> Settings:
    return Settings.load(
        overrides={
            "wal": {"sync_interval_ms": sync_interval_ms, "mark_interval_ms": 600_000, "free_bytes_min": 0},
            "runtime": {"shards_syncfs_min": syncfs_min, "maintenance_interval_ms": 5},
        }
    )


@contextmanager
def in_use(topics: list[Topic]) -> Iterator[None]:
    """Another thread has the logs of these topics, and does not look for what others leave to it."""
    held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as locks:
            for topic in topics:
                lock = inside(topic).wal().committing
                until(lambda lock=lock: lock.acquire(blocking=False))  # type: ignore[misc]
                locks.callback(lock.release)
            held.set()
            assert may_end.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(PATIENCE)
        yield
    finally:
        may_end.set()
        holder.join(PATIENCE)


@pytest.mark.parametrize("syncfs_min", [2, 10_000])
def test_a_round_of_syncs_waits_for_no_log_in_use(
    syncfs_min: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for a moment for each: behind hundreds of logs in use a record was durable after many seconds."""
    settings = _settings(syncfs_min=syncfs_min, sync_interval_ms=1)
    asked: list[Upkeep] = []

    def is_in_use(upkeep: Upkeep, seconds_max: float) -> bool:
        asked.append(upkeep)
        return True

    monkeypatch.setattr(Upkeep, "is_in_use", is_in_use)
    with Storage.open(str(tmp_path / "log"), settings) as log:
        worker = inside(log).workers.sync.take_over()
        topics = [log.create_topic(f"t{number}") for number in range(IN_USE)]
        sound = [log.create_topic(f"sound{number}") for number in range(2)]
        for topic in (*topics, *sound):
            topic.append(b"v")
            worker.ask(inside(topic).segment())
        until(lambda: all(inside(topic).segment().upkeep.is_sync_due for topic in (*topics, *sound)))
        with in_use(topics):
            worker.step()
            assert [topic.offsets().durable for topic in sound] == [1, 1]
            assert asked == [], "each of these is a wait"
            assert {topic.offsets().durable for topic in topics} == {0}
        assert not any(inside(topic).wal().errands for topic in topics), "what has not begun is taken back"
        for topic in topics:
            worker.ask(inside(topic).segment())
        worker.step()
        assert {topic.offsets().durable for topic in topics} == {1}


def test_a_sync_of_a_log_in_use_is_begun_and_noted_by_the_thread_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that is written all the time was left out of every round."""
    monkeypatch.setattr(sync, "BEGIN_SECONDS", PATIENCE)
    disk, may_write = WatchedDisk(), threading.Event()
    with Storage.open(str(tmp_path / "log"), _settings(syncfs_min=2, sync_interval_ms=60_000), disk=disk) as log:
        worker = inside(log).workers.sync.take_over()
        topics = [log.create_topic(f"t{number}") for number in range(3)]
        for topic in topics:
            topic.append(b"v")

        def meet(kind: str, path: str) -> None:
            if kind == "write" and path.endswith(".seg"):
                assert may_write.wait(PATIENCE)

        disk.meet = meet
        writing = [threading.Thread(target=topic.append, args=(b"w",)) for topic in topics]
        for thread in writing:
            thread.start()
        logs = [inside(topic).wal() for topic in topics]
        until(lambda: all(log.writer.in_doubt for log in logs))
        shards: list[SegmentShard] = [inside(topic).segment() for topic in topics]
        syncing = threading.Thread(target=worker.sync_together, args=(shards,))
        syncing.start()
        until(lambda: all(log.errands for log in logs))
        may_write.set()
        for thread in (*writing, syncing):
            thread.join(PATIENCE)

        assert disk.calls["sync_filesystem"] == 1
        assert [topic.offsets().durable for topic in topics] == [2, 2, 2], "with what the thread has just written"


def test_a_sync_that_was_taken_back_does_not_begin_later(tmp_path: Path) -> None:
    """It would count as under way for ever, and no file could be rotated."""
    with Storage.open(str(tmp_path / "log"), _settings(syncfs_min=2, sync_interval_ms=60_000)) as log:
        topic = log.create_topic("t")
        inside(log).workers.sync.take_over()
        topic.append(b"v")
        wal, answers = inside(topic).wal(), threading.Semaphore(0)
        with in_use([topic]):
            request = SyncRequest(wal, answers.release)
            begin = next(iter(wal.errands))
            assert request.end() is None
        begin()  # by a thread that took it off the list just before
        assert not wal.writer.syncing
        assert wal.dirty_since is not None
        assert not answers.acquire(blocking=False)
        topic.rotate()
        assert topic.offsets().durable == 1


def test_syncs_that_hang_leave_those_of_other_shards_alone(tmp_path: Path) -> None:
    """Beyond a few that hung, no log was synced any more."""
    disk, answers = WatchedDisk(), threading.Event()
    with Storage.open(str(tmp_path / "log"), _settings(syncfs_min=10_000), disk=disk) as log:
        hung = [log.create_topic(f"t{number}") for number in range(3 * STUCK_MAX)]
        sound = log.create_topic("sound")
        for topic in (*hung, sound):
            topic.append(b"first")
        ids = tuple(topic.spec.topic_id for topic in hung)
        held: set[str] = set()

        def meet(kind: str, path: str) -> None:
            for topic_id in ids if kind == "sync" and not answers.is_set() else ():
                if f"/{topic_id}_" in path:
                    held.add(topic_id)
                    assert answers.wait(PATIENCE)

        disk.meet = meet
        try:
            for topic in hung:
                topic.append(b"v")
            until(lambda: held == set(ids))
            for _ in range(3):
                end = sound.append(b"v") + 1
                until(lambda end=end: sound.offsets().durable >= end)  # type: ignore[misc]
        finally:
            answers.set()
        until(lambda: all(topic.offsets().durable == 2 for topic in hung))


def test_a_sync_of_many_logs_writes_to_none_of_them(tmp_path: Path) -> None:
    """It showed each log's durable end in a file of its own: one that hung kept all others of the round from theirs."""
    disk = WatchedDisk()
    written: list[str] = []
    with Storage.open(str(tmp_path / "log"), _settings(syncfs_min=2, sync_interval_ms=1), disk=disk) as log:
        worker = inside(log).workers.sync.take_over()
        topics = [log.create_topic(f"t{number}") for number in range(3)]
        for topic in topics:
            topic.append(b"v")
            worker.ask(inside(topic).segment())
        until(lambda: all(inside(topic).segment().upkeep.is_sync_due for topic in topics))

        disk.meet = lambda kind, path: written.append(path) if kind == "write" else None
        worker.step()
        disk.meet = lambda kind, path: None

        assert disk.calls["sync_filesystem"] == 1
        assert [topic.offsets().durable for topic in topics] == [1, 1, 1]
        assert written == []
