"""What a log does by itself: background syncs, marks, rotation by age, few syncs for many shards, few descriptors."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from forebay import Settings, Storage, Unavailable
from forebay.appends.queue import QueuedRecord
from forebay.appends.ticket import Ticket
from forebay.clock import SystemClock
from forebay.disk import SyncFailedBefore
from forebay.settings import RuntimeSettings
from forebay.shard import SegmentShard
from forebay.storage.background.jobs import StorageJobs
from forebay.storage.background.seal import SealWorker
from forebay.storage.background.segments import SegmentWorkers
from forebay.storage.background.sync import UPKEEP, SyncWorker
from forebay.testing.inside import InsideSync, inside
from forebay.testing.simulated.clock import ManualClock
from forebay.wal.upkeep import Upkeep
from tests.engines.homes import SegmentHome
from tests.storage.rig import WatchedDisk, quick, values
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow


def stepped(tmp_path: Path, durability: str, settings: Settings) -> tuple[InsideSync, SegmentHome, ManualClock]:
    """Upkeep without its thread and with time turned by hand."""
    clock = ManualClock()
    disk = WatchedDisk()
    worker = SyncWorker(
        disk,
        clock,
        str(tmp_path),
        settings.runtime,
        jobs=StorageJobs(SystemClock()),
        hand_on=lambda shard: None,
        relieve=lambda: None,
    )
    home = SegmentHome(disk, str(tmp_path), durability, settings=settings, clock=clock, on_dirty=worker.wake)
    return InsideSync(worker).take_over(), home, clock


def test_a_disk_topic_is_durable_within_the_sync_interval(tmp_path: Path) -> None:
    with Storage.open(str(tmp_path / "log"), quick()) as log:
        topic = log.create_topic("t")
        for number in range(1, 6):
            topic.append(b"v")
            until(lambda n=number: topic.offsets().durable == n)  # type: ignore[misc]


def test_syncs_of_a_disk_topic_come_with_time_and_not_with_appends(tmp_path: Path) -> None:
    settings = Settings.load(overrides={"wal": {"sync_interval_ms": 1000, "free_bytes_min": 0}})
    maintenance, home, clock = stepped(tmp_path, "disk", settings)
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    maintenance.watch(shard)
    counters = shard.wal.counters
    for _ in range(3):
        before = counters.fsyncs
        for _ in range(100):
            shard.acknowledge(shard.stage_one(_entry(), 17))
        maintenance.step()
        assert counters.fsyncs == before

        clock.advance(1.001)
        maintenance.step()

        assert counters.fsyncs == before + 1
        assert shard.offsets().durable == shard.offsets().next
    engine.close()


def test_an_idle_shard_writes_a_mark_once_and_is_then_left_alone(tmp_path: Path) -> None:
    settings = Settings.load(overrides={"wal": {"mark_interval_ms": 500, "free_bytes_min": 0}})
    maintenance, home, clock = stepped(tmp_path, "fsync", settings)
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    maintenance.watch(shard)
    shard.acknowledge(shard.stage_one(_entry(), 17))
    active = shard.wal.writer.active
    assert active is not None
    assert active.marked < 1

    for _ in range(3):
        clock.advance(2.0)
        maintenance.step()

    assert active.marked == 1
    assert active.synced == active.position
    assert not shard.upkeep.is_busy
    position = active.position
    for _ in range(5):
        clock.advance(2.0)
        maintenance.step()
    assert active.position == position
    engine.close()


def test_a_file_with_records_is_rotated_at_its_age_and_sealed(tmp_path: Path) -> None:
    settings = Settings.load(overrides={"wal": {"rotate_seconds_max": 60, "rotate_bytes_min": 0, "free_bytes_min": 0}})
    maintenance, home, clock = stepped(tmp_path, "disk", settings)
    engine = home.open().engine
    shards = [engine.open_shard(home.ref(partition)) for partition in (0, 1)]
    for shard in shards:
        maintenance.watch(shard)
    sealing = SealWorker(clock, lambda shard: None)
    sealing.worker.stop()
    maintenance.replace_follow_up(lambda shard: sealing.ask(shard) if shard.upkeep.needs_mending else None)
    shards[0].acknowledge(shards[0].stage_one(_entry(), 17))

    clock.advance(61)
    maintenance.step()
    assert not list(tmp_path.glob("shards/*/*.idx"))  # another worker's work
    sealing.step()

    assert [shard.wal.counters.rotations for shard in shards] == [1, 0]
    assert len(list(tmp_path.glob("shards/*/*.idx"))) == 1
    assert [r.value for batch in shards[0].read(0).batches for r in batch.records(0)] == [b"v"]
    engine.close()


@pytest.mark.parametrize(("mode", "rotations"), [("local", 0), ("shared_fs", 1)])
def test_a_small_file_is_rotated_at_its_age_only_where_an_export_waits_for_it(
    tmp_path: Path, mode: str, rotations: int
) -> None:
    """10,000 topics that are written now and then sealed 2,000 tiny files a minute, each kept in memory and on disk."""
    shared = {"storage": {"mode": mode}, "store": {"root": str(tmp_path / "store")}} if mode == "shared_fs" else {}
    wal = {"rotate_seconds_max": 60, "rotate_bytes_min": 4096, "free_bytes_min": 0}
    maintenance, home, clock = stepped(tmp_path, "disk", Settings.load(overrides={"wal": wal, **shared}))
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    maintenance.watch(shard)
    shard.acknowledge(shard.stage_one(_entry(), 17))

    for _ in range(3):
        clock.advance(61)
        maintenance.step()

    assert shard.wal.counters.rotations == rotations
    while shard.wal.writer.active is not None and shard.wal.writer.active.position < 4096:
        shard.acknowledge(shard.stage_one(_entry(), 17))
    for _ in range(3):
        clock.advance(61)
        maintenance.step()
    assert shard.wal.counters.rotations == rotations + 1
    engine.close()


def test_an_idle_file_is_rotated_at_its_age_and_not_looked_at_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard was looked at every second: thousands of idle ones cost a part of a processor."""
    settings = Settings.load(overrides={"wal": {"rotate_seconds_max": 60, "rotate_bytes_min": 0, "free_bytes_min": 0}})
    maintenance, home, clock = stepped(tmp_path, "disk", settings)
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    maintenance.watch(shard)
    shard.acknowledge(shard.stage_one(_entry(), 17))
    for _ in range(5):
        clock.advance(2)
        maintenance.step()
    assert not shard.upkeep.is_busy

    looks: list[bool] = []
    is_old = Upkeep.is_old.fget  # type: ignore[attr-defined]

    def counted(upkeep: Upkeep) -> bool:
        looks.append(True)
        return bool(is_old(upkeep))

    monkeypatch.setattr(Upkeep, "is_old", property(counted))
    for _ in range(20):
        clock.advance(2)
        maintenance.step()
    assert (looks, shard.wal.counters.rotations) == ([], 0)
    clock.advance(11)
    maintenance.step()
    assert shard.wal.counters.rotations == 1
    engine.close()


def test_while_many_shards_wait_to_be_sealed_none_is_rotated_at_its_age_and_then_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files were rotated faster than the disk could seal them: thousands waited, each with a descriptor and memory."""
    monkeypatch.setattr("forebay.storage.background.sync.UNSEALED_MAX", 2)
    settings = Settings.load(overrides={"wal": {"rotate_seconds_max": 60, "rotate_bytes_min": 0, "free_bytes_min": 0}})
    clock, disk, waiting = ManualClock(), WatchedDisk(), dict[SegmentShard, None]()
    worker = SyncWorker(
        disk,
        clock,
        str(tmp_path),
        settings.runtime,
        jobs=StorageJobs(clock),
        hand_on=lambda shard: waiting.update({shard: None} if shard.upkeep.needs_mending else {}),
        relieve=lambda: None,
        unsealed=lambda: len(waiting),
    )
    home = SegmentHome(disk, str(tmp_path), "disk", settings=settings, clock=clock, on_dirty=worker.wake)
    maintenance, engine = InsideSync(worker).take_over(), home.open().engine
    shards = [engine.open_shard(home.ref(partition)) for partition in range(4)]
    for shard in reversed(shards):
        maintenance.watch(shard)
    for shard in shards:
        shard.acknowledge(shard.stage_one(_entry(), 17))
        for _ in range(4):
            clock.advance(2)
            maintenance.step()
    assert not any(shard.upkeep.is_busy for shard in shards)

    clock.advance(60)
    maintenance.step()
    assert list(waiting) == shards[:2]
    clock.advance(60)
    maintenance.step()
    assert list(waiting) == shards[:2]

    waiting.clear()
    for shard in shards[:2]:
        shard.upkeep.seal_rotated()
    clock.advance(2)
    maintenance.step()
    assert list(waiting) == shards[2:]
    engine.close()


def test_a_shard_with_work_is_looked_at_when_that_is_due_and_not_in_every_round(tmp_path: Path) -> None:
    """Each round looked at each of 10,000 shards that were written: that took a processor."""
    settings = Settings.load(overrides={"wal": {"free_bytes_min": 0}})
    maintenance, home, clock = stepped(tmp_path, "disk", settings)
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    maintenance.watch(shard)
    looks: list[int] = []
    maintenance.replace_follow_up(lambda shard: looks.append(shard.wal.counters.fsyncs))
    shard.acknowledge(shard.stage_one(_entry(), 17))
    for _ in range(10):
        maintenance.step()
    assert looks == []

    for _ in range(10):
        clock.advance(0.501)
        maintenance.step()

    assert looks == [1, 2], "for the sync and the mark, and for the sync of the mark"
    assert not shard.upkeep.is_busy
    engine.close()


def test_a_shard_that_was_only_opened_asks_for_no_offsets(tmp_path: Path) -> None:
    """What was reserved for it was a gap after a clean stop, which gives back what a log that was written has left."""
    shared = {"storage": {"mode": "shared_fs"}, "store": {"root": str(tmp_path / "store")}}
    maintenance, home, clock = stepped(
        tmp_path, "disk", Settings.load(overrides={**shared, "wal": {"free_bytes_min": 0}})
    )
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    shard.wal.writer.note_reserved(1)  # the owner before left one offset of what it had reserved
    assert shard.wal.writer.wants_reservation and not shard.wal.writer.touched
    asked: list[bool] = []
    maintenance.replace_follow_up(lambda shard: asked.append(shard.wal.writer.wants_reservation))

    maintenance.watch(shard)
    for _ in range(3):
        clock.advance(2)
        maintenance.step()

    assert asked == [] and not shard.upkeep.is_busy
    engine.close()


def test_a_shard_whose_file_is_not_sealed_is_asked_for_at_once_and_again_after_a_while(tmp_path: Path) -> None:
    maintenance, home, clock = stepped(tmp_path, "disk", quick(sync_interval_ms=1))
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    maintenance.watch(shard)
    asked: list[float] = []
    maintenance.replace_follow_up(lambda shard: asked.append(clock.monotonic()) if shard.upkeep.needs_mending else None)
    shard.acknowledge(shard.stage_one(_entry(), 17))
    shard.wal.rotate()
    rotated = clock.monotonic()
    maintenance.step()
    assert asked == [rotated]
    clock.advance(0.1)
    maintenance.step()
    asked.clear()

    for _ in range(100):
        clock.advance(0.1)
        maintenance.step()

    assert len(asked) == 2
    engine.close()


def test_records_of_class_memory_are_written_after_the_flush_interval(tmp_path: Path) -> None:
    settings = Settings.load(overrides={"wal": {"flush_interval_ms": 20, "free_bytes_min": 0}})
    maintenance, home, clock = stepped(tmp_path, "memory", settings)
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    maintenance.watch(shard)
    for _ in range(3):
        shard.acknowledge(shard.stage_one(_entry(), 17))
    assert shard.wal.head == 1  # the first had to reserve offsets
    asked: list[SegmentShard] = []
    maintenance.replace_follow_up(lambda shard: asked.append(shard) if shard.upkeep.is_commit_due else None)
    maintenance.step()
    assert asked == []

    clock.advance(0.021)
    maintenance.step()
    assert shard.wal.head == 1, "it waits for nothing that a commit may wait for"
    for due in asked:
        due.commit()

    assert shard.wal.head == 3
    engine.close()


def test_a_shard_that_gets_work_while_it_is_let_go_comes_back(tmp_path: Path) -> None:
    """It was seen idle, got work, found itself still on the list, and was then taken off: never synced again."""
    maintenance, home, clock = stepped(tmp_path, "disk", quick())
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    maintenance.watch(shard)
    late: list[bool] = []

    class Upkeep:
        """The shard's upkeep, with an append at the worst moment."""

        def __getattr__(self, name: str) -> object:
            return getattr(shard_upkeep, name)

        @property
        def due_at(self) -> float:
            due_at = shard_upkeep.due_at
            if not late:
                late.append(True)
                shard.acknowledge(shard.stage_one(_entry(), 17))
            return due_at

    shard_upkeep = shard.upkeep
    maintenance.ask(shard)
    shard.upkeep = Upkeep()  # type: ignore[assignment]
    maintenance.step()

    assert maintenance.is_asked(shard)
    clock.advance(1)
    maintenance.step()
    assert shard.offsets().durable == 1
    shard.upkeep = shard_upkeep
    engine.close()


def test_many_dirty_shards_are_synced_by_one_call(tmp_path: Path) -> None:
    disk, clock = WatchedDisk(), ManualClock()
    settings = Settings.load(overrides={"wal": {"free_bytes_min": 0}, "runtime": {"maintenance_interval_ms": 5}})
    with Storage.open(str(tmp_path / "log"), settings, disk=disk, clock=clock) as log:
        topic = log.create_topic("t", partitions=80)
        for turn in (1, 2):
            until(lambda: inside(log).workers.sync.jobs() == 0)
            before = disk.calls.copy()
            for partition in range(80):
                topic.append(b"v", partition=partition)
            made = disk.calls["sync"] - before["sync"]
            # Time stands still until here, so that all are due at once.
            clock.advance(1.5)
            until(lambda t=turn: all(topic.offsets(p).durable == t for p in range(80)))  # type: ignore[misc]

            assert disk.calls["sync_filesystem"] - before["sync_filesystem"] == 1
            assert disk.calls["sync"] - before["sync"] == made


@pytest.mark.parametrize("number", [5, 28])
def test_a_failed_sync_of_the_file_system_makes_no_record_durable_and_heals(tmp_path: Path, number: int) -> None:
    disk = WatchedDisk()
    failed: list[str] = []

    def refuse(kind: str, path: str) -> None:
        if kind == "sync_filesystem" and not failed:
            failed.append(path)
            raise OSError(number, os.strerror(number), path)

    settings = Settings.load(
        overrides={
            "wal": {"sync_interval_ms": 20, "free_bytes_min": 0},
            "runtime": {"shards_syncfs_min": 2, "maintenance_interval_ms": 5},
        }
    )
    with Storage.open(str(tmp_path / "log"), settings, disk=disk) as log:
        topics = [log.create_topic(f"t{number}") for number in range(6)]
        for topic in topics:
            topic.append(b"before")
        disk.meet = refuse
        for topic in topics:
            topic.append(b"acked")
        until(lambda: failed)

        until(lambda: all(topic.failure() is None and topic.offsets().durable == 2 for topic in topics))
        assert all(values(topic.read()) == [b"before", b"acked"] for topic in topics)


def test_descriptors_and_threads_stay_few_with_five_hundred_shards(tmp_path: Path) -> None:
    """The `live` file and the last mark of every shard were never synced and kept their descriptors."""
    settings = Settings.load(
        overrides={
            "wal": {"sync_interval_ms": 50, "mark_interval_ms": 50, "free_bytes_min": 0},
            "runtime": {"descriptors_max": 64},
        }
    )
    before = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with Storage.open(str(tmp_path / "log"), settings) as log:
        disk = inside(log).disk
        topics = [log.create_topic(f"t{number}", partitions=25) for number in range(20)]
        log.recover()
        for topic in topics:
            for partition in range(25):
                topic.append(b"v", partition=partition)
        until(lambda: all(topic.offsets(24).durable == 1 for topic in topics))
        until(lambda: disk.descriptors_open <= 64)

        assert len(os.listdir("/proc/self/fd")) <= before + 64 + 12
        # Syncs, history, clean-up, definitions, and the jobs of the first with the thread that keeps their time.
        assert threading.active_count() <= threads + 4 + settings.runtime.shards_syncfs_min + UPKEEP.threads + 1
        assert all(values(topic.read()) == [b"v"] * 25 for topic in topics[::5])


def test_a_sync_that_fails_beside_nothing_to_sync_harms_no_shard(tmp_path: Path) -> None:
    """A failed sync of many poisoned also those that had nothing to sync."""
    disk = WatchedDisk()
    home = SegmentHome(disk, str(tmp_path), "fsync", settings=quick())
    maintenance = SyncWorker(
        disk,
        SystemClock(),
        str(tmp_path),
        RuntimeSettings(),
        jobs=StorageJobs(SystemClock()),
        hand_on=lambda shard: None,
        relieve=lambda: None,
    )
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    shard.acknowledge(shard.stage_one(_entry(), 17))
    shard.wal.flush()

    def refuse(kind: str, path: str) -> None:
        if kind == "sync_filesystem":
            raise OSError(5, "input/output error", path)

    disk.meet = refuse
    InsideSync(maintenance).sync_together([shard])

    assert shard.failure is None
    engine.close()


def test_where_a_file_failed_before_a_sync_of_many_asks_each_file_for_itself(tmp_path: Path) -> None:
    disk = WatchedDisk()
    home = SegmentHome(disk, str(tmp_path), "disk", settings=quick(sync_interval_ms=60_000))
    maintenance = SyncWorker(
        disk,
        SystemClock(),
        str(tmp_path),
        RuntimeSettings(),
        jobs=StorageJobs(SystemClock()),
        hand_on=lambda shard: None,
        relieve=lambda: None,
    )
    engine = home.open().engine
    failed, sound = (engine.open_shard(home.ref(partition)) for partition in range(2))
    for shard in (failed, sound):
        shard.acknowledge(shard.stage_one(_entry(), 17))

    def refuse(kind: str, path: str) -> None:
        if kind == "sync_filesystem" or (kind == "sync" and path.startswith(engine.directory_of(failed.ref))):
            raise SyncFailedBefore(5, "input/output error", path)

    disk.meet = refuse
    InsideSync(maintenance).sync_together([failed, sound])
    disk.meet = lambda kind, path: None

    assert (sound.failure, sound.offsets().durable) == (None, 1)
    assert failed.failure is not None
    engine.close()


class SyncOfMany:
    """Two shards that are synced together, while another thread writes the first of them for long."""

    def __init__(self, tmp_path: Path, failure: OSError | None = None) -> None:
        self._disk, self._held, self._may_end = WatchedDisk(), threading.Event(), threading.Event()
        self._failure = failure
        home = SegmentHome(self._disk, str(tmp_path), "disk", settings=quick(sync_interval_ms=60_000))
        self._maintenance = SyncWorker(
            self._disk,
            SystemClock(),
            str(tmp_path),
            RuntimeSettings(),
            jobs=StorageJobs(SystemClock()),
            hand_on=lambda shard: None,
            relieve=lambda: None,
        )
        self.engine = home.open().engine
        self.stuck, self.other = (self.engine.open_shard(home.ref(partition)) for partition in range(2))
        for shard in (self.stuck, self.other):
            shard.acknowledge(shard.stage_one(_entry(), 17))
        self._writing = threading.Thread(target=self._write_long, daemon=True)

    def run(self) -> bool:
        """Sync; whether the thread that writes has held it up until its end."""
        self._disk.meet = self._begin_to_write
        work = InsideSync(self._maintenance).sync_together
        syncing = threading.Thread(target=work, args=([self.stuck, self.other],), daemon=True)
        syncing.start()
        syncing.join(20)
        is_held_up = syncing.is_alive()
        self._may_end.set()
        self._writing.join(PATIENCE)
        self._disk.meet = lambda kind, path: None
        return is_held_up

    def _write_long(self) -> None:
        with self.stuck.wal.committing:
            self._held.set()
            assert self._may_end.wait(PATIENCE)

    def _begin_to_write(self, kind: str, path: str) -> None:
        if kind == "sync_filesystem":
            self._writing.start()
            assert self._held.wait(PATIENCE)
            if self._failure is not None:
                raise self._failure


def test_a_log_that_is_written_for_long_keeps_no_other_from_the_end_of_a_sync_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = SyncOfMany(tmp_path)
    stuck, other = many.stuck, many.other

    assert not many.run()

    assert (other.offsets().durable, stuck.offsets().durable) == (1, 0)
    assert stuck.upkeep.is_busy, "the next round syncs it"
    many.engine.close()


def test_a_log_that_is_written_for_long_keeps_no_other_from_the_failure_of_a_sync_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = SyncOfMany(tmp_path, OSError(5, "input/output error"))
    stuck, other = many.stuck, many.other

    assert not many.run()

    assert other.failure is not None and "input/output error" in other.failure
    assert stuck.failure is None and stuck.upkeep.is_busy
    assert stuck.wal.writer.syncing, "no sync and no new file until it is acted on"
    stuck.wal.do_errands()
    assert stuck.failure is not None and "input/output error" in stuck.failure
    for shard in (stuck, other):
        shard.upkeep.mend()
        shard.wal.flush()
        assert shard.offsets().durable == 1
    many.engine.close()


def test_low_space_refuses_appends_and_goes_on_by_itself(tmp_path: Path) -> None:
    disk = WatchedDisk()
    with Storage.open(str(tmp_path / "log"), quick(free_bytes_min=1_000_000), disk=disk) as log:
        topic = log.create_topic("t")
        topic.append(b"before")
        disk.free = 999_999
        inside(topic).look_at_free_space()

        for _ in range(2):
            with pytest.raises(Unavailable, match=r"999999 bytes are free.*wal.free_bytes_min \(1000000\)"):
                topic.append(b"refused")
        assert values(topic.read()) == [b"before"]
        disk.free = 2_000_000

        assert topic.append(b"after") == 1
        assert values(topic.read()) == [b"before", b"after"]


def _entry() -> QueuedRecord:
    return QueuedRecord(b"v", None, None, (), 1, None, Ticket())


def test_a_rotation_gets_through_between_syncs_that_follow_one_another(tmp_path: Path) -> None:
    settings = {"wal": {"sync_interval_ms": 1, "free_bytes_min": 0}, "runtime": {"maintenance_interval_ms": 1}}
    with Storage.open(str(tmp_path / "log"), Settings.load(overrides=settings)) as log:
        topic = log.create_topic("t")
        for number in range(100):
            topic.append(b"%d" % number)
            topic.rotate()
        assert values(topic.read()) == [b"%d" % number for number in range(100)]


def test_what_was_acknowledged_is_synced_although_the_call_for_it_was_interrupted(tmp_path: Path) -> None:
    """Ctrl-C in a thread that writes for others: their records were acknowledged, and no sync was due."""
    clock, disk = ManualClock(), WatchedDisk()
    settings = Settings.load(overrides={"wal": {"free_bytes_min": 0}})
    worker = SyncWorker(
        disk,
        clock,
        str(tmp_path),
        settings.runtime,
        jobs=StorageJobs(SystemClock()),
        hand_on=lambda shard: None,
        relieve=lambda: None,
    )
    interrupts = [KeyboardInterrupt()]

    def wake(shard_id: str) -> None:
        if interrupts:
            raise interrupts.pop()
        worker.wake(shard_id)

    home = SegmentHome(disk, str(tmp_path), "disk", settings=settings, clock=clock, on_dirty=wake)
    maintenance = InsideSync(worker).take_over()
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    maintenance.watch(shard)
    other = shard.stage_one(_entry(), 17)
    with pytest.raises(KeyboardInterrupt):
        shard.acknowledge(shard.stage_one(_entry(), 17))
    assert shard.acknowledge(other) == 0

    clock.advance(1.001)
    maintenance.step()

    assert shard.offsets().durable == 2
    engine.close()


@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_log_that_stops_is_looked_at_although_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_fenced: bool
) -> None:
    """Ctrl-C while the stop was logged: nothing gave the shard up, or healed it, before its next work was due."""
    settings = Settings.load(overrides={"wal": {"free_bytes_min": 0}})
    maintenance, home, _ = stepped(tmp_path, "disk", settings)
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    maintenance.watch(shard)
    looked_at: list[SegmentShard] = []
    maintenance.replace_follow_up(looked_at.append)
    shard.acknowledge(shard.stage_one(_entry(), 17))
    active = shard.wal.writer.active
    assert active is not None

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("forebay.wal.log.logger.log", interrupt)
        if is_fenced:
            shard.wal.fence("another owner has it")
        else:
            shard.wal.fail_file(active, OSError(5, "input/output error"))
    maintenance.step()

    assert looked_at == [shard]
    engine.close()


def test_a_file_that_was_left_is_sealed_although_the_rotation_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C once the new file was there: the one before it waited for the next append."""
    maintenance, home, clock = stepped(tmp_path, "disk", Settings.load(overrides={"wal": {"free_bytes_min": 0}}))
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    maintenance.watch(shard)
    shard.acknowledge(shard.stage_one(_entry(), 17))
    for _ in range(4):
        clock.advance(2)
        maintenance.step()
    assert not maintenance.is_asked(shard)
    asked: list[SegmentShard] = []
    maintenance.replace_follow_up(lambda shard: asked.append(shard) if shard.upkeep.needs_mending else None)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shard.wal, "show", interrupt)
        shard.wal.rotate()
    maintenance.step()

    assert asked == [shard]
    engine.close()


def test_a_look_at_a_shard_that_was_only_opened_asks_for_no_offsets(tmp_path: Path) -> None:
    """It may be looked at to be sealed: what was reserved then stayed so after a clean stop."""
    shared = {"storage": {"mode": "shared_fs"}, "store": {"root": str(tmp_path / "store")}}
    settings = Settings.load(overrides={**shared, "wal": {"free_bytes_min": 0}})
    disk, clock = WatchedDisk(), ManualClock()
    home = SegmentHome(disk, str(tmp_path), "disk", settings=settings, clock=clock)
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    workers = SegmentWorkers(
        disk,
        clock,
        str(tmp_path),
        settings,
        collect=lambda shard: None,
        jobs=StorageJobs(clock),
        commit_soon=lambda shard: None,
        on_lost=lambda shard: None,
        relieve=lambda: None,
    )
    shard.wal.writer.note_reserved(1)  # the owner before left one offset of what it had reserved
    assert shard.wal.writer.wants_reservation and not shard.wal.writer.touched

    workers.hand_on(shard)

    begun = [thread.name for thread in threading.enumerate()]
    for worker in workers.workers:
        worker.stop()
    assert "forebay-reserving" not in begun
    engine.close()
