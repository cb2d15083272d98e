"""Reading beside an owner, or without one: what is shown when `live` is missing, and what a reader holds and needs."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import forebay
from forebay.disk import Disk, SystemDisk
from forebay.storage import Storage
from forebay.testing.simulated.clock import ManualClock
from forebay.wal import readonly
from tests.storage.rig import QUICK, WatchedDisk, quick, values

MARKED_RARELY = quick(mark_interval_ms=600_000, sync_interval_ms=600_000)


@contextmanager
def beside(path: Path, disk: Disk | None = None) -> Iterator[Storage]:
    """The log as a reader has it, whose waiting takes no time."""
    with Storage.open(path, MARKED_RARELY, read_only=True, disk=disk or SystemDisk(), clock=ManualClock()) as log:
        yield log


def forget_published(path: Path) -> None:
    for live in path.glob("shards/*/live"):
        live.unlink()


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A directory with ten records that was closed in order."""
    path = tmp_path / "closed"
    with forebay.open(path, QUICK) as log:
        log.create_topic("t").append_many([b"v"] * 10)
    return path


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A directory as its owner's death leaves it: three records, of which nothing says that they are durable."""
    path, living = tmp_path / "killed", tmp_path / "living"
    with Storage.open(living, MARKED_RARELY) as log:
        log.create_topic("t").append_many([b"v"] * 3)
        shutil.copytree(living, path)
    return path


def test_without_live_all_of_a_clean_stop_is_read_beside_an_owner_that_has_not_used_the_topic(closed: Path) -> None:
    """It was answered as empty."""
    forget_published(closed)

    with forebay.open(closed, QUICK) as owner, beside(closed) as log:
        assert log.topic("t").offsets().next == 10
        assert len(list(log.topic("t").read())) == 10
        owner.topic("t").append(b"next")
        assert len(list(log.topic("t").read())) == 11


def test_what_no_owner_has_published_and_nothing_proves_durable_is_unavailable_and_not_absent(killed: Path) -> None:
    forget_published(killed)

    with Storage.open(killed, MARKED_RARELY) as owner, beside(killed) as log:
        with pytest.raises(forebay.Unavailable, match="its owner has not published yet"):
            list(log.topic("t").read())
        owner.topic("t").offsets()
        assert len(list(log.topic("t").read())) == 3


def test_a_reader_that_knows_an_end_keeps_it_while_nothing_is_published(tmp_path: Path) -> None:
    with Storage.open(tmp_path, MARKED_RARELY) as owner, beside(tmp_path) as log:
        topic, seen = owner.create_topic("t", durability="fsync"), log.topic("t")
        assert seen.offsets().next == 0
        topic.append(b"0")
        live = next(tmp_path.glob("shards/*/live"))
        aside = live.rename(tmp_path / "aside")
        assert seen.offsets().next == 0
        aside.rename(live)
        assert seen.offsets().next == 1
        live.rename(aside)
        topic.append(b"1")
        assert seen.offsets().next == 1
        assert values(seen.read()) == [b"0"]
        aside.rename(live)
        assert values(seen.read()) == [b"0", b"1"]


def test_a_reader_does_not_take_another_that_asks_at_the_same_time_for_an_owner(killed: Path) -> None:
    """Records vanished while a second process was reading."""
    forget_published(killed)

    with (killed / "lock").open("rb") as other, beside(killed) as log:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert len(list(log.topic("t").read())) == 3


def test_a_reader_opens_nothing_for_writing(closed: Path) -> None:
    disk = WatchedDisk()

    with beside(closed, disk) as log:
        assert len(list(log.topic("t").read())) == 10

    assert disk.calls["is_locked"]
    assert not {"lock", "create", "write", "rename", "unlink"} & set(disk.calls)


def test_a_directory_that_may_not_be_looked_at_is_unavailable_to_every_question(closed: Path) -> None:
    disk = WatchedDisk()

    def refuse(kind: str, path: str) -> None:
        if kind == "is_locked":
            raise PermissionError(13, "Permission denied", path)

    with beside(closed, disk) as log:
        topic = log.topic("t")
        disk.meet = refuse
        with pytest.raises(forebay.Unavailable, match=r"Permission denied.*lock.*check its permissions"):
            topic.offsets()
        with pytest.raises(forebay.Unavailable, match="check its permissions"):
            topic.read()
        with pytest.raises(forebay.Unavailable, match="check its permissions"):
            topic.offset_at_time(0)
        disk.meet = lambda kind, path: None
        assert len(list(topic.read())) == 10


def test_a_reader_holds_no_more_descriptors_than_there_are_files_and_closing_gives_all_back(tmp_path: Path) -> None:
    disk = SystemDisk()
    with Storage.open(tmp_path, MARKED_RARELY) as owner:
        topic = owner.create_topic("t")
        with beside(tmp_path, disk) as log:
            for number in range(8):
                topic.append(b"before")
                topic.rotate()
                topic.append(b"after")
                assert len(list(log.topic("t").read())) == 2 * number + 2
                assert disk.descriptors_open <= len(list(tmp_path.glob("shards/*/*.seg")))
        assert disk.descriptors_open == 0


def test_a_file_that_does_not_hold_what_was_published_is_not_kept_open(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readonly, "CHANGING_SECONDS", 0.0)
    disk = SystemDisk()
    segment = next(killed.glob("shards/*/*.seg"))
    segment.write_bytes(segment.read_bytes()[:-1])

    with Storage.open(killed, MARKED_RARELY), beside(killed, disk) as log:
        with pytest.raises(forebay.Unavailable, match="changed for 0 s"):
            log.topic("t").offsets()
        assert disk.descriptors_open == 0


@pytest.mark.parametrize("read_only", [False, True])
def test_opening_and_closing_again_and_again_holds_no_descriptor(closed: Path, read_only: bool) -> None:  # noqa: FBT001
    """Each owner left the one by which it synced the file system."""
    before = set(os.listdir("/dev/fd"))

    for _ in range(3):
        with forebay.open(closed, QUICK, read_only=read_only) as log:
            if not read_only:
                log.topic("t").append(b"v")
            assert len(list(log.topic("t").read())) >= 10

    assert set(os.listdir("/dev/fd")) == before


def test_an_opening_that_fails_holds_no_descriptor(closed: Path) -> None:
    (closed / "metadata.sqlite").write_bytes(b"")
    before = set(os.listdir("/dev/fd"))

    with pytest.raises(forebay.Corrupt):
        forebay.open(closed, QUICK)

    assert set(os.listdir("/dev/fd")) == before
