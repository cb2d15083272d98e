"""The thread that makes history: one shard's trouble is its own, and leaving one alone waits for that one only."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from forebay import DataLoss, Fenced, Moved, Unavailable
from forebay.blobs.directory import UPLOADS
from forebay.cleanup.deleted_topics import Deletions
from forebay.cleanup.objects import ObjectCleanup
from forebay.format.metadata.descriptor import ShardState
from forebay.format.metadata.value import decode_value, encode_value
from forebay.loads.service import Loads
from forebay.metadata import Put
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.shard.history import ShardHistory
from forebay.storage import Storage, Topic
from forebay.storage.background.history import FIRST_SWEEP_SECONDS
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import TopicName, TopicSpec
from forebay.workers import AtWork
from tests.storage.rig import QUICK, WatchedDisk
from tests.support.waiting import PATIENCE, until


def _settings(tmp_path: Path, **groups: object) -> Settings:
    return Settings.load(
        overrides={
            **QUICK,
            "storage": {"mode": "shared_fs"},
            "store": {"root": f"{tmp_path}/store"},
            "export": {"at_close_seconds_max": 0},
            **groups,
        }
    )


def _shard(topic: Topic) -> SegmentShard:
    return inside(topic).segment(0)


def _with_sealed_file(log: Storage, name: str) -> SegmentShard:
    topic = log.create_topic(name)
    topic.append(b"0")
    topic.rotate()
    shard = _shard(topic)
    shard.upkeep.seal_rotated()
    return shard


def _flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def _segments(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("log/shards/*/*.seg"))


def test_a_damaged_index_does_not_keep_other_shards_from_history(tmp_path: Path) -> None:
    with Storage.open(tmp_path / "log", _settings(tmp_path)) as log:
        worker = inside(log).workers.history.take_over()
        bad, good = _with_sealed_file(log, "bad"), _with_sealed_file(log, "good")
        (index,) = Path(bad.wal.writer.place.directory).glob("*.idx")
        _flip(index, -1)
        worker.notice(bad)
        worker.notice(good)

        worker.step()

        assert (bad.history.exported, good.history.exported) == (0, 1)
        assert bad.history.errors == 1


def test_a_file_that_cannot_be_sealed_before_sealed_ones_is_no_reason_to_go_round_and_round(tmp_path: Path) -> None:
    """Found by review: the thread stepped 30,000 times a second, and no caller could make it leave a shard alone."""
    settings = _settings(tmp_path)
    with Storage.open(tmp_path / "log", settings) as log:
        inside(log).workers.history.take_over()
        topic = log.create_topic("orders")
        for number in range(3):
            topic.append(b"%d" % number * 100)
            topic.rotate()
            _shard(topic).upkeep.seal_rotated()
    damaged = _segments(tmp_path)[1]
    damaged.with_suffix(".idx").unlink()
    _flip(damaged, -40)

    with Storage.open(tmp_path / "log", settings) as log:
        worker = inside(log).workers.history.take_over()
        shard = _shard(log.topic("orders"))
        worker.notice(shard)
        worker.step()

        assert shard.history.exported == 1
        with pytest.raises(DataLoss, match=r"offsets \[1, 2\)"):
            log.export_topic("orders")
        assert shard.wal.fenced is None


def test_leaving_a_shard_alone_does_not_wait_for_the_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Storage.open(tmp_path / "log", _settings(tmp_path)) as log:
        worker = inside(log).workers.history.take_over()
        slow, quick = _with_sealed_file(log, "slow"), _with_sealed_file(log, "quick")
        begun, waiting, go_on = threading.Event(), threading.Event(), threading.Event()
        order: list[str] = []
        step, wait_idle = ShardHistory.step, AtWork.wait_idle

        def stepped(history: ShardHistory) -> bool:
            if history is slow.history and not begun.is_set():
                begun.set()
                assert go_on.wait(PATIENCE)
                more = step(history)
                order.append("exported")
                return more
            return step(history)

        def waited(at_work: AtWork, key: str) -> None:
            if key == slow.ref.id:
                waiting.set()
            wait_idle(at_work, key)

        def leave() -> None:
            worker.forget(slow)
            order.append("left")

        monkeypatch.setattr(ShardHistory, "step", stepped)
        monkeypatch.setattr(AtWork, "wait_idle", waited)
        worker.notice(slow)
        thread = threading.Thread(target=worker.step)
        thread.start()
        assert begun.wait(PATIENCE)

        log.delete_topic("quick")
        assert not go_on.is_set()
        leaving = threading.Thread(target=leave)
        leaving.start()
        assert waiting.wait(PATIENCE)
        go_on.set()
        leaving.join(PATIENCE)
        thread.join(PATIENCE)

        assert order == ["exported", "left"]
        assert slow.history.exported == 1
        assert quick.history.exported == 0


def test_a_file_sealed_while_the_one_before_is_exported_is_not_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Storage.open(tmp_path / "log", _settings(tmp_path)) as log:
        worker = inside(log).workers.history.take_over()
        shard = _with_sealed_file(log, "orders")
        topic = log.topic("orders")
        is_behind = vars(ShardHistory)["is_behind"].fget

        def looked(history: ShardHistory) -> bool:
            found = bool(is_behind(history))
            if not found and topic.offsets().next == 1:
                # Right behind the look that found nothing.
                topic.append(b"1")
                topic.rotate()
                shard.upkeep.seal_rotated()
                worker.notice(shard)
            return found

        worker.notice(shard)
        monkeypatch.setattr(ShardHistory, "is_behind", property(looked))
        worker.step()

        assert worker.is_asked(shard) or shard.history.exported == 2


def test_what_time_asks_for_does_not_wait_until_everything_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a store was away for long there is much to export: local files must go meanwhile."""
    clock = ManualClock()
    retention = {"check_interval_s": 10, "time_s": 0, "bytes_max": 0, "grace_s": 0}
    with Storage.open(tmp_path / "log", _settings(tmp_path, retention=retention), clock=clock) as log:
        worker = inside(log).workers.history.take_over()
        shard = _with_sealed_file(log, "orders")
        for _ in range(3):
            log.topic("orders").append(b"1")
            log.topic("orders").rotate()
            shard.upkeep.seal_rotated()
        step, seen = ShardHistory.step, list[tuple[int, int | None]]()

        def slow(history: ShardHistory) -> bool:
            clock.advance(20)
            seen.append((shard.history.exported, shard.wal.files.begins))
            return step(history)

        monkeypatch.setattr(ShardHistory, "step", slow)
        worker.notice(shard)

        worker.step()

        assert {1, 2, 3} <= {exported for exported, _ in seen}
        assert any(begins and exported < 4 for exported, begins in seen), "a file went before all were exported"
        assert shard.history.exported == 4


def test_what_killed_uploads_left_is_cleared_from_every_store_though_another_sweep_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mode local too: bulk loads and compactions put what they make into the data directory."""

    def failing(deletions: Deletions) -> None:
        raise Unavailable("the store is away")

    monkeypatch.setattr(Deletions, "sweep_late", failing)
    clock = ManualClock()
    with Storage.open(tmp_path / "log", _settings(tmp_path), clock=clock) as log:
        worker = inside(log).workers.cleanup.take_over()
        left = [tmp_path / "store" / UPLOADS / "old.tmp", tmp_path / "log" / "loads" / UPLOADS / "old.tmp"]
        for path in left:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"half of it")
            os.utime(path, (0, 0))

        worker.step()
        assert all(path.exists() for path in left)
        clock.advance(3_600)
        worker.step()

        assert not any(path.exists() for path in left)


def test_a_file_of_one_shard_is_exported_and_then_a_file_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Storage.open(tmp_path / "log", _settings(tmp_path)) as log:
        worker = inside(log).workers.history.take_over()
        shards = [_with_sealed_file(log, name) for name in ("a", "b")]
        for shard in shards:
            for _ in range(2):
                log.topic(str(shard.ref.spec.name)).append(b"1")
                log.topic(str(shard.ref.spec.name)).rotate()
                shard.upkeep.seal_rotated()
            worker.notice(shard)
        step, seen = ShardHistory.step, list[list[int]]()

        def stepped(history: ShardHistory) -> bool:
            more = step(history)
            seen.append([shard.history.exported for shard in shards])
            return more

        monkeypatch.setattr(ShardHistory, "step", stepped)

        worker.step()

        assert seen == [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]


def test_files_are_exported_at_the_start_by_interval_and_by_size(tmp_path: Path) -> None:
    export = {"at_close_seconds_max": 0, "interval_s": 300, "bytes_min": 1_000}
    clock = ManualClock()
    with Storage.open(tmp_path / "log", _settings(tmp_path, export=export), clock=clock) as log:
        worker = inside(log).workers.history.take_over()
        shard = _with_sealed_file(log, "orders")

        def exported(value: bytes = b"", seconds: float = 0) -> int:
            if value:
                log.topic("orders").append(value)
                log.topic("orders").rotate()
                shard.upkeep.seal_rotated()
            clock.advance(seconds)
            worker.notice(shard)
            worker.step()
            return shard.history.exported

        assert exported() == 1, "the first pass is due at once"
        assert exported(b"small") == 1
        assert exported(seconds=299) == 1
        assert exported(seconds=1) == 2, "by the interval"
        assert exported(b"small") == 2
        assert exported(b"large" * 200) == 4, "by size"


def test_whichever_caller_learns_by_an_export_that_it_was_overtaken_stops(tmp_path: Path) -> None:
    with Storage.open(tmp_path / "log", _settings(tmp_path)) as log:
        worker = inside(log).workers.history.take_over()
        shard = _with_sealed_file(log, "orders")
        key = shard.history.catalog.keys.state
        entry = inside(log).metadata.get(key)
        assert entry is not None
        state = decode_value(entry.value, ShardState)[0]
        with closing(inside(log).metadata.session(30)) as other:
            overtaken = msgspec.structs.replace(state, epoch=state.epoch + 1, owner=other.id, holder="elsewhere")
            inside(log).metadata.transaction([], [Put(key, encode_value(overtaken))])

            worker.notice(shard)
            worker.step()

            assert shard.history.exported == 0
            assert "epoch" in (shard.wal.fenced or "")
            # Of the shard that was stopped, or by the caller that opens it again: it may be dropped meanwhile.
            with pytest.raises((Fenced, Moved)):
                log.topic("orders").append(b"1")


def test_of_many_shards_that_are_to_be_swept_the_rest_comes_after_the_next_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, swept = ManualClock(), list[SegmentShard]()

    def slow(cleanup: ObjectCleanup, shard: SegmentShard) -> list[str]:
        clock.advance(2)
        swept.append(shard)
        return []

    monkeypatch.setattr(ObjectCleanup, "collect_owned", slow)
    with Storage.open(tmp_path / "log", _settings(tmp_path), clock=clock) as log:
        worker = inside(log).workers.history.take_over()
        shards = [_with_sealed_file(log, name) for name in ("a", "b", "c")]
        clock.advance(60)
        for count in (1, 2, 3, 3):
            worker.step()
            assert swept == shards[:count]


@pytest.mark.parametrize("look_s", [1, 300])
def test_a_damaged_file_is_not_uploaded_again_and_again(look_s: int, tmp_path: Path) -> None:
    """Though the same shard is looked after otherwise meanwhile, with success."""
    clock = ManualClock()
    settings = _settings(tmp_path, retention={"check_interval_s": look_s})
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        worker = inside(log).workers.history.take_over()
        shard = _with_sealed_file(log, "orders")
        (segment,) = Path(shard.wal.writer.place.directory).glob("*.idx")
        _flip(segment.with_suffix(".seg"), -1)
        worker.notice(shard)

        for errors, seconds in ((1, 0), (1, 60), (1, 60), (2, 300)):
            clock.advance(seconds)
            worker.step()
            assert shard.history.errors == errors
        assert "is not what was sealed" in (shard.history.error or "")


def test_a_part_of_the_clean_up_that_fails_unforeseen_keeps_no_other_part_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(loads: Loads) -> None:
        raise ZeroDivisionError

    clock, swept = ManualClock(), list[str]()
    monkeypatch.setattr(Loads, "step", failing)
    monkeypatch.setattr(Deletions, "sweep_late", lambda _: swept.append("late"))
    with Storage.open(tmp_path / "log", _settings(tmp_path), clock=clock) as log:
        worker = inside(log).workers.cleanup.take_over()
        clock.advance(FIRST_SWEEP_SECONDS)

        worker.step()

        assert swept == ["late"]
        (status,) = (status for status in log.workers() if status.name == "forebay-cleanup")
        assert status.error == "ZeroDivisionError: "


def test_a_deletion_that_could_not_be_finished_is_finished_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the next creation, deletion or opening went on with it. While it fails, it is tried less and less often."""
    clock, disk = ManualClock(), WatchedDisk()
    with Storage.open(tmp_path / "log", _settings(tmp_path), clock=clock, disk=disk) as log:
        worker, tried = inside(log).workers.cleanup.take_over(), list[float]()
        topic = log.create_topic("t")
        topic.append(b"v")

        def refuse(kind: str, path: str) -> None:
            if topic.spec.topic_id in path and kind in ("unlink", "rename", "remove_directory"):
                raise OSError(errno.EROFS, "read-only", path)

        disk.meet = refuse
        log.delete_topic("t")
        finish = Deletions.finish

        def noted(deletions: Deletions) -> list[TopicSpec]:
            tried.append(clock.monotonic())
            return finish(deletions)

        monkeypatch.setattr(Deletions, "finish", noted)

        for _ in range(20):
            clock.advance(1)
            worker.step()
        assert [round(after - before) for before, after in pairwise(tried)] == [2, 4, 8]
        disk.meet = lambda kind, path: None
        clock.advance(20)
        worker.step()

        assert inside(log).deletions.notes.deleting() == []
        assert not any(topic.spec.topic_id in path.name for path in (tmp_path / "log" / "shards").iterdir())
        tried.clear()
        clock.advance(60)
        worker.step()
        assert tried == [], "with nothing left it is looked for now and then only"


def test_a_deletion_that_a_dead_process_has_begun_is_finished_by_one_that_lives(tmp_path: Path) -> None:
    clock = ManualClock()
    with Storage.open(tmp_path / "log", _settings(tmp_path), clock=clock) as log:
        worker = inside(log).workers.cleanup.take_over()
        log.create_topic("t").append(b"v")
        inside(log).definitions.begin_deletion(TopicName.parse("t"))

        def is_finished() -> bool:
            # More than once: the worker of history may just be at the shard.
            clock.advance(log.settings.retention.check_interval_s)
            worker.step()
            return inside(log).deletions.notes.deleting() == []

        until(is_finished)
        assert inside(log).shards() == []


def test_a_failure_that_no_caller_foresaw_is_one_shard_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Storage.open(tmp_path / "log", _settings(tmp_path)) as log:
        worker = inside(log).workers.history.take_over()
        bad, good = _with_sealed_file(log, "bad"), _with_sealed_file(log, "good")
        step = ShardHistory.step

        def failing(history: ShardHistory) -> bool:
            if history is bad.history:
                raise RuntimeError("not foreseen")
            return step(history)

        monkeypatch.setattr(ShardHistory, "step", failing)
        worker.notice(bad)
        worker.notice(good)

        worker.step()

        assert (bad.history.exported, good.history.exported) == (0, 1)


def test_a_process_that_never_lives_for_an_interval_sweeps_too(tmp_path: Path) -> None:
    clock, settings = ManualClock(), _settings(tmp_path)
    assert settings.export.sweep_interval_s == 86_400
    with Storage.open(tmp_path / "log", settings, clock=clock) as log:
        worker = inside(log).workers.history.take_over()
        shard = _with_sealed_file(log, "orders")
        orphan = tmp_path / "store" / shard.ref.id / f"0-{'0' * 32}.seg"
        orphan.parent.mkdir()
        orphan.write_bytes(b"left behind")
        os.utime(orphan, (0, 0))

        worker.notice(shard)
        worker.step()
        assert orphan.exists()
        clock.advance(3_600)
        worker.step()

        assert not orphan.exists()
        assert shard.history.exported == 1
