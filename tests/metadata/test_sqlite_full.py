"""A database on a disk that fills: a reserve file is given up for its next changes, so that there is a way out."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.errors import Unavailable
from forebay.metadata import Put
from forebay.metadata.sqlite import SqliteMetadata, reserve
from tests.support.waiting import PATIENCE


class SmallDisk(SystemDisk):
    """The machine's disk, with as much room as the test says. The reserve gives room back when it is removed."""

    free = 100 * reserve.RESERVE_BYTES
    is_full = False

    def free_bytes(self, path: str) -> int:
        return 0 if self.is_full else self.free

    def unlink(self, path: str) -> None:
        super().unlink(path)
        if path.endswith(reserve.SUFFIX):
            self.is_full = False


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    disk = SmallDisk()

    class Connection(sqlite3.Connection):
        """Says that the disk is full, as SQLite does, to each change."""

        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            if disk.is_full and sql.split(maxsplit=1)[0] in ("INSERT", "UPDATE", "DELETE", "REPLACE"):
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            return super().execute(sql, *arguments)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
    yield disk


def opened(path: Path, disk: SmallDisk) -> SqliteMetadata:
    return SqliteMetadata(str(path / "m.sqlite"), disk=disk, clock=SystemClock())


def put(store: SqliteMetadata, key: str) -> None:
    assert store.transaction([], [Put(f"/{key}", b"v")]).succeeded


def test_the_reserve_is_given_up_for_a_change_and_made_again_when_there_is_room(
    tmp_path: Path, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / f"m.sqlite{reserve.SUFFIX}"
    store = opened(tmp_path, disk)
    assert file.stat().st_size == reserve.RESERVE_BYTES
    put(store, "a")

    disk.is_full = True
    put(store, "b")
    assert not file.exists() and "was given up" in caplog.text
    disk.is_full = True
    with pytest.raises(Unavailable, match="full"):
        put(store, "c")
    store.close()

    disk.is_full = False
    store = opened(tmp_path, disk)
    assert file.stat().st_size == reserve.RESERVE_BYTES
    assert [entry.key for entry in store.range("/")] == ["/a", "/b"]
    store.close()


def test_a_database_is_opened_and_a_session_begun_on_a_full_disk(tmp_path: Path, disk: SmallDisk) -> None:
    store = opened(tmp_path, disk)
    put(store, "a")
    store.close()
    disk.is_full = True

    store = opened(tmp_path, disk)
    session = store.session(10)
    put(store, "b")
    assert store.session_alive(session.id)
    store.close()
    assert not (tmp_path / f"m.sqlite{reserve.SUFFIX}").exists()


def test_where_space_is_not_scarce_or_already_gone_there_is_no_reserve(tmp_path: Path, disk: SmallDisk) -> None:
    for free in (reserve.SCARCE_BYTES, 3 * reserve.RESERVE_BYTES):
        disk.free = free
        opened(tmp_path, disk).close()
        assert not (tmp_path / f"m.sqlite{reserve.SUFFIX}").exists()


FILLED = dedent(
    """
    import os, pathlib, subprocess, sys
    import forebay

    root = pathlib.Path(sys.argv[1])
    is_small = os.statvfs(root).f_blocks * os.statvfs(root).f_frsize < 2**25
    settings = {"wal": {"free_bytes_min": 4 << 20 if is_small else 0, "rotate_bytes_max": 4 << 20}}
    log = forebay.open(root / "data", settings)
    log.create_topic("small").append(b"x")
    topic = log.create_topic("large")
    for _ in range(30):
        try:
            topic.append_many([os.urandom(1000)] * 500)
        except forebay.Unavailable:
            break
    if is_small:
        with open(root / "other", "wb", buffering=0) as other:
            try:
                while other.write(bytes(512)):
                    pass
            except OSError:
                pass
        doctor = [sys.executable, "-m", "forebay", "doctor", "--data", str(root / "data"), "--json"]
        said = subprocess.run(doctor, capture_output=True, text=True)
        assert '"orphans"' in said.stdout and "Traceback" not in said.stderr, said
    log.delete_topic("small")
    log.close()
    log = forebay.open(root / "data", settings)
    log.delete_topic("large")
    assert log.topics() == []
    log.create_topic("next").append(b"x")
    log.close()
    print("small" if is_small else "large")
    """
)


@pytest.mark.slow
def test_topics_are_deleted_and_a_log_is_opened_on_a_full_disk(tmp_path: Path) -> None:
    """On a file system of 24 MiB where this user may mount one; else on the machine's, where it is not full."""
    child = [sys.executable, "-c", FILLED, str(tmp_path)]
    mount = f"mount -t tmpfs -o size=24m tmpfs {tmp_path}"
    alone = [shutil.which("unshare") or "unshare", "-Urm", "sh", "-c"]
    can_mount = shutil.which("unshare") is not None and not subprocess.run([*alone, mount], check=False).returncode
    command = [*alone, f'{mount} && exec "$@"', "sh", *child] if can_mount else child

    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)

    assert (said.returncode, said.stdout.strip()) == (0, "small" if can_mount else "large"), said.stderr
