"""How many files a log has open, counted in processes of their own: whatever is used, and however little is allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.disk import SystemDisk, machine
from tests.storage.rig import QUICK, wal_of
from tests.support.soak import SOAK
from tests.support.waiting import until

BESIDE = 24
"""What a process has open beside log files: standard streams, the metadata store, locks; one directory per thread."""


def burst(path: Path, **asked: object) -> dict[str, Any]:
    """Topics appended to three times each by threads, beside readers; what the process saw."""
    command = [sys.executable, "-m", "tests.storage.children", "burst", str(path), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["disk", "fsync"])
@pytest.mark.proves("I37")
def test_descriptors_stay_within_their_setting_under_a_burst(tmp_path: Path, durability: str) -> None:
    found = burst(tmp_path, topics=25, threads=8, durability=durability, descriptors_max=8)

    assert found["errors"] == []
    assert found["most"] <= 8 + BESIDE
    assert found["records"] == [3] * 25


@pytest.mark.slow
def test_appends_go_on_where_the_process_may_open_few_files(tmp_path: Path) -> None:
    found = burst(tmp_path, topics=40, threads=8, durability="disk", descriptors_max=128, allowed=64)

    assert found["errors"] == []
    assert found["most"] <= 64 // 2 + BESIDE
    assert found["records"] == [3] * 40


@pytest.mark.slow
def test_appends_go_on_where_the_program_has_taken_every_other_descriptor(tmp_path: Path) -> None:
    found = burst(tmp_path, topics=30, threads=8, durability="disk", descriptors_max=128, allowed=64, hoard=True)

    assert found["errors"] == []
    assert found["hoarded"] > 0
    assert found["records"] == [3] * 30


@pytest.mark.slow
def test_hundreds_of_topics_stay_within_their_setting(tmp_path: Path) -> None:
    topics = 800 if SOAK else 200
    found = burst(tmp_path, topics=topics, threads=8, durability="disk", descriptors_max=128)

    assert found["errors"] == []
    assert found["most"] <= 128 + BESIDE
    assert found["records"] == [3] * topics


@pytest.mark.slow
def test_many_topics_that_take_turns_need_no_sync_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"wal": {"free_bytes_min": 0}, "runtime": {"maintenance_interval_ms": 60_000}}
    with forebay.open(tmp_path, settings) as log:
        topics = [log.create_topic(f"t{number}") for number in range(150)]
        for topic in topics:
            topic.append(b"first")
        flushed: list[int] = []
        monkeypatch.setattr(machine, "flush", flushed.append)

        for topic in topics * 2:
            topic.append(b"again")

        assert flushed == []
        monkeypatch.undo()


def test_a_file_whose_sync_for_room_fails_is_not_called_durable_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reported it to the sync that made room, and reports it to no other."""
    real, failed = machine.flush, list[str]()
    monkeypatch.setattr(SystemDisk, "sync_filesystem", lambda disk, path: pytest.fail("one file at a time"))
    settings = {
        **QUICK,
        "runtime": {"descriptors_max": 8, "shards_syncfs_min": 1000, "maintenance_interval_ms": 60_000},
    }
    with forebay.open(str(tmp_path), settings) as log:
        topics = [log.create_topic(f"t{number}") for number in range(30)]
        for topic in topics:
            topic.append(b"first")
        for topic in topics:
            topic.flush()
        victim = topics[0]
        victim.append(b"second")
        active = wal_of(victim).writer.active
        assert active is not None and victim.offsets().durable == 1

        def flush(fd: int) -> None:
            if Path(f"/proc/self/fd/{fd}").readlink() == Path(active.path) and not failed:
                failed.append(active.path)
                raise OSError(5, "write-back failed")
            real(fd)

        monkeypatch.setattr(machine, "flush", flush)
        for topic in topics[1:]:
            topic.append(b"second")
        assert failed == [active.path]
        assert victim.offsets().durable == 1
        with pytest.raises(forebay.Unavailable, match="write-back failed"):
            victim.flush()
        assert victim.offsets().durable == 1

        until(lambda: _flushed(victim))

        assert wal_of(victim).writer.active is not active
        assert victim.offsets().durable == 2
        assert [record.value for record in victim.read(forebay.EARLIEST)] == [b"first", b"second"]


def _flushed(topic: forebay.Topic) -> bool:
    try:
        topic.flush()
    except forebay.Unavailable:
        return False
    return True
