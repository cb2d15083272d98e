"""Topics on the RocksDB engine, through the storage: beside other engines, across lives, forks and refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import forebay
from forebay.engines import RocksShard
from forebay.errors import Closed, Conflict, Indeterminate, Unavailable, Unsupported
from forebay.records import Record
from forebay.shard.deletes import DeleteKey
from forebay.testing.inside import inside
from tests.support.waiting import PATIENCE, until


def values(records: object) -> list[bytes | None]:
    """The values of a stream."""
    return [record.value for record in records if isinstance(record, Record)]  # type: ignore[attr-defined]


def test_topics_on_three_engines_live_in_one_log(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log") as log:
        topics = [
            log.create_topic("rocks", engine="rocksdb", durability="fsync", partitions=2),
            log.create_topic("files", engine="segment"),
            log.create_topic("memory", engine="memory"),
        ]
        for topic in topics:
            for number in range(20):
                topic.append(b"%d" % number, key=b"k%d" % (number % 4), tag="t")
        for topic in topics:
            assert sorted(values(topic.read()), key=lambda value: int(value or b"")) == [b"%d" % n for n in range(20)]

    with forebay.open(tmp_path / "log") as log:
        assert len(values(log.topic("rocks").read())) == 20
        assert log.topic("rocks").recovery().clean
        assert log.topic("rocks").append_many([b"x"] * 1_000, partition=1)[-1] >= 1_000
        log.delete_topic("rocks")
        assert [spec.topic for spec in log.topics()] == ["files", "memory"]
        again = log.create_topic("rocks", engine="rocksdb")
        assert values(again.read()) == []


def test_no_database_is_made_before_a_topic_needs_it(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log") as log:
        log.create_topic("files").append(b"v")
        assert not (tmp_path / "log" / "rocksdb").exists()
        log.create_topic("rocks", engine="rocksdb").append(b"v")
        assert (tmp_path / "log" / "rocksdb").exists()


def test_a_process_beside_the_owner_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log") as log:
        log.create_topic("rocks", engine="rocksdb").append(b"v")
        log.create_topic("files").append(b"v")
        with forebay.open(tmp_path / "log", read_only=True) as beside:
            assert values(beside.topic("files").read()) == [b"v"]
            with pytest.raises(Unsupported, match='only the process that owns.*engine "segment"'):
                beside.topic("rocks")


def test_history_and_moves_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log") as log:
        topic = log.create_topic("rocks", engine="rocksdb")
        topic.append(b"v")
        for act in (log.seal_topic, log.export_topic, log.unseal_topic):
            with pytest.raises(Unsupported, match='rocksdb engine: only topics on engine "segment"'):
                act("rocks")
        topic.append(b"w")
        assert values(topic.read()) == [b"v", b"w"]
    with pytest.raises(Unsupported, match="everything in memory"), forebay.open(":memory:") as log:
        log.create_topic("rocks", engine="rocksdb")


def test_following_waits_for_what_comes(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log") as log:
        topic = log.create_topic("rocks", engine="rocksdb")
        found: list[bytes | None] = []
        stop = threading.Event()

        def follow() -> None:
            for record in topic.follow(forebay.EARLIEST, stop=stop):
                found.append(record.value)
                if len(found) == 50:
                    stop.set()

        follower = threading.Thread(target=follow)
        follower.start()
        acks = [topic.append_nowait(b"%d" % number) for number in range(50)]
        assert [ack.result(PATIENCE) for ack in acks] == list(range(50))
        follower.join(PATIENCE)
        assert found == [b"%d" % number for number in range(50)]


def test_a_forked_child_is_refused_and_ends(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log") as log:
        topic = log.create_topic("rocks", engine="rocksdb")
        topic.append(b"v")
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                topic.append(b"child")
            except Closed as error:
                os.write(writing, str(error).encode())
            os._exit(0)
        os.close(writing)
        assert os.waitpid(child, 0)[1] == 0
        assert b"before a fork" in os.read(reading, 1_000)
        os.close(reading)
        topic.append(b"w")
        assert values(topic.read()) == [b"v", b"w"]


@pytest.mark.slow
def test_a_forked_child_that_ends_as_programs_do_does_not_hang(tmp_path: Path) -> None:
    """RocksDB's threads are not in the child: whoever ended the database there waited for them for ever."""
    program = f"""
import os, sys
import forebay
log = forebay.open({str(tmp_path / "log")!r})
topic = log.create_topic("rocks", engine="rocksdb")
topic.append(b"v")
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
topic.append(b"w")
print([record.value for record in topic.read()])
log.close()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[b'v', b'w']", 0), done.stderr


@pytest.mark.plain_locks
def test_a_signal_inside_a_write_may_not_append_and_wait_nor_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler runs in the thread that writes, whose locks let it in: it must be refused by name."""
    refused: list[str] = []
    with forebay.open(tmp_path / "log") as log:
        topic = log.create_topic("rocks", engine="rocksdb")
        shard = inside(topic).shard(0)
        assert isinstance(shard, RocksShard)
        topic.append(b"before")
        publish = shard._publish

        def interrupted(*args: object, **named: object) -> None:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGUSR1)
            publish(*args, **named)  # type: ignore[arg-type]

        def answer(number: int, frame: object) -> None:
            for act in (lambda: topic.append(b"inside"), shard.commit, lambda: shard.delete(DeleteKey(b"k")), close):
                with pytest.raises((Unavailable, Indeterminate)) as caught:
                    act()
                refused.append(type(caught.value).__name__)

        close = inside(log).rocksdb.close
        monkeypatch.setattr(shard, "_publish", interrupted)
        before = signal.signal(signal.SIGUSR1, answer)
        try:
            assert topic.append(b"outside") == 1
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert refused == ["Indeterminate", "Unavailable", "Unavailable", "Unavailable"]
        assert topic.append(b"behind") == 3
        assert values(topic.read()) == [b"before", b"outside", b"inside", b"behind"]


def test_a_database_that_was_lost_is_a_conflict_and_no_new_beginning(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log") as log:
        log.create_topic("rocks", engine="rocksdb").append(b"v")
    (tmp_path / "log" / "rocksdb").rename(tmp_path / "elsewhere")

    for _ in range(2):
        with forebay.open(tmp_path / "log") as log, pytest.raises(Conflict, match="was lost.*restore"):
            log.topic("rocks").append(b"w")
    (tmp_path / "log" / "rocksdb").rename(tmp_path / "empty")
    (tmp_path / "elsewhere").rename(tmp_path / "log" / "rocksdb")
    with forebay.open(tmp_path / "log") as log:
        assert log.topic("rocks").append(b"w") == 1


def test_without_the_package_the_refusal_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.engines.rocksdb.database.find_spec", lambda name: None)
    with forebay.open(tmp_path / "log") as log:
        with pytest.raises(Unsupported, match=r'install "forebay\[rocksdb\]"'):
            log.create_topic("rocks", engine="rocksdb")
        assert log.topics() == []


def test_the_worker_that_syncs_the_database_shows_how_it_fares(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", {"wal": {"sync_interval_ms": 20}}) as log:
        topic = log.create_topic("t", engine="rocksdb")
        for _ in range(2):
            topic.append(b"v")
        until(lambda: topic.offsets().durable == 2)

        until(lambda: [status.steps >= 1 for status in log.workers() if status.name == "forebay-rocksdb"] == [True])
