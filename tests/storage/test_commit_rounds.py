"""Many shards of class `fsync` that wait are committed in one round: written, synced once, published, acknowledged."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay import Ack, Indeterminate, Settings, Storage, Topic
from forebay.disk import machine
from forebay.wal.writer import Writer
from tests.storage.rig import QUICK, WatchedDisk, values, wal_of
from tests.storage.test_workers import Gate
from tests.support.waiting import PATIENCE, until

SHARDS = 6
ROTATE_BYTES = 4096


class Round:
    """A log with one committer, and topics whose appends wait until that committer takes them together."""

    def __init__(self, tmp_path: Path) -> None:
        self.disk = WatchedDisk()
        overrides = {
            "wal": {
                **QUICK["wal"],
                "sync_interval_ms": 60_000,
                "mark_interval_ms": 60_000,
                "rotate_bytes_max": ROTATE_BYTES,
            },
            "runtime": {
                "committers": 1,
                "shards_syncfs_min": SHARDS,
                "descriptors_max": 4 * SHARDS,
                "maintenance_interval_ms": 60_000,
            },
        }
        self.log = Storage.open(str(tmp_path / "log"), Settings.load(overrides=overrides), disk=self.disk)
        self.first = self.topic("first")
        self.topics = [self.topic(f"t{number}") for number in range(SHARDS)]

    def topic(self, name: str, engine: str = "segment") -> Topic:
        """A topic that was used before."""
        topic = self.log.create_topic(name, durability="fsync", engine=engine)
        topic.append(b"before")
        return topic

    @contextmanager
    def waiting(self, topics: Sequence[Topic]) -> Iterator[list[Ack]]:
        """Inside, an append waits in each of the topics, and the committer is at another; at the end it takes them."""
        gate = Gate()

        def meet(kind: str, path: str) -> None:
            if kind == "sync" and self.first.spec.topic_id in path:
                self.disk.meet = lambda kind, path: None
                gate.wait()

        self.disk.meet = meet
        at_work = self.first.append_nowait(b"first")
        with gate.reached_here():
            yield [topic.append_nowait(b"together") for topic in topics]
        assert at_work.result(PATIENCE) == 1


def test_many_that_wait_are_synced_by_one_call(tmp_path: Path) -> None:
    environment = Round(tmp_path)
    with environment.log:
        with environment.waiting(environment.topics) as acks:
            before = environment.disk.calls.copy()

        assert [ack.result(PATIENCE) for ack in acks] == [1] * SHARDS
        assert environment.disk.calls["sync_filesystem"] - before["sync_filesystem"] == 1
        assert environment.disk.calls["sync"] == before["sync"], "the sync of the first had begun before"
        for topic in environment.topics:
            assert (topic.offsets().durable, values(topic.read())) == (2, [b"before", b"together"])


def test_fewer_are_synced_one_by_one(tmp_path: Path) -> None:
    environment = Round(tmp_path)
    with environment.log:
        with environment.waiting(environment.topics[1:]) as acks:
            before = environment.disk.calls.copy()

        assert [ack.result(PATIENCE) for ack in acks] == [1] * (SHARDS - 1)
        assert environment.disk.calls["sync_filesystem"] == before["sync_filesystem"]
        assert environment.disk.calls["sync"] - before["sync"] == SHARDS - 1


def test_until_the_sync_has_returned_no_reader_sees_the_records_and_a_flush_waits(tmp_path: Path) -> None:
    environment = Round(tmp_path)
    with environment.log:
        gate, flushed = Gate(), threading.Event()
        topic = environment.topics[2]

        def flush() -> None:
            topic.flush()
            flushed.set()

        with environment.waiting(environment.topics) as acks:
            environment.disk.meet = lambda kind, path: gate.wait() if kind == "sync_filesystem" else None
        flushing = threading.Thread(target=flush)
        with gate.reached_here():
            flushing.start()
            assert [wal_of(topic).head for topic in environment.topics] == [1] * SHARDS
            assert not any(ack.done for ack in acks)
            assert values(topic.read()) == [b"before"]
            assert not flushed.is_set()
        flushing.join(PATIENCE)
        assert flushed.is_set()
        assert [ack.result(PATIENCE) for ack in acks] == [1] * SHARDS


def test_a_sync_of_all_that_fails_leaves_each_append_undecided_and_every_log_recovers(tmp_path: Path) -> None:
    environment = Round(tmp_path)
    left = [OSError(errno.EIO, "a page was not written")]

    def fail(kind: str, path: str) -> None:
        if kind == "sync_filesystem" and left:
            raise left.pop()

    with environment.log:
        with environment.waiting(environment.topics) as acks:
            environment.disk.meet = fail
        for ack in acks:
            with pytest.raises(Indeterminate, match="a page was not written"):
                ack.result(PATIENCE)
        for topic in environment.topics:
            wal_of(topic).heal()
            assert topic.append(b"after") == 1
            assert values(topic.read()) == [b"before", b"after"]


@pytest.mark.parametrize("is_one_of_them", [False, True])
def test_a_file_that_failed_before_fails_no_log_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_one_of_them: bool
) -> None:
    """A log that cannot recover keeps its failed file open: no round of the others succeeded any more."""
    environment = Round(tmp_path)
    with environment.log:
        active = wal_of(environment.topics[0]).writer.active
        assert active is not None
        failed = active.file if is_one_of_them else environment.disk.create(f"{tmp_path}/another")
        failed.write_at(b"lost", 0 if failed is not active.file else active.position)
        with monkeypatch.context() as patch:
            patch.setattr(machine, "flush_filesystem", _lose)
            with pytest.raises(OSError, match="write-back failed"):
                environment.disk.sync_filesystem(str(tmp_path))
        with environment.waiting(environment.topics) as acks:
            pass

        assert [ack.result(PATIENCE) for ack in acks[1:]] == [1] * (SHARDS - 1)
        if is_one_of_them:
            with pytest.raises(Indeterminate, match="earlier sync of this file has failed"):
                acks[0].result(PATIENCE)
        else:
            assert acks[0].result(PATIENCE) == 1


def _lose(fd: int) -> bool:
    raise OSError(errno.EIO, "write-back failed")


def test_an_owner_whose_lease_ends_during_the_sync_acknowledges_nothing(tmp_path: Path) -> None:
    environment = Round(tmp_path)
    lost, *others = environment.topics

    def end_lease(kind: str, path: str) -> None:
        if kind == "sync_filesystem":
            wal_of(lost).still_owner = lambda: False

    with environment.log:
        with environment.waiting(environment.topics) as acks:
            environment.disk.meet = end_lease
        with pytest.raises(Indeterminate, match="lease ended"):
            acks[0].result(PATIENCE)
        assert [ack.result(PATIENCE) for ack in acks[1:]] == [1] * len(others)
        assert wal_of(lost).head == 1


@pytest.mark.parametrize("kind", ["in use", "new file"])
def test_what_would_have_to_wait_takes_no_part_and_holds_up_no_other(tmp_path: Path, kind: str) -> None:
    environment = Round(tmp_path)
    with environment.log:
        slow, *others = environment.topics
        gate = Gate()
        if kind == "new file":
            slow.append(bytes(ROTATE_BYTES))
        else:
            threading.Thread(target=_hold, args=(slow, gate)).start()
            assert gate.reached.wait(PATIENCE)
        expected = slow.offsets().next
        with environment.waiting(environment.topics) as acks:
            environment.disk.meet = lambda kind, path: gate.wait() if kind == "create" and ".seg" in path else None
        with gate.reached_here():
            assert [ack.result(PATIENCE) for ack in acks[1:]] == [1] * len(others)
            assert not acks[0].done

        assert acks[0].result(PATIENCE) == expected


def _hold(topic: Topic, gate: Gate) -> None:
    with wal_of(topic).committing:
        gate.wait()


def test_a_shard_that_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    environment = Round(tmp_path)
    full, *others = environment.topics

    def refuse(kind: str, path: str) -> None:
        if kind == "write" and full.spec.topic_id in path and ".seg" in path:
            raise OSError(errno.ENOSPC, "No space left on device")

    with environment.log:
        with environment.waiting(environment.topics) as acks:
            environment.disk.meet = refuse
        assert [ack.result(PATIENCE) for ack in acks[1:]] == [1] * len(others)
        with pytest.raises(Indeterminate, match="No space left"):
            acks[0].result(PATIENCE)
        environment.disk.meet = lambda kind, path: None


def test_a_shard_of_another_engine_is_committed_by_itself(tmp_path: Path) -> None:
    environment = Round(tmp_path)
    with environment.log:
        rocks = environment.topic("rocks", engine="rocksdb")
        with environment.waiting([rocks, *environment.topics]) as acks:
            before = environment.disk.calls["sync_filesystem"]

        assert [ack.result(PATIENCE) for ack in acks] == [1] * (SHARDS + 1)
        assert environment.disk.calls["sync_filesystem"] - before == 1


def test_a_shard_in_a_file_system_that_is_mounted_below_is_synced_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Round(tmp_path)
    with environment.log:
        elsewhere, identity = wal_of(environment.topics[0]).writer, vars(Writer)["identity"].fget
        monkeypatch.setattr(
            Writer,
            "identity",
            property(lambda writer: "another mount" if writer is elsewhere else identity(writer)),
        )
        with environment.waiting(environment.topics) as acks:
            before = environment.disk.calls.copy()

        assert [ack.result(PATIENCE) for ack in acks] == [1] * SHARDS
        assert environment.disk.calls["sync"] - before["sync"] == 1
        assert environment.disk.calls["sync_filesystem"] - before["sync_filesystem"] == 1


def test_callbacks_of_a_round_run_when_no_log_of_it_is_held(tmp_path: Path) -> None:
    environment = Round(tmp_path)
    with environment.log:
        heard: list[int] = []
        with environment.waiting(environment.topics) as acks:
            for ack in acks:
                ack.add_callback(lambda _: heard.extend(topic.append(b"by a callback") for topic in environment.topics))

        until(lambda: len(heard) == SHARDS * SHARDS)
        assert sorted(heard) == sorted(list(range(2, 2 + SHARDS)) * SHARDS)
