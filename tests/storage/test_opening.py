"""Opening and closing a log: whose directory it is, what settings reach, what a reopened log knows."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import pytest

import forebay
from forebay import EARLIEST, Closed, Conflict, Settings, Storage, Unavailable, Unsupported
from forebay.disk.descriptors import SystemFile
from forebay.engines import SegmentEngine
from forebay.lifecycle import close_with_process
from forebay.metadata import Change, Compacted
from forebay.shard import SegmentShard
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import ShardRef
from forebay.workers import STUCK_MAX, Worker
from tests.storage.rig import QUICK, WatchedDisk, quick, values, wal_of
from tests.support.waiting import until


def test_what_was_appended_is_there_after_reopening_and_the_end_was_clean(tmp_path: Path) -> None:
    for durability in ("memory", "disk", "fsync"):
        with forebay.open(tmp_path / "log", QUICK) as log:
            topic = log.create_topic(durability, durability=durability)
            offsets = [topic.append(b"%d" % n) for n in range(10)]

        with forebay.open(str(tmp_path / "log"), QUICK) as log:
            topic = log.topic(durability)
            assert values(topic.read()) == [b"%d" % n for n in range(10)]
            assert topic.append(b"next") == offsets[-1] + 1
            assert topic.recovery().clean
            assert topic.recovery().exact


def test_closing_twice_is_harmless_and_every_handle_says_closed(tmp_path: Path) -> None:
    log = forebay.open(tmp_path / "log", QUICK)
    topic = log.create_topic("t", partitions=2)
    topic.append(b"v", partition=0)
    stream = topic.follow(EARLIEST, timeout=0.0)
    assert values(stream) == [b"v"]
    ack = topic.append_nowait(b"w", partition=0)
    log.close()
    log.close()

    assert ack.result(0) == 1
    for call in (
        lambda: topic.append(b"v", partition=0),
        lambda: topic.append(b"v", partition=1),
        lambda: topic.append_nowait(b"v", partition=0),
        lambda: topic.append_many([b"v"], partition=0),
        lambda: list(topic.read()),
        lambda: next(stream),
        lambda: log.topic("t"),
        log.topics,
        lambda: log.create_topic("u"),
        lambda: log.delete_topic("t"),
        log.recover,
        topic.flush,
    ):
        with pytest.raises(Closed):
            call()


def test_a_second_log_on_the_same_directory_is_refused_by_name(tmp_path: Path) -> None:
    log = forebay.open(tmp_path / "log", QUICK)
    with pytest.raises(Unavailable, match=f"{tmp_path}/log is open for writing already.*read-only"):
        forebay.open(tmp_path / "log", QUICK)
    log.close()

    forebay.open(tmp_path / "log", QUICK).close()


def test_a_log_may_be_opened_beside_its_owner_to_read(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log, forebay.open(tmp_path / "log", QUICK, read_only=True) as beside:
        topic = log.create_topic("t")
        assert list(beside.topic("t").read()) == []
        topic.append_many([b"a", b"b"])

        read = beside.topic("t")
        assert values(read.read()) == [b"a", b"b"]
        assert read.failure() == "opened read-only"
        for call in (
            lambda: read.append(b"v"),
            lambda: read.append_nowait(b"v"),
            lambda: read.append_many([b"v"]),
            lambda: read.last_sequence(1),
            read.flush,
            read.rotate,
            read.acquire,
            lambda: read.acquire(0),
            beside.run_retention,
            lambda: beside.create_topic("u"),
            lambda: beside.delete_topic("t"),
        ):
            with pytest.raises(Unsupported, match="read-only"):
                call()


def test_a_topic_without_records_can_be_read_where_no_caller_owns_it(tmp_path: Path) -> None:
    """A reader beside no owner took the missing directory of an unused shard for files that keep changing."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        log.create_topic("t")

    with forebay.open(tmp_path / "log", QUICK, read_only=True) as beside:
        assert list(beside.topic("t").read()) == []
        assert beside.topic("t").offsets().next == 0


def test_a_reader_beside_the_owner_learns_that_a_topic_was_deleted(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log, forebay.open(tmp_path / "log", QUICK, read_only=True) as beside:
        log.create_topic("t").append(b"v")
        stream = beside.topic("t").follow(EARLIEST)
        assert next(stream).value == b"v"

        log.delete_topic("t")

        with pytest.raises(forebay.UnknownTopic, match="deleted"):
            next(stream)


def test_a_log_in_memory_has_the_same_surface_and_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with forebay.open(":memory:") as log:
        topic = log.create_topic("t", partitions=2)
        topic.append(b"a", key=b"k", tag="x")
        topic.append_many([b"b", b"c"], partition=0)
        assert topic.spec.durability == "ephemeral"
        assert set(values(topic.read())) == {b"a", b"b", b"c"}
        topic.flush()
        topic.rotate()
        with pytest.raises(Unsupported, match="in memory"):
            log.create_topic("u", durability="fsync")
        assert [spec.topic for spec in log.topics()] == ["t"]
        log.recover()

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Unsupported, match="memory"):
        forebay.open(":memory:", read_only=True)


def test_a_process_may_change_its_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path was kept as it was and led elsewhere afterwards."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with forebay.open("log", QUICK) as log:
        topic = log.create_topic("t")
        monkeypatch.chdir(tmp_path / "elsewhere")
        topic.append(b"v")
        topic.rotate()
        log.create_topic("u").append(b"w")

    assert os.listdir(tmp_path / "elsewhere") == []
    with forebay.open(tmp_path / "log", QUICK) as log:
        assert values(log.topic("t").read()) + values(log.topic("u").read()) == [b"v", b"w"]


def test_settings_reach_the_log_the_disk_and_the_metadata(tmp_path: Path) -> None:
    settings = {
        **QUICK,
        "wal": {"rotate_bytes_max": 8192, "frame_bytes_max": 65_536, "free_bytes_min": 0},
        "metadata": {"path": str(tmp_path / "meta.sqlite"), "prefix": "/other"},
        "runtime": {"descriptors_max": 9},
    }
    with forebay.open(tmp_path / "log", settings) as log:
        topic = log.create_topic("t")
        for _ in range(6):
            topic.append(b"x" * 4000)
        assert wal_of(topic).counters.rotations >= 2
        with pytest.raises(forebay.Invalid, match="frame_bytes_max"):
            topic.append(b"x" * 65_536)
        assert inside(log).descriptors_max == 9

    assert (tmp_path / "meta.sqlite").exists()
    assert not (tmp_path / "log" / "metadata.sqlite").exists()
    with pytest.raises(forebay.Corrupt, match="metadata.path"):
        forebay.open(tmp_path / "log", QUICK)
    with forebay.open(tmp_path / "log", {"metadata": {"path": str(tmp_path / "meta.sqlite")}}) as log:
        assert log.topics() == []


def test_metadata_in_memory_is_refused_for_a_directory(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="forget the topics"):
        forebay.open(tmp_path / "log", {"metadata": {"backend": "memory"}})


def test_recovery_shows_its_progress_and_opens_every_shard(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        for name in "abc":
            log.create_topic(name, partitions=2).append_many([b"x" * 1000] * 50, keys=[b"%d" % n for n in range(50)])

    heard: list[float] = []
    with forebay.open(tmp_path / "log", QUICK) as log:
        log.recover(heard.append)
        assert heard == sorted(heard)
        assert heard[-1] == 1.0
        assert len(inside(log).engine.shards()) == 6
        assert sum(len(list(log.topic(name).read())) for name in "abc") == 150


def test_limits_are_applied_to_topics_that_no_caller_has_used_since(tmp_path: Path) -> None:
    """Only those with limits are opened for that, and only where they have records."""
    clock = ManualClock()
    settings = Settings.load(overrides=QUICK)
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        for engine in ("rocksdb", "segment"):
            log.create_topic(engine, engine=engine, partitions=2, cap_records=5).append_many([b"v"] * 12, partition=1)
            log.create_topic(f"{engine}-for-ever", engine=engine).append(b"v")
            log.create_topic(f"{engine}-unused", engine=engine, cap_records=5)
        log.create_topic("given-up", cap_records=5).append_many([b"v"] * 12)
        log.seal_topic("given-up")
        log.create_topic("fleeting", engine="memory", cap_records=5).append(b"v")

    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        inside(log).workers.limits.step()

        assert {(str(shard.ref), shard.offsets().evict_floor) for shard in inside(log).shards()} == {
            ("default/rocksdb[1]", 7),
            ("default/segment[1]", 7),
        }


def test_a_limit_that_is_new_is_applied_to_a_topic_that_no_caller_has_used_since(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = Settings.load(overrides=QUICK)
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        log.create_topic("t").append_many([b"v"] * 12)

    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        inside(log).workers.limits.step()
        assert inside(log).shards() == []
        log.alter_topic("t", cap_records=5, allow_loss=True)
        clock.advance(settings.retention.evict_interval_s)
        inside(log).workers.limits.step()

        assert [shard.offsets().evict_floor for shard in inside(log).shards()] == [7]


def test_a_topic_with_limits_that_cannot_be_opened_is_tried_again_if_that_may_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    # No caller but the test steps.
    settings = Settings.load(overrides={**QUICK, "retention": {"evict_interval_s": 3600}})
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        for name in ("slow", "broken", "fine"):
            log.create_topic(name, cap_records=5).append_many([b"v"] * 12)
    errors = {"slow": Unavailable("not now"), "broken": Conflict("never")}
    tried: list[str] = []

    def refuse(engine: SegmentEngine, ref: ShardRef) -> SegmentShard:
        tried.append(ref.spec.topic)
        if ref.spec.topic in errors:
            raise errors[ref.spec.topic]
        return whole(engine, ref)

    whole = SegmentEngine.open_here
    monkeypatch.setattr(SegmentEngine, "open_here", refuse)
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        inside(log).workers.limits.step()
        assert sorted(tried) == ["broken", "fine", "slow"]
        assert "default/slow[0]: its limits are not applied while it cannot be opened: not now" in caplog.text
        errors.clear()
        inside(log).workers.limits.step()

        assert sorted(tried) == ["broken", "fine", "slow", "slow"]
        assert sorted(shard.ref.spec.topic for shard in inside(log).shards()) == ["fine", "slow"]


def test_closing_waits_for_the_thread_that_reads_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the watch is closed below it, and a warning is the last line of a log."""
    held: list[bool] = []
    with Storage.open(tmp_path / "log", Settings.load(overrides=QUICK)) as log:
        inside(log).follow_changes()
        watch = inside(log).changes
        assert watch is not None
        close = watch.close

        def closed() -> None:
            held.append(inside(log).is_following_here())
            close()

        monkeypatch.setattr(watch, "close", closed)

    assert held == [True]


@pytest.mark.parametrize("error", [Unavailable("away"), Compacted("gone")])
def test_a_watch_that_fails_is_closed_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Unavailable
) -> None:
    """Else each outage of the metadata store leaves a thread and a connection behind."""
    clock, closed = ManualClock(), list[str]()

    def fails(timeout_s: float) -> list[Change]:
        raise error

    with Storage.open(tmp_path / "log", Settings.load(overrides=QUICK), clock=clock) as log:
        inside(log).follow_changes()
        first = inside(log).changes
        assert first is not None
        monkeypatch.setattr(first, "poll", fails)
        monkeypatch.setattr(first, "close", lambda: closed.append("first"))

        for _ in range(2):
            clock.advance(log.settings.retention.evict_interval_s + 1)
            inside(log).follow_changes()

        assert closed == ["first"]
        assert inside(log).changes not in (None, first)


def test_recovery_opens_shards_of_every_engine_on_disk_and_applies_their_limits(tmp_path: Path) -> None:
    """No caller has used the topics since, and limits are due only later: the database was not even opened."""
    clock = ManualClock()
    settings = Settings.load(overrides=QUICK)
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        for engine in ("rocksdb", "segment"):
            log.create_topic(engine, engine=engine, cap_records=5).append_many([b"v"] * 12)
        log.create_topic("fleeting", engine="memory").append(b"v")

    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        assert inside(log).shards() == []

        log.recover()
        inside(log).workers.limits.step()

        assert {shard.ref.spec.topic: shard.offsets().evict_floor for shard in inside(log).shards()} == {
            "rocksdb": 7,
            "segment": 7,
        }


def test_recovery_leaves_a_database_shard_of_another_directory_alone(tmp_path: Path) -> None:
    shared = {**QUICK, "metadata": {"path": str(tmp_path / "meta.sqlite")}}
    with forebay.open(tmp_path / "A", shared) as log:
        log.create_topic("t", engine="rocksdb").append(b"v")

    with forebay.open(tmp_path / "B", shared) as log:
        log.recover()
        assert inside(log).shards() == []
    with forebay.open(tmp_path / "A", shared) as log:
        log.recover()
        assert values(log.topic("t").read()) == [b"v"]


def test_a_shard_that_cannot_be_opened_does_not_keep_those_of_other_engines_closed(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        for engine in ("rocksdb", "segment"):
            log.create_topic(engine, engine=engine).append(b"v")
        lost = tmp_path / "log" / "shards" / f"{log.topic('segment').spec.topic_id}_0"
    lost.rename(tmp_path / "lost")

    with forebay.open(tmp_path / "log", QUICK) as log:
        with pytest.raises(forebay.DataLoss, match="has lost its directory"):
            log.recover().raise_failed()
        assert [shard.ref.spec.topic for shard in inside(log).shards()] == ["rocksdb"]


def test_threads_are_not_made_per_topic_and_end_with_the_log(tmp_path: Path) -> None:
    # By themselves: threads that an earlier test has left may end meanwhile.
    before = set(threading.enumerate())
    with forebay.open(tmp_path / "log", QUICK) as log:
        topics = [log.create_topic(f"t{n}") for n in range(20)]
        for topic in topics:
            topic.append_nowait(b"v").result()
        begun = set(threading.enumerate()) - before
        # Syncs, history, clean-up, definitions; committers; some in the place of stuck ones.
        assert len(begun) <= 4 + 2 * log.settings.runtime.committers + STUCK_MAX < len(topics)

    assert set(threading.enumerate()) <= before


def test_a_closing_that_fails_half_way_still_lets_the_directory_go(tmp_path: Path) -> None:
    disk = WatchedDisk()
    log = Storage.open(str(tmp_path / "log"), quick(), disk=disk)
    log.create_topic("t").append(b"v")

    def refuse(kind: str, path: str) -> None:
        if kind in ("write", "sync", "create", "rename"):
            raise OSError(5, "the disk is gone", path)

    disk.meet = refuse
    log.close()
    disk.meet = lambda kind, path: None

    with Storage.open(str(tmp_path / "log"), Settings()) as again:
        assert values(again.topic("t").read()) == [b"v"]
        assert not again.topic("t").recovery().clean


def test_upkeep_that_fails_is_tried_again(tmp_path: Path) -> None:
    disk = WatchedDisk()
    failed = threading.Event()

    def refuse(kind: str, path: str) -> None:
        if kind == "sync" and path.endswith(".seg") and not failed.is_set():
            failed.set()
            raise OSError(5, "once", path)

    with Storage.open(str(tmp_path / "log"), quick(), disk=disk) as log:
        topic = log.create_topic("t")
        topic.append(b"before")
        disk.meet = refuse
        assert failed.wait(60)

        until(lambda: topic.failure() is None and topic.offsets().durable == 1)
        topic.append(b"after")
        assert values(topic.read()) == [b"before", b"after"]


def test_a_store_that_topics_would_not_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(forebay.Invalid, match='storage.mode is "local", which has no store'):
        forebay.open(tmp_path / "log", {"store": {"backend": "directory", "root": str(tmp_path / "store")}})

    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("mode", ["local", "shared_fs"])
def test_after_a_clean_stop_nothing_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Counted in bytes read of log files: by opening, recovering everything, offsets and the first append."""
    settings: dict[str, dict[str, object]] = {**QUICK, "storage": {"mode": mode}}
    if mode == "shared_fs":
        settings["store"] = {"root": str(tmp_path / "store")}
    with forebay.open(tmp_path / "log", settings) as log:
        topic = log.create_topic("t")
        for number in range(64):
            topic.append(b"%d" % number + b"x" * 65_536)
    counts = Counter[str]()
    inner = SystemFile.read_at

    def read_at(file: SystemFile, length: int, position: int) -> bytes:
        data = inner(file, length, position)
        counts[file.path] += len(data)
        return data

    monkeypatch.setattr(SystemFile, "read_at", read_at)
    for again in range(2):
        counts.clear()
        with forebay.open(tmp_path / "log", settings) as log:
            log.recover()
            topic = log.topic("t")
            assert topic.recovery().clean
            assert topic.offsets().next == 64 + again
            topic.append(b"more")
            assert sum(count for path, count in counts.items() if path.endswith(".seg")) < 65_536
            assert [bytes(value or b"")[:2].strip(b"x") for value in values(topic.read())][:10] == [
                b"%d" % number for number in range(10)
            ]


def test_offsets_written_long_ago_are_no_rate_to_reserve_by(tmp_path: Path) -> None:
    """Each opening took the offsets of a whole life for the work of an instant, and reserved ever more ahead."""
    clock = ManualClock()
    settings = Settings.load(overrides=QUICK)
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        for _ in range(20):
            log.create_topic("t", exist_ok=True).append_many([b"v"] * 5_000)
            clock.advance(10)
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        topic = log.topic("t")
        topic.append(b"v")
        writer = wal_of(topic).writer
        assert writer.reserved_end - writer.end <= 2 * writer.settings.reserve_records_min


@pytest.mark.parametrize("at", ["second worker", "storage", "process"])
def test_an_opening_that_is_interrupted_leaves_no_thread_and_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Workers went on over closed metadata, and the directory stayed taken for as long as the process lived."""
    start, watch = Worker.start, close_with_process

    def start_but_last(worker: Worker) -> None:
        start(worker)
        if worker.name == "forebay-definitions":
            raise KeyboardInterrupt

    def watch_too_late(storage: Storage) -> None:
        watch(storage)
        raise KeyboardInterrupt

    def no_storage(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if at == "second worker":
            patch.setattr(Worker, "start", start_but_last)
        elif at == "storage":
            patch.setattr(Storage, "__init__", no_storage)
        else:
            patch.setattr("forebay.storage.store.close_with_process", watch_too_late)
        forebay.open(tmp_path / "log", QUICK)

    assert set(threading.enumerate()) <= before
    with forebay.open(tmp_path / "log", QUICK) as log:
        log.create_topic("t").append(b"v")
