"""The threads of a log beside each other: no work of one shard delays the sync of another, and no failure ends one."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import forebay.wal.log
from forebay import Ack, Settings, Storage, Topic
from forebay.clock import SystemClock
from forebay.records import Gap
from forebay.settings import MetadataSettings, StorageSettings, StoreSettings
from forebay.shard import SegmentShard
from forebay.storage.background.seal import SealWorker
from forebay.testing.inside import InsideSeal, inside
from forebay.wal.files import LogFile
from forebay.wal.recovery.heal import rebuild
from forebay.wal.sealing import Sealer
from forebay.workers import AtWork
from tests.storage.rig import WatchedDisk, quick, wal_of
from tests.storage.test_upkeep import _entry, stepped
from tests.support.waiting import PATIENCE, until


class Gate:
    """A place in the middle of some work, where it stays until it is let through."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        # Longer than the test waits for what it says goes on meanwhile.
        assert self._open.wait(2 * PATIENCE)

    @contextmanager
    def reached_here(self) -> Iterator[None]:
        """Inside, the work stands at the gate."""
        try:
            assert self.reached.wait(PATIENCE)
            yield
        finally:
            self._open.set()

    def open(self) -> None:
        self._open.set()


@contextmanager
def running(work: Callable[[], object]) -> Iterator[None]:
    """Beside what is inside; it must come to its end."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def shared(tmp_path: Path) -> Settings:
    found = quick()
    return Settings(
        wal=found.wal,
        runtime=found.runtime,
        metadata=MetadataSettings(path=f"{tmp_path}/shared.sqlite"),
        storage=StorageSettings(mode="shared_fs"),
        store=StoreSettings(root=f"{tmp_path}/store"),
    )


def slow_seal(monkeypatch: pytest.MonkeyPatch, topic: Topic) -> Gate:
    """Sealing a file of this topic stops at the gate."""
    gate, seal = Gate(), Sealer.seal

    def slowly(sealer: Sealer, log: LogFile, may_lack: Callable[[Gap], bool]) -> object:
        if topic.spec.topic_id in log.path:
            gate.wait()
        return seal(sealer, log, may_lack)

    monkeypatch.setattr(Sealer, "seal", slowly)
    return gate


def synced(topic: Topic) -> None:
    """An append is durable after a while, without being asked for."""
    end = topic.append(b"v") + 1
    until(lambda: topic.offsets().durable >= end)


def unsealed(topic: Topic) -> list[LogFile]:
    shard = inside(topic).segment(0)
    return shard.upkeep.rotated()


def test_a_seal_that_takes_long_delays_no_sync_and_no_deletion_of_another_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Storage.open(tmp_path / "log", quick()) as log:
        a, b, _ = (log.create_topic(name) for name in "abc")
        gate = slow_seal(monkeypatch, a)
        a.append(b"v")
        a.rotate()
        with gate.reached_here():
            synced(b)
            synced(a)
            log.delete_topic("c")
            assert unsealed(a)

        until(lambda: not unsealed(a))


@pytest.mark.slow
def test_what_is_sealed_after_a_while_is_exported_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Storage.open(tmp_path / "log", shared(tmp_path)) as log:
        topic = log.create_topic("a")
        gate = slow_seal(monkeypatch, topic)
        topic.append(b"v")
        topic.rotate()
        with gate.reached_here():
            assert topic.offsets().exported == 0

        until(lambda: topic.offsets().exported == 1)


@pytest.mark.parametrize("ending", ["close", "delete"])
def test_whichever_caller_ends_a_topic_waits_for_the_seal_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    with Storage.open(tmp_path / "log", quick()) as log:
        topic = log.create_topic("a")
        gate = slow_seal(monkeypatch, topic)
        topic.append(b"v")
        topic.rotate()
        assert gate.reached.wait(PATIENCE)
        end = log.close if ending == "close" else lambda: log.delete_topic("a")
        with running(end):
            until(lambda: inside(log).is_ended if ending == "close" else not log.topics())
            gate.open()
    with Storage.open(tmp_path / "log", quick()) as log:
        assert len(log.topics()) == (ending == "close")
        assert len(list(tmp_path.glob("log/shards/*/*.idx"))) == (ending == "close")


def test_the_healing_of_a_log_delays_no_sync_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, disk = Gate(), WatchedDisk()

    def slowly(*args: object) -> object:
        gate.wait()
        return rebuild(*args)  # type: ignore[arg-type]

    with Storage.open(str(tmp_path / "log"), quick(), disk=disk) as log:
        a, b = log.create_topic("a"), log.create_topic("b")
        a.append(b"v")

        def refuse(kind: str, path: str) -> None:
            if kind == "sync" and a.spec.topic_id in path and path.endswith(".seg"):
                raise OSError(errno.EIO, "input/output error", path)

        monkeypatch.setattr(forebay.wal.log, "rebuild", slowly)
        disk.meet = refuse
        a.append(b"v")
        with gate.reached_here():
            disk.meet = lambda kind, path: None
            synced(b)

        until(lambda: a.failure() is None)
        synced(a)


@pytest.mark.slow
def test_a_log_that_does_not_heal_keeps_no_other_from_being_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed log went first each time, and it was asked for again before each attempt to heal it had ended."""
    disk, is_broken = WatchedDisk(), [True]
    with Storage.open(str(tmp_path / "log"), quick(), disk=disk) as log:
        a, b = log.create_topic("a"), log.create_topic("b")
        a.append(b"v")
        broken, sealing = wal_of(a), inside(log).workers.sealing

        def fails(*args: object) -> object:
            if is_broken and args[0] is broken.writer:
                until(lambda: sealing.is_asked(inside(a).segment()) or not is_broken)
                raise OSError(errno.EIO, "input/output error")
            return rebuild(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(forebay.wal.log, "rebuild", fails)
        broken.fail_file(broken.writer.active, OSError(errno.EIO, "input/output error"))  # type: ignore[arg-type]
        b.append(b"v")
        b.rotate()

        until(lambda: not unsealed(b))
        assert a.failure() is not None
        is_broken.clear()
        until(lambda: a.failure() is None)


def test_sealing_looks_at_few_shards_for_each_turn_however_many_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn looked at every shard that waited: where 10,000 files reach their age together, that took minutes."""
    partitions, looks, is_free = 40, [0], AtWork.is_free

    def counted(at_work: AtWork, key: str) -> bool:
        looks[0] += 1
        return is_free(at_work, key)

    with Storage.open(tmp_path / "log", quick()) as log:
        topic = log.create_topic("a", partitions=partitions)
        log.recover()
        shards = [inside(topic).segment(partition) for partition in range(partitions)]
        sealing = SealWorker(SystemClock(), lambda shard: None)
        sealing.worker.halt()
        for shard in shards:
            sealing.ask(shard)
        monkeypatch.setattr(AtWork, "is_free", counted)

        sealing.step()

        assert not any(map(InsideSeal(sealing).is_asked, shards))
        assert looks[0] <= 4 * partitions


def test_a_callback_that_takes_long_delays_no_sync(tmp_path: Path) -> None:
    """Class `memory` is written by the thread that syncs, if no other thread comes first."""
    gate = Gate()
    with Storage.open(tmp_path / "log", quick()) as log:
        a, b = log.create_topic("a", durability="memory"), log.create_topic("b")
        inside(a).leave_queued()
        a.append_nowait(b"v").add_callback(lambda _: gate.wait())
        with gate.reached_here():
            synced(b)


def test_a_lost_shard_that_an_export_holds_delays_neither_syncs_nor_the_giving_up_of_another(tmp_path: Path) -> None:
    gate = Gate()
    with Storage.open(tmp_path / "log", shared(tmp_path)) as log:
        a, b, c = (log.create_topic(name) for name in "abc")
        for topic in (a, b, c):
            topic.append(b"v")
        worker, shard = inside(log).workers.history, inside(a).segment()
        lost = [wal_of(a), wal_of(c)]
        with running(lambda: worker.alone_with(shard, lambda _: gate.wait())), gate.reached_here():
            for wal in lost:
                wal.fence("another directory has it")
            synced(b)
            until(lambda: lost[1].closed)
            assert not lost[0].closed

        until(lambda: lost[0].closed)
        for topic in (a, b, c):
            synced(topic)


def failing(kind: str, error: BaseException) -> Callable[[str, str], None]:
    """For `WatchedDisk.meet`: the next call of this kind raises."""
    left = [error]

    def meet(met: str, path: str) -> None:
        if met == kind and left:
            raise left.pop()

    return meet


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit(1)])
def test_a_round_of_syncs_that_raises_is_logged_and_the_next_ones_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    disk = WatchedDisk()
    settings = Settings.load(
        overrides={
            "wal": {"sync_interval_ms": 20, "free_bytes_min": 0},
            "runtime": {"shards_syncfs_min": 2, "maintenance_interval_ms": 5},
        }
    )
    with Storage.open(str(tmp_path / "log"), settings, disk=disk) as log:
        topics = [log.create_topic(f"t{number}") for number in range(3)]
        for topic in topics:
            topic.append(b"v")
        until(lambda: all(topic.offsets().durable == 1 for topic in topics))
        disk.meet = failing("sync_filesystem", error)
        for topic in topics:
            topic.append(b"v")

        until(lambda: all(topic.failure() is None and topic.offsets().durable == 2 for topic in topics))
        for topic in topics:
            until(lambda topic=topic: not wal_of(topic).writer.syncing)  # type: ignore[misc]
            topic.rotate()
            synced(topic)
    assert "forebay-sync failed, and goes on" in caplog.text


def test_a_shard_that_cannot_be_looked_after_does_not_end_the_syncs_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was taken off the list before it was asked whether it has work: nothing put it back."""
    maintenance, home, clock = stepped(tmp_path, "disk", quick())
    engine = home.open().engine
    shards = [engine.open_shard(home.ref(partition)) for partition in (0, 1)]
    for shard in shards:
        maintenance.watch(shard)
        shard.acknowledge(shard.stage_one(_entry(), 17))
    failures = [RuntimeError("a bug"), RuntimeError("a bug")]

    def kept(shard: SegmentShard) -> None:
        if failures:
            raise failures.pop()

    maintenance.replace_follow_up(kept)
    for _ in range(3):
        clock.advance(2)
        maintenance.step()

    assert [shard.offsets().durable for shard in shards] == [1, 1]
    assert "upkeep failed and will be tried again" in caplog.text
    engine.close()


def test_a_shard_given_up_while_ages_are_looked_at_does_not_come_back(tmp_path: Path) -> None:
    maintenance, home, clock = stepped(tmp_path, "disk", quick(rotate_seconds_max=60, rotate_bytes_min=0))
    engine = home.open().engine
    shard = engine.open_shard(home.ref())
    shard.acknowledge(shard.stage_one(_entry(), 17))
    maintenance.watch(shard)
    found = shard.upkeep

    class Upkeep:
        """The shard's upkeep; the shard is given up in the middle of a look at it."""

        def __getattr__(self, name: str) -> object:
            return getattr(found, name)

        @property
        def is_old(self) -> bool:
            with running(lambda: maintenance.forget(shard)):
                pass
            return True

    shard.upkeep = Upkeep()  # type: ignore[assignment]
    clock.advance(61)
    maintenance.look_at_ages()
    assert not maintenance.is_asked(shard)

    maintenance.wake(shard)
    assert not maintenance.is_asked(shard)
    shard.upkeep = found
    engine.close()


def test_a_callback_that_ends_its_thread_does_not_end_the_thread_that_commits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(_: Ack) -> None:
        raise SystemExit(1)

    with Storage.open(tmp_path / "log", quick()) as log:
        topic, other = log.create_topic("a"), log.create_topic("b")
        with wal_of(topic).committing:
            topic.append_nowait(b"v").add_callback(leave)
        until(lambda: "committer failed" in caplog.text)

        assert other.append_nowait(b"v").result(PATIENCE) == 0
        assert topic.append_nowait(b"v").result(PATIENCE) == 1
